"""`embershard worker`: one worker of a job as a service."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer

from embershard.worker.data.loader import LoaderProcess, Share
from embershard.worker.group import JOIN_TIMEOUT, WorkerGroup
from embershard.worker.job import load_job
from embershard.worker.log import JsonLog, TensorBoardLog
from embershard.worker.memory import keep_freed_memory
from embershard.worker.profiling import Profile
from embershard.worker.progress import Terminal
from embershard.worker.records import Observer
from embershard.worker.session import connect
from embershard.worker.trainer import Trainer


def worker(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    ps: Annotated[str, typer.Option(help="Addresses of all shards: host:port,host:port.")],
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
    rank: Annotated[int, typer.Option(envvar="RANK", help="This worker's number.", min=0)] = 0,
    world_size: Annotated[int, typer.Option(envvar="WORLD_SIZE", help="Number of workers.", min=1)] = 1,
    local_rank: Annotated[int, typer.Option(envvar="LOCAL_RANK", help="Its number on this machine.", min=0)] = 0,
    local_world_size: Annotated[
        int, typer.Option(envvar="LOCAL_WORLD_SIZE", help="Workers on this machine, who share its cores.", min=0)
    ] = 0,
    meet_within: Annotated[
        float, typer.Option(help="Seconds to wait at the start for the other workers.", min=0.1)
    ] = JOIN_TIMEOUT.total_seconds(),
    parent_pid: Annotated[int, typer.Option(hidden=True, help="End when this process, our parent, ends.")] = 0,
) -> None:
    """Train as one worker of a job; its place among the workers comes from torchrun's variables.

    Several workers meet at MASTER_ADDR and MASTER_PORT. Without any variable it is the only worker.
    """
    if parent_pid:
        threading.Thread(target=_end_with, args=(parent_pid,), name="parent", daemon=True).start()
    if rank >= world_size:
        raise typer.BadParameter(f"workers count from 0, so rank {rank} of {world_size} does not exist")
    settings = load_job(job, overrides or (), data)
    folder = output or settings.output
    if profile and folder is None:
        raise typer.BadParameter("--profile writes files: name a folder with --output, or in the job")
    keep_freed_memory()
    torch.set_num_threads(settings.train.threads or _fair_threads(local_world_size or world_size))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    with contextlib.ExitStack() as stack:
        observers = _observers(folder) if rank == 0 else []  # first: a bad folder is a mistake to hear of now
        for observer in observers:
            stack.callback(observer.close)
        loader = None
        if settings.loader_processes(local_world_size or world_size):  # it starts while we connect
            share = Share(
                data=settings.data,
                folder=job.parent,
                seed=settings.train.seed,
                rank=rank,
                world_size=world_size,
                batch_size=settings.train.batch_size,
            )
            loader = stack.enter_context(LoaderProcess(share))
        session = stack.enter_context(connect(ps, worker=rank))
        group = stack.enter_context(WorkerGroup.join(rank, world_size, timedelta(seconds=meet_within)))
        dataset = settings.data.open(job.parent, settings.train.seed)
        trainer = Trainer(settings, dataset, session, group, observers, loader)
        if profile and rank == 0:
            assert folder is not None
            with Profile(folder) as recorder:
                trainer.run()
            typer.echo(recorder.summary())
        else:
            trainer.run()
        group.barrier()  # whoever is done first keeps its connections until all are


def _observers(folder: Path | None) -> list[Observer]:
    observers: list[Observer] = [Terminal()]
    if folder is not None:
        observers.append(JsonLog(folder))
        board = TensorBoardLog.open(folder)
        observers += [board] if board is not None else []
    return observers


def _fair_threads(workers: int) -> int:
    """Threads of one of this machine's workers: half of the cores are theirs, for shards and readers need some too."""
    return max(1, (os.cpu_count() or 1) // (2 * workers))


def _end_with(parent_pid: int) -> None:
    """End this process once its parent, asked twice a second, is gone."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)  # nothing here would be lost, and nothing may hold it up
