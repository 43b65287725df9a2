"""A training over a slow link keeps it busy: shards in one network namespace, workers in another, and between them a
link that tbf holds to 1 Gbit/s and to 100 Mbit/s in either direction.

Two kinds of traffic over the `stream` transport and 2 shards: three workers that train a DLRM with small towers
(prefetch, staleness 2), and one plain Client that pulls and pushes from four threads. One worker alone cannot fill the
link: its pushes go one at a time, and while one is acknowledged its direction is idle; the others fill that gap.

The link is full duplex, so each direction is counted by itself, and the bar holds for the busier one: what the
transports sent or received (frames: heads, ids, rows, gradients), over what the link's rate allows in the same time.
Nothing is taken off for Ethernet, IP and TCP headers, 66 bytes per 1,448 that tbf counts too, nor for acknowledgements:
95 % is all there is. samples/s (of the Client: rows) stand beside those that the rate allows.

Needs root, ip and tc: without them it says so and exits with 2. Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import NoReturn

import numpy as np

from embershard.compare.run.netns import Namespaces, NoNamespaces
from embershard.proto.security.tls import TLS
from embershard.worker.client.connections import ClientStats
from timing import finish, machine, print_table

BAR = 0.92
LINKS = {"1gbit": 1_000_000_000, "100mbit": 100_000_000}  # bits per second
SHARDS, DIM, FIELDS, NUM_DENSE, ROWS = 2, 64, 26, 13, 1_000_000
BATCH = {"1gbit": 2048, "100mbit": 512}
THREADS, CLIENT_IDS = 4, {"1gbit": 32_768, "100mbit": 8192}
STALENESS = 2
WORKERS = {"training": 3, "client": 1}
WARM_SECONDS = 12.0  # connections, first weights, and what fills the queues


def cannot(reason: str) -> NoReturn:
    print(f"bar-link cannot run here: {reason}", file=sys.stderr)
    print(json.dumps({"bar": "link", "machine": machine(), "passed": False, "reason": reason}))
    sys.exit(2)


@contextmanager
def worker_process(made: Namespaces, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process where the workers are, ended with the block."""
    command = [*made.worker_prefix, sys.executable, *words]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        yield popen
    finally:
        popen.kill()  # ip has become the program by exec
        popen.communicate()


