#!/usr/bin/env python3
"""Every mixer, forward and backward, against PyTorch's fastest way, taking turns in one run.

  tests/bench/mixers.py --build BUILD --torch-python VENV/bin/python --precisions f32 bf16

Peers get ours' malloc settings and as many threads; of eager and torch.compile the faster one
counts."""

import argparse
import os
import signal
import statistics
import sys

import taking_turns

TYPES = ["full", "sliding", "differential", "linear", "mamba2", "nsa", "compress", "hybrid"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="folder of our programs")
    parser.add_argument("--torch-python", required=True, help="python that has torch")
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--precisions", nargs="+", default=["f32", "bf16"],
                        choices=["f32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the programs end with this one

    here = os.path.dirname(os.path.abspath(__file__))
    ours = os.path.join(options.build, "tests/bench/bench_mixer")
    print(f"machine: {taking_turns.machine()}\nthreads: {options.threads}; d 512, 8 query and 2 "
          f"key/value heads of 64, one sequence; median of {options.rounds} turns")
    for precision in options.precisions:
        ratios, rows = [], []
        for length in options.lengths:
            for kind in options.types:
                arguments = ["--type", kind, "--length", str(length), "--precision", precision,
                             "--threads", str(options.threads)]
                torch = [options.torch_python, os.path.join(here, "torch_mixers.py"), *arguments]
                environment = {**taking_turns.MALLOC, "OMP_NUM_THREADS": str(options.threads)}
                programs = {
                    "ours": taking_turns.Program([ours, *arguments]),
                    "eager": taking_turns.Program(torch, environment),
                    "compile": taking_turns.Program([*torch, "--compile"], environment),
                }
                try:
                    seconds, answers = taking_turns.in_turn(programs, options.rounds, 1, 2)
                finally:
                    for program in programs.values():
                        program.end()
                best = min(seconds["eager"], seconds["compile"])
                ratios.append(best / seconds["ours"])
                rows.append([f"{kind} {length}", *(f"{1e3 * seconds[name]:.1f}"
                                                   for name in programs), f"{ratios[-1]:.2f}",
                             *(f"{answers[name][1] / 1e6:.0f}" for name in programs)])
        print(f"\n{precision}, forward and backward")
        taking_turns.print_table(["", "ours ms", "eager ms", "compile ms", "best/ours", "ours MB",
                                  "eager MB", "compile MB"], rows)
        print(f"least {min(ratios):.2f}, median {statistics.median(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
