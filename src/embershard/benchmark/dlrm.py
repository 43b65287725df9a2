"""One worker of `bench train`, and the same training in one process with torch alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from embershard.benchmark.ids import ZipfIds
from embershard.benchmark.settings import FIELDS, NUM_DENSE, POOL, Lap, Train, TransportName
from embershard.local_shards import local
from embershard.proto.security.tls import TLS
from embershard.proto.spec import Adagrad
from embershard.proto.timing import Recorder, TimeSplit, end_step, span
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.nn.wrap import wrap
from embershard.worker.session.connect import connect

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids (B, F) int64, dense (B, D), labels (B,)
LR = 0.01


def make_batches(settings: Train, rank: int) -> Iterator[Batch]:
    """The batches of one worker, over and over; ids are unique across features."""
    rng = np.random.default_rng([settings.seed, rank])
    per_field, size = settings.rows // FIELDS, settings.batch
    source, offsets = ZipfIds(per_field, settings.skew), np.arange(FIELDS) * per_field
    pool: list[Batch] = []
    for _ in range(POOL):
        ids = torch.from_numpy(source.draw(rng, (size, FIELDS)) + offsets)
        dense = torch.from_numpy(rng.standard_normal((size, NUM_DENSE), np.float32))
        pool.append((ids, dense, torch.from_numpy((rng.random(size) < 0.25).astype(np.float32))))
    return cycle(pool)


def make_model(settings: Train, device: str) -> DLRM:
    """The model, its table on `device`, with the same first dense weights everywhere."""
    torch.manual_seed(settings.seed)
    return DLRM(settings.rows, FIELDS, settings.dim, NUM_DENSE, device=device)


class TrainWorker:
    """A wrapped model whose every weight lives on the shards."""

    def __init__(self, settings: Train, addresses: Sequence[str], rank: int) -> None:
        torch.set_num_threads(1)
        on_shards = settings.transport is not TransportName.LOCAL
        tls = TLS(settings.tls) if settings.tls else None
        self._session = connect(addresses, worker=rank, tls=tls) if on_shards else local(settings.shards)
        self._model = wrap(make_model(settings, "meta"), self._session, optimizer=Adagrad(lr=LR), prefix="bench/")
        self._batches, self._staleness = make_batches(settings, rank), settings.prefetch
        self._recorder = Recorder()

    def run(self, steps: int) -> Lap:
        """Measure some steps; the last one ends with its push acknowledged."""
        before, ends = self._session.stats, []
        cpu, start = time.process_time(), time.monotonic()
        with self._recorder:
            for ids, dense, labels in self._loop(islice(self._batches, steps)):
                with span("forward"):
                    loss = binary_cross_entropy_with_logits(self._model(ids, dense), labels)
                with span("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                self._session.step()
                end_step()
                ends.append(time.monotonic())
        ends[-1] = time.monotonic()
        after = self._session.stats
        return Lap(
            start=start,
            ends=ends,
            cpu=time.process_time() - cpu,
            parts={},
            bytes=after.sent_bytes + after.received_bytes - before.sent_bytes - before.received_bytes,
            rows=after.pulled_rows - before.pulled_rows,
            split=_as_numbers(self._recorder.split()),
        )

    def _loop(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return batches if self._staleness is None else self._session.prefetch(batches, staleness=self._staleness)


class TorchWorker:
    """torch.optim.Adagrad over the same model, sparse gradients for its table: no network, no shards."""

    def __init__(self, settings: Train) -> None:
        torch.set_num_threads(1)
        self._model = make_model(settings, "cpu")
        self._model.embedding.sparse = True
        self._optimizer = torch.optim.Adagrad(self._model.parameters(), lr=LR)
        self._batches = make_batches(settings, 0)

    def run(self, steps: int) -> Lap:
        """Make `steps` steps and return their times."""
        ends: list[float] = []
        cpu, start = time.process_time(), time.monotonic()
        for ids, dense, labels in islice(self._batches, steps):
            self._optimizer.zero_grad()
            binary_cross_entropy_with_logits(self._model(ids, dense), labels).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            ends.append(time.monotonic())
        return Lap(start=start, ends=ends, cpu=time.process_time() - cpu, parts={}, bytes=0, rows=0)


def _as_numbers(split: TimeSplit) -> dict[str, dict[str, tuple[float, float, float]]]:
    groups = {"step": {"step": split.step}, "parts": split.parts, "overlapped": split.overlapped}
    return {
        group: {name: (part.p50_ms, part.p99_ms, part.share) for name, part in parts.items()}
        for group, parts in groups.items()
    }
