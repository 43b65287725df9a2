"""Workers on this machine as child processes, connected over loopback by torchrun's variables."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Self

from embershard.deploy import sessions
from embershard.deploy.engine import LOCAL, ClusterEngine, meeting
from embershard.proto.errors import EmbershardError, WorkerLost, how_ended
from embershard.proto.monitoring.exporter import loopback_host
from embershard.proto.user_modules import environment_for_child

LAST_LINES = 12  # of a worker that died, shown with the report
STOP_TIMEOUT = timedelta(seconds=10)
LEAVE_SIGNAL = signal.SIGUSR1  # to a worker that is to leave while the others train on
_POLL_SECONDS = 0.05
_LEAST_BYTES = 64 * 1024  # that a disk has left which is not full: more than a line of a log takes
_LATE_SECONDS = 30.0  # after the end of a job: its other workers end with it, but for what they still write


class WorkerFailed(EmbershardError):
    """A worker process ended before its job was done."""

    template = "worker {worker} ended ({how}); its last lines ({log}):\n{lines}"


class LocalWorkers:
    """`num_workers` worker processes on loopback, as a context manager that leaves none behind.

    `command` are the words behind `embershard worker`. Workers that are started with `--ps -` import what they need and
    wait for the addresses that `connect` gives them, so that shards can start meanwhile. The stdout of the first worker
    is this process's, and where training is `elastic` that of the others is too: one of them reports where the first
    one is lost. What they write to stderr goes to `logs`/worker-N.log.

    Elastic training goes on without a worker that a signal ended, as when its machine is lost, for as long as there is
    another that trains: `say` is told so, and up to `restarts` times such a worker is started again. A worker that ends
    with an error of its own ends all of them: the others would come to it too. One that was started again trains once
    its file N.json in `records` (by default `logs`) has changed; until then it does not know how far the job is.

    There may be up to `most` workers: `resize` starts more, and has those that came last leave. Training goes on
    without one of these, whatever ends it.

    `metrics` are the addresses at which they serve their metrics, by their numbers. Another `engine` than this machine
    has them on others, which see the same files.

    Each worker is a session of its own: what a user's code starts in it ends with the worker.
    """

    def __init__(
        self,
        num_workers: int,
        command: Sequence[str],
        logs: Path,
        *,
        metrics: Sequence[str] = (),
        elastic: bool = False,
        most: int = 0,
        restarts: int = 0,
        records: Path | None = None,
        engine: ClusterEngine = LOCAL,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._engine = engine
        self._least, self._most = num_workers, max(num_workers, most)
        self._places = list(engine.workers(self._least, self._most))
        self._command = tuple(command)
        self._logs = logs
        self._metrics = tuple(metrics)
        self._elastic, self._restarts, self._say = elastic, restarts, say
        self._meeting: dict[str, str] = {}
        self._port: socket.socket | None = None  # keeps other programs from the port that they connect on
        self._files: list[IO[bytes]] = []
        self._addresses: bytes | None = None  # a line for the workers' stdin, once the shards serve
        self._starts: list[int] = []  # where this run begins in each log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._gone: set[int] = set()  # workers that have left, or that a signal ended for good
        self._leaving: set[int] = set()  # workers that were told to
        self._again: set[int] = set()  # workers that were started again, or came later
        self._records = logs if records is None else records
        self._record_times: dict[int, int] = {}  # of those, when they had last recorded where they stood: st_mtime_ns
        self.lost: dict[int, list[str]] = {}  # "SIGKILL", by worker, for every time that a signal ended it

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids, in the order of the workers."""
        return tuple(process.pid for process in self._processes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that train, or start to, and were not told to leave."""
        return tuple(rank for rank in range(len(self._processes)) if rank not in self._gone | self._leaving)

    def __enter__(self) -> Self:
        """Start the first workers."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._port = _reserve_port()
        port = self._port.getsockname()[1]
        self._meeting = meeting(self._places[0], port)
        try:
            sessions.start_each(partial(self._begin, rank) for rank in range(self._least))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, addresses: str) -> None:
        """Tell the workers where the shards serve ("host:port,host:port"), those too that are started again later."""
        self._addresses = addresses.encode() + b"\n"
        for process in self._processes:
            self._tell(process)

    def resize(self, count: int) -> None:
        """Have `count` workers, within the job's bounds: start some, or have some leave before their next split."""
        while len(self.ranks) < min(count, self._most) and self._add():
            pass
        for rank in self.ranks[max(count, self._least) :]:
            self._leaving.add(rank)
            self._processes[rank].send_signal(LEAVE_SIGNAL)

    def wait(self, watch: Callable[[], EmbershardError | None] = lambda: None) -> None:
        """Wait until every worker is done. WorkerFailed where one is not; `watch` may end the wait with an error."""
        over = math.inf  # when the job was done
        late: set[int] = set()  # workers that `say` has named
        while True:
            codes = [sessions.poll(process) for process in self._processes]
            for rank in [rank for rank in self._leaving if codes[rank] is not None]:
                self._leaving.discard(rank)
                self._let_go(rank, f"worker {rank} has left")
            done = any(code == 0 for rank, code in enumerate(codes) if rank not in self._gone)
            over = min(over, time.monotonic()) if done else over
            ended = {rank for rank, code in enumerate(codes) if code not in (None, 0)} - self._gone
            survived = [rank for rank in ended if self._survives(rank, done)]
            goes_on = done or any(code is None and self._trains(rank) for rank, code in enumerate(codes))
            if survived and not goes_on:  # who is started now would train the job from its start, on trained rows
                raise self._failure(ended)
            for rank in survived:
                ended.discard(rank)
                self._lose(rank, restart=not done)
            if ended or len(self._gone) == len(self._processes):
                raise self._failure(self._failed() if ended else self._gone)
            running = {rank for rank, process in enumerate(self._processes) if process.returncode is None}
            # who was started again too late has nobody left to train with
            if not running or (running <= self._again and time.monotonic() - over > STOP_TIMEOUT.total_seconds()):
                return
            if time.monotonic() - over > _LATE_SECONDS:
                self._tell_of_late(running - late)
                late |= running
            trouble = watch()
            if trouble is not None:
                raise trouble
            time.sleep(_POLL_SECONDS)

    def _tell_of_late(self, ranks: set[int]) -> None:
        for rank in sorted(ranks):
            pid = self._processes[rank].pid
            remedy = f"If it is stopped, let it go on (kill -CONT {pid}) or end it (kill -KILL {pid})"
            self._say(f"the job is done, and worker {rank} (pid {pid}) still runs; the command waits for it. {remedy}")

    def close(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL; workers hold nothing that would be lost."""
        try:
            for process in self._processes:
                if sessions.poll(process) is None:
                    process.terminate()
            end = time.monotonic() + STOP_TIMEOUT.total_seconds()
            for process in self._processes:
                sessions.wait(process, max(0.0, end - time.monotonic()))
        finally:  # a second Ctrl-C, too, leaves nothing behind
            for process in self._processes:
                sessions.kill(process)
            for process in self._processes:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            for file in self._files:
                file.close()
            if self._port is not None:
                self._port.close()

    def _survives(self, rank: int, done: bool) -> bool:
        """Whether training goes on where this worker has ended; `done` by others."""
        is_late = rank >= self._least or (done and rank in self._again)
        return self._elastic and (self._code(rank) < 0 or is_late)

    def _trains(self, rank: int) -> bool:
        """Whether a running worker knows how far the job is: one that came late does once it has trained."""
        return rank not in self._again or self._record_time(rank) != self._record_times.get(rank, 0)

    def _record_time(self, rank: int) -> int:
        try:
            return (self._records / f"{rank}.json").stat().st_mtime_ns
        except OSError:
            return 0

    def _lose(self, rank: int, *, restart: bool) -> None:
        how = how_ended(self._code(rank))
        self.lost.setdefault(rank, []).append(how)
        if restart and self._restarts > 0 and rank < self._least:
            self._restarts -= 1
            try:
                self._places[rank] = self._engine.again(self._places[rank])
                sessions.start_each([partial(self._begin_again, rank)])
                self._again.add(rank)
                self._say(f"worker {rank} ended ({how}) and was restarted; the others continue training meanwhile")
                return
            except OSError as error:  # too many processes or open files, no memory
                how += f", and cannot be restarted: {error.strerror}"
        if rank >= self._least and (lines := self._tail(rank).splitlines()):
            how += f": {lines[-1]}"  # as that a cluster has no room for it
        self._let_go(rank, f"worker {rank} ended ({how}); the others continue training")

    def _let_go(self, rank: int, said: str) -> None:
        """Go on without a worker that has ended."""
        self._gone.add(rank)
        if rank >= self._least:
            self._engine.give_back(self._places[rank])
        if len(self._gone) < len(self._processes):
            self._say(said)

    def _add(self) -> bool:
        """Start one worker more, by the lowest number that is free; whether the system could."""
        rank = min(self._gone, default=len(self._processes))
        is_late = rank >= self._least
        place = self._engine.another_worker(rank, self._most) if is_late else self._engine.again(self._places[rank])
        self._places[rank : rank + 1] = [place]
        try:
            sessions.start_each([partial(self._begin_again if rank in self._gone else self._begin, rank)])
        except OSError as error:
            if is_late:
                self._engine.give_back(place)
            self._say(f"no further worker can be started: {error.strerror}; the others continue training")
            return False
        self._again.add(rank)
        self._gone.discard(rank)
        return True

    def _begin(self, rank: int) -> None:
        file = (self._logs / f"worker-{rank}.log").open("ab")
        self._files[rank:] = [file]
        self._starts[rank:] = [file.tell()]
        self._processes.append(self._start(rank))

    def _begin_again(self, rank: int) -> None:
        self._record_times[rank] = self._record_time(rank)
        self._processes[rank] = self._start(rank)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        place = self._places[rank]
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": place.number,
            "WORLD_SIZE": self._most,
            "LOCAL_WORLD_SIZE": place.of,
        }
        environment = environment_for_child() | self._meeting | {key: str(value) for key, value in ranks.items()}
        command = [*place.prefix, sys.executable, "-P", "-m", "embershard.cli", "worker", *self._command]
        command += ["--parent-pid", str(os.getpid())] if self._engine.is_local else []
        command += ["--metrics", self._metrics[rank]] if self._metrics else []
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 or self._elastic else self._files[rank],
            stderr=self._files[rank],
            env=environment,
            # Ctrl-C at the terminal reaches this process only, which then ends the workers and their sessions
            start_new_session=True,
        )
        self._engine.watch(process, place)
        self._tell(process)
        return process

    def _tell(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        if self._addresses is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # its end is noticed by `wait`
                process.stdin.write(self._addresses)

    def _failed(self) -> set[int]:
        """Find the workers that failed, waiting for the lost one that others report: it may end after they notice."""
        end = time.monotonic() + STOP_TIMEOUT.total_seconds()
        while True:
            running = any(sessions.poll(process) is None for process in self._processes)
            failed = {rank for rank, process in enumerate(self._processes) if process.returncode} - self._gone
            if not (running and all(map(self._lost_another, failed))) or time.monotonic() > end:
                return failed
            time.sleep(_POLL_SECONDS)

    def _lost_another(self, rank: int) -> bool:
        """Whether a worker ended since it had lost another one."""
        return self._code(rank) > 0 and WorkerLost.words in self._tail(rank)

    def _code(self, rank: int) -> int:
        """The exit code of a worker that has ended."""
        code = self._processes[rank].returncode
        assert code is not None
        return self._engine.exit_code(code, self._places[rank])

    def _failure(self, failed: Collection[int]) -> WorkerFailed:
        # one death makes the others' connections fail: the first to be killed by a signal, or else to end, is the cause
        rank = min(failed, key=lambda r: (self._code(r) >= 0, self._lost_another(r), r))
        code = self._code(rank)
        return WorkerFailed(
            worker=rank,
            how=how_ended(code),
            code=code,
            log=str(self._logs / f"worker-{rank}.log"),
            lines=self._tail(rank) or self._no_lines(),
        )

    def _no_lines(self) -> str:
        """What is shown in place of a log without a line."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._logs).free < _LEAST_BYTES:
                return (
                    "(nothing: no space is left on the disk of this log; make room there, or choose another --output)"
                )
        return "(nothing)"

    def _tail(self, rank: int) -> str:
        with (self._logs / f"worker-{rank}.log").open("rb") as file:
            file.seek(self._starts[rank])
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])


def _reserve_port() -> socket.socket:
    """A free port that only who asks for it by its number is given, for as long as this socket is open.

    The first worker binds it seconds from now, when torch is imported; SO_REUSEADDR, which torch sets too, lets it.
    """
    host = loopback_host()
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved
