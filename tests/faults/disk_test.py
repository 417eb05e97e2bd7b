"""Disks that are full, read-only, slow, gone or broken: a run ends with exit code 4 and one line, or
goes on as its config says; what was saved stands, no half file has a final name, and the next start
goes on to the unbroken run's files. (B12, B31)

What a real disk can be made to do is done to one: a small tmpfs, which takes root. The rest is done
to the program's calls by disk_faults.cc."""
import contextlib
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time

import harness as h

FAULTS = os.path.abspath(sys.argv.pop(2))
STEPS = 6
RANKS = 2
CONTINUE = "checkpoint.on_disk_full=CONTINUE"
BROKEN = "check the disk or its mount and start again"
FULL = "No space left on device; make room"


def injected(rules):
    """Arguments of mpirun and an environment that break the ranks' calls, as disk_faults.cc says."""
    return ["-x", f"LD_PRELOAD={FAULTS}"], {"TESSERA_DISK_FAULTS": ";".join(rules)}


def equals_reference(folder):
    h.assert_ends_as_unbroken(folder, h.make_config(STEPS))
    assert not leftovers(folder), leftovers(folder)


def leftovers(folder):
    return [name for _, _, names in os.walk(folder) for name in names if "partial" in name]


def resumes(folder, ranks=1):
    h.verify_checkpoints(folder)
    h.train(h.make_config(STEPS), folder, ranks)
    equals_reference(folder)


def say(name, code, seconds, text):
    lines = [line for line in text.splitlines() if line.startswith(("tessera: ", "warning: "))]
    print(f"  {name}: exit code {code} after {seconds:.1f} s: {lines[-1] if lines else ''}",
          flush=True)


