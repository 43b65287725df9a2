"""`embershard worker`: one worker of a job as a service."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer

from embershard.cli.app import fail
from embershard.cli.job_file import DataOption, SetOption
from embershard.cli.monitoring import LogFormatOption, MetricsOption, TraceEveryOption, TraceOption, open_metrics, say
from embershard.cli.ranks import (
    LocalRankOption,
    LocalWorldSizeOption,
    RankOption,
    StartWorkersOption,
    WorkerRanks,
    WorldSizeOption,
)
from embershard.cli.scaling import check_scales
from embershard.cli.security import TokenFileOption
from embershard.cli.shards import is_from_environment, shards_option
from embershard.cli.signals import ParentPidOption, end_with_parent, ended_by_signals
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.deploy import sessions
from embershard.deploy.attempts import LOST_ERRORS, LOST_EXIT_CODE, NO_PROGRESS_EXIT_CODE
from embershard.deploy.workers import LEAVE_SIGNAL
from embershard.proto.compiled.jit import compile_missing
from embershard.proto.errors import (
    JobError,
    SnapshotTimeout,
    SnapshotUnknown,
    SnapshotUnreadable,
    StaleRun,
    StaleWorker,
)
from embershard.proto.monitoring.exporter import MetricsServer
from embershard.proto.monitoring.logs import log_as_json, logs_json
from embershard.proto.monitoring.tracing import SpanSender, StepTracer
from embershard.proto.security.tls import TLS
from embershard.proto.timing import Recorder
from embershard.proto.transport.addresses import parse_addresses
from embershard.proto.user_modules import search_from
from embershard.worker.checkpoint.checkpoint import Checkpoint, find_checkpoint, with_preprocessing
from embershard.worker.checkpoint.folder import CheckpointNotWritten
from embershard.worker.checkpoint.recovery import FirstWorkerMissing, NoProgress, RunFile
from embershard.worker.client.client import Client
from embershard.worker.client.worker_group import JOIN_TIMEOUT, ShardGroup, WorkerGroup
from embershard.worker.device import keep_freed_memory
from embershard.worker.job.checks import check_opened
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.reporting.callbacks import Callback
from embershard.worker.reporting.log import JsonLog, RunEvents, TensorBoardLog
from embershard.worker.reporting.profile import Profile
from embershard.worker.reporting.prometheus import StepCounters
from embershard.worker.reporting.records import Observer
from embershard.worker.session.connect import connect
from embershard.worker.session.session import Session
from embershard.worker.training.budget import Position
from embershard.worker.training.loader import DataShare, LoaderProcess
from embershard.worker.training.saver import NotRestored, check_restored, position_of
from embershard.worker.training.trainer import Trainer

# which another start may cure, too, with --recover: the first worker counts its starts without progress
_RECOVERED_ERRORS = (
    CheckpointNotWritten, FirstWorkerMissing, NotRestored, SnapshotTimeout, SnapshotUnknown, SnapshotUnreadable,
    StaleRun, StaleWorker,
)  # fmt: skip


def worker(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file.")],
    ps: Annotated[
        str | None, shards_option("For a strategy with shards. -: read the addresses as a line from stdin.")
    ] = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    overrides: SetOption = None,
    data: DataOption = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run log (log.jsonl) and TensorBoard events.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Print the time of each part of a step, and write profile.json and trace.json to --output.",
        ),
    ] = False,
    rank: RankOption = 0,
    world_size: WorldSizeOption = 1,
    start_workers: StartWorkersOption = None,
    local_rank: LocalRankOption = None,
    local_world_size: LocalWorldSizeOption = 0,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module with codecs, in this folder or installed; may be repeated."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Emulate a slower link to the shards, such as 100mbit; instead of the job's.")
    ] = None,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the other workers at the start.", min=0.1)
    ] = JOIN_TIMEOUT.total_seconds(),
    run: Annotated[
        int,
        typer.Option(
            help="Run number (a fencing token), the same for all workers of a run. If it is higher than any before on "
            "these shards, this run takes them over, and workers with a lower number are refused. [default: join "
            "the running workers]",
            show_default=False,
            min=0,
            max=2**63 - 1,
        ),
    ] = 0,
    resume: Annotated[
        str | None, typer.Option(help="Continue from this checkpoint; restore its snapshot onto the shards first.")
    ] = None,
    recover: Annotated[
        bool,
        typer.Option(
            "--recover",
            help="For workers that a cluster restarts: whenever worker 0 starts, it restores the latest checkpoint "
            "onto all shards and begins a new attempt; the other workers join it. It has no effect without "
            "checkpoint.folder.",
        ),
    ] = False,
    attempts: Annotated[
        int,
        typer.Option(
            help=("With --recover: maximum number of attempts in a row without a new checkpoint; then the job ends."),
            min=1,
        ),
    ] = 3,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    trace_every: TraceEveryOption = 1000,
    started_here: Annotated[
        bool,
        typer.Option(
            "--started-here",
            hidden=True,
            help=("All shards and workers see the folder --output, and end with this run."),
        ),
    ] = False,
    parent_pid: ParentPidOption = 0,
) -> None:
    """Train as one worker of a job; its rank and the number of workers come from the variables of torchrun.

    Without these variables it is the only worker. Workers find each other on the shards or, if torch all-reduces the
    dense weights (ddp, hybrid), at MASTER_ADDR and MASTER_PORT. The exit code is 75 if a shard or another worker was
    lost: start the job again from its last checkpoint. It is 76 if too many attempts failed (--attempts).
    """
    end_with_parent(parent_pid, sessions.kill_own)  # nothing here would be lost, and nothing may hold it up
    if log_format == "json":
        log_as_json(sys.stdout, worker=rank, run=output.name if output is not None else "")
    if imports:
        search_from(Path())
    ranks = WorkerRanks(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=local_world_size or world_size,
        at_start=start_workers or 0,
    )
    slower = [f"network.bandwidth={bandwidth}"] if bandwidth is not None else []
    settings = load_job(job, [*(overrides or ()), *slower], data)
    if not settings.has_shards and is_from_environment(context):
        ps = None
    _check_mode(settings, ps, world_size)
    if recover and (resume is not None or run):
        raise typer.BadParameter("--recover finds the run and its checkpoint: leave out --resume and --run")
    if recover and start_workers is not None:
        raise typer.BadParameter("--recover begins with all workers: leave out --start-workers")
    checkpoint = None if resume is None else find_checkpoint(resume, settings)
    folder = output or settings.output
    if profile and folder is None:
        raise typer.BadParameter("--profile writes files: name a folder with --output, or in the job")
    one = _Worker(
        job=settings,
        base=job.parent,
        ps=ps,
        ranks=ranks,
        join_timeout=timedelta(seconds=join_timeout),
        run=run,
        imports=imports or (),
        output=folder,
        profile=profile and rank == 0,
        started_here=started_here,
        metrics=metrics,
        trace=trace,
        trace_every=trace_every,
        tls=tls_of(tls, tls_server_name),
    )
    if start_workers is not None:
        check_scales(settings, start_workers, world_size)
    _prepare(settings, ranks)
    # the first process of a container gets no SIGTERM that it does not ask for
    ends = ended_by_signals() if os.getpid() == 1 else contextlib.nullcontext()
    lost = LOST_ERRORS + (_RECOVERED_ERRORS if recover else ())
    try:
        with ends:
            if recover:
                one.recover(attempts)
            else:
                one.train(checkpoint)
    except lost as error:
        fail(str(error), LOST_EXIT_CODE)
    except NoProgress as error:
        fail(str(error), NO_PROGRESS_EXIT_CODE)


@dataclass(frozen=True, kw_only=True)
class _Worker:
    """One worker of a job, and how it takes part: the data's paths start at `base`, `ps` are the addresses of shards.

    `run` is the number of the run, 0 that of the one that goes on. `output` is the folder of its logs, which all shards
    and workers see where they were `started_here`. `metrics` is where it serves its metrics, `trace` where spans of one
    step in `trace_every` go.
    """

    job: Job
    base: Path
    ps: str | None
    ranks: WorkerRanks
    join_timeout: timedelta
    run: int = 0
    imports: Sequence[str] = ()
    output: Path | None = None
    profile: bool = False
    started_here: bool = False
    metrics: str = ""
    trace: str = ""
    trace_every: int = 1000
    tls: TLS | None = None

    def recover(self, attempts: int) -> None:
        """Train in the run that the first worker begins, from its checkpoint; NoProgress after `attempts` in vain.

        A job without checkpoints, or without shards that it could recover, is trained from the beginning.
        """
        if self.job.checkpoint.folder is None or self.ps is None:
            self.train(None)
            return
        runs, rank = RunFile(self.job), self.ranks.rank
        client = Client.connect(self.ps, worker=rank, timeout=self.join_timeout, tls=self.tls)
        with contextlib.closing(client):
            if rank == 0:
                run = runs.begin(client, attempts=attempts)
            else:
                run = runs.wait(client, rank, self.join_timeout.total_seconds())
        if run.is_done:
            say(f"the job is done: its last checkpoint is in {self.job.checkpoint.folder}")
            return
        dataclasses.replace(self, run=run.number).train(run.resume)
        runs.end(run)  # by each: the first worker may have been lost at the end

    def train(self, checkpoint: Checkpoint | None) -> None:
        """Train to the end, from the checkpoint if there is one."""
        job, ranks = with_preprocessing(self.job, self.base, checkpoint), self.ranks
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(open_metrics(self.metrics, ranks.rank, self.output))

            def open_observers() -> list[Observer]:
                observers = _observers(job, self.output)
                for observer in observers:
                    stack.callback(observer.close)
                return observers

            # first: a bad folder is a mistake to hear of now; the others' are opened if they stand in for a lost worker
            observers = open_observers() if ranks.rank == 0 else open_observers
            loader = _loader(job, self.base, ranks, checkpoint)  # it starts while we connect
            if loader is not None:
                stack.enter_context(loader)
            with _compilation_shown(ranks.rank):
                compile_missing()  # before others wait for this worker, and after the mistakes it can find by itself
            session = None if self.ps is None else stack.enter_context(self._connect(self.ps))
            if session is not None and checkpoint is not None:
                check_restored(session.client, checkpoint)
            group = stack.enter_context(self._join(session))
            if ranks.is_elastic:
                signal.signal(LEAVE_SIGNAL, lambda *_: setattr(group, "leaving", True))
            dataset = job.data.open(self.base, job.train.seed)
            check_opened(job, dataset)
            trainer = Trainer(
                job,
                dataset,
                session,
                group,
                observers,
                loader,
                output=self.output,
                resume=checkpoint,
                best_folder=self.output / "best" if self.output is not None and self.started_here else None,
                restore_best=not self.started_here,  # nobody could read what ends with the run
                owner=str(self.run) if self.started_here else "",  # others may begin runs of one number
            )
            self._run(trainer, metrics, stack)
            if job.all_reduces:
                group.barrier()  # whoever is done first keeps its connections until all are

    def _run(self, trainer: Trainer, metrics: MetricsServer | None, stack: contextlib.ExitStack) -> None:
        """Run the trainer, and record its steps for a profile, traces and metrics as they are asked for."""
        assert self.output is not None or not self.profile
        with Profile(self.output) if self.output is not None and self.profile else Recorder() as recorder:
            if self.trace:
                sender = stack.enter_context(SpanSender(self.trace, "embershard-worker", worker=self.ranks.rank))
                recorder.tracer = StepTracer(sender, self.trace_every)
            if metrics is not None:
                recorder.watch = steps = StepCounters()
                metrics.monitored = trainer.monitored(steps)
            trainer.run()
        if isinstance(recorder, Profile):
            say(recorder.summary())

    def _connect(self, ps: str) -> Session:
        train, ranks = self.job.train, self.ranks
        if ps == "-":  # as late as can be: whoever started this process starts the shards meanwhile
            ps = sys.stdin.readline().strip()
        session = connect(
            ps,
            worker=ranks.rank,
            workers=ranks.at_start or ranks.world_size,
            elastic=ranks.is_elastic,
            staleness=train.bound,
            lease=timedelta(seconds=train.lease),
            recovery_timeout=timedelta(seconds=train.recovery_timeout),
            staleness_aware_lr=train.staleness_aware_lr,
            run=self.run,
            local_steps=train.local_steps,
            bandwidth=self.job.network.bandwidth,
            imports=self.imports,
            tls=self.tls,
        )
        if ranks.rank == 0 and not sys.stderr.isatty():  # `train` shows what this one prints, and not its log
            session.switching.say = session.client.connections.say = say
        return session

    def _join(self, session: Session | None) -> WorkerGroup:
        """Join the other workers: on the shards, or, where torch all-reduces, by torch.distributed."""
        job, rank, world_size = self.job, self.ranks.rank, self.ranks.world_size
        if job.all_reduces:
            return WorkerGroup.join(rank, world_size, self.join_timeout, nccl=_has_own_gpu(job, self.ranks))
        if session is not None and session.membership is not None:
            return ShardGroup(session.client, rank, world_size, self.join_timeout, self.ranks.at_start)
        return WorkerGroup(rank, world_size)


def _check_mode(job: Job, ps: str | None, world_size: int) -> None:
    if job.has_shards and ps is None:
        raise typer.BadParameter(f"strategy {job.strategy} has shards: name them with --ps")
    if ps is not None and ps != "-":
        parse_addresses(ps)  # before kernels are compiled
    if not job.has_shards and ps is not None:
        raise typer.BadParameter(f"strategy {job.strategy} has no shards: --ps has no meaning with it")
    if job.strategy in ("local", "dp") and world_size > 1:
        raise typer.BadParameter(f"strategy {job.strategy} trains in one process, not in {world_size}; use ddp")


def _prepare(job: Job, ranks: WorkerRanks) -> None:
    """Make the settings of this process."""
    keep_freed_memory()
    torch.set_num_threads(job.worker_threads(ranks.local_world_size))
    if job.train.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())


@contextlib.contextmanager
def _compilation_shown(rank: int) -> Iterator[None]:
    """Show on stderr, which is the worker's log under `train`, that kernels are compiled; the first worker says it."""
    if logs_json():
        yield
        return
    log, handler = logging.getLogger(compile_missing.__module__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    told: list[bool] = [] if rank == 0 else [True]

    def tell(_: logging.LogRecord) -> bool:
        if not told:
            told.append(True)
            typer.echo("compiling kernels, once on this machine: some seconds")
        return True

    handler.addFilter(tell)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)


