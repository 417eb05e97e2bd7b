"""25 experts on any number of ranks: the same bits wherever they are, across stops and changes of
layout; what metrics say of them; the audit of what was trained."""
import json

import harness as h

EXPERTS = """experts: 25 active: 4 width: 13 shared_width: 21 selection_bias: true
             auxiliary_coefficient: 0.01"""
LATENT = "experts: 7 active: 2 width: 10 capacity_factor: 1.1 latent { width: 16 norm: true }"
CONFIG = """
model {{
  width: 40 vocabulary: 257
  schedule {{ periodic {{ order: "full" order: "sliding" layers: 3 }} }}
  mixer {{ full {{ heads: 4 key_value_heads: 2 head_width: 10 query_key_norm: true }} }}
  mixer {{ sliding {{ attention {{ heads: 5 key_value_heads: 1 head_width: 8 }} window: 17 }} }}
  feed_forward {{ experts {{ {experts} }} }}
  feed_forward_range {{ first: 1 last: 1 feed_forward {{ experts {{ {latent} }} }} }}
}}
data {{ recipe: "{data}/recipe.textproto" directory: "{data}/shards" document_masking: true }}
train {{ global_batch: 14 micro_batch: {micro_batch} steps: {steps} seed: 3 }}
optim {{ learning_rate: 3e-3 warmup_steps: 2 schedule: COSINE }}
validation {{ every: 3 windows: 4 }}
checkpoint {{ every: 2 keep_last: 100 }}
logging {{ progress_every: 1 }}
"""
# (ranks, expert ranks, threads, more): every E of these ranks, uneven ones, both policies.
COVER = [
    (2, 2, 1, []),
    (3, 3, 2, ["parallel.accumulate=LOCAL"]),
    (4, 2, 1, ["execution.recompute=true"]),
    (4, 4, 2, ["parallel.gather=PER_STEP"]),
    (5, 5, 1, ["parallel.prefetch=false"]),
    (8, 4, 1, ["parallel.accumulate=LOCAL", "execution.recompute=true"]),
    (8, 1, 1, []),
]


def make_config(name="experts", steps=6, micro_batch=2, latent=LATENT):
    path = f"{h.FOLDER}/{name}.textproto"
    h.write(path, CONFIG.format(data=h.make_data(), steps=steps, micro_batch=micro_batch,
                                experts=EXPERTS, latent=latent))
    return path


def cover(precision):
    if not h.LONG:
        return COVER
    policies = [[], ["parallel.accumulate=LOCAL"], ["parallel.gather=PER_STEP"],
                ["execution.recompute=true", "parallel.prefetch=false"]]
    if precision == "BF16":
        policies = policies[:1]
    return [(ranks, e, threads, more)
            for ranks in (1, 2, 3, 4, 5, 8, 16) for e in range(1, ranks + 1) if ranks % e == 0
            for threads in (1, 2) for more in policies]


def reference(precision, micro_batch=2):
    folder = f"{h.FOLDER}/reference-{precision}-{micro_batch}"
    if not h.os.path.isdir(folder):
        h.train(make_config(f"experts-{micro_batch}", micro_batch=micro_batch), folder, 0,
                sets=[f"train.precision={precision}"])
        losses = [entry["loss"] for entry in h.metrics(folder) if "loss" in entry]
        assert losses[-1] < losses[0] - 0.1, losses
    return folder


def test_same_bits_wherever_the_experts_are():
    for precision in ("F32", "BF16"):
        for ranks, e, threads, more in cover(precision):
            folder = h.new_folder("cover")
            h.train(make_config("experts-2"), folder, ranks,
                    sets=more + [f"parallel.expert_ranks={e}", f"execution.threads={threads}",
                                 f"train.precision={precision}"])
            h.assert_same_run(folder, reference(precision))


