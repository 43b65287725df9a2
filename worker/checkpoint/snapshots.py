"""Snapshots of all shards: taken while they serve, whole once their manifest is written, restored onto any number.

docs/snapshots.md has the format and the promises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import (
    EmbershardError,
    SnapshotDamaged,
    SnapshotExists,
    SnapshotRunning,
    SnapshotScattered,
    SnapshotTimeout,
    SnapshotTooLate,
    SnapshotUnknown,
    SnapshotUnreadable,
)
from embershard.proto.messages import Restore, Restored, Snapshot, Snapshotted, replace
from embershard.proto.snapshot.manifest import (
    LATEST,
    MANIFEST,
    Manifest,
    Parent,
    ShardPart,
    check_name,
    is_parent_path,
    pack_manifest,
    unpack_manifest,
    unpack_part,
)
from embershard.proto.snapshot.storage import Storage
from embershard.proto.snapshot.stored import StoredSnapshot, open_snapshot
from embershard.proto.timing import Deadline
from embershard.proto.user_modules import version_of
from embershard.worker.client.client import Client
from embershard.worker.client.connections import Outcome, raise_first

R = TypeVar("R", Snapshotted, Restored)

MOST_INCREMENTS = 8  # of a full snapshot, and
MOST_SHARE = 0.5  # of its bytes, in all of them: then another full one is taken
WAIT_TIMEOUT = timedelta(seconds=120)  # without a row more, a snapshot or a restore times out
_CANCEL_TIMEOUT = timedelta(seconds=10)  # a storage that hangs holds nobody longer
_PAUSES = (0.005, 0.25)  # seconds between two looks at the shards: the first, and the longest
_MARGIN = 2  # clocks ahead of a synchronous job at which its snapshot is asked for; doubled where that is too late
_TRIES = 5
_log = logging.getLogger(__name__)
_PART = re.compile(r"shard-[0-9]{1,5}-[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInfo:
    """A snapshot that was taken."""

    url: str
    name: str
    clock: int  # the first one that was not closed
    rows: int
    bytes: int  # of the files written
    files: int
    seconds: float
    stall_ms: float  # for how long a shard answered nobody, at most
    parent: str = ""  # the folder of the snapshot that it is an increment of


def take_snapshot(
    client: Client,
    url: str,
    name: str = "",
    *,
    extra: Mapping[str, object] | None = None,
    at_clock: int | None = None,
    keep: int = 0,
    incremental: bool = False,
    wait_timeout: timedelta = WAIT_TIMEOUT,
) -> SnapshotInfo:
    """Take a snapshot of all shards into a folder of `url`, and wait until it is complete; see `begin_snapshot`.

    If a shard restarts meanwhile and recovers its rows from its event log, the snapshot is started again.
    """
    for left in reversed(range(_TRIES)):
        running = begin_snapshot(
            client, url, name, at_clock=at_clock, incremental=incremental, wait_timeout=wait_timeout
        )
        try:
            return running.finish(extra, keep=keep)
        except SnapshotUnknown:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def begin_snapshot(
    client: Client,
    url: str,
    name: str = "",
    *,
    at_clock: int | None = None,
    incremental: bool = False,
    parent_url: str | None = None,
    wait_timeout: timedelta = WAIT_TIMEOUT,
) -> RunningSnapshot:
    """Start a snapshot of all shards in the folder `name` (default: the time) of `url`, a folder or fsspec URL.

    With `at_clock` every shard takes the snapshot when this number of clocks is closed, so that all parts contain
    the same updates; with 0 each shard takes it at once. The default is a clock in the near future if workers train
    synchronously (called by one of these workers: the clock after its last push), and 0 otherwise. When this
    function returns, each shard has frozen its state, or waits for the clock: later pushes of this worker are not
    in the snapshot. Call `finish()` of the result to complete the snapshot.

    With `incremental` the snapshot has only the rows that changed since its parent: the latest snapshot of the
    folder, or `parent_url`, if that was taken with `incremental` too. It is useless without its parent. After eight
    increments, or if they would together take more than half of the bytes of a full snapshot, the snapshot is a
    full one. A shard that does not know which rows changed, for example after a restart, writes all of its rows.

    If the shards still write another snapshot, it is waited for; SnapshotRunning if that has not moved for a call's
    timeout. If no row is written for `wait_timeout`, SnapshotTimeout. Other errors: SnapshotExists, SnapshotNotWritten,
    SnapshotTooLate, RowsLost.
    """
    client.flush()
    client.lineage.check()  # before a half would take the place of the latest whole one
    name = check_name(name or time.strftime("%Y%m%d-%H%M%S"))
    storage = Storage(url)
    storage.make_folder(name)
    if MANIFEST in storage.sizes(name):
        raise SnapshotExists(path=storage.at(name))
    parent = _parent_for(storage, name, parent_url) if incremental else None
    margin, left, seen = _MARGIN, _TRIES, ("", -1)
    while True:
        clock = _next_common_clock(client, margin) if at_clock is None else at_clock
        running = RunningSnapshot(
            client,
            storage,
            Snapshot(
                url=storage.url,
                name=name,
                id=secrets.randbits(63) + 1,
                at_clock=clock,
                step="begin",
                incremental=incremental,
                parent=0 if parent is None else parent.id,
                max_share=0.0 if parent is None else parent.room,
            ),
            wait_timeout,
            None if parent is None else parent.named,
        )
        try:
            running.start()
            return running
        except SnapshotTooLate:
            left -= 1
            if at_clock is not None or not left:
                raise
            margin *= 2
        except SnapshotRunning as other:  # for longer than a call waits: a large one takes minutes
            before, seen = seen, (str(other.fields["name"]), int(str(other.fields["rows"])))
            if seen == before:
                raise


class RunningSnapshot:
    """A snapshot that the shards write."""

    def __init__(
        self, client: Client, storage: Storage, request: Snapshot, wait_timeout: timedelta, parent: Parent | None = None
    ) -> None:
        self._client, self._storage, self._request, self._wait_timeout = client, storage, request, wait_timeout
        self._parent = parent
        self._started = time.monotonic()

    @property
    def name(self) -> str:
        """Its name, and that of its folder."""
        return self._request.name

    def start(self) -> None:
        """Ask all shards; if one refuses, none goes on.

        The first one decides among several clients: each would have begun on some shards, and wait for the others.
        """
        shards = self._client.placement.shards
        try:
            for some in (shards[:1], shards[1:]):
                raise_first(self._client.connections.call(dict.fromkeys(some, self._request)))
        except BaseException:
            self.cancel()
            raise

    def finish(self, extra: Mapping[str, object] | None = None, *, keep: int = 0) -> SnapshotInfo:
        """Wait until all shards have written their parts, and make it the latest snapshot by writing its manifest.

        `extra`: what the caller wants to find in the manifest again; anything that msgpack can say. `keep`: if not 0,
        snapshots but the last so many are removed, and what is left of unfinished ones.
        """
        try:
            return self._finish(extra or {}, keep)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give it up on all shards, and remove what they wrote: a full disk needs the room."""
        with suppress(EmbershardError):
            self._wait_for_writers(Deadline(_CANCEL_TIMEOUT))
        with suppress(EmbershardError):
            entries = self._storage.sizes(self.name)
            if MANIFEST not in entries:
                _remove(
                    self._storage, self.name, [part for part in entries if part.endswith(f"-{self._request.id:016x}")]
                )

    def _wait_for_writers(self, deadline: Deadline) -> None:
        """Cancel until no shard has a file open: what is removed under a writer would come back."""
        pause, longest = _PAUSES
        request = replace(self._request, step="cancel")
        waited_for = list(self._client.placement.shards)
        while deadline.seconds > 0:
            # one that is lost holds nobody up
            outcomes = self._client.connections.call(
                dict.fromkeys(waited_for, request), timeout=deadline.remaining, awaits_recovery=False
            )
            waited_for = [
                shard
                for shard, reply in outcomes.items()
                if isinstance(reply, Snapshotted) and reply.state == "cancelling"
            ]
            if not waited_for:
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _finish(self, extra: Mapping[str, object], keep: int) -> SnapshotInfo:
        watch = replace(self._request, step="watch")
        replies = _await(self._client, watch, Snapshotted, "done", self._wait_timeout)
        shards = self._client.placement.shards
        parts = tuple(self._part(shard, reply) for shard, reply in zip(shards, replies, strict=True))
        is_increment = any(table.increment for part in parts for table in part.tables)
        parent = self._parent if is_increment else None
        number = self._request.id if self._request.incremental else 0
        manifest = Manifest(self.name, time.time(), version_of(), parts, extra, number, parent)
        data = pack_manifest(manifest)
        chain = StoredSnapshot(self._storage, self.name, manifest, "").chain  # somebody may have removed its parent
        self._storage.replace(f"{self.name}/{MANIFEST}", data)
        self._storage.replace(LATEST, f"{self.name}\n".encode())
        if keep:
            _prune(self._storage, keep, self.name)
        return SnapshotInfo(
            url=self._storage.url,
            name=self.name,
            clock=manifest.clock,
            rows=manifest.rows,
            bytes=manifest.bytes,
            files=sum(reply.files for reply in replies),
            seconds=time.monotonic() - self._started,
            stall_ms=max(reply.stall_ms for reply in replies),
            parent=chain[1].url if len(chain) > 1 else "",
        )

    def _part(self, shard: int, reply: Snapshotted) -> ShardPart:
        """Read and check the part that a shard says it has written."""
        path = f"{self.name}/{reply.path}"
        where = self._storage.at(path)
        try:
            data = self._storage.read(path)
        except FileNotFoundError:
            raise SnapshotScattered(index=shard, path=where, reason="no such file") from None
        if hashlib.sha256(data).hexdigest() != reply.sha256:
            raise SnapshotDamaged(path=where, reason="its sha256 is not what the shard said")
        part = unpack_part(data, where)
        sizes = self._storage.sizes(posixpath.dirname(path))
        for file in (file for table in part.tables for file in table.files):
            size = sizes.get(posixpath.basename(file.path))
            if size != file.bytes:
                reason = f"{size} bytes of {file.bytes}"
                raise SnapshotScattered(index=shard, path=self._storage.at(f"{self.name}/{file.path}"), reason=reason)
        if part.shard != shard or sum(table.rows for table in part.tables) != reply.total_rows:
            raise SnapshotDamaged(path=where, reason=f"it is not what shard {shard} said that it writes")
        return part


