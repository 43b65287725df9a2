"""One part of the run on a GPU: a process of its own, with its own time limit, whose figures outlive it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

Figures = dict[str, Any]
MARK = "RESULT "  # begins the line of a figure in what a part prints
LAST_LINES = 15


def report(**figures: object) -> None:
    """Hand figures to whoever runs this part; at once, so that they are kept if it is ended later."""
    print(MARK + json.dumps(figures), flush=True)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command of this Python, and how many seconds it may take."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needed: bool = False  # whether nothing else can run where it fails

    def run(self, environment: dict[str, str], seconds: float, keep: Callable[[Figures], None]) -> Figures:
        """How it ended; `keep` gets its figures as they come. When time is up it is killed, and all that it started."""
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *self.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=_read, args=(process.stdout, lines, keep), daemon=True)
        reader.start()
        error = ""
        try:
            code = process.wait(seconds)
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"ended: it took more than {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(5)
        ended: Figures = {"passed": not error, "seconds": round(time.monotonic() - start, 1)}
        if error:
            ended |= {"error": error, "last_lines": lines[-LAST_LINES:]}
        elif lines:
            ended["last_line"] = lines[-1]
        return ended


def _read(stream: IO[str], lines: Sequence[str], keep: Callable[[Figures], None]) -> None:
    assert isinstance(lines, list)
    with stream:
        for line in stream:
            if line.startswith(MARK):
                keep(json.loads(line.removeprefix(MARK)))
            elif line.strip():
                lines.append(line.rstrip())
                print(f"    {line.rstrip()}", flush=True)
