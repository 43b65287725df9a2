"""The ways to train one model that are compared: all of it on the device, on embershard's shards, behind torch rpc.

Each gives a model to be called with ids and dense features, and what follows a backward. Ids wait on the host, pinned
where the device is a GPU, as a loader would leave them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self

import torch
from rpc_server import TableServers
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import embedding

from embershard.benchmark.dlrm import LR, Batch, make_model
from embershard.benchmark.settings import Train
from embershard.deploy.supervisor import LocalShards
from embershard.proto.spec import Adagrad
from embershard.proto.timing import span
from embershard.worker.device import to_device
from embershard.worker.nn.wrap import wrap
from embershard.worker.session import reads
from embershard.worker.session.connect import connect
from embershard.worker.session.gradients import to_host


class Program(Protocol):
    """One way to train."""

    model: nn.Module
    seconds: dict[str, list[float]]  # of calls that no Recorder sees, from each to its last answer

    def loop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, each when what its forward needs is here or under way."""

    def step(self) -> None:
        """Change the weights by what backward left."""

    def finish(self) -> None:
        """Wait for every change that is under way."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class InMemory:
    """The model and its table on the device, by torch alone."""

    def __init__(self, settings: Train, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._device = device
        torch.sparse.check_sparse_tensor_invariants.disable()  # else torch warns
        self.model = make_model(settings, str(device)).to(device)
        self.model.embedding.sparse = True
        table = self.model.embedding.weight
        dense = [parameter for parameter in self.model.parameters() if parameter is not table]
        # apart, so that torch takes its fused way for the dense ones
        self._optimizers = [torch.optim.Adagrad([table], lr=LR), torch.optim.Adagrad(dense, lr=LR)]

    def loop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, their ids on the device."""
        for ids, dense, labels in batches:
            yield to_device(ids, self._device), dense, labels

    def step(self) -> None:
        """One step of torch's Adagrad; rows by sparse gradients."""
        with span("update"):
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def finish(self) -> None:
        """Nothing is under way but on the device."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model = nn.Identity()  # its memory is the next program's


class OnShards:
    """embershard: every weight on shard processes of this machine, rows pulled ahead.

    With `on_host` a core finds the distinct ids of a batch, and not the GPU.
    """

    def __init__(self, settings: Train, device: torch.device, staleness: int, *, on_host: bool = False) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._many_ids, reads.MANY_IDS = reads.MANY_IDS, sys.maxsize if on_host else reads.MANY_IDS
        self._staleness = staleness
        self._shards = LocalShards(settings.shards).__enter__()
        self._session = connect(self._shards.addresses)
        self.model = wrap(make_model(settings, "meta"), self._session, optimizer=Adagrad(lr=LR)).to(device)

    def loop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, with their rows pulled ahead."""
        return self._session.prefetch(batches, staleness=self._staleness)

    def step(self) -> None:
        """Push."""
        self._session.step()

    def finish(self) -> None:
        """Until every push is acknowledged."""
        self._session.flush()
        assert self._session.missed_reads == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        reads.MANY_IDS = self._many_ids
        self._session.close()
        self._shards.close()


class BehindRpc:
    """A parameter server by hand: torch.distributed.rpc to as many processes, unique rows pulled one batch ahead.

    Unique ids and their owners are found on the device, which is where torch does that fastest; at most one push is
    under way, so that a batch misses one step, as with a staleness of 1.
    """

    def __init__(self, settings: Train, device: torch.device, threads: int) -> None:
        self._servers, self._device = TableServers(settings.shards, threads).__enter__(), device
        self.seconds = self._servers.seconds
        self.model = make_model(settings, "meta")
        self._rows = self.model.embedding = _PulledRows()  # type: ignore[assignment]
        self.model.to(device)
        self._parameters = list(self.model.parameters())
        first = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters]).cpu()
        self._servers.create(settings.rows, settings.dim, LR, first)
        self._flat = first.to(device)
        for parameter, part in zip(self._parameters, self._split(self._flat), strict=True):
            parameter.data = part
        self._owned: list[Tensor] = []  # of this batch's unique ids: their places, by server
        self._ids: list[Tensor] = []

    def loop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, each with the rows that were asked for as the one before began."""
        batches = iter(batches)
        batch = next(batches, None)
        pending = None if batch is None else self._ask(batch[0])
        while batch is not None and pending is not None:
            (index, owned, ids), answer = pending
            with span("wait"):
                parts = answer.wait()
            with span("pull"):
                rows = torch.empty((sum(map(len, ids)), parts[0][0].shape[1]), device=self._device)
                for places, (pulled, _) in zip(owned, parts, strict=True):
                    rows.index_copy_(0, places, to_device(pulled, self._device))
                self._flat.copy_(torch.cat([to_device(dense, self._device) for _, dense in parts]))
            self._rows.take(index, rows)
            self._owned, self._ids = owned, ids
            following = next(batches, None)
            pending = None if following is None else self._ask(following[0])
            yield batch
            batch = following

    def step(self) -> None:
        """Push the gradients of the rows and of the dense weights to their servers."""
        with span("push"):
            rows = self._rows.gradient()
            dense = torch.cat([parameter.grad.reshape(-1) for parameter in self._parameters])  # type: ignore[union-attr]
            for parameter in self._parameters:
                parameter.grad = None
            arrays = to_host([*(rows.index_select(0, places) for places in self._owned), dense])
            *parts, host = map(torch.from_numpy, arrays)
        with span("wait"):
            self._servers.finish()
        with span("push"):
            self._servers.push(self._ids, parts, host)

    def finish(self) -> None:
        """Until every push is answered."""
        self._servers.finish()

    def _ask(self, ids: Tensor) -> tuple[tuple[Tensor, list[Tensor], list[Tensor]], Future[list[Any]]]:
        with span("route"):
            unique, index = torch.unique(to_device(ids, self._device), return_inverse=True)
            count = self._servers.count
            owned = [(unique % count == server).nonzero().squeeze(1) for server in range(count)]
            local = [unique[places].div(count, rounding_mode="floor").cpu() for places in owned]
            return (index, owned, local), self._servers.pull(local)

    def _split(self, flat: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        return [part.view_as(its) for part, its in zip(flat.split(sizes), self._parameters, strict=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()


class _PulledRows(nn.Module):
    """In place of the table: the rows of one batch."""

    def take(self, index: Tensor, rows: Tensor) -> None:
        """The rows (U, dim) of the next forward, and which of them its ids mean."""
        self._index, self._values = index, rows.requires_grad_()

    def forward(self, _: Tensor) -> Tensor:
        """(B, F, dim)."""
        return embedding(self._index, self._values)

    def gradient(self) -> Tensor:
        """(U, dim)."""
        assert self._values.grad is not None
        return self._values.grad


def programs(settings: Train, device: torch.device, threads: int) -> dict[str, Callable[[], Program]]:
    """Each by its name, to be made, entered, measured and left before the next one is; rpc's servers have `threads`."""
    return {
        "tables in the device's memory": lambda: InMemory(settings, device),
        "embershard, staleness 1": lambda: OnShards(settings, device, 1),
        "embershard, staleness 1, distinct ids found by the host": lambda: OnShards(settings, device, 1, on_host=True),
        "embershard, staleness 0": lambda: OnShards(settings, device, 0),
        "torch rpc, one batch ahead": lambda: BehindRpc(settings, device, threads),
    }
