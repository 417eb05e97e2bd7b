#!/usr/bin/env python3
"""Real text from Debian packages, one JSONL file a component.

Seven components stand in for the seven sources of the paper's mixture. The packages are fetched
with `apt-get download` (nothing is installed) and kept; a second run needs no network. Each line
of a component's file is {"text": ..., "source": "package/path"}. Documents stand in the order of
the SHA-256 of their source, so that any part of a file is a sample of the whole.
"""

import argparse
import concurrent.futures
import fnmatch
import glob
import gzip
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import tarfile

# component: (package, pattern of its files, how they are read)
COMPONENTS = {
    "english_web": [
        ("anarchism", "usr/share/*.html", "markup"),
        ("dict-foldoc", "*.dict.dz", "dictionary"),
        ("fortunes", "usr/share/games/fortunes/*", "fortunes"),
    ],
    "textbook": [
        ("python3.11-doc", "*/_sources/*.txt", "plain"),
        ("perl-doc", "*.pod", "plain"),
    ],
    "math_filtered": [
        ("libcoq-stdlib", "*.v", "plain"),
        ("pari-doc", "*.tex", "plain"),
    ],
    "code": [
        ("libpython3.11-stdlib", "*.py", "plain"),
        ("golang-1.19-src", "*.go", "plain"),
    ],
    "math_web": [
        ("gap-doc", "*/chap*[!j].html", "markup"),  # the _mj.html hold the same text once more
        ("octave-doc", "*/octave.html/*.html", "markup"),
    ],
    "korean_web": [
        ("libreoffice-help-ko", "*/help/ko/text/*.html", "korean"),
    ],
    "korean_synthetic": [
        ("gnome-user-docs", "*/help/ko/*.page", "korean"),
        ("debian-faq-ko", "*/FAQ/ko/*.html", "korean"),
    ],
}
SHORTEST = 200  # bytes; a shorter document is dropped

DROPPED = re.compile(r"<(script|style)\b.*?</\1\s*>|<!--.*?-->|<!\[CDATA\[|\]\]>", re.S | re.I)
BREAK = re.compile(r"</?(p|div|br|li|ul|ol|tr|table|h[1-6]|pre|dt|dd|title|section|note)\b[^>]*>", re.I)
TAG = re.compile(r"<[^>]*>")
HANGUL = re.compile("[\uac00-\ud7a3\u3131-\u318e]")


def strip_markup(text):
    """The text of an HTML or XML page, a line a block."""
    text = DROPPED.sub(" ", text)
    text = BREAK.sub("\n", text)
    text = html.unescape(TAG.sub("", text))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line) + "\n"


def keep_korean(text):
    seen = set()
    lines = []
    for line in strip_markup(text).split("\n"):
        if HANGUL.search(line) and line not in seen:
            seen.add(line)
            lines.append(line)
    return "\n".join(lines) + "\n"


def documents(data, kind):
    """Yields (suffix of the source, bytes of one raw document)."""
    if kind == "dictionary":
        # An entry starts at the margin; its text is indented.
        for number, entry in enumerate(re.split(rb"\n(?=\S)", gzip.decompress(data))):
            yield f"#{number}", entry
    elif kind == "fortunes":
        for number, entry in enumerate(re.split(rb"^%\n", data, flags=re.M)):
            yield f"#{number}", entry
    else:
        yield "", data


def read(raw, kind):
    """The text of a raw document, or None where it isn't UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if kind == "markup":
        return strip_markup(text)
    if kind == "korean":
        return keep_korean(text)
    return text


def matches(path, pattern, kind):
    if kind == "fortunes" and os.path.splitext(path)[1]:  # indices stand beside the texts
        return False
    return fnmatch.fnmatchcase(path, pattern)


def package_file(package, folder):
    found = sorted(glob.glob(os.path.join(folder, glob.escape(package) + "_*.deb")))
    return found[-1] if found else None


def fetch(packages, folder):
    """Downloads what is missing; returns package -> reason for those that can't be had."""
    os.makedirs(folder, exist_ok=True)
    missing = [package for package in packages if package_file(package, folder) is None]
    reasons = {}
    if not missing:
        return reasons

    def download(names):
        command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1",
                   "-o", "Acquire::http::Timeout=20", "download", *names]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except OSError as error:
            return str(error)
        lines = [line[3:] for line in done.stderr.splitlines() if line.startswith("E:")]
        return None if done.returncode == 0 else (lines or ["apt-get failed"])[0]

    print(f"corpus: downloading {len(missing)} packages into {folder}", flush=True)
    if download(missing) is not None:
        # One unknown name stops the whole command: refresh the lists, then each on its own.
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            subprocess.run(["apt-get", "-qq", "update"], capture_output=True, check=False)
        for package in missing:
            if package_file(package, folder) is None:
                reason = download([package])
                if package_file(package, folder) is None:
                    reasons[package] = reason or "apt-get brought no file"
    return reasons


