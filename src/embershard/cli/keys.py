"""`embershard keys`: what clients and shards know each other by."""

from __future__ import annotations

import typer

from embershard.cli.tokens import show, token

keys = typer.Typer(no_args_is_help=True, help="Make tokens, and show who may do what.")
keys.command()(token)
keys.command()(show)
