"""The command line: a module per command, imported when that command is called."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # to import typing takes more than half of the time until `main` catches Ctrl-C
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit: 0 done, 1 a named error, 2 wrong usage, 130 interrupted."""
    gc.disable()  # what imports allocate stays: to search it for garbage is a tenth of the start of a worker
    try:
        # imported here: Ctrl-C during the imports ends like Ctrl-C at any other moment
        from embershard.cli.app import run

        run()
    except KeyboardInterrupt:
        _end(130)  # what shells report for a process that Ctrl-C ended
    except SystemExit as end:
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))


def _end(code: int) -> NoReturn:
    """Exit; at once where workers met: gloo's threads outlive their group, and the interpreter's end aborts on them."""
    group = sys.modules.get("embershard.worker.client.worker_group")
    if group is not None and group.WorkerGroup.met:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
