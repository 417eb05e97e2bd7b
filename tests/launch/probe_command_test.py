#!/usr/bin/env python3
"""`probe` as a user starts it: a small latent mixture of experts is trained for a few steps, and its
checkpoint probed."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "ranks"))
import harness  # noqa: E402
from harness import run  # noqa: E402

NARROW, WIDE = "4,16,10,14", "2,8,16,17"
CONFIG = """
model {{
  width: 24 vocabulary: 257
  schedule {{ homogeneous {{ type: "full" layers: 4 }} }}
  mixer {{ full {{ heads: 2 key_value_heads: 1 head_width: 12 }} }}
  feed_forward {{ width: 40 }}
{ranges}
}}
data {{ recipe: "{data}/recipe.textproto" directory: "{data}/shards" document_masking: true }}
train {{ global_batch: 4 micro_batch: 2 steps: 6 seed: 3 }}
optim {{ learning_rate: 3e-3 warmup_steps: 2 schedule: COSINE }}
"""


def probe(*arguments, expect=0, ranks=0):
    command = [harness.TESSERA, "probe", *arguments]
    if ranks:
        command = harness.MPIRUN + ["-n", str(ranks)] + command
    return run(command, expect=expect)


def allocate(*arguments, expect=0):
    return probe("allocate", "--narrow", NARROW, "--wide", WIDE, "--shared", "9", *arguments,
                 expect=expect)


def trained():
    """The checkpoint of a two-regime model that `allocate` made the ranges of."""
    folder = os.path.join(harness.FOLDER, "trained")
    if not os.path.isdir(folder):
        answer = json.loads(allocate("--width", "24", "--layers", "1,3", "--narrow-blocks", "1",
                                     "--json").stdout)
        assert answer["models"][0]["name"] == "two_regime", answer["models"][0]
        path = os.path.join(harness.FOLDER, "latent.textproto")
        harness.write(path, CONFIG.format(data=harness.make_data(),
                                          ranges="\n".join(answer["models"][0]["config"])))
        harness.train(path, folder, ranks=2)
    return harness.last_checkpoint(folder)


def test_id_of_a_trained_model():
    checkpoint = trained()
    chart = os.path.join(harness.FOLDER, "id.svg")
    found = json.loads(probe("id", "--checkpoint", checkpoint, "--tokens", "200", "--json",
                             "--svg", chart).stdout)
    assert [block["layer"] for block in found["blocks"]] == [1, 2, 3], found
    # 8 held-out windows of 48 positions: more than 8 positions of each are looked at.
    assert (found["windows"], found["tokens"], found["source"]) == (8, 200, "held-out windows")
    for block in found["blocks"]:
        assert block["points"] == 200
        assert block["used"] == 200 - block["duplicates"] - block["ties"] >= 100, block
        assert 0.5 < block["likelihood"] < 24 and 0.5 < block["line_fit"] < 24, block
        error = block["likelihood"] / block["used"] ** 0.5
        assert abs(block["standard_error"] - error) < 1e-12, block
    with open(chart, encoding="utf-8") as file:
        text = file.read()
    assert text.startswith("<svg ") and text.count("<circle") == 6, text
    # The same on two threads; other tokens with another seed; a table without --json.
    again = probe("id", "--checkpoint", checkpoint, "--tokens", "200", "--json", "--set",
                  "execution.threads=2")
    assert json.loads(again.stdout) == found
    other = json.loads(probe("id", "--checkpoint", checkpoint, "--tokens", "200", "--json",
                             "--seed", "1").stdout)
    assert other["blocks"] != found["blocks"]
    table = probe("id", "--checkpoint", checkpoint, "--tokens", "200").stdout
    assert f"{found['blocks'][0]['likelihood']:.3f}" in table, table
    all_of_them = json.loads(probe("id", "--checkpoint", checkpoint, "--json").stdout)
    assert all_of_them["tokens"] == 8 * 48, all_of_them


def test_rank_of_a_trained_model():
    checkpoint = trained()
    chart = os.path.join(harness.FOLDER, "rank.svg")
    found = json.loads(probe("rank", "--checkpoint", checkpoint, "--tokens", "20", "--json",
                             "--svg", chart).stdout)
    assert found["control"] == {"cases": 33, "recovered": 33}, found
    assert found["published"] == {"local": [0.909, 1.0], "mixture": [0.931, 0.994]}, found
    shapes = [(b["active"], b["experts"], b["latent"], b["inner"], b["capacity"], b["pairs"])
              for b in found["blocks"]]
    assert shapes == [(4, 16, 10, 14, 10, 80), (2, 8, 16, 17, 16, 40), (2, 8, 16, 17, 16, 40)]
    for block in found["blocks"]:
        for ranks in (block["local"], block["mixture"]):
            assert 0 < ranks["least"] <= ranks["mean"] <= ranks["most"] <= 1, block
    table = probe("rank", "--checkpoint", checkpoint, "--tokens", "20").stdout
    assert "published" in table and "33/33" in table, table
    assert os.path.getsize(chart) > 1000


def test_what_cant_be_probed_is_refused():
    checkpoint = trained()
    done = probe("id", "--checkpoint", checkpoint, "--tokens", "5", expect=2)
    assert "layer 1: an intrinsic dimension needs at least 10 points" in done.stderr, done.stderr
    done = probe("rank", "--checkpoint", checkpoint, "--set",
                 "model.feed_forward_range[0].feed_forward.experts.active=3", expect=2)
    assert "experts.active" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = probe("id", "--checkpoint", checkpoint + "x", expect=4)
    assert done.stderr.count("\n") == 1, done.stderr
    done = probe("id", "--checkpoint", checkpoint, ranks=2, expect=2)
    assert done.stderr.count("tessera: ") == 1 and "as one process" in done.stderr, done.stderr
    done = probe("id", "--checkpoint", checkpoint, "--set", "execution.memory_limit_bytes=100000",
                 expect=2)
    assert "execution.memory_limit_bytes" in done.stderr, done.stderr
    # A model without experts.
    folder = harness.new_folder("dense")
    harness.train(harness.make_config(steps=2), folder)
    done = probe("id", "--checkpoint", harness.last_checkpoint(folder), expect=2)
    assert "no layer has experts" in done.stderr, done.stderr


def test_allocate_by_a_profile():
    path = os.path.join(harness.FOLDER, "profile.json")

    def profile(values):
        harness.write(path, json.dumps({"width": 24, "blocks": [
            {"layer": layer, "likelihood": value, "standard_error": 0.3, "line_fit": value + 1}
            for layer, value in enumerate(values, start=2)]}))
        return json.loads(allocate("--profile", path, "--json").stdout)

    found = profile([3.0, 4.0, 6.0, 7.0, 5.5])
    assert found["narrow_blocks"] == 2 and found["layers"] == [2, 3, 4, 5, 6], found
    assert [model["blocks"] for model in found["models"]][:5] == [
        "nnwww", "nnnnn", "wwwww", "wwnnn", "wwwnn"], found
    # 5.5 - 4 over sqrt(2) 0.3
    assert found["split"].startswith("after block 2, 4.000 below 5.500, 3.5 standard errors"), found
    assert found["models"][0]["config"][0].startswith("feed_forward_range { first: 2 last: 3 ")
    none = profile([6.0, 5.0, 4.0, 3.0, 2.0])
    assert none["narrow_blocks"] is None and len(none["models"]) == 2, none
    table = allocate("--profile", path).stdout
    assert "no shallow prefix lies below the rest" in table, table
    # Of a real profile: whatever it says, it is read.
    real = probe("id", "--checkpoint", trained(), "--tokens", "200", "--json").stdout
    harness.write(path, real)
    assert json.loads(allocate("--profile", path, "--json").stdout)["layers"] == [1, 2, 3]


def test_what_cant_be_allocated_is_refused():
    path = os.path.join(harness.FOLDER, "broken.json")
    for text in ("", "{", "[]", '{"width": 24}', '{"width": 24, "blocks": [1]}',
                 '{"width": 24, "blocks": []}', '{"width": "x", "blocks": []}'):
        harness.write(path, text)
        done = allocate("--profile", path, expect=2)
        assert path in done.stderr and done.stderr.count("\n") == 1, (text, done.stderr)
    whole = ["--width", "24", "--layers", "1,3", "--narrow-blocks"]
    for arguments, what in (([], "--profile: required"),
                            (["--width", "24"], "--profile: required"),
                            (["--profile", "nowhere.json"], "nowhere.json: can't be read"),
                            ([*whole, "3"], "--narrow-blocks: must be below"),
                            (["--width", "24", "--layers", "3,1", "--narrow-blocks", "1"],
                             "--layers: "),
                            ([*whole, "1", "--narrow", "17,16,10,14"], "--narrow"),
                            ([*whole, "1", "--shared", "-1"], "--shared")):
        done = allocate(*arguments, expect=2)
        assert what in done.stderr and done.stderr.count("\n") == 1, (arguments, done.stderr)
    done = probe("allocate", *whole, "1", "--narrow", "17,16,10,14", "--wide", WIDE, "--shared",
                 "9", expect=2)
    assert "--narrow: a token can't use K = 17 of N = 16" in done.stderr, done.stderr
    for narrow, wide in ((NARROW, NARROW), (WIDE, NARROW)):  # neither is below the other
        done = probe("allocate", *whole, "1", "--narrow", narrow, "--wide", wide, "--shared", "9",
                     expect=2)
        assert "--narrow: its q = min(l, m) must be below" in done.stderr, done.stderr
    done = probe("allocate", *whole, "1", "--narrow", NARROW, "--wide", "2,90,16,17", "--shared",
                 "0", expect=2)
    assert "--wide: maps and router" in done.stderr, done.stderr


if __name__ == "__main__":
    harness.main(globals())
