"""`embershard train`: a whole job on this machine, its shards included unless others are named."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embershard.cli.dash import check_panel
from embershard.cli.engines import (
    EngineName,
    EngineOption,
    EngineSettings,
    InsecureOption,
    PackOption,
    ShardResourcesOption,
    WorkerResourcesOption,
    parse_resources,
)
from embershard.cli.job_file import DataOption, SetOption
from embershard.cli.monitoring import LogFormatOption, MetricsOption, TraceEveryOption, TraceOption, say
from embershard.cli.recovery import Recoveries
from embershard.cli.scaling import WorkerScaling, check_scales, parse_workers
from embershard.cli.security import TokenFileOption, token_words
from embershard.cli.shards import ENVIRONMENT, is_from_environment
from embershard.cli.signals import ParentPidOption, end_with_parent, ended_by_signals
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of, tls_words
from embershard.cli.user_code import check_user_code, try_job
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
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.deploy.workers import LocalWorkers, WorkerFailed
from embershard.proto.errors import CannotWrite, EmbershardError, LogLocked, ShardFailed, ShardUnavailable
from embershard.proto.monitoring.exporter import check_addresses, parse_address
from embershard.proto.monitoring.logs import log_as_json
from embershard.proto.security.tls import TLS
from embershard.proto.transport.addresses import parse_addresses
from embershard.worker.job.checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.job.tabular import TabularSection
from embershard.worker.reporting.log import make_folder
from embershard.worker.reporting.worker_record import FOLDER as WORKER_RECORDS

if TYPE_CHECKING:  # a job is checked in a second, without torch; only checkpoints need more
    from embershard.worker.checkpoint.checkpoint import Checkpoint


_START_TIMEOUT = timedelta(seconds=60)  # for shards to answer
_RETURN_TIMEOUT = timedelta(minutes=5)  # for shards that were not started here to come back
_LOGS = "shard-logs"
_LEAST_BYTES = 64 * 1024  # that a disk has left which is not full: less than the logs of a run take


def train(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file, YAML.")],
    ps: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES",
            envvar=ENVIRONMENT,
            help="host:port of every shard, with commas between.  [default: shards are started here]",
        ),
    ] = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N|N-M",
            help="Workers to start, instead of the job's. 2-8: two, and up to eight while more of them pay.",
        ),
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Shards to start, instead of the job's.", min=1)] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Emulate a slower link between each worker and the shards, as in 100mbit; instead of the job's."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of logs and TensorBoard events.  [default: runs/JOB-TIME]")
    ] = None,
    overrides: SetOption = None,
    data: DataOption = None,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            help="Module with row optimizers or codecs, for the workers and the shards started here; may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on from a checkpoint: its folder, the newest of a folder, or `latest` or `best` of "
            "checkpoint.folder; auto: the latest, if there is one."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --resume: do so even where the shards hold tables of another job.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Print where the first worker's time goes; profile.json and trace.json go into the run's folder.",
        ),
    ] = False,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    trace_every: TraceEveryOption = 1000,
    dash: Annotated[
        bool, typer.Option("--dash", help="Serve a page that shows the job, until it ends, and print its address.")
    ] = False,
    engine: EngineOption = EngineName.LOCAL,
    insecure: InsecureOption = False,
    pack: PackOption = False,
    shard_resources: ShardResourcesOption = "",
    worker_resources: WorkerResourcesOption = "",
    parent_pid: ParentPidOption = 0,
) -> None:
    """Train a job: start shards and workers here, show how it goes, end them all.

    With --metrics HOST:PORT the shards started here serve their metrics at this port and those that follow, then the
    workers.

    A job with checkpoints goes on from the latest one where a shard or a worker is lost (train.recover).
    """
    if log_format == "json":
        log_as_json(sys.stdout)
    end_with_parent(parent_pid)
    on = EngineSettings(
        name=engine,
        insecure=insecure,
        pack=pack,
        shard_resources=parse_resources(shard_resources, "--shard-resources"),
        worker_resources=parse_resources(worker_resources, "--worker-resources"),
    )
    least, most = parse_workers(workers) or (None, None)
    given = {"workers": most, "shards": shards, "network.bandwidth": bandwidth, "train.threads": on.worker_threads}
    sets = [*(overrides or ()), *(f"{name}={value}" for name, value in given.items() if value is not None)]
    settings = load_job(job, sets, data)
    if is_from_environment(context) and (shards is not None or not settings.has_shards):
        ps = None
    _check_shards(settings, ps, shards, imports)
    least = least or settings.workers
    check_scales(settings, least, settings.workers)
    addresses = _metrics_addresses(settings, ps, metrics)
    check_user_code([settings], imports or (), starts_shards=ps is None)
    if ps is not None:
        ps = ",".join(parse_addresses(ps))
    checkpoint = _find_checkpoint(settings, resume)
    before = None if checkpoint is None else checkpoint.output
    folder = output or settings.output or before or Path("runs") / f"{job.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [str(job), "--output", str(folder), *(word for assignment in sets for word in ("--set", assignment))]
    command += ["--data", str(data)] if data is not None else []
    command += ["--profile"] if profile else []
    command += ["--trace", trace, "--trace-every", str(trace_every)] if trace else []
    command += ["--log-format", log_format] if log_format != "text" else []
    command += [word for module in imports or () for word in ("--import", module)]
    command += ["--start-workers", str(least)] if least < settings.workers else []
    cluster = on.open(settings, ps, folder, tls=tls_of(tls, tls_server_name), metrics=metrics)
    make_folder(folder)
    certificates = tls_of(tls, tls_server_name) if settings.has_shards else None
    if certificates is None and settings.has_shards and ps is None and not (cluster.is_local or insecure):
        from embershard.deploy.authority import issue_for_run  # loads cryptography

        certificates = issue_for_run(folder.absolute() / f"keys-{time.time_ns()}")
    command += tls_words(certificates)
    command += [] if ps is None else token_words(context, token_file)
    try_job(settings, job, sets, data, imports or (), say)
    for line in compression_advice(settings):
        say(f"advice: {line}")
    command += _preprocessing(settings, job.parent, folder, checkpoint)
    if dash:
        check_panel()
    try:
        with ended_by_signals(), contextlib.ExitStack() as stack:
            stack.callback(cluster.close)
            started = _LocalJob(
                job=settings,
                command=command,
                least=least,
                folder=folder,
                ps=ps,
                imports=imports or (),
                replace=replace,
                recoveries=Recoveries(folder, say),
                metrics=addresses,
                trace=trace,
                tls=certificates,
                engine=cluster,
                insecure=insecure,
                panel=stack.enter_context(LocalPanel(folder, say, tls_words(certificates))) if dash else None,
            )
            started.train(checkpoint)
    except (EmbershardError, OSError) as error:
        check_disk(folder, error)  # a worker says in its log why it ended, which is in this folder
        stopped = isinstance(error, WorkerFailed | ShardUnavailable)
        if stopped and ps is not None and settings.checkpoint.folder is not None:
            say(f"to go on from the last checkpoint, on the same shards: {_resume_command(sys.argv[1:])}", err=True)
        raise


def _preprocessing(job: Job, base: Path, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
    """Have the training data read once for what its features need; words that give it to the workers."""
    if not isinstance(job.data, TabularSection) or job.data.fitted is not None:
        return []
    from embershard.worker.checkpoint.checkpoint import with_preprocessing

    with ended_by_signals():
        data = with_preprocessing(job, base, checkpoint).data
    assert isinstance(data, TabularSection)
    if data.fitted is None:
        return []
    if checkpoint is None:
        counted = ", ".join(f"{count:,} of {part}" for part, count in data.fitted["samples"].items())
        say(f"read the data once for what its features need: {counted}")
    path = folder / "preprocessing.json"
    try:
        path.write_text(json.dumps(data.preprocessor().to_dict()))
    except OSError as error:
        raise CannotWrite(path=str(path), reason=error.strerror or str(error)) from None
    return ["--set", f"data.fitted={json.dumps(str(path.absolute()))}"]


def check_disk(folder: Path, cause: Exception) -> None:
    """Raise CannotWrite where the disk of the run's folder is full."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _LEAST_BYTES:
            raise CannotWrite(path=str(folder), reason="no space is left on its disk") from cause


