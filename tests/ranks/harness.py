"""What the tests of the whole program share: a small corpus, a config, runs under mpirun.

Usage of a test script: SCRIPT TESSERA [NAME ...], TESSERA being the program. Functions named test_*
are run in order of the file; a failed assertion fails the script. With TESSERA_LONG=1 in the
environment the grids are full.
"""
import contextlib
import filecmp
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LONG = os.environ.get("TESSERA_LONG") == "1"
TESSERA = ""
FOLDER = ""  # of this script, removed at its end

MPIRUN = [
    "mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1",
    "--mca", "btl_vader_single_copy_mechanism", "none",
]
TCP = ["--mca", "btl", "self,tcp"]

RECIPE = """
name: "test"
tokenizer: "byte"
sequence_length: {length}
total_tokens: 1000000
seed: 7
shard_tokens: 5000
component {{ name: "prose" weight: "2" held_out_windows: 5 source {{ glob: "*.md" }} }}
component {{ name: "code" weight: "1.5" held_out_windows: 3 source {{ glob: "*.cc" }} }}
component {{
  name: "blend" weight: "1"
  stream {{
    component {{ name: "prose" weight: "1" }} component {{ name: "code" weight: "3" }}
    sequence_length: 32 total_tokens: 20000 seed: 11
  }}
}}
"""

# Sizes that no number of ranks divides; parameters straddle the slices.
CONFIG = """
model {{
  width: 40 vocabulary: 257
  schedule {{ periodic {{ order: "full" order: "sliding" layers: 3 }} }}
  mixer {{ full {{ heads: 4 key_value_heads: 2 head_width: 10 query_key_norm: true }} }}
  mixer {{ sliding {{ attention {{ heads: 5 key_value_heads: 1 head_width: 8 }} window: 17 }} }}
  feed_forward {{ width: 53 }}
}}
data {{ recipe: "{data}/recipe.textproto" directory: "{data}/shards" document_masking: true }}
train {{ global_batch: 14 micro_batch: 2 steps: {steps} seed: 3 }}
optim {{ learning_rate: 3e-3 warmup_steps: 2 schedule: COSINE layer_decay: 0.97
        embedding_rate_scale: 0.5 }}
validation {{ every: 3 windows: 4 }}
checkpoint {{ every: 2 keep_last: 100 }}
logging {{ progress_every: 1 }}
"""


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def make_data(length=48):
    """Real text: this project's own pages and code. Returns the folder of recipe and shards."""
    data = os.path.join(FOLDER, f"data-{length}")
    if os.path.isdir(data):
        return data
    sources = os.path.join(data, "sources")
    os.makedirs(sources)
    for name in glob.glob(SOURCE + "/docs/*.md") + glob.glob(SOURCE + "/*.md") + glob.glob(
            SOURCE + "/runtime/*.cc"):
        shutil.copy(name, sources)
    write(data + "/recipe.textproto", RECIPE.format(length=length))
    run([TESSERA, "data", "build", "--recipe", data + "/recipe.textproto", "--sources", sources,
         "--out", data + "/shards"])
    return data


def make_config(steps=6, length=48, extra="", name="config"):
    path = os.path.join(FOLDER, f"{name}-{steps}-{length}.textproto")
    write(path, CONFIG.format(data=make_data(length), steps=steps) + extra)
    return path


def run(command, expect=0, timeout=120, env=None, cwd=None):
    """Runs to the end; returns the finished process. `expect`: the exit code, or None for any."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})}, cwd=cwd)
    if expect is not None and done.returncode != expect:
        raise AssertionError(f"exit code {done.returncode}, expected {expect}\n$ "
                             f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


def train(config, folder, ranks=1, sets=(), flags=(), mpi=(), **options):
    command = [TESSERA, "train", "--config", config, "--run-dir", folder, *flags]
    for value in sets:
        command += ["--set", value]
    if ranks > 0:
        command = MPIRUN + list(mpi) + ["-n", str(ranks)] + command
    return run(command, **options)


def new_folder(name):
    folder = os.path.join(FOLDER, name)
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def metrics(folder):
    with open(folder + "/metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def numbers(folder):
    """What must be equal to the last bit, as the file's own text gives it."""
    kept = []
    for entry in metrics(folder):
        kept.append({key: repr(value) for key, value in entry.items()
                     if key in ("step", "tokens", "sample", "loss", "learning_rate", "grad_norm",
                                "validation_loss", "stopped", "expert_load", "aux_loss",
                                "z_loss", "router_entropy")})
    return kept