def restore_snapshot(
    client: Client, url: str, name: str = "", *, replace_tables: bool = False, wait_timeout: timedelta = WAIT_TIMEOUT
) -> Manifest:
    """Restore the rows and optimizer states of a snapshot onto all shards; the number of shards may differ.

    The shards must be empty, unless `replace_tables` is true, which drops their tables. Nothing is changed unless
    every shard has read its part. Raises the errors of `open_snapshot`, TablesInTheWay, OtherOptimizer, and
    RestoreRunning if another client restores these shards.
    """
    manifest = restore_rows(client, url, name, replace_tables=replace_tables, wait_timeout=wait_timeout)
    for table in manifest.tables.values():  # how they travelled is no part of them, and may not serve this client
        client.declare(dataclasses.replace(table.spec, push_codec=CodecName(), pull_codec=CodecName()))
    return manifest


def restore_rows(
    client: Client, url: str, name: str = "", *, replace_tables: bool = False, wait_timeout: timedelta = WAIT_TIMEOUT
) -> Manifest:
    """Restore as `restore_snapshot` does, for a client that has declared its tables and trained them."""
    stored = open_snapshot(url, name)
    manifest = stored.manifest
    request = Restore(url=stored.storage.url, name=stored.folder, sha256=stored.sha256, replace=replace_tables)

    def check(rows: int) -> None:
        if rows != manifest.rows:
            reason = f"the shards found {rows} rows in its files, it says {manifest.rows}"
            raise SnapshotDamaged(path=stored.storage.at(stored.folder), reason=reason)

    _restore(client, request, check, wait_timeout)
    return manifest


