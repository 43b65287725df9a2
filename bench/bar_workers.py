"""Workers that are lost or unresponsive: the cost for the others, and for the model.

Killed: DeepFM on Frappe with a small tower (hidden [64, 64], batches of 1024, 10 epochs, so that it fits 2 cores), four
workers, epochs dealt out in splits, a lease of 2 s; one worker is killed (-9) while it trains in the second epoch. In
each mode (staleness 0, 4 and off, dense weights on the shards) training has to go on, the shards without a push for no
longer than the lease and 2 s (the rendezvous at the end of an epoch waits for the lease too), its part of the data
has to be dealt again, and the best AUC to be at most 0.003 below that of the same mode undisturbed, in the mean of
three seeds: asynchronous runs of one seed lie up to 0.004 apart. With dense weights all-reduced (ddp) the others cannot
go on: there the command has to end with an error that names the worker, within 30 s.

Stopped: four asynchronous workers of a loop of their own, one of them stopped (SIGSTOP) for 20 s, four times its lease,
and beside them a second job of the same kind, on a shard of its own, of which nobody is stopped: it says what the
machine had to give meanwhile. On a machine with fewer cores than workers the others would gain the stopped one's
processor time, and hide what they lose. So every worker sleeps 50 ms after each step: together they leave the
processors idle for most of the time, and a worker's rate is that of its sleeps unless it waits for somebody. The
others' steps per second, while one is stopped and after it went on, against those before, have to be at least 0.95 of
the same ratio of the second job, in the median of five rounds.

Prints two tables and one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean, median

import psutil

import embershard as es
from embershard.deploy.supervisor import LocalShards
from timing import finish, print_table
from train_job import EXAMPLES

WORKERS, VICTIM = 4, 2
LEASE = 2.0
SETTINGS = (
    "model.hidden=[64, 64]",
    "train.batch_size=1024",
    "train.epochs=10",
    "train.early_stop=null",
    f"train.lease={LEASE}",
)
MODES, SEEDS = ("0", "4", "off"), (1, 2, 3)
MAX_PAUSE, MAX_LOSS, MAX_END = LEASE + 2.0, 0.003, 30.0
STOPPED, PACE, STEP_LEASE = 20.0, 0.05, 5.0
MIN_RATE, ROUNDS = 0.95, 5


@dataclass(frozen=True)
class Run:
    """What a job came to, and the longest time without a push since a worker was killed."""

    code: int
    said: str
    seconds_to_end: float
    pause: float
    result: dict[str, object]

    @property
    def auc(self) -> float:
        """On the split that decides."""
        figures = self.result["figures"]
        assert isinstance(figures, dict)
        return float(figures[self.result["split"]]["auc"])


def run(*settings: str, kill: bool) -> Run:
    """Train on shards of its own; with `kill` one worker ends in the second epoch."""
    with tempfile.TemporaryDirectory() as folder, LocalShards(1) as shards, es.connect(shards.addresses) as session:
        command = [sys.executable, "-m", "embershard.cli", "train", str(EXAMPLES / "frappe-deepfm.yaml")]
        command += ["--workers", str(WORKERS), "--ps", ",".join(shards.addresses), "--output", folder]
        command += [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        with (Path(folder) / "said.txt").open("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            log, killed, last, pause, rows = Path(folder) / "log.jsonl", 0.0, time.monotonic(), 0.0, -1
            first_epoch: int | None = None  # rows pushed in it
            while process.poll() is None:
                time.sleep(0.05)
                pushed = 0 if killed and time.monotonic() - killed > 3 * LEASE else _pushed(session)
                if pushed and killed:
                    pause = max(pause, time.monotonic() - last)
                if pushed != rows:
                    rows, last = pushed, time.monotonic()
                if first_epoch is None and _has_evaluated(log):
                    first_epoch = pushed
                if kill and not killed and first_epoch is not None and pushed > first_epoch:
                    _worker(process).kill()
                    killed = last = time.monotonic()
            end = time.monotonic() - killed if killed else 0.0
            said.seek(0)
            text = said.read()
        records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    result = records[-1] if records and records[-1]["record"] == "result" else {}
    return Run(process.returncode, text, end, pause, result)


def _pushed(session: es.Session) -> int:
    return sum(status.pushed_rows for status in session.client.status())


def _has_evaluated(log: Path) -> bool:
    lines = log.read_text().splitlines() if log.exists() else []
    return any(json.loads(line)["record"] == "eval" for line in lines if line.endswith("}"))


def _worker(process: subprocess.Popen[bytes]) -> psutil.Process:
    found = [p for p in psutil.Process(process.pid).children() if "worker" in p.cmdline()]
    return next(p for p in found if p.environ()["RANK"] == str(VICTIM))


def killed(failures: list[str]) -> dict[str, object]:
    """Every mode with and without a worker that is killed."""
    found: dict[str, object] = {}
    rows = []
    for mode in MODES:
        calm, lost = ([train(mode, seed, kill=kill) for seed in SEEDS] for kill in (False, True))
        auc, with_kill = (mean(one.auc for one in runs) for runs in (calm, lost))
        pause = max(one.pause for one in lost)
        returned = [one.result["returned_splits"] for one in lost]
        rows.append([mode, f"{auc:.4f}", f"{with_kill:.4f}", f"{with_kill - auc:+.4f}", pause, str(returned)])
        found[f"staleness {mode}"] = {
            "auc": [round(one.auc, 5) for one in calm],
            "auc_killed": [round(one.auc, 5) for one in lost],
            "difference": round(with_kill - auc, 5),
            "pause_seconds": round(pause, 2),
            "returned_splits": returned,
        }
        if with_kill < auc - MAX_LOSS:
            failures.append(f"staleness {mode}: AUC {with_kill:.4f} with a worker killed, {auc:.4f} without")
        if pause > MAX_PAUSE:
            failures.append(f"staleness {mode}: no push for {pause:.1f} s, lease {LEASE} s")
        if not all("the others continue training" in one.said for one in lost):
            failures.append(f"staleness {mode}: the command does not say that a worker was lost")
        if not all(returned):
            failures.append(f"staleness {mode}: nothing was dealt again of what the worker had: {returned}")
    print_table(["staleness", "AUC", "with a kill", "difference", "pause s", "dealt again"], rows)
    found["dense ddp"] = all_reduced(failures)
    return found


def train(mode: str, seed: int, *, kill: bool) -> Run:
    """One run of a mode that survives a kill. SystemExit where it did not."""
    done = run(f"train.staleness={mode}", f"train.seed={seed}", "data.splits=auto", kill=kill)
    if done.code or not done.result:
        raise SystemExit(f"staleness {mode}: {done.said[-2000:]}")
    return done


def all_reduced(failures: list[str]) -> dict[str, object]:
    """What becomes of a job whose dense weights are all-reduced."""
    ddp = run("dense.mode=ddp", kill=True)
    named = f"worker {VICTIM} ended (SIGKILL)" in ddp.said
    print(f"dense ddp: ends {ddp.seconds_to_end:.1f} s after the kill, exit code {ddp.code}, named: {named}")
    if not named or ddp.code == 0 or ddp.seconds_to_end > MAX_END:
        failures.append(f"dense ddp: exit code {ddp.code} after {ddp.seconds_to_end:.1f} s, named: {named}")
    return {"exit_code": ddp.code, "seconds_to_end": round(ddp.seconds_to_end, 2)}


def train_paced(rank: int, addresses: str) -> None:
    """A worker that sleeps after each step; the times of its steps, at SIGTERM, on stdout."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    times: list[float] = []

    def stop(*_: object) -> None:
        print(json.dumps(times), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    session = es.connect(addresses, worker=rank, workers=WORKERS, lease=timedelta(seconds=STEP_LEASE))
    model = es.wrap(
        nn.Sequential(nn.EmbeddingBag(100_000, 16, mode="sum"), nn.Linear(16, 1)),
        session,
        optimizer=es.Adagrad(lr=0.05),
    )
    generator = torch.Generator().manual_seed(rank)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield torch.randint(0, 100_000, (64, 10), generator=generator)

    print("ready", flush=True)
    for ids in session.prefetch(batches(), inputs=lambda ids: {"0": ids}):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], (ids[:, 0] % 2).float())
        loss.backward()
        session.step()
        times.append(time.monotonic())
        time.sleep(PACE)


