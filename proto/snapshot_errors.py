"""The errors of snapshots: of writing one, of reading one."""

from __future__ import annotations

from embershard.proto.errors import EmbershardError, InvalidRequest, Status


class BadSnapshotName(InvalidRequest):
    """A name or a place that no snapshot can have."""

    template = "{name!r} cannot be {what}: {reason}"


class SnapshotNotWritten(EmbershardError):
    """A snapshot that could not be written: no room, no permission, a storage that does not answer."""

    status = Status.FAILED_PRECONDITION
    template = (
        "cannot write {path}: {reason}; make room there, or choose another folder. The snapshots before this one are "
        "as they were, and the shards go on serving"
    )


class SnapshotRunning(EmbershardError):
    """A shard that writes another snapshot; the client waits for its end."""

    status = Status.UNAVAILABLE
    retryable = True
    template = "the shard still writes snapshot {name!r} ({rows} of {total_rows} rows); wait for it, or cancel it"


class SnapshotUnknown(EmbershardError):
    """A snapshot, or a restore, that a shard knows nothing of (any more)."""

    status = Status.ABORTED
    template = "the shard does not work on {what} {name!r} any more: another one took its place; start it again"


class SnapshotTooLate(EmbershardError):
    """A snapshot at a clock that is closed already."""

    status = Status.ABORTED
    template = "a snapshot at clock {clock} comes too late, {now} are closed; ask for a later clock"


class SnapshotTimeout(EmbershardError):
    """A snapshot, or a restore, that does not go on."""

    status = Status.DEADLINE_EXCEEDED
    template = "{what} {name!r} has not moved for {seconds:.0f} s ({where}); it was given up. {remedy}"


class SnapshotExists(EmbershardError):
    """A name that is taken."""

    status = Status.FAILED_PRECONDITION
    template = "{path} holds a snapshot already; give the new one another name"


class SnapshotScattered(EmbershardError):
    """A shard whose files are not where the others' are."""

    status = Status.FAILED_PRECONDITION
    template = (
        "shard {index} says that it wrote {path}, and it is not there ({reason}); name a folder that all shards and "
        "this process share, or a URL of remote storage"
    )


class SnapshotNotFound(EmbershardError):
    """A place that holds no snapshot."""

    status = Status.NOT_FOUND
    template = "{path} holds no snapshot: {reason}"


class SnapshotUnreadable(EmbershardError):
    """A storage that does not let us read."""

    status = Status.FAILED_PRECONDITION
    template = "cannot read {path}: {reason}"


class SnapshotDamaged(EmbershardError):
    """A file of a snapshot that is not what was written."""

    status = Status.FAILED_PRECONDITION
    template = "{path} is damaged or not ours: {reason}; restore another snapshot (`embershard inspect` lists them)"


class SnapshotTooNew(EmbershardError):
    """A snapshot of a version of its format that this program does not know."""

    status = Status.FAILED_PRECONDITION
    template = "{path} has version {got} of the format, this program reads up to {want}; upgrade embershard"


class OtherOptimizer(EmbershardError):
    """A table whose optimizer keeps something else per row here than where the snapshot was taken."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{path}: table {table!r} has {got} floats of optimizer state per row, and {optimizer!r} keeps {want} here; "
        "start the shards with the version of the optimizer that the snapshot was trained with"
    )


class TablesInTheWay(EmbershardError):
    """A shard that would lose its rows by a restore."""

    status = Status.FAILED_PRECONDITION
    template = "the shard holds tables already ({tables}); restore into fresh shards, or replace them with --replace"
