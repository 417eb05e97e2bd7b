"""bf16 compute against f32 on the same run (B18): 500 steps end where f32 ends, within what another
seed changes, and on 8 ranks exactly where they end on 1."""
import statistics

import harness as h

STEPS = 500
SETS = ["checkpoint.every=0", "validation.every=0", "logging.progress_every=0",
        "optim.learning_rate=2e-3", "train.global_batch=8", "train.micro_batch=1"]


def losses(name, ranks, sets):
    folder = h.new_folder(name)
    h.train(h.make_config(STEPS), folder, ranks, sets=SETS + sets, timeout=600)
    return [entry["loss"] for entry in h.metrics(folder) if "loss" in entry]


def means(curve):
    """Of each fifth of the run, so that the curves are compared and not only their ends."""
    fifth = STEPS // 5
    return [statistics.fmean(curve[i:i + fifth]) for i in range(0, STEPS, fifth)]


def test_B18_loss_curves_agree_within_noise():
    f32 = losses("f32", 1, [])
    bf16 = losses("bf16", 1, ["train.precision=BF16"])
    other_seed = losses("seed", 1, ["train.seed=4"])
    assert len(f32) == len(bf16) == len(other_seed) == STEPS
    assert means(f32)[-1] < 0.75 * means(f32)[0], "nothing was learnt, so nothing is compared"
    noise = max(abs(a - b) for a, b in zip(means(f32), means(other_seed)))
    moved = max(abs(a - b) for a, b in zip(means(f32), means(bf16)))
    print(f"bf16 moves the loss by {moved:.5f}, another seed by {noise:.5f}", flush=True)
    assert moved < 1.5 * noise, (means(f32), means(bf16), means(other_seed))
    # Not the same run by accident, nor frozen weights.
    assert bf16 != f32
    eight = losses("bf16-8", 8, ["train.precision=BF16"])
    assert eight == bf16
    h.assert_same_file(h.last_checkpoint(h.FOLDER + "/bf16-8"), h.last_checkpoint(h.FOLDER + "/bf16"))


if __name__ == "__main__":
    h.main(globals())