@contextmanager
def paced_workers(addresses: str) -> Iterator[list[subprocess.Popen[str]]]:
    """All of them, in training."""
    command = [sys.executable, __file__, "--paced", addresses, "--rank"]
    workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(WORKERS)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def stopped(failures: list[str]) -> dict[str, object]:
    """What the others do while one worker is stopped, beside a job of which nobody is."""
    with (
        LocalShards(1) as shards,
        LocalShards(1) as other_shards,
        paced_workers(",".join(shards.addresses)) as workers,
        paced_workers(",".join(other_shards.addresses)) as undisturbed,
    ):
        time.sleep(5)  # until all of them are under way
        rounds = [stop_and_go_on(workers[VICTIM]) for _ in range(ROUNDS)]
        times, of_undisturbed = steps_of(workers), steps_of(undisturbed)
    rows, ratios = [], []
    for marks in rounds:
        rates, control = (rates_of_others(of_job, marks) for of_job in (times, of_undisturbed))
        ratios.append([rate / rates[0] / (there / control[0]) for rate, there in zip(rates, control, strict=True)])
        rows.append([*rates, *control, *ratios[-1][1:]])
    print("the others' steps/s, those of a job beside it of which nobody is stopped, and the first against the second")
    undisturbed_header, ratio_header = ["beside it: before", "while", "after"], ["ratio: while", "after"]
    print_table(["before", "while stopped", "after", *undisturbed_header, *ratio_header], rows)
    during, after = (median(ratio[part] for ratio in ratios) for part in (1, 2))
    for what, ratio in (("while one is stopped", during), ("after it went on", after)):
        if ratio < MIN_RATE:
            failures.append(f"the others make {ratio:.3f} of the steps {what} that they would make, bar {MIN_RATE}")
    went_on = [sum(marks[2] < t <= marks[3] for t in times[VICTIM]) for marks in rounds]
    if not all(went_on):
        failures.append(f"the stopped worker did not train on: {went_on} steps")
    return {
        "steps_per_second": [[round(float(rate), 1) for rate in row[:6]] for row in rows],
        "while_stopped": round(during, 4),
        "after": round(after, 4),
        "steps_of_the_stopped_after": went_on,
    }


