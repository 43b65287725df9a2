"""Read the rows of a pull in the form that was wanted: float32, by a values codec, or the changes since a version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.payload import encode_elements
from embershard.proto.codec.values.registry import BUILTIN, ValuesCodec
from embershard.proto.errors import MessageTooLarge
from embershard.proto.messages import DELTA
from embershard.ps.table.changes import ChangeTracker
from embershard.ps.table.table import Table


class Stopwatch:
    """Adds up the time of every `with stopwatch:` in `seconds`; its owner resets it. For one thread, not reentrant."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._start


PLAIN = BUILTIN["none"]
# How much smaller than its rows a reply counts at most: a user-defined codec may say that millions take no bytes, and
# all of them are gathered first. int8 makes rows 3.9 times smaller.
_MOST = 8
_ENTRY_BYTES = 16  # what protobuf adds to one table's rows, at most


class CheckedRead(NamedTuple):
    """Rows of one table, checked."""

    table: Table
    ids: Ids  # (U,)
    codec: ValuesCodec
    since: int | None = None  # the version of what the worker holds, of which it wants what changed

    @property
    def nbytes(self) -> int:
        """Bytes that its rows take in the reply, or what a limit should count for them."""
        count, dim = len(self.ids), self.table.spec.dim
        if self.codec is PLAIN:
            return 4 * count * dim
        return max(self.codec.nbytes(count, dim), 4 * count * dim // _MOST)

    def rows(self, version: Callable[[], int], coding: Stopwatch) -> tuple[Floats | Bytes, str]:
        """(U, dim) float32 and "", or a payload (N,) uint8 and the codec that reads it.

        version: the updates that the shard has applied. coding: runs while they are encoded.
        """
        rows = self.table.gather(self.ids)
        if self.since is not None:
            with coding:
                payload = self._changed(rows, self.since, version)
            return (rows, "") if payload is None else (payload, DELTA)
        if self.codec is PLAIN:
            return rows, ""
        with coding:
            payload = np.empty(self.codec.nbytes(*rows.shape), np.uint8)
            self.codec.encode(rows, payload, None)
        return payload, self.codec.name

    def _changed(self, rows: Floats, since: int, version: Callable[[], int]) -> Bytes | None:
        """The elements that changed since; None where it is not known, or no less than all rows."""
        changes = self.table.changes
        if changes is None:
            changes = self.table.changes = ChangeTracker(self.table.spec.dim, version)
        watched = changes.watch(self.ids, self.table.budget.left)
        self.table.charge()
        if not watched or since == 0:
            return None
        positions = changes.since(self.ids, since)
        if positions is None or 10 * positions.size > 9 * rows.size:  # a bitmap of the others is all that it saves
            return None
        return encode_elements(positions, rows.reshape(-1)[positions], rows.shape, PLAIN, None)


def read_all(
    reads: Sequence[CheckedRead], version: Callable[[], int], coding: Stopwatch, limit: int
) -> tuple[tuple[Floats | Bytes, ...], tuple[str, ...]]:
    """Read the rows of every table for a Rows reply, and their codecs, () where they have none.

    MessageTooLarge, before memory is taken, where they are over `limit` bytes: ids are small, their rows are not.
    """
    nbytes = sum(_ENTRY_BYTES + read.nbytes for read in reads)
    if nbytes > limit:
        raise MessageTooLarge(got=nbytes, limit=limit)
    found = [read.rows(version, coding) for read in reads]
    codecs = tuple(codec for _, codec in found)
    return tuple(rows for rows, _ in found), codecs if any(codecs) else ()
