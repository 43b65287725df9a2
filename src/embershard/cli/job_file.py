"""`--set` and `--data`: what a command changes of the job file that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.field=value, overrides the job file; may be repeated.")
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", envvar="EMBERSHARD_DATA", help="Folder of the data, instead of the job's data.root."),
]
