"""The workers of one job: they meet at evaluations, over torch.distributed with gloo; tensors only, never pickles."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Scalar = TypeVar("Scalar", bound=np.generic)

# a meeting waits for the slowest worker: as long as its rest of an epoch, not as long as a call
MEETING_TIMEOUT = timedelta(minutes=30)


class WorkerGroup:
    """This worker's rank among `world_size`, and what all of them do together. A world of one needs no network."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..world_size-1, got rank {rank} of {world_size}")
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def join(cls, rank: int, world_size: int, timeout: timedelta = MEETING_TIMEOUT) -> WorkerGroup:
        """Meet the other workers at MASTER_ADDR and MASTER_PORT, which torch reads from the environment."""
        if world_size > 1:
            dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
        return cls(rank, world_size)

    @property
    def is_first(self) -> bool:
        """Whether this worker decides and reports."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every worker is here."""
        if self.world_size > 1:
            dist.barrier()

    def gather(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Everyone's values (N_r,), of any length, by rank; on the first worker only, an empty list elsewhere."""
        if self.world_size == 1:
            return [values]
        sizes = [int(size) for size in self._all(torch.tensor([len(values)]))]
        padded = torch.zeros(max(sizes), dtype=torch.from_numpy(values[:0]).dtype)
        padded[: len(values)] = torch.from_numpy(values)
        parts = [torch.empty_like(padded) for _ in sizes] if self.is_first else None
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
        dist.all_gather(parts, value)
        return parts
