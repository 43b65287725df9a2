"""A job on a Ray cluster of four nodes: what it learns, and what it makes of a lost shard, a lost worker, a lost node.

The nodes are raylets on this machine (ray.cluster_utils). The job is examples/demo.yaml with two shards and two
workers, by `embershard.ray.run` from a driver; connections are encrypted with certificates that the run makes.

bits      staleness 0: all rows and optimizer states of the last checkpoint are those of the same job on this machine
shard     a shard's process is killed: it comes back with its rows
worker    a worker's process is killed: it is started again
node      the node of a shard is killed: all that ran there goes on on other nodes
cancel    Ctrl-C at the driver: every process ends, and the cluster has its cores again

Bars: the bits are equal; each job ends well, in one attempt of the policy; a shard takes pushes again, and a worker
trains again, within 60 s of a loss; no process of the job is left.

Needs the extra `ray`. Prints a table and one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from bar_undisturbed import differing, last_tables
from engines.engine_job import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Settings,
    await_,
    disturb,
    judge,
    left,
    result,
    role_of,
    samples,
    train_here,
    write_job,
)
from timing import finish, load

CASES = {"shard": ["ps"], "worker": ["worker"], "node": ["ps"]}
NODES, CORES = 4, 3
DRIVER = """
import sys, ray, embershard.ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
done = embershard.ray.run("job.yaml", output="run", settings=["durability=log", "checkpoint.folder=run/checkpoints"])
assert done.record["record"] == "result"
"""


class RayCluster:
    """A head and three more nodes, as processes of this machine."""

    def __init__(self) -> None:
        small = {"num_cpus": CORES, "object_store_memory": 80 * 2**20}
        self._cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        self._nodes = {"n0": self._cluster.head_node}
        self._small = small
        for number in range(1, NODES):
            self._nodes[f"n{number}"] = self._cluster.add_node(**small)
        self.address = str(self._cluster.address)

    def node_of(self, process: psutil.Process) -> str:
        """The node that a process runs on; empty where it is none's."""
        with suppress(psutil.Error):
            pids = {parent.pid for parent in process.parents()}
            for name, node in self._nodes.items():
                if node.all_processes["raylet"][0].process.pid in pids:
                    return name
        return ""

    def lose(self, name: str) -> None:
        """Kill a node at once."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def repair(self, name: str) -> None:
        """Have another node in its place."""
        self._nodes[name] = self._cluster.add_node(**self._small)

    def free_cores(self) -> float:
        """Cores that nobody holds."""
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        try:
            return float(ray.available_resources().get("CPU", 0.0))
        finally:
            ray.shutdown()

    def close(self) -> None:
        self._cluster.shutdown()


class RayJob:
    """A driver that runs the job, in a folder of its own."""

    def __init__(self, cluster: RayCluster, folder: Path, settings: Settings) -> None:
        folder.mkdir()
        write_job(folder / "job.yaml", settings)
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        with (folder / "said.txt").open("w") as said:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", DRIVER, cluster.address], cwd=folder, stdout=said, stderr=said
            )

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    @property
    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")

    @property
    def succeeded(self) -> bool:
        return self.popen.returncode == 0

    def processes(self, role: str) -> list[tuple[str, psutil.Process]]:
        found = []
        for process in psutil.process_iter():
            if role_of(process) == role and str(self.folder) in _folder_of(process):
                found.append((self.cluster.node_of(process) or "driver", process))
        return found


def _folder_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.cwd()
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["bits", *CASES, "cancel"])
    cases = parser.parse_args().only or ["bits", *CASES, "cancel"]
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = RayCluster()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            found = [run_case(case, cluster, Path(place)) for case in cases]
    finally:
        cluster.close()
    failures = judge(found)
    failures += [f"{one['case']}: {one['free']} of {NODES * CORES} cores" for one in found if one.get("free", 12) < 12]
    failures += [f"{one['case']}: {one['attempts']} attempts" for one in found if one.get("attempts", 1) != 1]
    finish({"bar": "ray", "nodes": NODES, "cases": found, "load": load()}, failures)


def run_case(case: str, cluster: RayCluster, folder: Path) -> dict[str, Any]:
    """Run a job, and what happens to it."""
    if case == "bits":
        train_here(folder / "here")
        job = RayJob(cluster, folder / case, SYNCHRONOUS)
        result(job)
        different = differing(last_tables(folder / "here"), last_tables(job.run))
        return {"case": case, "different_tables": different, "left": left(job)}
    job = RayJob(cluster, folder / case, ASYNCHRONOUS)
    if case == "cancel":
        await_(job, lambda: samples(job) >= 20_000, "20,000 samples")
        job.popen.send_signal(signal.SIGINT)
        job.popen.wait(60)
        left_over = left(job)
        time.sleep(5)
        return {"case": case, "left": left_over, "free": cluster.free_cores()}
    lost: list[str] = []

    def lose(node: str, process: psutil.Process) -> None:
        if case == "node":
            lost.append(node)
            cluster.lose(node)
        else:
            process.kill()

    await_(job, partial(samples, job), "a sample")  # type: ignore[arg-type]
    found = disturb(job, CASES[case], lose, spared={"n0", "driver"})
    for node in lost:
        cluster.repair(node)
    print({"case": case, **found}, flush=True)
    return {"case": case, **found}


if __name__ == "__main__":
    main()
