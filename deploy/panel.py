"""The panel of a job on this machine, as a child process: nothing that becomes of it disturbs training."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

_STOP_TIMEOUT = timedelta(seconds=3)


class LocalPanel:
    """`embershard dash` for the run in `folder`, as a context manager that ends it; what it prints is told to `say`.

    `options` are further words of the command.
    """

    def __init__(self, folder: Path, say: Callable[[str], object], options: Sequence[str] = ()) -> None:
        self._folder, self._say, self._options = folder, say, tuple(options)

    def __enter__(self) -> Self:
        """Start it; it waits for the run's log, and for shards."""
        words = ["--ps", "-", "--run", str(self._folder), "--of-job", "--parent-pid", str(os.getpid())]
        words += self._options
        self._process = subprocess.Popen(
            [sys.executable, "-m", "embershard.cli", "dash", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the job, which ends it
        )
        threading.Thread(target=self._tell, name="panel", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()

    def connect(self, addresses: str) -> None:
        """Tell it where the shards of the job serve ("host:port,host:port"), each time that they are others."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(f"{addresses}\n")
            self._process.stdin.flush()

    def _tell(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._say(line.rstrip())
        code = self._process.wait()
        if code not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            self._say(f"the panel ended (exit code {code}); training continues")