def one_line(text, words):
    """The error: one line for the user, with these words in it."""
    lines = [line for line in text.splitlines() if line.startswith("tessera: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), (words, text)


def broken(name, rules, words, code=4, sets=(), ranks=RANKS, seconds=30):
    """A run of the whole program with faults in its calls, and the resume."""
    folder = h.new_folder(name.replace(" ", "-"))
    mpi, env = injected(rules)
    start = time.time()
    done = h.train(h.make_config(STEPS), folder, ranks, mpi=mpi, env=env, sets=sets, expect=code)
    spent = time.time() - start
    text = done.stdout + done.stderr
    say(name, done.returncode, spent, text)
    assert spent < seconds, f"{name}: {spent:.1f} s"
    if code == 0:
        assert all(word in text for word in words), (words, text)
        h.verify_checkpoints(folder)
        equals_reference(folder)
    else:
        one_line(text, words)
        resumes(folder, ranks=3 if h.LONG else 1)


def test_checkpoint_that_cannot_be_written():
    partial = ".h5.partial"
    # With fallocate a full disk is found before anything is written; here there is none.
    no_reserve = f"fallocate {partial} * 1 0 EOPNOTSUPP"
    unwritten = ["step-00000004.h5.partial: can't be written"]
    step4 = f"write step-00000004{partial}"
    table = [
        ("room that goes during the save", [no_reserve, f"{step4} 0 5 0 ENOSPC"],
         [*unwritten, FULL]),
        ("room that goes on another rank", [no_reserve, f"{step4} 1 1 0 ENOSPC"],
         [*unwritten, "by rank 1 on", FULL]),
        ("a broken disk", [f"{step4} 1 3 0 EIO"], [*unwritten, BROKEN]),
        ("a broken disk, at its start", [f"{step4} 0 1 1 EIO"], [*unwritten, BROKEN]),
        ("a broken disk that is synced", [f"fsync step-00000004{partial} 1 1 1 EIO"],
         [*unwritten, BROKEN]),
        ("a rename that fails", [f"rename step-00000004{partial} 0 1 1 EIO"],
         ["step-00000004.h5: can't be put in place", BROKEN]),
        ("a folder that cannot be synced", ["fsync checkpoints$ 0 2 2 EIO"],
         ["checkpoints: can't be synced", BROKEN]),
        ("no leave to create it", [f"open step-00000004{partial} 0 1 1 EACCES"],
         ["step-00000004.h5.partial: can't be created: Permission denied", "permissions"]),
    ]
    if h.LONG:
        table += [(f"{action} at write {n} of rank {rank}",
                   [no_reserve, f"{step4} {rank} {n} {n} {action}"], unwritten)
                  for action in ("ENOSPC", "EIO", "EDQUOT") for rank in (0, 1)
                  for n in (1, 2, 3, 5, 10, 20, 25)]
        table += [(f"{call} {n} fails", [f"{call} step-00000004{partial} 0 {n} {n} EIO"],
                   ["can't be"]) for call in ("truncate", "fsync") for n in (1, 2)]
    for name, rules, words in table:
        broken(name, rules, words)


def test_checkpoint_on_a_disk_that_is_only_slow_or_interrupted():
    folder = h.new_folder("slow")
    mpi, env = injected(["write .h5.partial * 1 0 delay=10", "fsync .h5.partial * 1 0 delay=1000",
                         "fsync checkpoints * 1 1 EINTR", "write metrics.jsonl 0 2 0 delay=100"])
    # Each of them is shorter than the watchdog's time, all of them far longer.
    h.train(h.make_config(STEPS), folder, RANKS, mpi=mpi, env=env,
            sets=["execution.watchdog_seconds=4"])
    equals_reference(folder)


def test_goes_on_without_a_checkpoint_that_cannot_be_written():
    for name, rules in [("write", ["write step-00000002.h5.partial 1 2 2 EIO"]),
                        ("sync", ["fsync step-00000002.h5.partial 0 1 1 EIO"]),
                        ("reserve", ["fallocate step-00000002.h5.partial 0 1 1 ENOSPC"]),
                        ("rename", ["rename step-00000002.h5.partial 0 1 1 EIO"])]:
        folder = h.new_folder("goes-on-" + name)
        mpi, env = injected(rules)
        done = h.train(h.make_config(STEPS), folder, RANKS, mpi=mpi, env=env, sets=[CONTINUE])
        assert "warning: no checkpoint at step 2, the run goes on: checkpoint " in done.stdout, done
        assert h.checkpoints(folder) == ["step-00000004.h5", "step-00000006.h5"]
        equals_reference(folder)


def test_old_checkpoints_that_cannot_be_deleted_are_said():
    broken("deleting", ["unlink step-00000002.h5$ 0 1 0 EACCES"],
           ["warning: checkpoint ", "step-00000002.h5: can't be deleted: Permission denied"], code=0,
           sets=["checkpoint.keep_last=1"])


def test_files_beside_the_checkpoints():
    lines = ["tessera: ", "metrics.jsonl: can't be written: "]
    table = [
        ("metrics on a full disk", ["write metrics.jsonl 0 3 0 ENOSPC"], lines + [FULL]),
        ("metrics over the quota", ["write metrics.jsonl 0 3 0 EDQUOT"], lines + ["quota"]),
        ("metrics on a broken disk", ["write metrics.jsonl 0 3 3 EIO"], lines + [BROKEN]),
        ("metrics that are synced", ["fsync metrics.jsonl 0 2 2 EIO"], lines + [BROKEN]),
        ("TensorBoard events", ["write tfevents 0 3 0 ENOSPC"], ["tfevents", FULL]),
        ("the config", ["write config.textproto 0 1 1 ENOSPC"], ["config.textproto.partial", FULL]),
        ("the environment", ["rename environment.txt 0 1 1 EIO"],
         ["environment.txt.partial: can't be renamed", BROKEN]),
        ("a rank's state", ["open rank-1.state 1 1 1 EACCES"], ["rank-1.state", "can't be"]),
    ]
    for name, rules, words in table:
        broken(name, rules, words)


def test_short_writes_and_interruptions_lose_nothing():
    broken("short writes", ["write metrics.jsonl 0 1 0 short", "write tfevents 0 1 0 short",
                            "write config.textproto 0 1 0 short", "write metrics.jsonl 0 2 4 EINTR",
                            "fsync config.textproto 0 1 2 EINTR", "write .h5.partial 0 1 0 short",
                            "write .h5.partial 1 2 9 EINTR"], [], code=0)


@contextlib.contextmanager
def small_disk(folder, options):
    """A tmpfs of its own at the folder, for as long as the block lasts."""
    os.makedirs(folder, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tessera-test", folder],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"a tmpfs can't be mounted, which takes root: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], capture_output=True, check=False)


def fill(folder):
    """Takes all the room that there is."""
    with open(folder + "/filler", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))


@contextlib.contextmanager
def standing_still(folder, rules=(), sets=()):
    """A run that stands still as rank 0 writes step 3's line, a checkpoint of step 2 being there;
    process.ends lets it go on and looks at its end."""
    gate = tempfile.mktemp(dir=h.FOLDER)
    mpi, env = injected([f"write metrics.jsonl 0 5 5 hold={gate}", *rules])
    command = h.MPIRUN + mpi + ["-n", str(RANKS), h.TESSERA, "train", "--config",
                                h.make_config(STEPS), "--run-dir", folder]
    for value in sets:
        command += ["--set", value]
    with h.background(command, env=env) as process:
        h.wait_until(lambda: os.path.exists(gate + ".held") or process.poll() is not None,
                     what="the line of step 3")
        assert process.poll() is None, process.output()

        def ends(name, words):
            h.write(gate, "")
            start = time.time()
            code = process.wait(timeout=60)
            say(name, code, time.time() - start, process.output())
            assert code == 4, (code, process.output())
            one_line(process.output(), words)
        process.ends = ends
        yield process


def test_full_disk():
    for where, size in ("/checkpoints", "8m"), ("", "16m"):
        folder = h.new_folder("full")
        with small_disk(folder + where, "size=" + size):
            with standing_still(folder) as process:
                fill(folder + where)
                process.ends("full disk" + where, ["step-00000004.h5.partial needs", FULL])
            os.remove(folder + where + "/filler")
            assert h.checkpoints(folder) == ["step-00000002.h5"]
            resumes(folder)


def test_no_more_inodes():
    folder = h.new_folder("inodes")
    with small_disk(folder + "/checkpoints", "nr_inodes=2"):
        with standing_still(folder) as process:
            process.ends("no more inodes", ["step-00000004.h5.partial: can't be created", "df -i"])
        subprocess.run(["mount", "-o", "remount,nr_inodes=100", folder + "/checkpoints"], check=True)
        resumes(folder)


def test_read_only_disk():
    folder = h.new_folder("read-only")
    with small_disk(folder + "/checkpoints", "size=32m"):
        with standing_still(folder) as process:
            subprocess.run(["mount", "-o", "remount,ro", folder + "/checkpoints"], check=True)
            process.ends("read-only disk", ["Read-only file system; make the file system writable"])
        done = h.train(h.make_config(STEPS), folder, 1, expect=4)
        one_line(done.stderr, ["/checkpoints: can't be written to: Read-only file system"])
        subprocess.run(["mount", "-o", "remount,rw", folder + "/checkpoints"], check=True)
        resumes(folder)


def test_folder_that_vanishes():
    folder = h.new_folder("vanishes")
    with standing_still(folder) as process:
        shutil.rmtree(folder)
        process.ends("folder removed", ["metrics.jsonl: isn't there any more"])
    assert not os.path.exists(folder), "nothing is made where the run's folder was"
    resumes(folder)
    folder = h.new_folder("unmounted")
    with small_disk(folder, "size=32m"):
        with standing_still(folder) as process:
            subprocess.run(["umount", "-l", folder], check=True)
            process.ends("disk unmounted", ["metrics.jsonl: isn't there any more"])
    assert os.listdir(folder) == [], "nothing is written beneath the mount"
    resumes(folder)


def test_metrics_wait_for_room_when_the_config_says_so():
    # From step 3's line to the attempt before step 5's.
    short_of_room = ["write metrics.jsonl 0 5 7 ENOSPC", "write tfevents 0 5 9 ENOSPC"]
    folder = h.new_folder("waits")
    mpi, env = injected(short_of_room)
    done = h.train(h.make_config(STEPS), folder, RANKS, mpi=mpi, env=env, sets=[CONTINUE])
    for words in ("warning: no room for the lines of ", "warning: no checkpoint at step 4",
                  "that waited for room are written"):
        assert words in done.stdout, (words, done.stdout)
    assert h.checkpoints(folder) == ["step-00000002.h5", "step-00000006.h5"]
    equals_reference(folder)
    # Where it never comes, the run's end is no success.
    broken("no room to the end", ["write metrics.jsonl 0 5 0 ENOSPC"], ["metrics.jsonl", FULL],
           sets=[CONTINUE])


def test_folders_that_cannot_be_written():
    def refused(name, folder, words, as_nobody=()):
        start = time.time()
        done = h.run([*as_nobody, h.TESSERA, "train", "--config", h.make_config(STEPS), "--run-dir",
                      folder], expect=4)
        say(name, 4, time.time() - start, done.stderr)
        one_line(done.stderr, words)

    refused("long name", h.new_folder("x" * 300), ["File name too long; choose a shorter path"])
    h.write(h.FOLDER + "/file", "")
    refused("file in its place", h.FOLDER + "/file/run", ["/file is a file; choose another --run-dir"])
    folder = h.new_folder("root-owns")
    os.makedirs(folder)
    os.chmod(h.FOLDER, 0o755)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*nobody, h.TESSERA, "--version"], capture_output=True,
                      check=False).returncode == 0:
        refused("another's folder", folder, ["Permission denied; change the permissions"], nobody)