def drop_tables(client: Client) -> None:
    """Drop the tables of all shards, as if these had just been started; what they hold is lost."""
    _restore(client, Restore(replace=True), lambda rows: None, WAIT_TIMEOUT)


def _restore(client: Client, request: Restore, check: Callable[[int], None], wait_timeout: timedelta) -> None:
    """Have all shards read what is theirs, `check` the rows that they found, and put it in place.

    All of it again where a shard is started anew meanwhile, and knows nothing of it.
    """
    for left in reversed(range(_TRIES)):
        request = replace(request, id=secrets.randbits(64), step="begin")
        try:
            with suppress(EmbershardError):  # the rows that they were for are about to go
                client.flush()  # which may take long: what shards have read by then, they would drop
            # the first shard decides among several clients, of which each would have begun on some shards
            raise_first(client.connections.call(dict.fromkeys(client.connections.shards[:1], request)))
            _ask(client, request)
            watch = replace(request, step="watch")
            check(sum(reply.rows for reply in _await(client, watch, Restored, "ready", wait_timeout)))
            client.connections.kept.forget()  # a shard that is started again behind this would be sent them
            client.connections.restoring.add(request.id)
            install = replace(request, step="install")
            request = replace(request, replace=True)  # from here on, tables that are in the way are of this restore
            _ask(client, install)
            _await(client, watch, Restored, "installed", wait_timeout)
            client.empty_waiting_pushes()
            client.lineage.check()  # the shards have another one now
            client.connections.restoring.clear()
        except BaseException as error:
            if isinstance(error, EmbershardError) or request.id not in client.connections.restoring:
                cancel = dict.fromkeys(client.placement.shards, replace(request, step="cancel"))
                client.connections.call(cancel, timeout=_CANCEL_TIMEOUT, awaits_recovery=False)
            # else a Ctrl-C, after which the shards put the rows in place without us: some of them may have done it
            if not left or not isinstance(error, SnapshotUnknown):
                client.connections.restoring.clear()
                raise
        else:
            client.restored()
            return


