"""A shard is killed at 20 random moments: with a log nothing is lost, and without one at most a checkpoint's interval.

The job is examples/demo.yaml by `embershard train`, two shards and two workers, asynchronous, as in bar-undisturbed,
with a checkpoint every 250,000 samples. Each durability has runs of five kills each, and is held against as many runs
that nothing happens to.

log       a killed shard comes back by itself: the workers wait, no attempt ends, no step is lost
memory    the attempt ends with the shard: all shards are restored to the latest checkpoint, and the job goes on by
          itself; kills come once there is a checkpoint that the one before did not have

Bars: the mean AUC within .001 of the undisturbed one; with memory at most the steps of one checkpoint's interval are
lost by a kill; with a log the shard takes pushes again within 30 s of its kill, and with memory workers train again
within 30 s.

Prints a table and one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bar_undisturbed import LONGEST_PAUSE, LOOK_SECONDS, SHARDS, Kills, Training, auc_of, training
from timing import finish, load, median, print_table

MAX_DIFFERENCE, MAX_SECONDS = 0.001, 30.0
BATCH, EVERY = 1024, 250_000
STEPS_OF_A_SECOND = 60  # by which a log may be off
KILLS_OF_A_RUN = 5


class Recoveries:
    """Kills of shards that have no log: each ends the attempt."""

    def __init__(self) -> None:
        self.kills = 0

    def kill_at_random(self, job: Training, chooser: random.Random) -> None:
        """Kill a random shard at a random moment after each new checkpoint."""
        before: set[str] = set()
        for _ in range(KILLS_OF_A_RUN):
            while job.popen.poll() is None and checkpoints(job) <= before:
                time.sleep(LOOK_SECONDS)
            before |= checkpoints(job)
            time.sleep(chooser.uniform(0.0, LONGEST_PAUSE))
            index = chooser.randrange(SHARDS)
            while (victim := job.shard(index)) is None and job.popen.poll() is None:
                time.sleep(LOOK_SECONDS)
            if victim is None:
                return
            with suppress(psutil.Error):
                victim.kill()
                self.kills += 1


def checkpoints(job: Training) -> set[str]:
    """The whole ones that there are now."""
    return {path.parent.name for path in (job.folder / "checkpoints").glob("step-*/checkpoint.json")}


def run_log(
    folder: Path, words: list[str], samples: int, chooser: random.Random
) -> tuple[dict[str, Any], dict[str, Any]]:
    kills = Kills()
    with training(folder, *words) as job:
        arguments = (job, KILLS_OF_A_RUN, samples, chooser)
        killer = threading.Thread(target=kills.kill_at_random, args=arguments)
        killer.start()
        result = job.wait()
        killer.join()
    return result, {"kills": len(kills.lost_pids), "seconds": kills.pauses, "lost_steps": [0] * (job.attempts - 1)}


def run_memory(folder: Path, words: list[str], chooser: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    recoveries = Recoveries()
    with training(folder, *words, "--set", "durability=memory") as job:
        killer = threading.Thread(target=recoveries.kill_at_random, args=(job, chooser))
        killer.start()
        result = job.wait()
        killer.join()
    made = [record for record in job.records if record["record"] == "recovery"]
    return result, {
        "kills": recoveries.kills,
        "seconds": [one["seconds"] for one in made],
        "lost_steps": [one["lost_steps"] for one in made],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2_500_000)
    parser.add_argument("--runs", type=int, default=4, help="of five kills, of each durability")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    folder, chooser = Path(tempfile.mkdtemp()), random.Random(args.seed)
    words = ["--set", f"train.samples={args.samples}", "--set", f"checkpoint.every={EVERY}"]
    words += ["--set", f"evaluate.every={EVERY}", "--set", "train.recover=true"]
    most_steps = EVERY // BATCH + STEPS_OF_A_SECOND  # of both workers in an interval
    failures: list[str] = []
    found: dict[str, Any] = {}
    rows = []
    try:
        calm_ones = []
        for number in range(args.runs):  # one asynchronous run differs from the next, too
            with training(made(folder / f"undisturbed-{number}"), *words) as job:
                calm_ones.append(auc_of(job.wait()))
        calm = statistics.fmean(calm_ones)
        for durability in ("log", "memory"):
            figures: dict[str, Any] = {"auc": [], "kills": 0, "seconds": [], "lost_steps": []}
            for number in range(args.runs):
                place = made(folder / f"{durability}-{number}")
                if durability == "log":
                    result, one = run_log(place, words, args.samples, chooser)
                else:
                    result, one = run_memory(place, words, chooser)
                figures["auc"].append(round(auc_of(result), 5))
                for name, value in one.items():
                    figures[name] += value
                shutil.rmtree(place)
            if abs(statistics.fmean(figures["auc"]) - calm) > MAX_DIFFERENCE:
                failures.append(f"{durability}: AUC {statistics.fmean(figures['auc']):.5f}, undisturbed {calm:.5f}")
            if figures["kills"] < KILLS_OF_A_RUN * args.runs:
                failures.append(f"{durability}: {figures['kills']} kills of {KILLS_OF_A_RUN * args.runs}")
            if max(figures["seconds"], default=0.0) > MAX_SECONDS:
                failures.append(f"{durability}: back after {max(figures['seconds']):.1f} s, at most {MAX_SECONDS}")
            allowed = 0 if durability == "log" else most_steps
            failures += [f"{durability}: {steps} steps were lost, at most {allowed}"
                         for steps in figures["lost_steps"] if durability == "log" or steps > allowed]  # fmt: skip
            found[durability] = figures
            seconds = figures["seconds"] or [0.0]
            rows.append([durability, calm, min(figures["auc"]), max(figures["auc"]), figures["kills"], median(seconds),
                         max(seconds), max(figures["lost_steps"], default=0)])  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(["", "AUC undisturbed", "lowest", "highest", "kills", "median s", "worst", "most steps lost"], rows)
    finish({"bar": "recover", "undisturbed": [round(one, 5) for one in calm_ones], **found, "load": load()}, failures)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
