"""One config, the same bits: any number of ranks and threads, every policy, every transport."""
import harness as h

RANKS = [1, 2, 3, 4, 5, 8]


def reference():
    folder = h.new_folder("reference")
    h.train(h.make_config(), folder, ranks=0)  # without mpirun
    assert len([entry for entry in h.metrics(folder) if "loss" in entry]) == 6
    return folder


def compare(name, ranks, **options):
    folder = h.new_folder(name)
    done = h.train(h.make_config(), folder, ranks, **options)
    h.assert_same_run(folder, h.FOLDER + "/reference")
    return done


def test_ranks_and_threads():
    reference()
    for ranks in RANKS:
        for threads in (1, 2):
            if threads == 2 and ranks not in (1, 2, 3) and not h.LONG:
                continue
            done = compare(f"r{ranks}t{threads}", ranks, sets=[f"execution.threads={threads}"])
            # 7 quanta: only 1 divides them.
            assert ("don't divide" in done.stdout) == (ranks > 1), done.stdout


def test_bf16():
    folder = h.new_folder("bf16")
    bf16 = ["train.precision=BF16"]
    h.train(h.make_config(), folder, ranks=0, sets=bf16)
    losses = [entry["loss"] for entry in h.metrics(folder) if "loss" in entry]
    full = [entry["loss"] for entry in h.metrics(h.FOLDER + "/reference") if "loss" in entry]
    assert losses != full
    for a, b in zip(losses, full):
        assert abs(a - b) < 0.02 * b, (losses, full)
    grid = [(1, 2, []), (2, 1, []), (3, 2, ["parallel.gather=PER_STEP"]),
            (5, 1, ["parallel.accumulate=LOCAL", "execution.recompute=true"]), (8, 1, [])]
    if h.LONG:
        grid += [(ranks, threads, []) for ranks in RANKS for threads in (1, 2)]
    for ranks, threads, policy in grid:
        name = f"bf16-{ranks}-{threads}-{len(policy)}"
        h.train(h.make_config(), h.new_folder(name), ranks,
                sets=bf16 + policy + [f"execution.threads={threads}"])
        h.assert_same_run(h.FOLDER + "/" + name, folder)
    # Stopped on 2 ranks, resumed on 3 and on 1; another precision isn't the same run.
    name = h.new_folder("bf16-resumed")
    for ranks, stop in ((2, 2), (3, 4)):
        h.train(h.make_config(), name, ranks, sets=bf16 + [f"train.stop_at_step={stop}"])
    refused = h.train(h.make_config(), name, 1, expect=2)
    assert "train.precision" in refused.stderr, refused.stderr
    h.train(h.make_config(), name, 1, sets=bf16)
    h.assert_same_file(h.last_checkpoint(name), h.last_checkpoint(folder))


def test_policies():
    policies = [("recompute", ["execution.recompute=true"]),
                ("per_step", ["parallel.gather=PER_STEP"]),
                ("local", ["parallel.accumulate=LOCAL"]),
                ("blocking", ["parallel.prefetch=false"]),
                ("blocking_local", ["parallel.prefetch=false", "parallel.accumulate=LOCAL"]),
                ("all", ["execution.recompute=true", "parallel.gather=PER_STEP",
                         "parallel.accumulate=LOCAL"])]
    for name, sets in policies:
        for ranks in RANKS if h.LONG else ([1, 3] if name == "recompute" else [2, 5]):
            compare(f"{name}{ranks}", ranks, sets=sets)


def test_fast_sums_are_repeatable_on_one_layout():
    folders = []
    for name, sets in (("fast1", []), ("fast2", ["parallel.prefetch=false", "execution.threads=2"])):
        folders.append(h.new_folder(name))
        h.train(h.make_config(), folders[-1], 3, sets=["parallel.reduction=FAST", *sets])
    h.assert_same_run(*folders)
    losses = [[entry["loss"] for entry in h.metrics(folder) if "loss" in entry]
              for folder in (folders[0], h.FOLDER + "/reference")]
    # Gradients differ in rounding only, which a few steps of Adam may raise.
    for fast, canonical in zip(*losses):
        assert abs(fast - canonical) < 1e-3 * canonical, losses


def test_tcp_with_every_rank_in_its_own_folder():
    for ranks in RANKS if h.LONG else [3, 8]:
        # mpirun takes several programs: one for each rank, each with a working folder of its own.
        folder = h.new_folder(f"tcp{ranks}")
        command = h.MPIRUN + h.TCP
        for rank in range(ranks):
            own = h.new_folder(f"own-{rank}")
            h.os.makedirs(own)
            if rank > 0:
                command.append(":")
            command += ["-n", "1", "-wdir", own, h.TESSERA, "train", "--config",
                        h.make_config(), "--run-dir", folder]
        h.run(command)
        h.assert_same_run(folder, h.FOLDER + "/reference")


def test_relative_paths_are_those_of_rank_0():
    # Rank 0 stands in the folder that the relative paths count from; rank 1 elsewhere.
    config = h.os.path.basename(h.make_config())
    h.new_folder("relative")
    command = h.MPIRUN + ["-n", "1", "-wdir", h.FOLDER, h.TESSERA, "train", "--config", config,
                          "--run-dir", "relative", ":", "-n", "1", "-wdir", "/", h.TESSERA, "train",
                          "--config", config, "--run-dir", "relative"]
    h.run(command)
    h.assert_same_run(h.FOLDER + "/relative", h.FOLDER + "/reference")


def test_B01_same_samples_on_every_layout():
    def dump(ranks, sets=()):
        done = h.train(h.make_config(), h.new_folder("dump"), ranks, sets=sets,
                       flags=["--dump-batches"])
        assert not h.os.path.exists(h.FOLDER + "/dump"), "--dump-batches made a run folder"
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        assert len(lines) == 6 * 14
        by_sample = {}
        for _, step, _, rank, _, sample, digest in lines:
            assert int(sample) // 14 == int(step) and int(rank) < max(ranks, 1)
            by_sample[int(sample)] = digest
        assert sorted(by_sample) == list(range(6 * 14))
        return by_sample

    first = dump(1)
    for ranks in (2, 3, 8):
        assert dump(ranks) == first
    assert dump(4, ["parallel.accumulate=LOCAL"]) == first
    assert dump(4, ["parallel.expert_ranks=2"]) == first
    stream = h.run([h.TESSERA, "data", "stream", "--recipe", h.make_data() + "/recipe.textproto",
                    "--data", h.make_data() + "/shards", "--from", "5", "--to", "6", "--digest"])
    assert stream.stdout.split()[0] == first[5], stream.stdout


if __name__ == "__main__":
    h.main(globals())