def _ask(client: Client, request: Snapshot | Restore) -> list[Outcome]:
    """The replies of all shards. While one has no room for its event log, the others see that somebody still asks."""
    shards = client.connections.shards
    outcomes = client.connections.call(dict.fromkeys(shards, request), asks_all_again=True)
    raise_first(outcomes)
    return [outcomes[shard] for shard in shards]


def _await(client: Client, watch: Snapshot | Restore, kind: type[R], state: str, wait_timeout: timedelta) -> list[R]:
    """Ask until all shards are in a state; SnapshotTimeout once nothing has moved for as long as `wait_timeout`.

    While a shard has no room for its event log, or recovers its rows, no clock can close: that is waited for as every
    call waits for it.
    """
    pause, longest = _PAUSES
    moved, deadline = None, Deadline(wait_timeout)
    room = Deadline(client.connections.recovery_timeout)
    while True:
        asked = Deadline(client.timeout)
        replies = [reply for reply in _ask(client, watch) if isinstance(reply, kind)]
        if all(reply.state == state for reply in replies):
            return replies
        now = [(reply.state, reply.bytes) for reply in replies]
        held_up = asked.seconds <= 0 or (room.seconds > 0 and _waits_for_room(client, replies))
        moves = now != moved
        if moves or held_up:
            moved, deadline = now, Deadline(wait_timeout)
        elif deadline.seconds <= 0:
            raise _timeout(watch, replies, state, wait_timeout)
        time.sleep(pause)
        installs = any(reply.state == "installing" for reply in replies)  # a part for each look
        pause = _PAUSES[0] if installs and moves else min(2 * pause, longest)


def _waits_for_room(client: Client, replies: Sequence[Snapshotted | Restored]) -> bool:
    """Whether a clock that is waited for cannot close, as a shard has no room for its event log."""
    waiting = any(reply.state == "waiting" for reply in replies)
    return waiting and any(status.waits_for_room for status in client.status())


