"""What a run leaves and what it refuses: checkpoints for h5py, plan against the truth, errors in
one line."""
import json
import os
import time

import harness as h


def finished():
    folder = h.FOLDER + "/finished"
    if not os.path.isdir(folder):
        h.train(h.make_config(4), folder, 2)
    return folder


def test_h5py_reads_a_checkpoint():
    script = """
import h5py, sys, json
import numpy as np
shapes = {}
with h5py.File(sys.argv[1], "r") as file:
    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            shapes[name] = [list(item.shape), str(item.dtype)]
            if name.startswith("params/"):
                assert np.isfinite(item[...]).all() and (item[...] != 0).any(), name
    file.visititems(visit)
    meta = {key: str(value) for key, value in file["meta"].attrs.items()}
print(json.dumps({"shapes": shapes, "meta": meta}))
"""
    done = h.run(["/usr/bin/python3", "-c", script, h.last_checkpoint(finished())])
    found = json.loads(done.stdout)
    shapes = found["shapes"]
    assert shapes["params/model.embed_tokens.weight"] == [[257, 40], "float32"], shapes
    assert shapes["params/model.layers.1.mixer.k_proj.weight"] == [[8, 40], "float32"]
    for name in [name for name in shapes if name.startswith("params/")]:
        for moment in ("m", "v"):
            assert shapes[name.replace("params/", f"adamw/{moment}/")] == shapes[name]
    total = 0
    for name, (shape, _) in shapes.items():
        if name.startswith("params/"):
            count = 1
            for extent in shape:
                count *= extent
            total += count
    assert total == plan([])["total_parameters"]
    meta = " ".join(found["meta"].values())
    assert "optim.beta2" in meta and "recipe_sha256" in meta
    for word in (h.FOLDER, "threads", "watchdog", os.uname().nodename):
        assert word not in meta, f"{word} is in the checkpoint's meta"


def test_the_share_of_peak_is_a_share():
    steps = [entry for entry in h.metrics(finished()) if "loss" in entry]
    flops = plan([])["train_flops_per_token"]
    for entry in steps:
        assert 0 < entry["mfu"] < 1, entry
        # The peak behind it is this machine's: one number, of a plausible size.
        peak = entry["tokens_per_second"] * flops / entry["mfu"]
        assert 1e9 < peak < 1e16, peak
        assert abs(peak / (steps[0]["tokens_per_second"] * flops / steps[0]["mfu"]) - 1) < 1e-6


def plan(flags, **options):
    done = h.run([h.TESSERA, "plan", "--config", h.make_config(4), "--json", *flags], **options)
    return json.loads(done.stdout) if done.returncode == 0 else done


def test_plan_agrees_with_itself():
    summary = plan([])
    layers = summary["layers"]
    assert [layer["mixer"] for layer in layers] == ["full", "sliding", "full"]
    # q, k, v, o and two query/key norms.
    assert layers[0]["mixer_parameters"] == 40 * 40 + 2 * 20 * 40 + 40 * 40 + 2 * 10
    assert layers[1]["mixer_parameters"] == 40 * 40 + 2 * 8 * 40 + 40 * 40
    assert layers[0]["feed_forward_parameters"] == 3 * 40 * 53
    total = summary["embedding_parameters"] + summary["head_parameters"]
    for layer in layers:
        parts = [layer[part + "_parameters"] for part in ("mixer", "feed_forward", "norm")]
        assert sum(parts) == layer["active_parameters"], layer
        total += sum(parts)
    assert total == summary["total_parameters"] == summary["active_parameters"]
    assert sum(summary["memory"].values()) == summary["bytes_per_rank"]
    two = plan(["--ranks", "2"])
    assert two["gather_bytes_per_step"] > 0 and summary["gather_bytes_per_step"] == 0
    refused = plan(["--memory", "1000000"], expect=2)
    assert "the largest part is" in refused.stderr, refused.stderr
    h.run([h.TESSERA, "plan", "--config", h.make_config(4)])
    # What train refuses of config and recipe, plan refuses too.
    refused = plan(["--set", "model.length=8"], expect=2)
    assert "sequence_length 48" in refused.stderr, refused.stderr


BIG = ["model.width=512", "model.vocabulary=48000", "model.feed_forward.width=1408",
       "train.global_batch=8", "train.micro_batch=4", "validation.every=0", "checkpoint.every=0", "train.steps=2"]


# In place of the one SwiGLU; a rank has room for all tokens of both, whatever they choose.
EXPERTS = ["model.feed_forward.experts.experts=25", "model.feed_forward.experts.active=7",
           "model.feed_forward.experts.width=640", "model.feed_forward.experts.shared_width=256",
           "model.vocabulary=64000"]


