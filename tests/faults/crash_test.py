"""Crashes of the job's parts: builds that are killed, launchers that die, ranks that stop, throw or
start elsewhere, a folder of two runs. Each ends in time with a word about who and
where, leaves nothing half under a final name, and the next start goes on to the unbroken run's
files."""
import ctypes
import fcntl
import glob
import hashlib
import os
import random
import signal
import sys
import time

import harness as h

INJECTION = os.path.abspath(sys.argv.pop(2))
RUN = h.SOURCE + "/launch/run"
STEPS = 6
LIMIT = 30


def row(fault, what, seconds, code):
    """A row of the table in docs/verification.md."""
    print(f"  | {fault} | {what} | {seconds:.1f} s | {code} |", flush=True)


def config():
    path = h.FOLDER + "/crash.textproto"
    if not os.path.exists(path):
        text = h.CONFIG.format(data=h.make_data(), steps=STEPS)
        h.write(path, text.replace("feed_forward { width: 53 }", """feed_forward {
    experts { experts: 25 active: 4 width: 13 shared_width: 21 }
  }"""))
        assert "experts: 25" in open(path, encoding="utf-8").read()
    return path


def go_on(folder, ranks=2):
    """Nothing half has a final name; the next start's files are the unbroken run's."""
    h.resume_as_unbroken(folder, config(), ranks, timeout=600)


def of_folder(folder):
    """Processes that have the folder in their command line: pid, program."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            program = os.path.basename(os.readlink(f"/proc/{name}/exe"))
        except OSError:
            continue
        if folder.encode() in words:
            found.append((int(name), program))
    return found


def is_locked(folder):
    """By a process that has no command line any more, too: one that is ending."""
    if not os.path.isdir(folder):
        return False
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def wait_for_end(folder):
    start = time.time()
    h.wait_until(lambda: not of_folder(folder) and not is_locked(folder), LIMIT,
                 f"the end of {of_folder(folder)}")
    return time.time() - start


def state(folder, rank):
    """The words of a rank's state file, as pairs; {} where there is none."""
    try:
        with open(f"{folder}/logs/rank-{rank}.state", encoding="utf-8") as file:
            words = file.readline().split()
        return dict(zip(words[::2], words[1::2]))
    except OSError:
        return {}


def pid_of(folder, rank):
    return int(state(folder, rank)["pid"])


def train_command(folder, sets=()):
    command = [h.TESSERA, "train", "--config", config(), "--run-dir", folder]
    for value in sets:
        command += ["--set", value]
    return command


# Long enough to be met in the middle of a step.
SLOW = ["train.steps=100000", "checkpoint.every=2"]


def assert_as_unbroken(folder):
    """The newest checkpoint of a run of many steps, and its numbers up to there."""
    steps = int(h.checkpoints(folder)[-1][5:13])
    unbroken = h.FOLDER + "/slow"
    if not os.path.exists(f"{unbroken}/checkpoints/{h.checkpoints(folder)[-1]}"):
        h.train(config(), unbroken, 0, sets=SLOW + [f"train.stop_at_step={steps}"], timeout=600)
    h.assert_same_file(h.last_checkpoint(folder),
                       f"{unbroken}/checkpoints/{h.checkpoints(folder)[-1]}")
    ours, theirs = ([entry for entry in h.numbers(run)
                     if "stopped" not in entry and int(entry["step"]) < steps]
                    for run in (folder, unbroken))
    assert ours == theirs


def go_on_slowly(folder):
    """From the newest checkpoint, whatever lies beyond it."""
    saved = [int(name[5:13]) for name in h.checkpoints(folder) if name.endswith(".h5")]
    # To an even step: there every run has a checkpoint, whatever step it ends at itself.
    stop = (max(saved + [0]) + 4) // 2 * 2
    h.train(config(), folder, 2, sets=SLOW + [f"train.stop_at_step={stop}"], timeout=600)
    assert_as_unbroken(folder)


# Launchers.


