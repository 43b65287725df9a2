"""Count the bytes between a worker and its shards by direction, part and table, and their size without codecs.

Direction `push`: gradients to the shards; `pull`: rows from them, and the ids that ask for them; `other`: everything
else (declarations, first values, rendezvous, leases), and what was lost on the way or sent twice. Parts: `ids`; `rows`,
or gradients, of embedding tables; `dense`, those of dense weights; `residual`: rows of an error-feedback residual that
were sent whole in the end, with their ids; `other`: frames and heads, of replies too.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from embershard.proto.arrays import Array, Bytes, Ids
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Declare, Pull, Push, Reply, Request, Rows, TableGradients, TableIds
from embershard.proto.transport.transport import PendingReply

Direction = Literal["push", "pull", "other"]
Kind = Literal["ids", "rows", "dense", "residual", "other"]

_ID_BYTES, _FLOAT_BYTES = 8, 4
_SAMPLES = 16  # messages
_MOST_BUNDLES = 64  # that are counted as such: their members may be others at each step
_CODED: tuple[Direction, ...] = ("pull", "push")
_OTHER: Direction = "other"


class BytePart(NamedTuple):
    """A part of the traffic that is counted by itself; the table of frames and heads is ""."""

    direction: Direction
    kind: Kind
    table: str = ""


class ByteCount(NamedTuple):
    """Bytes on the wire, what they would be with float32 rows and plain ids, and in how many messages they were.

    Without a codec, `residual` rows would have gone before: they take no raw bytes, and are counted.
    """

    wire: int = 0
    raw: int = 0
    messages: int = 0
    residual: int = 0

    def plus(self, other: ByteCount) -> ByteCount:
        """Return the sum of both counts."""
        return ByteCount(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: ByteCount) -> ByteCount:
        """Return the difference of both counts."""
        return ByteCount(*(mine - its for mine, its in zip(self, other, strict=True)))


ByteCounts = Mapping[BytePart, ByteCount]


class _Sum:
    """A ByteCount that grows with each message."""

    __slots__ = ("messages", "raw", "residual", "wire")

    def __init__(self) -> None:
        self.wire = self.raw = self.messages = self.residual = 0

    def add(self, wire: int, raw: int, residual: int = 0) -> int:
        """One message more; its bytes on the wire."""
        self.wire += wire
        self.raw += raw
        self.messages += 1
        self.residual += residual
        return wire


class _TableBytes:
    """The sums of one table, found once per message: a training step waits while it is counted."""

    __slots__ = ("kind", "packed", "residual", "row_bytes", "sums")

    def __init__(self) -> None:
        self.kind: Kind = "rows"
        self.row_bytes = 0  # of a plain row; 0 for a table that this client never declared
        self.sums = {both: _Sum() for both in product(_CODED, ("ids", "values"))}
        self.residual = _Sum()
        # the ids of the last messages that carried some packed: plain ones need no prediction, and would fill caches
        self.packed: dict[str, deque[Ids]] = {way: deque(maxlen=_SAMPLES) for way in (*_CODED, "residual")}

    def add_ids(self, direction: Direction, ids: Ids, packed: Bytes | None, rows: int) -> int:
        """Ids that travelled, and in which form, for so many rows; their bytes."""
        if packed is not None and len(ids):
            self.packed[direction].append(ids)
        return self.sums[direction, "ids"].add((ids if packed is None else packed).nbytes, _ID_BYTES * rows)

    def add_values(self, direction: Direction, values: Array, rows: int) -> int:
        """Rows or gradients, whatever form they travelled in; their bytes."""
        return self.sums[direction, "values"].add(values.nbytes, self.row_bytes * rows)

    def add_residual(self, part: TableGradients) -> int:
        """Rows of a residual; the bytes of them and their ids."""
        if part.packed is not None:
            self.packed["residual"].append(part.ids)
        packed = part.ids if part.packed is None else part.packed
        return self.residual.add(part.gradients.nbytes + packed.nbytes, 0, len(part.ids))

    def add_bundled(self, direction: Direction, ids: Sequence[int], rows: Sequence[int]) -> None:
        """Count what bundles moved of this table: (messages, ids) of those with ids of it, and (messages, rows)."""
        for what, size, (messages, count) in (("ids", _ID_BYTES, ids), ("values", self.row_bytes, rows)):
            its = self.sums[direction, what]
            its.wire += size * count
            its.raw += size * count
            its.messages += messages

    def parts(self, name: str) -> Iterator[tuple[BytePart, _Sum]]:
        """Every sum with its name."""
        yield BytePart("push", "residual", name), self.residual
        for direction in _CODED:
            yield BytePart(direction, "ids", name), self.sums[direction, "ids"]
            yield BytePart(direction, self.kind, name), self.sums[direction, "values"]


class _Bundled:
    """What travelled of the tables of a bundle in one direction: of each, messages and ids or rows in them."""

    __slots__ = ("ids", "rows")

    def __init__(self, members: int) -> None:
        self.ids, self.rows = np.zeros((2, members), np.int64), np.zeros((2, members), np.int64)

    def add(self, counts: tuple[int, ...], *, with_ids: bool) -> None:
        """Count a message that moved `counts` rows of each member, and, with `with_ids`, as many ids."""
        moved = np.array(counts, np.int64)
        moved = np.stack((moved > 0, moved))
        self.rows += moved
        if with_ids:
            self.ids += moved


class ByteCounter:
    """Counts the calls of one client; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bundled: dict[tuple[Direction, tuple[str, ...]], _Bundled] = {}  # by their members
        self._tables: defaultdict[str, _TableBytes] = defaultdict(_TableBytes)
        self._rest: defaultdict[Direction, _Sum] = defaultdict(_Sum)

    def count(self, request: Request, outcome: Reply | EmbershardError, pending: PendingReply) -> None:
        """A call that is over; one that failed, and may be made again, is left to `other`."""
        if isinstance(outcome, EmbershardError):
            return
        direction, counted = _OTHER, 0
        with self._lock:
            if isinstance(request, Pull):
                direction, counted = "pull", self._pulled(request, outcome)
            elif isinstance(request, Push):
                direction, counted = "push", self._pushed(request)
            elif isinstance(request, Declare):
                table = self._tables[request.spec.name]
                table.row_bytes = _FLOAT_BYTES * request.spec.dim
                table.kind = "dense" if request.dense else table.kind
            rest = pending.num_bytes - counted
            self._rest[direction].add(rest, rest)

    def parts(self, num_bytes: int) -> dict[BytePart, ByteCount]:
        """All parts until now; `num_bytes` were counted on the sockets, and what no call accounts for is `other`."""
        with self._lock:
            self._divide_bundles()
            sums = [found for name, table in self._tables.items() for found in table.parts(name)]
            sums += [(BytePart(direction, "other"), rest) for direction, rest in self._rest.items()]
            parts = {
                part: ByteCount(found.wire, found.raw, found.messages, found.residual)
                for part, found in sums
                if found.messages
            }
        rest = num_bytes - sum(moved.wire for moved in parts.values())
        other = BytePart("other", "other")
        parts[other] = parts.get(other, ByteCount()).plus(ByteCount(rest, rest))
        return parts

    def packed(self, part: BytePart) -> Sequence[Ids]:
        """The ids of the last messages that carried some of this part packed."""
        with self._lock:
            table, way = self._tables.get(part.table), "residual" if part.kind == "residual" else part.direction
            return () if table is None else tuple(table.packed[way])

    def _divide_bundles(self) -> None:
        """Count what travelled in bundles by table."""
        for (direction, members), bundled in self._bundled.items():
            for number, name in enumerate(members):
                ids, rows = bundled.ids[:, number].tolist(), bundled.rows[:, number].tolist()
                self._tables[name].add_bundled(direction, ids, rows)
        self._bundled.clear()

    def _bundle(self, direction: Direction, part: TableIds | TableGradients, values: Array, *, with_ids: bool) -> int:
        """Count the messages and rows of a bundle in a message, and return its bytes."""
        key = direction, part.members
        if key not in self._bundled:
            if len(self._bundled) >= _MOST_BUNDLES:
                self._divide_bundles()
            self._bundled[key] = _Bundled(len(part.members))
        self._bundled[key].add(part.counts, with_ids=with_ids)
        return values.nbytes + (part.ids.nbytes if with_ids else 0)

    def _pulled(self, request: Pull, outcome: Reply) -> int:
        """Bytes of ids and rows."""
        counted = 0
        replies = outcome.tables if isinstance(outcome, Rows) else ()
        for part, rows in zip(request.tables, replies, strict=False):
            if part.members:
                counted += self._bundle("pull", part, rows, with_ids=True)
                continue
            table, count = self._tables[part.table], len(part.ids)
            counted += table.add_ids("pull", part.ids, part.packed, count) + table.add_values("pull", rows, count)
        return counted

    def _pushed(self, request: Push) -> int:
        """Bytes of ids and gradients."""
        counted = 0
        for part in request.tables:
            if part.members:
                counted += self._bundle("push", part, part.gradients, with_ids=not part.route)
                continue
            table = self._tables[part.table]
            if part.is_residual:
                counted += table.add_residual(part)
                continue
            counted += table.add_values("push", part.gradients, len(part.ids))
            if not part.route:
                counted += table.add_ids("push", part.ids, part.packed, len(part.ids))
        return counted