def test_B37_peak_memory_is_what_plan_says():
    """At 1 GB a rank or more, within 10 %."""
    for ranks, more in ((1, []), (2, ["train.micro_batch=2", "model.vocabulary=80000"]),
                        (2, ["execution.recompute=true", "parallel.gather=PER_STEP",
                             "parallel.accumulate=LOCAL", "train.micro_batch=2",
                             "model.vocabulary=60000"]),
                        (2, EXPERTS + ["parallel.expert_ranks=2"])):
        sets = [flag for value in BIG + more for flag in ("--set", value)]
        config = h.make_config(4)
        planned = json.loads(h.run([h.TESSERA, "plan", "--config", config, "--json", "--ranks",
                                    str(ranks), *sets]).stdout)
        assert planned["bytes_per_rank"] > 1e9, planned
        folder = h.new_folder("memory")
        # /usr/bin/env time isn't everywhere: a small wrapper prints each rank's peak.
        wrapper = ("import resource, subprocess, sys\n"
                   "code = subprocess.call(sys.argv[1:])\n"
                   "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024\n"
                   "sys.stdout.write(f'peak {peak}\\n')\n"
                   "sys.exit(code)\n")
        done = h.run(h.MPIRUN + ["-n", str(ranks), "/usr/bin/python3", "-c", wrapper, h.TESSERA,
                                 "train", "--config", config, "--run-dir", folder, *sets],
                     timeout=300)
        peaks = [int(line.split()[1]) for line in done.stdout.splitlines()
                 if line.startswith("peak")]
        assert len(peaks) == ranks, done.stdout
        ratio = max(peaks) / planned["bytes_per_rank"]
        print(f"  {ranks} ranks {more}: peak {max(peaks):,}, plan {planned['bytes_per_rank']:,}, "
              f"ratio {ratio:.3f}")
        assert 0.9 < ratio < 1.1, ratio


BROKEN = [
    ("optim.learning_rat=1", "learning_rate"),
    ("train.micro_batch=3", "micro_batch"),
    ("model.mixer[1].sliding.window=0", "window"),
    ("model.mixer[0].full.key_value_heads=3", "key_value_heads"),
    ("optim.learning_rate=fast", "learning_rate"),
    ("train.steps=-4", "steps"),
    ("model.vocabulary=100", "vocabulary"),
    ("data.recipe=/nowhere/recipe.textproto", "/nowhere/recipe.textproto"),
    ("model.feed_forward.experts.active=3", "experts.experts"),
    ("parallel.expert_ranks=0", "expert_ranks"),
]


def test_B35_broken_configs_end_at_once_in_one_line():
    for ranks in (0, 4):
        for value, word in BROKEN:
            start = time.time()
            done = h.train(h.make_config(4), h.new_folder("broken"), ranks, sets=[value], expect=2)
            seconds = time.time() - start
            lines = [line for line in done.stderr.splitlines() if line.startswith("tessera:")]
            assert len(lines) == 1 and word in lines[0], f"{value}: {done.stderr}"
            assert seconds < 2 + ranks / 2, f"{value} on {ranks} ranks: {seconds:.1f} s"
            assert not os.path.exists(h.FOLDER + "/broken"), "a refused config left a folder"


def test_B05_a_short_shard_is_refused_by_name():
    data = h.make_data()
    copy = h.new_folder("short")
    h.shutil.copytree(data, copy)
    shards = sorted(name for name in os.listdir(copy + "/shards/prose") if "manifest" not in name)
    path = f"{copy}/shards/prose/{shards[-1]}"
    os.truncate(path, os.path.getsize(path) - 4)
    for ranks in (0, 3):
        done = h.train(h.make_config(4), h.new_folder("run"), ranks,
                       sets=[f"data.directory={copy}/shards"], expect=3)
        assert shards[-1] in done.stderr and done.stderr.count("tessera:") == 1, done.stderr


def test_a_run_folder_that_cannot_be_made():
    blocked = h.FOLDER + "/blocked"
    h.write(blocked, "a file")
    for ranks in (0, 2):
        done = h.train(h.make_config(4), blocked + "/run", ranks, expect=4)
        assert blocked in done.stderr, done.stderr


def test_usage():
    assert "train" in h.run([h.TESSERA, "--help"]).stdout
    for command in ("train", "plan", "data", "tokenize", "ckpt"):
        text = h.run([h.TESSERA, command, "--help"]).stdout
        assert len(text.splitlines()) <= 40, f"{command} --help doesn't fit a screen"
    h.run([h.TESSERA], expect=2)
    for words in (["trian"], ["ckpt", "trian"], ["data", "trian", "x"], ["trian", "train"]):
        refused = h.run([h.TESSERA, *words], expect=2)
        assert len(refused.stderr.splitlines()) == 1 and '"trian"' in refused.stderr, refused.stderr
    h.run([h.TESSERA, "train"], expect=2)
    h.run([h.TESSERA, "train", "--config", "/nowhere.textproto"], expect=2)


def test_logs_and_metrics():
    folder = finished()
    logs = os.listdir(folder + "/logs")
    for rank in (0, 1):
        assert f"rank-{rank}.state" in logs
        assert any(name.startswith(f"rank-{rank}.log") for name in logs), logs
    steps = [entry for entry in h.metrics(folder) if "loss" in entry]
    for key in ("step", "tokens", "sample", "loss", "learning_rate", "grad_norm", "seconds",
                "tokens_per_second", "mfu", "gather", "reduce", "exchange", "data"):
        assert key in steps[0], (key, steps[0])
    assert steps[-1]["tokens"] == 4 * 14 * 48
    validation = [entry for entry in h.metrics(folder) if "validation_loss" in entry]
    assert set(validation[0]["validation_loss"]) == {"prose", "code"}, validation
    assert os.listdir(folder + "/tensorboard")


if __name__ == "__main__":
    h.main(globals())
