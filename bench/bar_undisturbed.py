"""A training job whose shards are killed ten times at random learns what one that nothing happens to learns, by itself.

The job is examples/demo.yaml (DLRM, its dense weights on the shards too, two shards, Adagrad and Adam) by
`embershard train` with `durability: log`. Shards are killed (-9) at random moments of it: while they serve, while they
start or recover, and while a checkpoint is written. Nobody does anything else.

asynchronous     two workers, five runs undisturbed and five with ten kills each, in turn: their mean AUCs (validation,
                 the best) differ by at most .001, each in one attempt. No two of such runs are alike: the 95 %
                 interval of the difference says what five of each can show
bits             one worker at staleness 0, undisturbed and with ten kills: all rows and optimizer states of the last
                 checkpoint are equal to the bit, those of the dense weights too
whole            that worker's job is killed three times at random moments with all of its processes, and the same
                 command goes on with `--resume latest`: the same bits

The pause of a kill lasts until the shard has taken a push again, the start of its process included. Processes of a run
carry a mark in their environment, by which all are found and ended with this script.

Prints a table and one JSON line; exits 1 on anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from embershard.compare.analysis.statistics import estimate
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import GetStatus, ShardStatus
from embershard.proto.snapshot.stored import open_snapshot
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from embershard.worker.checkpoint.checkpoint import SNAPSHOT
from timing import disk, finish, load, median, print_table
from train_job import EXAMPLES

MAX_DIFFERENCE = 0.001  # of the mean AUCs
SHARDS, WHOLE_KILLS = 2, 3
MARK = "EMBERSHARD_BENCH_RUN"
LOOK_SECONDS, ANSWER_SECONDS, LONGEST_PAUSE = 0.02, 1.0, 2.0
ONE_WORKER = ("--workers", "1", "--set", "train.staleness=0")
Tables = dict[str, list[np.ndarray[Any, Any]]]


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a run, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_all(mark: str) -> None:
    """Kill -9 of all processes of a run, also of those that they have started meanwhile."""
    while processes := marked(mark):
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, 10)


class Training:
    """`embershard train` on the job, in a folder; its shards are its children."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self._mark = folder, str(folder)
        command = [sys.executable, "-m", "embershard.cli", "train", str(EXAMPLES / "demo.yaml"), "--output", "out"]
        command += ["--set", "durability=log", "--set", "checkpoint.folder=" + str(folder / "checkpoints"), *words]
        with (folder / "said.txt").open("a") as said:
            self.popen = subprocess.Popen(
                command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, MARK: self._mark}
            )
        self.began = time.monotonic()

    @property
    def records(self) -> list[dict[str, Any]]:
        """Those of its log.jsonl that are whole."""
        log = self.folder / "out" / "log.jsonl"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def attempts(self) -> int:
        """How often it has begun to train."""
        return sum(record["record"] == "config" for record in self.records)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to go on from."""
        return any((self.folder / "checkpoints").glob("step-*/checkpoint.json"))

    def await_samples(self, samples: int) -> None:
        """Until it has trained on so many, or has ended."""
        while self.popen.poll() is None and max((one.get("samples", 0) for one in self.records), default=0) < samples:
            time.sleep(10 * LOOK_SECONDS)

    def shard(self, index: int) -> psutil.Process | None:
        """The process of a shard; None while there is none."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.popen.pid).children():
                with suppress(psutil.Error):
                    words = child.cmdline()
                    if "ps" in words and words[words.index("--shard") + 1] == str(index):
                        return child
        return None

    def kill(self) -> None:
        """Kill -9 of the command and all that it has started."""
        kill_all(self._mark)
        self.popen.wait()

    def wait(self) -> dict[str, Any]:
        """Its result, once it has ended; SystemExit where that is not what it said last."""
        code = self.popen.wait()
        last: dict[str, Any] = self.records[-1] if self.records else {}
        if code or last.get("record") != "result":
            raise SystemExit(f"the job ended with exit code {code}:\n{(self.folder / 'said.txt').read_text()[-4000:]}")
        return last


@contextmanager
def training(folder: Path, *words: str) -> Iterator[Training]:
    """A job that is under way; none of its processes outlives the block."""
    started = Training(folder, *words)
    try:
        yield started
    finally:
        started.kill()


