#!/usr/bin/python3
"""Has TensorBoard itself read the event files that metrics_test left.

Usage: tensorboard_reads.py FOLDER [--venv DIR]

FOLDER is BUILD/tests/tensorboard_sample. TensorBoard comes from PyPI into a virtual environment at
DIR (default: beside FOLDER), made once. Exit code 0: it reads what was written; 1: it doesn't;
77: TensorBoard can't be had here.
"""
import argparse
import os
import subprocess
import sys
import venv

PACKAGES = ["tensorboard", "setuptools<81"]

# Runs inside the virtual environment.
READER = """
import sys
from tensorboard.backend.event_processing import plugin_event_multiplexer
import tensorboard
multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(sys.argv[1])
multiplexer.Reload()
run = list(multiplexer.Runs())[0]
print("TensorBoard", tensorboard.__version__)
for tag in sorted(multiplexer.Runs()[run]["tensors"]):
    for event in multiplexer.Tensors(run, tag):
        value = event.tensor_proto.float_val[0]
        print(tag, event.step, value)
"""


def expected():
    """Steps 0-5 of the first start, then 6 and 7 of the second."""
    lines = []
    for step in range(8):
        lines.append(("loss", step, float(step if step >= 6 else 100 + step)))
        for tag, value in (("learning_rate", 3e-4), ("grad_norm", 0.5),
                           ("tokens_per_second", 2048.0), ("mfu", 0.4)):
            lines.append((tag, step, value))
    lines += [("validation/web", step, 0.5) for step in (6, 7)]
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--venv")
    arguments = parser.parse_args()
    if not os.path.isdir(arguments.folder):
        raise SystemExit(f"{arguments.folder}: no such folder; run metrics_test first")
    environment = arguments.venv or os.path.join(os.path.dirname(os.path.abspath(arguments.folder)),
                                                 "tensorboard_venv")
    python = os.path.join(environment, "bin", "python")
    if subprocess.run([python, "-c", "import tensorboard"], stderr=subprocess.DEVNULL,
                      check=False).returncode if os.path.exists(python) else True:
        venv.create(environment, with_pip=True)
        install = subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES],
                                 check=False)
        if install.returncode:
            print("TensorBoard can't be installed here", file=sys.stderr)
            return 77
    output = subprocess.run([python, "-c", READER, arguments.folder], check=True,
                            stdout=subprocess.PIPE, text=True).stdout.splitlines()
    print(output[0])
    found = {}
    for line in output[1:]:
        tag, step, value = line.split()
        found[tag, int(step)] = float(value)
    wanted = {(tag, step): value for tag, step, value in expected()}
    wrong = [key for key in sorted(wanted.keys() | found.keys())
             if key not in wanted or key not in found or
             abs(found[key] - wanted[key]) > 1e-6 * abs(wanted[key])]
    for key in wrong:
        print(f"{key}: expected {wanted.get(key)}, TensorBoard has {found.get(key)}")
    if not wrong:
        print(f"{len(found)} values, as they were written")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
