"""What each table's two directions use now, and the parts of messages that are made so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from embershard.proto.codec.choice import Codec
from embershard.proto.codec.ids import encode_ids
from embershard.proto.codec.payload import encode_rows
from embershard.proto.codec.values import ValuesCodec, find_values
from embershard.proto.messages import PACKED, Bytes, Floats, Ids, TableGradients
from embershard.proto.routing import mix64
from embershard.proto.spec import TableSpec
from embershard.worker.compression.settings import PLAIN, Compression, Directions, check_momentum
from embershard.worker.spans import span

_SHARD_BITS = 12  # a placement has 4096 shards at most


@dataclass(slots=True)
class _Table:
    """One table, as it travels."""

    spec: TableSpec
    dense: bool
    directions: Directions
    pushes: int = 0  # goes into the keys of random numbers


class Compressor:
    """How the tables of one client travel, from one push or pull to the next.

    `find` gives the values codecs of this process. Pushes are packed by one thread at a time; the rest may be called
    from any.
    """

    def __init__(self, worker: int = 0, find: Callable[[str], ValuesCodec] = find_values) -> None:
        self.settings = Compression()
        self.find = find
        self._worker = worker
        self._tables: dict[str, _Table] = {}
        self._lock = threading.Lock()  # of what a table uses, for one push

    def add(self, spec: TableSpec, *, dense: bool) -> None:
        """Have a table travel as the settings say. ValueError where that cannot be."""
        if spec.name not in self._tables:
            directions = self.settings.of(spec.name, dense)
            check_momentum(spec, directions.push, self.settings.momentum)
            self._tables[spec.name] = _Table(spec, dense, directions)

    def check(self, table: str, push: Codec | None = None, pull: Codec | None = None) -> Directions:
        """How a table would travel, so changed (None: as now). ValueError where it cannot."""
        entry = self._tables[table]
        before = entry.directions
        after = Directions(before.push if push is None else push, before.pull if pull is None else pull)
        after.push.check("push", entry.dense)
        after.pull.check("pull", entry.dense)
        check_momentum(entry.spec, after.push, self.settings.momentum)
        return after

    def choose(self, table: str, push: Codec | None = None, pull: Codec | None = None) -> None:
        """Have a table travel so from its next push and pull on. ValueError, and no change, where that cannot be."""
        self._tables[table].directions = self.check(table, push, pull)

    def directions(self) -> dict[str, Directions]:
        """What every table uses now."""
        return {name: table.directions for name, table in self._tables.items()}

    def is_dense(self, table: str) -> bool:
        """Whether a table holds dense weights."""
        return self._tables[table].dense

    def pull_codec(self, table: str) -> Codec:
        """How its rows come."""
        entry = self._tables.get(table)
        return PLAIN if entry is None else entry.directions.pull

    def packs(self, table: str) -> bool:
        """Whether its pushes travel as payloads."""
        entry = self._tables.get(table)
        return entry is not None and not entry.directions.push.is_plain

    def begin(self, tables: Sequence[str]) -> None:
        """A push of these tables begins."""
        for table in tables:
            self._tables[table].pushes += 1

    def pack(self, part: TableGradients, shard: int, start: int) -> list[TableGradients]:
        """What is sent for a part of a push, whose first row is that of number `start` among those of its shard."""
        entry = self._tables[part.table]
        codec, rows = entry.directions.push, cast(Floats, part.gradients)
        values = self.find(codec.values)
        with span("encode"):
            payload = encode_rows(rows, values, self._key(entry, shard, start))
            return [_packed(part, payload, codec)]

    def _key(self, entry: _Table, shard: int, start: int) -> int:
        """A key of random numbers, that of no other part of any push."""
        key = np.uint64(entry.spec.row_seed)
        for number in (self._worker, entry.pushes, start << _SHARD_BITS | shard):
            key = np.uint64(mix64(np.uint64(number), key))
        return int(key)


def packed_ids(ids: Ids) -> Bytes | None:
    """The bytes of ids that ascend; None for others, and where nothing is gained."""
    if len(ids) < 2 or not (ids[1:] > ids[:-1]).all():
        return None
    packed = encode_ids(ids)
    return packed if packed.nbytes < ids.nbytes else None


def _packed(part: TableGradients, payload: Bytes, codec: Codec) -> TableGradients:
    ids = None if part.route else packed_ids(part.ids)
    return replace(part, gradients=payload, codec=codec.values if codec.is_custom else PACKED, packed=ids)
