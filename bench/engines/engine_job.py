"""A job that an engine runs, and what becomes of it when something of it is lost: the same for every engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from bar_undisturbed import auc_of
from timing import print_table

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.yaml"
BACK_SECONDS = 60  # in which a lost shard or worker is back
JOB_SECONDS = 480
LEFT_SECONDS = 20  # for the last processes to end
OURS = "embershard.cli"
Settings = Mapping[str, Mapping[str, object]]
SYNCHRONOUS: Settings = {"train": {"staleness": 0, "samples": 40_000}, "checkpoint": {"every": 20_000}}
ASYNCHRONOUS: Settings = {
    "train": {"samples": 3_000_000, "restart_workers": 5},
    "checkpoint": {"every": 500_000},
}


def write_job(path: Path, settings: Settings) -> None:
    """The demo's job with other settings."""
    from ruamel.yaml import YAML

    yaml = YAML()
    job = yaml.load(DEMO)
    for section, values in settings.items():
        job.setdefault(section, {}).update(values)
    job["evaluate"] = {"every": settings["checkpoint"]["every"]}
    with path.open("w") as file:
        yaml.dump(job, file)


def train_here(folder: Path) -> None:
    """Train the synchronous job on this machine; its checkpoints are in the folder's `checkpoints`."""
    folder.mkdir()
    write_job(folder / "job.yaml", SYNCHRONOUS)
    command = [sys.executable, "-m", OURS, "train", "job.yaml", "--output", "run"]
    command += ["--set", "checkpoint.folder=checkpoints"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the job on this machine: {done.stdout[-1000:]}{done.stderr[-2000:]}")


class EngineJob(Protocol):
    """A job on an engine. `run` is its folder."""

    run: Path

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        ...

    @property
    def said(self) -> str:
        """What it has printed."""
        ...

    @property
    def succeeded(self) -> bool:
        """Whether it has ended, and well."""
        ...

    def processes(self, role: str) -> list[tuple[str, psutil.Process]]:
        """The processes of a role, "ps", "worker" or "train", each with its node."""
        ...


def role_of(process: psutil.Process) -> str:
    """The command of ours that a process runs; empty for what only starts one."""
    with suppress(psutil.Error):
        words = process.cmdline()
        if (
            words
            and OURS in words
            and Path(words[0]).name.startswith("python")
            and "embershard.deploy.ray_step" not in words
        ):
            return words[words.index(OURS) + 1]
    return ""


def records(job: EngineJob) -> list[dict[str, Any]]:
    """Those of its log that are whole."""
    log = job.run / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def samples(job: EngineJob) -> int:
    """On how many it has trained."""
    return max((one.get("samples", 0) for one in records(job)), default=0)


def await_(job: EngineJob, condition: Callable[[], bool], what: str) -> float:
    """Seconds until a condition holds; SystemExit where the job ends before."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > JOB_SECONDS or not job.is_running:
            raise SystemExit(f"the job did not come to {what}:\n{job.said[-4000:]}")
        time.sleep(0.5)
    return time.monotonic() - began


def result(job: EngineJob) -> dict[str, Any]:
    """The last record, once it has ended well."""
    began = time.monotonic()
    while job.is_running:
        if time.monotonic() - began > JOB_SECONDS:
            raise SystemExit(f"the job did not end:\n{job.said[-4000:]}")
        time.sleep(0.5)
    found = records(job)
    if not job.succeeded or not found or found[-1].get("record") != "result":
        raise SystemExit(f"the job ended without a result:\n{job.said[-4000:]}")
    return found[-1]


def left(job: EngineJob) -> list[str]:
    """Processes of the job that are still there, after a moment for the engine to end them."""
    end = time.monotonic() + LEFT_SECONDS
    while True:
        found = [f"{role} on {node}" for role in ("ps", "worker", "train") for node, _ in job.processes(role)]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.5)


def judge(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Print what each case found; what of it misses the bars of all engines."""
    failures = [f"bits: {name} differs" for one in cases for name in one.get("different_tables", ())]
    for one in cases:
        failures += [f"{one['case']}: processes are left: {one['left']}"] if one.get("left") else []
        if (seconds := one.get("trained_again_seconds", 0)) > BACK_SECONDS:
            failures.append(f"{one['case']}: trained again after {seconds} s, at most {BACK_SECONDS}")
    columns = ["case", "back_seconds", "trained_again_seconds", "attempts", "auc"]
    print_table(columns, [[one.get(column, "") for column in columns] for one in cases])
    return failures


def disturb(
    job: EngineJob, roles: list[str], lose: Callable[[str, psutil.Process], None], spared: set[str]
) -> dict[str, Any]:
    """Lose a process of each role, none on a node that is spared, while the job trains; what became of it.

    `lose` takes a node and its process.
    """
    await_(job, lambda: samples(job) >= 60_000, "60,000 samples")
    victims = []
    for role in roles:
        node, process = next(found for found in job.processes(role) if found[0] not in spared)
        victims.append((role, node, process))
    before, lost = samples(job), {process.pid for _, _, process in victims}
    began = time.monotonic()
    for _, node, process in victims:
        lose(node, process)

    def is_back(role: str) -> bool:
        now = {process.pid for _, process in job.processes(role)}
        return len(now) == 2 and not lost & now

    back = max(await_(job, lambda role=role: is_back(role), f"a {role} again") for role, _, _ in victims)
    await_(job, lambda: samples(job) > before + 20_000, "further samples")
    trained = time.monotonic() - began
    last = result(job)
    return {
        "back_seconds": round(back, 1),
        "trained_again_seconds": round(trained, 1),
        "attempts": sum(record["record"] == "config" for record in records(job)),
        "auc": round(auc_of(last), 4),
        "left": left(job),
    }
