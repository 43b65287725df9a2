"""Start the workers of a job together where the cluster starts and restarts each one.

The first worker begins a run whenever it is started: from then on the shards refuse the workers of earlier runs, and
they are given the latest checkpoint, or nothing where there is none. The file RUN beside the checkpoints has the run's
number and checkpoint, by which the other workers begin. One of those that is started again joins the others where they
are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass, replace

from embershard.proto.errors import (
    EmbershardError,
    JobError,
    RowsLost,
    SnapshotNotWritten,
    SnapshotUnreadable,
    StaleRun,
    Status,
    TablesInTheWay,
)
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.checkpoint import Checkpoint, checkpoint_at, restore_shards, settings_of
from embershard.worker.checkpoint.snapshots import drop_tables
from embershard.worker.client.client import Client
from embershard.worker.job.job import Job

FILE = "RUN"
_POLL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class NoProgress(EmbershardError):
    """A job that failed again and again without a new checkpoint."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the job failed {failures} times in a row without a new checkpoint ({checkpoint}); see the output of its "
        "workers and shards. Remove {path} to try again"
    )


class FirstWorkerMissing(EmbershardError):
    """The first worker did not begin a run in time."""

    status = Status.UNAVAILABLE
    template = (
        "worker {worker} waited {seconds:.0f} s for worker 0 to start the job or its next attempt; see the output of "
        "worker 0"
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One try to train a job, from a checkpoint or, with None, from the beginning.

    `failures` says how many tries before it began with the same checkpoint, and so made no progress. `is_ready` says
    that the shards have its rows.
    """

    number: int
    checkpoint: str | None
    job: str  # digest
    failures: int = 0
    is_ready: bool = False
    is_done: bool = False

    @property
    def resume(self) -> Checkpoint | None:
        """The checkpoint that every worker of the run begins with."""
        return None if self.checkpoint is None else Checkpoint.open(self.checkpoint)


class RunFile:
    """The file RUN of a job. JobError where the job keeps no checkpoints, which a recovery needs."""

    def __init__(self, job: Job) -> None:
        if job.checkpoint.folder is None:
            reason = "a job that recovers needs a folder of checkpoints, which all workers and shards see"
            raise JobError(where="checkpoint.folder", reason=reason)
        self._job, self._folder = job, job.checkpoint.folder
        self._storage = Storage(job.checkpoint.folder)
        self._digest = hashlib.sha256(json.dumps(settings_of(job), sort_keys=True).encode()).hexdigest()

    def read(self) -> Run | None:
        """The present run; None where the job, as it is now, has none yet."""
        run = self._read()
        return run if run is not None and run.job == self._digest else None

    def begin(self, client: Client, *, attempts: int) -> Run:
        """Begin a run with the latest checkpoint, and give it to all shards; a job that is done is left alone.

        NoProgress where `attempts` runs in a row came to no new checkpoint. TablesInTheWay where the shards hold tables
        that are not of this job.
        """
        any_before = self._read()
        before = self.read()
        if before is not None and before.is_done:
            return before
        latest = checkpoint_at(self._folder)
        if latest is not None:
            latest.check_job(self._job)
        url = None if latest is None else latest.url
        failures = before.failures + 1 if before is not None and before.checkpoint == url else 0
        if failures >= attempts:
            path = self._storage.at(FILE)
            raise NoProgress(failures=failures, checkpoint=url or "there is none", path=path)
        # above the last one also where this machine's clock is behind that of the machine before
        number = max(time.time_ns(), 0 if any_before is None else any_before.number + 1)
        run = Run(_enter_run(client, number), url, self._digest, failures)
        self._storage.make_folder("")
        self._write(run)  # before the restore: one that fails counts, too
        if latest is not None and latest.manifest.snapshot:
            restore_shards(client, latest)
        else:
            self._drop_own_tables(client, before)
        run = replace(run, is_ready=True)
        self._write(run)
        _log.warning("run %d begins from %s", run.number, url or "the beginning")
        return run

    def wait(self, client: Client, worker: int, seconds: float) -> Run:
        """The run that the first worker has begun, for another one. FirstWorkerMissing."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                run = self.read()
            except SnapshotUnreadable as error:  # the storage may answer again
                _log.warning("%s", error)
                run = None
            if run is not None and (run.is_done or (run.is_ready and _has_members(client, apart_from=worker))):
                return run
            time.sleep(_POLL_SECONDS)
        raise FirstWorkerMissing(worker=worker, seconds=seconds)

    def end(self, run: Run) -> None:
        """Note that the job is done: a worker that is started later has nothing to do. All workers may call it."""
        try:
            self._write(replace(run, is_done=True))
        except SnapshotNotWritten as error:  # it is done all the same, and another worker writes the same
            _log.warning("%s", error)

    def _drop_own_tables(self, client: Client, before: Run | None) -> None:
        """Drop the tables that a run without a checkpoint has left."""
        names = {table.name for status in client.status() for table in status.tables}
        others = names if before is None else {name for name in names if not name.startswith(self._job.prefix)}
        if others:
            raise TablesInTheWay(tables=", ".join(sorted(others)))
        if names:
            drop_tables(client)

    def _read(self) -> Run | None:
        """The last run of any job in this folder."""
        try:
            return Run(**json.loads(self._storage.read(FILE)))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            reason = f"it is damaged ({error}); remove it"
            raise JobError(where=self._storage.at(FILE), reason=reason) from None

    def _write(self, run: Run) -> None:
        self._storage.replace(FILE, json.dumps(asdict(run), indent=1).encode())


def _enter_run(client: Client, number: int) -> int:
    """Have the shards refuse workers of runs before this number, or the next that they have not seen; which it is."""
    try:
        client.enter_run(number)
    except StaleRun as error:  # one with a clock that is ahead has begun a run on these shards
        number = int(str(error.fields["want"])) + 1
        client.enter_run(number)
    return number


def _has_members(client: Client, apart_from: int) -> bool:
    """Whether all shards have their rows, and a worker apart from this one has a lease."""
    try:
        client.lineage.check()
    except RowsLost:
        return False
    return any(member.worker != apart_from for status in client.status() for member in status.members)
