"""A shard in this process that takes only TLS over TCP, with both transports behind its one port."""

import asyncio
import threading
from pathlib import Path

import uvloop

from embershard.proto.security.credentials import CertificateFolder
from embershard.proto.security.tls import TLS
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.options import ServerOptions
from embershard.ps.security.access import Access
from embershard.ps.transport.address import Address
from embershard.ps.transport.transports import Transports
from harness.shards import make_shard, table


class SecureShard:
    """Serves on a loop and a thread of its own; with `tls` None without certificates."""

    def __init__(self, tls: TLS | None, listen: str = "127.0.0.1:0", access: Access | None = None) -> None:
        self.access = access
        self.certificates = None if tls is None else CertificateFolder(tls)
        self.apply = ApplyThread()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listen = Address.parse(listen)
        self._transports = self.run(self._start())

    async def _start(self) -> Transports:
        sockets = self._listen.listen()
        self.address = self._listen.bound(sockets[0])
        dispatch = Dispatch(make_shard(table(dim=2)), self.apply, access=self.access)
        options = ServerOptions(shard=0, of=1)
        transports = await Transports.start(dispatch, sockets, options, self.certificates)
        await transports.open()
        return transports

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    @property
    def tcp(self) -> str:
        return f"tcp://{self.address}"

    @property
    def grpc(self) -> str:
        return f"grpc://{self.address}"

    @property
    def stream(self):
        return self._transports.stream

    def identities(self) -> list[str]:
        return [connection.peer_identity for connection in self.stream.connections]

    def stop(self) -> None:
        self.apply.close()
        self.run(self._transports.close())
        assert self.apply.join(60)
        self.run(asyncio.sleep(0.05))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
        Path(self._listen.path or "/nowhere").unlink(missing_ok=True)