def _resume_command(words: Sequence[str]) -> str:
    """This command with `--resume latest`."""
    kept, previous = [], ""
    for word in words:
        if previous != "--resume" and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        previous = word
    return shlex.join(["embershard", *kept, "--resume", "latest"])


def _check_shards(job: Job, ps: str | None, shards: int | None, imports: list[str] | None) -> None:
    if not job.has_shards and (ps is not None or (imports and not job.has_user_code)):
        raise typer.BadParameter(f"strategy {job.strategy} has no shards: --ps and --import have no meaning with it")
    if ps is not None and shards is not None:
        raise typer.BadParameter("--ps names shards that run already: --shards has no meaning with it")


def _metrics_addresses(job: Job, ps: str | None, metrics: str) -> Sequence[str]:
    """Where shards that are started here, and then workers, serve their metrics; none of the ports is in use."""
    if not metrics:
        return ()
    if parse_address(metrics)[1] == 0:
        raise typer.BadParameter(
            "name a port: workers and shards take it and those that follow", param_hint="--metrics"
        )
    shards = job.shards if job.has_shards and ps is None else 0
    addresses = check_addresses(metrics, shards + job.workers)
    say(f"metrics: {' '.join(f'http://{address}/metrics' for address in addresses)}")
    return addresses


def _find_checkpoint(job: Job, resume: str | None) -> Checkpoint | None:
    """The checkpoint to go on from; the folder of new ones is looked at too, before anything starts."""
    if resume is None and job.checkpoint.folder is None:
        return None
    from embershard.worker.checkpoint.checkpoint import LATEST, CheckpointFolder, checkpoint_at, find_checkpoint

    if resume == "auto":
        folder = job.checkpoint.folder
        resume = LATEST if folder is None or checkpoint_at(folder) is not None else None
    checkpoint = None if resume is None else find_checkpoint(resume, job)
    if job.checkpoint.folder is not None:
        CheckpointFolder(job.checkpoint.folder).check(resumed=checkpoint is not None)
    return checkpoint


