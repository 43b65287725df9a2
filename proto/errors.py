"""Errors with fields, one message built here, and one wire status.

A shard raises these; a transport moves them as (status, name, fields) and the client raises the same type again.
The tree, by what they are about; only InvalidRequest, ShardBusy, NotAllowed, MemoryLost and SnapshotUnknown have
subclasses:

    EmbershardError
        requests      InvalidRequest (WrongDim, MessageTooLarge, BadAddress, DamagedPayload, BadSnapshotName,
                      FutureEpoch), NonFiniteValue
        connections   BadFrame, WrongVersion, NotAShard, WrongShards, ShardUnavailable, ShardRestarted, ClientClosed,
                      CannotListen, NotAnnounced, AnnouncedTwice, CannotAnnounce
        certificates  BadCertificate, UntrustedCertificate, CertificateRefused, TLSRequired, TLSNotOffered
        packages      TracingNotInstalled
        access        NotAllowed (NotAuthenticated, PlaceNotAllowed), BadToken, BadAccessFile,
                      AuditDamaged
        shards        ShardBusy (TooManyDeclares, LogStalled, LogTooLong, ShardRecovering,
                      QuotaExceeded (TableQuotaExceeded)), ShuttingDown, ShardFailed, InternalError
        tables        UnknownTable, UnknownRoute, TableFull, TableMismatch, OtherRows, TableLoading, WrongPlacement,
                      TooManyTables, NoAddressSpace
        optimizers    UnknownOptimizer, BadOptimizer, BadLearningRate, OtherOptimizer
        codecs        UnknownCodec, BadCodec
        workers       StaleWorker, ClockAhead, LeaseLost, StaleRun, JobOver, RendezvousOver, ModeMismatch,
                      MemoryLost (LoadLost), OtherLineage, OtherTerm, RowsLost, WorkerLost, WorkersApart, UpdateFailed
        snapshots     SnapshotNotWritten, SnapshotRunning, SnapshotUnknown (SnapshotReplaced), SnapshotTooLate,
                      SnapshotTimeout, SnapshotExists, SnapshotScattered, SnapshotNotFound, SnapshotUnreadable,
                      SnapshotDamaged, SnapshotTooNew, RestoreRunning, TablesInTheWay
        logs          LogDamaged, LogDiverged, LogLocked, LogMismatch, LogTooNew, LogUnusable
        serving       BadExport, CannotServe, BadRows, BadIds
        the user's    JobError, BadModule, UserCodeFailed, CannotWrite, OutputClosed

Commands and training add subclasses of their own, beside what raises them.
"""

from __future__ import annotations

import enum
import json
import signal
import sys
from collections.abc import Mapping
from typing import ClassVar


class Status(enum.Enum):
    """Wire status of an error; the names are gRPC's."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    ABORTED = "ABORTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


Field = str | int | float | None
_REGISTRY: dict[str, type[EmbershardError]] = {}


class EmbershardError(Exception):
    """Base class of every error that embershard raises.

    `fields` are the facts (table, dim, ...), `template` turns them into the message, and `shard` names the shard
    that raised the error ("shard 1 at 10.0.0.2:7700"); it is empty if the error is not from a shard.
    """

    status: ClassVar[Status] = Status.INTERNAL
    retryable: ClassVar[bool] = False
    template: ClassVar[str] = "{reason}"

    def __init__(self, *, shard: str = "", **fields: Field) -> None:
        self.fields: dict[str, Field] = fields
        self.shard = shard
        super().__init__(self.message)

    def __init_subclass__(cls) -> None:
        other = _REGISTRY.setdefault(cls.__name__, cls)
        if (_module_of(other), other.__qualname__) != (_module_of(cls), cls.__qualname__):  # a reload defines it again
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__}: {other.__module__} has an error of this name already, and an "
                "error is found by its name when it crosses a process or the wire; choose another name"
            )
        _REGISTRY[cls.__name__] = cls

    @property
    def message(self) -> str:
        """Build the error's text: what happened, where, and what to do."""
        text = self.template.format_map(self.fields)
        return f"{self.shard}: {text}" if self.shard else text

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self).__name__, self.fields, self.shard))


def _rebuild(name: str, fields: dict[str, Field], shard: str) -> EmbershardError:
    return _REGISTRY.get(name, InternalError)(shard=shard, **fields)


