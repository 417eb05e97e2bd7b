#!/usr/bin/env python3
"""Training steps of ours against PyTorch and llm.c, taking turns in one run on random tokens.

  tests/bench/train_step.py --shape small --torch-python VENV/bin/python
  tests/bench/train_step.py --shape gpt2-64 --torch-python VENV/bin/python --llmc FOLDER/train_gpt2

Peers get ours' malloc settings and as many threads. llm.c's program is its train_gpt2.c, built as
its Makefile does (gcc -Ofast -march=native -fopenmp -DOMP) with the T in its main set to the
shape's; it is started in its own folder, where llmc_files.py wrote what it reads."""

import argparse
import os
import re
import signal
import subprocess
import sys

import taking_turns

SHAPES = {
    "small": {"width": 512, "layers": 8, "heads": 8, "feed-forward": 1365, "vocabulary": 32000,
              "batch": 4, "length": 512},
    "gpt2-64": {"width": 768, "layers": 12, "heads": 12, "feed-forward": 2048,
                "vocabulary": 50257, "batch": 4, "length": 64},
}
SHAPES["gpt2-256"] = {**SHAPES["gpt2-64"], "length": 256}
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
          "--mca", "mpi_yield_when_idle", "1"]
LAYOUTS = {  # ranks, threads of each, options of mpirun
    "1x2": (1, 2, []),
    "2x1": (2, 1, []),
    "4x1": (4, 1, []),
    "4x1-tcp": (4, 1, ["--mca", "btl", "self,tcp"]),
}


class LlmC:
    """llm.c's program takes no orders: it is stopped between its turns, and tells the time of each
    step itself. The step that a stop interrupted isn't counted."""

    def __init__(self, program):
        program = os.path.abspath(program)
        self.process = subprocess.Popen(
            ["stdbuf", "-oL", program], stdout=subprocess.PIPE, text=True,
            cwd=os.path.dirname(program),
            env={**os.environ, **taking_turns.MALLOC, "OMP_NUM_THREADS": "2"})
        self.process.send_signal(signal.SIGSTOP)
        self.steps = 0

    def step(self):
        for line in self.process.stdout:
            if match := re.match(r"step \d+: train loss (\S+) \(took (\S+) ms\)", line):
                self.steps += 1
                return float(match[2]) / 1e3, float(match[1])
        raise RuntimeError("llm.c's program ended: it makes 41 steps, so ask for fewer rounds")

    def repeat(self, count):
        self.process.send_signal(signal.SIGCONT)
        if self.steps:
            self.step()
        steps = [self.step() for _ in range(count)]
        self.process.send_signal(signal.SIGSTOP)
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])
        return [sum(seconds for seconds, _ in steps), peak, steps[-1][1]]

    def end(self):
        self.process.kill()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="folder of our programs")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--precisions", nargs="+", default=["f32", "bf16"],
                        choices=["f32", "bf16"])
    parser.add_argument("--layouts", nargs="+", default=["1x2"], choices=LAYOUTS,
                        help="of ours: ranks x threads")
    parser.add_argument("--torch-python", help="python that has torch; without it no PyTorch")
    parser.add_argument("--torch-modes", nargs="+", default=["eager", "compile"],
                        choices=["eager", "compile"])
    parser.add_argument("--llmc", help="llm.c's train_gpt2; without it no llm.c")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--ours", nargs=argparse.REMAINDER, default=[],
                        help="more options of bench_train_step")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the programs end with this one

    shape = SHAPES[options.shape]
    arguments = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    here = os.path.dirname(os.path.abspath(__file__))
    ours = os.path.join(options.build, "tests/bench/bench_train_step")
    tokens = shape["batch"] * shape["length"]
    print(f"machine: {taking_turns.machine()}\nthreads: 2; warm-up left out; median of "
          f"{options.rounds} turns of {options.steps} steps\nshape: {shape}")
    for precision in options.precisions:
        programs = {}
        for layout in options.layouts:
            ranks, threads, extra = LAYOUTS[layout]
            command = [] if ranks == 1 else [*MPIRUN, *extra, "-n", str(ranks)]
            programs[f"ours {layout}"] = taking_turns.Program(
                [*command, ours, *arguments, "--threads", str(threads), "--precision", precision,
                 *options.ours])
        if options.torch_python:
            models = ["same"] if options.shape == "small" else ["same", "gpt2"]
            for model in models:
                for mode in options.torch_modes:
                    name = f"PyTorch {mode}, {'same stack' if model == 'same' else 'GPT-2'}"
                    programs[name] = taking_turns.Program(
                        [options.torch_python, os.path.join(here, "torch_step.py"), *arguments,
                         "--precision", precision, "--model", model, "--threads", "2",
                         *(["--compile"] if mode == "compile" else [])],
                        {**taking_turns.MALLOC, "OMP_NUM_THREADS": "2"})
        if options.llmc and precision == "f32":
            programs["llm.c"] = LlmC(options.llmc)
        try:
            seconds, answers = taking_turns.in_turn(programs, options.rounds, options.steps,
                                                    options.warm_up)
        finally:
            for program in programs.values():
                program.end()
        first = seconds[next(iter(programs))]
        print(f"\n{precision}")
        taking_turns.print_table(
            ["", "tokens/s", "ms/step", "first/this", "peak MB", "loss"],
            [[name, f"{tokens / seconds[name]:.1f}", f"{1e3 * seconds[name]:.1f}",
              f"{seconds[name] / first:.2f}", f"{answers[name][1] / 1e6:.0f}",
              f"{answers[name][2]:.4f}"] for name in programs])


if __name__ == "__main__":
    main()
