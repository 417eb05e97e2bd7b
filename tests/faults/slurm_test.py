"""The batch script for Slurm, with a scontrol that only takes notes: a signal before the limit saves
and puts the job back into the queue, which nothing else does but a lost host."""
import os
import signal

import harness as h

SCRIPT = h.SOURCE + "/launch/cluster/slurm"
STEPS = 100000  # more than any machine does before the signal comes


def environment(**more):
    """Slurm's of a job of two tasks; `requeued()` tells what scontrol was asked."""
    tools = h.FOLDER + "/tools"
    if not os.path.isdir(tools):
        os.mkdir(tools)
        h.write(tools + "/scontrol", f'#!/bin/sh\necho "$*" >>{h.FOLDER}/asked\n')
        os.chmod(tools + "/scontrol", 0o755)
    if os.path.exists(h.FOLDER + "/asked"):
        os.remove(h.FOLDER + "/asked")
    return {"PATH": tools + ":" + os.environ["PATH"], "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "1", "TESSERA": h.TESSERA,
            "TESSERA_RUN": h.SOURCE + "/launch/run", **more}


def requeued():
    try:
        with open(h.FOLDER + "/asked", encoding="utf-8") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def signalled(folder, number):
    with h.background([SCRIPT, h.make_config(STEPS), folder], env=environment()) as process:
        before = h.steps_in_metrics(folder)
        h.wait_until(lambda: h.steps_in_metrics(folder) >= before + 3 or process.poll() is not None,
                     what="three steps")
        os.kill(process.pid, number)
        code = process.wait(timeout=60)
        assert code == 0, f"{code}\n{process.output()}"
    stopped = h.metrics(folder)[-1]
    assert stopped["stopped"] == "signal", stopped
    assert h.checkpoints(folder)[-1] == f"step-{stopped['step']:08d}.h5"
    return stopped["step"]


def test_a_signal_before_the_limit_saves_and_requeues_until_the_run_is_done():
    folder = h.new_folder("jobs")
    signalled(folder, signal.SIGUSR1)
    assert requeued() == ["requeue 4711"], requeued()
    steps = signalled(folder, signal.SIGUSR1)  # the next job
    assert requeued() == ["requeue 4711"], requeued()
    stop = f"train.stop_at_step={steps + 3}"
    h.run([SCRIPT, h.make_config(STEPS), folder, "--set", stop], env=environment())
    assert requeued() == [], requeued()
    reference = h.new_folder("reference")
    h.train(h.make_config(STEPS), reference, 1, sets=[stop])
    h.assert_same_file(h.last_checkpoint(folder), h.last_checkpoint(reference))
    assert h.numbers(folder) == h.numbers(reference)


def test_a_stop_by_hand_saves_and_does_not_requeue():
    signalled(h.new_folder("by-hand"), signal.SIGTERM)
    assert requeued() == [], requeued()


def test_a_run_that_fails_is_not_requeued():
    done = h.run([SCRIPT, h.FOLDER + "/nowhere.textproto", h.new_folder("failed")],
                 env=environment(), expect=2)
    assert "nowhere.textproto" in done.stderr and requeued() == [], (done.stderr, requeued())
    for code in (1, 3, 4, 6, 70, 137):
        ends_with(f"exit {code}", code)
        assert requeued() == [], (code, requeued())


def test_a_lost_host_requeues_when_something_was_saved():
    ends_with("exit 5", 5)
    assert requeued() == [], requeued()
    ends_with("touch $folder/checkpoints/step-00000002.h5; exit 5", 0)
    assert requeued() == ["requeue 4711"], requeued()


def test_a_run_that_is_done_as_the_signal_comes_is_not_requeued():
    for reason, expected in (("done", []), ("signal", ["requeue 4711"])):
        ends_with(f"""trap 'echo {{\\"stopped\\": \\"{reason}\\"}} >$folder/metrics.jsonl; exit 0' TERM
            kill -USR1 $PPID; while :; do sleep 0.05; done""", 0)
        assert requeued() == expected, (reason, requeued())


def ends_with(script, expect):
    """In place of launch/run: `script`, which knows the run's $folder."""
    folder = h.new_folder("stub")
    os.makedirs(folder + "/checkpoints")
    h.write(folder + "/checkpoints/step-00000001.h5", "")
    os.utime(folder + "/checkpoints/step-00000001.h5", (1, 1))
    h.write(h.FOLDER + "/stub.sh", f"#!/bin/sh\nfolder={folder}\n{script}\n")
    os.chmod(h.FOLDER + "/stub.sh", 0o755)
    h.run([SCRIPT, "config", folder], env=environment(TESSERA_RUN=h.FOLDER + "/stub.sh"),
          expect=expect)


if __name__ == "__main__":
    h.main(globals())
