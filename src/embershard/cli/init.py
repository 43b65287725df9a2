"""`embershard init`: a job file for a table, written from a look at its first rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from embershard.init.interactions import interactions_text
from embershard.init.job_text import job_text
from embershard.init.look import CannotInit, look_at
from embershard.worker.job.load import load_job


def init(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Parquet, CSV, TSV or lines of JSON, also compressed (.gz, .zst); or a folder of such files, "
            "or a pattern in quotes, 'clicks/**/*.parquet' say.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The job file to write.")] = Path("job.yaml"),
    label: Annotated[
        str | None, typer.Option(help="Column of the label.  [default: a column of zeros and ones]")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Column of the user, of interactions without a label; needs --item.")
    ] = None,
    item: Annotated[str | None, typer.Option(help="Column of the item that the user took.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Column of the interaction's time.  [default: the column that looks like one]")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing job file.")] = False,
) -> None:
    """Read the first rows of a data file or folder, and write a commented job file that trains on it."""
    if (user is None) != (item is None) or (time is not None and user is None) or (label and user):
        reason = "give --user and --item together, --time only with them, and --label without them"
        raise typer.BadParameter(reason)
    if out.exists() and not replace:
        raise CannotInit(path=str(out), reason="is there already; name another file with -o, or give --replace")
    look = look_at(data)
    folder = out.absolute().parent
    if user is not None and item is not None:
        text = interactions_text(data, look, {"user": user, "item": item, "time": time}, folder)
    else:
        text = job_text(data, look, label, folder)
    try:
        _write(out, text, out.read_bytes() if out.exists() else None)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}; name another file with -o"
        raise CannotInit(path=str(out), reason=reason) from None
    except UnicodeEncodeError:  # the bytes of a name that this locale has no characters for
        reason = "cannot be written: the data file's name is not text in this locale; set LC_ALL=C.UTF-8"
        raise CannotInit(path=str(out), reason=reason) from None
    typer.echo(f"{out}: {len(look.columns)} columns of {data}; train with: embershard train {out}")


def _write(out: Path, text: str, before: bytes | None) -> None:
    """Write a job file, and read it; the file of before, or none, is there where that fails."""
    try:
        out.write_bytes(text.encode())  # as a job file is read, whatever the locale is
        load_job(out).data.look(out.parent)
    except Exception:
        with contextlib.suppress(OSError):
            out.unlink(missing_ok=True) if before is None else out.write_bytes(before)
        raise
