"""A rank that dies, throws, leaves or stops ends the job in time, with a line that names it; what
was saved stands, and the next start goes on to the unbroken run's files. (B28)"""
import os
import sys
import time

import harness as h

INJECTION = os.path.abspath(sys.argv.pop(2))
RANKS = 4
STEPS = 6


def injected(folder, kind, rank, call, expect=None, sets=(), in_flight=False):
    start = time.time()
    done = h.train(h.make_config(STEPS), folder, RANKS, sets=sets, expect=expect,
                   mpi=["-x", f"LD_PRELOAD={INJECTION}", "-x", f"TESSERA_FAULT_RANK={rank}", "-x",
                        f"TESSERA_FAULT_CALL={call}", "-x", f"TESSERA_FAULT_KIND={kind}"]
                   + (["-x", "TESSERA_FAULT_IN=transfer"] if in_flight else []))
    text = done.stdout + done.stderr
    assert "fault injected: " + kind in text, text
    return done.returncode, text, time.time() - start


def end_and_resume(kind, words, rank, call, in_flight=False):
    folder = h.new_folder(f"{kind}-{rank}")
    code, text, seconds = injected(folder, kind, rank, call, in_flight=in_flight)
    assert code != 0, f"{kind}: exit code 0\n{text}"
    assert seconds < 30, f"{kind}: {seconds:.1f} s"
    named = [line for line in text.splitlines()
             if any(word in line for word in (f"rank {rank} ", f"rank {rank},", f"rank [{rank}"))
             or ("[" in line and f",{rank}]" in line)]
    assert named, f"{kind}: no line names rank {rank}\n{text}"
    assert words in text, f"{kind}: '{words}' isn't in\n{text}"
    h.resume_as_unbroken(folder, h.make_config(STEPS), 3)


# The call numbers lie in the start of the run (12), in its first steps (60) and further on (150).
def test_killed():
    for rank in range(RANKS):
        end_and_resume("kill", "signal 9 (Killed)", rank, 60)


def test_throws():
    for rank in range(RANKS):
        end_and_resume("throw", "injected fault", rank, 60 + rank)


def test_exits():
    end_and_resume("exit", "", 1, 60)
    end_and_resume("exit0", "", 2, 60)
    end_and_resume("exit", "", 0, 12)


def test_aborts():
    end_and_resume("abort", "signal 6 (Aborted)", 3, 150)


def test_killed_while_transfers_are_in_flight():
    for rank in range(RANKS):
        end_and_resume("kill", "signal 9 (Killed)", rank, 80 + 40 * rank, in_flight=True)


def test_mpi_reports_an_error_while_transfers_are_in_flight():
    folder = h.new_folder("error")
    code, text, seconds = injected(folder, "error", 2, 300, in_flight=True)
    assert code == 5 and seconds < 30, (code, seconds, text)
    line = [line for line in text.splitlines() if line.startswith("tessera: rank 2")]
    assert line and "with rank" in line[0] and "step" in line[0], text


def test_mpi_reports_an_error():
    folder = h.new_folder("error")
    code, text, seconds = injected(folder, "error", 2, 60)
    assert code == 5 and seconds < 30, (code, seconds, text)
    line = [line for line in text.splitlines() if line.startswith("tessera: rank 2")]
    assert line and "step" in line[0], text


def test_stopped_rank_is_found_by_the_watchdog():
    folder = h.new_folder("stopped")
    code, text, seconds = injected(folder, "stop", 1, 60, sets=["execution.watchdog_seconds=4"])
    assert code != 0 and seconds < 30, (code, seconds, text)
    line = [line for line in text.splitlines() if "nothing has moved for 4 s" in line]
    assert line and "furthest behind: rank 1 " in line[0], text


if __name__ == "__main__":
    h.main(globals())
