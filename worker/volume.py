"""What travels between a worker and its shards, by direction, part and table, and what it would be without codecs.

Direction `push`: gradients to the shards; `pull`: rows from them, and the ids that ask for them; `other`: everything
else (declarations, first values, meetings, leases), and what was lost on the way or sent twice. Parts: `ids`; `rows`,
or gradients, of embedding tables; `dense`, those of dense weights; `other`: frames and heads, of replies too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Declare, Ids, Pull, Push, Reply, Request, Rows
from embershard.worker.carrier import Pending

Direction = Literal["push", "pull", "other"]
Kind = Literal["ids", "rows", "dense", "other"]

_ID_BYTES, _FLOAT_BYTES = 8, 4
_SAMPLES = 16  # messages


class Part(NamedTuple):
    """What is counted by itself; the table of frames and heads is ""."""

    direction: Direction
    kind: Kind
    table: str = ""


class Moved(NamedTuple):
    """Bytes on the wire, what they would be with float32 rows and plain ids, and in how many messages they were."""

    wire: int = 0
    raw: int = 0
    messages: int = 0

    def plus(self, other: Moved) -> Moved:
        """Both."""
        return Moved(self.wire + other.wire, self.raw + other.raw, self.messages + other.messages)

    def minus(self, other: Moved) -> Moved:
        """Without what was moved before."""
        return Moved(self.wire - other.wire, self.raw - other.raw, self.messages - other.messages)


Volumes = Mapping[Part, Moved]


class Volume:
    """Counts the calls of one client; any thread may."""

    def __init__(self) -> None:
        # the ids of the last messages that carried some packed: plain ones need no prediction, and would fill caches
        self.samples: dict[Part, deque[Ids]] = {}
        self._lock = threading.Lock()
        self._row_bytes: dict[str, int] = {}  # of declared tables
        self._dense: set[str] = set()
        self._parts: dict[Part, list[int]] = {}  # as Moved

    def count(self, request: Request, outcome: Reply | EmbershardError, pending: Pending) -> None:
        """A call that is over; one that failed, and may be made again, is left to `other`."""
        if isinstance(outcome, EmbershardError):
            return
        found: list[tuple[Part, int, int]] = []
        direction: Direction = "other"
        if isinstance(request, Pull):
            direction = "pull"
            replies = outcome.tables if isinstance(outcome, Rows) else ()
            for part, rows in zip(request.tables, replies, strict=False):
                ids = part.ids if part.packed is None else part.packed
                found.append((Part("pull", "ids", part.table), ids.nbytes, _ID_BYTES * len(part.ids)))
                raw = self._row_bytes.get(part.table, 0) * len(part.ids)
                found.append((Part("pull", self._kind(part.table), part.table), rows.nbytes, raw))
                if part.packed is not None:
                    self._keep(found[-2][0], part.ids)
        elif isinstance(request, Push):
            direction = "push"
            tables = set()
            for gradients in request.tables:
                # a second part of a table is of rows that a codec held back: without it they had been sent before
                count = 0 if gradients.table in tables else len(gradients.ids)
                tables.add(gradients.table)
                if not gradients.route:
                    ids = gradients.ids if gradients.packed is None else gradients.packed
                    found.append((Part("push", "ids", gradients.table), ids.nbytes, _ID_BYTES * count))
                    if gradients.packed is not None:
                        self._keep(found[-1][0], gradients.ids)
                raw = self._row_bytes.get(gradients.table, 0) * count
                part_of = Part("push", self._kind(gradients.table), gradients.table)
                found.append((part_of, gradients.gradients.nbytes, raw))
        elif isinstance(request, Declare):
            self._row_bytes[request.spec.name] = _FLOAT_BYTES * request.spec.dim
            if request.dense:
                self._dense.add(request.spec.name)
        rest = pending.num_bytes - sum(wire for _, wire, _ in found)
        found.append((Part(direction, "other"), rest, rest))
        with self._lock:
            for key, wire, raw in found:
                sums = self._parts.setdefault(key, [0, 0, 0])
                sums[0] += wire
                sums[1] += raw
                sums[2] += 1

    def parts(self, num_bytes: int) -> dict[Part, Moved]:
        """All parts until now; `num_bytes` were counted on the sockets, and what no call accounts for is `other`."""
        with self._lock:
            parts = {key: Moved(*sums) for key, sums in self._parts.items()}
        rest = num_bytes - sum(moved.wire for moved in parts.values())
        other = Part("other", "other")
        parts[other] = parts.get(other, Moved()).plus(Moved(rest, rest))
        return parts

    def _keep(self, part: Part, ids: Ids) -> None:
        if len(ids):
            self.samples.setdefault(part, deque(maxlen=_SAMPLES)).append(ids)

    def _kind(self, table: str) -> Kind:
        return "dense" if table in self._dense else "rows"
