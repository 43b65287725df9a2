"""The workers of one job, and what they do together: through the shards, or over torch.distributed with gloo.

Both ways have one kind of call, of which all else is made: everyone puts bytes down, and reads those of the others.
These are raw numbers of a dtype that all sides know, or JSON; never pickles.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from embershard.proto.arrays import Bytes
from embershard.proto.errors import RendezvousOver, WorkerLost, WorkersApart
from embershard.proto.timing import Deadline
from embershard.worker.client.client import Client

Scalar = TypeVar("Scalar", bound=np.generic)
T = TypeVar("T")
SharedState = Mapping[str, Any]  # data that JSON knows

# at the start a worker waits for the others' processes, which a cluster may start minutes apart
JOIN_TIMEOUT = timedelta(minutes=5)
# a rendezvous waits for the slowest worker: for the rest of its epoch, not as long as a call
RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
RENDEZVOUS_BYTES = 16 << 20  # what all of them can put down at once
_NCCL = "embershard/nccl"  # of torch's store: how many workers could use it
_TRIES = 10  # to catch up with workers that go on to the next rendezvous meanwhile


class MembershipChanged(Exception):
    """Somebody was lost since the workers began what they do together; `present` tells who is left."""


class Evicted(Exception):
    """The others went on without this worker, whose lease had run out; it has to `join_segment` again."""


class WorkerGroup:
    """This worker's rank among `world_size`, and what all of them do together. A world of one needs no network."""

    met: ClassVar[bool] = False  # whether this process ever joined others over gloo: it has its threads from then on

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..world_size-1, got rank {rank} of {world_size}")
        self.rank = rank
        self.world_size = world_size  # how many there may be
        self.at_start = world_size  # how many the job begins with
        self.present: tuple[int, ...] = tuple(range(world_size))  # who was there at the last rendezvous
        self.late = False  # whether the others had begun without it
        self.over = False  # whether they have come to the end of the job without it
        self.leaving = False  # whether it was told to leave the others before the end; its owner sets it
        self._piece = RENDEZVOUS_BYTES // world_size

    @classmethod
    def join(cls, rank: int, world_size: int, timeout: timedelta = JOIN_TIMEOUT, *, nccl: bool = False) -> WorkerGroup:
        """Connect to the other workers at MASTER_ADDR and MASTER_PORT, which torch reads from the environment.

        Where all of them say `nccl`, what torch does with tensors of GPUs goes by it, for which each worker needs a GPU
        of its own; a rendezvous goes by gloo in any case. WorkersApart where the address cannot be reached, a worker
        did not come, or a rank came twice, by `timeout`.
        """
        if world_size == 1:
            return WorkerGroup(rank, world_size)
        return TorchGroup.join(rank, world_size, timeout, nccl=nccl)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first one present, which decides for all."""
        return self.present[:1] == (self.rank,)

    @property
    def reports(self) -> bool:
        """Whether this worker reports the progress of the run: the first one, or another one once it was lost."""
        return self.is_first

    @property
    def num_live(self) -> int:
        """Workers that train now, as far as this one knows."""
        return len(self.present)

    @property
    def share(self) -> tuple[int, int]:
        """This worker's place among those present, from 0, and how many they are."""
        return self.present.index(self.rank), len(self.present)

    def join_segment(self, shared_state: SharedState) -> tuple[int, SharedState]:
        """Take part from here on; the segment that the others train, from 0, and the first one's state as it began.

        A segment is what lies between two evaluations. At the start of a job this waits for all workers.
        """
        return 0, self.broadcast_json(shared_state)

    def end_segment(self, segment: int, *, last: bool = False) -> None:
        """Wait until every worker is done with a segment, or with all. Evicted where the others did so before."""
        self.barrier()

    def begin_segment(self, segment: int, resume: Callable[[int], None], clock: int, shared_state: SharedState) -> None:
        """Begin the segment after an evaluation: `resume` is called with the highest of the workers' clocks.

        The first one's `shared_state`, with that clock as its "clock", is what those read who enter later.
        """
        resume(self.highest(clock))

    def retry_on_membership_change(self, work: Callable[[], T]) -> T:
        """Return `work()`, in which the workers synchronise; repeat it without those that were lost in it."""
        for _ in range(self.world_size):
            try:
                return work()
            except MembershipChanged:
                continue
        raise WorkerLost(worker=self.rank, world_size=self.world_size, reason="again and again")

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self._all_gather_bytes(np.empty(0, np.uint8), want_payloads=False)

    def collect(self, values: npt.NDArray[Scalar]) -> dict[int, npt.NDArray[Scalar]]:
        """Everyone's values (N_w,), small ones, by worker."""
        return {
            worker: part.view(values.dtype) for worker, part in self._all_gather_bytes(values.view(np.uint8)).items()
        }

    def gather(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Everyone's values (N_w,), of any length, in the order of workers; on the first one, an empty list elsewhere.

        The dtype is the same on all of them.
        """
        data = np.ascontiguousarray(values).view(np.uint8)
        longest = max(int(size[0]) for size in self.collect(np.array([data.nbytes])).values())
        parts: dict[int, list[Bytes]] = {worker: [np.empty(0, np.uint8)] for worker in self.present}
        for start in range(0, longest, self._piece):
            for worker, part in self._all_gather_bytes(
                data[start : start + self._piece], want_payloads=self.is_first
            ).items():
                parts[worker].append(part)
        return [np.concatenate(part).view(values.dtype) for part in parts.values()] if self.is_first else []

    def sum(self, value: float) -> float:
        """The sum of everyone's value, in the order of workers."""
        return float(sum(float(part[0]) for part in self.collect(np.array([value], np.float64)).values()))

    def highest(self, number: int) -> int:
        """The highest of everyone's numbers, of those who are left where one is lost meanwhile."""
        numbers = self.retry_on_membership_change(lambda: self.collect(np.array([number])))
        return int(max(part[0] for part in numbers.values()))

    def any(self, flag: bool) -> bool:
        """Whether it is true for any worker."""
        return self.sum(float(flag)) > 0

    def broadcast_json(self, value: T) -> T:
        """Return the first worker's `value` on all workers; it must be data that JSON has."""
        said = json.dumps(value).encode() if self.is_first else b""
        told: T = json.loads(self._all_gather_bytes(np.frombuffer(said, np.uint8))[min(self.present)].tobytes())
        return told

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every worker the first one's values, in place; shapes and dtypes are the same on all of them."""
        kept = [tensor for tensor in tensors if tensor.numel()]
        if not kept:
            return
        hosts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in kept]
        data = np.concatenate(hosts)
        for start in range(0, len(data), self._piece):
            piece = data[start : start + self._piece]
            piece[:] = self._all_gather_bytes(piece if self.is_first else piece[:0])[min(self.present)]
        ends = np.cumsum([host.nbytes for host in hosts])
        for tensor, values in zip(kept, np.split(data, ends[:-1]), strict=True):
            tensor.detach().copy_(torch.from_numpy(values.copy()).view(tensor.dtype).reshape(tensor.shape))

    def leave(self) -> None:
        """Leave the group at the end of the job."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _all_gather_bytes(self, data: Bytes, *, want_payloads: bool = True) -> dict[int, Bytes]:
        """Gather the bytes of all workers present, by rank, in order; without `want_payloads` they may be anything."""
        return {self.rank: data}


class TorchGroup(WorkerGroup):
    """Synchronise all workers over torch.distributed with gloo, to the end of the job."""

    @classmethod
    def join(cls, rank: int, world_size: int, timeout: timedelta = JOIN_TIMEOUT, *, nccl: bool = False) -> TorchGroup:
        """Connect to the other workers; see WorkerGroup.join."""
        try:
            deadline = Deadline(timeout)
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
            all_nccl = _await_all(store, rank, world_size, deadline, nccl=nccl)
            WorkerGroup.met = True
            backend = "cpu:gloo,cuda:nccl" if all_nccl else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=RENDEZVOUS_TIMEOUT)
        except (RuntimeError, ValueError) as error:  # torch's words for everything here
            raise WorkersApart(
                worker=rank,
                world_size=world_size,
                address=os.environ.get("MASTER_ADDR", "(not set)"),
                port=os.environ.get("MASTER_PORT", "(not set)"),
                reason=first_line(error),
            ) from None
        return cls(rank, world_size)

    def leave(self) -> None:
        """Leave the group at the end of the job."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all_gather_bytes(self, data: Bytes, *, want_payloads: bool = True) -> dict[int, Bytes]:
        sizes = [int(size) for size in self._all(torch.tensor([len(data)], device="cpu"))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.from_numpy(data.copy())
        parts = self._all(padded) if max(sizes) else [padded] * len(sizes)
        return {rank: part[:size].numpy() for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))}

    def _all(self, value: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(value) for _ in range(self.world_size)]
        with self._others():
            dist.all_gather(parts, value)
        return parts

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Raise WorkerLost where a collective call fails: a worker is gone, or late by RENDEZVOUS_TIMEOUT."""
        try:
            yield
        except RuntimeError as error:
            raise WorkerLost(worker=self.rank, world_size=self.world_size, reason=first_line(error)) from None


class ShardGroup(WorkerGroup):
    """Synchronise the workers on shard 0: all live members of the job.

    The names of rendezvous tell a late worker where the job is: "s/on" begins segment s, "s/end" is its end,
    "s/over" that of the job, and those that follow have a number behind that. All members are expected at an end; at
    what follows, those who were there: the others cannot know of it.
    """

    def __init__(
        self, client: Client, rank: int, world_size: int, join_timeout: timedelta = JOIN_TIMEOUT, at_start: int = 0
    ) -> None:
        super().__init__(rank, world_size)
        self.at_start = at_start or world_size
        assert client.membership is not None
        self._join_timeout = join_timeout
        self._client, self._membership = client, client.membership
        self._number = 0
        self._name = ""  # of the last one with a name of its own

    @property
    def reports(self) -> bool:
        """Whether this worker reports: the first live one of those at the last rendezvous."""
        live = [worker for worker in self.present if worker == self.rank or worker in self._membership.members]
        return live[:1] == [self.rank]

    @property
    def num_live(self) -> int:
        """Workers that train now: the members as of this one's last heartbeat."""
        return len({self.rank, *self._membership.members})

    def join_segment(self, shared_state: SharedState) -> tuple[int, SharedState]:
        """Take part from here on; see WorkerGroup. WorkerLost names who did not come to the start in time."""
        for _ in range(_TRIES):
            name, _, step = self._client.status()[0].rendezvous.partition("/")
            self.late, self.over = bool(name), step.startswith("over")
            segment = int(name or 0) + step.startswith("end")
            if self.over:
                return segment, shared_state
            with suppress(RendezvousOver):
                if not self.late:
                    return segment, self._begin(segment, shared_state, ())
                self._membership.pause()  # no worker waits for it meanwhile
                said = self._begin(segment, shared_state, (), late=True)
                self._membership.resume()
                return segment, said
        raise WorkerLost(worker=self.rank, world_size=self.world_size, reason="the others run away from it")

    def end_segment(self, segment: int, *, last: bool = False) -> None:
        """Wait until every worker is done with a segment; see WorkerGroup."""
        self._name, self._number = f"{segment}/{'over' if last else 'end'}", 0
        self.present = tuple(self._come(self._name))

    def begin_segment(self, segment: int, resume: Callable[[int], None], clock: int, shared_state: SharedState) -> None:
        """Begin the next segment; see WorkerGroup."""
        highest = self.highest(clock)
        resume(highest)
        try:
            self._begin(segment + 1, {**shared_state, "clock": highest}, self.present)
        except RendezvousOver:
            raise Evicted from None

    def _begin(
        self, segment: int, shared_state: SharedState, participants: Sequence[int], *, late: bool = False
    ) -> SharedState:
        said = b"" if late else json.dumps(shared_state).encode()
        self._name, self._number = f"{segment}/on", 0
        wait_timeout = self._join_timeout if not (late or participants) else None  # the start of the job
        met = self._membership.rendezvous(self._name, said, participants=participants, wait_timeout=wait_timeout)
        self.present = tuple(met)
        told: SharedState = next((json.loads(words) for words in met.values() if words), shared_state)
        return told

    def _come(
        self, name: str, data: bytes = b"", *, want_payloads: bool = False, participants: Sequence[int] = ()
    ) -> dict[int, bytes]:
        try:
            met = self._membership.rendezvous(name, data, want_payloads=want_payloads, participants=participants)
        except RendezvousOver:
            met = {}
        if self.rank not in met:
            self.present = tuple(met)
            raise Evicted
        return met

    def _all_gather_bytes(self, data: Bytes, *, want_payloads: bool = True) -> dict[int, Bytes]:
        self._number += 1
        met = self._come(
            f"{self._name}/{self._number}", data.tobytes(), want_payloads=want_payloads, participants=self.present
        )
        left = tuple(worker for worker in self.present if worker in met)
        if left != self.present:
            self.present = left
            raise MembershipChanged
        return {worker: np.frombuffer(met[worker], np.uint8) for worker in left}


class _Store(Protocol):
    """The part of torch's key-value stores that is used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def _await_all(store: _Store, rank: int, world_size: int, deadline: Deadline, *, nccl: bool) -> bool:
    """Wait until every rank is there, once, and say whether all of them want nccl.

    gloo itself would wait as long as a rendezvous, and not say for whom.
    """
    store.add(_NCCL, int(nccl))  # first: who is there has said it
    keys = [f"embershard/worker/{number}" for number in range(world_size)]
    if store.add(keys[rank], 1) > 1:
        raise ValueError(f"another process is worker {rank} already")
    while missing := [str(number) for number, key in enumerate(keys) if not store.check([key])]:
        if deadline.seconds <= 0:
            raise ValueError(f"worker {', '.join(missing)} did not come in time")
        time.sleep(0.05)
    return store.add(_NCCL, 0) == world_size


def first_line(error: Exception) -> str:
    """The first line of an error's text, without torch's source location in brackets and its guess at the cause."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+\] ", "", line).partition(" This is typically")[0].rstrip(".")
