#!/usr/bin/env python3
"""Our tokenizer against Hugging Face's `tokenizers` (from PyPI), one thread each, taking turns over
the same documents; their ids must be the same.

  tests/bench/tokenizer.py --tokenizer qwen.tiktoken English=TEXT Korean=TEXT code=TEXT

The second is made from the .tiktoken file as the Qwen family's tokenizer.json is."""

import argparse
import base64
import os
import sys
import tempfile
import time

import taking_turns

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def printable():
    """Byte-level BPE's alphabet: a character for each byte."""
    same = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in same}
    for place, byte in enumerate(sorted(set(range(256)) - set(same))):
        table[byte] = chr(256 + place)
    return table


def parts(token, ranks):
    """The two tokens that the merges of lower rank leave of this one."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in zip(pieces, pieces[1:])]
        place = min(range(len(joined)), key=joined.__getitem__)
        pieces[place:place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces


def hugging_face(path):
    import tokenizers
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    if path.endswith(".json"):
        return tokenizers.__version__, Tokenizer.from_file(path)
    with open(path, "rb") as file:
        ranks = {base64.b64decode(token): int(rank)
                 for token, rank in (line.split() for line in file if line.strip())}
    table = printable()

    def text(token):
        return "".join(table[byte] for byte in token)

    merges = [tuple(text(part) for part in parts(token, ranks))
              for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({text(t): r for t, r in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizers.__version__, tokenizer


def answer_orders(path, text):
    """This program as the other side: orders from standard input, as ours takes them."""
    _, tokenizer = hugging_face(path)
    with open(text, encoding="utf-8", newline="") as file:
        documents = file.read().split("\0")[:-1]
    for line in sys.stdin:
        start, count = time.monotonic(), 0
        for _ in range(int(line)):
            for document in documents:
                count += len(tokenizer.encode(document, add_special_tokens=False).ids)
        print(time.monotonic() - start, count, flush=True)


def documents_of(path, size, limit):
    """The file's text, cut at ends of lines into documents of about `size` characters."""
    with open(path, encoding="utf-8", errors="ignore", newline="") as file:
        lines = file.read(limit).replace("\0", "").splitlines(keepends=True)
    document, length = [], 0
    for line in lines:
        document.append(line)
        length += len(line)
        if length >= size:
            yield "".join(document)
            document, length = [], 0
    if document:
        yield "".join(document)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="folder of our programs")
    parser.add_argument("--tokenizer", required=True, help=".tiktoken or tokenizer.json")
    parser.add_argument("--document", type=int, default=8192, help="characters of a document")
    parser.add_argument("--megabytes", type=float, default=4, help="used of each file, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("texts", nargs="+", help="NAME=FILE")
    options = parser.parse_args()
    if options.answer:
        answer_orders(options.tokenizer, options.texts[0])
        return
    version, _ = hugging_face(options.tokenizer)
    print(f"machine: {taking_turns.machine()}\nthreads: 1; warm-up left out; median of "
          f"{options.rounds} turns; peer: tokenizers {version}")
    rows = []
    for name, path in (text.split("=", 1) for text in options.texts):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as file:
            for document in documents_of(path, options.document, int(options.megabytes * 1e6)):
                file.write(document + "\0")
            file.flush()
            size = os.path.getsize(file.name)
            alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
            programs = {
                "ours": taking_turns.Program(
                    [os.path.join(options.build, "tests/bench/bench_tokenizer"),
                     options.tokenizer, file.name]),
                "peer": taking_turns.Program(
                    [sys.executable, __file__, "--answer", "--tokenizer", options.tokenizer,
                     file.name], {**taking_turns.MALLOC, **alone}),
            }
            try:
                seconds, answers = taking_turns.in_turn(programs, options.rounds, 1, 1)
            finally:
                for program in programs.values():
                    program.end()
        if answers["ours"][1] != answers["peer"][1]:
            sys.exit(f"{name}: {answers['ours'][1]:.0f} ids of ours, {answers['peer'][1]:.0f} of "
                     "the peer's: they don't do the same")
        rows.append([name, f"{size / 1e6:.2f}", f"{size / 1e6 / seconds['ours']:.2f}",
                     f"{size / 1e6 / seconds['peer']:.2f}",
                     f"{seconds['peer'] / seconds['ours']:.1f}"])
    taking_turns.print_table(["text", "MB", "ours MB/s", "tokenizers MB/s", "ours/peer"], rows)


if __name__ == "__main__":
    main()
