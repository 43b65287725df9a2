"""`embershard dash`: shards and a run in the browser."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embershard.cli.security import TokenFileOption
from embershard.cli.shards import find_shards, shards_option
from embershard.cli.signals import ParentPidOption, end_with_parent
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.errors import EmbershardError
from embershard.proto.monitoring.exporter import loopback_host, show_address
from embershard.proto.transport.addresses import shard_addresses

if TYPE_CHECKING:
    from embershard.dash.sampler import Sampler

DEFAULT_PORT = 7780
FROM_STDIN = "-"

RunOption = Annotated[Path | None, typer.Option(help="Folder of a run, to show its loss, metric, speed and events.")]
WatchedShards = Annotated[
    str | None,
    shards_option(" [default: the shards of `embershard up` on this machine; none with --run alone]"),
]


class NoPanel(EmbershardError):
    """A package that the panel needs is not installed."""

    template = "{what} needs {package}: pip install 'embershard[{extra}]'"


def check_panel() -> None:
    """Raise NoPanel where the page cannot be served."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise NoPanel(what="the panel", package=package, extra="dash")


def watched(ps: str | None, run: Path | None) -> list[str]:
    """The shards to watch: those of --ps, else none beside a run, else those of `embershard up`. NoShards."""
    return [] if ps is None and run is not None else find_shards(ps)


def dash(
    ps: WatchedShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    run: RunOption = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"host:port of the page; port 0: any free port.  [default: 127.0.0.1:{DEFAULT_PORT}]",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A host name that requests may use, in addition to IP addresses and localhost; may be repeated.",
        ),
    ] = None,
    of_job: Annotated[bool, typer.Option("--of-job", hidden=True, help="Started by `embershard train`.")] = False,
    parent_pid: ParentPidOption = 0,
) -> None:
    """Serve the panel, a web page with shards, workers and a run, until Ctrl-C. Training does not depend on it."""
    check_panel()
    from embershard.dash.run_log import FollowedLog
    from embershard.dash.sampler import Sampler
    from embershard.dash.server import is_loopback, serve, url_of
    from embershard.dash.server import listen as listen_on

    end_with_parent(parent_pid)
    addresses = [] if ps == FROM_STDIN else watched(ps, run)
    log = None if run is None else FollowedLog(run, wait=of_job)
    sock = listen_on(listen or show_address(loopback_host(), DEFAULT_PORT), or_free_port=of_job)
    sampler = Sampler(addresses, log, tls=tls_of(tls, tls_server_name))
    if ps == FROM_STDIN:
        threading.Thread(target=_follow_stdin, args=(sampler,), name="stdin", daemon=True).start()
    typer.echo(f"panel: {url_of(sock)}" + ("" if of_job else "  (Ctrl-C ends the panel; training continues)"))
    sys.stdout.flush()
    if not is_loopback(sock):
        typer.echo("warning: everybody who reaches this address sees the panel; it has no password", err=True)
    serve(sampler, sock, frozenset(name.lower() for name in host or ()))


def _follow_stdin(sampler: Sampler) -> None:
    """Watch the shards of the last line of stdin: a job that is started again has others."""
    for line in sys.stdin:
        sampler.connect(shard_addresses(line))
