"""A job on a Slurm cluster of four nodes: what it learns, and what it makes of a lost shard, a lost worker, lost nodes.

The cluster is made on this machine for the bar (bench/engines/slurm_cluster.py): a slurmd for each node, each in a
network of its own. The job is examples/demo.yaml with two shards and two workers, by the batch script of
`embershard manifests slurm`; connections are encrypted with certificates that the run makes.

bits      staleness 0: all rows and optimizer states of the last checkpoint are those of the same job on this machine
shard     a shard's process is killed: it comes back with its rows
worker    a worker's process is killed: it is started again
node      a node with a shard and one with a worker lose their power: both go on on other nodes
cancel    scancel: every process ends

Bars: the bits are equal; each job ends well, in one attempt of the policy; a shard takes pushes again, and a worker
trains again, within 60 s of a kill; no process of the job is left on any node.

Needs root and Debian's slurm-wlm, munge and iproute2. Prints a table and one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

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
from engines.slurm_cluster import SlurmCluster, missing_tools, slurm_cluster
from timing import finish, load

CASES = {"shard": ["ps"], "worker": ["worker"], "node": ["ps", "worker"]}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


@dataclass
class SlurmJob:
    """A job that was submitted, in a folder of its own."""

    cluster: SlurmCluster
    folder: Path
    number: str

    @classmethod
    def submit(cls, cluster: SlurmCluster, folder: Path, settings: Settings) -> SlurmJob:
        folder.mkdir()
        write_job(folder / "job.yaml", settings)
        command = [sys.executable, "-m", "embershard.cli", "manifests", "slurm", "--name", "bar", "--job", "job.yaml"]
        command += ["--nodes", "4", "--cpus", "1", "--worker-cpus", "1"]
        command += ["--executable", f"{sys.executable} -m embershard.cli"]
        script = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if script.returncode:
            raise SystemExit(f"embershard manifests slurm: {script.stderr}")
        (folder / "bar.sbatch").write_text(script.stdout)
        command, environment = ["sbatch", "--parsable", "bar.sbatch"], {**cluster.environment, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"sbatch: {done.stderr}")
        return cls(cluster, folder, done.stdout.strip())

    @property
    def run(self) -> Path:
        return self.folder / "runs" / f"bar-{self.number}"

    @property
    def said(self) -> str:
        log = self.folder / f"bar-{self.number}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([self.state, *(line for line in lines if "\x1b[2K" not in line)])  # no progress

    @property
    def state(self) -> str:
        shown = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word).get("JobState", "")

    @property
    def is_running(self) -> bool:
        return self.state not in ENDED

    @property
    def succeeded(self) -> bool:
        return self.state == "COMPLETED"

    def processes(self, role: str) -> list[tuple[str, psutil.Process]]:
        everywhere = [(node, one) for node in self.cluster.nodes for one in self.cluster.processes_of(node)]
        return [(node, process) for node, process in everywhere if role_of(process) == role]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["bits", *CASES, "cancel"])
    args = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge iproute2")
    cases = args.only or ["bits", *CASES, "cancel"]
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        slurm_cluster(Path(place) / "slurm") as cluster,
    ):
        found = [run_case(case, cluster, Path(place)) for case in cases]
    failures = judge(found)
    failures += [f"{one['case']}: {one['attempts']} attempts" for one in found if one.get("attempts", 1) != 1]
    finish({"bar": "slurm", "nodes": 4, "cases": found, "load": load()}, failures)


def run_case(case: str, cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    """Run a job, and what happens to it."""
    if case == "bits":
        train_here(folder / "here")
        job = SlurmJob.submit(cluster, folder / case, SYNCHRONOUS)
        result(job)
        return {"case": case, "different_tables": differing(last_tables(folder / "here"), last_tables(job.run)),
                "left": left(job)}  # fmt: skip
    job = SlurmJob.submit(cluster, folder / case, ASYNCHRONOUS)
    if case == "cancel":
        await_(job, lambda: samples(job) >= 20_000, "20,000 samples")
        cluster.run("scancel", job.number)
        return {"case": case, "left": left(job)}
    lost: list[str] = []

    def lose(node: str, process: psutil.Process) -> None:
        if case == "node":
            lost.append(node)
            cluster.lose(node)
        else:
            process.kill()

    await_(job, partial(samples, job), "a sample")
    found = disturb(job, CASES[case], lose, spared={node for node, _ in job.processes("train")})
    cluster.repair(lost)
    print({"case": case, **found}, flush=True)
    return {"case": case, **found}


if __name__ == "__main__":
    main()
