"""The worker processes of a bench: started together, measured together, ended together."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Self

from embershard.benchmark.settings import Lap, Order
from embershard.proto.errors import EmbershardError, how_ended
from embershard.proto.user_modules import environment_for_child

_POLL_SECONDS = 0.2
_LAST_LINES = 12


class BenchFailed(EmbershardError):
    """A process of a bench ended before it had measured."""

    template = "worker {worker} of the bench ended with {how}; its last lines:\n{lines}"


class _WorkerProcess:
    """One worker process, and the thread that reads its answers."""

    def __init__(self, number: int, order: Order) -> None:
        self.number = number
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()  # "" at its end
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "embershard.benchmark.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment_for_child(),
            process_group=0,  # Ctrl-C at the terminal reaches the bench only, whose end is the worker's
        )
        assert self.popen.stdout is not None
        threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True).start()
        self.say(order.model_dump_json())

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed where its answer is awaited
            print(line, file=self.popen.stdin, flush=True)

    def answer(self, watch: Callable[[], EmbershardError | None]) -> str:
        """Its next answer; every call of a worker has a deadline, so that one, or its end, comes."""
        while True:
            with contextlib.suppress(queue.Empty):
                if line := self.answers.get(timeout=_POLL_SECONDS):
                    return line
                raise self._failure()
            if trouble := watch():
                raise trouble

    def release(self) -> None:
        """Close what belongs to it, once it ended."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        self._log.close()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.answers.put(line)
        self.answers.put("")

    def _failure(self) -> BenchFailed:
        code = self.popen.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        return BenchFailed(worker=self.number, how=how_ended(code), lines="\n".join(lines) or "(nothing)")


class Fleet:
    """Worker processes as a context manager; all are connected and warm once it is entered.

    `watch` may end a wait with an error. BenchFailed, with its last lines, where a worker ends too early.
    """

    def __init__(self, orders: Sequence[Order], watch: Callable[[], EmbershardError | None] = lambda: None) -> None:
        self._orders, self._watch = orders, watch
        self._processes: list[_WorkerProcess] = []

    def __enter__(self) -> Self:
        try:
            for number, order in enumerate(self._orders):
                self._processes.append(_WorkerProcess(number, order))
            for process in self._processes:
                process.answer(self._watch)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lap(self) -> list[Lap]:
        """Have all of them measure a round at once."""
        for process in self._processes:
            process.say("run")
        return [Lap.model_validate_json(process.answer(self._watch)) for process in self._processes]

    def close(self) -> None:
        """Kill them all; they hold nothing that would be lost."""
        for process in self._processes:
            process.popen.kill()
        for process in self._processes:
            process.popen.wait()
            process.release()