@dataclass(frozen=True, kw_only=True)
class _LocalJob:
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
        began = time.time()
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
                        checkpoint = self._latest(began) or checkpoint
                    except EmbershardError as unreadable:
                        say(f"the job is not started again: {unreadable}", err=True)
                        raise error from unreadable
                    if checkpoint is not None:
                        attempts.on(CheckpointSeen(checkpoint.url, checkpoint.manifest.step))
                decision = attempts.on(event)
                if not isinstance(decision, Restart):
                    if decision in (GiveUp.NO_PROGRESS, GiveUp.NO_CHECKPOINT):
                        say(f"the job is not started again: {decision.value}", err=True)
                    raise
                url, step = (None, 0) if (seen := decision.checkpoint) is None else (seen.url, seen.step)
                self.recoveries.begin(_first_line(error), url, step)
            if self.ps is not None:
                timeout = _RETURN_TIMEOUT
                say(f"waiting up to {timeout.total_seconds():.0f} s for the shards at {self.ps}")
            time.sleep(decision.pause.total_seconds())

    def _attempt(self, checkpoint: Checkpoint | None, timeout: timedelta) -> None:
        """Start shards, unless there are some, and workers; wait for them, and end them all."""
        job, ps = self.job, self.ps
        with contextlib.ExitStack() as stack:
            local = self._local_shards(stack) if job.has_shards and ps is None else None
            if ps is not None:
                _meet_shards(ps, checkpoint, self.replace, timeout, self.tls)
            if local is not None:
                stack.callback(local.close)
                local.start()
            # shards that outlive a run must not take the next one's workers for late ones of the last
            command = [*self.command, *(["--ps", "-", "--run", str(time.time_ns())] if job.has_shards else [])]
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
        say(f"log: {self.folder / 'log.jsonl'}")

    def _local_shards(self, stack: contextlib.ExitStack) -> LocalShards:
        """The shards of one attempt. A log lasts as long: the next attempt goes on from a checkpoint."""
        job, options = self.job, self._shard_options
        if job.durability == "memory":
            return LocalShards(
                job.shards,
                imports=self.imports,
                metrics=self._shard_metrics,
                trace=self.trace,
                tls=self._shard_certificates,
                options=options,
                engine=self.engine,
            )
        _remove_logs(self.folder)
        logs = self.folder / f"{_LOGS}-{time.time_ns()}"
        stack.callback(_remove_logs, self.folder)
        return LocalShards(
            job.shards,
            imports=self.imports,
            restart=RestartPolicy(),
            durability=job.durability,
            log_dir=logs,
            metrics=self._shard_metrics,
            trace=self.trace,
            tls=self._shard_certificates,
            options=options,
            engine=self.engine,
            report=say,
        )

    @property
    def _shard_options(self) -> Sequence[str]:
        """What shards need that other machines reach: leave for that, and the folders of the job's checkpoints."""
        if self.engine.is_local:
            return ()
        words = ["--insecure"] if self.insecure else []
        for folder in (str(self.folder / "best"), str(self.job.checkpoint.folder or "")):
            words += ["--snapshots", folder if "://" in folder else str(Path(folder).absolute())] if folder else []
        return words

    @property
    def _shard_certificates(self) -> Path | None:
        return None if self.tls is None else self.tls.path

    @property
    def _shard_metrics(self) -> Sequence[str]:
        return self.metrics[: -self.job.workers]

    def _scaling(self, stack: contextlib.ExitStack, ps: str | None) -> WorkerScaling | None:
        """What changes the number of workers, of a job whose workers may come and go."""
        if ps is None or self.least == self.job.workers:
            return None
        policy = ScalingPolicy(least=self.least, most=self.job.workers)
        return stack.enter_context(contextlib.closing(WorkerScaling(policy, self.folder, ps, self.tls, say)))

    def _look(
        self, local: LocalShards | None, running: LocalWorkers, scaling: WorkerScaling | None
    ) -> EmbershardError | None:
        """What is looked at while the workers train; the failure of a shard ends the wait for them."""
        self.recoveries.look()
        if scaling is not None:
            scaling.look(running)
        return None if local is None else local.failure

    def _latest(self, began: float) -> Checkpoint | None:
        """The latest checkpoint that this job has made; a folder may hold later steps of a run before it."""
        from embershard.worker.checkpoint.checkpoint import checkpoint_at

        assert self.job.checkpoint.folder is not None
        found = checkpoint_at(self.job.checkpoint.folder)
        return found if found is not None and found.manifest.time >= began else None


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
        _meet_shards(",".join(local.addresses), checkpoint, replace, tls=tls)
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
) -> None:
    """Wait for the shards here, since a worker says only in its log that it waits; restore them from a checkpoint.

    Tables like the checkpoint's are replaced: after one shard died, the others of the job still hold them.
    ShardUnavailable where one does not answer by the timeout. TablesInTheWay where the shards hold tables of another
    name, dim or optimizer, unless `replace` is true. RowsLost where one shard lost its rows, and no checkpoint gives
    them back.
    """
    from embershard.worker.client.client import Client

    with contextlib.closing(Client.connect(ps, timeout=timeout, tls=tls)) as client:
        if checkpoint is not None and checkpoint.manifest.snapshot:
            from embershard.worker.checkpoint.checkpoint import restore_shards

            restore_shards(client, checkpoint, replace=replace)
        else:
            client.lineage.check()
