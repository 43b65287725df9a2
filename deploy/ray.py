"""Run the shards and workers of a job on a Ray cluster: each process is an actor's (ray_step.py), placed by a group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.deploy.engine import Place
from embershard.deploy.ray_step import NAMESPACE
from embershard.proto.errors import EmbershardError, Status

_REACHED_SECONDS = 10.0
_PLACED_SECONDS = 120  # for a cluster to find room; one that grows by itself needs a while
_SIGNALLED = 128  # exit code of ray_step.py for a process that a signal ended is this and its number


class NoRay(EmbershardError):
    """There is no Ray cluster to run on, or Ray is not installed."""

    status = Status.FAILED_PRECONDITION
    template = "{reason}"


class NoRoom(EmbershardError):
    """A Ray cluster has no room for the shards or workers of a job."""

    status = Status.RESOURCE_EXHAUSTED
    template = (
        "the Ray cluster has no room for {count} {what} of {cpus:g} cores each{spread} (it has {nodes} nodes with "
        "{total:g} cores, {free:g} of them free); start more nodes, or ask for less"
    )


class RayEngine:
    """A Ray cluster that runs already. All of its nodes have to see the folder of the run.

    Shards are on nodes of their own (`pack` allows them to share), and Ray moves a place whose node is lost. `close`
    gives the places back.
    """

    name = "ray"
    is_local = False

    def __init__(
        self,
        announce: Path,
        *,
        address: str = "",
        cpus: float = 1,
        worker_cpus: float = 1,
        pack: bool = False,
    ) -> None:
        self.announce: Path | None = announce
        self._cpus, self._worker_cpus, self._pack = cpus, worker_cpus, pack
        self._groups: dict[str, Any] = {}  # of shards, and of workers; those of the present attempt
        try:
            import ray
        except ModuleNotFoundError:
            raise NoRay(reason="Ray is not installed: pip install 'embershard[ray]'") from None
        address = address or os.environ.get("RAY_ADDRESS", "auto")
        _check_reachable(address)
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            remedy = "start one with `ray start --head`, or set RAY_ADDRESS"
            reason = f"no Ray cluster answers at {address} ({error}); {remedy}"
            raise NoRay(reason=reason) from None
        self._address = ray.get_runtime_context().gcs_address

    def shards(self, count: int) -> Sequence[Place]:
        """One of each bundle of a placement group, which spreads them."""
        strategy = "SPREAD" if self._pack else "STRICT_SPREAD"
        return self._placed("shard", count, self._cpus, strategy)

    def workers(self, count: int) -> Sequence[Place]:
        """One of each bundle of a placement group of their own."""
        return self._placed("worker", count, self._worker_cpus, "SPREAD")

    def again(self, place: Place) -> Place:
        """At the same place: Ray moves it where its node is lost."""
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

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()

    def _placed(self, what: str, count: int, cpus: float, strategy: str) -> Sequence[Place]:
        import ray
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        if (before := self._groups.pop(what, None)) is not None:  # an attempt that has ended
            remove_placement_group(before)
        group = self._groups[what] = placement_group([{"CPU": cpus}] * count, strategy=strategy)
        if not group.wait(_PLACED_SECONDS):
            total, free = ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
            nodes = sum(bool(node["Alive"]) for node in ray.nodes())
            spread = ", on a node each" if strategy == "STRICT_SPREAD" else ""
            self.close()
            raise NoRoom(count=count, what=f"{what}s", cpus=cpus, spread=spread, nodes=nodes, total=total, free=free)
        at = placement_group_table(group)["bundles_to_node_id"]
        nodes_of = [at[number] for number in range(count)]
        return [
            Place(
                (*self._step(group, number, cpus), "--"),
                number=nodes_of[:number].count(node),
                of=nodes_of.count(node),
            )
            for number, node in enumerate(nodes_of)
        ]

    def _step(self, group: Any, bundle: int, cpus: float) -> tuple[str, ...]:
        return (
            sys.executable, "-P", "-m", "embershard.deploy.ray_step", "--address", self._address,
            "--group", group.id.hex(), "--bundle", str(bundle), "--cores", str(cpus),
        )  # fmt: skip


def _check_reachable(address: str) -> None:
    """NoRay where nothing listens at host:port: Ray itself would try for minutes, and obey no signal meanwhile."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or a scheme of Ray's
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_SECONDS).close()
    except (OSError, OverflowError) as error:
        remedy = "start one with `ray start --head`, or set RAY_ADDRESS"
        raise NoRay(reason=f"no Ray cluster answers at {address} ({error}); {remedy}") from None
