"""`embershard worker`: one worker of a job as a service."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer

from embershard.cli.app import fail
from embershard.cli.monitoring import (
    LogFormatOption,
    MetricsOption,
    TraceEveryOption,
    TraceOption,
    open_metrics,
    say,
)
from embershard.cli.scaling import check_scales
from embershard.cli.security import TokenFileOption
from embershard.cli.shards import ENVIRONMENT, is_from_environment
from embershard.cli.signals import ended_by_signals
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
from embershard.proto.monitoring.logs import log_as_json, logs_json
from embershard.proto.monitoring.tracing import SpanSender, StepTracer
from embershard.proto.security.tls import TLS
from embershard.proto.timing import Recorder
from embershard.proto.transport.addresses import parse_addresses
from embershard.worker.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointNotWritten,
    find_checkpoint,
    with_preprocessing,
)
from embershard.worker.checkpoint.recovery import FirstWorkerMissing, NoProgress, Run, RunFile
from embershard.worker.client.client import Client
from embershard.worker.client.worker_group import JOIN_TIMEOUT, ShardGroup, WorkerGroup
from embershard.worker.device import keep_freed_memory
from embershard.worker.job.checks import check_opened
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.job.user_code import search_from
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
RANK_VARIABLES = ["RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"]  # torchrun's, Slurm's, Kubernetes'; the first counts


def worker(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file.")],
    ps: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES",
            envvar=ENVIRONMENT,
            help="host:port of every shard, with commas between, or file:DIR, for a strategy that has some. -: a line "
            "of stdin.",
        ),
    ] = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value, over the job file; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="EMBERSHARD_DATA", help="Folder of the data, instead of the job's data.root.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of log.jsonl and TensorBoard events.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write profile.json and trace.json into --output, and print the split.")
    ] = False,
    rank: Annotated[int, typer.Option(envvar=RANK_VARIABLES, help="This worker's number.", min=0)] = 0,
    world_size: Annotated[
        int, typer.Option(envvar=["WORLD_SIZE", "SLURM_NTASKS"], help="Number of workers.", min=1)
    ] = 1,
    start_workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers that the job begins with, where others may join later.  [default: all]", min=1
        ),
    ] = None,
    local_rank: Annotated[
        int | None,
        typer.Option(
            envvar=["LOCAL_RANK", "SLURM_LOCALID"], help="Its number on this machine.  [default: its rank]", min=0
        ),
    ] = None,
    local_world_size: Annotated[
        int, typer.Option(envvar="LOCAL_WORLD_SIZE", help="Workers on this machine, who share its cores.", min=0)
    ] = 0,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module with codecs, found from here or installed; may be repeated."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Emulate a slower link to the shards, as in 100mbit; instead of the job's.")
    ] = None,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds to wait at the start for the other workers.", min=0.1)
    ] = JOIN_TIMEOUT.total_seconds(),
    run: Annotated[
        int,
        typer.Option(
            help="Number of the run, the same for all of its workers: a higher one than any before on these shards "
            "begins anew, whoever still trains there.  [default: take part in the run that goes on]",
            show_default=False,
            min=0,
            max=2**63 - 1,
        ),
    ] = 0,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint, whose snapshot the shards were given before.")
    ] = None,
    recover: Annotated[
        bool,
        typer.Option(
            "--recover",
            help="For workers that a cluster starts again: the first one begins a run, and gives all shards the latest "
            "checkpoint; the others take part in it. Without checkpoint.folder it has no meaning.",
        ),
    ] = False,
    attempts: Annotated[
        int,
        typer.Option(help="With --recover: tries in a row without a new checkpoint, after which the job ends.", min=1),
    ] = 3,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    trace_every: TraceEveryOption = 1000,
    started_here: Annotated[
        bool,
        typer.Option("--started-here", hidden=True, help="All shards and workers see --output, and end with this run."),
    ] = False,
    parent_pid: Annotated[int, typer.Option(hidden=True, help="End when this process, our parent, ends.")] = 0,
) -> None:
    """Train as one worker of a job; its place among the workers comes from torchrun's variables.

    Several workers connect at MASTER_ADDR and MASTER_PORT. Without any variable it is the only worker. The exit code is
    75 where a shard or another worker was lost, which a start from the last checkpoint may cure, and 76 where that was
    tried too often (--attempts).
    """
    if parent_pid:
        threading.Thread(target=_end_with, args=(parent_pid,), name="parent", daemon=True).start()
    if log_format == "json":
        log_as_json(sys.stdout, worker=rank, run=output.name if output is not None else "")
    if imports:
        search_from(Path())
    if rank >= world_size:
        raise typer.BadParameter(f"workers count from 0, so rank {rank} of {world_size} does not exist")
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
    timeout = timedelta(seconds=join_timeout)
    own = rank if local_rank is None else local_rank
    place = WorkerRanks(rank, world_size, own, local_world_size or world_size, timeout, run, started_here, metrics)
    place = dataclasses.replace(place, trace=trace, trace_every=trace_every, tls=tls_of(tls, tls_server_name))
    if start_workers is not None:
        place = dataclasses.replace(place, at_start=start_workers)
        check_scales(settings, start_workers, world_size)
    _prepare(settings, place)
    profile = profile and rank == 0
    # the first process of a container gets no SIGTERM that it does not ask for
    ends = ended_by_signals() if os.getpid() == 1 else contextlib.nullcontext()
    lost = LOST_ERRORS + (_RECOVERED_ERRORS if recover else ())
    try:
        with ends, _recovered(settings, ps if recover else None, place, attempts) as recovered:
            if recovered is not None and recovered.is_done:
                say(f"the job is done: its last checkpoint is in {settings.checkpoint.folder}")
                return
            if recovered is not None:
                place, checkpoint = dataclasses.replace(place, run=recovered.number), recovered.resume
            _train(
                with_preprocessing(settings, job.parent, checkpoint),
                job.parent,
                ps,
                place,
                imports=imports or (),
                output=folder,
                checkpoint=checkpoint,
                profile=profile,
            )
    except lost as error:
        fail(str(error), LOST_EXIT_CODE)
    except NoProgress as error:
        fail(str(error), NO_PROGRESS_EXIT_CODE)


@contextlib.contextmanager
def _recovered(job: Job, ps: str | None, place: WorkerRanks, attempts: int) -> Iterator[Run | None]:
    """The run that this worker takes part in, done when the block ends well.

    None for a job without checkpoints, or without shards that it could recover.
    """
    if job.checkpoint.folder is None or ps is None:
        yield None
        return
    runs = RunFile(job)
    client = Client.connect(ps, worker=place.rank, timeout=place.join_timeout, tls=place.tls)
    with contextlib.closing(client):
        if place.rank == 0:
            run = runs.begin(client, attempts=attempts)
        else:
            run = runs.wait(client, place.rank, place.join_timeout.total_seconds())
    yield run
    if not run.is_done:  # by each: the first worker may have been lost at the end
        runs.end(run)


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """One worker among all of a run, and among those of this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    join_timeout: timedelta
    run: int = 0
    started_here: bool = False
    metrics: str = ""
    trace: str = ""
    trace_every: int = 1000
    tls: TLS | None = None
    at_start: int = 0  # workers that the job begins with, where others may come; 0: all

    @property
    def is_elastic(self) -> bool:
        """Whether workers may come later, and leave before the end."""
        return 0 < self.at_start < self.world_size


