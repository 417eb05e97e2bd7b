#!/usr/bin/env python3
"""A feed-forward of experts, forward and backward, against PyTorch's ways, taking turns in one run.

  tests/bench/experts.py --build BUILD --torch-python VENV/bin/python --precisions bf16 f32

The default is a layer of the flagship. Peers get ours' malloc settings and as many threads; the
fastest one counts. Other words, as --latent 512, go to all programs."""

import argparse
import os
import signal
import subprocess
import sys

import taking_turns

# The loop, compiled, wasn't ready after four minutes and isn't among them unless it is named.
WAYS = ["loop", "grouped", "grouped+compile", "bmm", "bmm+compile", "dense", "dense+compile"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="folder of our programs")
    parser.add_argument("--torch-python", required=True, help="python that has torch")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "f32"],
                        choices=["f32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options, shape = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the programs end with this one

    here = os.path.dirname(os.path.abspath(__file__))
    ours = os.path.join(options.build, "tests/bench/bench_experts")
    print(f"machine: {taking_turns.machine()}\nthreads: {options.threads}; one sequence; median "
          f"of {options.rounds} turns; {' '.join(shape)}", flush=True)
    for precision in options.precisions:
        arguments = ["--precision", precision, "--threads", str(options.threads), *shape]
        torch = [options.torch_python, os.path.join(here, "torch_experts.py"), *arguments]
        environment = {**taking_turns.MALLOC, "OMP_NUM_THREADS": str(options.threads)}
        programs = {"ours": taking_turns.Program([ours, *arguments])}
        for way in options.ways:
            name, _, compiled = way.partition("+")
            command = [*torch, "--way", name, *(["--compile"] if compiled else [])]
            programs[way] = taking_turns.Program(command, environment)
        try:
            seconds, answers = taking_turns.in_turn(programs, options.rounds, 1, 2)
        finally:
            for program in programs.values():
                program.end()
        peak = float(subprocess.run([ours, *arguments, "--peak"], check=True,
                                    capture_output=True).stdout)
        rows = []
        for name in programs:
            rate = answers[name][2] / seconds[name]
            rows.append([name, f"{1e3 * seconds[name]:.0f}", f"{rate / 1e9:.0f}",
                         f"{100 * rate / peak:.1f} %", f"{seconds[name] / seconds['ours']:.2f}",
                         f"{answers[name][1] / 1e6:.0f}", f"{answers[name][3]:.2f}"])
        print(f"\n{precision}, peak loop {peak / 1e9:.0f} GFLOP/s")
        taking_turns.print_table(["", "ms", "GFLOP/s", "of peak", "of ours", "peak MB",
                                  "largest load"], rows)
        best = min(options.ways, key=seconds.get)
        print(f"best of PyTorch: {best}, {seconds[best] / seconds['ours']:.2f} times ours",
              flush=True)


if __name__ == "__main__":
    main()
