#include "launch/audit_certificate.h"

#include <cstdio>

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  return text;
}

std::string layer_name(const AuditResult& result, std::int64_t layer) {
  return "layer " + std::to_string(layer) + " (" +
         result.layers[static_cast<std::size_t>(layer)].mixer + ")";
}

std::string list(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const std::int64_t value : values) {
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  }
  return text;
}

std::string list(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) text += (text.empty() ? "" : ", ") + value;
  return text;
}

std::string what_leaks(const AuditOnset& onset) {
  const std::string position = "position " + std::to_string(onset.delta.position) +
                               " changes with token " + std::to_string(onset.delta.changed);
  return position + (onset.across_documents && onset.delta.position > onset.delta.changed
                         ? ", which another document holds"
                         : ", a later one");
}

Json delta_json(const AuditDelta& delta) {
  if (delta.changed < 0) return nullptr;
  return {{"delta", delta.largest}, {"changed", delta.changed}, {"position", delta.position}};
}

}  // namespace

std::string verdict_line(const AuditResult& result) {
  const std::string control = std::to_string(result.localised) + "/" +
                              std::to_string(result.control.size()) +
                              " injected faults found in their layer";
  switch (result.verdict) {
    case AuditVerdict::kClean:
      return std::string("clean: ") +
             (result.sweep ? "differences are noise, which doesn't grow with the change; "
                           : "every difference is exactly 0; ") +
             control;
    case AuditVerdict::kLeak:
      return "leak: " + layer_name(result, result.onset->layer) + ": " + what_leaks(*result.onset) +
             ", by " + number(result.onset->delta.largest);
    case AuditVerdict::kInconclusive:
      return "inconclusive: no leak was found, but only " + control +
             ", so that one could have been missed";
  }
  return "";
}

Json certificate_json(const AuditedModel& model, const AuditResult& result) {
  const AuditPlan& plan = result.plan;
  Json json;
  json["verdict"] = name_of(result.verdict);
  json["summary"] = verdict_line(result);
  json["config"] = model.config;
  if (model.checkpoint.empty()) {
    json["checkpoint"] = nullptr;
    json["seed"] = model.seed;
  } else {
    json["checkpoint"] = model.checkpoint;
    json["step"] = model.step;
  }
  json["parameters"] = model.parameters;
  json["precision"] = "f32";
  json["threshold"] = kAuditThreshold;
  json["length"] = plan.length;
  json["trained_length"] = model.length;
  json["sizes"] = Json::array();
  for (const AuditSize& size : plan.sizes) {
    json["sizes"].push_back({{"name", size.name},
                             {"positions", size.positions},
                             {"mixers", size.mixers},
                             {"counts", size.counts}});
  }
  json["positions"] = plan.positions;
  json["documents"] = {{"starts", plan.starts}, {"positions", plan.in_document}};
  json["layers"] = Json::array();
  for (std::size_t l = 0; l < result.layers.size(); ++l) {
    const AuditLayer& layer = result.layers[l];
    json["layers"].push_back({{"layer", l},
                              {"mixer", layer.mixer},
                              {"delta", layer.time.largest},
                              {"document_delta", layer.document.largest}});
  }
  json["onset"] = nullptr;
  if (result.onset) {
    json["onset"] = {{"layer", result.onset->layer},
                     {"mixer", result.layers[static_cast<std::size_t>(result.onset->layer)].mixer},
                     {"across", result.onset->across_documents ? "documents" : "time"}};
    json["onset"].update(delta_json(result.onset->delta));
  }
  json["control"] = {{"injected", result.control.size()},
                     {"localised", result.localised},
                     {"faults", Json::array()}};
  for (const AuditInjection& injection : result.control) {
    Json line = {{"fault", name_of(injection.fault)},
                 {"layer", injection.layer},
                 {"mixer", result.layers[static_cast<std::size_t>(injection.layer)].mixer},
                 {"delta", injection.largest}};
    line["onset"] = injection.onset < 0 ? Json(nullptr) : Json(injection.onset);
    line["localised"] = injection.localised();
    json["control"]["faults"].push_back(line);
  }
  json["sweep"] = nullptr;
  if (result.sweep) {
    json["sweep"] = {{"layer", result.sweep->layer},
                     {"across", result.sweep->across_documents ? "documents" : "time"},
                     {"changed", result.sweep->changed},
                     {"epsilon", result.sweep->epsilon},
                     {"delta", result.sweep->delta},
                     {"slope", result.sweep->slope},
                     {"grows", result.sweep->grows()}};
  }
  return json;
}