def build_component(component, packages, out, limit):
    """Writes out/component.jsonl and the packages' licences; returns a line of the summary."""
    candidates = []  # (digest of the source, source, kind, raw bytes)
    for package, pattern, kind in COMPONENTS[component]:
        if package not in packages:
            continue
        process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", packages[package]],
                                   stdout=subprocess.PIPE)
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                path = member.name.removeprefix("./")
                if not member.isreg():  # symbolic links would bring the same text twice
                    continue
                if path == f"usr/share/doc/{package}/copyright":
                    with open(os.path.join(out, "licences", package), "wb") as licence:
                        licence.write(archive.extractfile(member).read())
                elif matches(path, pattern, kind):
                    data = archive.extractfile(member).read()
                    for suffix, raw in documents(data, kind):
                        source = f"{package}/{path}{suffix}"
                        digest = hashlib.sha256(source.encode()).digest()
                        candidates.append((digest, source, kind, raw))
        if process.wait() != 0:
            raise RuntimeError(f"{packages[package]}: dpkg-deb can't read it; delete it and try again")
    candidates.sort()
    count = size = bad = 0
    partial = os.path.join(out, component + ".jsonl.partial")
    with open(partial, "w", encoding="utf-8") as lines:
        for _, source, kind, raw in candidates:
            if len(raw) < SHORTEST:
                continue
            text = read(raw, kind)
            if text is None:
                bad += 1
                continue
            length = len(text.encode("utf-8"))
            if length < SHORTEST:
                continue
            if limit and size + length > limit:
                if size > limit * 0.9:
                    break
                continue  # one long document must not end a component early
            lines.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
            count += 1
            size += length
    os.rename(partial, os.path.join(out, component + ".jsonl"))
    return {"component": component, "documents": count, "bytes": size, "not_utf8": bad,
            "packages": [os.path.basename(packages[package])
                         for package, _, _ in COMPONENTS[component] if package in packages]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder for the JSONL files, summary.json and licences/")
    parser.add_argument("--packages", default="downloads/packages",
                        help="folder where the packages are kept (%(default)s)")
    parser.add_argument("--limit", type=float, default=0, metavar="MB",
                        help="at most so many million bytes of text a component (default: all)")
    arguments = parser.parse_args()

    summary_path = os.path.join(arguments.out, "summary.json")
    limit = int(arguments.limit * 1e6)
    if os.path.exists(summary_path):
        with open(summary_path, encoding="utf-8") as file:
            if json.load(file)["limit"] == limit:
                print(f"corpus: {arguments.out} is there already; delete it to make it anew")
                return 0
        os.remove(summary_path)

    wanted = sorted({package for parts in COMPONENTS.values() for package, _, _ in parts})
    reasons = fetch(wanted, arguments.packages)
    packages = {package: package_file(package, arguments.packages)
                for package in wanted if package not in reasons}

    os.makedirs(os.path.join(arguments.out, "licences"), exist_ok=True)
    summary = {"limit": limit, "components": [], "left_out": {}}
    present = []
    for component, parts in COMPONENTS.items():
        absent = [package for package, _, _ in parts if package in reasons]
        if len(absent) < len(parts):
            present.append(component)
        else:
            summary["left_out"][component] = absent
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        tasks = [pool.submit(build_component, component, packages, arguments.out, limit)
                 for component in present]
        for task in tasks:
            line = task.result()
            summary["components"].append(line)
            print(f"corpus: {line['component']:<17}{line['documents']:6d} documents "
                  f"{line['bytes'] / 1e6:7.2f} MB", flush=True)
    for package, reason in reasons.items():
        print(f"corpus: {package} can't be had: {reason}", file=sys.stderr)
    for component, absent in summary["left_out"].items():
        print(f"corpus: {component} is left out, for want of {', '.join(absent)}", file=sys.stderr)
    if not summary["components"]:
        print("corpus: no package could be had, so there is no text", file=sys.stderr)
        return 3
    with open(summary_path, "w", encoding="utf-8") as file:
        json.dump(summary, file, indent=1)
        file.write("\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, tarfile.TarError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        sys.exit(3)
