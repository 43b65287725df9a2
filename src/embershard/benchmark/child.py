"""A worker process of a bench: told what to do by one line, then measuring a round for every further line.

It ends when its stdin does, so that it cannot outlive the process that started it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import IO, NoReturn, Protocol

from embershard.benchmark.settings import Lap, Order, PullPush, TorchTrain
from embershard.proto.errors import EmbershardError


class Worker(Protocol):
    """The work that a bench measures in one process."""

    def run(self, steps: int) -> Lap:
        """Make `steps` steps and return their times."""


def make_worker(order: Order) -> Worker:
    """The worker of an order, connected, with its tables declared."""
    settings = order.settings
    if isinstance(settings, PullPush):
        from embershard.benchmark.pull_push import PullPushWorker  # without torch, which it does not need

        return PullPushWorker(settings, order.addresses, order.rank)
    from embershard.benchmark.dlrm import TorchWorker, TrainWorker

    if isinstance(settings, TorchTrain):
        return TorchWorker(settings)
    return TrainWorker(settings, order.addresses, order.rank)


def _main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anyone prints must not get among the answers
    order = Order.model_validate_json(sys.stdin.readline())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        _measure(order, lines, out)
    except EmbershardError as error:
        sys.exit(str(error))


def _measure(order: Order, lines: queue.SimpleQueue[str], out: IO[str]) -> NoReturn:
    worker = make_worker(order)
    if order.settings.warmup:
        worker.run(order.settings.warmup)
    print("ready", file=out, flush=True)
    while True:
        lines.get()
        print(worker.run(order.settings.steps).model_dump_json(), file=out, flush=True)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # whatever it does: nobody wants to know any more


if __name__ == "__main__":
    _main()
