"""Input that is wrong in the ways people and disks get it wrong, through the real program: a config,
a recipe, shards and documents. Each ends within two seconds, on any number of ranks, in one line
that names the file, the place in it and what was expected. (B04, B05, B06, B35, B42)

What the parsers alone refuse is in tests/launch/config_test.cc and tests/data.
"""
import array
import gzip
import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
import time

import harness as h

# The byte tokenizer's digest (docs/data.md, section 6).
BYTES = "3419a08ee0bb5efa86a02f946636d84bdead6cfb471b60460c137638fd7a7ca6"
MOST_MEMORY = 600 << 20  # of any process here: none may read what has no end
LONG_LINE = "x" * 65000


def one_line(command, code, words, ranks=0, seconds=2.0, **options):
    """Runs what must be refused; returns its line."""
    launcher = h.MPIRUN + ["-n", str(ranks)] if ranks else []
    command = launcher + command
    limit = seconds + ranks / 2
    for _ in range(3):
        start = time.time()
        done = h.run(command, expect=code, **options)
        took = time.time() - start
        if took < limit:
            break
        # Where others use the cores, a start that does nothing takes long too.
        start = time.time()
        h.run(launcher + [h.TESSERA, "--version"])
        limit = max(limit, seconds + ranks / 2 + 3 * (time.time() - start))
    lines = done.stderr.splitlines()
    if ranks:  # mpirun says on its own that a rank ended with an error
        lines = [line for line in lines if line.startswith("tessera:")]
    assert len(lines) == 1 and lines[0].startswith("tessera: "), f"{command}:\n{done.stderr[:3000]}"
    for word in [words] if isinstance(words, str) else words:
        assert word in lines[0], f"'{word}' isn't in: {lines[0][:1000]}"
    assert len(lines[0]) < 4200, f"{len(lines[0])} characters: {lines[0][:300]}"
    assert took < limit, f"{command}: {took:.1f} s"
    return lines[0]


def check_memory():
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < MOST_MEMORY, f"a process took {peak:,} bytes"


def refused(config, code, words, ranks=0, sets=()):
    command = [h.TESSERA, "train", "--config", config, "--run-dir", h.FOLDER + "/refused"]
    for value in sets:
        command += ["--set", value]
    line = one_line(command, code, words, ranks)
    assert not os.path.exists(h.FOLDER + "/refused"), "what was refused left a folder"
    return line


def text_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def changed(path, *edits):
    """A copy of a text file with pieces replaced."""
    text = text_of(path)
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    copy = os.path.join(h.FOLDER, "changed.textproto")
    h.write(copy, text)
    return copy


def line_number(path, piece):
    return next(i for i, line in enumerate(text_of(path).splitlines(), 1) if piece in line)


# --- the config -----------------------------------------------------------------------------------

# What is replaced, what takes its place, words of the line. The place in the file is checked too:
# the line of the piece, or the path given.
CONFIGS = [
    ("width: 40", "widht: 40", "model.widht: there is no field widht here; nearest: width"),
    ("width: 40", "Width: 40", "nearest: width"),
    ("width: 40", "learning_rate: 40", "nearest: optim.learning_rate"),
    ("width: 40", "width: 40 width: 40", "model.width: the field is set twice"),
    ("width: 40", "width: 4e1000", "model.width: expected a whole number"),
    ("width: 40", "width: 40.0", "model.width: expected a whole number (64 bits), got 40.0"),
    ("width: 40", "width: \"40\"", "expected a whole number (64 bits), got \"40\""),
    ("width: 40", "width: true", "got true"),
    ("width: 40", "width: -1", "model.width: expected at least 1, got -1"),
    ("width: 40", "width: 0", "model.width: expected at least 1, got 0"),
    ("width: 40", "width: 9223372036854775807", "model.width: expected at most"),
    ("width: 40", "width: 9223372036854775808", "model.width: expected a whole number"),
    ("width: 40", "width: 0x", "\"0x\" must be followed by hex digits"),
    ("width: 40", "width = 40", "not protobuf text format"),
    ("width: 40", "width: 40;; ", "not protobuf text format"),
    ("width: 40", "width: \u0664\u0660", "model.width"),
    ("width: 40", LONG_LINE + ": 40", "there is no field xxx"),
    ("width: 40", "width: " + "4" * 65000, "expected a whole number (64 bits), got 444"),
    ("width: 40", "width: \"" + LONG_LINE + "\"", "expected a whole number (64 bits), got \"xxx"),
    ("width: 40", "\x1b[31mwidth: 40", "not protobuf text format"),
    ("width: 40", "width: 40 [tessera.effect]: NUMERICS", "not protobuf text format"),
    ("heads: 4", "heads: 0", "heads"),
    ("heads: 4", "heads: 3", "model.mixer[0].full"),
    ("key_value_heads: 2", "key_value_heads: 3", "model.mixer[0].full"),
    ("head_width: 10", "head_width: 9", "model.mixer[0].full"),
    ("window: 17", "window: -17", "model.mixer[1].sliding.window"),
    ("window: 17", "}} mixer {{ sliding {{ window: 17".replace("{{", "{").replace("}}", "}"), ""),
    ("layers: 3", "layers: 0", "model.schedule.periodic.layers: required"),
    ("order: \"sliding\"", "order: \"mamba3\"", "mamba3"),
    ("order: \"sliding\"", "order: \"mamba2\"", "mamba2"),
    ("feed_forward { width: 53 }", "", "model.feed_forward"),
    ("feed_forward { width: 53 }", "feed_forward { width: 53 } }", "not protobuf text format"),
    ("micro_batch: 2", "micro_batch: 4", "train.micro_batch: expected a divisor of"),
    ("global_batch: 14", "global_batch: -14", "train.global_batch: expected at least 1, got -14"),
    ("seed: 3", "seed: -3", "train.seed: expected a whole number of at least 0"),
    ("learning_rate: 3e-3", "learning_rate: nan", "optim.learning_rate: expected a number"),
    ("learning_rate: 3e-3", "learning_rate: inf", "optim.learning_rate: expected a number"),
    ("learning_rate: 3e-3", "learning_rate: -3e-3", "got -0.003"),
    ("learning_rate: 3e-3", "learning_rate: 3,e-3", "optim.e: there is no field e here"),
    ("schedule: COSINE", "schedule: cosine", "nearest: COSINE"),
    ("layer_decay: 0.97", "layer_decay: 1.97", "optim.layer_decay: expected a number above 0"),
    ("keep_last: 100", "keep_last: 0", "checkpoint.keep_last: expected at least 1, got 0"),
    ("every: 3", "every: -3", "validation.every: expected at least 0, got -3"),
    ("document_masking: true", "document_masking: yes", "expected true or false, got yes"),
    ("progress_every: 1 }", "progress_every: 1", "not protobuf text format"),
]