def _timeout(
    request: Snapshot | Restore, replies: Sequence[Snapshotted | Restored], state: str, wait_timeout: timedelta
) -> SnapshotTimeout:
    late = [f"shard {shard}: {reply.state}" for shard, reply in enumerate(replies) if reply.state != state]
    remedy = "Check the storage, and the shards' logs"
    if any(reply.state == "waiting" for reply in replies):
        remedy = "A clock closes when all workers have pushed it; without workers that train, take it at once (clock 0)"
    what = "snapshot" if isinstance(request, Snapshot) else "restore of"
    seconds = wait_timeout.total_seconds()
    return SnapshotTimeout(what=what, name=request.name, seconds=seconds, where=", ".join(late), remedy=remedy)


def _next_common_clock(client: Client, margin: int) -> int:
    """A clock that closes soon, where all workers' pushes of a clock are applied at once; 0 elsewhere."""
    status = client.status()
    if not any(one.members and one.staleness == 0 for one in status):
        return 0
    member = client.membership
    if member is not None and not member.paused:
        return member.next_clock  # the others cannot go on without this worker
    return max(one.clock for one in status) + margin


@dataclass(frozen=True, slots=True)
class _ParentForNext:
    """A snapshot that the next one may be an increment of, as its manifest names it; and `room` for that one."""

    id: int
    named: Parent
    room: float  # of a full snapshot's bytes


def _parent_for(storage: Storage, name: str, url: str | None) -> _ParentForNext | None:
    """The parent of the next snapshot: the latest of the storage, or that at `url`; None where it is to be full."""
    try:
        parent = open_snapshot(storage.url if url is None else url)
        if not parent.manifest.id or len(parent.chain) > MOST_INCREMENTS:
            return None
        full = increments = 0
        for _, blocks in (layer for shards in parent.layers.values() for layers in shards for layer in layers):
            size = sum(file.bytes for file in blocks.files)
            full, increments = (full, increments + size) if blocks.increment else (full + size, increments)
    except EmbershardError:  # without a parent that can be read there is no increment
        return None
    room = MOST_SHARE - increments / max(full, 1)
    path = posixpath.relpath(parent.url, storage.at(name))
    if room <= 0 or not is_parent_path(path):
        return None
    return _ParentForNext(parent.manifest.id, Parent(path, parent.sha256), room)


def _prune(storage: Storage, keep: int, newest: str) -> None:
    """Remove all whole snapshots but the last `keep`, and what the unfinished ones have left.

    A full snapshot counts as one with its increments: none of them may go before the last.
    """
    whole: list[tuple[float, str]] = []
    parents: dict[str, str] = {}
    for name in [name for name, size in storage.sizes("").items() if size is None]:
        entries = storage.sizes(name)
        parts = [part for part, size in entries.items() if size is None and _PART.fullmatch(part)]
        if MANIFEST not in entries:
            if parts:
                _remove(storage, name, parts)
            continue
        try:
            manifest = unpack_manifest(storage.read(f"{name}/{MANIFEST}"), storage.at(name))
        except SnapshotUnreadable as error:  # nobody knows now what it needs
            _log.warning("old snapshots stay for now: %s", error)
            return
        except (EmbershardError, FileNotFoundError):  # what is damaged, or of a later version, is not ours to remove
            continue
        whole.append((manifest.created, name))
        if manifest.parent is not None and posixpath.dirname(manifest.parent.path) == "..":
            parents[name] = posixpath.basename(manifest.parent.path)

    def first(name: str) -> str:
        while name in parents:
            name = parents[name]
        return name

    # increments before what they need; a clock that was set back makes the newest one no older
    whole.sort(key=lambda one: (one[1] == newest, one), reverse=True)
    names = {name for _, name in whole}
    # increments of one that is damaged are of no use: they count for nothing
    kept = [name for name in dict.fromkeys(first(name) for _, name in whole) if name in names][:keep]
    for _, name in whole:
        if first(name) in names and first(name) not in kept:
            storage.remove(f"{name}/{MANIFEST}")  # first: from here on it is none
            _remove(storage, name, [part for part in storage.sizes(name) if _PART.fullmatch(part)])


def _remove(storage: Storage, name: str, parts: Sequence[str]) -> None:
    for part in parts:
        storage.remove(f"{name}/{part}")
    storage.remove_if_empty(name)