def _module_of(cls: type) -> str:
    """The module of a class, by its own name where it runs as a program (`python -m`)."""
    spec = getattr(sys.modules.get(cls.__module__), "__spec__", None)
    return cls.__module__ if spec is None else str(spec.name)


class InvalidRequest(EmbershardError):
    """A request that can never succeed: wrong shape, dtype, length or value."""

    status = Status.INVALID_ARGUMENT


class WrongDim(InvalidRequest):
    """Rows or gradients of another dim, or another count, than the table and the ids need."""

    template = (
        "table {table!r}: {what} hold {got} floats, but {ids} ids of dim {dim} need {want}; "
        "check the table's dim and that there is one row per id"
    )


class MessageTooLarge(InvalidRequest):
    """A message over the limit that both sides agreed on."""

    template = "a message of {got} bytes is over the limit of {limit} bytes; send fewer ids per call"


class BadFrame(EmbershardError):
    """Bytes that are not a frame of the `stream` transport, or contradict the start of the frame (docs/wire.md)."""

    status = Status.INVALID_ARGUMENT
    template = "{what} is {got}, not {want}; the connection is closed, because the start of the next frame is unknown"


class WrongVersion(EmbershardError):
    """Client and shard have no common version of the protocol (docs/wire.md)."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the peer speaks versions {lowest} to {highest} of the protocol, this side {own_lowest} to {own_highest}; "
        "upgrade the older side"
    )


class NotAllowed(EmbershardError):
    """A request that its sender may not make; nothing of it was read or changed."""

    status = Status.PERMISSION_DENIED
    template = "{who} may not make {what}: {why}"


class NotAuthenticated(NotAllowed):
    """A peer without a token, or with one that the shard does not know."""

    status = Status.UNAUTHENTICATED
    template = "{who} is not known to the shard: {why}"


class PlaceNotAllowed(NotAllowed):
    """A folder or URL in which the shard may not read or write snapshots (`--snapshots`)."""

    template = "snapshots at {url!r}: {why}"


class BadToken(EmbershardError):
    """A token file that cannot be used: it holds no token, or other users can read it."""

    status = Status.FAILED_PRECONDITION
    template = "the token in {path} cannot be used: {reason}"


class BadAccessFile(EmbershardError):
    """An access file (access.yaml) with mistakes; the message lists all of them, one per line."""

    status = Status.FAILED_PRECONDITION
    template = "{mistakes}"


class AuditDamaged(EmbershardError):
    """An audit log in which a line was changed, removed or added."""

    status = Status.FAILED_PRECONDITION
    template = "{path}, line {line}: {reason}"


class UnknownTable(EmbershardError):
    """A table that nobody declared on this shard."""

    status = Status.NOT_FOUND
    template = "no table {table!r} here (declared: {known}); declare it first, or check its name"


class UnknownRoute(EmbershardError):
    """A push refers to ids of a pull that the shard no longer keeps; the client then sends the ids."""

    status = Status.NOT_FOUND
    template = (
        "worker {worker} refers to ids {route} of table {table!r}, which this shard no longer keeps; send the ids "
        "themselves"
    )


class UnknownOptimizer(EmbershardError):
    """An optimizer that this shard does not know."""

    status = Status.NOT_FOUND
    template = (
        "no optimizer {optimizer!r} here (known: {known}); a user-defined one needs `--import MODULE` on every shard"
    )


class BadOptimizer(EmbershardError):
    """A row optimizer, or its module, that does not load or compile, or that does not have a given setting."""

    status = Status.INVALID_ARGUMENT
    template = "row optimizer {optimizer!r}: {reason}"


class TableFull(EmbershardError):
    """A request that needs more memory than is left of the shard's budget; nothing of it was applied."""

    status = Status.RESOURCE_EXHAUSTED
    template = (
        "table {table!r} needs up to {asked_bytes} bytes more, but {used_bytes} of the shard's {budget_bytes} bytes "
        "are in use; give each shard more memory (`embershard ps --memory`), or start more shards"
    )


class TableMismatch(EmbershardError):
    """A declaration that differs from the existing table."""

    status = Status.FAILED_PRECONDITION
    template = "table {table!r} exists with other settings: {difference}; use another name or the same settings"


class OtherRows(TableMismatch):
    """A table of which the models of two workers have different numbers of rows, as by data that differ."""

    template = (
        "table {table!r} has {want} rows in the model of another worker (num_embeddings), and {got} in this one's, so "
        "that an id stands for something else, or is refused, there: give all workers the same model and data, or give "
        "this table another name"
    )


