"""How the workers of a job begin together on a cluster that starts each of them by itself, again and again.

The first worker decides. Where the shards have their rows and other workers train, it takes part in their run. Else it
gives all shards the latest checkpoint, or nothing where there is none, and begins a run of its own. The file RUN beside
the checkpoints has the run's number and checkpoint, by which the other workers begin, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass, replace

from embershard.proto.errors import EmbershardError, JobError, RowsLost, Status
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.checkpoint import SNAPSHOT, Checkpoint, checkpoint_at
from embershard.worker.checkpoint.snapshots import drop_tables, restore_snapshot
from embershard.worker.client.client import Client
from embershard.worker.job.job import Job

FILE = "RUN"
_POLL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class NoProgress(EmbershardError):
    """A job that failed again and again without a new checkpoint."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the job failed {failures} times in a row without a new checkpoint ({checkpoint}); see the logs of its workers "
        "and shards. Remove {path} to try again"
    )


class FirstWorkerMissing(EmbershardError):
    """The first worker did not begin a run in time."""

    status = Status.UNAVAILABLE
    template = "worker {worker} waited {seconds:.0f} s for worker 0 to begin a run; see the log of worker 0"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a job: from a checkpoint, or from the beginning, to the next loss of rows or of all workers.

    `failures` are the runs before it that had begun with the same checkpoint, in a row.
    """

    number: int
    checkpoint: str | None
    job: str  # digest
    failures: int = 0
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
        self._digest = hashlib.sha256(job.model_dump_json(exclude={"output", "checkpoint"}).encode()).hexdigest()

    def read(self) -> Run | None:
        """The present run; None where the job, as it is now, has none yet."""
        try:
            run = Run(**json.loads(self._storage.read(FILE)))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            reason = f"it is damaged ({error}); remove it"
            raise JobError(where=self._storage.at(FILE), reason=reason) from None
        return run if run.job == self._digest else None

    def begin(self, client: Client, *, attempts: int) -> Run:
        """The run that the first worker takes part in, or begins: then all shards are given its checkpoint.

        NoProgress where the last `attempts` runs in a row came to no new checkpoint.
        """
        before = self.read()
        if before is not None and (before.is_done or _goes_on(client)):
            return before
        latest = checkpoint_at(self._folder)
        if latest is not None:
            latest.check_job(self._job)
        url = None if latest is None else latest.url
        run = Run(time.time_ns(), url, self._digest)
        if before is not None and before.checkpoint == url:
            run = replace(run, failures=before.failures + 1)
        if run.failures > attempts:
            path = self._storage.at(FILE)
            raise NoProgress(failures=run.failures, checkpoint=url or "there is none", path=path)
        if latest is not None and latest.manifest.snapshot:
            restore_snapshot(client, latest.url, SNAPSHOT, replace_tables=True)
        elif any(status.tables for status in client.status()):
            drop_tables(client)
        self._storage.make_folder("")
        self._write(run)
        _log.warning("run %d begins from %s", run.number, url or "the beginning")
        return run

    def wait(self, client: Client, worker: int, seconds: float) -> Run:
        """The run that the first worker has begun, for another one. FirstWorkerMissing."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            run = self.read()
            if run is not None and (run.is_done or _goes_on(client, but=worker)):
                return run
            time.sleep(_POLL_SECONDS)
        raise FirstWorkerMissing(worker=worker, seconds=seconds)

    def end(self, run: Run) -> None:
        """The job is done: a worker that is started from now on has nothing to do."""
        self._write(replace(run, is_done=True))

    def _write(self, run: Run) -> None:
        self._storage.replace(FILE, json.dumps(asdict(run), indent=1).encode())


def _goes_on(client: Client, but: int = 0) -> bool:
    """Whether all shards have their rows, and another worker than `but` trains."""
    try:
        client.lineage.check()
    except RowsLost:
        return False
    return any(member.worker != but for status in client.status() for member in status.members)