def _train(
    job: Job,
    base: Path,
    ps: str | None,
    place: WorkerRanks,
    *,
    imports: Sequence[str],
    output: Path | None,
    checkpoint: Checkpoint | None,
    profile: bool,
) -> None:
    """Train as one worker; the data's paths start at `base`."""
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(open_metrics(place.metrics, place.rank, output))

        def open_observers() -> list[Observer]:
            observers = _observers(job, output)
            for observer in observers:
                stack.callback(observer.close)
            return observers

        # first: a bad folder is a mistake to hear of now; the others' are opened if they stand in for a lost worker
        observers = open_observers() if place.rank == 0 else open_observers
        loader = _loader(job, base, place, checkpoint)  # it starts while we connect
        if loader is not None:
            stack.enter_context(loader)
        with _compilation_shown(place):
            compile_missing()  # before others wait for this worker, and after the mistakes that it can find by itself
        session = stack.enter_context(_connect(job, ps, place, imports)) if ps is not None else None
        if session is not None and checkpoint is not None:
            check_restored(session.client, checkpoint)
        group = stack.enter_context(_join(job, session, place))
        if place.is_elastic:
            signal.signal(LEAVE_SIGNAL, lambda *_: setattr(group, "leaving", True))
        dataset = job.data.open(base, job.train.seed)
        check_opened(job, dataset)
        trainer = Trainer(
            job,
            dataset,
            session,
            group,
            observers,
            loader,
            output=output,
            resume=checkpoint,
            best_folder=output / "best" if output is not None and place.started_here else None,
            restore_best=not place.started_here,  # nobody could read what ends with the run
        )
        assert output is not None or not profile
        with Profile(output) if output is not None and profile else Recorder() as recorder:
            if place.trace:
                sender = stack.enter_context(SpanSender(place.trace, "embershard-worker", worker=place.rank))
                recorder.tracer = StepTracer(sender, place.trace_every)
            if metrics is not None:
                recorder.watch = steps = StepCounters()
                metrics.monitored = trainer.monitored(steps)
            trainer.run()
        if isinstance(recorder, Profile):
            say(recorder.summary())
        if job.all_reduces:
            group.barrier()  # whoever is done first keeps its connections until all are


