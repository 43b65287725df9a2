"""`embershard evaluate`: how good a model on the shards is by now, once or again and again, while it is trained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from embershard.cli.signals import ended_by_signals
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.worker.job.load import load_job
from embershard.worker.reporting.log import finite
from embershard.worker.session.connect import connect
from embershard.worker.trained.live_evaluation import LiveEvaluator


def evaluate(
    job: Annotated[Path, typer.Argument(help="The job file that the workers train.")],
    ps: Annotated[str, typer.Option(help="Addresses of all shards: host:port,host:port.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value, as the workers have it; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="EMBERSHARD_DATA", help="Folder of the data, instead of the job's data.root.")
    ] = None,
    every: Annotated[
        float | None, typer.Option(help="Again every so many seconds, until Ctrl-C, instead of once.", min=0.1)
    ] = None,
    threads: Annotated[int, typer.Option(help="Of torch: the workers need theirs.", min=1)] = 1,
) -> None:
    """Print the figures of a job's evaluation splits as JSON lines, with the weights that the shards have now.

    The workers go on meanwhile and are not waited for, so that the rows read may be some steps apart.
    """
    settings = load_job(job, overrides or (), data)
    torch.set_num_threads(threads)
    with ended_by_signals(), connect(ps, worker=READ_ONLY_WORKER) as session:
        evaluator = LiveEvaluator(settings, session, job.parent)
        while True:
            start = time.monotonic()
            clock, figures = evaluator.evaluate()
            seconds = time.monotonic() - start
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "clock": clock,
                "seconds": round(seconds, 3),
                **figures,
            }
            typer.echo(json.dumps(finite(line)))
            if every is None:
                return
            time.sleep(max(0.0, every - seconds))
