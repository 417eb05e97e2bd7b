#!/usr/bin/env python3
"""Prints the quick start's recipe for what could be had: without the components whose packages are
missing, and on bytes where there is no tokenizer. With everything there it changes nothing."""

import argparse
import json
import os
import re
import sys


def without(recipe, names):
    """The recipe without these components, alone and as parts of a stream."""
    for name in names:
        recipe = re.sub(rf'^component \{{\n  name: "{name}"\n.*?^\}}\n', "", recipe, flags=re.S | re.M)
        recipe = re.sub(rf'^ +component \{{ name: "{name}" .*\}}\n', "", recipe, flags=re.M)
    return recipe


def on_bytes(recipe):
    """The recipe with the paragraph on its tokenizer replaced."""
    return re.sub(r"(^#.*\n)*^tokenizer: .*\n(.+\n)*", 'tokenizer: "byte"\n', recipe, flags=re.M)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="folder that corpus.py made")
    parser.add_argument("--bytes", action="store_true", help="bytes as tokens")
    arguments = parser.parse_args()
    with open(os.path.join(here, "configs/quickstart_recipe.textproto"), encoding="utf-8") as file:
        recipe = file.read()
    with open(os.path.join(arguments.text, "summary.json"), encoding="utf-8") as file:
        recipe = without(recipe, json.load(file)["left_out"])
    sys.stdout.write(on_bytes(recipe) if arguments.bytes else recipe)


if __name__ == "__main__":
    main()
