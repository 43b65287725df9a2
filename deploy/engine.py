"""Say where each process of a job runs, and how it is started there; all else is the same on every engine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embershard.proto.monitoring.exporter import loopback_host


@dataclass(frozen=True, slots=True)
class Place:
    """Where one shard or worker runs.

    `prefix` are words before its command, which run it there. `host` is the name by which other machines reach it;
    empty on an engine of one machine, and where the engine itself tells it. It is number `number` of the `of` processes
    of its kind on its machine.
    """

    prefix: tuple[str, ...] = ()
    host: str = ""
    number: int = 0
    of: int = 1


class ClusterEngine(Protocol):
    """The machines of a job."""

    name: str
    is_local: bool  # all processes are children of this one
    announce: Path | None  # where shards announce themselves, on an engine of several machines; all of these see it

    def shards(self, count: int) -> Sequence[Place]:
        """The places of so many shards, by index."""
        ...

    def workers(self, count: int, most: int = 0) -> Sequence[Place]:
        """The places of so many workers, by rank, of up to `most` that may come."""
        ...

    def another_worker(self, rank: int, most: int) -> Place:
        """A place for a worker beside those of `workers`; its process may have to wait until there is room."""
        ...

    def give_back(self, place: Place) -> None:
        """Free a place of `another_worker` whose process has ended for good."""
        ...

    def again(self, place: Place) -> Place:
        """Return the place to start an ended process again: its own, unless that machine is lost."""
        ...

    def exit_code(self, code: int, place: Place) -> int:
        """The exit code of a process as subprocess gives that of a child: below zero the number of a signal.

        One whose machine was lost was killed.
        """
        ...

    def watch(self, process: subprocess.Popen[Any], place: Place) -> None:
        """End a process whose machine is lost, where nothing else would."""
        ...

    def close(self) -> None:
        """Give back what the engine holds for the job."""
        ...


class LocalEngine:
    """This machine: shards and workers are child processes, which talk over loopback and Unix sockets."""

    name = "local"
    is_local = True
    announce: Path | None = None

    def shards(self, count: int) -> Sequence[Place]:
        """Place all shards on this machine, whose memory they share."""
        return [Place(number=index, of=count) for index in range(count)]

    def workers(self, count: int, most: int = 0) -> Sequence[Place]:
        """Place all workers on this machine, whose cores they share with those that may come."""
        return [Place(number=rank, of=most or count) for rank in range(count)]

    def another_worker(self, rank: int, most: int) -> Place:
        """Start it on this machine, too."""
        return Place(number=rank, of=most)

    def give_back(self, place: Place) -> None:
        """Do nothing: nothing is reserved here."""

    def again(self, place: Place) -> Place:
        """Start it again on this machine, the only one."""
        return place

    def exit_code(self, code: int, place: Place) -> int:
        """Return the exit code unchanged: the processes are children of this one."""
        return code

    def watch(self, process: subprocess.Popen[Any], place: Place) -> None:
        """Do nothing: this machine is lost only together with this process."""

    def close(self) -> None:
        """Do nothing: child processes are ended by those who started them."""


LOCAL = LocalEngine()


def meeting(first: Place, port: int) -> dict[str, str]:
    """The environment by which workers find each other for torch.distributed: at the first one's machine."""
    if first.host:
        return {"MASTER_ADDR": first.host, "MASTER_PORT": str(port)}
    return {"MASTER_ADDR": loopback_host(), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