def _loader(job: Job, folder: Path, ranks: WorkerRanks, checkpoint: Checkpoint | None) -> LoaderProcess | None:
    """The process that makes the batches, where the job is better off with one."""
    if not job.loader_processes(ranks.local_world_size):
        return None
    position = Position() if checkpoint is None else position_of(checkpoint, ranks.rank, ranks.world_size)
    share = DataShare(
        data=job.data,
        folder=folder,
        seed=job.train.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        batch_size=job.train.batch_size,
        epoch=position.epoch,
        skip=position.batch,
        splits=job.num_splits(ranks.world_size),
    )
    return LoaderProcess(share)


def _has_own_gpu(job: Job, ranks: WorkerRanks) -> bool:
    """Whether no other worker of this machine shares this one's GPU, as nccl wants it; without a GPU it is False."""
    gpus = torch.cuda.device_count() if job.train.device != "cpu" and torch.cuda.is_available() else 0
    if 0 < gpus < ranks.local_world_size and job.dense_mode == "fsdp":
        reason = f"{ranks.local_world_size} workers share {gpus} GPUs, and fsdp needs one for each"
        remedy = "use fewer workers, ddp, or train.device: cpu; on several machines set LOCAL_RANK and LOCAL_WORLD_SIZE"
        raise JobError(where="dense.mode", reason=f"{reason}; {remedy}")
    return gpus >= ranks.local_world_size


def _observers(job: Job, folder: Path | None) -> list[Observer]:
    observers: list[Observer] = []
    if folder is not None:
        observers.append(JsonLog(folder))
        board = TensorBoardLog.open(folder)
        observers += [board] if board is not None else []
    # after the logs: what is shown is in them, whatever becomes of this process
    if logs_json():
        observers.append(RunEvents())
    else:
        # imported here: one worker of a job reports, and the others need no rich
        from embershard.worker.reporting.terminal import Terminal

        observers.append(Terminal())
    return [*observers, *(Callback(callback.code, callback.args) for callback in job.callbacks)]
