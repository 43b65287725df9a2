"""A shard's part of a snapshot: the apply thread holds the moment, and a thread of its own writes the files."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from embershard.proto.errors import (
    EmbershardError,
    InvalidRequest,
    SnapshotNotWritten,
    SnapshotReplaced,
    SnapshotRunning,
    SnapshotTooLate,
    SnapshotUnknown,
    clipped,
)
from embershard.proto.messages import Snapshot, Snapshotted
from embershard.proto.snapshot.manifest import (
    BlockFile,
    Increment,
    ShardPart,
    TableBlocks,
    WorkerWindow,
    check_name,
    pack_part,
)
from embershard.ps.security.places import AnyPlace, SnapshotPlaces
from embershard.ps.table.frozen import FrozenTable, RowBlock
from embershard.ps.table.frozen_kernels import Slots
from embershard.ps.table.table import Table

if TYPE_CHECKING:
    from embershard.proto.snapshot.storage import Storage

# A writer that has not moved for so long hangs in its storage; the next snapshot need not wait for it.
HUNG_SECONDS = 300.0
_WATCHED_SECONDS = 5.0  # after a look at one that waits for its clock, somebody still waits for it: four looks a second
_KEPT_OUTCOMES = 8  # of snapshots before the last: who takes them may still look, once other shards are done, too
SNAPSHOTS_READER = "snapshots"  # of changed rows (Table.mark)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardImage:
    """The state of a shard between two requests, frozen."""

    shard: int
    num_shards: int
    placement_epoch: int
    clock: int
    workers: tuple[WorkerWindow, ...]
    tables: tuple[Table, ...]
    control: Mapping[str, object]  # the state beside the rows, in what msgpack can say


class Snapshots:
    """Take the snapshots of a shard, one at a time, on the apply thread.

    `moment` gives the shard's state, `waiting` whether pushes that were acknowledged are not applied yet: a snapshot
    waits for these.
    """

    def __init__(
        self, moment: Callable[[], ShardImage], waiting: Callable[[], bool], places: SnapshotPlaces | None = None
    ) -> None:
        self._moment = moment
        self._places = places or AnyPlace()
        self._pushes_wait = waiting
        self.asked: Snapshot | None = None  # what waits for its moment
        self._watched_at = -_WATCHED_SECONDS  # time.monotonic() of the last look at it
        self._writer: SnapshotWriter | None = None
        self._outcomes: dict[int, Snapshotted | EmbershardError] = {}  # of writers before this one, by id
        self._failed: tuple[int, EmbershardError] | None = None  # what could not begin when its moment came
        self._last_success = 0.0  # of the writers before

    @property
    def running(self) -> bool:
        """Whether one is being written."""
        return self._writer is not None and not self._writer.ended

    @property
    def last_success(self) -> float:
        """When the last one was complete, in seconds since 1970; 0 without any."""
        return self._last_success if self._writer is None else self._writer.done_at or self._last_success

    def answer(self, request: Snapshot, clock: int) -> Snapshotted:
        """Begin, watch or cancel; `clock` is the first that is not closed."""
        check_name(request.name)
        self._places.check(request.url)
        match request.step:
            case "begin":
                return self._begin(request, clock)
            case "watch":
                return self._watch(request)
            case "cancel":
                return self._cancel(request)
        raise InvalidRequest(reason=f"a snapshot has no step {request.step[:50]!r} (known: begin, watch, cancel)")

    def clock_moved(self, clock: int) -> None:
        """Take the snapshot that waits for this clock; to be called before anything else changes the rows."""
        asked = self.asked
        if asked is None or clock < asked.at_clock or (not asked.at_clock and self._pushes_wait()):
            return
        self.asked = None
        if self._writer is not None and self.running:  # it was taken at once; whoever watches this one begins it again
            self._note_replaced(asked.id, asked.name, self._writer.name)
            return
        try:
            if asked.at_clock and clock > asked.at_clock:
                raise SnapshotTooLate(clock=asked.at_clock, now=clock)
            self._take(asked)
        except EmbershardError as error:  # for whoever watches: the request that moved the clock is another's
            self._failed = (asked.id, error)

    def _begin(self, request: Snapshot, clock: int) -> Snapshotted:
        if self._knows(request.id):  # its first reply was lost
            return self._watch(request)
        if self._writer is not None and self.running:
            if not self._writer.hangs:
                raise self._writer.running()
            self._writer.cancel()
            self._note_replaced(self._writer.id, self._writer.name, request.name)
        if request.at_clock and request.at_clock < clock:
            raise SnapshotTooLate(clock=request.at_clock, now=clock)
        if request.at_clock <= clock and not self._pushes_wait():
            self._take(request)
            return self._watch(request)
        asked = self.asked
        if asked is not None and asked.at_clock <= request.at_clock and self._is_watched:
            raise SnapshotRunning(name=asked.name, rows=0, total_rows=0)
        # nothing was done yet for the one that waits; who asks may be a worker without which that clock does not come
        if asked is not None:
            self._note_replaced(asked.id, asked.name, request.name)
        self.asked, self._watched_at = request, -_WATCHED_SECONDS
        return Snapshotted(state="waiting")

    @property
    def _is_watched(self) -> bool:
        """Whether somebody looks at the one that waits for its clock."""
        return time.monotonic() - self._watched_at < _WATCHED_SECONDS

    def _watch(self, request: Snapshot) -> Snapshotted:
        if self.asked is not None and self.asked.id == request.id:
            self._watched_at = time.monotonic()
            return Snapshotted(state="waiting")
        if self._failed is not None and self._failed[0] == request.id:
            raise clipped(self._failed[1])
        outcome = self._outcomes.get(request.id)
        if isinstance(outcome, EmbershardError):
            raise clipped(outcome)
        if outcome is not None:
            return outcome
        if self._writer is None or self._writer.id != request.id:
            raise SnapshotUnknown(what="snapshot", name=request.name)
        return self._writer.reply()

    def _cancel(self, request: Snapshot) -> Snapshotted:
        if self.asked is not None and self.asked.id == request.id:
            self.asked = None
        elif self._writer is not None and self._writer.id == request.id:
            self._writer.cancel()
            if self._writer.writes:
                return Snapshotted(state="cancelling")
        self._outcomes.pop(request.id, None)
        return Snapshotted(state="cancelled")

    def _knows(self, number: int) -> bool:
        known = [self.asked and self.asked.id, self._writer and self._writer.id, self._failed and self._failed[0]]
        return number in known or number in self._outcomes

    def _take(self, request: Snapshot) -> None:
        began = time.perf_counter()
        self._last_success = self.last_success
        before, self._writer = self._writer, SnapshotWriter(request, self._moment(), began, self._places)
        if before is not None:
            self._keep_outcome(before)

    def _keep_outcome(self, writer: SnapshotWriter) -> None:
        if writer.is_cancelled:
            return
        try:
            self._keep(writer.id, writer.reply())
        except EmbershardError as error:
            self._keep(writer.id, error)

    def _note_replaced(self, number: int, name: str, other: str) -> None:
        self._keep(number, SnapshotReplaced(name=name, other=other))

    def _keep(self, number: int, outcome: Snapshotted | EmbershardError) -> None:
        self._outcomes[number] = outcome
        if len(self._outcomes) > _KEPT_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]


class SnapshotWriter:
    """Writes one part. Made, cancelled and asked on the apply thread; SnapshotNotWritten where memory is refused."""

    def __init__(self, request: Snapshot, moment: ShardImage, began: float, places: SnapshotPlaces) -> None:
        self.id, self.name = request.id, request.name
        self._places = places
        self._request, self._moment = request, moment
        self._state = "writing"
        self.done_at = 0.0  # seconds since 1970
        self._error: EmbershardError | None = None
        self._cancelled = threading.Event()
        self._rows = self._bytes = self._files = 0
        self._moved = time.monotonic()
        self._path = self._sha256 = ""
        self._frozen: list[FrozenTable] = []
        try:
            for table in moment.tables:
                changed = table.changed_since(SNAPSHOTS_READER, request.parent) if request.parent else None
                self._frozen.append(FrozenTable(table, table.freeze(), changed))
                if request.incremental:
                    table.mark(SNAPSHOTS_READER, request.id)
            self._total = sum(rows.num_rows for _, rows, _ in self._frozen)
            self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
            self._thread.start()
        except (OSError, MemoryError) as error:
            self._thaw()
            raise _no_memory(request.name, f"no memory for copies of rows: {error}") from None
        except RuntimeError as error:
            self._thaw()
            raise _no_memory(request.name, f"no memory for a thread: {error}") from None
        self._stall_ms = 1000 * (time.perf_counter() - began)

    @property
    def ended(self) -> bool:
        """Whether its thread has nothing more to do, or was told so."""
        return self._state != "writing"

    @property
    def is_cancelled(self) -> bool:
        """Whether it was told to write no more before it was done."""
        return self._state == "cancelled"

    @property
    def writes(self) -> bool:
        """Whether its thread may still have a file open, cancelled or not."""
        return self._thread.is_alive()

    @property
    def hangs(self) -> bool:
        """Whether nothing was written for long."""
        return time.monotonic() - self._moved > HUNG_SECONDS

    def running(self) -> SnapshotRunning:
        """The error of a snapshot that has to wait for this one."""
        return SnapshotRunning(name=self._request.name, rows=self._rows, total_rows=self._total)

    def reply(self) -> Snapshotted:
        """Return the progress of the snapshot; raises the error that ended it."""
        if self._error is not None and self.ended:  # not before: who is told of it may begin another snapshot
            raise clipped(self._error)  # as another exception: it is raised more than once
        return Snapshotted(
            state=self._state,
            clock=self._moment.clock,
            rows=self._rows,
            total_rows=self._total,
            bytes=self._bytes,
            files=self._files,
            path=self._path,
            sha256=self._sha256,
            stall_ms=self._stall_ms,
        )

    def cancel(self) -> None:
        """Write no more; from here on, pushes are none of its business."""
        if not self.ended:
            self._state = "cancelled"
            self._cancelled.set()
            self._thaw()

    def _run(self) -> None:
        try:
            self._write()
        except _SnapshotCancelled:
            return
        except EmbershardError as error:
            self._error = clipped(error)  # without its traceback, which holds the tables
        except MemoryError:
            self._error = _no_memory(self._request.url, "no memory for blocks of rows")
        except Exception as error:
            _log.exception("a defect while writing snapshot %s", self._request.name)
            self._error = SnapshotNotWritten(path=self._request.url, reason=f"{type(error).__name__}: {error}")
        finally:
            self._thaw()
            # whoever looks at it later needs no row, and a restore may put other tables in place of these
            self._frozen, self._moment = [], replace(self._moment, tables=(), control={})
        if self._error is not None:
            _log.error("snapshot %s: %s", self._request.name, self._error)
        if not self._cancelled.is_set():
            self.done_at = time.time() if self._error is None else 0.0
            self._state = "failed" if self._error is not None else "done"

    def _thaw(self) -> None:
        for table, rows, _ in self._frozen:
            table.thaw(rows)

    def _write(self) -> None:
        moment, name = self._moment, self._request.name
        storage = self._places.open(self._request.url, name)
        folder = f"shard-{moment.shard}-{self.id:016x}"
        try:
            self._write_part(storage, folder)
        except BaseException:
            with suppress(EmbershardError):  # what counts is the error above; on a full disk others want the room
                storage.remove(f"{name}/{folder}")
            storage.remove_if_empty(name)
            raise

    def _write_part(self, storage: Storage, folder: str) -> None:
        moment, name = self._moment, self._request.name
        storage.make_folder(f"{name}/{folder}")
        changed = self._changed_slots()
        tables = tuple(
            self._write_table(storage, f"{folder}/{number}", frozen, slots)
            for number, (frozen, slots) in enumerate(zip(self._frozen, changed, strict=True))
        )
        place = moment.shard, moment.num_shards, moment.placement_epoch, moment.clock
        part = pack_part(ShardPart(*place, moment.workers, tables, moment.control))
        path = f"{folder}/part.msgpack"
        storage.replace(f"{name}/{path}", part)
        self._path, self._sha256 = path, hashlib.sha256(part).hexdigest()

    def _changed_slots(self) -> list[Slots | None]:
        """Find the slots of each table that an increment contains; None where it contains all rows."""
        slots = [None if changed is None else rows.slots(changed) for _, rows, changed in self._frozen]
        full = less = 0
        for frozen, some in zip(self._frozen, slots, strict=True):
            full += frozen.row_bytes * frozen.rows.num_rows
            less += frozen.row_bytes * (frozen.rows.num_rows if some is None else len(some))
        return slots if less <= self._request.max_share * full else [None] * len(slots)

    def _write_table(
        self, storage: Storage, prefix: str, frozen: FrozenTable, changed_slots: Slots | None
    ) -> TableBlocks:
        from embershard.proto.snapshot.blocks import rows_per_file

        table, rows, changed = frozen
        # an increment's rows are far apart: in the order of their slots they are read in half the time
        slots = rows.by_bucket()[0] if changed_slots is None else changed_slots
        self._total -= rows.num_rows - len(slots)  # of an increment, those that are not in it
        step = rows_per_file(rows.dim, rows.num_state)
        block = rows.block(min(step, len(slots)))
        files = []
        for number, first in enumerate(range(0, len(slots), step)):
            found = rows.read(slots[first : first + step], block)
            low, high = rows.bucket_range(found.ids)
            path = f"{prefix}-{number}.safetensors"
            about = {"table": table.spec.name, "first_bucket": str(low), "last_bucket": str(high)}
            size, digest = self._write_file(storage, path, found, about)
            files.append(BlockFile(path, size, digest, len(found.ids), low, high))
        table.thaw(rows)
        blocks = TableBlocks(table.spec, rows.num_state, len(slots), tuple(files))
        if changed is None or changed_slots is None:
            return blocks
        return replace(blocks, increment=Increment(rows.num_rows, changed.removed_ids()))

    def _write_file(self, storage: Storage, path: str, block: RowBlock, about: dict[str, str]) -> tuple[int, str]:
        """Bytes and sha256 of a file of these rows."""
        from embershard.proto.snapshot.blocks import block_header

        self._go_on()
        arrays: dict[str, npt.NDArray[np.generic]] = dict(block._asdict())
        pieces: list[bytes | memoryview] = [block_header(arrays, about), *map(_bytes_of, arrays.values())]
        digest, size = hashlib.sha256(), 0
        with storage.create(f"{self._request.name}/{path}") as file:
            for piece in pieces:
                self._go_on()
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                self._bytes += len(piece)
        self._rows += len(block.ids)
        self._files += 1
        return size, digest.hexdigest()

    def _go_on(self) -> None:
        self._moved = time.monotonic()
        if self._cancelled.is_set():
            raise _SnapshotCancelled


class _SnapshotCancelled(EmbershardError):
    """The snapshot was cancelled; never leaves its thread."""

    template = "cancelled"


def _no_memory(path: str, reason: str) -> SnapshotNotWritten:
    return SnapshotNotWritten(path=path, reason=reason, remedy=SnapshotNotWritten.of_memory)


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