class TableLoading(EmbershardError):
    """A table whose first values another worker is still loading; the client waits and asks again."""

    status = Status.UNAVAILABLE
    retryable = True
    template = (
        "worker {worker} is still loading the first values of table {table!r}; if that worker has ended, start it "
        "again, and it repeats the load"
    )


class WrongPlacement(EmbershardError):
    """A request routed by another placement than the shard's."""

    status = Status.FAILED_PRECONDITION
    template = "the request was routed by placement epoch {got}, but the shard has {want}; connect again"


class StaleWorker(EmbershardError):
    """A push of an earlier process of a worker (a lower worker epoch); it was fenced and not applied."""

    status = Status.ABORTED
    template = (
        "worker {worker} (worker epoch {got}) was replaced by a newer process (worker epoch {want}): its job was "
        "started again, or two processes have the same worker number. The newer process connected{by}: end it if it "
        "is not yours, or give this process another worker number. A worker epoch is the start time of a process in "
        "nanoseconds since 1970: if this process is the newer one, correct the system time of its machine"
    )


class ClockAhead(EmbershardError):
    """A request that still waits for other workers at its deadline; the client asks again while those workers live."""

    status = Status.UNAVAILABLE
    retryable = True
    template = (
        "waiting at clock {clock} for worker {workers}: no heartbeat for {seconds:.1f} s. A dead worker is evicted "
        "when its lease ends; a missing worker must be started."
    )


class LeaseLost(EmbershardError):
    """A member that sent no request within its lease was evicted; the client joins again, except with ddp and fsdp."""

    status = Status.ABORTED
    template = (
        "worker {worker} was evicted: the shard received no request from it within its lease of {lease_ms} ms. "
        "Gradients that it computed since then are not applied. Raise the lease if this worker was only slow."
    )


class StaleRun(EmbershardError):
    """A worker with a lower run number than that of the shard's workers; it is fenced, and cannot join them."""

    status = Status.ABORTED
    template = (
        "worker {worker} has run number {got}, but workers with the higher run number {want} have joined these "
        "shards{by}; end all processes with the lower number. `embershard train` uses the start time as the run "
        "number: if this worker was started later, correct the system time of the machine that started it"
    )


class JobOver(EmbershardError):
    """A worker of a job that is over: it was evicted, and once all others were gone, another job began."""

    status = Status.ABORTED
    template = (
        "worker {worker} was evicted, and its job is over: when none of its workers was left, a new worker began "
        "another job on these shards. Restart this worker to join that job"
    )


class TracingNotInstalled(EmbershardError):
    """`--trace` needs the optional packages of OpenTelemetry."""

    template = "--trace needs OpenTelemetry: pip install 'embershard[tracing]'"


class RendezvousOver(EmbershardError):
    """A rendezvous that was completed so long ago that its shard no longer holds the payloads."""

    status = Status.FAILED_PRECONDITION
    template = "the rendezvous {name!r} of the workers is over; the other workers continued without this one"


class ModeMismatch(EmbershardError):
    """A worker that joins a job with other settings than its members."""

    status = Status.FAILED_PRECONDITION
    template = (
        "worker {worker} joins with {what} {got}, but the others train with {want}; give all workers the same job"
    )


class ShardBusy(EmbershardError):
    """The apply queue is full; the client waits `retry_after_ms` and sends the same push again."""

    status = Status.RESOURCE_EXHAUSTED
    retryable = True
    template = "the apply queue is full ({queued_bytes} bytes waiting); retry after {retry_after_ms} ms"


class QuotaExceeded(ShardBusy):
    """A request over a quota of its sender (`quotas` of access.yaml); the client waits, and sends it again."""

    template = (
        "{who} may use {limit:,} {what}, and this request would use {would:,} (quotas of its entry in access.yaml); "
        "retry after {retry_after_ms} ms"
    )


class TableQuotaExceeded(QuotaExceeded):
    """A request that would make its sender's tables larger than their quota; nothing of it is applied."""

    retryable = False  # until rows are removed, or the quota is another, it would be refused again
    template = (
        "{who} may have {limit:,} {what} on this shard, and this request would make it {would:,} (quotas of its entry "
        "in access.yaml); nothing was changed. Raise the quota, or find out why so many ids are new"
    )


