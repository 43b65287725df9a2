"""Rows on their way from the shards: asked for in messages that these take, and put where they belong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np

from embershard.proto.arrays import Array, Floats
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import EmbershardError, NotAShard, WrongDim
from embershard.proto.messages import DELTA, Pull, Rows, TableIds
from embershard.proto.routing import Route
from embershard.proto.timing import span
from embershard.worker.client.chunks import Chunk, cut
from embershard.worker.client.connections import Outcome, ShardConnections, naming
from embershard.worker.client.push import Versions
from embershard.worker.compression.compressor import Compressor
from embershard.worker.compression.deltas import Base, Deltas, apply_delta
from embershard.worker.compression.settings import PLAIN

Pulls = Mapping[int, Pull]
Arrays = Sequence[Array]
_Left = tuple[Route, tuple[str, int], int]  # ids that a pull leaves with a shard: of a table, under a number
Places = Mapping[int, Arrays]


class Puller:
    """The pulls of one incarnation of a worker; any number of threads may use it."""

    def __init__(
        self,
        links: ShardConnections,
        worker: int,
        epoch: int,
        placement_epoch: int,
        limits: Sequence[int],
        compressor: Compressor,
    ) -> None:
        self._links = links
        self._compressor = compressor
        self._deltas = Deltas(len(limits))
        self._worker, self._epoch, self._placement_epoch = worker, epoch, placement_epoch
        self._limits = limits  # bytes of a message to each shard
        self._route_numbers = count(1)

    def fill(
        self,
        reads: Sequence[tuple[str, Route]],
        out: Sequence[Floats],
        ask: Callable[[Callable[[int], Pulls], Places], Mapping[int, Outcome]],
        *,
        keep: bool,
        versions: Versions | None,
        exact: bool = False,
    ) -> None:
        """Fill `out`, a message per shard at a time; with `exact` past codecs that would round.

        `ask` is given what makes the pulls, of the number of clocks that must be closed before they are answered, and
        the places of their rows.
        """
        codecs = [self._compressor.pull_codec(table) for table, _ in reads]
        if exact:
            codecs = [codec if codec.is_lossless else PLAIN for codec in codecs]
        bases = [
            self._begin(table, route, rows, codec)
            for (table, route), rows, codec in zip(reads, out, codecs, strict=True)
        ]
        queues = {shard: deque(self._messages(shard, reads, out)) for shard in range(len(self._links))}
        while batch := {shard: queue.popleft() for shard, queue in queues.items() if queue}:
            places = {shard: _places(shard, reads, pieces, out) for shard, pieces in batch.items()}
            into = {shard: self._receivers(codecs, pieces, places[shard]) for shard, pieces in batch.items()}
            left: list[_Left] = []

            def make(after: int, batch: Mapping[int, list[Chunk]] = batch, left: list[_Left] = left) -> Pulls:
                return {
                    shard: self._request(shard, reads, pieces, codecs, bases, left if keep else None, after)
                    for shard, pieces in batch.items()
                }

            outcomes = ask(make, into)
            for outcome in outcomes.values():
                if isinstance(outcome, EmbershardError):
                    raise outcome
            # not before: a push that is on its way meanwhile, as of dense weights, would name what is not there yet
            for route, at, number in left:
                route.numbers[at] = number
            for shard, pieces in batch.items():
                reply = self._accept(shard, [reads[piece.part][0] for piece in pieces], outcomes[shard], places[shard])
                lowest = [] if versions is None else [versions]
                lowest += [base.read for piece in pieces if (base := bases[piece.part]) is not None]
                for known in lowest:
                    known[shard] = min(known[shard], reply.version)
        for (table, route), rows, base in zip(reads, out, bases, strict=True):
            if base is not None:
                self._deltas.end(table, route, rows, base)

    def _begin(self, table: str, route: Route, rows: Floats, codec: CodecName) -> Base | None:
        """Put what is held of a table in place, where only what changed since is to be pulled."""
        if codec.select == DELTA:
            return self._deltas.begin(table, route, rows)
        self._deltas.forget(table)
        return None

    def _messages(self, shard: int, reads: Sequence[tuple[str, Route]], out: Sequence[Floats]) -> list[list[Chunk]]:
        counts = [int(route.splits[shard + 1] - route.splits[shard]) for _, route in reads]
        # a pull is limited by its ids on the way there and by its rows on the way back
        sizes = [max(8, 4 * rows.shape[1]) for rows in out]
        return cut([table for table, _ in reads], counts, sizes, self._limits[shard])

    def _request(
        self,
        shard: int,
        reads: Sequence[tuple[str, Route]],
        pieces: list[Chunk],
        codecs: Sequence[CodecName],
        bases: Sequence[Base | None],
        left: list[_Left] | None,
        after: int,
    ) -> Pull:
        tables = []
        for piece in pieces:
            table, route = reads[piece.part]
            part = piece.within(route, shard)
            number = 0
            if left is not None and part == route.slice_of(shard):  # one that is cut is not worth the book-keeping
                number = next(self._route_numbers)
                left.append((route, (table, shard), number))
            ids, codec = route.ids[part], codecs[piece.part]
            if codec.is_plain:
                tables.append(TableIds(table, ids, number))
            else:
                base = bases[piece.part]
                with span("encode"):
                    since = 0 if base is None else int(base.versions[shard])
                    packed = self._compressor.packed_ids(table, ids)
                    tables.append(TableIds(table, ids, number, str(codec), since, packed))
        return Pull(self._placement_epoch, tuple(tables), self._worker, self._epoch, after)

    def _receivers(self, codecs: Sequence[CodecName], pieces: list[Chunk], places: Sequence[Floats]) -> Arrays:
        """Memory for what comes: the rows' own places, or that of their payloads."""
        values = [codecs[piece.part].values for piece in pieces]
        # of what changed nobody knows how much it is; where all rows come instead, they come into their places
        return [
            place if codec == "none" else np.empty(self._compressor.find(codec).nbytes(*place.shape), np.uint8)
            for codec, place in zip(values, places, strict=True)
        ]

    def _accept(self, shard: int, tables: Sequence[str], reply: Outcome, places: Sequence[Floats]) -> Rows:
        """Decode or copy the rows of a reply to their places, unless they were received there."""
        link = self._links[shard]
        if not isinstance(reply, Rows) or len(reply.tables) != len(tables):
            raise NotAShard(address=link.transport.address, reason="its reply to a pull does not match the request")
        codecs = reply.codecs or ("",) * len(tables)
        for table, codec, rows, target in zip(tables, codecs, reply.tables, places, strict=True):
            if rows is target:
                continue
            if codec == DELTA:
                with span("decode"), naming(link.name):
                    apply_delta(rows.view(np.uint8), target)
                continue
            if codec:
                with span("decode"), naming(link.name):
                    self._compressor.find(codec).decode(rows.view(np.uint8), target)
                continue
            if rows.size != target.size:
                ids, dim = target.shape
                raise WrongDim(
                    shard=link.name,
                    table=table, what="pulled rows", got=rows.size, ids=ids, dim=dim, want=target.size,
                )  # fmt: skip
            target[...] = rows.reshape(target.shape)
        return reply


def _places(
    shard: int, reads: Sequence[tuple[str, Route]], pieces: Sequence[Chunk], out: Sequence[Floats]
) -> list[Floats]:
    """Where the rows of a shard's reply belong."""
    return [out[piece.part][piece.within(reads[piece.part][1], shard)] for piece in pieces]
