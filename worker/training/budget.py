"""How long a worker trains, on which batches, and where among them it is judged and saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice

from embershard.proto.errors import JobError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Batch, Dataset
from embershard.worker.data.splits import SplitQueue
from embershard.worker.job.job import Job
from embershard.worker.strategy.protocol import EpochBatch
from embershard.worker.training.loader import LoaderProcess


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Batches, and what is due after them.

    A part is finished, with all that its batches left in flight, before the next one is asked for.
    """

    parts: Iterator[Iterator[EpochBatch]]
    evaluation: bool
    checkpoint: bool
    last: bool


@dataclass(slots=True)
class Position:
    """Name a worker's place in its data: its next batch, and how many it was given."""

    epoch: int = 0
    batch: int = 0  # of the epoch
    given: int = 0

    @classmethod
    def of(cls, state: Mapping[str, object], world_size: int) -> Position:
        """The position in a state; of another number of workers, at about the same sample."""
        epoch, batch, given, before = (int(str(state[name])) for name in ("epoch", "batch", "given", "world_size"))
        return cls(epoch, batch * before // world_size, given * before // world_size)


class TrainingPlan:
    """A worker's share of the epochs, steps or samples of a job."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        group: WorkerGroup,
        loader: LoaderProcess | None = None,  # makes the batches, if there is one
        smallest_batch: int = 1,
        splits: SplitQueue | None = None,  # that deals out the epochs, if they are
    ) -> None:
        assert job.train.budget is not None
        self._unit, self._length = job.train.budget
        self._every, self._batch_size = job.evaluate.every, job.train.batch_size
        self._accumulate = job.train.accumulate
        self._save_every = job.checkpoint.every
        self._dataset, self._group, self._loader = dataset, group, loader
        self._smallest_batch = smallest_batch
        self._splits = splits
        self._together = job.all_reduces
        self.position = Position()
        self._begun = 0  # epochs or batches before the first segment
        self._stream = self._batches_from(0)

    @property
    def shared_state(self) -> dict[str, int]:
        """Return the first worker's progress, which the other workers take over."""
        return {"begun": self._begun, "epoch": self._next_epoch}

    def follow(self, shared_state: Mapping[str, int], *, late: bool) -> None:
        """Have the first worker's segments: that of a checkpoint may have been given other numbers of batches.

        One that is `late` leaves out what is left of the epochs before the one that the first one is in. One that is
        ahead goes back where the workers make their steps together, for which each needs batches.
        """
        self._begun = shared_state["begun"]
        if late:
            self._move_on(shared_state["epoch"])
        if self._together and self._unit == "epochs" and self.position.epoch > self._begun:
            self._go_to(self._begun)

    def segments(self) -> Iterator[Segment]:
        """The batches up to each evaluation or checkpoint: whole epochs, or equally many batches for every worker."""
        in_epochs = self._unit == "epochs"
        evaluate, save = self._evaluate, self._save
        for start, end in self._spans(self._begun):
            # also where a segment before it was not this worker's
            if not in_epochs:
                self.position.given = start
            elif start > self._begun:
                self._move_on(start)
            epochs = range(self.position.epoch, end)  # none for one that is ahead
            shares = chain.from_iterable(map(self._batches, epochs)) if in_epochs else islice(self._stream, end - start)
            last = end == self._parts(self._length)
            yield Segment(
                iter([shares]) if self._splits is None else chain.from_iterable(map(self._assigned, range(start, end))),
                evaluation=end % evaluate == 0 or last,
                checkpoint=end % save == 0 or last,
                last=last,
            )

    def _spans(self, done: int) -> Iterator[tuple[int, int]]:
        """Where the segments behind `done` begin and end, in epochs or batches of each worker."""
        length = self._parts(self._length)
        while done < length:
            end = min(length, *((done // every + 1) * every for every in (self._evaluate, self._save)))
            yield done, end
            done = end

    @property
    def _evaluate(self) -> int:
        return self._parts(self._every or (1 if self._unit == "epochs" else self._length))

    @property
    def _save(self) -> int:
        return self._evaluate if self._save_every is None else self._parts(self._save_every)

    def state_dict(self) -> Mapping[str, object]:
        """The position, between two segments."""
        at = self.position
        return {"epoch": at.epoch, "batch": at.batch, "given": at.given, "world_size": self._group.world_size}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned; a loader must be started there, and a begun epoch is dealt out anew."""
        self.position = at = Position.of(state, self._group.world_size)
        if self._unit == "steps":  # each worker's own, however many there are
            at.given = int(str(state["given"]))
        if self._splits is not None:
            at.epoch, at.batch = self._next_epoch, 0
        self._begun = self._next_epoch if self._unit == "epochs" else at.given
        self._stream = self._batches_from(at.epoch)

    @property
    def _next_epoch(self) -> int:
        """Epoch of the next batch; maybe the one before, where only reading tells how long an epoch is."""
        at, samples = self.position, self._dataset.num_samples("train")
        return at.epoch + (samples is not None and at.batch >= self._batches_for(samples))

    def _move_on(self, epoch: int) -> None:
        """Leave out what is left of the epochs before one."""
        if epoch > self.position.epoch:
            self._go_to(epoch)

    def _go_to(self, epoch: int) -> None:
        self.position.epoch, self.position.batch = epoch, 0
        self._stream = self._batches_from(epoch)

    @property
    def total_steps(self) -> int | None:
        """Steps of each worker in the whole run; None where only reading the data tells.

        What a part leaves of batches for one step makes a step of its own. Of splits a worker is taken to be dealt its
        share.
        """
        batches = 1
        if self._unit == "epochs":
            samples = self._dataset.num_samples("train")
            if samples is None:
                return None
            if self._splits is not None:
                of_split = math.ceil(samples / (self._splits.num_splits * self._batch_size))
                splits = self._length * self._splits.num_splits / self._group.world_size
                return math.ceil(splits * math.ceil(of_split / self._accumulate))
            batches = self._batches_for(samples)
        return sum(math.ceil((end - start) * batches / self._accumulate) for start, end in self._spans(0))

    @property
    def total_samples(self) -> int | None:
        """Samples of all workers in the whole run; None where only reading the data tells."""
        samples = self._dataset.num_samples("train")
        if self._unit == "epochs" and samples is not None:
            return self._length * samples
        if self._unit == "epochs":
            return None
        return self._parts(self._length) * self._batch_size * self._group.world_size

    def _assigned(self, epoch: int) -> Iterator[Iterator[EpochBatch]]:
        """The splits of an epoch that this worker is given."""
        assert self._splits is not None
        if self._group.leaving:  # to ask for a split of another epoch would begin that
            return
        for split in self._splits.deal(epoch):
            if self._group.leaving:  # the split before is finished; this one goes to another worker
                return
            yield self._batches(epoch, split)
        self.position.epoch = epoch + 1

    def _batches_from(self, epoch: int) -> Iterator[EpochBatch]:
        return chain.from_iterable(map(self._batches, count(epoch)))

    def _batches(self, epoch: int, split: int = -1) -> Iterator[EpochBatch]:
        at = self.position
        empty = split < 0 and at.batch == 0  # of a split, or of the rest of an epoch, there may be nothing
        for batch in self._read(epoch, split, at.batch):
            at.batch += 1
            if len(batch) >= self._smallest_batch:
                at.given += 1
                empty = False
                yield epoch, batch
        if empty:  # so are all the others: a run of steps would read them without end
            raise self._nothing(epoch)
        at.epoch, at.batch = epoch + 1, 0

    def _nothing(self, epoch: int) -> JobError:
        worker = f"worker {self._group.rank} of {self._group.world_size}"
        reason = f"epoch {epoch + 1} has no batch of {self._smallest_batch} samples or more for {worker}"
        remedy = "use larger batches or fewer workers, or no batch norm, which takes none of one sample"
        return JobError(where="train.batch_size", reason=f"{reason}; {remedy}")

    def _read(self, epoch: int, split: int, skip: int) -> Iterator[Batch]:
        if self._loader is not None:  # which skips by itself
            return self._loader.train(epoch, split)
        group = self._group
        share = (group.rank, group.world_size) if self._splits is None else (split, self._splits.num_splits)
        batches = self._dataset.train(epoch, *share, self._batch_size)
        return islice(batches, skip, None) if skip else batches

    def _parts(self, length: int) -> int:
        """Epochs, or batches of each worker for a number of steps or samples, as the job's budget counts."""
        match self._unit:
            case "samples":
                return self._batches_for(length)
            case "steps":
                return length * self._accumulate
        return length

    def _batches_for(self, samples: int) -> int:
        return math.ceil(samples / (self._batch_size * self._group.world_size))


def steps_of(job: Job, steps: int, *, before: int, now: int) -> int:
    """The steps that each of `before` workers has made, as each of `now` workers would have come to the same sample.

    Where the job counts steps, they are each worker's own, however many there are.
    """
    assert job.train.budget is not None
    return steps if job.train.budget[0] == "steps" else steps * before // now
