"""Run the shards and workers of a job on a Ray cluster: each process is an actor's (ray_step.py), placed by a group."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from embershard.deploy.engine import Place
from embershard.deploy.ray_step import NAMESPACE, amount_of
from embershard.proto.errors import EmbershardError, Status

ONE_CORE: Mapping[str, float] = MappingProxyType({"CPU": 1})
_REACHED_SECONDS = 10.0
ROOM_TIMEOUT = timedelta(minutes=2)  # for a cluster to find room; one that grows by itself needs a while
_LOOK_SECONDS = 1
_SAID_SECONDS = 10.0  # waiting for room for longer is said
_SIGNALLED = 128  # exit code of ray_step.py for a process that a signal ended is this and its number

_log = logging.getLogger(__name__)


class NoRay(EmbershardError):
    """There is no Ray cluster to run on, or Ray is not installed."""

    status = Status.FAILED_PRECONDITION
    template = "{reason}"


class NoRoom(EmbershardError):
    """A Ray cluster has no room for the shards or workers of a job."""

    status = Status.RESOURCE_EXHAUSTED
    template = (
        "the Ray cluster has no room for {count} {what} with {each} each{spread}: its {nodes} nodes have {held}; "
        "start more nodes, or request less"
    )


class RayEngine:
    """A Ray cluster that runs already. All of its nodes have to see the folder of the run.

    Shards are on nodes of their own (`pack` allows them to share), and Ray moves a place whose node is lost. Each shard
    and each worker takes so much of its node (`shard_resources`, `worker_resources`, by Ray's names: CPU, GPU, memory
    in bytes, or one of the cluster's own). A job waits for a place up to `room_timeout`. `close` gives the places back.
    """

    name = "ray"
    is_local = False

    def __init__(
        self,
        announce: Path,
        *,
        address: str = "",
        shard_resources: Mapping[str, float] = ONE_CORE,
        worker_resources: Mapping[str, float] = ONE_CORE,
        pack: bool = False,
        room_timeout: timedelta = ROOM_TIMEOUT,
    ) -> None:
        self.announce: Path | None = announce
        self._of_shard, self._of_worker, self._pack = dict(shard_resources), dict(worker_resources), pack
        self._room_seconds = room_timeout.total_seconds()
        self._groups: dict[str, Any] = {}  # of shards, and of workers; those of the present attempt
        self._more: dict[Place, Any] = {}  # places of workers that came later, each with its group
        try:
            import ray
        except ModuleNotFoundError:
            raise NoRay(reason="Ray is not installed: pip install 'embershard[ray]'") from None
        address = address or os.environ.get("RAY_ADDRESS", "auto")
        _check_reachable(address)
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_answer(address, error) from None
        self._address = ray.get_runtime_context().gcs_address

    def shards(self, count: int) -> Sequence[Place]:
        """One of each bundle of a placement group, which spreads them."""
        strategy = "SPREAD" if self._pack else "STRICT_SPREAD"
        return self._placed("shard", count, self._of_shard, strategy)

    def workers(self, count: int, most: int = 0) -> Sequence[Place]:
        """One of each bundle of a placement group of their own."""
        for place in tuple(self._more):  # of an attempt that has ended
            self.give_back(place)
        return self._placed("worker", count, self._of_worker, "SPREAD")

    def another_worker(self, rank: int, most: int) -> Place:
        """A group of its own, for which the cluster may have no room yet: the worker's process waits for it."""
        from ray.util.placement_group import placement_group

        group = placement_group([self._of_worker])
        place = Place((*self._step(group, 0, self._of_worker), "--"))
        self._more[place] = group
        return place

    def give_back(self, place: Place) -> None:
        """Remove the group of a place that `another_worker` gave; the first workers keep theirs to the end."""
        from ray.util.placement_group import remove_placement_group

        if (group := self._more.pop(place, None)) is not None:
            remove_placement_group(group)

    def again(self, place: Place) -> Place:
        """Return the same place: Ray moves it where its node is lost."""
        return place

    def exit_code(self, code: int, place: Place) -> int:
        """ray_step.py says 128 and the number of a signal, also of a process whose node was lost."""
        return _SIGNALLED - code if code > _SIGNALLED else code

    def watch(self, process: subprocess.Popen[Any], place: Place) -> None:
        """ray_step.py ends with its actor, and the actor with its node."""

    def close(self) -> None:
        """Give the places back, and leave the cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for group in (*self._groups.values(), *self._more.values()):
            remove_placement_group(group)
        self._groups.clear()
        self._more.clear()
        ray.shutdown()

    def _placed(self, what: str, count: int, each: Mapping[str, float], strategy: str) -> Sequence[Place]:
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        if (before := self._groups.pop(what, None)) is not None:  # an attempt that has ended
            remove_placement_group(before)
        group = self._groups[what] = placement_group([dict(each)] * count, strategy=strategy)
        if not self._await_room(group, what):
            error = _no_room(f"{what}s", count, each, strategy)
            self.close()
            raise error
        at = placement_group_table(group)["bundles_to_node_id"]
        nodes_of = [at[number] for number in range(count)]
        return [
            Place(
                (*self._step(group, number, each), "--"),
                number=nodes_of[:number].count(node),
                of=nodes_of.count(node),
            )
            for number, node in enumerate(nodes_of)
        ]

    def _await_room(self, group: Any, what: str) -> bool:
        """Whether a group has its places in time; asked by the second, for Ray obeys no signal while it waits."""
        began, said = time.monotonic(), False
        while not group.wait(_LOOK_SECONDS):
            waited = time.monotonic() - began
            if waited >= self._room_seconds:
                return False
            if waited > _SAID_SECONDS and not said:
                said = True
                _log.warning("waiting up to %.0f s for a Ray cluster with room for the %ss", self._room_seconds, what)
        return True

    def _step(self, group: Any, bundle: int, each: Mapping[str, float]) -> tuple[str, ...]:
        return (
            sys.executable, "-P", "-m", "embershard.deploy.ray_step", "--address", self._address,
            "--group", group.id.hex(), "--bundle", str(bundle), "--resources", json.dumps(each),
            "--room-seconds", str(self._room_seconds),
        )  # fmt: skip


def _no_room(what: str, count: int, each: Mapping[str, float], strategy: str) -> NoRoom:
    """The error of a cluster that runs, with what it has of what was asked for."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    held = ", ".join(
        f"{amount_of(name, total.get(name, 0.0))} ({amount_of(name, free.get(name, 0.0))} free)" for name in each
    )
    return NoRoom(
        what=what,
        count=count,
        each=" and ".join(amount_of(name, amount) for name, amount in each.items()),
        spread=", on a node each (--pack lets them share)" if strategy == "STRICT_SPREAD" else "",
        nodes=sum(bool(node["Alive"]) for node in ray.nodes()),
        held=held,
    )


def _check_reachable(address: str) -> None:
    """NoRay where nothing listens at host:port: Ray itself would try for minutes, and obey no signal meanwhile."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or a scheme of Ray's
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_answer(address, error) from None


def _no_answer(address: str, error: Exception) -> NoRay:
    remedy = "start one with `ray start --head`, or set RAY_ADDRESS"
    return NoRay(reason=f"no Ray cluster answers at {address} ({error}); {remedy}")
