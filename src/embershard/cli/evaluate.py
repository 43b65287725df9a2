"""`embershard evaluate`: how good a trained model is, of a checkpoint or on the shards while it is trained."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from embershard.benchmark.picture import can_draw, draw_reliability
from embershard.cli.job_file import DataOption
from embershard.cli.security import TokenFileOption
from embershard.cli.shards import NamedShards
from embershard.cli.signals import ended_by_signals
from embershard.cli.source import Source, check_one_source, open_source
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.errors import JobError
from embershard.worker.checkpoint.checkpoint import with_preprocessing
from embershard.worker.job.load import load_job
from embershard.worker.reporting.log import finite
from embershard.worker.trained.evaluation import open_file, trained_evaluator
from embershard.worker.training.evaluate import Figures


def evaluate(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file with which the model was trained.")],
    source: Annotated[
        str | None,
        typer.Argument(
            help="The folder of a run or of checkpoints (the best is used), a checkpoint, or a snapshot.  [default: "
            "the shards of --ps]",
            show_default=False,
        ),
    ] = None,
    ps: NamedShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    on: Annotated[
        Path | None, typer.Option(help="Score this file, with the job's reader, instead of the job's own splits.")
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="In a folder of checkpoints, use the newest instead of the best.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.field=value, overrides the job file, as for the workers; may be repeated."),
    ] = None,
    data: DataOption = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Module with row optimizers of a snapshot; may be repeated.")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(help="With --ps: evaluate every so many seconds, until Ctrl-C, instead of once.", min=0.1),
    ] = None,
    calibration_plot: Annotated[
        Path | None,
        typer.Option(help="Write an SVG file that plots the mean label over the mean prediction in ten bins."),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Number of torch threads; workers on the same machine need cores, too.", min=1)
    ] = 1,
) -> None:
    """Print the metrics of a model as a JSON line: of a checkpoint, or of the weights that the shards have now.

    Workers continue training meanwhile, so the rows of one evaluation may be some steps apart.
    """
    check_one_source(context, source, ps)
    if calibration_plot is not None and not can_draw():
        raise typer.BadParameter("--calibration-plot needs matplotlib: pip install 'embershard[bench]'")
    settings = load_job(job, overrides or (), data)
    if calibration_plot is not None and settings.data.evaluation != "pointwise":
        raise typer.BadParameter(f"--calibration-plot: data.reader {settings.data.reader} ranks items, without labels")
    torch.set_num_threads(threads)
    split = None if on is None else str(on)
    with ended_by_signals(), contextlib.ExitStack() as stack:
        found = open_source(source, ps, stack, latest=latest, imports=imports or (), tls=tls_of(tls, tls_server_name))
        settings = with_preprocessing(settings, job.parent, found.checkpoint)
        dataset = (
            settings.data.open(job.parent, settings.train.seed) if on is None else open_file(settings, job.parent, on)
        )
        if every is not None and not found.is_running:
            raise typer.BadParameter("--every is for running shards: a checkpoint does not change")
        evaluator = trained_evaluator(
            settings, dataset, found.session, found.checkpoint, curves=calibration_plot is not None
        )
        while True:
            start = time.monotonic()
            line: dict[str, object] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **_origin(found)}
            figures = evaluator.evaluate()
            if split is not None:
                figures = {split: _counted(split, figures["test"])}
            seconds = time.monotonic() - start
            typer.echo(json.dumps(finite({**line, "seconds": round(seconds, 3), **figures})))
            if calibration_plot is not None:
                draw_reliability(evaluator.curves, calibration_plot)
            if every is None:
                return
            time.sleep(max(0.0, every - seconds))


def _origin(found: Source) -> dict[str, object]:
    """The checkpoint, or the shards' first clock that is not closed (0 where the workers share none)."""
    if found.checkpoint is not None:
        return {"checkpoint": found.checkpoint.url, "step": found.checkpoint.manifest.step}
    if found.session is None or not found.is_running:
        return {}
    return {"clock": max(status.clock for status in found.session.client.status())}


def _counted(path: str, figures: Figures) -> Figures:
    """The figures of a file. JobError where it has nothing to be scored."""
    if not any(figures.get(name) for name in ("samples", "users")):
        raise JobError(where=path, reason="it has no samples to evaluate on")
    return figures
