"""Shards on this machine as child processes: started together, watched, restarted, ended together.

A shard ends itself once its parent is gone (`--parent-pid`), so that no way of ending the supervisor leaves one behind.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Self

from embershard.deploy import sessions
from embershard.deploy.engine import LOCAL, ClusterEngine
from embershard.proto.errors import ShardFailed, how_ended
from embershard.proto.monitoring.exporter import loopback_host, show_address
from embershard.proto.user_modules import environment_for_child

MEMORY_PERCENT = 80  # of the machine, or its container, for the tables of all shards
LOG_LINES = 12  # of a shard that died, shown with the report
_POLL_SECONDS = 0.5
STOP_SECONDS = 40.0  # a shard gives itself 30 to finish what it accepted

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a shard that died is started again.

    There is no pause before the first restart. With every quick death that follows it doubles, from `first_pause` up to
    `longest_pause`. A death is quick if the shard served for less than `quick`; after `max_quick_deaths` of them in a
    row it is not restarted.
    """

    first_pause: timedelta = timedelta(seconds=0.5)
    longest_pause: timedelta = timedelta(seconds=15)
    quick: timedelta = timedelta(seconds=2)
    max_quick_deaths: int = 5

    def pause(self, quick_deaths: int) -> timedelta:
        """The wait before the start that follows this many quick deaths in a row."""
        if quick_deaths <= 1:
            return timedelta(0)
        return min(self.first_pause * (1 << quick_deaths - 2), self.longest_pause)

    def gives_up(self, quick_deaths: int) -> bool:
        """Whether this many quick deaths in a row are enough."""
        return quick_deaths >= self.max_quick_deaths


class _ShardProcess:
    """One run of a shard's process, and the threads that read what it says."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        forward: Callable[[str], None],
        exit_code: Callable[[int], int] = int,
    ) -> None:
        self._exit_code = exit_code
        self.tail: deque[str] = deque(maxlen=LOG_LINES)
        self.address = ""  # once it serves
        self.rpc_address = ""  # where it serves torch.distributed.rpc, if it was asked to
        self.metrics_address = ""  # and its metrics
        self._served_since = 0.0  # time.monotonic()
        self._ended_at = 0.0
        self._last_line = time.monotonic()
        self._forward = forward
        self._said = threading.Event()  # it serves, or never will
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal reaches the supervisor only, which then ends the shards
        )
        streams = ((self._read_stdout, self.popen.stdout), (self._read_stderr, self.popen.stderr))
        self._readers = [threading.Thread(target=read, args=(stream,), daemon=True) for read, stream in streams]
        for reader in self._readers:
            reader.start()

    def wait_until_serving(self, timeout: float) -> bool:
        """Whether it serves; one that says nothing for `timeout` seconds is killed.

        Every line that it logs renews the timeout: a shard that compiles its kernels says so at each of them.
        """
        while not self._said.wait(min(_POLL_SECONDS, max(0.0, self._last_line + timeout - time.monotonic()))):
            sessions.poll(self.popen)  # what a shard that ended has started may hold its pipe open
            if time.monotonic() - self._last_line >= timeout:
                self.tail.append(f"(killed: it did not serve within {timeout:.0f} s of its last line)")
                self.popen.kill()
                break
        return bool(self.address)

    def ended(self) -> str:
        """Describe how the process ended, for a message; waits until all that it printed is read."""
        code = self._exit_code(sessions.wait_for_end(self.popen))
        self._ended_at = time.monotonic()
        for reader in self._readers:
            reader.join(timeout=3.0)  # a grandchild may hold the pipe open
        return how_ended(code)

    @property
    def code(self) -> int:
        """Its exit code, once it has ended."""
        assert self.popen.returncode is not None
        return self._exit_code(self.popen.returncode)

    def lived(self) -> float:
        """Seconds from serving to its end; 0 if it never served."""
        return self._ended_at - self._served_since if self.address else 0.0

    def last_lines(self) -> str:
        """Return the last lines that the process logged, indented, as one text."""
        return "\n".join(f"    {line}" for line in self.tail) or "    (none)"

    def _read_stdout(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._last_line = time.monotonic()
                said = _serving(line)
                if said is None:
                    self._forward(line.rstrip("\n"))  # a user's module may print
                    continue
                self._served_since = time.monotonic()
                self.rpc_address = str(said.get("rpc", ""))
                self.metrics_address = str(said.get("metrics", ""))
                self.address = str(said["address"])
                self._said.set()
        self._said.set()

    def _read_stderr(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._last_line = time.monotonic()
                self.tail.append(line.rstrip("\n"))
                self._forward(line.rstrip("\n"))


def _unless_unread(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, for as long as somebody reads it: what it is told from threads must not end them."""

    def told(line: str) -> None:
        with suppress(OSError):
            say(line)

    return told


