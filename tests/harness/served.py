"""A shard in this process that serves the stream transport."""

from __future__ import annotations

import asyncio
import threading

import uvloop

from embershard.proto.routing import Placement
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.transport.stream import StreamServer


class ServedShard:
    """A shard on a loop and a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(20)

    async def _start(self) -> str:
        self._server = StreamServer(Dispatch(Shard(0, Placement.even(1), OptimizerRegistry()), ApplyThread()))
        self._listener = await self.loop.create_server(self._server.protocol, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._listener.close()
        await self._server.close(0.0)
        await asyncio.sleep(0.01)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()