def test_B35_configs_that_people_get_wrong():
    good = h.make_config(4)
    for old, new, words in CONFIGS:
        path = changed(good, (old, new))
        line = refused(path, 2, words)
        assert line.startswith(f"tessera: {path}:"), line
        place = line[len(f"tessera: {path}:"):].split(":")[0]
        assert place.isdigit(), line
    check_memory()


def test_B35_a_wrong_config_is_said_once_by_any_ranks():
    good = h.make_config(4)
    for ranks, (old, new, words) in ((1, CONFIGS[0]), (2, CONFIGS[16]), (4, CONFIGS[35])):
        refused(changed(good, (old, new)), 2, words, ranks)
    refused(good, 2, ["parallel.expert_ranks", "3"], 3, sets=["parallel.expert_ranks=2"])
    # Of the command line too, which every rank reads for itself.
    one_line([h.TESSERA, "train", "--config"], 2, "--config", 4)
    one_line([h.TESSERA, "data", "biuld", "x"], 2, '"biuld"', 4)


OVERRIDES = [
    ("optim.learning_rat=1", "optim.learning_rat: there is no field learning_rat here; nearest: "
                             "learning_rate"),
    ("optim.learning_rate=1e-3x", "expected a number, got 1e-3x"),
    ("optim.learning_rate 1", "expected path=value"),
    ("=", "expected a field path"),
    ("optim.learning_rate=" + LONG_LINE, "expected a number, got xxx"),
    (LONG_LINE + "=1", "there is no field xxx"),
    ("a." * 30000 + "b=1", "there is no field a here"),
    ("model=" + "{" * 60000, "model"),
    ("model={width: 1 widht: 2}", "model.widht: there is no field widht here; nearest: width"),
    ("model.mixer[99999999999999999999].full.heads=1", "expected a field path"),
    ("model.mixer[7].full.heads=1", "the list has 2 entries"),
    ("train.steps=5\nseed: 3", "train.steps: expected a whole number"),
]


def test_B35_overrides_that_dont_parse():
    good = h.make_config(4)
    for value, words in OVERRIDES:
        line = refused(good, 2, words, sets=[value])
        assert line.startswith("tessera: --set "), line
    refused(good, 2, OVERRIDES[1][1], 2, sets=[OVERRIDES[1][0]])
    one_line([h.TESSERA, "train", "--config", good, "--set"], 2, "--set")
    check_memory()


