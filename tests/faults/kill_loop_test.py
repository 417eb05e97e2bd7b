"""A few rounds of kill_loop; with TESSERA_LONG=1 100 of them, and 50 inside checkpoints."""
import os

import harness as h

HERE = os.path.dirname(os.path.abspath(__file__))


def kill_loop(rounds, *flags):
    done = h.run([HERE + "/kill_loop", str(rounds), "--program", h.TESSERA, *flags], timeout=7000)
    print(done.stdout, end="")
    return done.stdout


def test_B28_killed_at_random_instants():
    text = kill_loop(100 if h.LONG else 3)
    assert "all equal to the unbroken run" in text, text


def test_B12_killed_inside_checkpoints():
    text = kill_loop(50 if h.LONG else 2, "--inside-checkpoints")
    assert "all equal to the unbroken run" in text and " 0 inside" not in text, text


if __name__ == "__main__":
    h.main(globals())
