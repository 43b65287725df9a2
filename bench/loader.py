"""What a batch costs the training process, and how fast it then trains.

A batch is made here, in the loader's process, or in a process of torch's DataLoader.

First milliseconds per batch, while the process sleeps between batches; then samples/s of a DLRM with its tables on two
shards in the process, in rounds of which each trains from every source once, and the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, IterableDataset

import embershard as es
from embershard.worker.data.batch import Batch
from embershard.worker.data.readers.clicks import ClickStream
from embershard.worker.job.readers.clicks import ClicksSection
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.training.loader import DataShare, LoaderProcess
from timing import finish, load, median, print_table

BATCHES, STEP_SECONDS, SIZE = 300, 0.006, 1024
ROUNDS, STEPS = 9, 150
DIM = 16


class Clicks(IterableDataset[Batch]):
    """The click stream for torch."""

    def __iter__(self) -> Iterator[Batch]:
        return ClickStream(samples=None, seed=1).train(0, 0, 1, SIZE)


def as_it_is(batch: Batch) -> Batch:
    """No collation: a batch is a batch already."""
    return batch


@contextlib.contextmanager
def here() -> Iterator[Iterator[Batch]]:
    """In this process."""
    yield iter(Clicks())


@contextlib.contextmanager
def own() -> Iterator[Iterator[Batch]]:
    """In the loader's process."""
    share = DataShare(data=ClicksSection(reader="clicks"), folder=Path(), seed=1, rank=0, world_size=1, batch_size=SIZE)
    with LoaderProcess(share) as loader:
        yield loader.train(0)


@contextlib.contextmanager
def dataloader() -> Iterator[Iterator[Batch]]:
    """In a worker process of torch's DataLoader."""
    loader = DataLoader(Clicks(), batch_size=None, num_workers=1, multiprocessing_context="spawn", collate_fn=as_it_is)
    yield iter(loader)


SOURCES = {"here": here, "own": own, "dataloader": dataloader}


def costs(source: Callable[[], AbstractContextManager[Iterator[Batch]]]) -> dict[str, float]:
    """Seconds to the first batch, then medians of milliseconds per batch."""
    start = time.perf_counter()
    with source() as batches:
        next(batches)
        first = time.perf_counter() - start
        wall, cpu = [], []
        for _ in range(BATCHES):
            time.sleep(STEP_SECONDS)
            begin = time.perf_counter(), time.process_time()
            next(batches)
            wall.append(time.perf_counter() - begin[0])
            cpu.append(time.process_time() - begin[1])
    return {"first_seconds": first, "wall_ms": median(wall) * 1e3, "cpu_ms": median(cpu) * 1e3}


def rates() -> dict[str, list[float]]:
    """Samples/s of every round, by source; the processes of all sources wait for their turns."""
    found: dict[str, list[float]] = {name: [] for name in SOURCES}
    with contextlib.ExitStack() as stack:
        feeds = {name: stack.enter_context(source()) for name, source in SOURCES.items()}
        session = stack.enter_context(es.local(shards=2))
        example = next(feeds["here"])
        num_dense = 0 if example.dense is None else example.dense.shape[1]
        network = DLRM(2**40, example.ids.shape[1], DIM, num_dense, bottom=(64, 32), hidden=(128, 64), device="meta")
        model = es.wrap(network, session, optimizer=es.Adagrad(lr=0.05))
        for number in range(ROUNDS + 1):  # the first warms up
            for name, batches in feeds.items():
                start = time.perf_counter()
                tuples = ((batch.ids, batch.dense, batch.labels) for batch in islice(batches, STEPS))
                for ids, dense, labels in session.prefetch(tuples):
                    binary_cross_entropy_with_logits(model(ids, dense), labels).backward()
                    session.step()
                if number:
                    found[name].append(STEPS * SIZE / (time.perf_counter() - start))
    return found


def main() -> None:
    """Prints both tables."""
    torch.set_num_threads(1)
    result: dict[str, object] = {name: costs(source) for name, source in SOURCES.items()}
    rows = [[SOURCES[name].__doc__, *cost.values()] for name, cost in result.items()]
    print_table(["a batch of 1,024 clicks", "first, s", "wall, ms", "CPU, ms"], rows)
    speeds = rates()
    ratios = {name: median([a / b for a, b in zip(speeds[name], speeds["own"], strict=True)]) for name in SOURCES}
    print_table(
        ["DLRM, two shards", "samples/s", "of the loader's process"],
        [[SOURCES[name].__doc__, round(median(speeds[name])), ratios[name]] for name in SOURCES],
    )
    finish({**result, "samples_per_second": speeds, "ratios": ratios, "load": load()}, [])


if __name__ == "__main__":
    main()
