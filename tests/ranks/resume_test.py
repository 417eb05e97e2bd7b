"""Stop anywhere, resume on any layout: the files of an unbroken run."""
import harness as h


def unbroken(steps):
    folder = h.FOLDER + f"/unbroken-{steps}"
    if not h.os.path.isdir(folder):
        h.train(h.make_config(steps), folder, 2)
    return folder


def test_B11_B13_30_steps_in_three_parts_on_2_3_and_1_ranks():
    reference = unbroken(30)
    folder = h.new_folder("parts")
    for stop, ranks in ((10, 2), (20, 3), (30, 1)):
        h.train(h.make_config(30), folder, ranks, sets=[f"train.stop_at_step={stop}"])
        assert h.metrics(folder)[-1]["stopped"] == ("done" if stop == 30 else "stop_at_step")
    h.assert_same_run(folder, reference)


def test_B02_B10_B13_resume_at_every_step():
    """Data position, learning rate, moments and their step count, at every step of a run whose
    samples cross shard edges (shards of 5,000 tokens), on another number of ranks."""
    steps = 8
    reference = unbroken(steps)
    for stop in range(1, steps):
        before, after = (1 + stop % 3, 1 + (stop + 1) % 3)
        folder = h.new_folder(f"at-{stop}")
        h.train(h.make_config(steps), folder, before, sets=[f"train.stop_at_step={stop}"])
        h.train(h.make_config(steps), folder, after)
        assert h.numbers(folder) == h.numbers(reference), f"stopped at {stop}"
        h.assert_same_file(h.last_checkpoint(folder), h.last_checkpoint(reference))


def test_a_finished_run_has_nothing_to_do():
    reference = unbroken(8)
    before = h.numbers(reference)
    h.train(h.make_config(8), reference, 3)
    assert h.numbers(reference) == before


def test_a_changed_number_is_refused_by_path():
    reference = unbroken(8)
    copy = h.new_folder("changed")
    h.shutil.copytree(reference, copy)
    done = h.train(h.make_config(8), copy, 2, sets=["optim.weight_decay=0.2"], expect=2)
    assert "optim.weight_decay" in done.stderr and "--allow-change" in done.stderr, done.stderr
    assert done.stderr.count("tessera:") == 1, done.stderr
    h.train(h.make_config(8), copy, 2, sets=["optim.weight_decay=0.2"],
            flags=["--allow-change", "optim.weight_decay"])
    done = h.train(h.make_config(8), copy, 1, flags=["--allow-change", "optim.nonsense"], expect=2)
    assert "optim.nonsense" in done.stderr, done.stderr
    done = h.train(h.make_config(8), h.new_folder("new"), 1,
                   flags=["--allow-change", "optim.nonsense"], expect=2)
    assert "optim.nonsense" in done.stderr, done.stderr
    # What never shapes the numbers may change freely.
    h.train(h.make_config(8), copy, 1, sets=["execution.recompute=true", "checkpoint.every=3"],
            flags=["--allow-change", "optim.weight_decay"])


