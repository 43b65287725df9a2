"""What it could save to send a push and the next pull together: both at once, or one after the other's answer.

With staleness 1 or more the next pull may follow a push at once, so one message could carry both. Two shards, rows of
dim 64 with Adagrad, ids of which half are on each shard. `in turn`: each shard gets its push, and once all have
answered, its pull, as the client sends them. `together`: both are sent to each shard before any answer is awaited,
which spares the wait between them; one message would spare a head and an answer beside that. `ping` is the CPU time of
the smallest request (Hello) to both shards: about what a message less would spare.

All of it in turns in one run, medians of rounds; CPU time of the worker and the shards. Prints one JSON line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.proto.messages import Hello, Pull, Push
from embershard.proto.routing import make_route
from timing import cpu_seconds, finish, load, median, print_table

SIZES = (64, 1024, 8192)  # ids of a step
DIM, SPACE, SHARDS = 64, 10**6, 2
ROUNDS, WARM_UP = 9, 50
TIMEOUT = timedelta(seconds=20)


class Steps:
    """The requests of one step, as the client made them, sent again and again."""

    def __init__(self, session: es.Session, num_ids: int) -> None:
        self._transports = {one.greeting.shard: one.transport for one in session.client.connections}
        self._sent: dict[tuple[int, type], tuple[Any, Any]] = {}
        self._poller: Any = next(iter(self._transports.values())).poller
        self._seq = 0
        self._record(session, num_ids)

    def _record(self, session: es.Session, num_ids: int) -> None:
        spec = es.TableSpec(name=f"rows{num_ids}", dim=DIM, optimizer=es.Adagrad(lr=0.05))
        session.table(spec)
        ids = np.random.default_rng(0).choice(SPACE, num_ids, replace=False)
        route = make_route(ids, spec.space_key, session.client.placement)
        with ExitStack() as stack:
            for shard, transport in self._transports.items():
                self._listen(stack, shard, transport)
            session.client.pull([(spec.name, route)])
            session.client.push([(spec.name, route, np.full((num_ids, DIM), 0.01, np.float32))], clock=0)

    def _listen(self, stack: ExitStack, shard: int, transport: Any) -> None:
        submit = transport.submit

        def recording(request: Any, timeout: timedelta, into: Any = ()) -> Any:
            self._sent[shard, type(request)] = request, into
            return submit(request, timeout, into)

        transport.submit = recording
        stack.callback(delattr, transport, "submit")

    def _send(self, shard: int, kind: type) -> Any:
        request, into = self._sent[shard, kind]
        if kind is Push:
            seq = request.token.seq + self._seq
            request = replace(request, token=replace(request.token, seq=seq, first_incomplete=seq))
        return self._transports[shard].submit(request, TIMEOUT, into)

    def _call(self, kinds: Sequence[type]) -> None:
        self._poller.begin()
        try:
            for answer in [self._send(shard, kind) for shard in self._transports for kind in kinds]:
                answer.result()
        finally:
            self._poller.end()

    def in_turn(self) -> None:
        """A push to each shard, and then a pull."""
        self._seq += 1
        self._call([Push])
        self._call([Pull])

    def together(self) -> None:
        """A push and a pull to each shard."""
        self._seq += 1
        self._call([Push, Pull])

    def ping(self) -> None:
        """The smallest request to each shard."""
        self._poller.begin()
        try:
            for answer in [transport.submit(Hello(), TIMEOUT) for transport in self._transports.values()]:
                answer.result()
        finally:
            self._poller.end()


def microseconds(work: Callable[[], None], steps: int, pids: Sequence[int]) -> tuple[float, float]:
    """Wall and CPU time of a step."""
    began, used = time.perf_counter(), cpu_seconds(pids)
    for _ in range(steps):
        work()
    return 1e6 * (time.perf_counter() - began) / steps, 1e6 * (cpu_seconds(pids) - used) / steps


def main() -> None:
    result: dict[str, Any] = {"bench": "push_then_pull", "load": load()}
    rows = []
    with LocalShards(SHARDS) as shards, es.connect(",".join(shards.addresses)) as session:
        pids = [os.getpid(), *shards.pids]
        for num_ids in SIZES:
            steps = Steps(session, num_ids)
            works = {"in turn": steps.in_turn, "together": steps.together, "ping": steps.ping}
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
            count = max(100, 200_000 // num_ids // 8)
            for number in range(-1, ROUNDS):
                for name in list(works)[:: -1 if number % 2 else 1]:
                    figures = microseconds(works[name], count if number >= 0 else WARM_UP, pids)
                    if number >= 0:
                        took[name].append(figures)
            middle = {name: [round(median(values)) for values in zip(*took[name], strict=True)] for name in works}
            ratios = [
                median([a[i] / b[i] for a, b in zip(took["in turn"], took["together"], strict=True)]) for i in (0, 1)
            ]
            rows.append([num_ids, *(f"{wall}, {cpu}" for wall, cpu in middle.values()), *ratios])
            result[str(num_ids)] = {**middle, "wall": round(ratios[0], 3), "cpu": round(ratios[1], 3)}
    print_table(["ids", "in turn: wall, CPU (us)", "together", "ping", "wall", "CPU"], rows)
    finish(result, [])


if __name__ == "__main__":
    main()
