"""What a shard's log costs: steps in memory against the commit before there was a log, steps with a log against memory.

The workloads are those of bar-peers, W-PS (a pull and a push, two shards) and W-DLRM, and pushes of one row by one
worker. Each bar has two sides, with shards and a worker of their own, which are there all the time: a block of steps
each, in turn, there and back. Between their blocks shards are stopped (SIGSTOP), so that what they do beside serving
(segments, bases) is done at their own cost. The two blocks of a pair are seconds apart, and what else the machine does
meets both alike. A figure is the median over the pairs of block against block, with its interval of 95 % (order
statistics). A block ends once its pushes are as safe as the mode says.

W-PS has no core free on a machine of two: the two shards apply a push at the same time. With one shard (W-PS-1) there
is one, as worker and shard take turns. The commit before is taken from git, and runs this same script on its package.

All rows that are touched are there before the first block, of W-PS 10 million more (10 GB for both sides), and a log
has been through one round: a base was taken since the load, whose segments are used again. Bases are taken as they are
due. Prints one JSON line; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peer_embershard import C, PullPush, dlrm_batches, make_dlrm
from timing import disk, finish, interval, load, machine, median, print_table

ROOT = Path(__file__).resolve().parents[1]
BATCHES = 50
IDLE_SHARE = 0.05  # of a core: shards that use less do nothing beside waiting
BEFORE, MEMORY, LOG, FSYNC = "before", "memory", "log", "fsync"


class Workload(NamedTuple):
    """What both sides do, in blocks of so many steps."""

    work: str
    shards: int
    steps: int


WORKLOADS = {
    "W-PS": Workload("ps", 2, 25),
    "W-PS-1": Workload("ps", 1, 25),
    "W-DLRM": Workload("dlrm", 2, 8),
    "one-row pushes": Workload("row", 1, 2000),
}


class Bar(NamedTuple):
    """A bound of the ratio of one side's steps to another's; fsync's is to the larger of memory's and the disk's."""

    workload: str
    side: str
    against: str
    at_most: float

    def __str__(self) -> str:
        return f"{self.workload}: {self.side} against {self.against}"


BARS = (
    Bar("W-PS", MEMORY, BEFORE, 1.02),
    Bar("W-PS", LOG, MEMORY, 1.15),
    Bar("W-PS-1", LOG, MEMORY, 1.10),
    Bar("W-PS", FSYNC, MEMORY, 1.25),
    Bar("W-DLRM", MEMORY, BEFORE, 1.02),
    Bar("W-DLRM", LOG, MEMORY, 1.05),
    Bar("one-row pushes", LOG, MEMORY, 1 / 0.7),
)


class Block(NamedTuple):
    """What a step of a block took: seconds, CPU seconds of the job and of its shards, bytes of log. `bases`: begun."""

    wall: float
    cpu: float
    shards_cpu: float
    other_cores: float
    log_bytes: float
    bases: int


# A side: its shards, and the worker, which is this process


def one_row(session: Any) -> Callable[[int], None]:
    """Push one row after the other, each once the one before is answered."""
    import embershard as es
    from embershard.proto.routing import make_route

    table = session.table(es.TableSpec(name="rows", dim=16, optimizer=es.Adagrad(lr=0.05)))
    gradient, key, client = np.full((1, 16), 0.01, np.float32), table.spec.space_key, session.client
    routes = [make_route(np.array([number]), key, client.placement) for number in range(1000)]

    def step(number: int) -> None:
        client.push([("rows", routes[number % len(routes)], gradient)], clock=number)

    return step


def pull_push(session: Any, num_rows: int) -> Callable[[int], None]:
    work, batches = PullPush(session, num_rows), C.ps_ids(BATCHES)

    def step(number: int) -> None:
        work(number, batches[number % BATCHES])

    return step


def dlrm(session: Any, args: argparse.Namespace) -> Callable[[int], None]:
    from dlrm_torch import loss_fn

    def endless() -> Any:
        while True:
            yield from batches

    batches = dlrm_batches(args, BATCHES)
    model = make_dlrm(args, session, "meta")
    loop = iter(session.prefetch(endless(), staleness=1))

    def step(number: int) -> None:
        ids, dense, labels = next(loop)
        loss_fn(model(ids, dense), labels).backward()
        session.step()

    return step


def take_priority(pids: Sequence[int]) -> None:
    """Have these processes, each in a session of its own, run before others: by their sessions' groups on Linux."""
    for pid in pids:
        os.setpriority(os.PRIO_PROCESS, pid, -20)
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            group.write_text("-20")


