"""How long a worker trains, on which batches, and where among them it is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, count, islice

from embershard.worker.data.batch import Batch, Dataset
from embershard.worker.data.loader import LoaderProcess
from embershard.worker.group import WorkerGroup
from embershard.worker.job import Job
from embershard.worker.strategy.protocol import Numbered


class Budget:
    """A worker's share of the epochs, steps or samples of a job."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        group: WorkerGroup,
        loader: LoaderProcess | None = None,  # makes the batches, if there is one
        smallest_batch: int = 1,
    ) -> None:
        assert job.train.budget is not None
        self._unit, self._length = job.train.budget
        self._every, self._batch_size = job.evaluate.every, job.train.batch_size
        self._dataset, self._group, self._loader = dataset, group, loader
        self._smallest_batch = smallest_batch

    def segments(self) -> Iterator[Iterator[Numbered]]:
        """The batches up to each evaluation: as many epochs, or the same number of steps for every worker."""
        if self._unit == "epochs":
            every = self._every or 1
            for first in range(0, self._length, every):
                yield chain.from_iterable(map(self._batches, range(first, min(first + every, self._length))))
            return
        stream = chain.from_iterable(map(self._batches, count()))
        steps, every = self._steps(self._length), self._steps(self._every or self._length)
        for first in range(0, steps, every):
            yield islice(stream, min(every, steps - first))

    @property
    def total_steps(self) -> int | None:
        """Of each worker; None where only reading tells."""
        if self._unit != "epochs":
            return self._steps(self._length)
        samples = self._dataset.num_samples("train")
        return None if samples is None else self._length * self._steps_for(samples)

    @property
    def total_samples(self) -> int | None:
        """Of all workers; None where only reading tells."""
        samples = self._dataset.num_samples("train")
        if self._unit == "epochs" and samples is not None:
            return self._length * samples
        steps = self.total_steps
        return None if steps is None else steps * self._batch_size * self._group.world_size

    def _batches(self, epoch: int) -> Iterator[Numbered]:
        for batch in self._read(epoch):
            if len(batch) >= self._smallest_batch:
                yield epoch, batch

    def _read(self, epoch: int) -> Iterator[Batch]:
        if self._loader is not None:
            return self._loader.train(epoch)
        group = self._group
        return self._dataset.train(epoch, group.rank, group.world_size, self._batch_size)

    def _steps(self, length: int) -> int:
        """Steps of each worker for a number of steps or samples, as the job's budget counts."""
        return length if self._unit == "steps" else self._steps_for(length)

    def _steps_for(self, samples: int) -> int:
        return math.ceil(samples / (self._batch_size * self._group.world_size))