class ShardRecovering(ShardBusy):
    """A shard recovers its state from its event log; the client waits up to its recovery_timeout."""

    status = Status.UNAVAILABLE
    template = (
        "the shard is recovering its rows from its event log: {done_bytes:,} of about {total_bytes:,} bytes are "
        "done, about {seconds:.0f} s are left"
    )

    @property
    def message(self) -> str:
        """Build the error's text; where the disk has no room for the log, that is what it says."""
        text = self.progress
        return f"{self.shard}: {text}" if self.shard else text

    @property
    def progress(self) -> str:
        """Return the text without the shard's name."""
        reason = self.fields.get("waits_for_room")
        return self.template.format_map(self.fields) if not reason else waits_for_room(str(reason))


def waits_for_room(reason: str) -> str:
    """Say that a shard has its rows and no room to write on, for this reason of its system."""
    return (
        f"the shard has recovered its rows, but its event log cannot go on: {reason}; it waits for room: free disk "
        "space, or raise the quota"
    )


def log_stalled(reason: str) -> str:
    """Say that changes of a shard's rows wait, since it cannot write its log for this reason of its system."""
    return (
        f"the shard answers pulls, but its event log cannot be written: {reason}; changes wait for room: free disk "
        "space, or raise the quota or --log-bytes"
    )


class ShuttingDown(EmbershardError):
    """The shard got SIGTERM: it finishes accepted requests and refuses new ones."""

    status = Status.UNAVAILABLE
    retryable = True
    template = "the shard is shutting down"


class InternalError(EmbershardError):
    """A defect of the shard; the shard's output has the traceback."""

    status = Status.INTERNAL


class ShardUnavailable(EmbershardError):
    """No answer from a shard by the deadline (raised by the client)."""

    status = Status.UNAVAILABLE
    template = (
        "no answer within {seconds:.1f} s ({reason}); check that it runs "
        "(`embershard status --ps {address}`) and that this machine can connect to it"
    )


class ClientClosed(EmbershardError):
    """A call of a client, or session, that was closed (raised by the client)."""

    status = Status.FAILED_PRECONDITION
    template = "this session is closed; connect again, or use it inside its `with` block"


class BadAddress(InvalidRequest):
    """Text that cannot be the address of a shard."""

    template = "{address!r} is not the address of a shard: {reason}"


class NotAShard(EmbershardError):
    """Something else than an embershard shard answers at an address (raised by the client)."""

    status = Status.FAILED_PRECONDITION
    template = "the program at {address} is not an embershard shard ({reason}); check the address and port"


class WrongShards(EmbershardError):
    """The shards are not those of one job: an index twice, one missing, or another count (raised by the client)."""

    status = Status.FAILED_PRECONDITION


class ShardRestarted(EmbershardError):
    """Another process, without the rows of the one before, answers at a shard's address (raised by the client)."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the shard at {address} was restarted (instance {got}, not {want}): the rows and optimizer states that it held "
        "in memory are lost; restore the last checkpoint (embershard train ... --ps ... --resume latest), or start the "
        "training again on empty shards"
    )


class MemoryLost(EmbershardError):
    """A push of a worker whose earlier, acknowledged pushes this shard does not know: it was restarted or restored."""

    status = Status.FAILED_PRECONDITION
    template = (
        "worker {worker} had pushes acknowledged (all below {first_incomplete}) that this shard does not know. If a "
        "snapshot was restored onto it, start the worker again. Otherwise it was restarted, and the rows and optimizer "
        "states that it held in memory are lost; restore the last checkpoint (embershard train ... --ps ... --resume "
        "latest), or restart all shards and start the training again"
    )


class LoadLost(MemoryLost):
    """A table that has not all of the first values which this worker, or a process of before, loaded into it.

    Raised by the client.
    """

    template = (
        "table {table!r} has not all of the first values that this worker ({worker}) loads: `embershard import` was "
        "ended before it had loaded all, or the shard was restarted, and the end of the load and all later changes are "
        "lost; run the import again, restore the last checkpoint (embershard train ... --ps ... --resume latest), or "
        "start the training again, which repeats a load of its own"
    )


class OtherLineage(EmbershardError):
    """A declaration with another lineage than this shard's; the client then compares the lineages of all shards."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the worker's shards have lineage {want}, this shard has {got}: its rows are not of the same job or restore; "
        "connect again, and compare the lineages of all shards before anything is declared"
    )