def _check_mode(job: Job, ps: str | None, world_size: int) -> None:
    if job.has_shards and ps is None:
        raise typer.BadParameter(f"strategy {job.strategy} has shards: name them with --ps")
    if ps is not None and ps != "-":
        parse_addresses(ps)  # before kernels are compiled
    if not job.has_shards and ps is not None:
        raise typer.BadParameter(f"strategy {job.strategy} has no shards: --ps has no meaning with it")
    if job.strategy in ("local", "dp") and world_size > 1:
        raise typer.BadParameter(f"strategy {job.strategy} trains in one process, not in {world_size}; use ddp")


def _prepare(job: Job, place: WorkerRanks) -> None:
    """Make the settings of this process."""
    keep_freed_memory()
    torch.set_num_threads(job.worker_threads(place.local_world_size))
    if job.train.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())


def _loader(job: Job, folder: Path, place: WorkerRanks, checkpoint: Checkpoint | None) -> LoaderProcess | None:
    """The process that makes the batches, where the job is better off with one."""
    if not job.loader_processes(place.local_world_size):
        return None
    position = Position() if checkpoint is None else position_of(checkpoint, place.rank, place.world_size)
    share = DataShare(
        data=job.data,
        folder=folder,
        seed=job.train.seed,
        rank=place.rank,
        world_size=place.world_size,
        batch_size=job.train.batch_size,
        epoch=position.epoch,
        skip=position.batch,
        splits=job.num_splits(place.world_size),
    )
    return LoaderProcess(share)


def _connect(job: Job, ps: str, place: WorkerRanks, imports: Sequence[str]) -> Session:
    train = job.train
    if ps == "-":  # as late as can be: whoever started this process starts the shards meanwhile
        ps = sys.stdin.readline().strip()
    session = connect(
        ps,
        worker=place.rank,
        workers=place.at_start or place.world_size,
        elastic=place.is_elastic,
        staleness=train.bound,
        lease=timedelta(seconds=train.lease),
        recovery_timeout=timedelta(seconds=train.recovery_timeout),
        staleness_aware_lr=train.staleness_aware_lr,
        run=place.run,
        local_steps=train.local_steps,
        bandwidth=job.network.bandwidth,
        imports=imports,
        tls=place.tls,
    )
    if place.rank == 0 and not sys.stderr.isatty():  # `train` shows what this one prints, and not its log
        session.switching.say = say
    return session


def _join(job: Job, session: Session | None, place: WorkerRanks) -> WorkerGroup:
    """Join the other workers: on the shards, or, where torch all-reduces, by torch.distributed."""
    if job.all_reduces:
        return WorkerGroup.join(place.rank, place.world_size, place.join_timeout, nccl=_has_own_gpu(job, place))
    if session is not None and session.membership is not None:
        return ShardGroup(session.client, place.rank, place.world_size, place.join_timeout, place.at_start)
    return WorkerGroup(place.rank, place.world_size)


@contextlib.contextmanager
def _compilation_shown(place: WorkerRanks) -> Iterator[None]:
    """Show on stderr, which is the worker's log under `train`, that kernels are compiled; the first worker says it."""
    if logs_json():
        yield
        return
    log, handler = logging.getLogger(compile_missing.__module__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    told: list[bool] = [] if place.rank == 0 else [True]

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


def _has_own_gpu(job: Job, place: WorkerRanks) -> bool:
    """Whether no other worker of this machine shares this one's GPU, as nccl wants it; without a GPU it is False."""
    gpus = torch.cuda.device_count() if job.train.device != "cpu" and torch.cuda.is_available() else 0
    if 0 < gpus < place.local_world_size and job.dense_mode == "fsdp":
        reason = f"{place.local_world_size} workers share {gpus} GPUs, and fsdp needs one for each"
        remedy = "use fewer workers, ddp, or train.device: cpu; on several machines set LOCAL_RANK and LOCAL_WORLD_SIZE"
        raise JobError(where="dense.mode", reason=f"{reason}; {remedy}")
    return gpus >= place.local_world_size


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


def _end_with(parent_pid: int) -> None:
    """End this process and its session once its parent, asked twice a second, is gone."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    sessions.kill_own()  # nothing here would be lost, and nothing may hold it up
