"""`embershard export`: a trained model as files for torch, ONNX and others."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Annotated

import torch
import typer

from embershard.cli.folders import folder as folder_of
from embershard.cli.folders import kept_from_others
from embershard.cli.job_file import DataOption, SetOption
from embershard.cli.security import TokenFileOption
from embershard.cli.shards import NamedShards
from embershard.cli.signals import ended_by_signals
from embershard.cli.source import check_one_source, open_source
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.errors import JobError, UserCodeFailed
from embershard.worker.checkpoint.checkpoint import with_preprocessing
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Dataset
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.models.user_defined import forward_of
from embershard.worker.nn.wrap import dense_state
from embershard.worker.strategy.protocol import Strategy
from embershard.worker.trained.export import export_weights
from embershard.worker.trained.folder import (
    INT8,
    MODEL,
    ONNX,
    CannotExport,
    ExportFacts,
    export_into,
    write_facts,
    write_tensors,
)
from embershard.worker.trained.onnx import check_onnx, export_onnx, part_of_trained
from embershard.worker.trained.quantise import int8_tensors, quantise
from embershard.worker.trained.reading import Averaged, average_of, trained
from embershard.worker.trained.served_inputs import inputs_of, job_data
from embershard.worker.training.evaluate import Evaluator


def export(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file with which the model was trained.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="The folder or URL of a run, a checkpoint or a snapshot.  [default: the shards of --ps]",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Argument(metavar="OUT", help="Folder of this machine to write to.  [required]")
    ] = None,
    ps: NamedShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write the dense part as ONNX.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Also write the linear layers in int8, and print the difference in quality.")
    ] = False,
    overrides: SetOption = None,
    data: DataOption = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="In a folder of checkpoints, use the newest instead of the best.")
    ] = False,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Module with row optimizers of a snapshot; may be repeated.")
    ] = None,
) -> None:
    """Write a trained model to a folder: tables.safetensors, model.safetensors, and what the options add."""
    if source is None:
        raise typer.BadParameter("name the folder to write to", param_hint="OUT")
    given, folder = (None, folder_of(source)) if out is None else (source, folder_of(out))  # one alone is OUT
    check_one_source(context, given, ps)
    if onnx:
        check_onnx()
    settings = load_job(job, overrides or (), data)
    with contextlib.ExitStack() as stack:
        # to write tables down they need not be in memory; to score by them they must
        dense = None if onnx or int8 else [f"{settings.prefix}dense", f"{settings.prefix}dense.blocks"]
        found = open_source(
            given, ps, stack, latest=latest, imports=imports or (), tables=dense, tls=tls_of(tls, tls_server_name)
        )
        settings = with_preprocessing(settings, job.parent, found.checkpoint)
        dataset = settings.data.open(job.parent, settings.train.seed)
        if int8 and not dataset.splits:
            raise JobError(
                where=str(job), reason="--int8 compares by an evaluation, and the job's data has no split for it"
            )
        if found.checkpoint is not None:
            typer.echo(f"from {found.checkpoint.url}, of step {found.checkpoint.manifest.step}")
        strategy = trained(settings, dataset, found.session, found.checkpoint)
        averaged = average_of(settings, strategy, found.session, found.checkpoint)
        stack.enter_context(kept_from_others({"OUT": folder}))
        stack.enter_context(ended_by_signals())
        lines = []
        with export_into(folder) as unfinished:
            with averaged():
                facts = export_weights(strategy.model, unfinished, found.read_table, strategy.table_rows())
                num_dense = len(dense_state(strategy.model))
            if onnx:
                with averaged():
                    part = part_of_trained(settings, strategy.model, dataset, unfinished / ONNX)
                export_onnx(part, dataset.schema, unfinished)
                lines.append(f"{folder / ONNX}: the dense part")
            if int8:
                layers, compared = _export_int8(settings, dataset, strategy, averaged, unfinished)
                lines += [f"{folder / INT8}: {layers} linear layers", *compared]
            inputs = inputs_of(settings, dataset)
            told = ExportFacts(job=job_data(settings), schema=dataset.schema, inputs=inputs, tables=facts)
            write_facts(unfinished, told)
    # once it is there: stdout may be closed
    for name, fact in facts.items():
        initial = fact.rows - fact.trained
        rest = f", {initial:,} with their first values" if initial else ""
        typer.echo(f"{folder / fact.file}: {name}, {fact.rows:,} rows of {fact.dim}{rest}")
    typer.echo(f"{folder / MODEL}: {num_dense} dense tensors")
    if inputs is None:
        typer.echo(f"reader {settings.data.reader} has no `inputs`: use score_ids to serve the model")
    for line in lines:
        typer.echo(line)


def _export_int8(
    job: Job, dataset: Dataset, strategy: Strategy, averaged: Averaged, out: Path
) -> tuple[int, list[str]]:
    """Write the linear layers in int8; how many they are, and lines that compare the quality."""
    evaluator = Evaluator(
        job,
        dataset,
        strategy,
        WorkerGroup(),
        forward=forward_of(strategy.model, job.model.name),
        device=torch.device("cpu"),
        averaged=averaged,
    )
    before = evaluator.evaluate()
    with averaged():
        layers = quantise(strategy.model)
    try:
        after = evaluator.evaluate()
    except UserCodeFailed as error:  # which it was not before
        reason = f"with its linear layers in int8, whose `weight` is no tensor, {error}: leave --int8 out"
        raise CannotExport(path=str(out / INT8), reason=reason) from None
    write_tensors(out / INT8, int8_tensors(strategy.model))
    lines, differences = [], {}
    for split, figures in before.items():
        full, rounded = figures[job.metric], after[split][job.metric]
        differences[split] = None if math.isnan(rounded - full) else rounded - full
        lines.append(f"{split} {job.metric}: {full:.5f} in float32, {rounded:.5f} in int8 ({rounded - full:+.5f})")
    return layers, [*lines, json.dumps({"metric": job.metric, "int8_difference": differences})]
