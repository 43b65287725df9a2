"""`embershard import`: a model that was trained elsewhere, brought into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.job_file import DataOption, SetOption
from embershard.cli.security import TokenFileOption
from embershard.cli.shards import RunningShards, find_shards
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.errors import JobError
from embershard.worker.checkpoint.checkpoint import with_preprocessing
from embershard.worker.job.load import load_job
from embershard.worker.session.connect import connect
from embershard.worker.trained.import_weights import StateFile, check_export, import_state
from embershard.worker.trained.served_inputs import inputs_of


def import_(
    job: Annotated[Path, typer.Argument(help="The job file that defines the tables.")],
    state: Annotated[Path, typer.Argument(help="A state_dict as safetensors, or the folder of an export.")],
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    overrides: SetOption = None,
    data: DataOption = None,
) -> None:
    """Load a model with nn.Embedding onto running shards; `embershard train --ps` then continues from its weights."""
    settings = load_job(job, overrides or (), data)
    if not settings.has_shards or settings.dense_mode != "ps":
        mode = settings.strategy if settings.strategy != "ps" else f"dense.mode {settings.dense_mode}"
        raise JobError(where=str(job), reason=f"{mode} keeps weights in the workers; import with --set strategy=ps")
    settings = with_preprocessing(settings, job.parent)
    dataset = settings.data.open(job.parent, settings.train.seed)
    if state.is_dir():
        check_export(state, inputs_of(settings, dataset))
    else:
        StateFile(state)  # before it waits for shards
    with connect(find_shards(ps), tls=tls_of(tls, tls_server_name)) as session:
        for table, rows in import_state(state, settings, dataset.schema, session).items():
            typer.echo(f"table {table}: {rows:,} rows")
