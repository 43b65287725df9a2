"""`embershard train`: a whole job on this machine, its shards included unless others are named."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from functools import partial
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
from embershard.cli.folders import folder as folder_of
from embershard.cli.folders import kept_from_others
from embershard.cli.job_file import DataOption, SetOption
from embershard.cli.local_job import LocalJob
from embershard.cli.monitoring import LogFormatOption, MetricsOption, TraceEveryOption, TraceOption, say
from embershard.cli.recovery import Recoveries
from embershard.cli.scaling import check_scales, parse_workers
from embershard.cli.security import TokenFileOption, token_words
from embershard.cli.shards import is_from_environment, shards_option
from embershard.cli.signals import ParentPidOption, end_with_parent, ended_by_signals, note_interrupts
from embershard.cli.tls import ServerNameOption, TLSOption, check_certificates, tls_of, tls_words
from embershard.cli.user_code import check_user_code, try_job
from embershard.deploy.panel import LocalPanel
from embershard.deploy.workers import WorkerFailed
from embershard.proto.errors import CannotWrite, EmbershardError, OutputClosed, ShardUnavailable
from embershard.proto.monitoring.exporter import check_addresses, parse_address
from embershard.proto.monitoring.logs import log_as_json
from embershard.proto.security.tls import TLS
from embershard.proto.transport.addresses import parse_addresses
from embershard.worker.job.compression_checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.job.readers.tabular import TabularSection
from embershard.worker.reporting.log import OTHER_OUTPUT, make_folder

if TYPE_CHECKING:  # a job is checked in a second, without torch; only checkpoints need more
    from embershard.worker.checkpoint.checkpoint import Checkpoint


_LEAST_BYTES = 64 * 1024  # that a disk has left which is not full: less than the logs of a run take


def train(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file, YAML.")],
    ps: Annotated[str | None, shards_option(" [default: shards are started here]")] = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N|N-M",
            help=(
                "Number of workers to start, instead of the job's. 2-8: start two, and add up to six while they "
                "raise the throughput."
            ),
        ),
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Number of shards to start, instead of the job's.", min=1)] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Emulate a slower link between each worker and the shards, such as 100mbit; instead of the job's."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=folder_of,
            metavar="<path>",
            help=("Folder of the run: run log, workers' output and TensorBoard events. [default: runs/JOB-TIME]"),
        ),
    ] = None,
    overrides: SetOption = None,
    data: DataOption = None,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            help="Module with row optimizers or codecs, for the workers and shards started here; may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue from a checkpoint: name its folder, or a folder of checkpoints (the newest is used), or "
            "`latest` or `best` of checkpoint.folder. auto: the latest, if there is one."
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help=("With --resume: replace all tables of the shards, also those of another job.")),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help=(
                "Print the time of each part of the first worker's steps; write profile.json and trace.json to the "
                "run's folder."
            ),
        ),
    ] = False,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    trace_every: TraceEveryOption = 1000,
    dash: Annotated[
        bool,
        typer.Option(
            "--dash", help=("Serve the panel, a web page that shows the job, until the job ends; print its address.")
        ),
    ] = False,
    engine: EngineOption = EngineName.LOCAL,
    insecure: InsecureOption = False,
    pack: PackOption = False,
    shard_resources: ShardResourcesOption = "",
    worker_resources: WorkerResourcesOption = "",
    parent_pid: ParentPidOption = 0,
) -> None:
    """Train a job: start its shards and workers here, show the progress, and end them all when it is done.

    With --metrics HOST:PORT the shards started here serve their metrics at this port and the following ones, then the
    workers.

    If a shard or a worker is lost, a job with checkpoints continues from the latest one (train.recover).
    """
    note_interrupts()
    if log_format == "json":
        log_as_json(sys.stdout)
    end_with_parent(parent_pid)
    if dash:
        check_panel()
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
    given_tls = tls_of(tls, tls_server_name)
    cluster = on.open(settings, ps, folder, tls=given_tls, metrics=metrics)
    if given_tls is not None and settings.has_shards:
        check_certificates(given_tls)
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    context.call_on_close(partial(_remove_empty, made))
    make_folder(folder)
    # two jobs would write one log, and each would remove checkpoints of the other
    kept = kept_from_others({"--output": folder, "checkpoint.folder": settings.checkpoint.folder})
    context.with_resource(kept)
    certificates = given_tls if settings.has_shards else None
    if certificates is None and settings.has_shards and ps is None and not (cluster.is_local or insecure):
        certificates = _own_certificates(folder)
    command += tls_words(certificates)
    command += [] if ps is None else token_words(context, token_file)
    try_job(settings, job, sets, data, imports or (), say)
    for line in compression_advice(settings):
        say(f"advice: {line}")
    command += _preprocessing(settings, job.parent, folder, checkpoint)
    # before what an interrupt may end, whose line needs it: half an import cannot be repeated
    importlib.import_module("embershard.worker.checkpoint.checkpoint")
    made.clear()  # what starts now may leave files in these folders
    began = time.time()
    try:
        with ended_by_signals(), contextlib.ExitStack() as stack:
            stack.callback(cluster.close)
            started = LocalJob(
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
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM or SIGHUP
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(_interrupted(settings, folder, ps, None if checkpoint is not None else began), err=True)
        raise
    except (EmbershardError, OSError) as error:
        _explain(error, folder, can_resume=ps is not None and settings.checkpoint.folder is not None)
        raise


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove the empty folders that this command has made for a job that did not begin, the innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _interrupted(job: Job, folder: Path, ps: str | None, began: float | None) -> str:
    """What an interrupt has stopped, what is kept, and how to go on.

    A checkpoint counts that was written since the run `began`, in seconds since 1970; any, if it continues an earlier
    run (None).
    """
    stopped = "the workers have ended"
    if job.has_shards:
        stopped = "the workers and shards have ended" if ps is None else f"{stopped}; the shards at {ps} run on"
    place = str(job.checkpoint.folder or folder / "best")
    again = _resume_command(sys.argv[1:], "latest" if job.checkpoint.folder is not None else place)
    if "://" in place:  # which may take minutes to answer
        return f"interrupted: {stopped}. To continue from the latest checkpoint in {place}: {again}"
    from embershard.worker.checkpoint.checkpoint import checkpoint_at

    found = None
    with contextlib.suppress(Exception):  # of the storage; of an import that the interrupt has ended half-way
        found = checkpoint_at(place)
    if found is None or (began is not None and found.manifest.time < began):
        remedy = "" if job.checkpoint.folder is not None else "; to keep some, name checkpoint.folder in the job"
        return f"interrupted: {stopped}. No checkpoint was written{remedy}"
    return f"interrupted: {stopped}. To continue from {found.url} (step {found.manifest.step}): {again}"


def _own_certificates(folder: Path) -> TLS:
    """Make the certificates of a run on several machines, which its own shards and workers alone trust."""
    from embershard.deploy.authority import issue_for_run  # loads cryptography

    return issue_for_run(folder.absolute() / f"keys-{time.time_ns()}")


def _explain(error: Exception, folder: Path, *, can_resume: bool) -> None:
    """Say how a run that an error has stopped can go on.

    Raise the error that is behind it, if one is: the disk is full, or nobody reads the output.
    """
    check_disk(folder, error)  # a worker says in its log why it ended, which is in this folder
    if can_resume and isinstance(error, WorkerFailed | ShardUnavailable):
        again = _resume_command(sys.argv[1:], "latest")
        say(f"to continue from the last checkpoint, on the same shards: {again}", err=True)
    if isinstance(error, WorkerFailed):
        check_stdout(error)


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
        say(f"read the data once to prepare its features: {counted}")
    path = folder / "preprocessing.json"
    try:
        path.write_text(json.dumps(data.preprocessor().to_dict()))
    except OSError as error:
        raise CannotWrite(path=str(path), reason=error.strerror or str(error), remedy=OTHER_OUTPUT) from None
    return ["--set", f"data.fitted={json.dumps(str(path.absolute()))}"]


def check_disk(folder: Path, cause: Exception) -> None:
    """Raise CannotWrite where the disk of the run's folder is full."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _LEAST_BYTES:
            reason = "no space is left on its disk"
            raise CannotWrite(path=str(folder), reason=reason, remedy=f"make room there, or {OTHER_OUTPUT}") from cause