def launcher_killed(name, command, victim):
    folder = h.new_folder(name)
    with h.background(command + train_command(folder, SLOW)) as process:
        h.wait_until(lambda: h.steps_in_metrics(folder) >= 3, what="three steps")
        victims = [pid for pid, program in of_folder(folder) if program == victim]
        assert len(victims) == 1, of_folder(folder)
        os.kill(victims[0], signal.SIGKILL)
        seconds = wait_for_end(folder)
        code = process.wait()
    row(f"kill -9 of {name}", "its ranks end by themselves", seconds, code)
    go_on_slowly(folder)


def test_mpirun_killed():
    launcher_killed("mpirun", h.MPIRUN + ["-n", "4"], "orterun")


def test_mpirun_killed_under_the_launch_script():
    launcher_killed("mpirun under launch/run", [RUN, "-n", "3"], "orterun")


def test_the_launch_script_killed():
    launcher_killed("launch/run", [RUN, "-n", "3"], "bash")


# Ranks that stop.


def injected(name, ranks, rank, kind, call, within=None, sets=()):
    """Returns the folder, the output, the seconds from the fault to the job's end, its exit code."""
    folder = h.new_folder(name)
    variables = {"LD_PRELOAD": INJECTION, "TESSERA_FAULT_RANK": rank, "TESSERA_FAULT_CALL": call,
                 "TESSERA_FAULT_KIND": kind, "TESSERA_FAULT_IN": within or "call"}
    mpi = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    with h.background(h.MPIRUN + mpi + ["-n", str(ranks)] + train_command(folder, sets)) as process:
        h.wait_until(lambda: "fault injected" in process.output() or process.poll() is not None,
                     what="the fault")
        start = time.time()
        code = process.wait(timeout=600)
        seconds = time.time() - start
        text = process.output()
    assert "fault injected: " + kind in text, text
    assert code != 0 and not of_folder(folder), text
    assert seconds < LIMIT, (seconds, text)
    return folder, text, seconds, code


def rank_stopped(name, where, rank, call, within=None, sets=()):
    limit = 6
    folder, text, seconds, code = injected(
        name, 4, rank, "stop", call, within, sets=[f"execution.watchdog_seconds={limit}", *sets])
    lines = [line for line in text.splitlines() if f"nothing has moved for {limit} s" in line]
    assert code == 5 and lines and f"furthest behind: rank {rank} host" in lines[0], text
    assert "it is stopped or its host is lost" in lines[0] and "pid" in lines[0], text
    for other in {0, 1, 2, 3} - {rank}:
        assert f"behind: rank {other} " not in lines[0] and f"; rank {other} host" not in lines[0]
    row(f"rank {rank} stopped {where}, watchdog {limit} s", lines[0].split("tessera: ")[1], seconds,
        code)
    go_on(folder)


def test_rank_0_stopped():
    rank_stopped("stopped-0", "in a step", 0, 300)


def test_a_rank_stopped_in_an_exchange_of_experts():
    rank_stopped("stopped-exchange", "in an exchange of experts", 2, 50, "exchange",
                 ["parallel.expert_ranks=2"])


def test_a_rank_stopped_inside_a_checkpoint():
    rank_stopped("stopped-save", "inside a checkpoint", 1, 20, "save")


def test_rank_0_stopped_inside_a_checkpoint():
    rank_stopped("stopped-save-0", "inside a checkpoint", 0, 20, "save")


def continued(name, ranks_stopped, seconds, watchdog):
    """Stops these of 4 ranks for a time, then lets them go on."""
    folder = h.new_folder(name)
    sets = SLOW + [f"execution.watchdog_seconds={watchdog}", "parallel.expert_ranks=2"]
    with h.background(h.MPIRUN + ["-n", "4"] + train_command(folder, sets)) as process:
        h.wait_until(lambda: h.steps_in_metrics(folder) >= 2, what="two steps")
        pids = [pid_of(folder, rank) for rank in ranks_stopped]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        before = h.steps_in_metrics(folder)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        h.wait_until(lambda: h.steps_in_metrics(folder) >= before + 2 or process.poll() is not None,
                     what="two more steps")
        assert process.poll() is None, process.output()
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(timeout=60) == 0, process.output()
    assert_as_unbroken(folder)


