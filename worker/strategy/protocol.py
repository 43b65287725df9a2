"""The interface between the Trainer and a strategy: where a job's weights are, and how a step changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from embershard.worker.client.byte_counts import ByteCounts, BytePart
from embershard.worker.client.connections import ClientStats
from embershard.worker.data.batch import Batch
from embershard.worker.strategy.state import TorchWeights

EpochBatch = tuple[int, Batch]  # with its epoch, from 0


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A batch to be trained on.

    The gradients of a step are those of its mean loss times `loss_scale`, and count by `weight` among those of the
    workers that step with it. `samples` is 0 where a worker has no data left, and is idle: it runs forward and
    backward, for these all-reduce, and changes nothing.
    """

    epoch: int  # from 0
    batch: Batch
    samples: int
    loss_scale: float = 1.0
    weight: float = 1.0
    joint: float = 0.0  # weight of all workers whose gradients torch adds up with these; 0: that of this one alone


def step_batches(batches: Iterator[EpochBatch], weigh: Callable[[Batch], float]) -> Iterator[StepBatch]:
    """Batches that count by what `weigh` says of each."""
    for epoch, batch in batches:
        yield StepBatch(epoch, batch, len(batch), weight=weigh(batch))


class Strategy(Protocol):
    """One worker's hold on the weights of a job. Where a member has a body, it is that of a strategy without shards."""

    model: nn.Module
    """The model over its weights, for evaluation."""
    module: nn.Module
    """The module that a training step calls: the model, or torch's wrapper around it."""
    optimizers: list[torch.optim.Optimizer]
    """The optimizers, whose parameters have all gradients, dense and by row; a step uses their groups' "lr"."""

    @property
    def num_shards(self) -> int:
        """Shards that hold rows; 0 where torch holds them."""

    @property
    def stats(self) -> ClientStats:
        """Counters since the start; `wait_seconds` is what the training thread waited, for shards or other workers."""

    def predicted(self, moved: ByteCounts) -> Mapping[BytePart, float]:
        """Return the bytes that were expected for what was moved: worker/strategy/predicted_bytes.py."""
        return {}

    def codecs(self) -> str:
        """Return the codecs of rows and gradients now (compression.settings.describe_codecs); empty without shards."""
        return ""

    def batches(self, batches: Iterator[EpochBatch]) -> Iterator[StepBatch]:
        """The batches, with all that their step needs under way; its end is the end of all that is in flight."""

    def step(self, weight: float) -> None:
        """Change the weights by what backward left, which counts by `weight` among that of the workers; clear it."""

    def skip(self) -> None:
        """A step that changes nothing, in time with the other workers."""

    @property
    def agree(self) -> Callable[[float], float] | None:
        """The largest of all workers' norms, where they make every step together; else None."""

    def collective_errors(self) -> AbstractContextManager[None]:
        """WorkerLost where something fails inside that workers do together by torch."""

    @property
    def local_weights(self) -> TorchWeights | None:
        """The weights that workers hold and no shard does, equal on all workers: for a checkpoint."""

    @property
    def clock(self) -> int:
        """Clock of this worker's next step, as the shards count."""

    def pause(self) -> None:
        """Training pauses: the other workers' clock does not wait for this one."""
        return

    def resume(self, clock: int) -> None:
        """Training goes on, from a clock that all workers agree on, or as soon after it as the shards do."""
        return

    def refresh(self) -> None:
        """Show at the next forward what other workers changed."""
        return

    def exact(self) -> AbstractContextManager[None]:
        """Inside, forwards read the weights themselves, where training reads them rounded by a codec."""
        return nullcontext()

    def expired_leases(self) -> int:
        """Return how often a worker was evicted since this one started."""
        return 0

    def staleness_seen(self) -> tuple[int, ...]:
        """Pushes since the start by the updates that their rows had missed: 0, 1, ...; the last: so many or more."""
        return ()

    def table_rows(self) -> dict[str, int]:
        """Table -> rows that exist."""
