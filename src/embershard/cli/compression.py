"""`embershard compression`: how tables travel between workers and shards, shown and switched while workers train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from embershard.cli.security import TokenFileOption
from embershard.cli.shards import RunningShards
from embershard.cli.snapshot import connect
from embershard.cli.tables import table_of
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import UnknownTable
from embershard.proto.messages import Compress, TableCodecs, TableStatus
from embershard.worker.client.client import Client
from embershard.worker.compression.settings import advice
from embershard.worker.patterns import matches
from embershard.worker.session.codec_switch import settings_of

compression = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Show or switch the codecs of tables while workers train."
)


@compression.command("show")
def show(
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the codecs of every table: those that its workers use, and those that `compression set` has set."""
    with connect(ps, tls_of(tls, tls_server_name)) as client:
        tables, told = _tables(client), settings_of(client)
    revision, said = told.revision, {part.table: part for part in told.tables}
    if as_json:
        rows = {
            name: {
                "push": table.push_codec,
                "pull": table.pull_codec,
                "set": {"push": said[name].push, "pull": said[name].pull} if name in said else None,
            }
            for name, table in tables.items()
        }
        typer.echo(json.dumps({"revision": revision, "tables": rows}))
        return
    view = table_of(("table", "optimizer", "push", "pull", f"set (revision {revision})" if said else "set"))
    for name, table in tables.items():
        view.add_row(name, table.optimizer, table.push_codec, table.pull_codec, _words(said.get(name)))
    Console().print(view)


@compression.command("set")
def set_codecs(
    table: Annotated[str, typer.Argument(help="A table, or a pattern such as emb*.")],
    codecs: Annotated[
        list[str],
        typer.Argument(
            metavar="push=CODEC|pull=CODEC",
            help="One or both, such as push=topk:0.01 pull=fp16s; codecs as in the job file.",
        ),
    ],
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
) -> None:
    """Set the codecs of tables; every worker switches before its next step, and logs it.

    If a table cannot use a codec, or a shard did not import it at its start, nothing is switched.
    """
    given = _directions(codecs)
    with connect(ps, tls_of(tls, tls_server_name)) as client:
        tables = _tables(client)
        names = [name for name in tables if matches(name, table)]
        if not names:
            raise UnknownTable(table=table, known=", ".join(tables) or "none")
        wanted = tuple(
            TableCodecs(table=name, push=given.get("push", ""), pull=given.get("pull", "")) for name in names
        )
        client.ask_all(Compress(revision=0, tables=wanted))  # all shards agree before any of them is told
        revision = settings_of(client).revision + 1
        client.ask_all(Compress(revision=revision, tables=wanted))
    for part in wanted:
        typer.echo(f"table {part.table}: {_words(part)} (revision {revision}); workers switch before their next step")
        if part.push and (line := advice(tables[part.table].optimizer, CodecName.parse(part.push))):
            typer.echo(f"table {part.table}: {line}")


def _directions(codecs: Sequence[str]) -> dict[str, str]:
    """Direction -> codec text."""
    given: dict[str, str] = {}
    for text in codecs:
        direction, equals, codec = text.partition("=")
        if direction not in ("push", "pull") or not equals or not codec:
            raise typer.BadParameter(f"{text!r} must read push=CODEC or pull=CODEC, as in push=topk:0.01")
        if direction in given:
            raise typer.BadParameter(f"{direction} is given twice")
        try:
            given[direction] = str(CodecName.parse(codec))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return given


def _tables(client: Client) -> dict[str, TableStatus]:
    return {table.name: table for status in client.status() for table in status.tables}


def _words(part: TableCodecs | None) -> str:
    given = [] if part is None else [("push", part.push), ("pull", part.pull)]
    return " ".join(f"{direction}={codec}" for direction, codec in given if codec)
