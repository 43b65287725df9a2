"""A shard that serves, in this process or in one of its own."""

import asyncio
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from embershard.proto.routing import Placement
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.security.access import Access
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.transport.pipe import PipedServer
from embershard.ps.transport.stream import StreamServer
from harness.processes import EMBERSHARD

T = TypeVar("T")


class ServedShard:
    """A shard that serves the stream transport over TCP, on a loop and a thread of its own."""

    def __init__(self, foreign: str = "", shard: Shard | None = None, access: Access | None = None) -> None:
        self.loop = uvloop.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.defects.append(context))
        self.defects: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.shard, self.apply = shard or Shard(0, Placement.even(1), OptimizerRegistry()), ApplyThread()
        self.dispatch = Dispatch(self.shard, self.apply, access=access)
        sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        self.stream = self.on_loop(lambda: StreamServer(self.dispatch, PipedServer(foreign) if foreign else None))
        self._listener = self.run(self.loop.create_server(self.stream.protocol, sock=sock))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def on_loop(self, work: Callable[[], T]) -> T:
        async def call():
            return work()

        return self.run(call())

    @property
    def connections(self) -> int:
        return len(self.stream.connections)

    def unsent_bytes(self) -> int:
        return self.on_loop(lambda: sum(c.unsent_bytes for c in self.stream.connections))

    def stop(self) -> None:
        self.on_loop(self._listener.close)
        self.run(self.stream.close(0.0))
        self.run(asyncio.sleep(0.01))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()
        assert not self.defects


@dataclass
class ShardProcess:
    """`embershard ps`, and what it says when it serves."""

    popen: subprocess.Popen[str]
    ready: dict[str, str]

    @property
    def address(self) -> str:
        return self.ready["address"]


@contextmanager
def shard_process(
    *options: str, listen: str = "127.0.0.1:0", shard: int = 0, of: int = 1, **popen: Any
) -> Iterator[ShardProcess]:
    """One of `of` shards, as a process that is killed at the end."""
    command = [*EMBERSHARD, "ps", "--shard", str(shard), "--of", str(of), "--listen", listen, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, **popen}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield ShardProcess(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()