def serve_side(args: argparse.Namespace) -> None:
    """Run a block of as many steps as each line of stdin says, and print what it took."""
    import embershard as es
    from embershard.deploy import supervisor

    if args.priority:
        os.setsid()
        take_priority([os.getpid()])
    settings = []  # a tree of before may not know them
    if args.durability not in (BEFORE, MEMORY):
        settings.append(supervisor.ShardSettings(durability=args.durability, log_dir=args.folder))
    with (
        supervisor.LocalShards(args.servers, *settings) as shards,
        es.connect(",".join(shards.addresses)) as session,
        ExitStack() as stack,
    ):
        if args.priority:
            take_priority(shards.pids)
        makes: dict[str, Callable[[], Callable[[int], None]]] = {
            "ps": lambda: pull_push(session, args.rows),
            "dlrm": lambda: dlrm(session, args),
            "row": lambda: one_row(session),
        }
        step = makes[args.work]()

        def sizes() -> tuple[int, list[int]]:
            status = [one for one in session.client.status()]
            return sum(getattr(one, "log_bytes", 0) for one in status), [getattr(one, "base_lsn", 0) for one in status]

        def signal_shards(number: int) -> None:
            for pid in shards.pids:
                os.kill(pid, number)

        _, loaded = sizes()
        done = 0
        while done < args.warm or (settings and args.work != "row" and any(map(operator.eq, sizes()[1], loaded))):
            step(done)
            done += 1
        session.flush()
        used = 0.0
        while C.cpu_s(shards.pids) - used > IDLE_SHARE:  # a base, segments filled with zeros
            used = C.cpu_s(shards.pids)
            time.sleep(1)
        signal_shards(signal.SIGSTOP)
        stack.callback(signal_shards, signal.SIGCONT)
        print("{}", flush=True)
        for line in sys.stdin:
            steps = int(line)
            signal_shards(signal.SIGCONT)
            log_bytes, bases = sizes()
            began, cpu, shards_cpu = time.perf_counter(), C.cpu_s([os.getpid(), *shards.pids]), C.cpu_s(shards.pids)
            busy, _ = C.machine()
            for number in range(done, done + steps):
                step(number)
            session.flush()
            wall = time.perf_counter() - began
            used = C.cpu_s([os.getpid(), *shards.pids]) - cpu
            others = (C.machine()[0] - busy - used) / wall
            done += steps
            shards_cpu = C.cpu_s(shards.pids) - shards_cpu
            log_bytes, new = sizes()[0] - log_bytes, sum(a != b for a, b in zip(bases, sizes()[1], strict=True))
            block = Block(wall / steps, used / steps, shards_cpu / steps, others, log_bytes / steps, new)
            signal_shards(signal.SIGSTOP)
            print(json.dumps(block), flush=True)


# The run


class Side:
    """A process of this script that works when it is told to."""

    def __init__(self, tree: Path, workload: Workload, mode: str, folder: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--side", mode, "--work", workload.work, "--rows", str(args.rows)]
        command += ["--servers", str(workload.shards), "--warm", str(max(BATCHES, workload.steps))]
        command += ["--folder", str(folder)]
        command += ["--priority"] if args.priority else []
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def run(self, steps: int) -> Block:
        """A block of so many steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return Block(*self._answer())

    def close(self) -> None:
        """End the worker, which ends its shards."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with exit code {self._process.wait(60)}")
        return json.loads(line)


class Figures(NamedTuple):
    """The blocks of both sides, and the rate of the disk before each pair (bytes per second)."""

    ours: list[Block]
    theirs: list[Block]
    rates: list[float]

    @property
    def log_bytes(self) -> float:
        """Of a step; a block in which a base took the place of events says nothing of it."""
        return median([block.log_bytes for block in self.ours])

    def ratios(self, what: str) -> list[float]:
        """One figure of our blocks against that of theirs, by pair."""
        ours, theirs = ([float(getattr(block, what)) for block in blocks] for blocks in (self.ours, self.theirs))
        if self.rates and what == "wall":
            theirs = [max(one, self.log_bytes / rate) for one, rate in zip(theirs, self.rates, strict=True)]
        return [one / other for one, other in zip(ours, theirs, strict=True)]


def run(bar: Bar, args: argparse.Namespace) -> Figures:
    """Both sides of a bar, in turn."""
    from embershard.doctor.logs import measure_disk

    workload, figures = WORKLOADS[bar.workload], Figures([], [], [])
    with tempfile.TemporaryDirectory(dir=args.folder) as place, ExitStack() as stack:
        sides = []
        for name in (bar.side, bar.against):
            tree = tree_before(args.before) if name == BEFORE else ROOT
            sides.append(Side(tree, workload, name, Path(place) / name, args))
            stack.callback(sides[-1].close)
        turns = list(zip(sides, (figures.ours, figures.theirs), strict=True))
        for number in range(args.pairs):
            if bar.side == FSYNC:
                figures.rates.append(measure_disk(Path(place), 0.3)[0])
            for side, blocks in turns[:: -1 if number % 2 else 1]:
                blocks.append(side.run(workload.steps))
    return figures


