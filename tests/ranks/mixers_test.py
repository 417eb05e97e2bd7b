"""Every type of mixer alone, and all seven of the flagship in a Latin square: the same bits on any
number of ranks and across stops, f32 and bf16; and the loss falls, but where nothing can be
learned."""
import math
import random

import harness as h

HEADS = "heads: 4 key_value_heads: 2 head_width: 8"
# Windows, blocks and strides that a sequence of 48 crosses several times.
NSA = f"""attention {{ {HEADS} }} compression {{ block_length: 8 block_stride: 4 inner_width: 12 }}
          selected_block_length: 8 selected_blocks: 3 window: 7"""
MIXERS = {
    "full": HEADS,
    "sliding": f"attention {{ {HEADS} }} window: 7",
    "differential": f"attention {{ {HEADS} query_key_norm: true }}",
    "linear": f"attention {{ {HEADS} }}",
    "mamba2": "head_width: 16 state_width: 12 groups: 1",
    "nsa": NSA,
    "compress": f"{HEADS} compression {{ block_length: 8 block_stride: 4 inner_width: 12 }}",
    "hybrid": f"nsa {{ {NSA} }} differential {{ attention {{ {HEADS} }} }}",
}
SOFTMAX = f"kind: GATED_SOFTMAX attention {{ {HEADS} }}"  # linear's other kind
LATIN = ["nsa", "differential", "full", "linear", "sliding", "compress", "hybrid"]


def config(name, schedule, mixers, steps, data=None):
    data = data or h.make_data()
    path = h.os.path.join(h.FOLDER, name + ".textproto")
    h.write(path, f"""
model {{
  width: 40 vocabulary: 257
  schedule {{ {schedule} }}
  {" ".join(f"mixer {{ {kind} {{ {text} }} }}" for kind, text in mixers)}
  feed_forward {{ width: 53 }}
}}
data {{ recipe: "{data}/recipe.textproto" directory: "{data}/shards" document_masking: true }}
train {{ global_batch: 14 micro_batch: 2 steps: {steps} seed: 3 }}
optim {{ learning_rate: 3e-3 warmup_steps: 2 schedule: COSINE }}
checkpoint {{ every: 2 keep_last: 100 }}
logging {{ progress_every: 1 }}
""")
    return path


def losses(folder):
    return [entry["loss"] for entry in h.metrics(folder) if "loss" in entry]


def check(name, path, steps, precision, ranks):
    sets = [f"train.precision={precision}"]
    reference = h.new_folder(name)
    h.train(path, reference, ranks=0, sets=sets)
    # The resolved config, defaults written out, is one itself.
    h.run([h.TESSERA, "plan", "--config", reference + "/config.textproto"])
    found = losses(reference)
    assert len(found) == steps and found[-1] < found[0] - 0.1, (name, found)
    for count in ranks:
        other = h.new_folder(f"{name}-{count}")
        h.train(path, other, count, sets=sets + [f"execution.threads={1 + count % 2}"])
        h.assert_same_run(other, reference)
    # Recomputed, stopped and resumed on other numbers of ranks.
    resumed = h.new_folder(name + "-resumed")
    for count, stop in ((3, 2), (1, steps - 1), (2, steps)):
        h.train(path, resumed, count, sets=sets + [f"train.stop_at_step={stop}",
                                                   "execution.recompute=true"])
    assert h.numbers(resumed) == h.numbers(reference), name
    h.assert_same_file(h.last_checkpoint(resumed), h.last_checkpoint(reference))


def test_each_type_alone():
    kinds = [(kind, kind, text) for kind, text in MIXERS.items()]
    for name, kind, text in [*kinds, ("gated_softmax", "linear", SOFTMAX)]:
        path = config(name, f'homogeneous {{ type: "{kind}" layers: 2 }}', [(kind, text)], 6)
        check(name, path, 6, "F32", [1, 2, 3, 8] if h.LONG else [3, 8])
        check(name + "-bf16", path, 6, "BF16", [1, 2, 3, 8] if h.LONG else [2])


def test_all_seven_in_a_latin_square():
    order = " ".join(f'order: "{kind}"' for kind in LATIN)
    path = config("latin", f"latin {{ {order} }}", [(kind, MIXERS[kind]) for kind in LATIN], 4)
    check("latin", path, 4, "F32", [1, 2, 3, 8])
    check("latin-bf16", path, 4, "BF16", [3])


def test_all_eight_in_a_row():
    order = " ".join(f'order: "{kind}"' for kind in MIXERS)
    path = config("eight", f"periodic {{ {order} layers: 8 }}", MIXERS.items(), 4)
    check("eight", path, 4, "F32", [5])


def test_b22_nothing_is_learned_of_random_tokens():
    """A layer that sees the token it predicts finds its way below the entropy within these steps."""
    symbols, steps = 64, 300
    folder = h.new_folder("random")
    h.os.makedirs(folder + "/sources")
    draw = random.Random(5)
    for i in range(10):  # more than the steps take
        text = "".join(chr(ord("0") + draw.randrange(symbols)) for _ in range(30000))
        h.write(f"{folder}/sources/{i}.txt", text)
    h.write(folder + "/recipe.textproto", """
name: "random" tokenizer: "byte" sequence_length: 48 total_tokens: 250000 seed: 7
component { name: "noise" weight: "1" source { glob: "*.txt" } }
""")
    h.run([h.TESSERA, "data", "build", "--recipe", folder + "/recipe.textproto", "--sources",
           folder + "/sources", "--out", folder + "/shards"])
    order = " ".join(f'order: "{kind}"' for kind in MIXERS)
    path = config("random", f"periodic {{ {order} layers: 8 }}", MIXERS.items(), steps, folder)
    h.train(path, folder + "/run", 2, sets=["checkpoint.every=0"])
    found = losses(folder + "/run")
    assert len(found) == steps
    assert min(found) > math.log(symbols) - 0.05, min(found)
    assert sum(found[-20:]) / 20 < math.log(symbols) + 0.05, found[-20:]  # it did learn the symbols


if __name__ == "__main__":
    h.main(globals())
