"""What a shard's process counts: plain ints and histograms, each written by one thread and read by any.

Nothing here locks, and nothing is computed before somebody asks: a request costs about a microsecond of counting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from embershard.proto import embershard_pb2 as pb
from embershard.proto.messages import Pull, Push, Request, ShardStatus
from embershard.proto.monitoring.histogram import DurationHistogram

OK, EXPIRED = "ok", "expired"  # outcomes beside the names of errors; expired: nobody waited for the reply any more


class TransportCounters:
    """The requests that one transport brought, and its bytes; written by the thread that moves them."""

    def __init__(self) -> None:
        self.received_bytes = self.sent_bytes = self.connections = 0
        self.shared_bytes = 0  # of memory that peers share, and is mapped
        self.durations: defaultdict[type[Request], DurationHistogram] = defaultdict(DurationHistogram)
        self.outcomes: defaultdict[tuple[type[Request], str], int] = defaultdict(int)

    def answered(self, kind: type[Request], seconds: float, error: BaseException | None) -> None:
        """Count a request whose reply, or error, was given to the transport so long after it had arrived."""
        self.durations[kind].add(seconds)
        self.outcomes[kind, OK if error is None else type(error).__name__] += 1

    def expired(self, kind: type[Request]) -> None:
        """Count a request that was dropped, since its deadline had passed."""
        self.outcomes[kind, EXPIRED] += 1


class Counters:
    """All that one shard's process counts. `restarts`: how often its supervisor has started it again."""

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = restarts
        self.draining = False  # it finishes what it accepted, and takes nothing more
        self.busy_seconds = 0.0  # of the apply thread
        self.queue = DurationHistogram()  # from a request's arrival to its begin
        # turned away before they were queued, by reason; each reason belongs to one thread, or to a lock
        self.rejected: defaultdict[str, int] = defaultdict(int)
        self.transports: defaultdict[str, TransportCounters] = defaultdict(TransportCounters)

    def fill(self, status: ShardStatus) -> None:
        """Put into a status what dashboards show of these."""
        status.apply_busy_seconds = self.busy_seconds
        status.restarts = self.restarts
        status.draining = self.draining
        status.queue_seconds.CopyFrom(_message([self.queue]))
        for kind, field in ((Pull, status.pull_seconds), (Push, status.push_seconds)):
            found = [one.durations[kind] for one in tuple(self.transports.values()) if kind in one.durations]
            field.CopyFrom(_message(found))
        for name, one in tuple(self.transports.items()):
            status.transports.add(
                name=name,
                received_bytes=one.received_bytes,
                sent_bytes=one.sent_bytes,
                connections=one.connections,
                shared_bytes=one.shared_bytes,
            )
        status.rejected.update(dict(self.rejected))


def _message(histograms: Iterable[DurationHistogram]) -> pb.DurationHistogram:
    """Their sum."""
    found = list(histograms)
    counts = [sum(part) for part in zip(*(one.counts for one in found), strict=True)]
    return pb.DurationHistogram(counts=counts, sum=sum(one.sum for one in found))
