"""A job whose workers are started here, and its shards unless they run already: in as many attempts as it takes."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.cli.monitoring import say
from embershard.cli.recovery import Recoveries
from embershard.cli.scaling import WorkerScaling
from embershard.cli.signals import check_interrupt
from embershard.deploy.attempts import (
    AttemptPolicy,
    Attempts,
    AttemptStarted,
    CheckpointSeen,
    ErrorKind,
    Event,
    GiveUp,
    Interrupted,
    Restart,
    ShardEnded,
    WorkerEnded,
)
from embershard.deploy.engine import LOCAL, ClusterEngine
from embershard.deploy.panel import LocalPanel
from embershard.deploy.scaling import ScalingPolicy
from embershard.deploy.supervisor import LocalShards, RestartPolicy, ShardSettings
from embershard.deploy.workers import LocalWorkers, WorkerFailed
from embershard.proto.errors import EmbershardError, LogLocked, ShardFailed, ShardRestarted
from embershard.proto.security.tls import TLS
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.owner import remove_unfinished
from embershard.worker.job.job import Job
from embershard.worker.reporting.worker_record import FOLDER as WORKER_RECORDS

if TYPE_CHECKING:  # a job is checked in a second, without torch; only checkpoints need more
    from embershard.worker.checkpoint.checkpoint import Checkpoint
    from embershard.worker.client.client import Client

_START_TIMEOUT = timedelta(seconds=60)  # for shards to answer
_RETURN_TIMEOUT = timedelta(minutes=5)  # for shards that were not started here to come back
_RESTORES = 3  # of one checkpoint, however long each takes: the restore itself may be what ends a shard
_LOOK = timedelta(seconds=0.2)  # between looks whether the restore of shards goes on
_REMOVAL_SECONDS = 15
_LOGS = "shard-logs"


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job, and how it is started: `command` are the words of its workers, `ps` the shards that run already.

    It begins with `least` workers, and has up to the job's `workers` of them.
    `metrics` are the addresses at which shards that are started here, and then workers, serve their metrics.
    """

    job: Job
    command: Sequence[str]
    least: int
    folder: Path
    ps: str | None
    imports: Sequence[str]
    replace: bool
    recoveries: Recoveries
    metrics: Sequence[str] = ()
    trace: str = ""
    panel: LocalPanel | None = None
    tls: TLS | None = None
    engine: ClusterEngine = LOCAL
    insecure: bool = False

    def train(self, checkpoint: Checkpoint | None) -> None:
        """Train the job to its end, in as many attempts as it takes; see deploy/attempts.py."""
        before = self._newest()
        attempts = Attempts(AttemptPolicy(recovers=self.job.recovers, owns_shards=self.ps is None))
        timeout = _START_TIMEOUT
        while True:
            attempts.on(AttemptStarted(time.monotonic()))
            try:
                self._attempt(checkpoint, timeout)
                return
            except (ShardFailed, WorkerFailed, KeyboardInterrupt, SystemExit) as error:
                event = _end_of(error)
                if self.job.recovers and not isinstance(event, Interrupted):
                    try:
                        checkpoint = self._latest(before) or checkpoint
                    except EmbershardError as unreadable:
                        say(f"the job is not restarted: {unreadable}", err=True)
                        raise error from unreadable
                    if checkpoint is not None:
                        attempts.on(CheckpointSeen(checkpoint.url, checkpoint.manifest.step))
                decision = attempts.on(event)
                if not isinstance(decision, Restart):
                    if decision in (GiveUp.NO_PROGRESS, GiveUp.NO_CHECKPOINT):
                        say(f"the job is not restarted: {decision.value}", err=True)
                    raise
                url, step = (None, 0) if (seen := decision.checkpoint) is None else (seen.url, seen.step)
                self.recoveries.begin(_first_line(error), url, step)
            if self.ps is not None:
                timeout = _RETURN_TIMEOUT
                say(f"waiting up to {timeout.total_seconds():.0f} s for the shards at {self.ps}")
            time.sleep(decision.pause.total_seconds())

    def _attempt(self, checkpoint: Checkpoint | None, timeout: timedelta) -> None:
        """Start shards, unless there are some, and workers; wait for them, and end them all."""
        job, ps, run = self.job, self.ps, str(time.time_ns())
        with contextlib.ExitStack() as stack:
            if ps is None:  # others may still write
                stack.callback(self._remove_unfinished, run)  # by then all processes have ended
            local = self._local_shards(stack) if job.has_shards and ps is None else None
            if ps is not None:
                _meet_shards(ps, checkpoint, self.replace, timeout, self.tls, is_first=not self.recoveries.made)
            if local is not None:
                stack.callback(local.close)
                local.start()
            # shards that outlive a run must not take the next one's workers for late ones of the last
            command = [*self.command, "--run", run, *(["--ps", "-"] if job.has_shards else [])]
            command += ["--started-here"] if ps is None else []
            shutil.rmtree(self.folder / WORKER_RECORDS, ignore_errors=True)  # of an attempt before
            if checkpoint is not None:
                command += ["--resume", checkpoint.url]
            running = LocalWorkers(
                self.least,
                command,
                self.folder,
                metrics=self.metrics[-job.workers :],
                elastic=job.elastic(job.workers),
                most=job.workers,
                restarts=job.train.restart_workers,
                records=self.folder / WORKER_RECORDS,
                engine=self.engine,
                say=say,
            )
            stack.enter_context(running)
            stack.callback(self.recoveries.stop)  # before the processes are ended, which may take a while
            if local is not None:  # they start while the workers import torch
                local.wait_until_serving()
                ps = ",".join(local.addresses)
                if checkpoint is not None:
                    _restore_onto(local, checkpoint, self.replace, self.tls)
            if ps is not None:
                running.connect(ps)
                if self.panel is not None:
                    self.panel.connect(ps)
            scaling = self._scaling(stack, ps)
            running.wait(lambda: self._look(local, running, scaling))
        if running.lost:
            lost = ", ".join(f"worker {rank} ({', '.join(how)})" for rank, how in sorted(running.lost.items()))
            say(f"lost workers: {len(running.lost)} of {job.workers}: {lost}")
        if self.recoveries.made:
            say(self.recoveries.summary())
        say(f"run log: {self.folder / 'log.jsonl'}")

    def _local_shards(self, stack: contextlib.ExitStack) -> LocalShards:
        """The shards of one attempt. A log lasts as long: the next attempt goes on from a checkpoint."""
        job = self.job
        settings = ShardSettings(
            imports=self.imports,
            metrics=self.metrics[: -job.workers],
            trace=self.trace,
            tls=None if self.tls is None else self.tls.path,
            options=self._shard_options,
        )
        if job.durability == "memory":
            return LocalShards(job.shards, settings, engine=self.engine)
        _remove_logs(self.folder)
        logs = self.folder / f"{_LOGS}-{time.time_ns()}"
        stack.callback(_remove_logs, self.folder)
        settings = replace(settings, durability=job.durability, log_dir=logs)
        return LocalShards(job.shards, settings, restart=RestartPolicy(), engine=self.engine, report=say)

    @property
    def _shard_options(self) -> Sequence[str]:
        """Options of shards on other machines: whether to allow plain connections, and the folders of checkpoints."""
        if self.engine.is_local:
            return ()
        words = ["--insecure"] if self.insecure else []
        for folder in (str(self.folder / "best"), str(self.job.checkpoint.folder or "")):
            words += ["--snapshots", folder if "://" in folder else str(Path(folder).absolute())] if folder else []
        return words

    def _scaling(self, stack: contextlib.ExitStack, ps: str | None) -> WorkerScaling | None:
        """What changes the number of workers, of a job whose workers may come and go."""
        if ps is None or self.least == self.job.workers:
            return None
        policy = ScalingPolicy(least=self.least, most=self.job.workers)
        return stack.enter_context(contextlib.closing(WorkerScaling(policy, self.folder, ps, self.tls, say)))

    def _look(
        self, local: LocalShards | None, running: LocalWorkers, scaling: WorkerScaling | None
    ) -> EmbershardError | None:
        """Watch the job while its workers train; the failure of a shard, which is returned, ends the wait for them."""
        check_interrupt()
        self.recoveries.look()
        if scaling is not None:
            scaling.look(running)
        return None if local is None else local.failure

    def _remove_unfinished(self, run: str) -> None:
        """Remove the checkpoint that the end of this attempt met half written."""
        if (best := self.folder / "best").is_dir():
            remove_unfinished(str(best), run)
        folder = self.job.checkpoint.folder
        if folder is not None:
            # a thread: a storage that does not answer may take minutes to say so
            removal = threading.Thread(target=remove_unfinished, args=[folder, run], daemon=True)
            removal.start()
            removal.join(_REMOVAL_SECONDS)
            if removal.is_alive():
                say(f"{folder} does not answer: half of a checkpoint may have stayed there", err=True)

    def _newest(self) -> float:
        """When the newest checkpoint in the job's folder was made: those of this run are newer, whatever clocks say."""
        from embershard.worker.checkpoint.checkpoint import checkpoint_names, time_of_newest

        if not self.job.recovers or self.job.checkpoint.folder is None:
            return 0.0
        storage = Storage(self.job.checkpoint.folder)
        return time_of_newest(storage, checkpoint_names(storage))

    def _latest(self, before: float) -> Checkpoint | None:
        """The latest checkpoint that this job has made; a folder may hold later steps of a run before it."""
        from embershard.worker.checkpoint.checkpoint import checkpoint_at

        assert self.job.checkpoint.folder is not None
        found = checkpoint_at(self.job.checkpoint.folder)
        return found if found is not None and found.manifest.time > before else None


