#!/usr/bin/env python3
"""`audit`, `plan --match` and `profile` as a user starts them."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "ranks"))
import harness  # noqa: E402
from harness import run  # noqa: E402


def audit(*arguments, ranks=0, expect=0):
    command = [harness.TESSERA, "audit", *arguments]
    if ranks:
        command = harness.MPIRUN + ["-n", str(ranks)] + command
    return run(command, expect=expect, timeout=300)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def test_the_certificate_is_the_same_on_any_number_of_ranks():
    config = harness.make_config()
    folders = []
    for ranks, threads in ((0, 1), (2, 1), (3, 2)):
        folder = harness.new_folder(f"audit-{ranks}")
        done = audit("--config", config, "--out", folder, "--set", f"execution.threads={threads}",
                     ranks=ranks)
        assert "clean: every difference is exactly 0; 24/24" in done.stdout, done.stdout
        folders.append(folder)
    for folder in folders[1:]:
        for name in ("audit.json", "audit.md"):
            harness.assert_same_file(f"{folder}/{name}", f"{folders[0]}/{name}")
    certificate = json.loads(read(folders[0] + "/audit.json"))
    assert certificate["verdict"] == "clean"
    assert certificate["control"]["injected"] == certificate["control"]["localised"]
    assert [layer["delta"] for layer in certificate["layers"]] == [0.0] * 3
    assert certificate["length"] > 48 and certificate["trained_length"] == 48
    assert not [name for name in os.listdir(folders[0]) if "partial" in name]


def test_a_checkpoint_is_audited_with_its_own_parameters():
    config = harness.make_config(steps=2)
    folder = harness.new_folder("trained")
    harness.train(config, folder)
    checkpoint = harness.last_checkpoint(folder)
    audit("--checkpoint", checkpoint)
    one = json.loads(read(folder + "/audit/audit.json"))
    assert one["verdict"] == "clean" and one["step"] == 2, one
    assert one["checkpoint"] == checkpoint
    two = json.loads(audit("--checkpoint", checkpoint, "--json", ranks=2).stdout)
    assert two == one
    drawn = json.loads(audit("--config", config, "--json", "--out",
                             harness.new_folder("drawn")).stdout)
    assert [f["delta"] for f in drawn["control"]["faults"]] != \
        [f["delta"] for f in one["control"]["faults"]]
    # Another model's config is refused.
    done = audit("--config", config, "--checkpoint", checkpoint, "--set",
                 "model.mixer[1].sliding.window=9", expect=2)
    assert "model.mixer[1].sliding.window" in done.stderr and done.stderr.count("\n") == 1, done
    for missing in (folder + "/checkpoints/none.h5", "nowhere/none.h5"):
        done = audit("--checkpoint", missing, expect=4)
        assert f"{missing}: " in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_what_cant_be_audited_is_refused():
    config = harness.make_config()
    done = audit("--config", config, "--length", "17", expect=2)
    assert "--length: must be above every size" in done.stderr, done.stderr
    done = audit(expect=2)
    assert "--config or --checkpoint" in done.stderr, done.stderr
    done = audit("--config", config, "--length", "17", ranks=2, expect=2)
    assert done.stderr.count("tessera: ") == 1, done.stderr
    for seed in ("-1", "18446744073709551616", "1.5", "x"):
        done = audit("--config", config, "--seed", seed, expect=2)
        assert "--seed: must be a whole number" in done.stderr and seed in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    done = audit("--config", config, "--out", "/proc/nowhere", expect=4)
    assert done.stderr.startswith("tessera: /proc/nowhere: "), done.stderr
    limit = "execution.memory_limit_bytes"
    for ranks in (0, 2):
        done = audit("--config", config, "--set", f"{limit}=100000", ranks=ranks, expect=2)
        assert f"{limit}: " in done.stderr and done.stderr.count("tessera: ") == 1, done.stderr


def test_no_certificate_of_a_model_that_the_control_cant_see():
    config = harness.make_config()
    folder = harness.new_folder("weak")
    done = audit("--config", config, "--out", folder, "--set", "model.init_deviation=1e-9",
                 expect=1)
    assert "inconclusive" in done.stdout, done.stdout
    assert json.loads(read(folder + "/audit.json"))["verdict"] == "inconclusive"


def test_plan_matches_parameters():
    config = harness.make_config()
    text = run([harness.TESSERA, "plan", "--config", config, "--match", "90000"]).stdout
    sets = []
    for line in text.splitlines()[:2]:
        sets += ["--set", line]
    plan = json.loads(run([harness.TESSERA, "plan", "--config", config, "--json", *sets]).stdout)
    assert abs(plan["total_parameters"] - 90000) <= 60, (text, plan["total_parameters"])
    for text in ("0", "-1", "99999999999999999999"):
        done = run([harness.TESSERA, "plan", "--config", config, "--match", text], expect=2)
        assert "--match: " in done.stderr and len(done.stderr) < 200, done.stderr
    done = run([harness.TESSERA, "plan", "--config", config, "--match", "5"], expect=2)
    assert done.stderr.startswith("tessera: --match: "), done.stderr
    table = run([harness.TESSERA, "plan", "--config", config]).stdout
    assert "F full, S sliding" in table and "F S F" in table, table


def test_profile_writes_what_it_prints():
    config = harness.make_config()
    folder = harness.new_folder("profile")
    command = [harness.TESSERA, "profile", "--config", config, "--lengths", "128,64", "--repeats",
               "2", "--out", folder]
    table = run(command).stdout
    assert table.startswith(read(folder + "/profile.txt")), table
    result = json.loads(run([*command, "--json"]).stdout)
    assert [line["length"] for line in result["lines"]] == [64, 128] * 2
    assert set(result["slopes"]) == {"full", "sliding"}
    assert read(folder + "/profile.csv").count("\n") == 1 + 2 * 4
    assert read(folder + "/profile.svg").startswith("<svg ")
    only = json.loads(run([*command, "--json", "--forward-only", "--mixers", "sliding"]).stdout)
    assert "forward_backward" not in only["lines"][0] and len(only["lines"]) == 2
    done = run([*command, "--mixers", "hyena"], expect=2)
    assert "--mixers: hyena" in done.stderr, done.stderr
    done = run([*command, "--set", "execution.memory_limit_bytes=100000"], expect=2)
    assert "execution.memory_limit_bytes: " in done.stderr, done.stderr
    most = command.copy()
    most[most.index("128,64")] = "16777216"
    done = run([*most, "--sequences", "1048576"], expect=2)
    assert "out of memory" in done.stderr and done.stderr.count("tessera: ") == 1, done.stderr


def test_rank_0_alone_says_what_is_wrong_with_a_command_line():
    mpirun = harness.MPIRUN + ["-n", "3", harness.TESSERA]
    for arguments, line in (
            (["train", "--confg", "a"],
             "tessera: unknown command or option \"--confg\"; see tessera train --help"),
            (["data", "verfy", "a"],
             "tessera: unknown command or option \"verfy\"; see tessera data --help"),
            (["train", "--config", "a", "b", "--steps", "c"],
             "tessera: not expected: b --steps c; see tessera train --help"),
            (["trian"], "tessera: unknown command or option \"trian\"; see tessera --help"),
            (["plan", "--config", "a"], "tessera: plan runs as one process, and mpirun has started "
             "3: start it without mpirun"),
            (["data", "verify", "a"], "tessera: data verify runs as one process"),
            (["profile"], "tessera: profile runs as one process")):
        done = run([*mpirun, *arguments], expect=2)
        ours = [text for text in done.stderr.splitlines() if text.startswith("tessera: ")]
        assert len(ours) == 1 and ours[0].startswith(line), (arguments, done.stderr)


if __name__ == "__main__":
    harness.main(globals())