def check_stdout(cause: Exception) -> None:
    """Raise OutputClosed where nobody reads stdout any more, CannotWrite where it is a file whose disk is full."""
    poll = select.poll()
    poll.register(1, 0)
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        raise OutputClosed from cause
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(1).st_mode) and shutil.disk_usage(1).free < _LEAST_BYTES:
            reason, remedy = "no space is left on its disk", "make room there, or send it elsewhere"
            raise CannotWrite(path="the output", reason=reason, remedy=remedy) from cause


def _resume_command(words: Sequence[str], where: str) -> str:
    """This command with `--resume`."""
    kept, previous = [], ""
    for word in words:
        if previous != "--resume" and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        previous = word
    return shlex.join(["embershard", *kept, "--resume", where])


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
    from embershard.worker.checkpoint.checkpoint import LATEST, checkpoint_at, find_checkpoint
    from embershard.worker.checkpoint.folder import CheckpointFolder

    if resume == "auto":
        folder = job.checkpoint.folder
        resume = LATEST if folder is None or checkpoint_at(folder) is not None else None
    checkpoint = None if resume is None else find_checkpoint(resume, job)
    if job.checkpoint.folder is not None:
        CheckpointFolder(job.checkpoint.folder).check(resumed=checkpoint is not None)
    return checkpoint