class OtherTerm(EmbershardError):
    """A request for an earlier process of a recovered shard; the client first sends the pushes that it keeps."""

    status = Status.UNAVAILABLE
    retryable = True
    template = (
        "the request is for term {got} of this shard, but a new process has replaced the one of that term (term "
        "{want}); send HelloRequest, and then all unacknowledged pushes again"
    )


class RowsLost(EmbershardError):
    """A shard has lost its rows while others still have theirs (raised by the client)."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{lost} lost its rows (restarted {minutes:.0f} minutes ago, or by a restore that did not end), but {kept} "
        "still has rows of the job. A job would train on a mixture of old and new rows, so it does not start. Restore "
        "the last checkpoint (embershard train ... --ps ... --resume latest), or a snapshot (embershard restore ... "
        "--replace), or restart all shards to start from nothing"
    )


class NonFiniteValue(EmbershardError):
    """A NaN or Inf where only finite numbers make sense."""

    status = Status.INVALID_ARGUMENT
    template = "table {table!r}: {what} hold {count} non-finite values"


class BadLearningRate(EmbershardError):
    """A schedule returned a learning rate that is negative, NaN or Inf; nothing was pushed with it."""

    status = Status.INVALID_ARGUMENT
    template = "the learning rate of group {group!r} became {lr} at step {step}: {why}; correct the schedule"


class WorkerLost(EmbershardError):
    """Another worker of the job was lost (raised by a worker that waits for it)."""

    status = Status.UNAVAILABLE
    # of several workers that end, those who say this are not the cause
    words: ClassVar[str] = "lost another worker"
    template = "worker {worker} of {world_size} " + words + ": {reason}; see the messages of the other workers"


class WorkersApart(EmbershardError):
    """Workers that could not connect to each other at the start of a job."""

    status = Status.UNAVAILABLE
    template = (
        "worker {worker} of {world_size} cannot reach the others at MASTER_ADDR={address} MASTER_PORT={port}: "
        "{reason}. Give all workers the same address, each its own rank, and check that all of them run"
    )


class CannotWrite(EmbershardError):
    """A folder or a file that this process may not write; `remedy` names the option of the command that says where."""

    status = Status.FAILED_PRECONDITION
    template = "cannot write to {path}: {reason}; {remedy}"


class OutputClosed(EmbershardError):
    """The program that read stdout has ended."""

    status = Status.ABORTED
    template = (
        "the program that read the output has ended, so the run ends; write the output to a file to keep it running"
    )


class JobError(EmbershardError):
    """A job file or a data file with a mistake; the message says file:line or field."""

    status = Status.INVALID_ARGUMENT
    template = "{where}: {reason}"


class BadExport(EmbershardError):
    """A folder that is no export, a damaged one, or one of another version."""

    status = Status.FAILED_PRECONDITION
    template = "cannot serve {path}: {reason}"


class CannotServe(EmbershardError):
    """The export lacks a file that was requested, or this machine lacks a package."""

    status = Status.FAILED_PRECONDITION
    template = "{what}: {reason}"


class BadRows(EmbershardError):
    """A row to score with an unknown or missing feature, or with a value that the feature cannot have."""

    status = Status.INVALID_ARGUMENT
    template = "feature {feature!r}: {reason}"


class BadIds(EmbershardError):
    """Ids or dense features to score with a wrong shape or type, or ids that the model does not have."""

    status = Status.INVALID_ARGUMENT
    template = "{what}: {reason}"


class CannotListen(EmbershardError):
    """A shard cannot serve at the address that it was given."""

    status = Status.FAILED_PRECONDITION
    template = "cannot listen on {address}: {reason}"


class NotAnnounced(EmbershardError):
    """A folder of announcements (--announce) lacks the addresses of some shards."""

    status = Status.UNAVAILABLE
    template = "{folder} does not have the addresses of all shards: {reason}; start them with --announce {folder}"


class AnnouncedTwice(EmbershardError):
    """Another process announces the same shard in the same folder, or another job announces its own there."""

    status = Status.FAILED_PRECONDITION
    template = (
        "cannot announce shard {index} of {of} in {folder}: {reason}; give each job its own folder, and each of its "
        "shards its own index"
    )


class CannotAnnounce(EmbershardError):
    """A shard cannot write its announcement."""

    status = Status.FAILED_PRECONDITION
    template = "cannot announce the shard in {folder}: {reason}; name a folder in which this user may write"


class BadCertificate(EmbershardError):
    """A folder whose certificate, key or authorities cannot be used; `problem` is one of proto/security's PROBLEMS."""

    status = Status.FAILED_PRECONDITION
    template = "cannot use {path}: {reason}. {remedy}"