def test_damaged_checkpoints_are_skipped_with_a_word():
    reference = unbroken(8)
    copy = h.new_folder("damaged")
    h.shutil.copytree(reference, copy)
    newest = h.last_checkpoint(copy)
    size = h.os.path.getsize(newest)
    h.os.truncate(newest, size // 2)
    h.write(copy + "/checkpoints/step-00000009.h5.partial", "half")
    done = h.train(h.make_config(8), copy, 2)
    assert "skipping" in done.stdout and h.os.path.basename(newest) in done.stdout, done.stdout
    h.assert_same_file(h.last_checkpoint(copy), h.last_checkpoint(reference))
    assert h.numbers(copy) == h.numbers(reference)

    # A flipped bit is found by its array's checksum.
    second = h.new_folder("flipped")
    h.shutil.copytree(reference, second)
    with open(h.last_checkpoint(second), "r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte[0] ^ 4]))
    done = h.train(h.make_config(8), second, 2)
    assert "skipping" in done.stdout, done.stdout
    h.assert_same_file(h.last_checkpoint(second), h.last_checkpoint(reference))
    done = h.run([h.TESSERA, "ckpt", "verify", h.last_checkpoint(reference)])

    # None left: the run must not quietly start anew.
    for name in h.checkpoints(second):
        h.os.truncate(f"{second}/checkpoints/{name}", 1000)
    done = h.train(h.make_config(8), second, 2, expect=4)
    assert "no checkpoint of the run can be resumed from" in done.stderr, done.stderr


def test_init_from_starts_a_new_run():
    reference = unbroken(8)
    folder = h.new_folder("annealing")
    h.train(h.make_config(8), folder, 2,
            sets=[f"train.init_from={h.last_checkpoint(reference)}", "train.stop_at_step=1",
                  "optim.learning_rate=1e-4", "optim.warmup_steps=0"])
    lines = h.metrics(folder)
    assert lines[0]["step"] == 0 and lines[0]["sample"] == 0
    assert lines[0]["learning_rate"] == 1e-4
    first, last = h.metrics(reference)[0]["loss"], h.metrics(reference)[-3]["loss"]
    assert lines[0]["loss"] < (first + last) / 2, (lines[0]["loss"], first, last)
    # The same start from any number of ranks.
    other = h.new_folder("annealing-3")
    h.train(h.make_config(8), other, 3,
            sets=[f"train.init_from={h.last_checkpoint(reference)}", "train.stop_at_step=1",
                  "optim.learning_rate=1e-4", "optim.warmup_steps=0"])
    h.assert_same_run(other, folder)


def test_init_from_another_model_is_refused_by_array():
    source = f"train.init_from={h.last_checkpoint(unbroken(8))}"
    for value, word in (("model.mixer[0].full.query_key_norm=false", "mixer.k_norm.weight"),
                        ("model.feed_forward.width=54", "feed_forward.down_proj.weight")):
        done = h.train(h.make_config(8), h.new_folder("other"), 2, sets=[source, value], expect=4)
        assert word in done.stderr and done.stderr.count("tessera:") == 1, done.stderr


def test_a_checkpoint_file_resumes_into_a_folder_of_its_own():
    reference = unbroken(8)
    early = f"{reference}/checkpoints/{h.checkpoints(reference)[0]}"
    folder = h.new_folder("branch")
    h.train(h.make_config(8), folder, 3, flags=["--resume", early])
    h.assert_same_file(h.last_checkpoint(folder), h.last_checkpoint(reference))
    # In place the later checkpoints would win at the next start: refused, and nothing is lost.
    before = h.numbers(reference)
    done = h.train(h.make_config(8), reference, 2, flags=["--resume", early], expect=2)
    assert "is of a later step" in done.stderr, done.stderr
    assert h.numbers(reference) == before


def test_one_run_at_a_time():
    folder = h.new_folder("busy")
    command = [h.TESSERA, "train", "--config", h.make_config(2000), "--run-dir", folder, "--set",
               "checkpoint.every=0"]
    with h.background(command):
        h.wait_until(lambda: h.steps_in_metrics(folder) >= 1, what="the first step")
        done = h.run(command, expect=4)
        assert "another run is at work here" in done.stderr, done.stderr


def test_ckpt_diff_and_ls():
    reference = unbroken(8)
    names = [f"{reference}/checkpoints/{name}" for name in h.checkpoints(reference)]
    h.run([h.TESSERA, "ckpt", "diff", names[0], names[0]])
    done = h.run([h.TESSERA, "ckpt", "diff", names[0], names[1]], expect=1)
    assert "params/lm_head.weight[0, 0]" in done.stdout + done.stderr, done.stdout + done.stderr
    listed = h.run([h.TESSERA, "ckpt", "ls", reference + "/checkpoints"]).stdout
    for name in h.checkpoints(reference):
        assert name in listed, listed


def test_retention():
    folder = h.new_folder("retention")
    h.train(h.make_config(8), folder, 2,
            sets=["checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.archive_steps=[1, 3]",
                  "checkpoint.keep_every=5"])
    assert h.checkpoints(folder) == [f"step-0000000{step}.h5" for step in (1, 3, 5, 7, 8)]


if __name__ == "__main__":
    h.main(globals())
