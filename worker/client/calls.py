"""A client's calls to its shards: each ends by a deadline, is timed and counted, and is told to who watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Pushed, Request, Rows
from embershard.proto.timing import set_apart, span
from embershard.proto.transport.transport import Deadline
from embershard.worker.client.byte_counts import Volumes
from embershard.worker.client.connections import Outcome, ShardConnections
from embershard.worker.client.pull import Places

Watch = Callable[[Mapping[int, Request], Mapping[int, Outcome], float], None]  # requests, replies, seconds


@dataclass(slots=True)
class ClientStats:
    """Counters of a client since its start."""

    wait_seconds: float = 0.0  # spent waiting for shards
    pulled_rows: int = 0
    pushed_rows: int = 0  # rows that shards applied
    skipped_rows: int = 0  # gradient rows that held NaN or Inf
    sent_bytes: int = 0
    received_bytes: int = 0
    cache_hits: int = 0  # rows that a session's cache gave
    cache_lookups: int = 0  # rows that it was asked for
    lost_leases: int = 0  # times that the other workers went on without this one
    volume: Volumes = field(default_factory=dict)  # the bytes by direction and part


class Requests:
    """Several threads may call at a time."""

    def __init__(self, links: ShardConnections, timeout: timedelta) -> None:
        self.settings_revision = 0  # of what the shards were told of compression, as far as replies said
        self.watch: Watch | None = None  # is told of every call
        self.stats = ClientStats()
        self.timeout = timeout  # of every call that says nothing else
        self._links = links
        self._lock = threading.Lock()  # of the counters

    def __call__(
        self,
        requests: Mapping[int, Request],
        into: Places | None = None,
        *,
        timeout: timedelta | None = None,
        wait: Callable[..., dict[int, Outcome]] | None = None,
    ) -> dict[int, Outcome]:
        """What becomes of each shard's request; `wait` calls where shards may have to wait for other workers."""
        start = time.perf_counter()
        deadline = Deadline(self.timeout if timeout is None else timeout)
        try:
            with span("wait"):  # of which a transport may set its own parts apart
                outcomes = self._links.call(requests, deadline, into) if wait is None else wait(requests, into)
                answers = [reply for reply in outcomes.values() if isinstance(reply, Rows | Pushed)]
                # shards work side by side, but for those of this process: the slowest is waited for
                set_apart("shards", max((reply.coding_seconds for reply in answers), default=0.0))
            self.settings_revision = max([self.settings_revision, *(reply.settings for reply in answers)])
            if (watch := self.watch) is not None:
                watch(requests, outcomes, time.perf_counter() - start)
            return outcomes
        finally:
            with self._lock:
                self.stats.wait_seconds += time.perf_counter() - start

    def to_all(self, request: Request) -> list[Outcome]:
        """Send one request to every shard; the replies by index. Raises the first error."""
        outcomes = self({shard: request for shard in range(len(self._links))})
        raise_first(outcomes)
        return [outcomes[shard] for shard in range(len(self._links))]

    def count_pull(self, rows: int) -> None:
        """Rows were pulled."""
        with self._lock:
            self.stats.pulled_rows += rows

    def count_push(self, outcomes: Mapping[int, Outcome]) -> None:
        """Pushes were answered."""
        done = [reply for reply in outcomes.values() if isinstance(reply, Pushed)]
        with self._lock:
            self.stats.pushed_rows += sum(reply.applied for reply in done)
            self.stats.skipped_rows += sum(reply.skipped for reply in done)


def raise_first(outcomes: Mapping[int, Outcome]) -> None:
    """The first error among outcomes, if there is one."""
    for outcome in outcomes.values():
        if isinstance(outcome, EmbershardError):
            raise outcome
