"""Several hosts on one machine. A host is a set of namespaces: its own network, host name, shared
memory, mounts and /tmp; a wire joins it to a bridge that stands in a network of its own. Nothing has
a name outside and everything lies in one space of processes, so that all of it goes with the test
that made it, however it ends. Needs util-linux and iproute2, and either root or user namespaces.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

# In the host's own namespaces: $1 name, $2 address, $3 the others' names, the rest: what is seen
# of the machine's /tmp.
SETUP = """
hostname "$1"
address=$2 names=$3
shift 3
mount --rbind / /mnt
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
for shared; do
  case $shared in /tmp/*) mkdir -p "$shared"; mount --bind "/mnt$shared" "$shared" ;; esac
done
umount -l /mnt
mount --bind "$names" /etc/hosts
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
echo ready
exec sleep infinity
"""

# What mpirun starts in place of ssh: HOST COMMAND. A session of its own, a bare environment, and 255
# when what runs there is killed.
AGENT = """#!/bin/sh
host=$1
shift
if ! [ -e {folder}/$host ]; then
  echo "agent: Could not resolve hostname $host: Name or service not known" >&2
  exit 255
fi
nsenter -t "$(cat {folder}/$host)" -n -u -i -m \\
  env -i PATH="$PATH" HOME=/root setsid -w sh -c "cd; $*; exit \\$?"
code=$?
[ $code -le 128 ] || code=255
exit $code
"""


def enter(skip_code=77):
    """Starts the script again in a space of processes of its own; ends it where that can't be."""
    if os.environ.get("TESSERA_HOSTS") == "1":
        return
    unshare = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        unshare.append("--map-root-user")
    wanted = unshare + ["unshare", "--net", "--uts", "--ipc", "true"]
    missing = [name for name in ("unshare", "nsenter", "ip", "setsid") if not shutil.which(name)]
    if missing or subprocess.run(wanted, check=False, capture_output=True).returncode != 0:
        print(f"skipped: {'no ' + missing[0] if missing else 'namespaces are not granted here'}")
        sys.exit(skip_code)
    os.environ["TESSERA_HOSTS"] = "1"
    # A shell is the first process, since that one must collect what others leave.
    os.execvp("unshare", unshare + ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, *sys.argv])


class Hosts:
    """Hosts h0, h1, ...; mpirun runs on h0. `shared`: folders under /tmp that all of them see."""

    def __init__(self, count, folder, shared):
        os.makedirs(folder)
        self.names = [f"h{host}" for host in range(count)]
        self.agent = folder + "/agent"
        self._holders = []
        table = "127.0.0.1 localhost\n" + "".join(
            f"10.77.0.{host + 1} {name}\n" for host, name in enumerate(self.names))
        write(folder + "/names", table)
        write(self.agent, AGENT.format(folder=folder))
        os.chmod(self.agent, 0o755)
        self._bridge = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        wait_for_namespace(self._bridge)
        self.on_bridge("ip", "link", "add", "bridge", "type", "bridge")
        self.on_bridge("ip", "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-ec",
                 "read go\n" + SETUP, "host", name, f"10.77.0.{host + 1}", folder + "/names",
                 *shared],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._holders.append(holder)
            wait_for_namespace(holder)
            self.on_bridge("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0",
                           "netns", str(holder.pid))
            self.on_bridge("ip", "link", "set", name, "master", "bridge", "up")
            holder.stdin.write("go\n")
            holder.stdin.close()
            assert holder.stdout.readline() == "ready\n", f"{name} couldn't be made"
            write(f"{folder}/{name}", str(holder.pid))
        for host in range(count):
            self._wait_for_link(host)

    def inside(self, host, command, cwd="/"):
        return ["nsenter", "-t", str(self._holders[host].pid), "-n", "-u", "-i", "-m",
                f"--wdns={cwd}", *command]

    def on_bridge(self, *command):
        return output_of(["nsenter", "-t", str(self._bridge.pid), "-n", *command])

    def on(self, host, *command):
        return output_of(self.inside(host, command))

    def processes(self, host):
        """What runs there, the holder apart: {pid: command line}."""
        network = os.readlink(f"/proc/{self._holders[host].pid}/ns/net")
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/net") == network:
                    with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
                        found[int(pid)] = file.read().replace("\0", " ")
            except OSError:
                pass  # gone
        found.pop(self._holders[host].pid, None)
        return found

    def kill(self, host, which=""):
        """-9 to the host's processes whose command line has `which`, until there are none."""
        while pids := [pid for pid, line in self.processes(host).items() if which in line]:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def bytes_sent(self, host):
        link = json.loads(self.on(host, "ip", "-j", "-s", "link", "show", "eth0"))
        return link[0]["stats64"]["tx"]["bytes"]

    def cut(self, host):
        """The wire is out: both ends see that the link is gone."""
        self.on_bridge("ip", "link", "set", self.names[host], "down")

    def silence(self, host):
        """The link stays up, but nothing comes through in either direction."""
        self.on_bridge("bridge", "link", "set", "dev", self.names[host], "state", "0")

    def mend(self, host):
        self.on_bridge("ip", "link", "set", self.names[host], "up")
        self._wait_for_link(host)
        self.on_bridge("bridge", "link", "set", "dev", self.names[host], "state", "3")

    def _wait_for_link(self, host):
        """The kernel finds a link to be up some time after the command that asked for it; until
        then the bridge lets nothing through and takes no state for the port ("Network is down").
        """
        end = time.time() + 30
        while True:
            [link] = json.loads(self.on_bridge("ip", "-j", "link", "show", self.names[host]))
            if link["operstate"] == "UP":
                return
            if time.time() > end:
                raise OSError(f"the link of {self.names[host]} is {link['operstate']}, not UP")
            time.sleep(0.01)

    def close(self):
        for host in range(len(self.names)):
            self.kill(host)
        for holder in [*self._holders, self._bridge]:
            holder.kill()
            holder.wait()


def output_of(command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_for_namespace(process):
    """Until the process has a network of its own, and so all its namespaces."""
    own = os.readlink("/proc/self/ns/net")
    while process.poll() is None:
        if os.readlink(f"/proc/{process.pid}/ns/net") != own:
            return
        time.sleep(0.005)
    raise OSError("a namespace couldn't be made")


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
