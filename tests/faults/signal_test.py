"""Signals that ask a run to stop, in every phase of it: one complete checkpoint at one step, exit
code 0, and a resume on other ranks that continues the unbroken run. A second one ends it at once
and harms nothing that was saved. What has nothing to save just ends. (B31)

A run is made to stand still in the phase by disk_faults.cc, so that no signal comes elsewhere."""
import contextlib
import glob
import os
import shutil
import signal
import sys
import time

import harness as h

FAULTS = os.path.abspath(sys.argv.pop(2))
STEPS = 6  # validation after 3 and 6, checkpoints at 2, 4 and 6
RUN = h.SOURCE + "/launch/run"
SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "HUP": signal.SIGHUP,
           "USR1": signal.SIGUSR1}

# Where a run stands still, and the steps that it may have done when it has stopped.
PHASES = {
    "before MPI": ("mpi MPI_Init_thread 1 1 1", [0]),
    "data opening": ("stat shards/prose/shard 0 1 1", [0]),
    "peak measurement": ("mpi MPI_Ibarrier 0 1 1", [0]),
    "first step": ("read /shard- 0 1 1", [0, 1]),
    "middle of a step": ("mpi MPI_Isend 1 60 60", [0, 1, 2]),
    "wait for a slow rank": ("write metrics.jsonl 0 5 5", [4]),
    "validation": ("write metrics.jsonl#validation_loss 0 1 1", [3]),
    "inside a save": ("write step-00000002.h5.partial 1 1 1", [2]),
    "end of a save": ("rename step-00000002.h5.partial 0 1 1", [2]),
    "last step": ("write metrics.jsonl 0 7 7", [6]),
    "last save": ("rename step-00000006.h5.partial 0 1 1", [6]),
    "after the last step": ("mpi MPI_Finalize 1 1 1", [6]),
}


def children(pid):
    text = ""
    with contextlib.suppress(OSError):
        for path in glob.glob(f"/proc/{pid}/task/*/children"):
            with open(path, encoding="utf-8") as file:
                text += file.read()
    return [int(word) for word in text.split()]


def rank_below(pid, rank):
    """The process of a rank, somewhere below mpirun or launch/run."""
    for child in children(pid):
        with contextlib.suppress(OSError):
            with open(f"/proc/{child}/environ", "rb") as file:
                if f"OMPI_COMM_WORLD_RANK={rank}".encode() in file.read().split(b"\0"):
                    return child
        found = rank_below(child, rank)
        if found:
            return found
    return 0


class Run:
    """A run that stands still in a phase."""

    def __init__(self, name, phase, launcher, ranks=2):
        self.ranks = ranks
        self.folder = h.new_folder(name.replace(" ", "-"))
        self.gate = self.folder + ".gate"
        self.acknowledged = self.folder + ".seen"
        self.temporary = self.folder + ".tmp"  # launch/run chooses the file's name there
        for path in (self.gate, self.gate + ".held", self.acknowledged):
            with contextlib.suppress(OSError):
                os.remove(path)
        shutil.rmtree(self.temporary, ignore_errors=True)
        os.mkdir(self.temporary)
        preload = ["-x", f"LD_PRELOAD={FAULTS}"]
        self.command = {"run": [RUN, "-n", str(ranks), *preload, "--"],
                        "mpirun": h.MPIRUN + preload + ["-n", str(ranks)]}[launcher]
        self.command += [h.TESSERA, "train", "--config", h.make_config(STEPS), "--run-dir",
                         self.folder]
        self.environment = {"TESSERA_DISK_FAULTS": f"{PHASES[phase][0]} hold={self.gate}",
                            "TESSERA_SIGNAL_ACK": self.acknowledged, "TMPDIR": self.temporary}
        self.process = None

    def seen(self):
        return os.path.exists(self.acknowledged) or glob.glob(
            self.temporary + "/tessera-run.*/signal")

    def over(self):
        return self.process.poll() is not None

    def wait_for(self, condition, what):
        h.wait_until(lambda: condition() or self.over(), what=what)
        assert condition(), f"the run ended before {what}\n{self.process.output()}"

    @contextlib.contextmanager
    def started(self):
        with h.background(self.command, env=self.environment) as self.process:
            self.wait_for(lambda: os.path.exists(self.gate + ".held"), "the phase")
            # One rank stands still there; the others may not even have their handlers yet, as
            # launch/run would see.
            for rank in range(self.ranks):
                self.wait_for(lambda: catches(rank_below(self.process.pid, rank), signal.SIGUSR1),
                              "the handlers")
            yield self

    def send(self, target, name):
        """To launch/run or mpirun, whichever was started, or to a rank."""
        pid = self.process.pid
        if target.startswith("rank"):
            pid = rank_below(pid, int(target[4:]))
            assert pid, "no such rank"
        os.kill(pid, SIGNALS[name])

    def release(self):
        h.write(self.gate, "")

    def resumes(self):
        h.resume_as_unbroken(self.folder, h.make_config(STEPS), 3)