def stop_and_go_on(victim: subprocess.Popen[str]) -> list[float]:
    """When a round began, when its worker was stopped, when it went on, and when the round ended."""
    marks = [time.monotonic()]
    for pause, number in ((10.0, signal.SIGSTOP), (STOPPED, signal.SIGCONT), (10.0, None)):
        time.sleep(pause)
        marks.append(time.monotonic())
        if number is not None:
            victim.send_signal(number)
    return marks


def steps_of(workers: list[subprocess.Popen[str]]) -> list[list[float]]:
    """End paced workers; when each of them made its steps."""
    times = []
    for worker in workers:
        worker.terminate()
        text, _ = worker.communicate(timeout=30)
        times.append(json.loads(text))
    return times


def rates_of_others(times: list[list[float]], marks: list[float]) -> list[float]:
    """Steps per second between each two marks of all workers but the one that is stopped in the first job."""
    others = [of_worker for rank, of_worker in enumerate(times) if rank != VICTIM]
    return [
        sum(start <= t < end for of_worker in others for t in of_worker) / (end - start)
        for start, end in itertools.pairwise(marks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--paced", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.paced:
        train_paced(arguments.rank, arguments.paced)
        return
    failures: list[str] = []
    result: dict[str, object] = {"bench": "workers", "stopped": stopped(failures), "killed": killed(failures)}
    finish(result, failures)


if __name__ == "__main__":
    main()