def status_of(process: psutil.Process) -> ShardStatus | None:
    """What a shard says of itself; None while it does not answer."""
    with suppress(psutil.Error, Unreachable, EmbershardError, StopIteration):
        port = next(one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
        with closing(transport_for(f"127.0.0.1:{port}")) as transport:
            reply = transport.submit(GetStatus(), timedelta(seconds=ANSWER_SECONDS)).result()
            return reply if isinstance(reply, ShardStatus) else None
    return None


def takes_pushes(process: psutil.Process | None) -> bool:
    """Whether this process of a shard has taken a push."""
    status = None if process is None else status_of(process)
    return status is not None and not status.recovering and status.pushed_rows > 0


@dataclass
class Kills:
    """The kills of shards of one job."""

    pauses: list[float] = field(default_factory=list)  # seconds from a kill until that shard took a push again
    while_serving: int = 0
    lost_pids: set[int] = field(default_factory=set)

    def kill_at_random(self, job: Training, count: int, samples: int, chooser: random.Random) -> None:
        """Kill shards `count` times at random moments of a job of so many samples."""
        waits = []
        for share in sorted(chooser.uniform(0.02, 0.9) for _ in range(count)):
            job.await_samples(int(share * samples))
            time.sleep(chooser.uniform(0.0, LONGEST_PAUSE))  # samples are told every few seconds
            index = chooser.randrange(SHARDS)
            while (victim := job.shard(index)) is None and job.popen.poll() is None:
                time.sleep(LOOK_SECONDS)  # the one that was killed just before is not started again yet
            if victim is None:
                break
            self.while_serving += takes_pushes(victim)
            at = time.monotonic()
            with suppress(psutil.Error):
                victim.kill()
                self.lost_pids.add(victim.pid)
                waits.append(threading.Thread(target=self._wait, args=(job, index, victim.pid, at)))
                waits[-1].start()
        for wait in waits:
            wait.join()

    def _wait(self, job: Training, index: int, pid: int, at: float) -> None:
        while job.popen.poll() is None:
            process = job.shard(index)
            if process is not None and process.pid != pid and takes_pushes(process):
                self.pauses.append(time.monotonic() - at)
                return
            time.sleep(LOOK_SECONDS)

    def columns(self) -> list[object]:
        """For the table: how many, and the pauses."""
        return [len(self.lost_pids), median(self.pauses or [0.0]), max(self.pauses, default=0.0)]

    def add(self, others: Kills) -> None:
        """Count the kills of another run, too."""
        self.pauses += others.pauses
        self.while_serving += others.while_serving
        self.lost_pids |= others.lost_pids

    def figures(self) -> dict[str, object]:
        return {
            "kills": len(self.lost_pids),
            "while_it_served": self.while_serving,
            "pause_seconds": {
                "median": round(median(self.pauses), 2),
                "worst": round(max(self.pauses), 2),
                "all": [round(pause, 2) for pause in self.pauses],
            }
            if self.pauses
            else {},
        }


def last_tables(folder: Path) -> Tables:
    """The tables of the last checkpoint of a run."""
    return tables_of(str(max((folder / "checkpoints").glob("step-*"))))


def tables_of(checkpoint: str) -> Tables:
    """Table -> ids, rows and optimizer states of a checkpoint, by id."""
    found: Tables = {}
    stored = open_snapshot(checkpoint, SNAPSHOT)
    for name in stored.manifest.tables:
        parts = [np.concatenate(part) for part in zip(*stored.read_table(name), strict=True)]
        order = np.argsort(parts[0])
        found[name] = [part[order] for part in parts]
    return found


def differing(one: Tables, other: Tables) -> list[str]:
    """Tables that are not equal to the bit."""
    return [
        name for name in one.keys() | other.keys() if _bytes_of(one.get(name, [])) != _bytes_of(other.get(name, []))
    ]


def _bytes_of(parts: list[np.ndarray[Any, Any]]) -> list[tuple[tuple[int, ...], bytes]]:
    return [(part.shape, part.tobytes()) for part in parts]


def auc_of(result: dict[str, Any]) -> float:
    return float(result["figures"][result["split"]]["auc"])


def seconds_of(result: dict[str, Any]) -> float:
    return float(result["seconds"])


class Bar:
    """The runs, each in a folder below one, and what was wrong with them."""

    def __init__(self, folder: Path, samples: int, kills: int, seed: int) -> None:
        self._folder, self._samples, self._kills = folder, samples, kills
        every = max(1024, samples // 8)
        sets = [f"train.samples={samples}", f"evaluate.every={every}", f"checkpoint.every={every}"]
        self._sets = [word for one in sets for word in ("--set", one)]
        self._chooser = random.Random(seed)
        self.failures: list[str] = []

    def undisturbed(self, name: str, *words: str) -> dict[str, Any]:
        with training(self._new(name), *self._sets, *words) as job:
            return job.wait()

    def killed(self, name: str, *words: str) -> tuple[dict[str, Any], Kills]:
        """A run whose shards are killed."""
        kills = Kills()
        with training(self._new(name), *self._sets, *words) as job:
            killer = threading.Thread(
                target=kills.kill_at_random, args=(job, self._kills, self._samples, self._chooser)
            )
            killer.start()
            result = job.wait()
            killer.join()
        if len(kills.lost_pids) < self._kills or job.attempts != 1:
            self.failures.append(f"{name}: {len(kills.lost_pids)} kills of {self._kills}, {job.attempts} attempts")
        return result, kills

    def killed_whole(self, name: str, *words: str) -> tuple[dict[str, Any], list[int]]:
        """A run that ends with all of its processes, again and again; its result, and the steps at which it went on."""
        folder, resume = self._new(name), tuple[str, ...]()
        for number in range(1, WHOLE_KILLS + 1):
            with training(folder, *self._sets, *words, *resume) as job:
                while job.popen.poll() is None and not (job.attempts == number and job.has_checkpoint):
                    time.sleep(LOOK_SECONDS)
                share = (number - 1 + self._chooser.random()) / WHOLE_KILLS
                job.await_samples(int(0.9 * share * self._samples))
                time.sleep(self._chooser.uniform(0.0, LONGEST_PAUSE))
                if job.popen.poll() is not None:
                    self.failures.append(f"{name}: the job ended before it was killed {WHOLE_KILLS} times")
            resume = ("--resume", "latest")
        with training(folder, *self._sets, *words, *resume) as job:
            result = job.wait()
            steps = [record["resumed_step"] for record in job.records if record["record"] == "config"]
        if len(steps) != WHOLE_KILLS + 1 or None in steps[1:]:
            self.failures.append(f"{name}: the attempts went on at steps {steps}")
        return result, steps

    def asynchronous(self, runs: int) -> tuple[dict[str, object], list[object]]:
        """Compare runs of both kinds, in turn: what was found, and the row of the table."""
        calm, killed, seconds, kills = [], [], [], Kills()
        for number in range(runs):
            calm.append(self.undisturbed(f"asynchronous-{number}"))
            result, of_run = self.killed(f"asynchronous-killed-{number}")
            killed.append(result)
            kills.add(of_run)
            seconds.append([round(seconds_of(one), 1) for one in (calm[-1], result)])
        pairs = [auc_of(one) - auc_of(other) for one, other in zip(killed, calm, strict=True)]
        difference, means = estimate(pairs), [statistics.fmean(map(auc_of, one)) for one in (calm, killed)]
        bounds = [] if difference.low is None or difference.high is None else [difference.low, difference.high]
        if abs(difference.mean) > MAX_DIFFERENCE:
            self.failures.append(f"asynchronous: mean AUC {means[1]:.5f}, undisturbed {means[0]:.5f}")
        found = {
            "auc": [[round(auc_of(one), 5) for one in some] for some in (calm, killed)],
            "difference": round(difference.mean, 5),
            "interval": [round(bound, 5) for bound in bounds],
            "seconds": seconds,
            **kills.figures(),
        }
        interval = f"{difference.mean:+.5f}" + (f" ({bounds[0]:+.5f} to {bounds[1]:+.5f})" if bounds else "")
        return found, ["asynchronous", *(f"{mean:.5f}" for mean in means), interval, *kills.columns()]

    def compare(self, name: str, with_name: str) -> int:
        """Hold a run's last rows against another's; how many there are."""
        one, other = last_tables(self._folder / name), last_tables(self._folder / with_name)
        if "dense" not in one or "embedding" not in one:
            self.failures.append(f"{name}: its checkpoint has the tables {sorted(one)}")
        self.failures += [f"{name}: table {table} has other bits" for table in differing(one, other)]
        return sum(len(parts[0]) for parts in one.values())

    def _new(self, name: str) -> Path:
        (self._folder / name).mkdir()
        return self._folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of each run")
    parser.add_argument("--runs", type=int, default=5, help="asynchronous ones of each kind")
    parser.add_argument("--kills", type=int, default=10, help="of shards, in each run that is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", choices=["asynchronous", "bits"], help="`bits` is with the whole job's kills")
    parser.add_argument("--folder", type=Path, help="where the runs are left; default: a temporary folder")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    bar, found, rows = Bar(folder, args.samples, args.kills, args.seed), dict[str, object](), list[list[object]]()
    try:
        if args.only != "bits":
            found["asynchronous"], row = bar.asynchronous(args.runs)
            rows.append(row)
        if args.only != "asynchronous":
            calm = bar.undisturbed("one", *ONE_WORKER)
            killed, kills = bar.killed("one-killed", *ONE_WORKER)
            compared = bar.compare("one-killed", "one")
            whole, steps = bar.killed_whole("one-killed-whole", *ONE_WORKER)
            bar.compare("one-killed-whole", "one")
            found["one worker at staleness 0"] = {
                "auc": [round(auc_of(one), 5) for one in (calm, killed, whole)],
                "rows_compared": compared,
                "seconds": [round(seconds_of(one), 1) for one in (calm, killed)],
                "whole_job_went_on_at_steps": steps,
                **kills.figures(),
            }
            rows.append(["one worker", *(f"{auc_of(one):.5f}" for one in (calm, killed)), "", *kills.columns()])
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    header = ["", "AUC", "with kills", "difference (95 % interval)", "kills", "median pause s", "worst"]
    print_table(header, rows)
    finish({"bar": "undisturbed", "load": load(), "disk": disk(args.folder), "seed": args.seed, **found}, bar.failures)


if __name__ == "__main__":
    main()