def judge(bar: Bar, figures: Figures) -> dict[str, Any]:
    """Print what a bar's sides took, and return it."""
    others = statistics.fmean(block.other_cores for block in (*figures.ours, *figures.theirs))
    found: dict[str, Any] = {
        "at_most": round(bar.at_most, 3),
        "pairs": len(figures.ours),
        "other_cores": round(others, 2),
    }
    rows = []
    for side, blocks in ((bar.side, figures.ours), (bar.against, figures.theirs)):
        times = {what: 1000 * median([getattr(one, what) for one in blocks]) for what in ("wall", "cpu", "shards_cpu")}
        times["mean_cpu"] = 1000 * statistics.fmean(one.cpu for one in blocks)
        bases = sum(one.bases for one in blocks)
        rows.append([side, *(f"{one:.3f}" for one in times.values()), bases])
        found[side] = {**{f"{what}_ms": round(one, 4) for what, one in times.items()}, "bases": bases}
    print(f"\n{bar}: {len(figures.ours)} pairs of blocks; others used {others:.2f} cores")
    print_table(["", "step, ms", "CPU, ms/step", "of shards", "mean CPU", "bases"], rows)
    if bar.side in (LOG, FSYNC):
        found["log_bytes_per_step"] = figures.log_bytes
    if figures.rates:
        found["fdatasync_bytes_per_s"] = median(figures.rates)
        print(f"{figures.log_bytes / 1e6:.2f} MB of log a step, fdatasync {median(figures.rates) / 1e6:.0f} MB/s")
    for what in ("wall", "cpu"):
        ratios = figures.ratios(what)
        low, high = interval(ratios)
        found[what] = {"ratio": round(median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}
    texts = ["{ratio:.3f} ({low:.3f} to {high:.3f})".format(**found[what]) for what in ("wall", "cpu")]
    print(f"step {texts[0]}, at most {bar.at_most:.3f}; CPU {texts[1]}", flush=True)
    return {**found, "passed": found["wall"]["ratio"] <= bar.at_most}


def tree_before(commit: str) -> Path:
    """The package as it was before the first file of the log; it stays, as its compiled kernels go by its place."""
    if not commit:
        of_log = subprocess.check_output(["git", "rev-list", "HEAD", "--", "ps/journal"], cwd=ROOT, text=True)
        commit = f"{of_log.split()[-1]}^"
    commit = subprocess.check_output(["git", "rev-parse", "--verify", commit], cwd=ROOT, text=True).strip()
    tree = ROOT / "runs/before" / commit
    if not tree.exists():
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
            archive = f"{folder}/tree.tar"
            subprocess.run(
                ["git", "archive", "-o", archive, commit, "src", "proto", "ps", "worker", "deploy"],
                cwd=ROOT,
                check=True,
            )
            (made := Path(folder) / "tree").mkdir()
            subprocess.run(["tar", "-xf", archive, "-C", str(made)], check=True)
            made.rename(tree)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="may be given several times")
    parser.add_argument("--side-only", choices=[MEMORY, LOG, FSYNC], help="only the bars of this mode")
    parser.add_argument("--folder", type=Path, help="where the logs are; by default that of temporary files")
    parser.add_argument("--rows", type=int, default=C.PS_N, help="of W-PS")
    parser.add_argument("--before", default="", help="commit before the log; by default the one before its first file")
    parser.add_argument("--priority", action="store_true", help="run before all others on a busy machine (root)")
    parser.add_argument("--side", dest="durability", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--servers", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(malloc="keep", linear="onednn", rank=0)
    args = parser.parse_args()
    if args.durability:
        serve_side(args)
        return
    folder, where = str(args.folder or tempfile.gettempdir()), disk(args.folder)
    print(f"{machine()}; {load()}; logs in {folder} ({where})", flush=True)
    result: dict[str, Any] = {"bar": "log", "load_before": load(), "folder": folder, "disk": where}
    result["priority"] = args.priority
    bars = {}
    for bar in BARS:
        if bar.workload in (args.only or WORKLOADS) and args.side_only in (None, bar.side):
            bars[str(bar)] = judge(bar, run(bar, args))
    missed = [
        f"{bar}: {found['wall']}, at most {found['at_most']}" for bar, found in bars.items() if not found["passed"]
    ]
    finish({**result, "bars": bars, "load_after": load()}, missed)


if __name__ == "__main__":
    main()