class UntrustedCertificate(EmbershardError):
    """A certificate of the other side that this one does not accept; `problem` is one of proto/security's PROBLEMS."""

    status = Status.UNAUTHENTICATED
    template = "the certificate of {peer} is not trusted: {reason}. {remedy}"


class CertificateRefused(EmbershardError):
    """The other side does not accept the certificate of this one; `problem` is one of proto/security's PROBLEMS."""

    status = Status.UNAUTHENTICATED
    template = "{peer} refuses the certificate of this side: {reason}. {remedy}"


class TLSRequired(EmbershardError):
    """A client without TLS at a shard that accepts only TLS over TCP."""

    status = Status.UNAUTHENTICATED
    template = (
        "the shard accepts only TLS connections, and this client does not use TLS; give the client a folder with its "
        "certificate (--tls DIR, EMBERSHARD_TLS, or es.connect(tls=...))"
    )


class TLSNotOffered(EmbershardError):
    """A client with certificates at a shard that has none: it sends nothing unencrypted."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{address} does not offer TLS ({reason}), and a client with certificates sends nothing unencrypted; start the "
        "shard with --tls DIR, or leave out the client's --tls (EMBERSHARD_TLS)"
    )


class ShardFailed(EmbershardError):
    """A local shard ended, or did not serve in time (raised by the supervisor)."""

    status = Status.UNAVAILABLE
    template = "{what}; its last lines of output:\n{log}"


class UnknownCodec(EmbershardError):
    """A values codec that this process does not know."""

    status = Status.NOT_FOUND
    template = (
        "no codec {codec!r} here (known: {known}); a user-defined one needs `--import MODULE` on every shard and worker"
    )


class BadCodec(EmbershardError):
    """A user-defined codec, or its module, that does not load, raises, or returns a wrong value."""

    status = Status.INVALID_ARGUMENT
    template = "codec {codec!r}: {reason}"


class BadModule(EmbershardError):
    """A user's module that does not load, or that defines nothing of what it was loaded for."""

    status = Status.INVALID_ARGUMENT
    template = "module {module!r} {reason}"


class UserCodeFailed(EmbershardError):
    """A model, reader, loss, metric or callback of a user that raises, or returns a wrong value."""

    status = Status.INVALID_ARGUMENT
    template = "{what} {reason} ({where})"


class DamagedPayload(InvalidRequest):
    """Payload bytes that the codec cannot have written; nothing of the message is applied."""

    template = "a payload of codec {codec!r}: {reason}; both sides need the same version of embershard"


def check_size(codec: str, got: int, shape: tuple[int, ...], want: int) -> None:
    """DamagedPayload unless a payload of (rows, dim) floats has the bytes that its codec writes."""
    if got != want:
        raise DamagedPayload(codec=codec, reason=f"{got} bytes, but {shape[0]} rows of dim {shape[1]} take {want}")


class BadSnapshotName(InvalidRequest):
    """A name or a place that no snapshot can have."""

    template = "{name!r} cannot be {what}: {reason}"


class SnapshotNotWritten(EmbershardError):
    """A snapshot that could not be written: no space, no permission, a storage that does not answer, no memory."""

    status = Status.FAILED_PRECONDITION
    template = (
        "cannot write {path}: {reason}; {remedy}. Earlier snapshots are unchanged, and the shards continue to serve"
    )
    of_memory: ClassVar[str] = (
        "give the shard more memory (`embershard ps --memory`, the limit of its container), or lift the limits of its "
        "process (`ulimit -v`, `ulimit -u`, vm.overcommit_memory, vm.max_map_count)"
    )

    def __init__(
        self, *, shard: str = "", remedy: Field = "free some space there, or choose another folder", **fields: Field
    ) -> None:
        super().__init__(shard=shard, remedy=remedy, **fields)


class SnapshotRunning(EmbershardError):
    """The shard is still writing another snapshot; the client waits for its end."""

    status = Status.UNAVAILABLE
    retryable = True
    template = "the shard is still writing snapshot {name!r} ({rows} of {total_rows} rows); wait for it, or cancel it"