def test_same_bits_with_other_micro_batches():
    for micro_batch, ranks, e in ((1, 4, 2), (7, 2, 2), (14, 3, 3)):
        folder = h.new_folder("micro")
        h.train(make_config(f"experts-{micro_batch}", micro_batch=micro_batch), folder, ranks,
                sets=[f"parallel.expert_ranks={e}"])
        h.assert_same_run(folder, reference("F32", micro_batch))


def test_B20_the_routers_losses_dont_depend_on_the_cut():
    steps = [h.metrics(reference("F32", micro_batch))[0] for micro_batch in (1, 2, 7, 14)]
    for step in steps[1:]:
        assert step["expert_load"] == steps[0]["expert_load"]
        for key in ("loss", "aux_loss", "z_loss", "grad_norm"):
            assert abs(step[key] - steps[0][key]) < 1e-6 * steps[0][key], (key, step, steps[0])


def test_B11_B13_resumed_on_other_ranks_and_expert_ranks():
    for precision in ("F32", "BF16"):
        folder = h.new_folder("resumed")
        for stop, ranks, e in ((1, 4, 2), (3, 2, 1), (4, 4, 4), (5, 3, 3), (6, 1, 1)):
            h.train(make_config("experts-2"), folder, ranks,
                    sets=[f"train.stop_at_step={stop}", f"parallel.expert_ranks={e}",
                          f"train.precision={precision}", "execution.recompute=true"])
        assert h.numbers(folder) == h.numbers(reference(precision))
        h.assert_same_file(h.last_checkpoint(folder), h.last_checkpoint(reference(precision)))


def test_fast_is_repeatable_and_close():
    fast = ["parallel.reduction=FAST", "parallel.expert_ranks=2"]
    folders = [h.new_folder("fast-1"), h.new_folder("fast-2")]
    for folder in folders:
        h.train(make_config("experts-2"), folder, 4, sets=fast)
    h.assert_same_run(folders[1], folders[0])
    for ours, theirs in zip(h.metrics(folders[0]), h.metrics(reference("F32"))):
        if "loss" in ours:
            assert abs(ours["loss"] - theirs["loss"]) < 1e-3 * theirs["loss"]


def test_over_tcp():
    folder = h.new_folder("tcp")
    h.train(make_config("experts-2"), folder, 4, sets=["parallel.expert_ranks=2"], mpi=h.TCP)
    h.assert_same_run(folder, reference("F32"))


def test_metrics_and_progress_tell_of_experts():
    folder = h.new_folder("metrics")
    done = h.train(make_config("experts-2"), folder, 4, sets=["parallel.expert_ranks=4"])
    tokens = 14 * 48
    steps = [entry for entry in h.metrics(folder) if "loss" in entry]
    for entry in steps:
        assert entry["expert_layers"] == [0, 1, 2]
        assert [len(loads) for loads in entry["expert_load"]] == [25, 7, 25]
        assert [sum(loads) for loads in entry["expert_load"]] == [4 * tokens, 2 * tokens, 4 * tokens]
        assert entry["expert_drops"][0] == 0 and entry["expert_drops"][1] > 0
        assert entry["aux_loss"] >= 3 - 1e-6 and entry["z_loss"] > 0
        assert 0 < entry["router_entropy"][0] < 3.22  # ln 25
        assert entry["exchange_bytes"] > 0 and entry["exchange"] > 0
        # Counts, rows, results and their gradients, in 2 rounds of 3 layers, besides the others.
        assert entry["transfers"] >= 2 * 3 * 5
    # Rows go while the shared expert computes.
    assert sum(entry["transfers_overlapped"] for entry in steps) > 0
    alone = [entry for entry in h.metrics(reference("F32")) if "loss" in entry]
    assert all(entry["exchange_bytes"] == 0 for entry in alone)
    for ours, theirs in zip(steps, alone):
        for key in ("expert_load", "expert_drops", "aux_loss", "z_loss", "router_entropy"):
            assert repr(ours[key]) == repr(theirs[key]), key
    # A line for every step: the warning stands where an expert has less than a tenth of the mean.
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    for line, entry in zip(lines, steps):
        starving = any(min(loads) < 0.1 * sum(loads) / len(loads) for loads in entry["expert_load"])
        assert ("starves" in line) == starving, (line, entry["expert_load"])


