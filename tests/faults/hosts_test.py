"""Several hosts (hosts.py): the same bits over TCP; a link cut, a host lost, hosts that can't be
reached and folders that aren't shared end the job in time with a clear word and leave no process;
the next start, on other hosts, goes on to the unbroken run's files."""
import contextlib
import glob
import os
import signal
import time

import hosts

hosts.enter()

import experts_test  # noqa: E402
import harness as h  # noqa: E402

RUN = h.SOURCE + "/launch/run"
STEPS = 100000  # more than any machine does before the fault
HOSTS = 4
# mpirun finds a silent host within 3 + 3 * 1 s; before the ranks do, or after them.
SOON = {"OMPI_MCA_oob_tcp_keepalive_time": "3", "OMPI_MCA_oob_tcp_keepalive_intvl": "1",
        "OMPI_MCA_oob_tcp_keepalive_probes": "3"}
os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"  # all hosts share this machine's cores
machine = None


def all_hosts():
    global machine
    if machine is None:
        machine = hosts.Hosts(HOSTS, h.FOLDER + "/hosts",
                              [h.FOLDER, h.SOURCE, os.path.dirname(h.TESSERA)])
        for host in range(HOSTS):  # a working folder that only it has
            machine.on(host, "mkdir", f"/tmp/work-{host}")
    return machine


def hostfile(where, slots=1):
    path = h.FOLDER + "/hostfile"
    h.write(path, "# some\n" + "".join(f"h{host} slots={slots}\n" for host in where))
    return path


def on_hosts(where, command, agent=None):
    """`command` through launch/run on h0, a rank on each of the hosts `where`."""
    options = ["--mca", "plm_rsh_agent", agent or all_hosts().agent, "--hostfile",
               hostfile(where)]
    return all_hosts().inside(0, [RUN, "-n", str(len(where)), *options, "--", *command],
                              cwd="/tmp/work-0")


def training(config, folder, sets=()):
    command = [h.TESSERA, "train", "--config", config, "--run-dir", folder]
    for value in sets:
        command += ["--set", value]
    return command


def assert_empty(where, seconds=10):
    h.wait_until(lambda: not any(all_hosts().processes(host) for host in where), seconds,
                 f"the end of {[all_hosts().processes(host) for host in where]}")


def reference(config, steps):
    """The run on one rank that nothing interrupts."""
    folder = f"{h.FOLDER}/reference-{os.path.basename(config)}-{steps}"
    if not os.path.isdir(folder):
        h.train(config, folder, 1, sets=[f"train.stop_at_step={steps}"])
    return folder


@contextlib.contextmanager
def running(name, where, sets=(), env=None):
    """A training that has made four steps; (process, folder)."""
    folder = h.new_folder(name)
    with h.background(on_hosts(where, training(h.make_config(STEPS), folder, sets)),
                      env=env) as process:
        try:
            h.wait_until(lambda: h.steps_in_metrics(folder) >= 4 or process.poll() is not None,
                         what="four steps")
            assert process.poll() is None, process.output()
            yield process, folder
        finally:
            for host in range(HOSTS):
                all_hosts().kill(host)
                all_hosts().mend(host)


def go_on(folder, where):
    """What was saved is whole; from there, on the hosts `where`, to the unbroken run's files."""
    saved = sorted(glob.glob(folder + "/checkpoints/*.h5"))
    for path in saved:
        h.run([h.TESSERA, "ckpt", "verify", path])
    steps = int(os.path.basename(saved[-1])[5:13]) + 3
    h.run(on_hosts(where, training(h.make_config(STEPS), folder, [f"train.stop_at_step={steps}"])))
    expected = reference(h.make_config(STEPS), steps)
    h.assert_same_file(h.last_checkpoint(folder), h.last_checkpoint(expected))
    assert h.numbers(folder) == h.numbers(expected), folder
    left = [name for name in h.checkpoints(folder) if not name.endswith(".h5")]
    assert not left, left


