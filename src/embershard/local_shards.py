"""Shards in the worker's own process: the same state machines, without a network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.routing import Placement
from embershard.proto.transport.local import SharedTransport
from embershard.ps.memory import MemoryBudget
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import DEFAULT_TIMEOUT, Client
from embershard.worker.compression.settings import Compression
from embershard.worker.session.session import Session


class InProcessShards:
    """Shards in this process that several clients share, each in threads of its own."""

    def __init__(self, shards: int = 1, *, imports: Sequence[str] = ()) -> None:
        placement = Placement.even(shards)
        optimizers, codecs = OptimizerRegistry(imports), CodecRegistry(imports)
        memory = MemoryBudget().limit // shards
        self._shards = [
            (Shard(i, placement, optimizers, codecs=codecs, memory=memory), threading.Condition())
            for i in range(shards)
        ]

    def transports(self) -> list[SharedTransport]:
        """A way to each shard, for one client."""
        return [SharedTransport(shard, f"local/{i}", moved) for i, (shard, moved) in enumerate(self._shards)]


def local(
    shards: int = 1,
    *,
    imports: Sequence[str] = (),
    worker: int = 0,
    timeout: timedelta = DEFAULT_TIMEOUT,
    compression: Compression | None = None,
) -> Session:
    """Start `shards` empty shards in this process and connect to them, for tests, notebooks and small models.

    Returns a Session. `imports` names the modules of user-defined row optimizers and codecs ("__main__" for those
    of a notebook). `compression` is the same as in `connect`; use it to try codecs without a network.
    """
    client = Client(InProcessShards(shards, imports=imports).transports(), worker=worker, timeout=timeout)
    client.compressor.find = CodecRegistry(imports).find
    return Session(client, compression=compression)