std::string certificate_page(const AuditedModel& model, const AuditResult& result) {
  const AuditPlan& plan = result.plan;
  std::string page = "# Causal audit of " + model.config + "\n\n**" + verdict_line(result) +
                     ".**\n\n| | |\n| --- | --- |\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    page += "| " + name + " | " + value + " |\n";
  };
  row("parameters", std::to_string(model.parameters) +
                        (model.checkpoint.empty()
                             ? ", drawn from seed " + std::to_string(model.seed)
                             : " of " + model.checkpoint + ", step " + std::to_string(model.step)));
  row("precision", "f32 throughout");
  row("threshold", number(kAuditThreshold));
  row("length",
      std::to_string(plan.length) + " positions" +
          (model.length > 0 ? " (the model is trained at " + std::to_string(model.length) + ")"
                            : std::string()));
  row("changed tokens",
      std::to_string(plan.positions.size()) + " positions, each in a sequence of its own");
  row("documents", "starts " + list(plan.starts) + "; changed tokens " + list(plan.in_document));
  page +=
      "\nTwo sequences equal but for one token at p, the residual after every block compared: "
      "the largest difference over the positions before p (delta), and, with the sequence cut "
      "into documents, over those before p and in other documents.\n\n## Sizes of the model\n\n"
      "| size | positions | mixers |\n| --- | ---: | --- |\n";
  for (const AuditSize& size : plan.sizes) {
    page += "| " + size.name + " | " + std::to_string(size.positions) + " | " + list(size.mixers) +
            (size.counts ? "" : " (longer than the model's sequences)") + " |\n";
  }
  page += "\nThe length is above each of them that the model's sequences reach. Changed: " +
          list(plan.positions) +
          ".\n\n## Layers\n\n| layer | mixer | delta | across documents |\n| ---: | --- | ---: | "
          "---: |\n";
  for (std::size_t l = 0; l < result.layers.size(); ++l) {
    const AuditLayer& layer = result.layers[l];
    page += "| " + std::to_string(l) + " | " + layer.mixer + " | " + number(layer.time.largest) +
            " | " + number(layer.document.largest) + " |\n";
  }
  page += "\n## Positive control\n\nThe same model with one fault in one mixer's output: " +
          std::to_string(result.localised) + " of " + std::to_string(result.control.size()) +
          " were found in the very layer they were in.\n\n| fault | layer | mixer | delta | found "
          "in |\n| --- | ---: | --- | ---: | --- |\n";
  for (const AuditInjection& injection : result.control) {
    page += std::string("| ") + name_of(injection.fault) + " | " + std::to_string(injection.layer) +
            " | " + result.layers[static_cast<std::size_t>(injection.layer)].mixer + " | " +
            number(injection.largest) + " | " +
            (injection.onset < 0     ? "**nowhere**"
             : injection.localised() ? "layer " + std::to_string(injection.onset)
                                     : "**layer " + std::to_string(injection.onset) + "**") +
            " |\n";
  }
  page += "\n## Sweep\n\n";
  if (!result.sweep) {
    page += "Not needed: every difference is exactly 0.\n";
    return page;
  }
  const AuditSweep& sweep = *result.sweep;
  page += "The embedding of token " + std::to_string(sweep.changed) +
          " moved by eps of the way to another token's; the difference after " +
          layer_name(result, sweep.layer) + " grows with slope " + number(sweep.slope) +
          " (log-log): " +
          (sweep.grows() ? "it flows from the change" : "it doesn't follow the change") +
          ".\n\n| eps | delta |\n| ---: | ---: |\n";
  for (std::size_t i = 0; i < sweep.epsilon.size(); ++i) {
    page += "| " + number(sweep.epsilon[i]) + " | " + number(sweep.delta[i]) + " |\n";
  }
  return page;
}

}  // namespace tessera
