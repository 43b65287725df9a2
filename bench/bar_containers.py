"""A job in containers: the images of deploy/image/Containerfile, run by the compose file of `embershard manifests`.

The images are built on this machine's Debian, from wheels that pip fetches, without network. podman-compose starts two
shards and two workers in four containers with TLS, each with a root that cannot be written. The job is
examples/demo.yaml.

image     the image of shards has no torch; both have their kernels: a container compiles nothing when it starts
bits      staleness 0: all rows and optimizer states of the last checkpoint are those of the same job on this machine
shard     a shard is killed: it comes back with its rows, from the volume of its log
worker    a worker is killed: it is started again, and trains
first     the first worker is killed: it begins again from the latest checkpoint, with the other one
memory    a shard without a log is killed: the workers begin again from the latest checkpoint
cancel    podman-compose down: every process ends

Bars: the bits are equal; each job ends well; a shard takes pushes again, and a worker trains again, within 60 s of a
kill; no process of a job is left.

Needs root and Debian's podman, runc, containernetworking-plugins, golang-github-containernetworking-plugin-dnsname and
debootstrap. Prints a table and one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bar_undisturbed import differing, last_tables
from engines.containers import BASE, PACKAGES, ROOT, Podman, missing_tools
from engines.engine_job import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Settings,
    await_,
    disturb,
    judge,
    left,
    result,
    samples,
    train_here,
    write_job,
)
from timing import finish, load

CASES = {"shard": "shard-0", "worker": "worker-1", "first": "worker-0", "memory": "shard-0"}
RESUMED = ("first", "memory")  # from a checkpoint
ALL = ["image", "bits", *CASES, "cancel"]
SHARD, WORKER = "localhost/embershard:bar", "localhost/embershard-worker:bar"
OFTEN: Settings = {**ASYNCHRONOUS, "checkpoint": {"every": 200_000}}
ROLES = {"ps": "shard-", "worker": "worker-", "train": "none"}


@dataclass
class ContainerJob:
    """A job that podman-compose started."""

    podman: Podman
    folder: Path
    project: str

    @classmethod
    def start(cls, podman: Podman, folder: Path, settings: Settings, durability: str) -> ContainerJob:
        folder.mkdir()
        job = cls(podman, folder, folder.name)
        where = {"checkpoint": {**settings["checkpoint"], "folder": "/checkpoints"}}
        write_job(folder / "job.yaml", {**settings, **where})
        for words in ("keys init ca", "keys issue ads --authority ca --name shards --output keys"):
            job._embershard(*words.split())
        for path in (folder / "keys", *(folder / "keys").iterdir()):
            os.chown(path, 10001, 10001)
        words = f"manifests compose --name {job.project} --image {SHARD} --worker-image {WORKER} --tls keys"
        words += f" --durability {durability}"
        (folder / "compose.yaml").write_text(job._embershard(*words.split()))
        podman.run("--file", "compose.yaml", "up", "--detach", folder=folder, tool="podman-compose", seconds=300)
        return job

    @property
    def run(self) -> Path:
        return self.podman.mount_point(f"{self.project}_run")

    @property
    def said(self) -> str:
        services = self.podman.containers(self.project)
        logs = [(name, self.podman.try_("logs", "--tail", "30", str(one["Id"]))) for name, one in services.items()]
        return "\n".join(f"{name}: {log.stdout}{log.stderr}" for name, log in logs)

    @property
    def is_running(self) -> bool:
        return any(one["State"] != "exited" for _, one in self._services("worker-"))

    @property
    def succeeded(self) -> bool:
        return all(one["State"] == "exited" and one["ExitCode"] == 0 for _, one in self._services("worker-"))

    def processes(self, role: str) -> list[tuple[str, psutil.Process]]:
        found = [(name, self.podman.process_of(one)) for name, one in self._services(ROLES[role])]
        return [(name, process) for name, process in found if process is not None]

    def down(self) -> None:
        self.podman.run("--file", "compose.yaml", "down", "--volumes", folder=self.folder, tool="podman-compose")

    def _services(self, beginning: str) -> list[tuple[str, dict[str, object]]]:
        return [(n, one) for n, one in self.podman.containers(self.project).items() if n.startswith(beginning)]

    def _embershard(self, *words: str) -> str:
        command = [sys.executable, "-m", "embershard.cli", *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"embershard {' '.join(words)}: {done.stderr}")
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "containers", help="of images, which are kept")
    parser.add_argument("--fresh", action="store_true", help="build the images anew from the base on")
    args = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(f"{', '.join(missing)} not found: apt-get install {PACKAGES}")
    os.environ["OMP_NUM_THREADS"] = "1"
    podman = Podman(args.folder.resolve())
    build(podman, args.fresh)
    with tempfile.TemporaryDirectory(prefix="bar-", ignore_cleanup_errors=True) as place:
        found = [run_case(case, podman, Path(place)) for case in args.only]
    failures = judge(found)
    failures += [f"{one['case']}: {wrong}" for one in found for wrong in one.get("wrong", ())]
    finish({"bar": "containers", "cases": found, "load": load()}, failures)


def build(podman: Podman, fresh: bool) -> None:
    """Both images of this tree; the base and the layer of requirements are kept from one run to the next."""
    wheels = podman.folder / "wheels"
    if fresh or not podman.has_image(BASE):
        podman.make_base()
    if fresh or not wheels.is_dir():
        shutil.rmtree(wheels, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), "-c", "constraints.txt"]
        command += [".[train]", "setuptools>=77", "wheel"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            shutil.rmtree(wheels, ignore_errors=True)
            raise SystemExit("pip download failed")
    for target, tag in (("shard", SHARD), ("worker", WORKER)):
        podman.build(target, tag, wheels)


def run_case(case: str, podman: Podman, folder: Path) -> dict[str, Any]:
    """Look at the images, or run a job, and what happens to it."""
    if case == "image":
        return {"case": case, **look_at_images(podman)}
    settings = SYNCHRONOUS if case == "bits" else OFTEN if case in RESUMED else ASYNCHRONOUS
    durability = "memory" if case == "memory" else "log"
    job = ContainerJob.start(podman, folder / f"ads-{case}", settings, durability)
    found: dict[str, Any] = {"case": case}
    try:
        if case == "bits":
            train_here(folder / "here")
            result(job)
            shutil.copytree(podman.mount_point(f"{job.project}_checkpoints"), folder / "there" / "checkpoints")
            found["different_tables"] = differing(last_tables(folder / "here"), last_tables(folder / "there"))
        elif case == "cancel":
            await_(job, lambda: samples(job) >= 20_000, "20,000 samples")
        else:
            await_(job, partial(samples, job), "a sample")
            checkpoints = podman.mount_point(f"{job.project}_checkpoints")
            if case in RESUMED:
                await_(job, lambda: any(checkpoints.glob("step-*/checkpoint.json")), "a checkpoint")
            killed = CASES[case]
            role = "ps" if killed.startswith("shard") else "worker"
            spared = {name for name, _ in job.processes(role)} - {killed}
            found |= disturb(job, [role], lambda _, process: process.kill(), spared=spared)
            run = json.loads((checkpoints / "RUN").read_text())
            if not run["is_done"] or (run["checkpoint"] is not None) != (case in RESUMED):
                found["wrong"] = [f"its run is {run}"]
    finally:
        if "left" not in found and sys.exc_info()[0] is not None:
            print(job.said, file=sys.stderr)
        pids = [process.pid for role in ROLES for _, process in job.processes(role)]
        job.down()
    found["left"] = [*left(job), *(f"process {pid}" for pid in pids if psutil.pid_exists(pid))]
    print(found, flush=True)
    return found


def look_at_images(podman: Podman) -> dict[str, Any]:
    """Sizes, and what is wrong with them."""
    wrong = []
    once = ["run", "--rm", "--network", "none", "--read-only", "--cap-drop", "all"]
    if not podman.run(*once, SHARD, "--version").startswith("embershard "):
        wrong.append("the image of shards does not say its version")
    torch = ["--entrypoint", "python"]
    code = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    for image, has in ((SHARD, "False"), (WORKER, "True")):
        if podman.run(*once, *torch, image, "-c", code).strip() != has:
            wrong.append(f"{image}: torch: not {has}")
        if "compiling" in (said := podman.run(*once, *torch, image, "-c", COMPILES)):
            wrong.append(f"{image} compiles kernels when it starts: {said[:500]}")
        if podman.run(*once, "--entrypoint", "id", image, "-u").strip() != "10001":
            wrong.append(f"{image} does not run as its own user")
    return {"megabytes": {one: round(podman.megabytes(one)) for one in (BASE, SHARD, WORKER)}, "wrong": wrong}


COMPILES = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from embershard.cli.compile import compile
compile()
"""

if __name__ == "__main__":
    main()