def test_a_starving_expert_is_named():
    # A rate that throws the routers off balance at once.
    folder = h.new_folder("starving")
    done = h.train(make_config("experts-2"), folder, 2,
                   sets=["optim.learning_rate=0.3", "optim.warmup_steps=0", "train.steps=12",
                         "model.feed_forward.experts.auxiliary_coefficient=0",
                         "model.feed_forward.experts.selection_bias=false"])
    lines = [line for line in done.stdout.splitlines() if "starves" in line]
    assert lines and "warning: expert" in lines[-1] and "of the mean load" in lines[-1], done.stdout


def test_a_quarter_of_the_bytes_in_a_latent_space_of_a_quarter():
    def bytes_sent(space):
        folder = h.new_folder("latent")
        experts = f"experts: 7 active: 2 width: 10 {space}"
        h.train(make_config("latent", steps=2, latent=experts), folder, 2,
                sets=["parallel.expert_ranks=2",
                      # Only the layer in question sends rows.
                      "model.schedule.periodic.layers=2", "model.feed_forward.width=20"])
        return [entry["exchange_bytes"] for entry in h.metrics(folder) if "loss" in entry]

    wide, narrow = bytes_sent(""), bytes_sent("latent { width: 10 }")
    for a, b in zip(wide, narrow):
        # Counts of rows and a weight for each go along at full size.
        assert 0.25 <= b / a < 0.30, (wide, narrow)


def test_the_audit_of_trained_experts_is_exactly_zero():
    checkpoint = h.last_checkpoint(reference("F32"))
    done = h.run(h.MPIRUN + ["-n", "2", h.TESSERA, "audit", "--checkpoint", checkpoint, "--json"])
    certificate = json.loads(done.stdout)
    assert certificate["verdict"] == "clean"
    assert all(layer["delta"] == 0 for layer in certificate["layers"]), certificate["layers"]
    assert certificate["control"]["localised"] == certificate["control"]["injected"] == 24


def test_expert_ranks_that_dont_divide_are_refused():
    for ranks, e in ((3, 2), (2, 4)):
        done = h.train(make_config("experts-2"), h.new_folder("refused"), ranks,
                       sets=[f"parallel.expert_ranks={e}"], expect=2)
        assert "parallel.expert_ranks" in done.stderr and f"{ranks}, is {e}" in done.stderr
        assert done.stderr.count("tessera:") == 1, done.stderr


def test_expert_ranks_without_experts_change_nothing():
    for ranks, e in ((1, 1), (4, 2)):
        h.train(h.make_config(4), h.new_folder(f"dense-{e}"), ranks,
                sets=[f"parallel.expert_ranks={e}"])
    h.assert_same_run(h.FOLDER + "/dense-2", h.FOLDER + "/dense-1")


def test_parameters_and_biases_of_another_run():
    source = h.last_checkpoint(reference("F32"))
    first = h.new_folder("from-1")
    second = h.new_folder("from-2")
    for folder, ranks, e in ((first, 1, 1), (second, 4, 2)):
        h.train(make_config("experts-2"), folder, ranks,
                sets=[f"train.init_from={source}", f"parallel.expert_ranks={e}"])
    h.assert_same_run(second, first)
    # A model that would not use the biases of the checkpoint isn't the same model.
    done = h.train(make_config("experts-2"), h.new_folder("from-3"), 1,
                   sets=[f"train.init_from={source}",
                         "model.feed_forward.experts.selection_bias=false"], expect=4)
    assert "selection_bias" in done.stderr, done.stderr


if __name__ == "__main__":
    h.main(globals())