def assert_over_hosts(config, where, sets=()):
    """The same files as on one rank; what each rank sends goes over its host's wire."""
    folder = h.new_folder("over-hosts")
    sent = [all_hosts().bytes_sent(host) for host in where]
    done = h.run(on_hosts(where, training(config, folder, ["train.stop_at_step=4", *sets])))
    h.assert_same_run(folder, reference(config, 4))
    parameters = int(done.stdout.split()[0])
    # In a step a rank sends its slice to all others, twice, and their parts of its gradient.
    least = 4 * 4 * parameters * (len(where) - 1) // len(where)
    for host, before in zip(where, sent):
        assert all_hosts().bytes_sent(host) - before > least, (host, parameters)
    states = [open(f"{folder}/logs/rank-{rank}.state", encoding="utf-8").read()
              for rank in range(len(where))]
    assert [state.split(" host ")[1].split()[0] for state in states] == [
        f"h{host}" for host in where], states
    assert_empty(where)


def test_the_same_bits_over_hosts():
    for where in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
        assert_over_hosts(h.make_config(STEPS), where)


def test_experts_over_hosts():
    config = experts_test.make_config()
    assert_over_hosts(config, [0, 1], ["parallel.expert_ranks=2"])
    assert_over_hosts(config, [0, 1, 2, 3], ["parallel.expert_ranks=2", "execution.threads=2"])


def test_a_host_file_is_enough():
    """launch/cluster/start, with two ranks on each host."""
    folder = h.new_folder("start")
    h.run(all_hosts().inside(0, [h.SOURCE + "/launch/cluster/start", hostfile([0, 1], 2),
                                 h.make_config(STEPS), folder, "--set", "train.stop_at_step=4"]),
          env={"TESSERA": h.TESSERA, "OMPI_MCA_plm_rsh_agent": all_hosts().agent})
    h.assert_same_run(folder, reference(h.make_config(STEPS), 4))
    assert len(glob.glob(folder + "/logs/rank-*.state")) == 4


def test_data_build_over_hosts():
    data = h.make_data()
    out = h.new_folder("built")
    h.run(on_hosts([0, 1, 2], [h.TESSERA, "data", "build", "--recipe", data + "/recipe.textproto",
                               "--sources", data + "/sources", "--out", out]))
    names = sorted(os.path.relpath(path, out)
                   for path in glob.glob(out + "/**", recursive=True) if os.path.isfile(path))
    assert len(names) > 4, names
    for name in names:
        h.assert_same_file(f"{out}/{name}", f"{data}/shards/{name}")


def test_a_slow_link_changes_nothing():
    for host in (0, 1):
        all_hosts().on(host, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "16mbit",
                       "burst", "32kb", "latency", "100ms")
    try:
        assert_over_hosts(h.make_config(STEPS), [0, 1])
    finally:
        for host in (0, 1):
            all_hosts().on(host, "tc", "qdisc", "del", "dev", "eth0", "root")


def ends(process, start, seconds):
    code = process.wait(timeout=seconds)
    print(f"  ended after {time.time() - start:.1f} s", flush=True)
    assert code == 5, f"exit code {code}\n{process.output()}"
    assert "run: a host was lost, or the way to it" in process.output()


def test_a_link_is_cut():
    """mpirun finds it first, and so does its daemon on the host that is cut off."""
    with running("cut", [0, 1, 2], env=SOON) as (process, folder):
        start = time.time()
        all_hosts().cut(2)
        ends(process, start, 30)
        assert "Remote daemon:" in process.output() and "on node h2" in process.output()
        assert_empty(range(3))
    go_on(folder, [0, 3])


def test_nothing_comes_through_any_more():
    """The ranks find it first, on both sides; mpirun can't reach its daemon, and is ended."""
    with running("silent", [0, 1], ["execution.watchdog_seconds=3"]) as (process, folder):
        start = time.time()
        all_hosts().silence(1)
        ends(process, start, 40)
        words = [line for line in process.output().splitlines() if "watchdog_seconds" in line]
        assert any("rank 0 (h0)" in line and "host h1" in line for line in words), words
        assert_empty([0])
        h.wait_until(lambda: all("train" not in line for line in
                                 all_hosts().processes(1).values()), 10, "the end of the other side")
    go_on(folder, [2, 3, 0])


def test_the_launching_host_is_cut_off():
    with running("first", [0, 1, 2], env=SOON) as (process, folder):
        start = time.time()
        all_hosts().cut(0)
        ends(process, start, 30)
        assert_empty(range(3))
    go_on(folder, [0, 1, 2])


