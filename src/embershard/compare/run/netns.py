"""Make a real link of a given bandwidth: shards and workers in two network namespaces with a shaped wire between.

Each direction is held to the rate by the kernel's token bucket (tbf), which counts the headers of Ethernet, IP and TCP
too. Needs Linux, root, and ip and tc of iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from embershard.proto.errors import EmbershardError
from embershard.proto.user_modules import environment_for_child

SHARD_IP, WORKER_IP = "10.77.0.1", "10.77.0.2"
FIRST_PORT = 7700
# What an idle link saves up passes at once: with 5 ms, and at least 128 KiB, of it 20 ms worth of data took 10.8 at 100
# Mbit/s; with 1 ms they take 20.2, and bulk keeps its rate up to 2 Gbit/s. Larger GSO packets are cut by tbf.
BURST_SECONDS, MIN_BURST_BYTES, LATENCY_MS = 0.001, 2**13, 50
_PREFIX = "embercompare"
_COMMAND_SECONDS = 20.0
_START_SECONDS, _STOP_SECONDS = 120.0, 40.0


class NoNamespaces(EmbershardError):
    """This machine, or this user, cannot make network namespaces."""

    template = "--netns cannot be used here: {reason}; leave it out to emulate links in the workers"


def check_namespaces() -> None:
    """Raise NoNamespaces with the reason where network namespaces cannot be made."""
    if sys.platform != "linux":
        raise NoNamespaces(reason="only Linux has network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNamespaces(reason=f"there is no `{tool}`; install iproute2")
    if os.geteuid() != 0:
        raise NoNamespaces(reason="it needs root (or a container with CAP_NET_ADMIN and CAP_SYS_ADMIN)")


class Namespaces:
    """Two namespaces and the wire between them, as a context manager; it removes those of killed processes first."""

    def __init__(self) -> None:
        self._shards, self._workers = (f"{_PREFIX}-{os.getpid()}-{end}" for end in ("s", "w"))

    def __enter__(self) -> Self:
        check_namespaces()
        for space in _run("ip", "netns", "list").split():
            parts = space.split("-")
            if parts[0] == _PREFIX and len(parts) == 3 and not Path(f"/proc/{parts[1]}").exists():
                _remove(space)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def worker_prefix(self) -> tuple[str, ...]:
        """The words before a command that run it in the workers' namespace."""
        return ("ip", "netns", "exec", self._workers)

    def shape(self, bits: float | None) -> None:
        """Limit the wire to so many bits per second, each way; None: no limit."""
        for space, device in ((self._shards, "els0"), (self._workers, "elw0")):
            if bits is None:
                subprocess.run(
                    ["tc", "-n", space, "qdisc", "del", "dev", device, "root"],
                    capture_output=True, timeout=_COMMAND_SECONDS, check=False,
                )  # fmt: skip
                continue
            burst = max(MIN_BURST_BYTES, int(bits / 8 * BURST_SECONDS))
            _run(
                "tc", "-n", space, "qdisc", "replace", "dev", device, "root",
                "tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", f"{LATENCY_MS}ms",
            )  # fmt: skip

    @contextmanager
    def shards(self, number: int, imports: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Start shards for the length of the block and return their addresses."""
        with ExitStack() as stack:
            processes = [stack.enter_context(self._shard(index, number, imports)) for index in range(number)]
            yield tuple(_address(process) for process in processes)

    @contextmanager
    def _shard(self, index: int, of: int, imports: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        command = ["ip", "netns", "exec", self._shards, sys.executable, "-P", "-m", "embershard.cli", "ps"]
        command += ["--shard", str(index), "--of", str(of), "--listen", f"{SHARD_IP}:{FIRST_PORT + index}"]
        command += ["--insecure", "--snapshots", "/"]  # this network has nobody else in it
        command += ["--parent-pid", str(os.getpid())]  # ip has become the shard by exec
        command += [word for module in imports for word in ("--import", module)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment_for_child(), start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            try:
                process.terminate()
                process.communicate(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.communicate()

    def _build(self) -> None:
        for space in (self._shards, self._workers):
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
        _run(
            "ip", "-n", self._workers, "link", "add", "elw0", "type", "veth",
            "peer", "name", "els0", "netns", self._shards,
        )  # fmt: skip
        for space, ip, device in ((self._shards, SHARD_IP, "els0"), (self._workers, WORKER_IP, "elw0")):
            _run("ip", "-n", space, "addr", "add", f"{ip}/24", "dev", device)
            _run("ip", "-n", space, "link", "set", device, "up")
            # Linux's default, on any host: with BBR three workers in training used 86 % of 100 Mbit/s, with CUBIC 95 %
            with suppress(NoNamespaces):
                _run(
                    "ip", "-n", space, "route", "replace", "10.77.0.0/24", "dev", device,
                    "proto", "kernel", "scope", "link", "src", ip, "congctl", "cubic",
                )  # fmt: skip

    def _remove(self) -> None:
        for space in (self._shards, self._workers):
            _remove(space)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    deadline = threading.Timer(_START_SECONDS, process.kill)
    deadline.start()
    try:
        for line in process.stdout:  # it ends itself where it cannot serve
            if line.startswith("{"):
                return str(json.loads(line)["address"])
    finally:
        deadline.cancel()
    raise NoNamespaces(reason="a shard did not come up in its namespace")


def _run(*words: str) -> str:
    """Run a command and return its output. NoNamespaces with its error output where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode:
        raise NoNamespaces(reason=f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=_COMMAND_SECONDS, check=False)