def test_a_rank_that_stops_and_goes_on_in_time():
    continued("paused", [1], 3, 60)


def test_a_job_that_is_stopped_as_a_whole_goes_on():
    """As a batch system suspends it, for longer than the watchdog's limit."""
    continued("suspended", [0, 1, 2, 3], 5, 2)


# Ranks that fail.


def test_a_rank_throws():
    for name, where, call, within in (
            ("throw", "between two collectives", 150, None),
            ("throw-exchange", "in an exchange of experts", 50, "exchange"),
            ("throw-transfer", "while transfers are in flight", 100, "transfer")):
        folder, text, seconds, code = injected(name, 4, 2, "throw", call, within,
                                               sets=["parallel.expert_ranks=2"])
        line = [line for line in text.splitlines() if line.startswith("tessera: rank 2 (")]
        assert line and "step" in line[0] and "injected fault" in line[0], text
        assert code == 70, text
        row(f"rank 2 throws {where}", line[0].split("tessera: ")[1], seconds, code)
        go_on(folder)


def test_data_that_is_cut_short_in_mid_run():
    """Some ranks read beyond the end and throw, between two collectives."""
    data = h.new_folder("cut-data")
    h.shutil.copytree(h.make_data(), data)
    folder = h.new_folder("cut")
    sets = SLOW + [f"data.recipe={data}/recipe.textproto", f"data.directory={data}/shards"]
    with h.background(h.MPIRUN + ["-n", "3"] + train_command(folder, sets)) as process:
        h.wait_until(lambda: h.steps_in_metrics(folder) >= 2, what="two steps")
        for shard in glob.glob(data + "/shards/*/*.tokens"):
            os.truncate(shard, 0)
        start = time.time()
        code = process.wait(timeout=60)
        seconds = time.time() - start
        text = process.output()
    lines = [line for line in text.splitlines() if line.startswith("tessera: rank ")]
    assert code == 3 and lines and ".tokens" in lines[0] and "step" in lines[0], (code, text)
    row("shards cut short in mid-run", lines[0].split("tessera: ")[1], seconds, code)
    go_on_slowly(folder)


# Folders.


def test_what_a_killed_rank_held_on_the_host_holds_nobody_up():
    # What Open MPI locks where a file is opened by MPI-IO, by the bare name of what is saved.
    c = ctypes.CDLL(None)
    name = b"/OMPIO_step-00000002.h5.partial"
    c.sem_unlink(name)
    assert c.sem_open(name, os.O_CREAT, 0o600, 0)
    folder = h.new_folder("held")
    try:
        h.train(config(), folder, 2, timeout=60)
    finally:
        c.sem_unlink(name)
    h.assert_same_run(folder, h.unbroken_run(config()))


def test_ranks_in_different_folders():
    data = h.make_data()
    home, away = h.FOLDER + "/home", h.FOLDER + "/away"
    for path in (home, away):
        os.makedirs(path, exist_ok=True)
    text = open(config(), encoding="utf-8").read().replace(data, "../" + os.path.basename(data))
    h.write(home + "/relative.textproto", text)
    command = ["--config", "relative.textproto", "--run-dir", "run"]
    each = [["-wdir", path, "-n", str(n), h.TESSERA, "train", *command]
            for path, n in ((home, 1), (away, 2))]
    h.run([*h.MPIRUN, *each[0], ":", *each[1]])
    assert not os.listdir(away), os.listdir(away)
    h.assert_same_run(home + "/run", h.unbroken_run(config()))
    # A build's too.
    options = ["--recipe", f"../{os.path.basename(data)}/recipe.textproto", "--sources",
               f"../{os.path.basename(data)}/sources", "--out", "shards"]
    each = [["-wdir", path, "-n", "1", h.TESSERA, "data", "build", *options]
            for path in (home, away)]
    h.run([*h.MPIRUN, *each[0], ":", *each[1]])
    assert not os.listdir(away), os.listdir(away)
    assert digests(home + "/shards") == digests(data + "/shards")


