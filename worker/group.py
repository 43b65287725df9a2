"""The workers of one job: they meet at evaluations, over torch.distributed with gloo; tensors only, never pickles."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from embershard.proto.errors import WorkerLost, WorkersApart
from embershard.worker.carrier import Deadline

Scalar = TypeVar("Scalar", bound=np.generic)

# at the start a worker waits for the others' processes, which a cluster may start minutes apart
JOIN_TIMEOUT = timedelta(minutes=5)
# a meeting waits for the slowest worker: as long as its rest of an epoch, not as long as a call
MEETING_TIMEOUT = timedelta(minutes=30)


class WorkerGroup:
    """This worker's rank among `world_size`, and what all of them do together. A world of one needs no network."""

    met: ClassVar[bool] = False  # whether this process ever joined others: it has gloo's threads from then on

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..world_size-1, got rank {rank} of {world_size}")
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def join(cls, rank: int, world_size: int, timeout: timedelta = JOIN_TIMEOUT) -> WorkerGroup:
        """Meet the other workers at MASTER_ADDR and MASTER_PORT, which torch reads from the environment.

        WorkersApart where that is no place to meet, or somebody did not come, or a rank came twice, by `timeout`.
        """
        if world_size > 1:
            try:
                deadline = Deadline(timeout)
                store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
                _await_all(store, rank, world_size, deadline)
                cls.met = True
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=MEETING_TIMEOUT)
            except (RuntimeError, ValueError) as error:  # torch's words for everything here
                raise WorkersApart(
                    worker=rank,
                    world_size=world_size,
                    address=os.environ.get("MASTER_ADDR", "(not set)"),
                    port=os.environ.get("MASTER_PORT", "(not set)"),
                    reason=_first_line(error),
                ) from None
        return cls(rank, world_size)

    @property
    def is_first(self) -> bool:
        """Whether this worker decides and reports."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every worker is here."""
        if self.world_size > 1:
            with self._others():
                dist.barrier()

    def gather(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Everyone's values (N_r,), of any length, by rank; on the first worker only, an empty list elsewhere."""
        if self.world_size == 1:
            return [values]
        sizes = [int(size) for size in self._all(torch.tensor([len(values)]))]
        padded = torch.zeros(max(sizes), dtype=torch.from_numpy(values[:0]).dtype)
        padded[: len(values)] = torch.from_numpy(values)
        parts = [torch.empty_like(padded) for _ in sizes] if self.is_first else None
        with self._others():
            dist.gather(padded, parts, dst=0)
        return [part[:size].numpy() for part, size in zip(parts or (), sizes, strict=False)]

    def sum(self, value: float) -> float:
        """The sum of everyone's value."""
        return float(sum(float(part) for part in self._all(torch.tensor([value], dtype=torch.float64))))

    def any(self, flag: bool) -> bool:
        """Whether it is true for any worker."""
        return self.sum(float(flag)) > 0

    def decide(self, *flags: bool) -> tuple[bool, ...]:
        """The first worker's flags."""
        decision = torch.tensor(flags, dtype=torch.uint8)
        self.broadcast([decision])
        return tuple(bool(flag) for flag in decision)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every worker the first one's values, in place."""
        for tensor in tensors if self.world_size > 1 else ():
            host = tensor.detach().cpu().contiguous()  # gloo takes the memory as it lies
            with self._others():
                dist.broadcast(host, src=0)
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host)

    def leave(self) -> None:
        """End the group; a world of one has nothing to end."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _all(self, value: torch.Tensor) -> list[torch.Tensor]:
        if self.world_size == 1:
            return [value]
        parts = [torch.empty_like(value) for _ in range(self.world_size)]
        with self._others():
            dist.all_gather(parts, value)
        return parts

    @contextmanager
    def _others(self) -> Iterator[None]:
        """WorkerLost where what is done together fails: it does when somebody is gone, or late by MEETING_TIMEOUT."""
        try:
            yield
        except RuntimeError as error:
            raise WorkerLost(worker=self.rank, world_size=self.world_size, reason=_first_line(error)) from None


class _Store(Protocol):
    """The part of torch's key-value stores that is used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def _await_all(store: _Store, rank: int, world_size: int, deadline: Deadline) -> None:
    """Wait until every rank is there, once; gloo itself would wait as long as a meeting, and not say for whom."""
    keys = [f"embershard/worker/{number}" for number in range(world_size)]
    if store.add(keys[rank], 1) > 1:
        raise ValueError(f"another process is worker {rank} already")
    while missing := [str(number) for number, key in enumerate(keys) if not store.check([key])]:
        if deadline.seconds <= 0:
            raise ValueError(f"worker {', '.join(missing)} did not come in time")
        time.sleep(0.05)


def _first_line(error: Exception) -> str:
    """What torch or gloo says, without the line of its source and its advice."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+\] ", "", line).partition(" This is typically")[0].rstrip(".")
