"""Workers on this machine as child processes, meeting over loopback by torchrun's variables."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

from embershard.proto.errors import EmbershardError, WorkerLost

LAST_LINES = 12  # of a worker that died, shown with the report
STOP_TIMEOUT = timedelta(seconds=10)
_POLL_SECONDS = 0.05


class WorkerFailed(EmbershardError):
    """A worker process ended before its job was done."""

    template = "worker {worker} ended ({how}); its last lines ({log}):\n{lines}"


class LocalWorkers:
    """`num_workers` worker processes on loopback, as a context manager that leaves none behind.

    `command` are the words behind `embershard worker`. The first worker's stdout is this process's; what they write to
    stderr goes to `logs`/worker-N.log.
    """

    def __init__(self, num_workers: int, command: Sequence[str], logs: Path) -> None:
        self._num_workers = num_workers
        self._command = tuple(command)
        self._logs = logs
        self._files: list[IO[bytes]] = []
        self._starts: list[int] = []  # where this run begins in each log
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by worker."""
        return tuple(process.pid for process in self._processes)

    def __enter__(self) -> Self:
        """Start all workers."""
        self._logs.mkdir(parents=True, exist_ok=True)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        try:
            for rank in range(self._num_workers):
                self._start(rank, meeting)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, watch: Callable[[], EmbershardError | None] = lambda: None) -> None:
        """Wait until every worker is done. WorkerFailed where one is not; `watch` may end the wait with an error."""
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                raise self._failure(failed)
            if all(code == 0 for code in codes):
                return
            trouble = watch()
            if trouble is not None:
                raise trouble
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL; workers hold nothing that would be lost."""
        try:
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()
            end = time.monotonic() + STOP_TIMEOUT.total_seconds()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:  # a second Ctrl-C, too, leaves nothing behind
            for process in self._processes:
                process.kill()
                process.wait()
            for file in self._files:
                file.close()

    def _start(self, rank: int, meeting: Mapping[str, str]) -> None:
        file = (self._logs / f"worker-{rank}.log").open("ab")
        self._files.append(file)
        self._starts.append(file.tell())
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._num_workers,
            "LOCAL_WORLD_SIZE": self._num_workers,
        }
        environment = {**os.environ, **meeting, **{key: str(value) for key, value in ranks.items()}}
        # what this process can import, its workers can
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", "-m", "embershard.cli", "worker", *self._command]
        self._processes.append(
            subprocess.Popen(
                [*command, "--parent-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else file,
                stderr=file,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal reaches this process only, which then ends the workers
            )
        )

    def _failure(self, failed: Sequence[int]) -> WorkerFailed:
        # one death makes the others' connections fail: the first to be killed by a signal, or else to end, is the cause
        rank = min(failed, key=lambda r: (self._processes[r].returncode >= 0, WorkerLost.words in self._tail(r), r))
        code = self._processes[rank].returncode
        return WorkerFailed(
            worker=rank,
            how=f"exit code {code}" if code >= 0 else _signal_name(-code),
            log=str(self._logs / f"worker-{rank}.log"),
            lines=self._tail(rank) or "(nothing)",
        )

    def _tail(self, rank: int) -> str:
        with (self._logs / f"worker-{rank}.log").open("rb") as file:
            file.seek(self._starts[rank])
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