def test_two_runs_of_one_folder_started_at_once():
    for _ in range(3):
        folder = h.new_folder("twins")
        command = h.MPIRUN + ["-n", "2"] + train_command(folder)
        start = time.time()
        with h.background(command) as one, h.background(command) as other:
            codes = [twin.wait(timeout=600) for twin in (one, other)]
            texts = [twin.output() for twin in (one, other)]
        seconds = time.time() - start
        # On a busy machine one may be over before the other looks.
        assert sorted(codes) in ([0, 4], [0, 0]), (codes, texts)
        if sorted(codes) == [0, 4]:
            loser = texts[codes.index(4)]
            assert "another run is at work here" in loser, loser
        h.assert_same_run(folder, h.unbroken_run(config()))
    row("two runs started at once in one folder", "one trains, the other: another run is at work "
        "here", seconds, codes)


# Builds.


def digests(folder):
    found = {}
    for path in glob.glob(folder + "/**", recursive=True):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    return found


BUILD_RECIPE = """
name: "killed" tokenizer: "byte" sequence_length: 64 total_tokens: 100000 seed: 7
shard_tokens: 300000
"""


def make_sources():
    """Some megabytes of real text, as documents of three components. Returns recipe and sources."""
    sources = h.new_folder("sources")
    recipe = BUILD_RECIPE
    texts = sorted(glob.glob(h.SOURCE + "/*/*.cc") + glob.glob(h.SOURCE + "/docs/*.md"))
    for name in ("a", "b", "c"):
        os.makedirs(f"{sources}/{name}")
        for copy in range(4):
            for n, path in enumerate(texts):
                h.shutil.copy(path, f"{sources}/{name}/{copy}-{n}.txt")
        recipe += f'component {{ name: "{name}" weight: "1" source {{ glob: "{name}/*" }} }}\n'
    h.write(h.FOLDER + "/killed.textproto", recipe)
    return h.FOLDER + "/killed.textproto", sources


def test_builds_killed_at_random_instants():
    recipe, sources = make_sources()
    seed = random.randrange(1000000)
    chance = random.Random(seed)

    def command(out, ranks, threads):
        build = [h.TESSERA, "data", "build", "--recipe", recipe, "--sources", sources, "--out", out,
                 "--threads", str(threads)]
        return h.MPIRUN + ["-n", str(ranks)] + build if ranks > 1 else build

    expected, kills, longest, left_partial = None, 0, 0.0, 0
    for ranks, threads, victim in ((1, 1, "tessera"), (1, 3, "tessera"), (3, 1, "tessera"),
                                   (2, 2, "orterun")):
        whole = h.new_folder("whole")
        start = time.time()
        h.run(command(whole, ranks, threads))
        duration = time.time() - start
        if expected is None:
            expected = digests(whole)
            assert len(expected) > 20, expected
        assert digests(whole) == expected, (ranks, threads)
        out = h.new_folder("killed")
        wanted = kills + (10 if h.LONG else 3)
        for attempt in range(200):
            with h.background(command(out, ranks, threads)) as process:
                # Once enough were killed the next one goes through.
                end = time.time() + chance.uniform(0, duration) if kills < wanted else float("inf")
                h.wait_until(lambda: time.time() > end or process.poll() is not None)
                victims = [pid for pid, program in of_folder(out) if program == victim]
                if victims and process.poll() is None:
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    longest = max(longest, wait_for_end(out))
                    kills += process.wait() != 0
                code = process.wait()
            found = digests(out) if os.path.isdir(out) else {}
            left_partial += any(name.endswith(".partial") for name in found)
            for name, digest in found.items():
                assert name.endswith(".partial") or expected.get(name) == digest, (name, seed)
            if code == 0:
                assert found == expected, f"seed {seed}"
                if kills >= wanted:
                    break
                out = h.new_folder("killed")
        else:
            raise AssertionError(f"200 attempts and {kills} kills, seed {seed}")
    row(f"data build killed, {kills} times", f"{left_partial} left .partial files; the next build "
        "completes to the same bytes", longest, "137, mpirun's")


if __name__ == "__main__":
    h.main(globals())