def _serving(line: str) -> dict[str, object] | None:
    """What a shard says as it starts to serve; None for another line."""
    try:
        said = json.loads(line)
        return dict(said) if said["event"] == "serving" and said["address"] else None
    except (ValueError, KeyError, TypeError):
        return None


def _failed(what: str, process: _ShardProcess) -> ShardFailed:
    """The error of a shard that has ended: `served` is whether it ever did."""
    served = bool(process.address)
    return ShardFailed(what=what, log=process.last_lines(), code=process.code, served=served)


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Set the options of `embershard ps` with which LocalShards starts every shard.

    `imports` are modules with row optimizers and codecs. With `rpc` they serve torch.distributed.rpc too, on loopback,
    which executes pickles and imports torch. With `durability` "log" or "fsync" they keep a log in `log_dir`, from
    which one that is started again has its rows; else these are lost. Each may take `log_bytes`. `metrics` are the
    addresses at which they serve their metrics, by index; `log_format` is that of their logs, and `trace` where their
    traces go. `tls` is the folder of their certificates, which clients over TCP need then, too. `options` are further
    words of their command.
    """

    imports: Sequence[str] = ()
    rpc: bool = False
    durability: str = "memory"
    log_dir: Path | None = None
    log_bytes: int | None = None
    metrics: Sequence[str] = ()
    log_format: str = "text"
    trace: str = ""
    tls: Path | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        mode, log_dir = self.durability, self.log_dir
        if (mode == "memory") != (log_dir is None):
            raise ValueError(f"durability {mode} with log_dir {log_dir}: log and fsync need one, memory has none")

    def words(self, shard: int) -> list[str]:
        """Return the options of one shard's command."""
        words = [word for module in self.imports for word in ("--import", module)]
        words += ["--rpc", "127.0.0.1:0", "--insecure-loopback"] if self.rpc else []
        if self.log_dir is not None:
            words += ["--durability", self.durability, "--log-dir", str(self.log_dir)]
        words += [] if self.log_bytes is None else ["--log-bytes", str(self.log_bytes)]
        words += ["--log-format", self.log_format] if self.log_format != "text" else []
        words += ["--trace", self.trace] if self.trace else []
        words += ["--metrics", self.metrics[shard]] if self.metrics else []
        words += [] if self.tls is None else ["--tls", str(self.tls)]
        return [*words, *self.options]

    def rows_of_dead(self) -> str:
        """Say what becomes of the rows of a shard that died and is started again."""
        if self.durability == "memory":
            return "the rows and optimizer states that it held are lost (durability: memory)"
        is_there = self.log_dir is not None and self.log_dir.exists()
        gone = "" if is_there else ", which is gone: they are lost"
        return f"it recovers its rows from its event log in {self.log_dir}{gone}"


