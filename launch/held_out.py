#!/usr/bin/env python3
"""Held-out loss of a run per component, beside the unigram entropy of the same held-out tokens.

The unigram entropy is the least loss that any model without context can have on these tokens, one
fitted to them included. What lies below it was learnt from context.
"""

import argparse
import array
import collections
import json
import math
import os
import re
import sys


def held_out_windows(recipe):
    """component -> held-out windows, and the sequence length, of a recipe's text."""
    text = re.sub(r"#.*", "", recipe)
    length = int(re.search(r"^sequence_length:\s*(\d+)", text, re.M).group(1))
    windows = {}
    for block in re.split(r"^component\s*\{", text, flags=re.M)[1:]:
        name = re.search(r'name:\s*"([^"]+)"', block).group(1)
        held = re.search(r"held_out_windows:\s*(\d+)", block)
        windows[name] = int(held.group(1)) if held else 0
    return windows, length


def held_out_labels(folder, windows, length):
    """The labels of a component's last windows."""
    with open(os.path.join(folder, "manifest.textproto"), encoding="utf-8") as file:
        manifest = file.read()
    shards = re.findall(r'^shard \{\s*file: "([^"]+)"\s*tokens: (\d+)', manifest, re.M)
    total = sum(int(tokens) for _, tokens in shards)
    whole = (total - 1) // length
    first, last = (whole - windows) * length + 1, whole * length + 1
    labels, start = array.array("I"), 0
    for name, tokens in shards:
        begin, end = max(first, start), min(last, start + int(tokens))
        if begin < end:
            with open(os.path.join(folder, name), "rb") as file:
                file.seek(4 * (begin - start))
                labels.fromfile(file, end - begin)
        start += int(tokens)
    if sys.byteorder == "big":
        labels.byteswap()
    return labels


def entropy(labels):
    """Of the frequencies of the labels, in nats."""
    counts = collections.Counter(labels)
    return -sum(n * math.log(n / len(labels)) for n in counts.values()) / len(labels)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", required=True, help="folder that `tessera data build` wrote")
    parser.add_argument("--metrics", required=True, help="metrics.jsonl of the run")
    parser.add_argument("--mean-entropy", action="store_true", help="print only that number")
    arguments = parser.parse_args()

    with open(arguments.recipe, encoding="utf-8") as file:
        windows, length = held_out_windows(file.read())
    last = None
    with open(arguments.metrics, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record.get("validation_loss"):
                last = record
    if last is None:
        raise SystemExit(f"held_out: {arguments.metrics} holds no validation")

    rows = []
    for name, loss in last["validation_loss"].items():
        if windows.get(name, 0) > 0:
            labels = held_out_labels(os.path.join(arguments.data, name), windows[name], length)
            rows.append((name, len(labels), loss, entropy(labels)))
    loss = sum(row[2] for row in rows) / len(rows)
    bound = sum(row[3] for row in rows) / len(rows)
    if arguments.mean_entropy:
        print(f"{bound:.4f}")
        return
    title = f"held out, after {last['step'] + 1} steps"
    print(f"{title:<28}{'tokens':>8}{'loss':>10}{'unigram':>10}{'below':>10}")
    print(f"{'':<28}{'':>8}{'':>10}{'entropy':>10}{'it by':>10}")
    for name, count, value, level in rows + [("mean", sum(r[1] for r in rows), loss, bound)]:
        print(f"  {name:<26}{count:8d}{value:10.3f}{level:10.3f}{level - value:10.3f}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"held_out: {error}")