def checkpoints(folder):
    return sorted(os.path.basename(path) for path in glob.glob(folder + "/checkpoints/*"))


def unbroken_run(config):
    """The folder of the config's run on one process that nothing interrupts, made once."""
    folder = f"{FOLDER}/unbroken-{os.path.basename(config)}"
    if not os.path.isdir(folder):
        train(config, folder, 0, timeout=600)
    return folder


def assert_ends_as_unbroken(folder, config):
    assert_same_file(last_checkpoint(folder), last_checkpoint(unbroken_run(config)))
    assert numbers(folder) == numbers(unbroken_run(config)), folder


def verify_checkpoints(folder):
    """What has a final name is complete."""
    for name in checkpoints(folder):
        if name.endswith(".h5"):
            run([TESSERA, "ckpt", "verify", f"{folder}/checkpoints/{name}"])


def resume_as_unbroken(folder, config, ranks, **options):
    """What was saved is whole, and a start on these ranks goes on to the unbroken run's end."""
    verify_checkpoints(folder)
    train(config, folder, ranks, **options)
    assert_ends_as_unbroken(folder, config)


def assert_same_run(folder, reference):
    assert numbers(folder) == numbers(reference), f"{folder}: other numbers than {reference}"
    assert_same_checkpoints(folder, reference)


def assert_same_checkpoints(folder, reference):
    names = checkpoints(folder)
    assert names and names == checkpoints(reference), (names, checkpoints(reference))
    for name in names:
        assert filecmp.cmp(f"{folder}/checkpoints/{name}", f"{reference}/checkpoints/{name}",
                           shallow=False), f"{folder}: {name} differs from {reference}"


def last_checkpoint(folder):
    return f"{folder}/checkpoints/{checkpoints(folder)[-1]}"


def assert_same_file(a, b):
    assert filecmp.cmp(a, b, shallow=False), f"{a} differs from {b}"


@contextlib.contextmanager
def background(command, env=None):
    """A running process, its output in .output; killed at the end if it still runs."""
    with tempfile.NamedTemporaryFile("w+", dir=FOLDER, delete=False) as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT,
                                   env={**os.environ, **(env or {})}, start_new_session=True)
        process.output = lambda: open(output.name, encoding="utf-8", errors="replace").read()
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until(condition, seconds=240, what="condition"):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"{what} didn't come within {seconds} s")


def steps_in_metrics(folder):
    try:
        return sum(1 for entry in metrics(folder) if "loss" in entry)
    except (OSError, ValueError):
        return 0


def main(namespace):
    global TESSERA, FOLDER
    TESSERA = os.path.abspath(sys.argv[1])
    tests = [name for name in namespace if name.startswith("test_")]
    wanted = sys.argv[2:] or tests
    unknown = [name for name in wanted if name not in tests]
    if unknown:
        sys.exit(f"no such test: {' '.join(unknown)}")
    FOLDER = tempfile.mkdtemp(prefix="tessera-test-")
    failed = []
    try:
        for name in tests:
            if name not in wanted:
                continue
            start = time.time()
            try:
                namespace[name]()
                verdict = "ok"
            except (AssertionError, subprocess.SubprocessError, OSError) as error:
                failed.append(name)
                verdict = f"FAILED: {error}"
            print(f"{name} ({time.time() - start:.1f} s): {verdict}", flush=True)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    sys.exit(1 if failed else 0)
