#!/usr/bin/env python3
"""Writes what llm.c's train_gpt2 reads into its folder: a GPT-2 124M with random weights (format
3), and random tokens. Usage: llmc_files.py FOLDER"""

import os
import struct
import sys

import numpy


def header(*numbers):
    return struct.pack("<256i", *numbers, *[0] * (256 - len(numbers)))


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = sys.argv[1]
    random = numpy.random.default_rng(1)
    length, vocabulary, padded, layers, heads, width = 1024, 50257, 50304, 12, 12, 768

    def normal(count):
        return (0.02 * random.standard_normal(count, dtype=numpy.float32)).tobytes()

    def constant(value, count):
        return numpy.full(count, value, numpy.float32).tobytes()

    with open(os.path.join(folder, "gpt2_124M.bin"), "wb") as file:
        file.write(header(20240326, 3, length, vocabulary, layers, heads, width, padded))
        file.write(normal(padded * width) + normal(length * width))
        file.write(constant(1, layers * width) + constant(0, layers * width))
        file.write(normal(layers * 3 * width * width) + constant(0, layers * 3 * width))
        file.write(normal(layers * width * width) + constant(0, layers * width))
        file.write(constant(1, layers * width) + constant(0, layers * width))
        file.write(normal(layers * 4 * width * width) + constant(0, layers * 4 * width))
        file.write(normal(layers * width * 4 * width) + constant(0, layers * width))
        file.write(constant(1, width) + constant(0, width))
    data = os.path.join(folder, "dev/data/tinyshakespeare")
    os.makedirs(data, exist_ok=True)
    for name in ("train", "val"):
        tokens = random.integers(0, vocabulary, 1 << 18, dtype=numpy.uint16)
        with open(os.path.join(data, f"tiny_shakespeare_{name}.bin"), "wb") as file:
            file.write(header(20240520, 1, len(tokens)) + tokens.tobytes())


if __name__ == "__main__":
    main()