def strange_files():
    """Names of things that aren't a readable text file, and a word about each."""
    folder = h.new_folder("strange")
    os.makedirs(folder + "/folder")
    os.mkfifo(folder + "/pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(folder + "/socket")
    listener.close()
    os.symlink("/dev/zero", folder + "/zeros")
    os.symlink("itself", folder + "/itself")
    os.symlink("nowhere", folder + "/dangling")
    with open(folder + "/sparse", "wb") as file:
        file.truncate(3 << 30)
    h.write(folder + "/empty", "")
    h.write(folder + "/file", "")
    return [(folder + "/none", "no such file"), (folder + "/folder", "this is a folder"),
            (folder + "/pipe", "isn't a regular file"), (folder + "/socket", "isn't a regular file"),
            (folder + "/zeros", "isn't a regular file"), (folder + "/itself", "symbolic links"),
            (folder + "/dangling", "no such file"), (folder + "/sparse", "too many"),
            (folder + "/empty", "empty"), (folder + "/file/x", "Not a directory"),
            (folder + "/" + LONG_LINE, "File name too long")]


def binary_files():
    folder = h.new_folder("binary")
    os.makedirs(folder)
    shutil.copy("/bin/true", folder + "/program")
    with open(folder + "/random", "wb") as file:
        file.write(bytes(range(256)) * 100)
    with open(folder + "/packed", "wb") as file:
        file.write(gzip.compress(b"model { width: 40 }"))
    with open(folder + "/utf16", "wb") as file:
        file.write("model { width: 40 }".encode("utf-16"))
    h.write(folder + "/braces", "model " + "{" * 500000)
    h.write(folder + "/brackets", "[" * 500000)
    h.write(folder + "/nested", "model { mixer " * 30000)
    h.write(folder + "/json", json.dumps({"model": {"width": 40}}))
    return [folder + "/" + name for name in sorted(os.listdir(folder))]


def test_what_is_no_text_file_is_refused_by_name_wherever_a_file_is_read():
    good = h.make_config(4)
    recipe = h.make_data() + "/recipe.textproto"
    build = [h.TESSERA, "data", "build", "--sources", h.FOLDER, "--out", h.FOLDER + "/out"]
    for path, words in strange_files():
        shown = path[-200:] if len(path) > 1000 else path
        one_line([h.TESSERA, "train", "--config", path], 2, [shown, words])
        one_line([h.TESSERA, "plan", "--config", path], 2, [shown, words])
        refused(good, 2, [shown, words], sets=["data.recipe=" + path])
        one_line(build + ["--recipe", path], 2, [shown, words])
        one_line([h.TESSERA, "data", "locate", "--sample", "0", "--recipe", path], 2,
                 [shown, words])
        one_line([h.TESSERA, "tokenize", "--tokenizer", path], 3, [shown, words])
        # What names the recipe's tokenizer is the recipe, whose fault a missing one is.
        named = changed(recipe, ('tokenizer: "byte"', f'tokenizer: "{path}"'))
        absent = not os.path.exists(path)
        one_line(build + ["--recipe", named], 3,
                 [shown, "there is no such tokenizer" if absent else words])
        # A folder has no checkpoints to verify; of the rest the fault is named.
        found = h.run([h.TESSERA, "ckpt", "verify", path], expect=4).stderr.splitlines()
        assert len(found) == 1 and shown in found[0], found
        one_line([h.TESSERA, "ckpt", "diff", path, path], 4, "")
    for path in binary_files():
        one_line([h.TESSERA, "train", "--config", path], 2, f"{path}:1: ")
        refused(good, 2, f"{path}:1: ", sets=["data.recipe=" + path])
        one_line([h.TESSERA, "tokenize", "--tokenizer", path], 3, path)
        found = h.run([h.TESSERA, "ckpt", "verify", path], expect=4).stderr.splitlines()
        assert len(found) == 1 and path in found[0] and "isn't an HDF5 file" in found[0], found
    refused(strange_files()[2][0], 2, "isn't a regular file", 3)
    check_memory()


def test_texts_that_other_systems_write():
    """A byte order mark, and lines that end in CR LF: both are read."""
    good = text_of(h.make_config(4))
    path = os.path.join(h.FOLDER, "other.textproto")
    plan = [h.TESSERA, "plan", "--json", "--config"]
    expected = h.run(plan + [h.make_config(4)]).stdout
    for text in ("\ufeff" + good, good.replace("\n", "\r\n"), "\ufeff" + good.replace("\n", "\r\n"),
                 good + "# " + LONG_LINE + "\n"):
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        assert h.run(plan + [path]).stdout == expected
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write("\ufeff" + good.replace("width: 40", "widht: 40", 1).replace("\n", "\r\n"))
    refused(path, 2, f"{path}:{line_number(path, 'widht')}: model.widht: ")


def test_values_that_are_empty():
    """As `--out $OUT` is where the variable isn't set: a path that is empty would be the root folder."""
    commands = {"train": ["--config", "--run-dir", "--resume", "--allow-change", "--set"],
                "plan": ["--config", "--set", "--ranks", "--memory"],
                "data build": ["--recipe", "--sources", "--out", "--threads"],
                "data stream": ["--recipe", "--data", "--to"],
                "data locate": ["--recipe", "--data", "--sample"],
                "tokenize": ["--tokenizer"],
                "audit": ["--config", "--checkpoint", "--out"],
                "profile": ["--config", "--out", "--mixers"],
                "probe id": ["--checkpoint", "--config", "--svg"],
                "probe allocate": ["--profile", "--width"]}
    positional = {"data verify": "D", "data inspect": "D", "ckpt ls": "DIR", "ckpt verify": "PATH"}
    for command, options in commands.items():
        for option in options:
            line = one_line([h.TESSERA, *command.split(), option, ""], 2, f"{option}: is empty; ")
            assert "--help" in line, line
    for command, name in positional.items():
        one_line([h.TESSERA, *command.split(), ""], 2, f"{name}: is empty; ")
    one_line([h.TESSERA, "data", "build", "--out", ""], 2, "--out: is empty; ", 2)


def test_numbers_that_dont_fit():
    large = str(1 << 63)
    for command, option in (("data stream", "--from"), ("data stream", "--to"),
                            ("data locate", "--sample")):
        for number in (large, "-" + large + "0", "9" * 20, "0x" + "f" * 17):
            one_line([h.TESSERA, *command.split(), option, number], 2,
                     [f"{option}: ", "to 9223372036854775807, is " + number])
    for command, option in (("plan", "--memory"), ("plan", "--match"), ("audit", "--seed"),
                            ("probe id", "--seed")):
        one_line([h.TESSERA, *command.split(), option, large], 2,
                 [f"{option}: ", "9223372036854775807"])
    # Where the range is smaller it is the range that is said.
    for command, option in (("data build", "--threads"), ("plan", "--ranks"), ("audit", "--length"),
                            ("profile", "--lengths"), ("profile", "--repeats"),
                            ("probe id", "--tokens"), ("probe allocate", "--width")):
        one_line([h.TESSERA, *command.split(), option, "9" * 20], 2, [f"{option}: ", "9" * 20])


def test_files_in_the_place_of_folders():
    file = h.FOLDER + "/a-file"
    h.write(file, "mine")
    recipe, sources = h.make_data() + "/recipe.textproto", h.make_data() + "/sources"
    for path in (file, file + "/below"):
        one_line([h.TESSERA, "data", "build", "--recipe", recipe, "--sources", sources, "--out",
                  path], 4, f"{file} is a file; choose another --out")
        one_line([h.TESSERA, "train", "--config", h.make_config(4), "--run-dir", path], 4,
                 f"{file} is a file; choose another --run-dir")
    assert text_of(file) == "mine"


def test_models_that_no_machine_holds():
    good = h.make_config(4)
    for sets in (["model.width=1048576", "model.vocabulary=2147483647"],
                 ["model.vocabulary=2147483647", "execution.threads=4096"],
                 ["model.feed_forward.width=1000000000"],
                 ["train.steps=281474976710656", "train.global_batch=2097152"],
                 ["train.global_batch=2147483648"]):
        for ranks in (0, 2):
            refused(good, 2, "", ranks, sets=sets)
    check_memory()


# --- the recipe -----------------------------------------------------------------------------------

RECIPES = [
    ('seed: 7', 'sed: 7', "sed: there is no field sed here; nearest: seed"),
    ('weight: "2"', 'weight: 2', "component[0].weight: expected a text in quotes, got 2"),
    ('weight: "2"', 'weight: "-2"', "component[0].weight: expected a decimal"),
    ('weight: "2"', 'weight: "2e3"', "component[0].weight: expected a decimal"),
    ('weight: "2"', 'weight: "two\\n\\033[31m"', "component[0].weight: expected a decimal"),
    ('weight: "2"', f'weight: "{LONG_LINE}"', "component[0].weight: expected a decimal"),
    ('weight: "2"', 'held_out_windows: 3', "held_out_windows"),
    ('name: "prose"', 'name: "../prose"', "component[0].name: expected letters"),
    ('name: "prose"', 'name: "recipe.textproto"', "is a file that data build writes"),
    ('name: "prose"', 'name: "code"', 'component[1].name: "code" is there twice'),
    ('sequence_length: 48', 'sequence_length: 0', "sequence_length: expected a number from 1"),
    ('sequence_length: 48', 'sequence_length: -48', "sequence_length: expected a number from 1"),
    ('total_tokens: 1000000', 'total_tokens: 0', "total_tokens: expected a number from 48"),
    ('total_tokens: 1000000', 'total_tokens: 47', "total_tokens: expected a number from 48"),
    ('shard_tokens: 5000', 'shard_tokens: 0', "shard_tokens: expected a number from 1"),
    ('glob: "*.md"', 'glob: "../*.md"', "component[0].source.glob[0]: expected no empty part"),
    ('glob: "*.md"', 'glob: "/etc/*"', "component[0].source.glob[0]: expected a pattern"),
    ('component { name: "prose" weight: "1" }', 'component { name: "prosa" weight: "1" }',
     'component[2].stream.component[0].name: the recipe has no component "prosa"'),
    ('component { name: "prose" weight: "1" }', 'component { name: "blend" weight: "1" }',
     'component[2]: the stream "blend" contains itself'),
    ('component { name: "code" weight: "3" }', 'component { name: "prose" weight: "3" }',
     "stands in this stream twice"),
    ('tokenizer: "byte"', 'tokenizer: ""', 'tokenizer: expected "byte" or a file'),
    ('tokenizer: "byte"', 'tokenizer: "byte" tokenizer_digest: "00"', "64 lowercase hex digits"),
    ('tokenizer: "byte"', 'tokenizer: "byte" bad_documents: SKIPP', "nearest: SKIP"),
]
# What only the data tell.
UNSATISFIABLE = [
    ('held_out_windows: 5', 'held_out_windows: 500000', 2, ["component prose", "held_out_windows"]),
    ('sequence_length: 48', 'sequence_length: 900000', 2, ["component prose", "make only 0 windows"]),
    ('sequence_length: 32 total_tokens: 20000', 'sequence_length: 190000 total_tokens: 200000', 2,
     ["component blend/prose", "no window"]),
]


def test_B04_recipes_that_people_get_wrong():
    good = h.make_config(4)
    recipe = h.make_data() + "/recipe.textproto"
    build = [h.TESSERA, "data", "build", "--sources", h.make_data() + "/sources", "--out",
             h.FOLDER + "/out", "--recipe"]
    for old, new, words in RECIPES:
        path = changed(recipe, (old, new))
        for line in (refused(good, 2, words, sets=["data.recipe=" + path]),
                     one_line(build + [path], 2, words)):
            assert line.startswith(f"tessera: {path}:"), line
    # Of the right form, and yet impossible.
    for name, words in (("weights", "the weights sum to 0"), ("inner", "the weights sum to 0")):
        edits = [('weight: "2"', 'weight: "0"'), ('weight: "1.5"', 'weight: "0"'),
                 ('name: "blend" weight: "1"', 'name: "blend" weight: "0"')]
        if name == "inner":
            edits = [('component { name: "prose" weight: "1" }',
                      'component { name: "prose" weight: "0" }'),
                     ('name: "code" weight: "3"', 'name: "code" weight: "0"')]
        refused(good, 2, words, sets=["data.recipe=" + changed(recipe, *edits)])
    for old, new, code, words in UNSATISFIABLE:
        path = changed(recipe, (old, new))
        line = refused(good, code, words, sets=["data.recipe=" + path])
        assert line.startswith(f"tessera: {path}: "), line
    path = changed(recipe, RECIPES[0][:2])
    one_line(build + [path], 2, RECIPES[0][2], 4)
    refused(good, 2, RECIPES[0][2], 4, sets=["data.recipe=" + path])
    path = changed(recipe, UNSATISFIABLE[0][:2])
    refused(good, 2, UNSATISFIABLE[0][3], 2, sets=["data.recipe=" + path])
    # Sources that aren't there.
    path = changed(recipe, ('glob: "*.md"', 'glob: "*.rst"'))
    one_line(build + [path], 3, ["component prose", '"*.rst" names no file'])
    one_line(build[:3] + ["--sources", "/nowhere", "--out", h.FOLDER + "/out", "--recipe", recipe],
             3, "/nowhere: is not a folder of sources")
    check_memory()


def test_B04_three_hundred_components_and_streams_of_streams():
    folder = h.new_folder("many")
    os.makedirs(folder)
    head = 'tokenizer: "byte" sequence_length: 4 total_tokens: 4000 seed: 1\n'
    text = head
    for i in range(300):
        os.makedirs(f"{folder}/c{i}")
        text += f'component {{ name: "c{i}" weight: "{1 + i % 7}" }}\n'
        tokens = array.array("I", [i % 256] * 30)
        with open(f"{folder}/c{i}/tokens", "wb") as file:
            file.write(tokens.tobytes())
        h.write(f"{folder}/c{i}/manifest.textproto",
                f'component: "c{i}" tokens: 30 vocabulary: 257 end_of_sequence: 256\n'
                f'tokenizer_digest: "{BYTES}"\n shard {{ file: "tokens" tokens: 30 bytes: 120 '
                f'sha256: "{hashlib.sha256(tokens.tobytes()).hexdigest()}" }}\n')
    h.write(folder + "/recipe.textproto", text)
    found = json.loads(h.run([h.TESSERA, "data", "inspect", folder, "--json"]).stdout)
    assert len(found["components"]) == 300
    # A block of 2,400 samples holds each component as often as its share says, within one.
    done = subprocess.run([h.TESSERA, "data", "stream", "--recipe", folder + "/recipe.textproto",
                           "--data", folder, "--from", "0", "--to", "2400"], capture_output=True,
                          check=True, timeout=60)
    ids = array.array("I", done.stdout)
    assert len(ids) == 2400 * 5
    drawn = [0] * 256
    for first in ids[::5]:
        drawn[first] += 1
    weight = sum(1 + i % 7 for i in range(300))
    for i in range(44, 256):  # of these numbers there is one component each
        assert abs(drawn[i] - 2400 * (1 + i % 7) / weight) <= 1, (i, drawn[i])
    # A chain of 8,000 streams, each over the next: refused, and not by the stack's end.
    text = head
    for i in range(8000):
        text += (f'component {{ name: "s{i}" weight: "1" stream {{ sequence_length: 4 total_tokens: '
                 f'8 component {{ name: "s{i + 1}" weight: "1" }} }} }}\n')
    text += 'component { name: "s8000" weight: "1" source { glob: "*" } }\n'
    h.write(folder + "/chain.textproto", text)
    one_line([h.TESSERA, "data", "locate", "--recipe", folder + "/chain.textproto", "--sample",
              "0"], 2, "more than 100 that lie in one another")


# --- shards and manifests -------------------------------------------------------------------------


def damaged(damage):
    """A copy of the built data after damage(folder of a component, its shards in order)."""
    copy = h.new_folder("damaged")
    shutil.copytree(h.make_data() + "/shards", copy)
    folder = copy + "/prose"
    damage(folder, sorted(f"{folder}/{name}" for name in os.listdir(folder) if ".tokens" in name))
    return copy


def flip(path, at=None):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2 if at is None else at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def swap(a, b):
    os.rename(a, a + ".away")
    os.rename(b, a)
    os.rename(a + ".away", b)


def replace_by(path, make):
    os.remove(path)
    make(path)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(3 << 30)


def cut(path, size):
    os.truncate(path, size(os.path.getsize(path)))


SHARDS = [  # damage, words; None: only the digests tell
    (lambda f, s: cut(s[0], lambda n: n - 1), ["found 19999 (short, and not whole tokens"]),
    (lambda f, s: cut(s[0], lambda n: n - 4), ["expected 20000 bytes, found 19996 (short)"]),
    (lambda f, s: cut(s[0], lambda n: n // 2), ["expected 20000 bytes, found 10000 (short)"]),
    (lambda f, s: cut(s[0], lambda n: 0), ["expected 20000 bytes, found 0 (short)"]),
    (lambda f, s: cut(s[-1], lambda n: n + 3), ["(long, and not whole tokens of 4 bytes)"]),
    (lambda f, s: sparse(s[0]), ["found 3221225472 (long)"]),
    (lambda f, s: os.remove(s[1]), ["found none: No such file"]),
    (lambda f, s: replace_by(s[1], os.mkdir), ["it is not a regular file"]),
    (lambda f, s: replace_by(s[1], os.mkfifo), ["it is not a regular file"]),
    (lambda f, s: replace_by(s[1], lambda p: os.symlink("/dev/zero", p)),
     ["it is not a regular file"]),
    (lambda f, s: swap(s[0], s[-1]), ["bytes, found"]),
    (lambda f, s: swap(s[0], s[1]), None),
    (lambda f, s: flip(s[0]), None),
    (lambda f, s: flip(s[-1], 0), None),
]


def test_B05_shards_that_are_not_what_the_manifest_says():
    good = h.make_config(4)
    for i, (damage, words) in enumerate(SHARDS):
        copy = damaged(damage)
        verify = [h.TESSERA, "data", "verify", copy]
        done = h.run(verify, expect=3)
        assert f"{copy}/prose/shard-" in done.stderr, done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"tessera: {copy}: "), done.stderr
        if words is None:
            assert "expected SHA-256" in done.stderr, done.stderr
            continue
        for ranks in (0, 3) if i in (0, 6) else (0,):
            refused(good, 3, [f"{copy}/prose/shard-"] + words, ranks,
                    sets=["data.directory=" + copy])
    check_memory()


def test_B05_a_token_outside_of_the_vocabulary_ends_the_run_by_name():
    """A flipped bit that verify would have found: an id that the model has no row for."""
    copy = damaged(lambda f, s: [flip(path, at) for path in s
                                 for at in range(2, os.path.getsize(path), 4)])
    for ranks in (0, 2):
        done = h.train(h.make_config(4), h.new_folder("run"), ranks, expect=3,
                       sets=["data.directory=" + copy])
        lines = [line for line in done.stderr.splitlines() if line.startswith("tessera:")]
        assert lines and "4194" in lines[0] and "data verify" in lines[0], done.stderr


def edit_manifest(old, new):
    def damage(folder, _):
        path = folder + "/manifest.textproto"
        text = text_of(path)
        assert old in text, (old, text)
        h.write(path, text.replace(old, new, 1))
    return damage


def whole_manifest(make):
    return lambda folder, _: replace_by(folder + "/manifest.textproto", make)


def of_component(other):
    return lambda folder, _: shutil.copy(f"{folder}/../{other}/manifest.textproto",
                                         folder + "/manifest.textproto")


MANIFESTS = [
    (edit_manifest("\n  tokens: 5000", "\n  tokens: -5000"), "expected bytes = 4 * tokens"),
    (edit_manifest("\n  tokens: 5000", "\n  tokens: 5001"), "expected bytes = 4 * tokens"),
    (edit_manifest("\n  tokens: 5000", ""), "expected bytes = 4 * tokens"),
    (edit_manifest("\n  tokens: 5000\n  bytes: 20000",
                   "\n  tokens: 4611686018427387904\n  bytes: 0"), "expected bytes = 4 * tokens"),
    (edit_manifest("\n  tokens: 5000\n  bytes: 20000",
                   "\n  tokens: 1152921504606846975\n  bytes: 4611686018427387900"), "too many tokens"),
    (edit_manifest("\n  tokens: 5000", "\n  tokens: 99999999999999999999"), "shard[0].tokens: expected a w"),
    (edit_manifest("shard_tokens", "shard_token"), "nearest: shard_tokens"),
    (edit_manifest("component: \"prose\"", ""), "expected component"),
    (edit_manifest("component: \"prose\"", "component: \"code\""), 'expected component "prose"'),
    (edit_manifest("vocabulary: 257", "vocabulary: 0"), "end_of_sequence < vocabulary"),
    (edit_manifest("vocabulary: 257", "vocabulary: 4294967297"), "end_of_sequence < vocabulary"),
    (edit_manifest("end_of_sequence: 256", "end_of_sequence: -1"), "end_of_sequence < vocabulary"),
    (edit_manifest("documents: ", "documents: -"), "expected no count of documents below 0"),
    (edit_manifest("tokenizer_digest: \"", "tokenizer_digest: \"x"), "expected 64 hex digits"),
    (edit_manifest("file: \"shard-000000", "file: \"../shard-000000"), "expected a plain name"),
    (edit_manifest("build_digest: \"", "build_digest: \"0"), "by another recipe"),
    (whole_manifest(lambda p: h.write(p, "")), "the file is empty"),
    (whole_manifest(lambda p: h.write(p, "{" * 100000)), ":1: not protobuf text format"),
    (whole_manifest(lambda p: h.write(p, "\0" * 100000)), ":1: not protobuf text format"),
    (whole_manifest(sparse), "too many"),
    (whole_manifest(os.mkdir), "regular file"),
    (whole_manifest(os.mkfifo), "regular file"),
    (whole_manifest(lambda p: os.symlink("/dev/zero", p)), "regular file"),
    (whole_manifest(lambda p: None), "`tessera data build` makes component prose"),
    (of_component("code"), 'component "prose"'),
    (lambda f, s: cut(f + "/manifest.textproto", lambda n: n // 2), "manifest.textproto"),
]


def test_B05_manifests_that_lie():
    good = h.make_config(4)
    for i, (damage, words) in enumerate(MANIFESTS):
        copy = damaged(damage)
        for ranks in (0, 4) if i == 0 else (0,):
            refused(good, 3, [f"{copy}/prose/manifest.textproto", words], ranks,
                    sets=["data.directory=" + copy])
    # A manifest that can't be read hides no other fault.
    copy = damaged(MANIFESTS[0][0])
    flip(copy + "/code/shard-000000.tokens")
    found = h.run([h.TESSERA, "data", "verify", copy], expect=3).stderr.splitlines()
    assert len(found) == 3 and f"{copy}/prose/manifest.textproto: " in found[0], found
    assert f"{copy}/code/shard-000000.tokens: expected SHA-256" in found[1], found
    assert "2 faults" in found[2], found
    check_memory()


def test_shards_of_another_recipe_or_tokenizer():
    good = h.make_config(4)
    recipe = h.make_data() + "/recipe.textproto"
    for old, new, words in (
            ('tokenizer: "byte"', 'tokenizer: "qwen.tiktoken"', "another tokenizer"),
            ('tokenizer: "byte"', f'tokenizer: "q.json" tokenizer_digest: "{"7" * 64}"',
             "another tokenizer"),
            ('tokenizer: "byte"', 'tokenizer: "byte" vocabulary_limit: 256', "by another recipe"),
            ('glob: "*.md"', 'glob: "*.txt"', "by another recipe"),
            ('shard_tokens: 5000', 'shard_tokens: 5001', "by another recipe"),
            ('name: "prose" weight: "2"', 'name: "verse" weight: "2"', "verse")):
        edits = [(old, new)]
        if "verse" in new:
            edits.append(('component { name: "prose" weight: "1" }',
                          'component { name: "verse" weight: "1" }'))
        line = refused(good, 3, words, sets=["data.recipe=" + changed(recipe, *edits)])
        assert "manifest.textproto" in line and "data build" in line, line
    refused(good, 3, ["/nowhere/prose/manifest.textproto", "data build"], 2,
            sets=["data.directory=/nowhere"])


# --- documents ------------------------------------------------------------------------------------

# A line of JSONL, and why it is left out; None where it is kept, "" where it is empty.
DOCUMENTS = [
    (b'{"text": "first"}', None),
    (b'{"text": "\xff"}', "is not valid JSON in UTF-8, at byte 11"),
    (b'{"text": "\xc0\x80"}', "is not valid JSON in UTF-8, at byte 11"),
    (b'{"text": "\xed\xa0\x80"}', "is not valid JSON in UTF-8"),
    (b'{"text": "\xf0\x80\x80\x80"}', "is not valid JSON in UTF-8"),
    (b'{"text": "\xf4\x90\x80\x80"}', "is not valid JSON in UTF-8"),
    (b'{"text": "\xe2\x82"}', "is not valid JSON in UTF-8"),
    (b'{"text": "\\ud83d"}', "is not valid JSON in UTF-8"),
    (b'{"text": "\\ude00\\ud83d"}', "is not valid JSON in UTF-8"),
    (b'{"text": "\\ud83d\\ude00"}', None),
    (b'{"text": "' + b"\\u00e9" * 11000 + b'"}', None),
    (b'{"text": "a\\u0000b"}', None),
    (b'{"text": "a\x00b"}', "is not valid JSON in UTF-8"),
    (b'\xef\xbb\xbf{"text": "after a byte order mark"}', None),
    (b'{"text": "\xef\xbb\xbf"}', None),
    (b'{"text": ""}', ""),
    (b'{"text": null}', "\"text\" is not a string"),
    (b'{"text": ["a"]}', "\"text\" is not a string"),
    (b'{"body": "no text"}', "has no \"text\""),
    (b'["text"]', "is not a JSON object"),
    (b'"text"', "is not a JSON object"),
    (b"{'text': 'a'}", "is not valid JSON in UTF-8"),
    (b'{"text": "cut', "is not valid JSON in UTF-8"),
    (b'{"text": "two"} {"text": "objects"}', "is not valid JSON in UTF-8"),
    (b'{"text": "deep", "x": ' + b"[" * 100000 + b"]" * 100000 + b"}", None),
    (b"[" * 100000, "is not valid JSON in UTF-8"),
    (b'{"x": ' * 100000, "is not valid JSON in UTF-8"),
    (b'{"text": "large", "x": 1e999}', "holds a number beyond a double's range, at byte "),
    (b"   ", "blank"),
    (b'{"text": "last"}', None),
]


def expected_ids():
    ids = []
    for line, why in DOCUMENTS:
        if why is None:
            text = json.loads(line.decode("utf-8-sig"))["text"] if b"[[" not in line else "deep"
            ids += list(text.encode()) + [256]
    return ids


def documents_folder():
    folder = os.path.join(h.FOLDER, "documents")
    if os.path.isdir(folder):
        return folder
    os.makedirs(folder + "/a")
    with open(folder + "/a/strange.jsonl", "wb") as file:
        file.write(b"\n".join(line for line, _ in DOCUMENTS))  # and no newline at the end
    h.write(folder + "/a/empty.jsonl", "")
    h.write(folder + "/a/empty.txt", "")
    with open(folder + "/a/bad.txt", "wb") as file:
        file.write(b"one bad byte \xfe in a text")
    lines = [json.dumps({"text": f"document {i}"}) for i in range(3000)]
    packed = gzip.compress("\n".join(lines).encode(), mtime=0)
    os.makedirs(folder + "/b")
    for name, data in (("cut.jsonl.gz", packed[:-9]), ("half.jsonl.gz", packed[:len(packed) // 2]),
                       ("flipped.jsonl.gz", packed[:-5] + b"\0" + packed[-4:]),
                       ("rubbish.jsonl.gz", packed + b"rubbish"), ("none.jsonl.gz", b""),
                       ("plain.jsonl.gz", "\n".join(lines).encode()),
                       ("whole.jsonl.gz", packed), ("plain.zst", b"not packed at all")):
        with open(f"{folder}/b/{name}", "wb") as file:
            file.write(data)
    os.makedirs(folder + "/c")
    with open(folder + "/c/one_in_many.jsonl", "w", encoding="utf-8") as file:
        for i in range(100000):
            file.write('{"text": 5}\n' if i == 77776 else f'{{"text": "{i}"}}\n')
    h.write(folder + "/recipe.textproto",
            'name: "documents" tokenizer: "byte" sequence_length: 8 total_tokens: 8000 '
            "shard_tokens: 100000\n" + "".join(
                f'component {{ name: "{c}" weight: "1" source {{ glob: "{c}" }} }}\n'
                for c in ("a", "b", "c")))
    return folder


def build_documents(out, recipe=None, ranks=0, threads=1, expect=0):
    folder = documents_folder()
    command = [h.TESSERA, "data", "build", "--recipe", recipe or folder + "/recipe.textproto",
               "--sources", folder, "--out", out, "--threads", str(threads)]
    if ranks:
        command = h.MPIRUN + ["-n", str(ranks)] + command
    return h.run(command, expect=expect)


def contents(folder):
    found = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as file:
                found[os.path.relpath(os.path.join(at, name), folder)] = file.read()
    return found


def test_B06_B42_bad_documents_are_left_out_counted_and_named():
    out = h.new_folder("built")
    done = build_documents(out)
    built = contents(out)
    ids = [int.from_bytes(built["a/shard-000000.tokens"][i:i + 4], "little")
           for i in range(0, len(built["a/shard-000000.tokens"]), 4)]
    assert ids == expected_ids()
    expected = [f"a/strange.jsonl:{i}: {why}" for i, (_, why) in enumerate(DOCUMENTS, 1)
                if why not in (None, "", "blank")]
    listed = built["a/bad_documents.txt"].decode().splitlines()
    assert listed[0] == "a/bad.txt: is not valid UTF-8, at byte 13", listed[0]
    assert len(listed) == 1 + len(expected), listed
    for line, start in zip(listed[1:], expected):
        assert line.startswith(start), (line, start)
    kept = sum(1 for _, why in DOCUMENTS if why is None)
    manifest = built["a/manifest.textproto"].decode()
    for words in (f"\ndocuments: {kept}\n", "\nempty_documents: 2\n",
                  f"\nbad_documents: {len(listed)}\n"):
        assert words in manifest, (words, manifest)
    # An archive that isn't whole is left out whole: what it gave so far could be wrong as well.
    assert b"\ndocuments: 3000\n" in built["b/manifest.textproto"]
    listed = built["b/bad_documents.txt"].decode().splitlines()
    assert [line.split(": ")[:2] for line in listed] == [
        ["b/cut.jsonl.gz", "is cut off"], ["b/flipped.jsonl.gz", "is damaged"],
        ["b/half.jsonl.gz", "is cut off"], ["b/none.jsonl.gz", "is cut off"],
        ["b/plain.jsonl.gz", "is damaged"], ["b/plain.zst", "is damaged"],
        ["b/rubbish.jsonl.gz", "is damaged"]], listed
    assert b"\ndocuments: 99999\n" in built["c/manifest.textproto"]
    assert built["c/bad_documents.txt"] == b"c/one_in_many.jsonl:77777: \"text\" is not a string\n"
    for words in (f"a: {kept} documents (2 empty and {1 + len(expected)} bad ones left out",
                  "b: 3000 documents (0 empty and 7 bad ones left out",
                  "c: 99999 documents (0 empty and 1 bad ones left out",
                  "c: left out c/one_in_many.jsonl:77777: "):
        assert words in done.stdout, (words, done.stdout)
    assert "bad_documents.txt" in done.stdout, done.stdout
    # The same on any threads and ranks, and the second time all is kept.
    for ranks, threads in ((0, 3), (2, 1), (4, 2)):
        again = h.new_folder("again")
        build_documents(again, ranks=ranks, threads=threads)
        assert contents(again) == built, (ranks, threads)
    done = build_documents(out)
    assert done.stdout.count(": kept, ") == 3, done.stdout
    h.run([h.TESSERA, "data", "verify", out])
    check_memory()


def test_B42_bad_documents_are_fatal_by_option():
    folder = documents_folder()
    for component, words in (("a", "a/bad.txt: is not valid UTF-8, at byte 13"),
                             ("b", "b/cut.jsonl.gz: is cut off"),
                             ("c", "c/one_in_many.jsonl:77777: \"text\" is not a string")):
        path = h.FOLDER + "/fail.textproto"
        text = text_of(folder + "/recipe.textproto").splitlines()
        h.write(path, text[0] + " bad_documents: FAIL\n" + text[1 + "abc".index(component)])
        for threads in (1, 3):
            out = h.new_folder("failed")
            one_line([h.TESSERA, "data", "build", "--recipe", path, "--sources", folder, "--out",
                      out, "--threads", str(threads)], 3, words)
            assert not os.path.exists(f"{out}/{component}/manifest.textproto")
    one_line([h.TESSERA, "data", "build", "--recipe", path, "--sources", folder, "--out", out], 3,
             [words, "rank 0"], 2)


def test_tokenize_says_where_its_input_is_wrong():
    tokenize = [h.TESSERA, "tokenize", "--tokenizer", "byte"]
    for flags, text, words in (
            ([], b"\xff", "standard input: "), (["--decode"], b"5 x", "word 2, 'x'"),
            (["--decode"], b"257", "257"), (["--decode"], b"-1", "word 1"),
            (["--decode"], b"99999999999999999999", "word 1"),
            (["--jsonl"], b'{"text": "a"}\n{"text": 3}', "line 2: "),
            (["--jsonl"], b"[" * 100000, "line 1: "),
            (["--jsonl"], b'{"text": "\xff"}', "line 1: "),
            (["--jsonl"], b'{"text": "a", "x": ' + b"[" * 100000 + b"]" * 100000 + b"}",
             "line 1: is nested too deeply"),
            (["--jsonl", "--decode"], b'{"ids": [-1]}', "line 1: "),
            (["--jsonl", "--decode"], b'{"ids": [1e3]}', "line 1: ")):
        done = subprocess.run(tokenize + flags, input=text, capture_output=True, timeout=20,
                              check=False)
        lines = done.stderr.decode().splitlines()
        assert done.returncode == 3 and len(lines) == 1 and words in lines[0], (flags, done)
    check_memory()


def test_tokenize_reads_standard_input_only():
    tokenize = [h.TESSERA, "tokenize", "--tokenizer", "byte"]
    for flags in ([], ["--decode"], ["--jsonl"]):
        for given, words in (("</tmp", "is a folder"), ("<&-", "can't be read")):
            one_line(["bash", "-c", f'exec "$@" {given}', "-"] + tokenize + flags, 3,
                     "standard input: " + words)
    for command in (tokenize, tokenize[:2]):
        one_line(command + ["some.txt"], 2,
                 "not expected: some.txt: the text comes on standard input")


def test_B06_a_build_never_replaces_what_it_didnt_make():
    """Sources below a component's folder, patterns that match what is built, others' files."""
    folder = h.new_folder("mine")
    os.makedirs(folder + "/code")
    for name in ("code/shard-00001.jsonl", "code/notes.partial", "code/bad_documents.txt"):
        h.write(f"{folder}/{name}", '{"text": "mine"}')
    recipe = h.FOLDER + "/mine.textproto"

    def build(glob, out, code, words, ranks=0):
        h.write(recipe, 'tokenizer: "byte" sequence_length: 8 total_tokens: 8000\n'
                f'component {{ name: "code" weight: "1" source {{ glob: "{glob}" }} }}\n')
        before = contents(folder)
        one_line([h.TESSERA, "data", "build", "--recipe", recipe, "--sources", folder, "--out",
                  out], code, words, ranks)
        assert contents(folder) == before

    for ranks in (0, 2):
        build("code/*.jsonl", folder, 2, [f"{folder}/code: holds sources", "another --out"], ranks)
        build("**", folder + "/out", 2, [f"{folder}/out: what data build writes"], ranks)
    os.makedirs(folder + "/.out/code")
    h.write(folder + "/.out/code/notes", "mine")
    build("**", folder + "/.out", 4, ["didn't make (notes)", "another --out"], 2)


if __name__ == "__main__":
    h.main(globals())
