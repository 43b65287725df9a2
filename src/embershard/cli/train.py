"""`embershard train`: a whole job on this machine, its shards included unless others are named."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embershard.cli.signals import end_with_parent, ended_by_signals
from embershard.cli.user_code import check_user_code, try_job
from embershard.deploy.supervisor import LocalShards
from embershard.deploy.workers import LocalWorkers, WorkerFailed
from embershard.proto.errors import CannotWrite, EmbershardError
from embershard.proto.transport.addresses import parse_addresses
from embershard.worker.job.checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.job.tabular import TabularSection
from embershard.worker.reporting.log import make_folder

if TYPE_CHECKING:  # a job is checked in a second, without torch; only checkpoints need more
    from embershard.worker.checkpoint.checkpoint import Checkpoint

_LEAST_BYTES = 64 * 1024  # that a disk has left which is not full: less than the logs of a run take


def train(
    job: Annotated[Path, typer.Argument(help="The job file, YAML.")],
    ps: Annotated[
        str | None, typer.Option(help="Train on these shards (host:port,host:port) instead of starting some here.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers to start, instead of the job's.", min=1)] = None,
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
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value, over the job file; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="EMBERSHARD_DATA", help="Folder of the data, instead of the job's data.root.")
    ] = None,
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
            "checkpoint.folder."
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
    parent_pid: Annotated[int, typer.Option(hidden=True, help="End when this process, our parent, ends.")] = 0,
) -> None:
    """Train a job: start shards and workers here, show how it goes, end them all."""
    if parent_pid:
        end_with_parent(parent_pid)
    given = {"workers": workers, "shards": shards, "network.bandwidth": bandwidth}
    sets = [*(overrides or ()), *(f"{name}={value}" for name, value in given.items() if value is not None)]
    settings = load_job(job, sets, data)
    _check_shards(settings, ps, shards, imports)
    check_user_code([settings], imports or (), starts_shards=ps is None)
    if ps is not None:
        ps = ",".join(parse_addresses(ps))
    checkpoint = _find_checkpoint(settings, resume)
    before = None if checkpoint is None else checkpoint.output
    folder = output or settings.output or before or Path("runs") / f"{job.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [str(job), "--output", str(folder), *(word for assignment in sets for word in ("--set", assignment))]
    command += ["--data", str(data)] if data is not None else []
    command += ["--profile"] if profile else []
    command += [word for module in imports or () for word in ("--import", module)]
    make_folder(folder)
    try_job(settings, job, sets, data, imports or (), typer.echo)
    for line in compression_advice(settings):
        typer.echo(f"advice: {line}")
    command += _preprocessing(settings, job.parent, folder, checkpoint)
    try:
        _run(settings, command, folder, ps, imports or (), checkpoint, replace=replace)
    except (EmbershardError, OSError) as error:
        check_disk(folder, error)  # a worker says in its log why it ended, which is in this folder
        if isinstance(error, WorkerFailed) and ps is not None and settings.checkpoint.folder is not None:
            typer.echo(
                f"to go on from the last checkpoint, on the same shards: {_resume_command(sys.argv[1:])}", err=True
            )
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
        typer.echo(f"read the data once for what its features need: {counted}")
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


def _find_checkpoint(job: Job, resume: str | None) -> Checkpoint | None:
    """The checkpoint to go on from; the folder of new ones is looked at too, before anything starts."""
    if resume is None and job.checkpoint.folder is None:
        return None
    from embershard.worker.checkpoint.checkpoint import CheckpointFolder, find_checkpoint

    checkpoint = None if resume is None else find_checkpoint(resume, job)
    if job.checkpoint.folder is not None:
        CheckpointFolder(job.checkpoint.folder).check(resumed=checkpoint is not None)
    return checkpoint


def _run(
    job: Job,
    command: list[str],
    folder: Path,
    ps: str | None,
    imports: Sequence[str],
    checkpoint: Checkpoint | None,
    *,
    replace: bool,
) -> None:
    """Start shards, unless there are some, and workers; wait for them, and end them all."""
    with ended_by_signals(), contextlib.ExitStack() as stack:
        watch: Callable[[], EmbershardError | None] = lambda: None  # noqa: E731
        local = LocalShards(job.shards, imports=imports) if job.has_shards and ps is None else None
        if ps is not None:
            _meet_shards(ps, checkpoint, replace)
        if local is not None:
            stack.callback(local.close)
            local.start()
            watch = lambda: local.failure  # noqa: E731
        # shards that outlive a run must not take the next one's workers for late ones of the last
        command += ["--ps", "-", "--run", str(time.time_ns())] if job.has_shards else []
        command += ["--started-here"] if ps is None else []
        if checkpoint is not None:
            command += ["--resume", checkpoint.url]
        running = LocalWorkers(
            job.workers,
            command,
            folder,
            elastic=job.elastic(job.workers),
            restarts=job.train.restart_workers,
            say=typer.echo,
        )
        stack.enter_context(running)
        if local is not None:  # they start while the workers import torch
            local.wait_until_serving()
            ps = ",".join(local.addresses)
            if checkpoint is not None:
                _meet_shards(ps, checkpoint, replace)
        if ps is not None:
            running.connect(ps)
        running.wait(watch)
    if running.lost:
        lost = ", ".join(f"worker {rank} ({', '.join(how)})" for rank, how in sorted(running.lost.items()))
        typer.echo(f"lost workers: {len(running.lost)} of {job.workers}: {lost}")
    typer.echo(f"log: {folder / 'log.jsonl'}")


def _meet_shards(ps: str, checkpoint: Checkpoint | None, replace: bool) -> None:
    """Wait for the shards here, since a worker says only in its log that it waits; restore them from a checkpoint.

    Tables like the checkpoint's are replaced: after one shard died, the others of the job still hold them.
    TablesInTheWay where the shards hold tables of another name, dim or optimizer, unless `replace` is true. RowsLost
    where one shard lost its rows, and no checkpoint gives them back.
    """
    from embershard.worker.client.client import Client

    with contextlib.closing(Client.connect(parse_addresses(ps))) as client:
        if checkpoint is not None and checkpoint.manifest.snapshot:
            from embershard.worker.checkpoint.checkpoint import SNAPSHOT
            from embershard.worker.checkpoint.snapshots import read_manifest, restore_snapshot

            held = {(table.name, table.dim, table.optimizer) for one in client.status() for table in one.tables}
            tables = read_manifest(checkpoint.url, SNAPSHOT).tables
            own = {(name, table.spec.dim, table.spec.optimizer.name) for name, table in tables.items()}
            restore_snapshot(client, checkpoint.url, SNAPSHOT, replace_tables=replace or held <= own)
        else:
            client.lineage.check()
