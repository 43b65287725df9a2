"""`embershard top`: shards and a run in the terminal."""

from __future__ import annotations

import importlib.util
import sys

import typer

from embershard.cli.dash import NoPanel, RunOption, WatchedShards, watched
from embershard.cli.security import TokenFileOption
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.errors import EmbershardError


class NoTerminal(EmbershardError):
    """`embershard top` with its input or its output elsewhere."""

    template = (
        "`embershard top` needs a terminal, and its input or its output is none; `embershard status` prints the state "
        "once, `embershard dash` serves it as a page"
    )


def top(
    ps: WatchedShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    run: RunOption = None,
) -> None:
    """Show shards, workers and a run in the terminal; q ends it. Training does not depend on it."""
    if importlib.util.find_spec("textual") is None:
        raise NoPanel(what="`embershard top`", package="textual", extra="top")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise NoTerminal()
    from embershard.dash.run_log import FollowedLog
    from embershard.dash.sampler import Sampler
    from embershard.dash.terminal import TopApp

    addresses = watched(ps, run)
    log = None if run is None else FollowedLog(run)
    app = TopApp(Sampler(addresses, log, tls=tls_of(tls, tls_server_name)))
    app.run()
    raise typer.Exit(app.return_code or 0)