class SnapshotUnknown(EmbershardError):
    """A snapshot, or a restore, that a shard does not know, or no longer knows."""

    status = Status.ABORTED
    template = (
        "the shard no longer works on {what} {name!r}: another one replaced it, or the shard was restarted; start "
        "it again"
    )


class SnapshotReplaced(SnapshotUnknown):
    """A snapshot that waited for its moment, or whose storage hung, when a shard began another client's snapshot."""

    template = (
        "the shard did not write snapshot {name!r}: it began {other!r} for another client; take the snapshot again"
    )


class RestoreRunning(EmbershardError):
    """A restore onto shards that another client restores at the moment."""

    status = Status.FAILED_PRECONDITION
    template = (
        "another client restores snapshot {name!r} onto these shards; wait until it has ended, and restore another one "
        "only if these rows are not wanted. If that client was killed, try again in {seconds:.0f} s"
    )


class SnapshotTooLate(EmbershardError):
    """A snapshot at a clock that is closed already."""

    status = Status.ABORTED
    template = "a snapshot at clock {clock} comes too late, because {now} clocks are closed; request a later clock"


class SnapshotTimeout(EmbershardError):
    """A snapshot or a restore made no progress in time."""

    status = Status.DEADLINE_EXCEEDED
    template = "{what} {name!r} timed out: no progress for {seconds:.0f} s ({where}). {remedy}"


class SnapshotExists(EmbershardError):
    """A snapshot with this name already exists."""

    status = Status.FAILED_PRECONDITION
    template = "{path} already holds a snapshot; give the new one another name"


class SnapshotScattered(EmbershardError):
    """A shard wrote its files of a snapshot to a folder that the client does not see."""

    status = Status.FAILED_PRECONDITION
    template = (
        "shard {index} reports that it wrote {path}, but this process does not find it ({reason}); name a folder that "
        "all shards and this process share, or a URL of remote storage"
    )


class SnapshotNotFound(EmbershardError):
    """A folder or URL without a snapshot."""

    status = Status.NOT_FOUND
    template = "{path} holds no snapshot: {reason}"


class SnapshotUnreadable(EmbershardError):
    """A storage that refuses to read a file."""

    status = Status.FAILED_PRECONDITION
    template = "cannot read {path}: {reason}"


class SnapshotDamaged(EmbershardError):
    """A file of a snapshot that differs from what was written."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{path} is damaged or not an embershard file: {reason}; restore another snapshot (`embershard inspect` lists "
        "them)"
    )


class SnapshotTooNew(EmbershardError):
    """A snapshot of a version of its format that this program does not know."""

    status = Status.FAILED_PRECONDITION
    template = "{path} has version {got} of the format, this program reads up to {want}; upgrade embershard"


class OtherOptimizer(EmbershardError):
    """A table whose optimizer has another state per row here than in the snapshot."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{path}: table {table!r} has {got} floats of optimizer state per row, but {optimizer!r} has {want} here; "
        "start the shards with the version of the optimizer with which the snapshot was trained"
    )


class TablesInTheWay(EmbershardError):
    """A restore onto a shard that has tables, without `--replace`."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the shard already has tables ({tables}); restore onto empty shards, or replace the tables with --replace"
    )


class UpdateFailed(EmbershardError):
    """The update of a clock that a shard could only apply in part; raised in every worker that waits for the clock."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the update of clock {clock} was only partly applied: {reason}; a part of it is missing in the shard's rows. "
        "Correct the cause, and start the job again from its last checkpoint"
    )

    @property
    def clock(self) -> int:
        """The clock whose update it was."""
        clock = self.fields["clock"]
        assert isinstance(clock, int)
        return clock


class FutureEpoch(InvalidRequest):
    """A run number or a worker epoch, both in nanoseconds since 1970, that is far ahead of the shard's system time."""

    template = (
        "the {what} of worker {worker} began at {got}, more than {minutes} minutes ahead of the shard's system time "
        "({now}). It is refused, because afterwards no worker whose system time is right could join; correct the "
        "system time of the worker's machine, or of the shard's"
    )


class TooManyTables(EmbershardError):
    """A table beyond the limit of tables per shard."""

    status = Status.RESOURCE_EXHAUSTED
    template = "table {table!r} would exceed the limit of {limit} tables per shard; use fewer, larger tables"


class TooManyDeclares(ShardBusy):
    """More new tables per second than a shard creates; the client waits `retry_after_ms` and asks again."""

    template = "a shard creates at most {per_second} new tables per second; retry after {retry_after_ms} ms"