def _remove_logs(folder: Path) -> None:
    """Remove the shards' logs of attempts that have ended, also of a run that was killed whole; none that is in use."""
    from embershard.ps.journal.folder import LogFolder
    from embershard.ps.journal.summary import find_logs

    for logs in folder.glob(f"{_LOGS}-*"):
        try:
            for log in find_logs(logs):
                LogFolder.existing(log).close()
        except LogLocked:
            continue
        except EmbershardError:
            pass  # it has no whole log
        shutil.rmtree(logs, ignore_errors=True)


def _end_of(error: BaseException) -> Event:
    """What ended an attempt."""
    now = time.monotonic()
    match error:
        case WorkerFailed(fields={"code": int() as code}):
            return WorkerEnded(now, ErrorKind.of(code))
        case ShardFailed(fields={"code": int() as code, "served": served}):
            return ShardEnded(now, ErrorKind.KILLED if served else ErrorKind.of(code))
    return Interrupted()


def _first_line(error: BaseException) -> str:
    """How an attempt ended, in short: a shard's or a worker's last lines follow in its log."""
    what = str(error.fields["what"]) if isinstance(error, ShardFailed) else str(error).partition(";")[0]
    return what.partition("\n")[0]


def _restore_onto(local: LocalShards, checkpoint: Checkpoint, replace: bool, tls: TLS | None) -> None:
    """Restore shards that were just started; ShardFailed where one of them ends meanwhile."""
    try:
        _meet_shards(",".join(local.addresses), checkpoint, replace, tls=tls, local=local)
    except EmbershardError as error:
        if local.failure is not None:
            raise local.failure from error
        raise


