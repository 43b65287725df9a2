"""Latency and throughput of small pulls: one client alone, many clients at once, and a small step beside plain torch.

one client    pulls of 64 rows from one shard: p50 and p99 of a pull, and CPU of both sides for each
many clients  pulls of 256 ids from two shards by 1, 8, 32 and 64 threads (of 1 process, else 4): pulls a second, p50,
              p99; the bars are for 32
small step    a pull and a push of 1,024 ids, two shards, Adagrad, against one process of torch with sparse gradients

Shards and clients are processes of their own; rows have dim 64 and are there before the first pull. Figures are medians
of five rounds. Prints one JSON line; exits 1 where a bar is missed. `--tree DIR` measures the checkout in DIR instead
of this one; given twice, both take turns in every round, and no bar is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from timing import cpu_seconds, finish, load, machine, median, print_table

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, WINDOW_SECONDS = 5, 3.0
NUM_ROWS, DIM = 200_000, 64
CLIENTS = {1: (1, 1), 8: (4, 2), 32: (4, 8), 64: (4, 16)}  # threads in all -> processes, threads of each
JUDGED = 32  # of these threads
BARS = {"p50_us": 120, "cpu_us": 130, "pulls_per_second": 5000, "p99_ms": 20, "torch_ratio": 4}


def started(role: str, tree: Path, *words: str) -> subprocess.Popen[str]:
    """This script as another process, on the package of a checkout."""
    command = [sys.executable, __file__, "--role", role, *words]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process: subprocess.Popen[str], word: str = "") -> Any:
    """The next line of a process, after it was told to go on."""
    assert process.stdin is not None
    assert process.stdout is not None
    if word:
        process.stdin.write(word + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait()}")
    return json.loads(line)


# What the other processes do


def serve(num_shards: int) -> None:
    """Shards until stdin ends; prints their addresses and process ids."""
    from embershard.deploy.supervisor import LocalShards

    with LocalShards(num_shards) as shards:
        print(json.dumps({"addresses": ",".join(shards.addresses), "pids": list(shards.pids)}), flush=True)
        sys.stdin.read()


def pulls(session: Any, num_ids: int, seed: int) -> Callable[[], None]:
    """A function that pulls the rows of `num_ids` ids, other ones each time."""
    import embershard as es
    from embershard.proto.routing import make_route

    draw, client = np.random.default_rng(seed), session.client
    table = session.table(es.TableSpec(name="rows", dim=DIM, optimizer=es.Adagrad(lr=0.05)))
    key, out = table.spec.space_key, np.zeros((num_ids, DIM), np.float32)
    batches = [np.sort(draw.choice(NUM_ROWS, num_ids, replace=False)) for _ in range(64)]
    numbers = iter(range(10**12))

    def pull() -> None:
        route = make_route(batches[next(numbers) % len(batches)], key, client.placement)
        client.pull([("rows", route)], [out])

    return pull


def repeat(session: Any, num_ids: int, threads: int) -> None:
    """At each line of stdin, pull for a while in so many threads and print the seconds of every pull."""
    works = [pulls(session, num_ids, seed=os.getpid() + thread) for thread in range(threads)]
    for work in works:
        work()
    print("{}", flush=True)
    for line in sys.stdin:
        end, seconds = time.perf_counter() + float(line), [list[float]() for _ in works]
        cpu = time.process_time()

        def run(work: Callable[[], None], into: list[float], end: float = end) -> None:
            while (start := time.perf_counter()) < end:
                work()
                into.append(time.perf_counter() - start)

        others = [threading.Thread(target=run, args=given) for given in zip(works[1:], seconds[1:], strict=True)]
        for other in others:
            other.start()
        run(works[0], seconds[0])
        for other in others:
            other.join()
        print(json.dumps({"seconds": list(chain(*seconds)), "cpu": time.process_time() - cpu}), flush=True)


def small_step(session: Any) -> None:
    """At each line of stdin, steps with 1,024 ids by our client and by torch, in turn; prints the seconds of each."""
    import torch

    import embershard as es
    from embershard.proto.routing import make_route

    torch.set_num_threads(1)
    table = session.table(es.TableSpec(name="steps", dim=DIM, optimizer=es.Adagrad(lr=0.05)))
    client, key, draw = session.client, table.spec.space_key, np.random.default_rng(0)
    batches = [draw.choice(NUM_ROWS, 1024, replace=False) for _ in range(16)]
    out, gradients = np.zeros((1024, DIM), np.float32), np.full((1024, DIM), 0.01, np.float32)
    weights = torch.nn.Embedding(NUM_ROWS, DIM, sparse=True)
    optimizer = torch.optim.Adagrad(weights.parameters(), lr=0.05)
    tensors, gradient = [torch.from_numpy(ids) for ids in batches], torch.from_numpy(gradients)

    def ours(step: int) -> None:
        route = make_route(batches[step % 16], key, client.placement)
        client.pull([("steps", route)], [out], keep=True)
        client.push([("steps", route, gradients)], clock=step)

    def theirs(step: int) -> None:
        optimizer.zero_grad()
        weights(tensors[step % 16]).backward(gradient)
        optimizer.step()

    steps = iter(range(10**12))
    print("{}", flush=True)
    for _ in sys.stdin:
        seconds = {}
        for name, work in (("ours", ours), ("torch", theirs)):
            taken = []
            for _ in range(100):
                start, step = time.perf_counter(), next(steps)
                work(step)
                taken.append(time.perf_counter() - start)
            seconds[name] = median(taken)
        print(json.dumps(seconds), flush=True)


def client(a: argparse.Namespace) -> None:
    """One process of clients."""
    import embershard as es

    with es.connect(a.addresses) as session:
        if a.role == "step":
            small_step(session)
        else:
            repeat(session, a.ids, a.threads)


def load_rows(addresses: str) -> None:
    """Make the rows that clients pull."""
    import embershard as es

    def values() -> Iterator[tuple[Any, Any]]:
        yield np.arange(NUM_ROWS), np.zeros((NUM_ROWS, DIM), np.float32)

    with es.connect(addresses) as session:
        for name in ("rows", "steps"):
            session.table(es.TableSpec(name=name, dim=DIM, optimizer=es.Adagrad(lr=0.05)), values)
    print("{}", flush=True)


# The measurement


class Side:
    """A checkout with its shards, and the clients that pull from them."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.processes = tree, list[subprocess.Popen[str]]()
        self.one, self.two = self._shards(1), self._shards(2)
        self.alone = self._clients(self.one, "--ids", "64", count=1)
        self.many = {
            total: self._clients(self.two, "--ids", "256", "--threads", str(threads), count=processes)
            for total, (processes, threads) in CLIENTS.items()
        }
        self.step = self._start("step", "--addresses", self.two["addresses"])
        self.rounds: list[dict[str, float]] = []

    def _start(self, role: str, *words: str) -> subprocess.Popen[str]:
        process = started(role, self.tree, *words)
        self.processes.append(process)
        asked(process)
        return process

    def _shards(self, count: int) -> Any:
        process = started("shards", self.tree, "--shards", str(count))
        self.processes.append(process)
        found = asked(process)
        asked(loader := started("load", self.tree, "--addresses", found["addresses"]))
        loader.wait()
        return found

    def _clients(self, shards: Any, *words: str, count: int) -> list[subprocess.Popen[str]]:
        return [self._start("client", "--addresses", shards["addresses"], *words) for _ in range(count)]

    def measure(self) -> None:
        """One round."""
        seen: dict[str, float] = {}
        before = cpu_seconds(self.one["pids"])
        (answer,) = self._pull(self.alone)
        cpu, seconds = cpu_seconds(self.one["pids"]) - before, answer["seconds"]
        seen["p50_us"], seen["p99_us"] = 1e6 * median(seconds), 1e6 * float(np.quantile(seconds, 0.99))
        seen["client_cpu_us"], seen["shard_cpu_us"] = 1e6 * answer["cpu"] / len(seconds), 1e6 * cpu / len(seconds)
        seen["cpu_us"] = seen["client_cpu_us"] + seen["shard_cpu_us"]
        for total, processes in self.many.items():
            before = cpu_seconds(self.two["pids"])
            answers = self._pull(processes)
            cpu = cpu_seconds(self.two["pids"]) - before + sum(one["cpu"] for one in answers)
            seconds = list(chain(*(one["seconds"] for one in answers)))
            seen[f"pulls_per_second_{total}"] = len(seconds) / WINDOW_SECONDS
            seen[f"cpu_us_{total}"] = 1e6 * cpu / len(seconds)
            seen[f"p50_ms_{total}"] = 1e3 * median(seconds)
            seen[f"p99_ms_{total}"] = 1e3 * float(np.quantile(seconds, 0.99))
        step = asked(self.step, "go")
        seen["step_us"], seen["torch_step_us"] = 1e6 * step["ours"], 1e6 * step["torch"]
        seen["torch_ratio"] = step["ours"] / step["torch"]
        self.rounds.append(seen)

    def _pull(self, processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{WINDOW_SECONDS}\n")
            process.stdin.flush()
        return [asked(process) for process in processes]

    def close(self) -> None:
        """End all processes, clients first."""
        for process in reversed(self.processes):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    @property
    def medians(self) -> dict[str, float]:
        """The figures, medians over the rounds."""
        return {name: median([one[name] for one in self.rounds]) for name in self.rounds[0]}


def judged(seen: dict[str, float]) -> list[str]:
    """The bars that are missed."""
    failures = [
        f"{name}: {seen[name]:.1f}, bar {BARS[name]}"
        for name in ("p50_us", "cpu_us", "torch_ratio")
        if seen[name] > BARS[name]
    ]
    if (rate := seen[f"pulls_per_second_{JUDGED}"]) < BARS["pulls_per_second"]:
        failures.append(f"pulls a second by {JUDGED} threads: {rate:.0f}, bar {BARS['pulls_per_second']}")
    if (p99 := seen[f"p99_ms_{JUDGED}"]) > BARS["p99_ms"]:
        failures.append(f"p99 with {JUDGED} threads: {p99:.1f} ms, bar {BARS['p99_ms']}")
    return failures


def main(a: argparse.Namespace) -> None:
    """Start the checkouts' shards and clients, and compare."""
    trees = [Path(tree).resolve() for tree in a.tree] or [ROOT]
    print(f"{machine()}; {load()}")
    sides = list[Side]()
    try:
        for tree in trees:
            sides.append(Side(tree))
        for _ in range(a.rounds):
            for side in sides:
                side.measure()
    finally:
        for side in sides:
            side.close()
    figures = [side.medians for side in sides]
    print_table(["", *(tree.name for tree in trees)], [[name, *(one[name] for one in figures)] for name in figures[0]])
    finish(
        {"load": load(), "trees": dict(zip(map(str, trees), figures, strict=True))},
        judged(figures[0]) if len(trees) == 1 else [],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], help="a checkout to measure instead of this one")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--addresses", default="", help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--ids", type=int, default=64, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "main":
        main(arguments)
    elif arguments.role == "shards":
        serve(arguments.shards)
    elif arguments.role == "load":
        load_rows(arguments.addresses)
    else:
        client(arguments)
