"""A Slurm cluster on this machine, for as long as a block runs: munge, slurmctld, and a slurmd in a network of its own
for each node.

Every node is a network namespace with an address of its own behind a bridge, so that nothing reaches another node over
loopback. Root and Debian's slurm-wlm, munge and iproute2 are needed; nothing of the system's own Slurm is used.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOOLS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "sinfo", "scontrol", "ip")
NETWORK = "10.98.0"
BRIDGE = "ember-slurm"
_LOST_SECONDS = 10  # after which a node that says nothing is lost
_WAIT_SECONDS = 30


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    nodes: Sequence[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Of the commands of this cluster."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**clean, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """State of each node, in Slurm's words."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {node: state for node, state in map(str.split, lines)}

    def processes_of(self, node: str) -> list[psutil.Process]:
        """Everything that runs on a node."""
        pids = subprocess.run(["ip", "netns", "pids", _space(node)], capture_output=True, text=True, check=False)
        found = []
        for pid in map(int, pids.stdout.split()):
            with suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return found

    def lose(self, node: str) -> None:
        """Have a node lose its power: everything on it is killed at once."""
        while found := [one for one in self.processes_of(node) if one.status() != psutil.STATUS_ZOMBIE]:
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, 5)
        self.processes[node].wait()

    def repair(self, nodes: Sequence[str]) -> None:
        """Start lost nodes again."""
        for node in nodes:
            self.start(node)
            self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until_idle()

    def start(self, node: str) -> None:
        """Start the slurmd of a node."""
        # not `ip netns exec`, which gives it a /sys without cgroups
        script = f"mount --bind {self.folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
        command = ["nsenter", f"--net=/run/netns/{_space(node)}", "unshare", "--mount", "sh", "-c", script]
        with (self.folder / f"{node}.out").open("ab") as out:
            self.processes[node] = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def wait_until_idle(self) -> None:
        """Until every node takes jobs."""
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end:
            with suppress(SystemExit):
                if set(self.states().values()) == {"idle"}:
                    return
            time.sleep(0.5)
        raise SystemExit(f"the nodes are not idle: {self.states()}; see {self.folder}")


def missing_tools() -> list[str]:
    """The programs that a cluster needs and that are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


@contextmanager
def slurm_cluster(folder: Path, num_nodes: int = 4, cpus: int = 8) -> Iterator[SlurmCluster]:
    """A cluster of nodes n0, n1, ..., whose files are in a folder; all of its processes end with the block."""
    cluster = SlurmCluster(folder, [f"n{number}" for number in range(num_nodes)])
    (folder / "state").mkdir(parents=True)
    _write_files(cluster, cpus)
    try:
        _make_network(cluster)
        munge = ["munged", "--foreground", f"--socket={folder}/munge", f"--key-file={folder}/munge.key"]
        munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
        for name, command in (("munged", [*munge, "--force"]), ("slurmctld", ["slurmctld", "-D"])):
            with (folder / f"{name}.out").open("wb") as out:
                cluster.processes[name] = subprocess.Popen(command, env=cluster.environment, stdout=out, stderr=out)
            time.sleep(1)
        for node in cluster.nodes:
            cluster.start(node)
        cluster.wait_until_idle()
        yield cluster
    finally:
        _end(cluster)


def _write_files(cluster: SlurmCluster, cpus: int) -> None:
    folder = cluster.folder
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True)
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={NETWORK}.{10 + number} CPUs={cpus} RealMemory=4000"
        for number, node in enumerate(cluster.nodes)
    )
    (folder / "slurm.conf").write_text(f"""\
ClusterName=ember
SlurmctldHost={os.uname().nodename}({NETWORK}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout={_LOST_SECONDS}
ReturnToService=2
KillWait=5
MessageTimeout=10
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")


def _make_network(cluster: SlurmCluster) -> None:
    """A bridge, and behind it a namespace with an address for each node; each knows the others by name."""
    hosts = "127.0.0.1 localhost\n" + "".join(
        f"{NETWORK}.{10 + number} {node}\n" for number, node in enumerate(cluster.nodes)
    )
    hosts += f"{NETWORK}.1 {os.uname().nodename}\n"
    (cluster.folder / "hosts").write_text(hosts)
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for number, node in enumerate(cluster.nodes):
        space, outer = _space(node), f"ember-{node}"
        _ip("netns", "add", space)
        _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outer, "master", BRIDGE, "up")
        for words in (
            ("addr", "add", f"{NETWORK}.{10 + number}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", space, *words)


def _end(cluster: SlurmCluster) -> None:
    for node in cluster.nodes:
        for process in cluster.processes_of(node):
            with suppress(psutil.Error):
                process.kill()
    for popen in reversed(cluster.processes.values()):
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(10)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
    for node in cluster.nodes:
        subprocess.run(["ip", "netns", "del", _space(node)], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def _space(node: str) -> str:
    return f"ember-slurm-{node}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(words)} failed: {done.stderr.strip()}; root is needed")
