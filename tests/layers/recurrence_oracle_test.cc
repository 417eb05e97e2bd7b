// mamba2 and linear against values that others' code computed (tests/oracle/make_recurrences.py),
// forward and every gradient.
#include "tests/layers/mixer_checks.h"
#include "tests/layers/oracle.h"

namespace tessera::testing {
namespace {

using Json = nlohmann::json;

void expect_oracle(const Json& stored, const Layer& layer) {
  const std::int64_t length = stored["settings"]["length"], width = stored["settings"]["width"];
  const TestBatch batch(1, length, 2);
  LayerRun run(layer, batch, width);
  const std::vector<ParameterSpec> specs = layer.parameters();
  fill(run.in(), stored["inputs"]["x"]);
  fill(run.d_out(), stored["d_out"]);
  ASSERT_EQ(stored["inputs"].size(), specs.size() + 1);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    fill(run.parameters[i], stored["inputs"].at(specs[i].name));
  }
  run.forward();
  run.backward();
  const std::int64_t terms = 6 * width + 2 * length;
  expect_close("out", run.out(), array_of(stored["out"]), terms);
  expect_close("d_in", run.d_in(), array_of(stored["gradients"]["x"]), terms);
  // What scales a head's outputs is taken out by the norm: the terms of the gradients of steps and
  // rates, as large as those of the norm's weight, cancel.
  const double norm_terms = largest(array_of(stored["gradients"]["norm.weight"]));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    expect_close("d_" + specs[i].name, run.d_parameters[i],
                 array_of(stored["gradients"].at(specs[i].name)), terms + length,
                 specs[i].full_precision ? norm_terms : 0.0);
  }
}

void expect_mamba2(const std::string& name) {
  const Json stored = read_oracle(name);
  const Json& s = stored["settings"];
  const auto text = [&](const std::string& key) { return std::to_string(s[key].get<int>()); };
  expect_oracle(stored, *make_from_text("mamba2",
                                        "head_width: " + text("head_width") + " state_width: " +
                                            text("state_width") + " groups: " + text("groups"),
                                        s["width"]));
}

TEST(Oracle, Mamba2) { expect_mamba2("mamba2"); }
TEST(Oracle, Mamba2InGroupsOverSeveralChunks) { expect_mamba2("mamba2_long"); }

TEST(Oracle, LinearRecurrence) {
  const Json stored = read_oracle("linear");
  const Json& s = stored["settings"];
  const auto text = [&](const std::string& key) { return std::to_string(s[key].get<int>()); };
  expect_oracle(stored, *make_from_text("linear",
                                        "attention { heads: " + text("heads") +
                                            " key_value_heads: " + text("key_heads") +
                                            " head_width: " + text("head_width") + " }",
                                        s["width"]));
}

}  // namespace
}  // namespace tessera::testing
