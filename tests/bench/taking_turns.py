"""Programs that are measured in turn: each is a process that waits for the number of repetitions on
its standard input and answers with a line that begins with the seconds they took."""

import os
import statistics
import subprocess
import time

# What keep_large_allocations() tells glibc's malloc, for programs that don't tell it themselves.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2047 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def machine():
    """The CPU's model, cores and instruction sets, for the head of a table."""
    model, flags = "unknown CPU", set()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            if key.strip() == "flags":
                flags = set(value.split())
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{model}, {os.cpu_count()} cores, {' '.join(sets)}"


class Program:
    """A persistent process. What it writes to standard error is shown."""

    def __init__(self, command, environment=None, folder=None):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )

    def repeat(self, count):
        """The words of the answer to `count`: the first is seconds."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return [float(word) for word in line.split()]

    def end(self):
        """Closes the program's input, which it takes as its end."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def in_turn(programs, rounds, count, warm_up, rest=0.3):
    """Median seconds of one repetition of each program, and its last answer. `programs` maps names
    to Programs. Threads of one that still spin have `rest` seconds to fall asleep."""
    seconds = {name: [] for name in programs}
    answers = {}
    for program in programs.values():
        program.repeat(warm_up)
    for _ in range(rounds):
        for name, program in programs.items():
            time.sleep(rest)
            answers[name] = program.repeat(count)
            seconds[name].append(answers[name][0] / count)
    return {name: statistics.median(times) for name, times in seconds.items()}, answers


def print_table(columns, rows):
    """Rows of text under their columns."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        cells = [str(cell).ljust(width) if i == 0 else str(cell).rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells), flush=True)