def test_launch_script_with_a_small_limit_on_files():
    done = h.run(["bash", "-c", 'ulimit -f 3000; exec "$@"', "bash", h.SOURCE + "/launch/run",
                  h.TESSERA, "--version"], expect=4)
    assert done.stderr.count("\n") == 1 and "ulimit -f unlimited" in done.stderr, done.stderr


def test_data_build():
    config = h.make_data()
    out = h.FOLDER + "/built"
    command = [h.TESSERA, "data", "build", "--recipe", config + "/recipe.textproto", "--sources",
               config + "/sources", "--out", out, "--threads", "2"]

    def same_as_unbroken():
        compared = filecmp.dircmp(config + "/shards", out)
        assert not compared.left_only and not compared.right_only, compared.report()
        for name in compared.common_dirs:
            of_component = filecmp.dircmp(f"{config}/shards/{name}", f"{out}/{name}")
            assert not of_component.left_only and not of_component.right_only
            _, different, faults = filecmp.cmpfiles(
                f"{config}/shards/{name}", f"{out}/{name}", of_component.common, shallow=False)
            assert not different and not faults, (name, different)

    table = [
        ("full", "write shard-000001 0 1 0 ENOSPC", FULL),
        ("broken disk", "write shard-000001 0 1 1 EIO", BROKEN),
        ("sync", "fsync shard-000001 0 1 1 EIO", BROKEN),
        ("close", "close shard-000001.tokens.partial 0 1 1 EIO", BROKEN),
        ("rename", "rename shard-000001 0 1 1 EIO", BROKEN),
        ("manifest", "write manifest 0 2 2 ENOSPC", FULL),
        ("folder", "fsync built/code 0 5 5 EIO", BROKEN),
        ("short", "write built 0 1 0 short", ""),
        ("interrupted", "write built 0 2 9 EINTR", ""),
    ]
    for name, rule, words in table:
        shutil.rmtree(out, ignore_errors=True)
        start = time.time()
        done = h.run(command, expect=4 if words else 0,
                     env={"LD_PRELOAD": FAULTS, "TESSERA_DISK_FAULTS": rule})
        say("data build, " + name, done.returncode, time.time() - start, done.stderr)
        assert not leftovers(out), leftovers(out)
        if words:
            one_line(done.stderr, [words])
            h.run(command)
        same_as_unbroken()
    shutil.rmtree(out)
    with small_disk(out, "size=512k"):
        done = h.run(command, expect=4)
        one_line(done.stderr, [FULL])
        assert not leftovers(out)
        subprocess.run(["mount", "-o", "remount,size=64m", out], check=True)
        h.run(command)
        same_as_unbroken()


def test_results_on_standard_output():
    data = h.make_data()
    recipe = data + "/recipe.textproto"
    run = h.unbroken_run(h.make_config(STEPS))
    for arguments in (["plan", "--config", h.make_config(STEPS), "--json"],
                      ["ckpt", "ls", run], ["ckpt", "verify", run],
                      ["ckpt", "diff", h.last_checkpoint(run), h.last_checkpoint(run)],
                      ["data", "inspect", data + "/shards"], ["data", "verify", data + "/shards"],
                      ["data", "locate", "--recipe", recipe, "--data", data + "/shards", "--sample", "3"],
                      ["data", "stream", "--recipe", recipe, "--data", data + "/shards", "--from",
                       "0", "--to", "99"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([h.TESSERA, *arguments], stdout=full, stderr=subprocess.PIPE,
                                  text=True, check=False)
        assert done.returncode == 4, (arguments, done)
        one_line(done.stderr, ["standard output can", FULL])


if __name__ == "__main__":
    h.main(globals())
