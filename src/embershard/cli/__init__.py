"""The command line: a module per command, imported when that command is called."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit: 0 done, 1 a named error, 2 wrong usage, 130 interrupted."""
    try:
        # imported here: Ctrl-C during the imports ends like Ctrl-C at any other moment
        from embershard.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # what shells report for a process that Ctrl-C ended