def measure(made: Namespaces, kind: str, rate: str, seconds: float, tls: str = "") -> dict[str, float]:
    """One worker's figures over fresh shards; `tls` is a folder of certificates for both sides, if they use some."""
    with ExitStack() as stack:
        addresses = stack.enter_context(made.shards(SHARDS, ()))
        begin = time.monotonic() + WARM_SECONDS
        workers = [
            stack.enter_context(
                worker_process(
                    made, __file__, "--worker", kind, "--rank", str(rank), "--rate", rate,
                    "--begin", str(begin), "--seconds", str(seconds), "--addresses", ",".join(addresses),
                    "--tls", tls,
                )
            )
            for rank in range(WORKERS[kind])
        ]  # fmt: skip
        lines = [worker.communicate(timeout=10 * seconds + 120)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit(f"workers ended with exit codes {[worker.returncode for worker in workers]}")
    each = [json.loads(line.splitlines()[-1]) for line in lines]
    return {name: sum(figures[name] for figures in each) for name in each[0]}


# --- the worker's process ---


class Throughput:
    """Rates from the first look after `begin`, on time.monotonic()'s clock, to the first one `seconds` later."""

    def __init__(self, begin: float, seconds: float) -> None:
        self._begin, self._end, self._seconds = begin, begin + seconds, seconds
        self._looks: list[tuple[float, float, float, float]] = []

    def done(self, stats: ClientStats, samples: int) -> bool:
        """Look at the counters; whether that was the last time."""
        now = time.monotonic()
        if now > (self._end if self._looks else self._begin):
            assert self._looks or now < self._end - self._seconds / 2, "the warm-up was too short"
            self._looks.append((now, samples, stats.sent_bytes, stats.received_bytes))
        return len(self._looks) == 2

    def rates(self) -> dict[str, float]:
        """Per second."""
        (start, *before), (end, *after) = self._looks
        names = ("samples", "sent_bytes", "received_bytes")
        return {name: (b - a) / (end - start) for name, a, b in zip(names, before, after, strict=True)}


def train_steps(addresses: str, rank: int, rate: str, meter: Throughput, tls: TLS | None) -> None:
    """Steps of a DLRM, its rows pulled ahead."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    import embershard as es
    from embershard.worker.models.ctr.dlrm import DLRM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, batch = np.random.default_rng(rank), BATCH[rate]
    pool = [
        (
            torch.from_numpy(rng.integers(0, ROWS, (batch, FIELDS))),
            torch.from_numpy(rng.standard_normal((batch, NUM_DENSE), np.float32)),
            torch.from_numpy(rng.integers(0, 2, batch).astype(np.float32)),
        )
        for _ in range(16)
    ]
    with es.connect(addresses, worker=rank, tls=tls) as session:
        model = DLRM(ROWS, FIELDS, DIM, NUM_DENSE, bottom=(32,), hidden=(32,), device="meta")
        wrapped = es.wrap(model, session, optimizer=es.RowWiseAdagrad(lr=0.01))
        for step, (ids, dense, labels) in enumerate(session.prefetch(cycle(pool), staleness=STALENESS)):
            if meter.done(session.stats, step * batch):
                break
            binary_cross_entropy_with_logits(wrapped(ids, dense), labels).backward()
            session.step()


def client_threads(addresses: str, rank: int, rate: str, meter: Throughput, tls: TLS | None) -> None:
    """Pulls and pushes of the same rows, each thread on its own ids."""
    from embershard.proto.routing import make_route
    from embershard.proto.spec import RowWiseAdagrad, TableSpec
    from embershard.worker.client.client import Client

    client = Client.connect(addresses.split(","), worker=rank, tls=tls)
    spec = TableSpec(name="items", dim=DIM, optimizer=RowWiseAdagrad(lr=0.01))
    client.declare(spec)
    rng, rows, done = np.random.default_rng(0), [0] * THREADS, threading.Event()
    routes = [
        make_route(rng.integers(0, 2**40, CLIENT_IDS[rate]), spec.space_key, client.placement) for _ in range(THREADS)
    ]

    def work(number: int) -> None:
        route = routes[number]
        while not done.is_set():
            (values,) = client.pull([(spec.name, route)], keep=True)
            client.push([(spec.name, route, values)], clock=0)
            rows[number] += len(route.ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    while not meter.done(client.stats, sum(rows)):
        time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    client.close()


RUNS = {"training": train_steps, "client": client_threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=",".join(LINKS), help="of " + ", ".join(LINKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, for each rate and kind of traffic")
    parser.add_argument("--worker", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--tls", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        meter = Throughput(args.begin, args.seconds)
        RUNS[args.worker](args.addresses, args.rank, args.rate, meter, TLS(args.tls) if args.tls else None)
        print(json.dumps(meter.rates()), flush=True)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the namespaces go
    print(machine(), flush=True)
    try:
        result, failures = compare(args.rates.split(","), args.seconds)
    except NoNamespaces as error:
        cannot(str(error.fields["reason"]))
    finish({"bar": "link", "bar_share": BAR, "results": result}, failures)


def compare(rates: list[str], seconds: float) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Figures by rate and kind of traffic, and what is below the bar."""
    table: list[list[object]] = []
    result: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    with Namespaces() as made:
        for rate in rates:
            made.shape(LINKS[rate])
            for kind in WORKERS:
                got = measure(made, kind, rate, seconds)
                allowed = LINKS[rate] / 8
                up, down = got["sent_bytes"] / allowed, got["received_bytes"] / allowed
                share, speed = max(up, down), got["samples"]
                table.append([f"{kind} at {rate}", WORKERS[kind], speed, speed / share, up, down])
                result[f"{kind} {rate}"] = {
                    "workers": WORKERS[kind],
                    "samples_per_s": round(speed, 1),
                    "samples_per_s_allowed": round(speed / share, 1),
                    "sent_share": round(up, 4),
                    "received_share": round(down, 4),
                }
                if share < BAR:
                    failures.append(f"{kind} at {rate} uses {share:.1%} of the link, the bar is {BAR:.0%}")
    print_table(["traffic", "workers", "samples/s", "allowed", "sent", "received"], table)
    return result, failures


if __name__ == "__main__":
    main()