def _meet_shards(
    ps: str,
    checkpoint: Checkpoint | None,
    replace: bool,
    timeout: timedelta = _START_TIMEOUT,
    tls: TLS | None = None,
    *,
    is_first: bool = False,
    local: LocalShards | None = None,
) -> None:
    """Wait for the shards here, since a worker says only in its log that it waits; restore them from a checkpoint.

    The first attempt says so where the members of another job are on the shards, which it ends.

    Tables like the checkpoint's are replaced: after one shard died, the others of the job still hold them. Where one
    loses its rows meanwhile, all are restored once more, up to _RESTORES times in all.
    ShardUnavailable where one does not answer by the timeout; ClientClosed where `local`, which they are if they were
    started here, says before that one is gone for good. TablesInTheWay where the shards hold tables of another
    name, dim or optimizer, unless `replace` is true. RowsLost where one shard lost its rows, and no checkpoint gives
    them back.
    """
    from embershard.worker.client.client import Client

    for repeats in range(_RESTORES):
        try:
            with contextlib.closing(Client.connect(ps, timeout=timeout, tls=tls)) as client, _ended_with(local, client):
                if is_first and not repeats:
                    _warn_of_others(client)
                if checkpoint is not None and checkpoint.manifest.snapshot:
                    from embershard.worker.checkpoint.checkpoint import restore_shards

                    restore_shards(client, checkpoint, replace=replace)
                else:
                    client.lineage.check()
            return
        except ShardRestarted as error:
            # what it lost is in the checkpoint, too
            if checkpoint is None or repeats == _RESTORES - 1:
                raise
            say(f"the shard at {error.fields['address']} was restarted meanwhile: the checkpoint is restored again")


@contextlib.contextmanager
def _ended_with(shards: LocalShards | None, client: Client) -> Iterator[None]:
    """Close a client once one of its shards is gone for good: its calls would wait for that one until their timeout."""
    done = threading.Event()

    def watch(shards: LocalShards) -> None:
        while not done.is_set():
            if shards.wait(_LOOK) is not None:
                client.close()
                return

    if shards is not None:
        threading.Thread(target=watch, args=[shards], name="shards", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _warn_of_others(client: Client) -> None:
    """Say so where shards have members, whose job ends as ours begins; a job of one worker may have none."""
    with contextlib.suppress(EmbershardError):  # which training does not need
        others = len(client.status()[0].members)  # paused ones, too, as in an evaluation
        if others:
            say(
                f"another job (workers: {others}), or a run that was killed, is on these shards, which train one job "
                "at a time: it ends as this one begins",
                err=True,
            )