def say(name, code, start):
    print(f"  {name}: exit code {code} after {time.time() - start:.1f} s", flush=True)


def stops(phase, target, name):
    """One signal: the run saves and ends well."""
    with Run(f"{phase} {target} {name}", phase, "run" if target == "run" else "mpirun").started(
    ) as run:
        run.send(target, name)
        run.wait_for(run.seen, "the signal's arrival")
        start = time.time()
        run.release()
        code = run.process.wait(timeout=60)
        say(f"{name} to {target}, {phase}", code, start)
        assert code == 0, f"{phase}: exit code {code}\n{run.process.output()}"
        stopped = h.metrics(run.folder)[-1]
        assert stopped["step"] in PHASES[phase][1], (phase, stopped)
        assert stopped["stopped"] == ("done" if stopped["step"] == STEPS else "signal"), stopped
        names = h.checkpoints(run.folder)
        assert names[-1] == f"step-{stopped['step']:08d}.h5", (names, stopped)
    run.resumes()


def test_every_phase():
    senders = [("run", "TERM"), ("run", "INT"), ("mpirun", "USR1"), ("rank1", "TERM"),
               ("run", "HUP"), ("rank0", "INT"), ("rank1", "USR1"), ("run", "USR1")]
    for n, phase in enumerate(PHASES):
        for target, name in senders if h.LONG else [senders[n % len(senders)]]:
            stops(phase, target, name)


def ends_at_once(phase, launcher, signals):
    """Signals one after the other, the first of them seen: the run, which stands still, ends."""
    with Run("twice", phase, launcher).started() as run:
        for number, (target, name) in enumerate(signals):
            run.send(target, name)
            if number == 0:
                run.wait_for(run.seen, "the first signal's arrival")
        start = time.time()
        code = run.process.wait(timeout=30)
        names = " then ".join(f"{name} to {target}" for target, name in signals)
        say(f"{names}, {phase}", code, start)
        assert code != 0, run.process.output()
        assert "step-00000004.h5" not in h.checkpoints(run.folder)
    run.resumes()


def test_second_signal_ends_at_once():
    PHASES["inside the second save"] = ("write step-00000004.h5.partial 1 1 1", [4])
    for launcher, signals in [("run", [("run", "INT"), ("run", "INT")]),
                              ("run", [("run", "TERM"), ("run", "TERM")]),
                              ("mpirun", [("rank1", "TERM"), ("rank1", "TERM")]),
                              ("mpirun", [("mpirun", "USR1"), ("mpirun", "TERM")])]:
        ends_at_once("inside the second save", launcher, signals)


def test_usr1_again_and_hup_after_term_change_nothing():
    for launcher, signals in [("mpirun", [("mpirun", "USR1")] * 3),
                              ("run", [("run", "TERM"), ("run", "HUP"), ("run", "HUP")])]:
        with Run("again", "inside a save", launcher).started() as run:
            for target, name in signals:
                if target == "mpirun":  # each is acknowledged anew
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(run.acknowledged)
                run.send(target, name)
                run.wait_for(run.seen, "the signal's arrival")
            run.release()
            assert run.process.wait(timeout=60) == 0, run.process.output()
        assert h.checkpoints(run.folder) == ["step-00000002.h5"]


