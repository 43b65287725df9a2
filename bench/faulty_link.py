"""A TCP proxy before a shard that loses, repeats and delays what passes, by frames of the stream transport
(wire.md)."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from embershard.proto.wire import HELLO_BYTES, PREFIX_BYTES

_PREFIX = struct.Struct("<4sBBHIIIIII")
DELAY_SECONDS = 0.01


# for shards on loopback: their clients look for a shard's token under its own port, not under the link's
BEHIND_LINK = ("--insecure-loopback",)


class FaultyLink:
    """Passes frames on; of the replies, a share is lost with the connection, a share comes twice and a share late.

    A request is passed twice where its reply would be: the shard sees the same push again, and the client two replies.
    """

    def __init__(self, target: str, share: float, seed: int) -> None:
        self.happened: Counter[str] = Counter()
        self._host, _, self._port = target.rpartition(":")
        self._share, self._random = share, random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()  # of the connections that there are
        self._is_cut = False

    def cut(self) -> None:
        """Break all connections, and take none until `mend`."""
        self.happened["cut"] += 1
        self._loop.call_soon_threadsafe(self._set_cut, True)

    def mend(self) -> None:
        """Take connections again."""
        self._loop.call_soon_threadsafe(self._set_cut, False)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The address of the proxy, while it runs."""
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            self._loop.call_soon_threadsafe(self._stop, server)
            thread.join(10)

    def _stop(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _set_cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        if is_cut:
            for writer in self._writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._is_cut:
                raise ConnectionRefusedError
            there, back = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        if self._is_cut:
            self._set_cut(True)
        for work in (self._requests(reader, back), self._replies(there, writer)):
            task = self._loop.create_task(self._until_broken(work, writer, back))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _until_broken(self, work, *writers: asyncio.StreamWriter) -> None:  # type: ignore[no-untyped-def]
        with suppress(OSError, asyncio.IncompleteReadError):
            await work
        for writer in writers:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(HELLO_BYTES))
        while True:
            frame = await _read_frame(reader)
            writer.write(frame)
            if self._happens("request repeated"):
                writer.write(frame)
            await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(HELLO_BYTES))
        while True:
            frame = await _read_frame(reader)
            if self._happens("reply lost"):
                return
            if self._happens("reply delayed"):
                await asyncio.sleep(DELAY_SECONDS)
            writer.write(frame)
            if self._happens("reply repeated"):
                writer.write(frame)
            await writer.drain()

    def _happens(self, what: str) -> bool:
        happens = self._random.random() < self._share
        self.happened[what] += happens
        return happens


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    prefix = await reader.readexactly(PREFIX_BYTES)
    _, _, _, num_buffers, _, _, head_bytes, bulk_bytes, _, _ = _PREFIX.unpack(prefix)
    return prefix + await reader.readexactly(4 * num_buffers + head_bytes + bulk_bytes)
