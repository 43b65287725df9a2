"""Clients and sessions on shards in this process, over wires that record requests, and lose them or hold them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from embershard.proto.messages import Pull, Push, Reply, Request
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.session.session import Session

PATIENCE = 60.0  # seconds until a test that waits in vain fails
Matches = Callable[[Request], bool]


class Wire:
    """The way to one shard, which takes one request at a time.

    `before` and `after` the shard handles a request they may wait, raise, or return a reply that takes its place.
    """

    def __init__(self, shard: Shard, address: str, wires: Wires) -> None:
        self.shard, self.address, self.wires, self.lock = shard, address, wires, threading.Lock()
        self.seen: list[Request] = []
        self.before: Callable[[Request], object] = lambda request: None
        self.after = self.before

    def handle(self, request: Request) -> Reply:
        self.seen.append(request)
        self.wires.heard.append(("sent", request))
        reply = self.before(request)
        if reply is None:
            with self.lock:
                reply = self.shard.handle(request, self.wires.now)
            reply = self.after(request) or reply
        self.wires.heard.append(("answered", request))
        return reply


class Wires:
    """A wire to each of some shards, what went over them, and the sessions of workers that use them.

    `now` is the shards' time, where it does not pass.
    """

    def __init__(self, shards: list[Shard], now: float | None = None) -> None:
        self.wires = [Wire(shard, f"wire/{i}", self) for i, shard in enumerate(shards)]
        self.heard: list[tuple[str, Request]] = []
        self.now = now
        self.sessions: list[Session] = []

    def client(self, worker: int = 0, timeout: timedelta = timedelta(seconds=PATIENCE), **options: Any) -> Client:
        transports = [LocalTransport(wire.handle, wire.address) for wire in self.wires]
        return Client(transports, worker=worker, timeout=timeout, **options)

    def session(
        self, worker: int = 0, terms: Terms | None = None, *, clock: int = 0, local_steps: int | None = None
    ) -> Session:
        client = self.client(worker)
        if terms is not None:
            client.join(terms, clock)
        self.sessions.append(Session(client, local_steps=local_steps))
        return self.sessions[-1]

    def hold(self, before: Callable[[Request], object] | None = None, after: Callable[[Request], object] | None = None):
        for wire in self.wires:
            wire.before, wire.after = before or wire.before, after or wire.after

    def sent(self, *kinds: type[Request], worker: int | None = None) -> list[Request]:
        """The requests of these kinds, and of one worker, in the order in which they came."""
        found = [request for what, request in list(self.heard) if what == "sent" and isinstance(request, kinds)]
        return [request for request in found if worker in (None, _worker(request))]

    def when(self, what: str, matches: Matches) -> int:
        """The place of the first such request in what was heard; -1 where there is none."""
        return next((i for i, (said, request) in enumerate(self.heard) if said == what and matches(request)), -1)

    def run(self, work: Callable[[Session], object]) -> None:
        """Every session's work, side by side; a session whose work fails is closed, so that no other waits for it."""

        def guarded(session: Session) -> None:
            try:
                work(session)
            except BaseException:
                session.close()
                raise

        with ThreadPoolExecutor(len(self.sessions)) as pool:
            list(pool.map(guarded, self.sessions, timeout=PATIENCE))

    def wait(self, what: str, matches: Matches, times: int = 1) -> None:
        end = time.monotonic() + PATIENCE
        while sum(said == what and matches(r) for said, r in list(self.heard)) < times:
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.001)

    def close(self) -> None:
        for session in self.sessions:
            if session.membership is not None:
                session.close()


def lost(*_: object) -> None:
    """As a hook: no answer comes."""
    raise Unreachable("lost")


def reads(table: str, id_: int | None = None) -> Matches:
    return lambda r: (
        isinstance(r, Pull) and any(p.table == table and (id_ is None or id_ in p.ids.tolist()) for p in r.tables)
    )


def _worker(request: Request) -> int | None:
    return request.token.worker if isinstance(request, Push) else getattr(request, "worker", None)