def test_launcher_in_its_first_instants():
    for delay in (0.0, 0.01, 0.03, 0.1, 0.2, 0.3) if h.LONG else (0.0, 0.03):
        folder = h.new_folder("early")
        with h.background([RUN, "-n", "2", h.TESSERA, "train", "--config", h.make_config(STEPS),
                           "--run-dir", folder]) as process:
            # Before bash has read its traps a signal ends it, and there is nothing to save.
            h.wait_until(lambda: catches(process.pid, signal.SIGTERM), what="the traps")
            time.sleep(delay)
            os.kill(process.pid, signal.SIGTERM)
            code = process.wait(timeout=60)
            assert code == 0, f"exit code {code}\n{process.output()}"
        assert h.metrics(folder)[-1]["stopped"] in ("signal", "done")
        assert h.checkpoints(folder)


def catches(pid, number):
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return int(line.split()[1], 16) >> (number - 1) & 1 == 1
    return False


def test_term_to_mpirun_ends_unsaved_with_the_last_checkpoint_intact():
    with Run("mpirun", "wait for a slow rank", "mpirun").started() as run:
        run.send("mpirun", "TERM")
        assert run.process.wait(timeout=30) != 0
    assert h.checkpoints(run.folder) == ["step-00000002.h5"]
    run.resumes()


def test_what_has_nothing_to_save_just_ends():
    config = h.make_config(STEPS)
    data = h.make_data()
    out = h.FOLDER + "/out"
    build = [h.TESSERA, "data", "build", "--recipe", data + "/recipe.textproto", "--sources",
             data + "/sources", "--out", out]
    checkpoint = h.last_checkpoint(h.unbroken_run(h.make_config(STEPS)))
    table = [
        (build, "write shard-000001 * 1 1"),
        ([h.TESSERA, "train", "--config", config, "--dump-batches"], "read shard- * 2 2"),
        ([h.TESSERA, "audit", "--checkpoint", checkpoint, "--out", out + ".a"], "mpi MPI_Init_thread * 1 1"),
        ([h.TESSERA, "probe", "id", "--checkpoint", checkpoint], "mpi MPI_Init_thread * 1 1"),
        ([h.TESSERA, "profile", "--config", config, "--lengths", "16", "--out", out + ".p"],
         "open profile.json * 1 1"),
    ]
    for n, (command, rule) in enumerate(table):
        for number in (signal.SIGTERM, signal.SIGINT):
            gate = f"{h.FOLDER}/gate-{n}-{number}"
            with h.background(command, env={"LD_PRELOAD": FAULTS,
                                            "TESSERA_DISK_FAULTS": f"{rule} hold={gate}"}) as process:
                h.wait_until(lambda: os.path.exists(gate + ".held") or process.poll() is not None,
                             what="the command's work")
                assert process.poll() is None, process.output()
                os.kill(process.pid, number)
                assert process.wait(timeout=10) == -number, (command, process.output())
    # What the build left is no component, and the next start makes it whole.
    assert not glob.glob(out + "/*/manifest.textproto")
    h.run(build)
    h.run(["diff", "-r", data + "/shards", out])


def test_launch_script_passes_signals_on_to_what_saves_nothing():
    data = h.make_data()
    for name in SIGNALS:
        gate = f"{h.FOLDER}/gate-{name}"
        command = [RUN, "-n", "2", "-x", f"LD_PRELOAD={FAULTS}", "--", h.TESSERA, "data", "build",
                   "--recipe", data + "/recipe.textproto", "--sources", data + "/sources", "--out",
                   f"{h.FOLDER}/out-{name}"]
        with h.background(command, env={
                "TESSERA_DISK_FAULTS": f"write shard-000001 0 1 1 hold={gate}"}) as process:
            h.wait_until(lambda: os.path.exists(gate + ".held") or process.poll() is not None,
                         what="the build's work")
            assert process.poll() is None, process.output()
            start = time.time()
            os.kill(process.pid, SIGNALS[name])
            code = process.wait(timeout=30)
            say(f"{name} to launch/run of data build", code, start)
            assert code != 0 and time.time() - start < 8, (name, code, process.output())


def test_a_rank_that_never_comes_ends_the_others():
    if not h.LONG:  # takes two minutes
        return
    with Run("unmet", "before MPI", "mpirun").started() as run:
        code = run.process.wait(timeout=180)
        assert code == 5 and "have not met within 120 s" in run.process.output(), (
            code, run.process.output())


if __name__ == "__main__":
    h.main(globals())