def test_a_host_is_lost():
    for which in ("", "orted"):  # all of it; mpirun's daemon alone
        with running("lost", [0, 1, 2], env=SOON) as (process, folder):
            start = time.time()
            all_hosts().kill(1, which)
            ends(process, start, 30)
            # mpirun names no host when it learns it by the end of the agent that it started there.
            assert (which or "h1\n" in process.output()
                    or "unable to reliably start" in process.output()), process.output()
            assert_empty(range(3))
        go_on(folder, [3, 2])


def test_a_signal_saves_though_the_ranks_are_elsewhere():
    with running("term", [1, 2]) as (process, folder):
        start = time.time()
        os.kill(process.pid, signal.SIGTERM)
        code = process.wait(timeout=60)
        print(f"  ended after {time.time() - start:.1f} s", flush=True)
        assert code == 0, f"{code}\n{process.output()}"
        assert h.metrics(folder)[-1]["stopped"] == "signal"
        assert_empty(range(3))
        for host in (1, 2):
            assert "tessera-run" not in all_hosts().on(host, "ls", "/tmp")
    go_on(folder, [0])


def test_a_folder_that_is_not_shared():
    folder = "/tmp/work-0/run"  # every host has a /tmp of its own
    done = h.run(on_hosts([0, 1], training(h.make_config(STEPS), folder)), expect=4)
    assert f"{folder}/logs: made by rank 0 but not seen on host h1" in done.stderr, done.stderr


def test_hosts_that_cannot_be_reached():
    config = h.make_config(STEPS)
    folder = h.new_folder("unreached")

    def refused(where, words, agent=None, command=None):
        start = time.time()
        done = h.run(on_hosts(where, command or training(config, folder), agent), expect=5)
        assert time.time() - start < 30
        lines = done.stderr.splitlines()
        assert any(words in line for line in lines), done.stderr
        assert lines[-1].startswith("run: ") and "ssh HOST mpirun --version" in lines[-1], lines
        assert not os.path.exists(folder)
        assert_empty(range(HOSTS))

    refused([0, 9], "Could not resolve hostname h9")
    refused([0, 1], "run: 0 of 2 ranks", agent="/bin/false")
    broken = h.FOLDER + "/no-orted"
    h.write(broken, open(all_hosts().agent, encoding="utf-8").read().replace("cd;", "PATH=;"))
    os.chmod(broken, 0o755)
    refused([0, 1], "orted: not found", agent=broken)
    refused([1, 0], "run: h1: there is no /tmp/work-0/tessera",
            command=["/tmp/work-0/tessera", "train"])
    if h.LONG:  # an agent that doesn't come back
        slow = h.FOLDER + "/slow"
        h.write(slow, "#!/bin/sh\nexec sleep 1000\n")
        os.chmod(slow, 0o755)
        start = time.time()
        done = h.run(on_hosts([0, 1], training(config, folder), slow), expect=5)
        assert "ssh HOST mpirun --version" in done.stderr and time.time() - start < 90
        assert_empty(range(HOSTS))


@contextlib.contextmanager
def same_address_everywhere(name):
    """A bridge as that of containers: up, with one address on every host, and leading nowhere."""
    for host in (0, 1):
        all_hosts().on(host, "ip", "link", "add", name, "type", "bridge")
        all_hosts().on(host, "ip", "address", "add", "172.17.0.1/16", "dev", name)
        all_hosts().on(host, "ip", "link", "set", name, "up")
    try:
        yield
    finally:
        for host in (0, 1):
            all_hosts().on(host, "ip", "link", "del", name)


def test_bridges_of_containers():
    """The usual ones aren't tried; others make the ranks miss one another, which doesn't hang."""
    with same_address_everywhere("docker0"):
        assert_over_hosts(h.make_config(STEPS), [0, 1])
    if h.LONG:
        with same_address_everywhere("bridge0"):
            folder = h.new_folder("missed")
            done = h.run(on_hosts([0, 1], training(h.make_config(STEPS), folder)), expect=5,
                         timeout=200)
            assert "the ranks have not met within 120 s" in done.stderr, done.stderr
            assert_empty([0, 1])


if __name__ == "__main__":
    h.main(globals())
