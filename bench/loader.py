"""What a batch costs the training process: made here, in the loader's process, or in one of torch's DataLoader."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from embershard.worker.data.batch import Batch
from embershard.worker.data.readers.clicks import ClickStream
from embershard.worker.job.data import ClicksSection
from embershard.worker.training.loader import DataShare, LoaderProcess
from timing import finish, print_table

BATCHES, STEP_SECONDS, SIZE = 300, 0.006, 1024


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


def main() -> None:
    """Prints milliseconds per batch while this process sleeps between batches, as if it computed."""
    torch.set_num_threads(1)
    rows, result = [], {}
    for source in (here, own, dataloader):
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
            figures = [first, *(statistics.median(values) * 1e3 for values in (wall, cpu))]
        rows.append([source.__doc__, *figures])
        result[source.__name__] = dict(zip(("first_seconds", "wall_ms", "cpu_ms"), figures, strict=True))
    print_table(["a batch of 1,024 clicks", "first, s", "wall, ms", "CPU, ms"], rows)
    finish(result, [])


if __name__ == "__main__":
    main()
