"""What traces cost a step: one in a thousand against none, in short blocks in turn, of one job with two shards.

A step is a forward, a backward and a push of 1,024 samples of 8 ids. A pair is a thousand steps with a tracer, of which
the first is traced, and a thousand without, in turn in blocks of 20: what else the machine does changes within seconds,
and then meets both. A block is long enough for the traced step, its first, to be sent before it ends. The collector is
a process of its own that takes what it is sent. Prints the rate with traces against that without, as the median over
the pairs with its 95 % interval (order statistics), and one JSON line; exits 1 where the lower end is below 0.98.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import embershard as es
from embershard.deploy.supervisor import LocalShards, ShardSettings
from embershard.proto.monitoring.tracing import SpanSender, StepTracer
from embershard.proto.timing import Recorder, end_step
from timing import cpu_seconds, finish, interval, load, machine, median

LEAST = 0.98
BLOCK = 20  # steps
_COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        print(flush=True)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def make_step(session: es.Session) -> Callable[[], None]:
    """A training step of a small model."""
    bag = torch.nn.EmbeddingBag(2**40, 16, mode="sum", device="meta")
    net = torch.nn.Sequential(bag, torch.nn.Linear(16, 1))
    model = es.wrap(net, session, optimizer=es.Adagrad(lr=0.05), initializer=es.Normal(std=0.01))
    batches = [(torch.randint(100_000, (1024, 8)), torch.rand(1024).round()) for _ in range(50)]
    number = 0

    def step() -> None:
        nonlocal number
        ids, labels = batches[number % len(batches)]
        torch.nn.functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), labels).backward()
        session.step()
        end_step()
        number += 1

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000, help="of each side of a pair; one of them is traced")
    args = parser.parse_args()
    print(f"{machine()}; {load()}", flush=True)
    with subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        assert collector.stdout is not None
        url = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        try:
            ratios, cpu, dropped = measure(url, args.pairs, args.steps)
        finally:
            collector.kill()
    low, high = interval(ratios)
    print(f"rate, 1 step in {args.steps} traced against none: {median(ratios):.4f} ({low:.4f} to {high:.4f})")
    cpu_low, cpu_high = interval(cpu)
    print(f"CPU of the worker and its shards, traced against not: {median(cpu):.4f} ({cpu_low:.4f} to {cpu_high:.4f})")
    figures = {
        "ratio": round(median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "cpu": round(median(cpu), 4),
        "dropped": dropped,
    }
    missed = [f"the lower end is {low:.4f}, at least {LEAST}"] if low < LEAST else []
    missed += [f"{dropped} traces were dropped"] if dropped else []
    finish({"bench": "trace", "pairs": args.pairs, **figures, "load_after": load()}, missed)


def measure(url: str, pairs: int, steps: int) -> tuple[list[float], list[float], int]:
    """Rates with traces against those without, and CPU likewise, by pair; and how many traces were dropped."""
    ratios, cpu = list[float](), list[float]()
    with (
        LocalShards(2, ShardSettings(trace=url)) as shards,
        es.connect(",".join(shards.addresses)) as session,
        SpanSender(url, "bench") as sender,
        Recorder() as recorder,
    ):
        step, pids = make_step(session), [os.getpid(), *shards.pids]

        def block(tracer: StepTracer | None) -> tuple[float, float]:
            """Wall and CPU seconds of a block."""
            recorder.tracer = tracer
            recorder.begin()
            began, used = time.perf_counter(), cpu_seconds(pids)
            for _ in range(BLOCK):
                step()
            seconds, used = time.perf_counter() - began, cpu_seconds(pids) - used
            if tracer is not None:
                tracer.stop()
            recorder.tracer = recorder.traced = None
            return seconds, used

        for _ in range(steps // BLOCK):
            block(None)
        for _ in range(pairs):
            tracer = StepTracer(sender, 2 * steps)  # the first step, and none after it
            wall, used = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
            for number in range(2 * (steps // BLOCK)):
                traced = number % 4 in (0, 3)  # there and back
                seconds, cpu_of_block = block(tracer if traced else None)
                wall[traced] += seconds
                used[traced] += cpu_of_block
            ratios.append(wall[False] / wall[True])
            cpu.append(used[True] / used[False])
    return ratios, cpu, sender.dropped


if __name__ == "__main__":
    main()
