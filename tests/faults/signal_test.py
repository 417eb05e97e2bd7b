"""Signals that ask a run to stop: one checkpoint, exit code 0, and a resume that continues the
unbroken run. (B31)"""
import os
import signal
import sys
import time

import harness as h

del sys.argv[2]  # the fault injection, which isn't needed here
STEPS = 100000  # more than any machine does before the signal comes
RUN = h.SOURCE + "/launch/run"


def continue_and_compare(folder, steps_done):
    """A few steps more on 3 ranks: the files of a run on 2 ranks that nothing interrupted."""
    stop = [f"train.stop_at_step={steps_done + 4}"]
    h.train(h.make_config(STEPS), folder, 3, sets=stop)
    reference = h.new_folder("reference")
    h.train(h.make_config(STEPS), reference, 2, sets=stop)
    h.assert_same_file(h.last_checkpoint(folder), h.last_checkpoint(reference))
    assert h.numbers(folder) == h.numbers(reference), folder


def stop_and_resume(name, command, send, ready):
    folder = h.new_folder(name)
    command = [*command, h.TESSERA, "train", "--config", h.make_config(STEPS), "--run-dir", folder]
    with h.background(command) as process:
        h.wait_until(lambda: ready(folder) or process.poll() is not None, what="the run's start")
        send(process)
        code = process.wait(timeout=60)
        output = process.output()
    assert code == 0, f"{name}: exit code {code}\n{output}"
    stopped = h.metrics(folder)[-1]
    assert stopped["stopped"] == "signal", f"{name}: {stopped}\n{output}"
    names = h.checkpoints(folder)
    assert names[-1] == f"step-{stopped['step']:08d}.h5", (names, stopped)
    continue_and_compare(folder, stopped["step"])


def after(steps):
    return lambda folder: h.steps_in_metrics(folder) >= steps


def test_term_to_the_launcher():
    stop_and_resume("term", [RUN, "-n", "4"], lambda p: os.kill(p.pid, signal.SIGTERM), after(3))


def test_interrupt_to_the_launcher():
    stop_and_resume("int", [RUN, "-n", "2"], lambda p: os.kill(p.pid, signal.SIGINT), after(2))


def test_term_to_the_launcher_at_once():
    def send(process):
        time.sleep(0.03)
        os.kill(process.pid, signal.SIGTERM)
    stop_and_resume("early", [RUN, "-n", "2"], send, lambda folder: True)


def test_usr1_to_mpirun():
    stop_and_resume("usr1", h.MPIRUN + ["-n", "4"], lambda p: os.kill(p.pid, signal.SIGUSR1),
                    after(3))


def test_usr1_twice():
    def send(process):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.05)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGUSR1)
    stop_and_resume("twice", h.MPIRUN + ["-n", "2"], send, after(2))


def test_term_to_one_rank_alone():
    def send(process):
        for name in sorted(os.listdir(h.FOLDER + "/one/logs")):
            if name == "rank-1.state":
                words = open(h.FOLDER + "/one/logs/" + name, encoding="utf-8").read().split()
                os.kill(int(words[words.index("pid") + 1]), signal.SIGTERM)
                return
        raise AssertionError("no state file of rank 1")
    stop_and_resume("one", h.MPIRUN + ["-n", "3"], send, after(2))


def test_term_to_mpirun_ends_unsaved_with_the_last_checkpoint_intact():
    folder = h.new_folder("mpirun")
    command = h.MPIRUN + ["-n", "2", h.TESSERA, "train", "--config", h.make_config(STEPS),
                          "--run-dir", folder]
    with h.background(command) as process:
        h.wait_until(lambda: h.steps_in_metrics(folder) >= 5, what="five steps")
        os.kill(process.pid, signal.SIGTERM)
        code = process.wait(timeout=30)
    assert code != 0
    continue_and_compare(folder, h.steps_in_metrics(folder))


if __name__ == "__main__":
    h.main(globals())
