"""The commands `tessera data ...` from outside: exit codes, errors in one line, and the stream
against a second implementation, written from docs/data.md alone."""
import array
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile

TESSERA = sys.argv[1]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1",
          "--mca", "btl_vader_single_copy_mechanism", "none"]
FOLDER = tempfile.mkdtemp(prefix="tessera-data-")
RECIPE = """
name: "commands" tokenizer: "byte" sequence_length: 16 total_tokens: 400000 seed: 77
shard_tokens: 20000
component { name: "texts" weight: "2.5" held_out_windows: 5 source { glob: "texts/**" } }
component { name: "lines" weight: "0.75" source { glob: "*.jsonl" } }
component { name: "rest" weight: "0" source { glob: "texts/0.txt" } }
component { name: "blend" weight: "0.5" stream { sequence_length: 12 total_tokens: 9000 seed: 3
            component { name: "lines" weight: "1" } component { name: "texts" weight: "0.1" } } }
"""

MASK = (1 << 64) - 1
GOLD = 0x9E3779B97F4A7C15


def mix64(z):
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def derive(seed, *words):
    k = mix64(seed + GOLD & MASK)
    for x in words:
        k = mix64((k ^ x) + GOLD & MASK)
    return k


def permute(x, n, key):
    if n <= 1:
        return 0
    half = (max(2, (n - 1).bit_length()) + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = x >> half, x & mask
        for r in range(6):
            f = mix64(right + mix64(key + (r + 1) * GOLD & MASK) & MASK) & mask
            left, right = right, left ^ f
        x = left << half | right
        if x < n:
            return x


class Stream:
    """Components are lists of tokens; weights are millionths."""

    def __init__(self, components, weights, held_out, length, seed):
        self.components, self.length, self.seed = components, length, seed
        self.windows = [(len(c) - 1) // length - h for c, h in zip(components, held_out)]
        masses = [w * len(c) for c, w in zip(components, weights)]
        divisor = math.gcd(*masses)
        masses = [q // divisor for q in masses]
        self.sums = [sum(masses[:k]) for k in range(len(masses) + 1)]
        self.block = max(1024, -(-2 * self.sums[-1] // min(q for q in masses if q)))

    def drawn(self, c, position):
        z = self.sums[-1]
        return position * self.sums[c + 1] // z - position * self.sums[c] // z

    def locate(self, sample):
        b, rest = divmod(sample, self.block)
        u = permute(rest, self.block, derive(self.seed, 1, b))
        for c, windows in enumerate(self.windows):
            start = self.drawn(c, b * self.block)
            count = self.drawn(c, (b + 1) * self.block) - start
            if u < count:
                epoch, r = divmod(start + u, windows)
                return c, epoch, permute(r, windows, derive(self.seed, 2, c, epoch))
            u -= count
        raise AssertionError

    def window(self, sample):
        c, _, window = self.locate(sample)
        first = window * self.length
        return self.components[c][first:first + self.length + 1]


def run(*command, expect=0, **options):
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, **options)
    assert done.returncode == expect, (command, done.returncode, done.stderr)
    return done


def data(*arguments, expect=0, **options):
    return run(TESSERA, "data", *arguments, expect=expect, **options)


def refused(code, *arguments, **options):
    """The one line on stderr."""
    lines = data(*arguments, expect=code, **options).stderr.decode().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def write(path, text):
    path = os.path.join(FOLDER, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def read(path):
    with open(path, "rb") as file:
        return file.read()


def files_below(folder):
    return {os.path.relpath(os.path.join(at, name), folder): read(os.path.join(at, name))
            for at, _, names in os.walk(folder) for name in names}


def make_sources():
    for f in range(4):
        write(f"src/texts/{f}.txt", "".join(f"{mix64(f * 5000 + i) % 9973} " for i in range(4000 + f)))
    lines = [json.dumps({"text": f"line {mix64(i)}"}) for i in range(900)]
    write("src/lines.jsonl", "\n".join(lines + ["{}"]))
    write("recipe.textproto", RECIPE)


def path(name):
    return os.path.join(FOLDER, name)


def tokens_of(component):
    shards = sorted(name for name in os.listdir(path("data/" + component)) if ".tokens" in name)
    ids = array.array("I")
    for shard in shards:
        ids.frombytes(read(path(f"data/{component}/{shard}")))
    return list(ids)


def own_stream():
    texts, lines, rest = (tokens_of(name) for name in ("texts", "lines", "rest"))
    seen = []
    for component, held_out in ((lines, 0), (texts, 5)):
        seen.append(component[:((len(component) - 1) // 16 - held_out) * 16 + 1])
    inner = Stream(seen, [1000000, 100000], [0, 0], 12, 3)
    blend = [token for sample in range(9000 // 12) for token in inner.window(sample)[:12]]
    return Stream([texts, lines, rest, blend], [2500000, 750000, 0, 500000], [5, 0, 0, 0], 16, 77)


def test_build_on_any_ranks():
    arguments = ["--recipe", path("recipe.textproto"), "--sources", path("src"), "--out"]
    done = data("build", *arguments, path("data"))
    assert b'left out lines.jsonl:901: has no "text"' in done.stdout
    expected = files_below(path("data"))
    assert len(tokens_of("texts")) == sum(len(read(path(f"src/texts/{f}.txt"))) + 1 for f in range(4))
    os.makedirs(path("elsewhere"), exist_ok=True)
    for ranks in ("1", "4"):
        # Relative paths are rank 0's.
        run(*MPIRUN, "-n", ranks, "bash", "-c",
            'if [ "$OMPI_COMM_WORLD_RANK" != 0 ]; then cd elsewhere; fi; exec "$@"', "-", TESSERA,
            "data", "build", "--recipe", "recipe.textproto", "--sources", "src", "--out", "again",
            "--threads", "2", cwd=FOLDER)
        assert files_below(path("again")) == expected, ranks
        run("rm", "-r", path("again"))
    assert b"kept" in data("build", *arguments, path("data")).stdout
    assert files_below(path("data")) == expected


def test_verify():
    assert b"every size and digest is right" in data("verify", path("data")).stdout
    shard = path("data/texts/shard-000001.tokens")
    whole = read(shard)
    with open(shard, "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    errors = data("verify", path("data"), expect=3).stderr.decode()
    assert shard in errors and hashlib.sha256(whole).hexdigest() in errors, errors
    with open(shard, "wb") as file:
        file.write(whole[:-2])
    stream = ["stream", "--recipe", path("recipe.textproto"), "--data", path("data"), "--from", "0"]
    line = refused(3, *stream, "--to", "1", "--digest")
    assert shard in line and f"expected {len(whole)} bytes, found {len(whole) - 2}" in line, line
    with open(shard, "wb") as file:
        file.write(whole)
    data("verify", path("data"))


def test_stream_and_locate():
    own = own_stream()
    common = ["--recipe", path("recipe.textproto"), "--data", path("data")]
    windows = [array.array("I", own.window(i)).tobytes() for i in range(9000)]
    first, last = 37, 8900
    expected = b"".join(windows[first:last])
    arguments = ["stream", *common, "--from", str(first), "--to", str(last)]
    assert data(*arguments).stdout == expected
    assert data(*arguments, "--digest").stdout.decode() == hashlib.sha256(expected).hexdigest() + "\n"
    leaves = b"".join(hashlib.sha256(b"".join(windows[a:b])).digest()
                      for a, b in ((37, 4096), (4096, 8192), (8192, 8900)))
    for threads in ("1", "3"):
        assert (data(*arguments, "--merkle", "--threads", threads).stdout.decode() ==
                hashlib.sha256(leaves).hexdigest() + "\n")
    names = ["texts", "lines", "rest", "blend"]
    first_of = [next(i for i in range(9000) if own.locate(i)[0] == c) for c in (0, 1, 3)]
    for sample in (*first_of, 2047, 8191, 123456, 10**9):
        found = json.loads(data("locate", *common, "--sample", str(sample), "--json").stdout)
        component, epoch, window = own.locate(sample)
        assert found["sample"] == sample
        assert (found["component"], found["component_name"]) == (component, names[component])
        assert (found["epoch"], found["window"]) == (epoch, window)
        if component != 3:
            shard = f"shard-{window * 16 // 20000:06d}.tokens"
            assert found["shard"].endswith(f"{names[component]}/{shard}"), found
            assert found["byte_offset"] == window * 16 % 20000 * 4
    with open("/dev/full", "wb") as full:
        done = subprocess.run([TESSERA, "data", *arguments], stdout=full, stderr=subprocess.PIPE,
                              check=False, timeout=120)
    assert done.returncode == 4 and done.stderr.count(b"\n") == 1, done


def test_locate_without_data(source_folder):
    recipe = os.path.join(source_folder, "launch/configs/aether_recipe.textproto")
    for sample, expected in ((0, (2, 0, 1001703)), (1024, (7, 0, 6400661)), (1000000, (0, 0, 2874243))):
        found = json.loads(data("locate", "--recipe", recipe, "--sample", str(sample), "--json").stdout)
        assert (found["component"], found["epoch"], found["window"]) == expected
    assert b"finemath-3plus" in data("locate", "--recipe", recipe, "--sample", "0").stdout


def test_inspect():
    found = json.loads(data("inspect", path("data"), "--json").stdout)
    own = own_stream()
    assert found["end_of_sequence"] == 256 and found["samples"] == 25000
    assert [c["name"] for c in found["components"]] == ["texts", "lines", "rest", "blend"]
    for c, component in enumerate(found["components"]):
        share = (own.sums[c + 1] - own.sums[c]) / own.sums[-1]
        assert abs(component["share"] - share) < 1e-12
        assert component["tokens"] == len(own.components[c])
        assert abs(component["epochs"] - share * 25000 / own.windows[c]) < 1e-9
    table = data("inspect", path("data")).stdout.decode()
    assert all(name in table for name in ("texts", "lines", "blend", "held out")), table
    os.rename(path("data/recipe.textproto"), path("recipe.away"))
    assert b"texts" in data("inspect", path("data")).stdout
    os.rename(path("recipe.away"), path("data/recipe.textproto"))


def test_errors_are_one_line():
    build = ["build", "--sources", path("src"), "--out", path("bad"), "--recipe"]
    assert "/nowhere/r" in refused(2, *build, "/nowhere/r")
    unknown = write("unknown.textproto", RECIPE.replace("seed: 77", "sed: 77"))
    line = refused(2, *build, unknown)
    assert f"{unknown}:2: sed: " in line and "nearest: seed" in line, line
    missing = write("missing.textproto", RECIPE.replace("*.jsonl", "*.json"))
    assert "*.json" in refused(3, *build, missing)
    write("file", "")
    assert path("file") in refused(4, "build", "--recipe", path("recipe.textproto"), "--sources",
                                   path("src"), "--out", path("file"))
    refused(2, "locate", "--recipe", path("recipe.textproto"), "--sample", "0")  # no counts in it
    refused(2, "locate", "--recipe", path("recipe.textproto"), "--data", path("data"), "--sample", "-1")
    refused(2, "stream", "--recipe", path("recipe.textproto"), "--data", path("data"), "--from", "5",
            "--to", "4")
    assert path("none") in refused(3, "verify", path("none"))
    assert path("none") in refused(3, "inspect", path("none"))
    # On several ranks the first error ends all, and says whose it is.
    done = subprocess.run([*MPIRUN, "-n", "3", TESSERA, "data", *build, missing],
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 3, done
    assert b"rank 1" in done.stderr and b"*.json" in done.stderr, done.stderr
    done = subprocess.run([*MPIRUN, "-n", "3", TESSERA, "data", *build, unknown],
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stderr.count(b"nearest: seed") == 1, done


def main():
    make_sources()
    try:
        test_build_on_any_ranks()
        test_verify()
        test_stream_and_locate()
        test_locate_without_data(sys.argv[2])
        test_inspect()
        test_errors_are_one_line()
    finally:
        subprocess.run(["rm", "-rf", FOLDER], check=True)
    print("all data commands are right")


main()
