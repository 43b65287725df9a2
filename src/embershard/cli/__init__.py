"""The command line: a module per command, imported when that command is called."""

from embershard.cli.app import main

__all__ = ["main"]
