"""The `embershard` command: finds the module of a command, and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from embershard.proto.errors import EmbershardError

if TYPE_CHECKING:
    from typer.core import TyperCommand

# in the order of the help; each is the function of that name in the module of that name
COMMANDS = ("train", "up", "ps", "worker", "status")
INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended


class LazyCommands(TyperGroup):
    """Commands that are imported when they are called: a shard must not wait for the trainer's libraries."""

    def list_commands(self, ctx: object) -> list[str]:
        """The commands of this installation."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"embershard.cli.{name}")]

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
        """The command of a name, None if there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"embershard.cli.{cmd_name}")
        one = typer.Typer(add_completion=False)
        one.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(one)  # type: ignore[return-value]


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"embershard {version('embershard')}")
        raise typer.Exit


@app.callback()
def _embershard(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """A sharded parameter server for recommender models in PyTorch."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 a named error, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except EmbershardError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