class LocalShards:
    """`num_shards` shard processes on loopback, as a context manager.

    The shards find the modules that this process finds (its sys.path). `base_port` 0 takes free ports; a shard that is
    restarted keeps its port, and that of its metrics. `restart` says how dead shards are started again; by default they
    are not. Another `engine` than this machine has them on others, which need certificates, or --insecure among the
    options of the settings. A shard that logs nothing for `start_timeout` before it serves is killed. `report` gets a
    line for people at every event, `forward` every line that a shard logs; both are called from threads.
    """

    def __init__(
        self,
        num_shards: int,
        settings: ShardSettings | None = None,
        *,
        base_port: int = 0,
        restart: RestartPolicy | None = None,
        engine: ClusterEngine = LOCAL,
        start_timeout: timedelta = timedelta(seconds=120),
        report: Callable[[str], None] = _log.warning,
        forward: Callable[[str], None] = _log.debug,
    ) -> None:
        if not 1 <= num_shards <= 4096:
            raise ValueError(f"num_shards must be 1..4096, got {num_shards}")
        if base_port and not 1 <= base_port <= 65536 - num_shards:
            raise ValueError(f"base_port must leave room for {num_shards} ports, got {base_port}")
        self._settings = settings or ShardSettings()
        self._restart = restart
        self._engine = engine
        self._places = list(engine.shards(num_shards))
        self._start_timeout = start_timeout.total_seconds()
        self._report = _unless_unread(report)
        self.ended_well = True  # no shard was killed, or dropped what it had accepted, at the end
        self._forward = _unless_unread(forward)
        ports = [base_port + index if base_port else 0 for index in range(num_shards)]
        # once they serve, where they do: a shard of this machine that is started again has its port
        self._listen = [
            show_address(place.host or loopback_host(), port) for place, port in zip(self._places, ports, strict=True)
        ]
        self._processes: list[_ShardProcess] = []
        self._restarts = [0] * num_shards  # how often each was started again
        self._watchers: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # a restart and a stop must not miss each other
        self._failure: ShardFailed | None = None
        self._failed = threading.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the shards serve ("127.0.0.1:port"), by index; or the folder ("file:DIR") in which they say it."""
        return tuple(self._listen) if self._engine.announce is None else (f"file:{self._engine.announce}",)

    @property
    def rpc_addresses(self) -> tuple[str, ...]:
        """Where they serve torch.distributed.rpc ("127.0.0.1:port"), by index; empty texts where they do not."""
        return tuple(process.rpc_address for process in self._processes)

    @property
    def metrics_addresses(self) -> tuple[str, ...]:
        """Where they serve their metrics, by index; empty texts where they do not."""
        return tuple(process.metrics_address for process in self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by index; a restart changes one."""
        return tuple(process.popen.pid for process in self._processes)

    @property
    def failure(self) -> ShardFailed | None:
        """Why a shard is gone for good; None while all serve or are being restarted."""
        return self._failure

    def wait(self, timeout: timedelta) -> ShardFailed | None:
        """Wait until a shard is gone for good, at most `timeout`; the failure, if there is one."""
        self._failed.wait(timeout.total_seconds())
        return self._failure

    def __enter__(self) -> Self:
        """Start all shards, and wait until they serve. ShardFailed, with its last log lines, where one does not."""
        try:
            self.start()
            self.wait_until_serving()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all shards: SIGTERM, which lets them finish what they accepted, and SIGKILL to those that do not."""
        self._stopping.set()
        with self._lock:
            running = [p for p in self._processes if sessions.poll(p.popen) is None]
        try:
            for process in running:
                process.popen.terminate()
            end = time.monotonic() + STOP_SECONDS
            for process in running:
                pid = process.popen.pid
                if not sessions.wait(process.popen, max(0.0, end - time.monotonic())):
                    self._report(
                        f"pid {pid} did not end within {STOP_SECONDS:.0f} s, and is killed: what it accepted last may "
                        "be lost. Its output says what it waited for"
                    )
                    self.ended_well = False
                elif process.address and process.code == 1:
                    self._report(f"pid {pid} dropped some accepted requests; its output says why")
                    self.ended_well = False
        finally:  # a second Ctrl-C, too, leaves nothing behind
            for process in running:
                process.popen.kill()
            for process in running:
                sessions.kill(process.popen)
        for watcher in self._watchers:
            watcher.join(timeout=5.0)

    def start(self) -> None:
        """Start all shards, and do not wait for them. `close` ends them."""
        sessions.start_each(partial(self._begin, index) for index in range(len(self._listen)))

    def wait_until_serving(self) -> None:
        """Wait until all shards serve. ShardFailed, with its last log lines, where one does not."""
        for index, process in enumerate(self._processes):
            self._await_serving(index, process)
        if self._settings.metrics and self._engine.is_local:  # as with their own ports: who scrapes them knows these
            self._settings = replace(self._settings, metrics=self.metrics_addresses)
        for index in range(len(self._listen)):
            watcher = threading.Thread(target=self._watch, args=(index,), name=f"shard {index}", daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    def _begin(self, index: int) -> None:
        self._processes.append(self._spawn(index))

    def _spawn(self, index: int) -> _ShardProcess:
        place, listen = self._places[index], self._listen[index]
        command = [*place.prefix, sys.executable, "-P", "-m", "embershard.cli", "ps"]
        command += ["--shard", str(index), "--of", str(len(self._listen))]
        if not self._engine.is_local:  # a machine may know its own name as one of loopback
            command += ["--listen", "0.0.0.0:0", "--announce", str(self._engine.announce)]
            command += ["--advertise", place.host] if place.host else []
        else:
            command += ["--listen", listen]
        command += self._settings.words(index)
        command += ["--restarts", str(self._restarts[index])] if self._restarts[index] else []
        command += ["--memory", f"{MEMORY_PERCENT / place.of:.6f}%"]
        command += ["--parent-pid", str(os.getpid())] if self._engine.is_local else []
        environment = environment_for_child()
        process = _ShardProcess(command, environment, self._forward, lambda code: self._engine.exit_code(code, place))
        self._engine.watch(process.popen, place)
        return process

    def _await_serving(self, index: int, process: _ShardProcess) -> None:
        if process.wait_until_serving(self._start_timeout):
            self._listen[index] = process.address
            return
        how = process.ended()  # before its last lines: it waits for them
        raise _failed(f"shard {index} ended with {how} before it served", process)

    def _watch(self, index: int) -> None:
        """Restart one shard whenever it dies, until it dies too often or all are ended."""
        policy, quick_deaths = self._restart, 0
        while True:
            process = self._processes[index]
            how = process.ended()
            if self._stopping.is_set():
                return
            what = f"shard {index} at {self._listen[index]} ended with {how} after {process.lived():.0f} s"
            if policy is None:
                self._give_up(what, process)
                return
            quick_deaths = quick_deaths + 1 if process.lived() < policy.quick.total_seconds() else 1
            if policy.gives_up(quick_deaths):
                self._give_up(f"{what}, not restarted after {quick_deaths} deaths in quick succession", process)
                return
            pause = policy.pause(quick_deaths).total_seconds()
            self._report(
                f"{what}: {self._settings.rows_of_dead()}. It is restarted in {pause:.1f} s. Its last output:\n"
                f"{process.last_lines()}"
            )
            if self._stopping.wait(pause) or not self._start_again(index):
                return

    def _start_again(self, index: int) -> bool:
        """Whether there was still need for it; one that does not serve counts as a death."""
        with self._lock:
            if self._stopping.is_set():
                return False
            self._restarts[index] += 1
            try:
                self._places[index] = self._engine.again(self._places[index])
                process = self._processes[index] = self._spawn(index)
            except OSError as error:  # too many processes or open files, no memory
                what = f"shard {index} at {self._listen[index]} ended, and cannot be restarted: {error.strerror}"
                self._give_up(what, self._processes[index])
                return False
        if process.wait_until_serving(self._start_timeout):
            self._report(f"shard {index} serves again at {process.address} (pid {process.popen.pid})")
        return True

    def _give_up(self, what: str, process: _ShardProcess) -> None:
        self._failure = _failed(what, process)
        self._report(str(self._failure))
        self._failed.set()
