"""Run a command in a Ray actor as if it were a child here, as srun does for Slurm: `-m embershard.deploy.ray_step`.

The actor owns the process: it passes on what that reads and writes, its signals and its exit code. Where this process
ends, Ray ends the actor, and the command ends with it. So shards and workers stay free of Ray, and of its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

LOST_EXIT_CODE = 128 + signal.SIGKILL  # the actor, or its node, is gone
NAMESPACE = "embershard"
_PASSED_ON = (
    "EMBERSHARD_", "GLOO_", "LOCAL_", "MASTER_", "MKL_", "NCCL_", "NUMBA_", "OMP_", "PYTHONPATH", "RANK", "TORCH_",
    "WORLD_SIZE",
)  # fmt: skip  # beginnings of variables that the command gets from here; all others are those of its machine
_LOOK_SECONDS = 1.0
_SAID_SECONDS = 10.0  # waiting for a place for longer is said, and again after each


class RemoteProcess:
    """The actor: one process on its node."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        cluster = ray.get_runtime_context().gcs_address  # for data.reader ray
        self._said: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._failure = ""  # why there is no process
        advertised = f"[{host}]" if ":" in host else host
        try:
            self._process = subprocess.Popen(
                [sys.executable, *words, "--parent-pid", str(os.getpid())],
                cwd=folder,
                env={**os.environ, **variables, "EMBERSHARD_ADVERTISE": advertised, "RAY_ADDRESS": cluster},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._failure = f"{host} cannot run it in {folder}: {error.strerror}; all nodes have to see this folder\n"
            return
        streams = (1, self._process.stdout), (2, self._process.stderr)
        self._readers = [threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def said(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return the lines written since the last call, each with its descriptor (1 or 2), and the exit code or None.

        Waits a second for something to tell.
        """
        if self._failure:
            return [(2, self._failure.encode())], 1
        found: list[tuple[int, bytes]] = []
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(_LOOK_SECONDS)
        try:
            found.append(self._said.get(timeout=_LOOK_SECONDS if code is None else 0))
            while True:
                found.append(self._said.get_nowait())
        except queue.Empty:
            return found, None if found else code

    def tell(self, data: bytes) -> None:
        """Write to the process's stdin; nothing ends it."""
        if self._failure:
            return
        assert self._process.stdin is not None
        try:
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()
        except OSError:
            pass  # it has ended, which `said` tells

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._failure:
            return
        self._process.send_signal(number)

    def _read(self, descriptor: int, stream: Any) -> None:
        for line in stream:
            self._said.put((descriptor, line))


def main() -> int:
    """Run the command; its exit code, or 128 and the number of the signal that ended it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True, help="of the cluster")
    parser.add_argument("--group", required=True, help="id of the placement group")
    parser.add_argument("--bundle", type=int, required=True, help="of the group")
    parser.add_argument("--resources", type=json.loads, default={"CPU": 1}, help="of the actor, as JSON")
    parser.add_argument("--room-seconds", type=float, default=120.0, help="to wait for its place to have a node")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="behind --: python, and its arguments")
    args = parser.parse_args()
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    return _run(args, words[1:])  # the actor's own Python


def amount_of(resource: str, amount: float) -> str:
    """So much of a resource of Ray's, in words."""
    return f"{amount / 2**30:.3g} GiB of memory" if resource == "memory" else f"{amount:g} {resource}"


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    import ray
    from ray.exceptions import RayError

    ray.init(address=args.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    signals: queue.Queue[int] = queue.Queue()
    # after ray.init, which has a handler of its own for SIGTERM
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.put(number))
    actor = _actor(args, words)
    try:
        ended = _await_place(actor, args, signals)
        if ended is not None:
            return ended
        threading.Thread(target=_pass_on, args=(actor,), daemon=True).start()
        while True:
            said = actor.said.remote()
            while not ray.wait([said], timeout=0.2)[0]:
                _send(actor, signals)
            lines, code = ray.get(said)
            for descriptor, line in lines:
                stream = sys.stdout.buffer if descriptor == 1 else sys.stderr.buffer
                stream.write(line)
                stream.flush()
            _send(actor, signals)
            if code is not None:
                return int(code) if code >= 0 else 128 - int(code)
    except RayError as error:
        print(f"its actor is lost: {type(error).__name__}", file=sys.stderr, flush=True)
    return LOST_EXIT_CODE


def _actor(args: argparse.Namespace, words: Sequence[str]) -> Any:
    """The actor, which the cluster may not have a place for yet."""
    import ray
    from ray.util.placement_group import PlacementGroup, PlacementGroupID
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = PlacementGroup(PlacementGroupID(bytes.fromhex(args.group)))
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=args.bundle)
    others = dict(args.resources)
    return (
        ray.remote(RemoteProcess)
        .options(
            num_cpus=others.pop("CPU", 0),
            num_gpus=others.pop("GPU", 0),
            memory=others.pop("memory", None),
            resources=others,
            max_concurrency=4,
            scheduling_strategy=strategy,
        )
        .remote(list(words), variables, os.getcwd())
    )


def _await_place(actor: Any, args: argparse.Namespace, signals: queue.Queue[int]) -> int | None:
    """Wait until the actor runs; the exit code where a signal, or the end of the time for it, comes first."""
    import ray

    wanted = " and ".join(amount_of(name, amount) for name, amount in args.resources.items())
    began = said = time.monotonic()
    ready = actor.__ray_ready__.remote()
    while not ray.wait([ready], timeout=0.2)[0]:
        now = time.monotonic()
        if not signals.empty():  # SIGUSR1, too: a worker that is to leave, and has not come yet
            return 128 + signals.get()
        if now - began > args.room_seconds:
            waited = f"no node of the Ray cluster with {wanted} free has started it within {args.room_seconds:.0f} s"
            print(f"{waited}; start more nodes, or request less", file=sys.stderr, flush=True)
            return LOST_EXIT_CODE
        if now - said > _SAID_SECONDS:
            said = now
            print(f"waiting for a node of the Ray cluster with {wanted} free", file=sys.stderr, flush=True)
    ray.get(ready)
    return None


def _pass_on(actor: Any) -> None:
    """Pass on what stdin has, to its end."""
    import ray
    from ray.exceptions import RayError

    with suppress(RayError):  # the actor is gone, which the other thread tells
        while data := sys.stdin.buffer.readline():
            ray.get(actor.tell.remote(data))  # one after the other: the actor's calls run side by side
        ray.get(actor.tell.remote(b""))


def _send(actor: Any, signals: queue.Queue[int]) -> None:
    while not signals.empty():
        actor.signal.remote(signals.get())


if __name__ == "__main__":
    sys.exit(main())
