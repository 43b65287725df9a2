"""Reads and gradients that were checked: of a table, or of a bundle of tables in one kernel call.

Rows are read in the form that was wanted: float32, by a values codec, or the changes since a version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.payload import encode_elements
from embershard.proto.codec.values.registry import BUILTIN, ValuesCodec
from embershard.proto.errors import MessageTooLarge
from embershard.proto.messages import DELTA
from embershard.ps.table import kernels
from embershard.ps.table.changes import ChangeTracker
from embershard.ps.table.table import Applied, Table


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


Words = npt.NDArray[np.uint64]

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
    into: Floats | None = None  # see TableIds

    @property
    def nbytes(self) -> int:
        """Bytes that its rows take in the reply, or what a limit should count for them."""
        count, dim = len(self.ids), self.table.spec.dim
        if self.codec is PLAIN:
            return 4 * count * dim
        return max(self.codec.nbytes(count, dim), 4 * count * dim // _MOST)

    def count_pulled(self) -> int:
        """Count its rows as pulled; how many they are."""
        self.table.pulled_rows += len(self.ids)
        return len(self.ids)

    def rows(self, version: Callable[[], int], coding: Stopwatch) -> tuple[Floats | Bytes, str]:
        """(U, dim) float32 and "", or a payload (N,) uint8 and the codec that reads it.

        version: the updates that the shard has applied. coding: runs while they are encoded.
        """
        if self.since is None and self.codec is PLAIN:
            out = _rows_in(self.into, len(self.ids), self.table.spec.dim)
            self.table.gather(self.ids, out)
            return out, ""
        rows = self.table.gather(self.ids)
        if self.since is not None:
            with coding:
                payload = self._changed(rows, self.since, version)
            return (rows, "") if payload is None else (payload, DELTA)
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


def _rows_in(into: Floats | None, count: int, dim: int) -> Floats:
    """Memory for (count, dim) rows: what their reader has given for them, if it fits."""
    if into is None or into.size != count * dim:
        return np.empty((count, dim), np.float32)
    return into.reshape(count, dim)


class Members(NamedTuple):
    """The tables of a bundle, of one dim, and what kernels and checks want to know of each."""

    tables: tuple[Table, ...]  # different ones
    addresses: Ids  # (T,), see kernels.gather
    space_keys: Words  # (T,)
    most_growth: Ids  # (T,), see Table.most_growth
    may_raise: bool  # whether a row function may

    @staticmethod
    def of(tables: Sequence[Table]) -> Members:
        """These tables as a bundle."""
        keys = np.array([table.spec.space_key for table in tables], np.uint64)
        return Members(
            tuple(tables),
            np.concatenate([table.addresses for table in tables]),
            keys,
            np.array([table.most_growth for table in tables]),
            any(table.may_raise for table in tables),
        )

    @property
    def dim(self) -> int:
        """The dim of all of its tables."""
        return self.tables[0].spec.dim


class BundleRead(NamedTuple):
    """Rows of the tables of a bundle, checked."""

    members: Members
    counts: tuple[int, ...]  # ids of each table
    ends: Ids  # (T,) of each table's in `ids`
    ids: Ids  # (U,)
    into: Floats | None = None  # see TableIds

    @property
    def nbytes(self) -> int:
        """Bytes that its rows take in the reply."""
        return 4 * len(self.ids) * self.members.dim

    def count_pulled(self) -> int:
        """Count its rows as pulled; how many they are."""
        for table, count in zip(self.members.tables, self.counts, strict=True):
            table.pulled_rows += count
        return len(self.ids)

    def rows(self, version: Callable[[], int], coding: Stopwatch) -> tuple[Floats | Bytes, str]:
        """(U, dim) float32 and ""."""
        out = _rows_in(self.into, len(self.ids), self.members.dim)
        kernels.gather(self.members.addresses, self.ends, self.ids, out)
        return out, ""


class CheckedGradients(NamedTuple):
    """Gradients of rows of one table, checked."""

    table: Table
    ids: Ids  # (U,)
    gradients: Floats  # (U, dim)
    lr_scale: float
    ages: Floats | None = None  # (U,) pushes that each row is the sum of; None: one
    copy: Floats | None = None  # (U, dim), see TableGradients

    @property
    def nbytes(self) -> int:
        """The bytes of all of its arrays."""
        return self.ids.nbytes + self.gradients.nbytes + (0 if self.ages is None else self.ages.nbytes)

    @property
    def may_raise(self) -> bool:
        """Whether a row function may."""
        return self.table.may_raise


class CheckedBundle(NamedTuple):
    """Gradients of rows of the tables of a bundle, checked."""

    members: Members
    counts: tuple[int, ...]  # ids of each table
    ends: Ids  # (T,) of each table's in `ids`
    ids: Ids  # (U,)
    gradients: Floats  # (U, dim)
    lr_scale: float
    copy: Floats | None = None  # (U, dim), see TableGradients

    @property
    def nbytes(self) -> int:
        """The bytes of all of its arrays."""
        return self.ids.nbytes + self.gradients.nbytes

    @property
    def may_raise(self) -> bool:
        """Whether a row function may."""
        return self.members.may_raise

    def split(self) -> list[CheckedGradients]:
        """Gradients of one table each, in views of these arrays."""
        bounds = pairwise([0, *self.ends.tolist()])
        ids, gradients, copy = self.ids, self.gradients, self.copy
        return [
            CheckedGradients(table, ids[a:b], gradients[a:b], self.lr_scale, copy=None if copy is None else copy[a:b])
            for table, (a, b) in zip(self.members.tables, bounds, strict=True)
        ]

    def sizes(self) -> Iterator[tuple[Table, int]]:
        """Every table, and the number of its ids."""
        return zip(self.members.tables, self.counts, strict=True)

    def most_growth(self) -> int:
        """Bytes that its rows take at most, if all of them are new."""
        return int(np.diff(self.ends, prepend=0) @ self.members.most_growth)

    def reserve(self) -> None:
        """Have room for its rows; see Table.reserve_for."""
        short = np.empty(len(self.counts), np.bool_)
        kernels.find_short(self.members.addresses, self.ends, short)
        for number in np.flatnonzero(short):
            end = self.ends[number]
            self.members.tables[number].reserve_for(self.ids[end - self.counts[number] : end])

    def takes_one_call(self) -> bool:
        """Whether one kernel call may apply all of it.

        Not where somebody wants rows as they were, or where a row function may raise and the push be undone.
        """
        return not self.members.may_raise and not any([table.is_watched for table in self.members.tables])

    def apply(self, divisor: float = 1.0, *, count: bool = True) -> Applied:
        """Apply the gradients, at the learning rate over `divisor`, in one kernel call: where `takes_one_call` says so.

        The tables `count` the rows.
        """
        self.reserve()  # as it is now: other parts of the push may have made rows
        skipped, created = np.zeros((2, len(self.counts)), np.int64)
        pushed = kernels.pushed(self.gradients, self.copy)
        rate = self.lr_scale / divisor
        end = kernels.apply(self.members.addresses, self.ends, self.ids, pushed, rate, (skipped, created))
        assert end == kernels.DONE, "the index of a table of a bundle is full"
        tables = self.members.tables
        for number in np.flatnonzero(created):
            tables[number].charge()
        if count:
            for table, rows in zip(tables, self.counts, strict=True):
                table.pushed_rows += rows
            for number in np.flatnonzero(skipped):
                tables[number].pushed_rows -= int(skipped[number])
                tables[number].skipped_rows += int(skipped[number])
        total = int(skipped.sum())
        return Applied(len(self.ids) - total, total)


Checked = CheckedGradients | CheckedBundle


def own_gradients(part: Checked) -> Floats:
    """The gradients, copied now where there is memory for a copy."""
    if part.copy is None:
        return part.gradients
    part.copy[...] = part.gradients
    return part.copy


def read_all(
    reads: Sequence[CheckedRead | BundleRead], version: Callable[[], int], coding: Stopwatch, limit: int
) -> tuple[tuple[Floats | Bytes, ...], tuple[str, ...]]:
    """Read the rows of every table for a Rows reply, and their codecs, () where they have none.

    MessageTooLarge, before memory is taken, where they are over `limit` bytes: ids are small, their rows are not.
    """
    nbytes = sum([_ENTRY_BYTES + read.nbytes for read in reads])
    if nbytes > limit:
        raise MessageTooLarge(got=nbytes, limit=limit)
    found = [read.rows(version, coding) for read in reads]
    codecs = tuple([codec for _, codec in found])
    return tuple([rows for rows, _ in found]), codecs if any(codecs) else ()
