"""Pull rows from the shards: in messages that these take, straight to where the rows belong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np

from embershard.proto.arrays import Array, Floats
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import EmbershardError, NotAShard, WrongDim
from embershard.proto.messages import DELTA, Pull, Rows, TableIds, TableKey
from embershard.proto.monitoring import tracing
from embershard.proto.routing import BundleRoute, Placement, Route
from embershard.proto.timing import span
from embershard.worker.client.connections import (
    Chunk,
    Outcome,
    Places,
    ShardConnections,
    split_into_messages,
)
from embershard.worker.client.push import Versions
from embershard.worker.client.shard_connection import with_shard_name
from embershard.worker.compression.compressor import Compressor
from embershard.worker.compression.deltas import CachedPull, Deltas, apply_delta

Reads = Sequence[tuple[TableKey, Route]]
_KeptRoute = tuple[Route, tuple[TableKey, int], int]  # ids that a pull leaves with a shard: of a table, under a number


class Puller:
    """The pulls of one incarnation of a worker; any number of threads may use it."""

    def __init__(
        self,
        connections: ShardConnections,
        worker: int,
        epoch: int,
        limits: Mapping[int, int],
        compressor: Compressor,
    ) -> None:
        self._connections = connections
        self._compressor = compressor
        self._deltas = Deltas()
        self._worker, self._epoch = worker, epoch
        self._limits = limits  # shard -> bytes of a message to it
        self._route_numbers = count(1)
        self._recoveries = 0  # of shards, until the last pull

    def pull(
        self,
        reads: Reads,
        out: Sequence[Floats],
        placement: Placement,
        send: Callable[[Mapping[int, Pull], Places], Mapping[int, Outcome]],
        required_clock: Callable[[], int],
        *,
        keep: bool,
        versions: Versions | None,
        exact: bool = False,
    ) -> None:
        """Fill `out` with the rows of `reads`, a message per shard at a time; `exact`: past codecs that would round.

        The routes are of this placement.
        `send` gives the outcome of each shard's pull, whose rows may come straight into the places that it is given.
        `required_clock` is how many clocks must be closed before a shard answers.
        """
        if self._recoveries != self._connections.recoveries:  # a recovered shard does not know what it sent when
            self._recoveries = self._connections.recoveries
            self._deltas.tables.clear()
        coded = self._compressor.coded_pulls
        codecs = [coded.get(table) if isinstance(table, str) else None for table, _ in reads]  # None: as float32
        if exact:
            codecs = [codec if codec is not None and codec.is_lossless else None for codec in codecs]
        bases = [
            self._begin(table, route, rows, codec)
            for (table, route), rows, codec in zip(reads, out, codecs, strict=True)
        ]
        # a pull is limited by its ids on the way there and by its rows on the way back
        sizes = [max(8, 4 * rows.shape[1]) for rows in out]
        queues = {
            shard: deque(split_into_messages(reads, shard, sizes, self._limits[shard])) for shard in placement.shards
        }
        while batch := {shard: queue.popleft() for shard, queue in queues.items() if queue}:
            places = {shard: [out[chunk.part][chunk.rows] for chunk in chunks] for shard, chunks in batch.items()}
            into = {shard: self._receivers(codecs, chunks, places[shard]) for shard, chunks in batch.items()}
            kept_routes: list[_KeptRoute] = []
            clock = required_clock()
            pulls = {
                shard: Pull(
                    placement.epoch,
                    self._tables(shard, reads, chunks, codecs, bases, kept_routes if keep else None),
                    self._worker,
                    self._epoch,
                    clock,
                    self._connections.term(shard),
                    tracing.step_trace,
                )
                for shard, chunks in batch.items()
            }
            outcomes = send(pulls, into)
            for outcome in outcomes.values():
                if isinstance(outcome, EmbershardError):
                    raise outcome
            # not before: a push that is on its way meanwhile, as of dense weights, would name what is not there yet
            for route, at, number in kept_routes:
                route.numbers[at] = number
            for shard, chunks in batch.items():
                reply = self._accept(shard, [reads[chunk.part][0] for chunk in chunks], outcomes[shard], places[shard])
                lowest = [] if versions is None else [versions]
                lowest += [base.read for chunk in chunks if (base := bases[chunk.part]) is not None]
                for known in lowest:
                    known[shard] = min(known.get(shard, reply.version), reply.version)
        for (table, route), rows, base in zip(reads, out, bases, strict=True):
            if base is not None and isinstance(table, str):
                self._deltas.end(table, route, rows, base)

    def _begin(self, table: TableKey, route: Route, rows: Floats, codec: CodecName | None) -> CachedPull | None:
        """Fill the places with the rows of the last pull, where only what changed since is to be pulled."""
        if not isinstance(table, str):
            return None
        if codec is not None and codec.select == DELTA:
            return self._deltas.begin(table, route, rows)
        if table in self._deltas.tables:
            self._deltas.forget(table)
        return None

    def _tables(
        self,
        shard: int,
        reads: Reads,
        chunks: list[Chunk],
        codecs: Sequence[CodecName | None],
        bases: Sequence[CachedPull | None],
        kept_routes: list[_KeptRoute] | None,
    ) -> tuple[TableIds, ...]:
        tables = []
        for chunk in chunks:
            table, route = reads[chunk.part]
            number = 0
            if kept_routes is not None and chunk.is_whole:  # a part of a route is not worth the book-keeping
                number = next(self._route_numbers)
                kept_routes.append((route, (table, shard), number))
            ids, codec = route.ids[chunk.rows], codecs[chunk.part]
            if not isinstance(table, str):
                assert isinstance(route, BundleRoute)
                counts = route.counts_of(shard, chunk.rows)
                tables.append(TableIds("", ids, number, members=table, counts=counts))
            elif codec is None:
                tables.append(TableIds(table, ids, number))
            else:
                base = bases[chunk.part]
                with span("encode"):
                    since = 0 if base is None else base.versions.get(shard, 0)
                    packed = self._compressor.packed_ids(table, ids)
                    tables.append(TableIds(table, ids, number, str(codec), since, packed))
        return tuple(tables)

    def _receivers(
        self, codecs: Sequence[CodecName | None], chunks: list[Chunk], places: Sequence[Floats]
    ) -> Sequence[Array]:
        """Memory for what comes: the rows' own places, or that of their payloads."""
        values = ["none" if (codec := codecs[chunk.part]) is None else codec.values for chunk in chunks]
        # of what changed nobody knows how much it is; where all rows come instead, they come into their places
        return [
            place if codec == "none" else np.empty(self._compressor.find(codec).nbytes(*place.shape), np.uint8)
            for codec, place in zip(values, places, strict=True)
        ]

    def _accept(self, shard: int, tables: Sequence[TableKey], reply: Outcome, places: Sequence[Floats]) -> Rows:
        """Decode or copy the rows of a reply to their places, unless they were received there."""
        if not isinstance(reply, Rows) or len(reply.tables) != len(tables):
            address = self._connections[shard].transport.address
            raise NotAShard(address=address, reason="its reply to a pull does not match the request")
        codecs = reply.codecs or ("",) * len(tables)
        for table, codec, rows, target in zip(tables, codecs, reply.tables, places, strict=True):
            if rows is target:
                continue
            if codec:
                with span("decode"), with_shard_name(self._connections[shard].name):
                    if codec == DELTA:
                        apply_delta(rows.view(np.uint8), target)
                    else:
                        self._compressor.find(codec).decode(rows.view(np.uint8), target)
                continue
            if rows.size != target.size:
                first = table if isinstance(table, str) else table[0]
                ids, dim = target.shape
                raise WrongDim(
                    shard=self._connections[shard].name,
                    table=first, what="pulled rows", got=rows.size, ids=ids, dim=dim, want=target.size,
                )  # fmt: skip
            target[...] = rows.reshape(target.shape)
        return reply