class NoAddressSpace(EmbershardError):
    """A table that cannot grow: the system gives no more address space, or it has the maximum number of rows."""

    status = Status.RESOURCE_EXHAUSTED
    template = (
        "table {table!r} holds {rows} rows and cannot have {new_rows} more: {reason}; start more shards, or lift the "
        "limits on address space (`ulimit -v`, vm.overcommit_memory, vm.max_map_count)"
    )


class LogStalled(ShardBusy):
    """An event log that cannot be written now; the client waits `retry_after_ms` and sends the same push again."""

    template = (
        "the shard accepts no changes: its event log cannot be written ({path}: {reason}). Free some space there; "
        "the shard then writes the waiting changes. Pulls are answered meanwhile; retry after {retry_after_ms} ms"
    )


class LogTooLong(ShardBusy):
    """A push that would make a recovery too long; the client waits `retry_after_ms` and sends the same push again.

    The shard is writing a new base of its event log; when the base is complete, a recovery is short again.
    """

    template = (
        "the event log has {tail_bytes} bytes after its last base, more than a recovery should read; the shard is "
        "writing the next base, and delays large pushes until it is complete; retry after {retry_after_ms} ms"
    )


class LogDamaged(EmbershardError):
    """An event log with something unreadable before intact records, or without one of its files."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{path} is damaged at byte {offset}, where LSN {lsn} is expected: {reason}. Nothing was changed. {remedy}"
    )

    @property
    def message(self) -> str:
        """Build the error's text; what no LSN can be named for (0) is a manifest or a base."""
        return super().message.replace(", where LSN 0 is expected", "")


class LogDiverged(EmbershardError):
    """A replayed event of an event log gave another result than when it was logged."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the replay of LSN {lsn} ({kind}) gives {what} {got}, but the event log has {want}: the code has changed. "
        "Start the shard with the same version of embershard, and of all modules (--import), that wrote the log"
    )


class LogLocked(EmbershardError):
    """An event log that another process uses."""

    status = Status.FAILED_PRECONDITION
    template = "{path} is in use by {holder}; end that process, or give this one another folder"


class LogMismatch(EmbershardError):
    """An event log of another shard or job, or one that was written with another version of the user's modules."""

    status = Status.FAILED_PRECONDITION
    template = "{path} belongs to the event log of {what} {got}, not {want}; nothing was changed. {remedy}"


class LogTooNew(EmbershardError):
    """An event log of a version of its format that this program does not know."""

    status = Status.FAILED_PRECONDITION
    template = "{path} has version {got} of the format, this program reads up to {want}; upgrade embershard"


class LogUnusable(EmbershardError):
    """A folder that holds no event log where one is needed, or in which none can be written."""

    status = Status.FAILED_PRECONDITION
    template = "cannot use the event log in {path}: {reason}"


# gRPC drops a reply whose trailing metadata is over 8 KiB, base64 included, and the message travels beside the detail.
_MAX_FIELD_CHARS = 500


def clipped(error: EmbershardError) -> EmbershardError:
    """The error with texts that every transport takes: what it quotes may be as long as a message."""
    fields = {key: _short(value) if isinstance(value, str) else value for key, value in error.fields.items()}
    return type(error)(shard=error.shard, **fields)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_FIELD_CHARS else text[: _MAX_FIELD_CHARS - 4] + " ..."


def how_ended(code: int) -> str:
    """Say how a process ended, for the text of an error, by its exit code from subprocess (below 0: the signal)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has a number only
        return f"signal {-code}"


def to_wire(error: EmbershardError) -> tuple[Status, bytes]:
    """Status and detail bytes (UTF-8 JSON: name, fields) of an error."""
    detail = {"name": type(error).__name__, "fields": error.fields}
    return error.status, json.dumps(detail, separators=(",", ":")).encode()


def from_wire(detail: bytes, shard: str) -> EmbershardError:
    """The error that `to_wire` described; any bytes give an EmbershardError, never another exception."""
    try:
        parsed = json.loads(detail)
        name, fields = parsed["name"], parsed["fields"]
        cls = _REGISTRY[name]
        if not isinstance(fields, Mapping):
            raise TypeError("fields must be an object")
        return cls(shard=shard, **{str(key): value for key, value in fields.items()})
    except (ValueError, KeyError, TypeError, IndexError):
        return InternalError(shard=shard, reason=f"an error that this version does not know: {detail[:200]!r}")
