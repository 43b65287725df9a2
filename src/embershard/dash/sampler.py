"""One sampler for any number of pages: twice a second it asks the shards and reads the run's log."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from embershard.dash.events import Event
from embershard.dash.run_log import FollowedLog, Line, RunState
from embershard.dash.shards import ShardRow, ShardWatch, ShardWatches, TableRow, codec_of
from embershard.dash.track import Track
from embershard.dash.workers import WorkerRow, WorkersWatch
from embershard.proto.messages import TableStatus
from embershard.proto.security.tls import TLS
from embershard.worker.client.lineage import shards_without_rows

INTERVAL_SECONDS = 0.5
KEPT_EVENTS = 200
LATENCIES = ("pull_p50", "pull_p99", "push_p50", "push_p99")
SERIES = (*LATENCIES, "pulled_rows", "pushed_rows", "received", "sent")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelSample:
    """Everything that is shown, at one moment. `points` and `events` are those since the sample before."""

    time: float  # seconds since 1970, when the shards were asked
    number: int  # of the sample
    restarts: int  # of the run's tracks
    run: RunState | None
    shards: Sequence[ShardRow]
    workers: Sequence[WorkerRow]
    staleness: Sequence[int]  # pushes by the updates that their rows had missed, since the job began
    bytes: Sequence[Mapping[str, object]]  # per step of the first worker, by direction and part
    series: Mapping[str, float | None]
    points: Mapping[str, Sequence[Mapping[str, float | None]]]
    events: Sequence[Event]

    def as_json(self) -> dict[str, object]:
        """The fields of the object that the page is sent."""
        return dataclasses.asdict(self)


class Sampler:
    """Samples shards and a run's log in a thread of its own, between `start` and `close`.

    `publish` is called with each sample. `connect` gives it other shards.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        run: FollowedLog | None = None,
        *,
        tls: TLS | None = None,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._run, self._tls, self._interval = run, tls, interval
        self._shards = ShardWatches(addresses, tls)
        self._workers = WorkersWatch()
        self._next: Sequence[str] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
        self._publish: Callable[[PanelSample], object] = lambda sample: None
        self.series = Track(SERIES, peaks=("pull_p99", "push_p99"))
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.last: PanelSample | None = None

    def start(self, publish: Callable[[PanelSample], object]) -> None:
        """Begin; `publish` is called in the sampler's thread."""
        self._publish = publish
        self._thread.start()

    def connect(self, addresses: Sequence[str]) -> None:
        """Ask these shards from now on."""
        self._next = addresses

    def close(self) -> None:
        """End the connections, and with them what the last round asks, and the thread."""
        self._stop.set()
        self._shards.close()
        if self._thread.ident is not None:
            self._thread.join(5)

    def history(self) -> dict[str, object]:
        """Return what a page that opens now needs: all until the sample of this `number`. Waits for a round."""
        with self._lock:
            tracks = {"series": self.series.columns()}
            if self._run is not None:
                tracks["training"] = self._run.training.columns()
                tracks["evaluations"] = self._run.evaluations.columns()
            last = None if self.last is None else self.last.as_json()
            events = [dataclasses.asdict(event) for event in self.events]
            sparks = {watch.address: list(watch.latencies) for watch in self._shards.watches}
            return {"interval": self._interval, "tracks": tracks, "events": events, "sparks": sparks, "last": last}

    def state(self) -> dict[str, object] | None:
        """The last sample with the tables of all shards; None before the first. Waits for a round."""
        with self._lock:
            if self.last is None:
                return None
            tables = {watch.address: list(map(dataclasses.asdict, watch.tables())) for watch in self._shards.watches}
            shards = [{**dataclasses.asdict(row), "tables": tables.get(row.address, [])} for row in self.last.shards]
            return {**self.last.as_json(), "shards": shards}

    def tables(self, address: str, match: str = "") -> list[TableRow]:
        """The tables of the shard at this address whose names contain `match`; no sample has them, as they may be many.

        Waits for a round.
        """
        with self._lock:
            watches = [watch for watch in self._shards.watches if watch.address == address]
            return watches[0].tables(match) if watches else []

    def sample(self) -> PanelSample:
        """Ask all shards, read the run's log, and keep the points."""
        with self._lock:
            return self._sample()

    def _sample(self) -> PanelSample:
        if self._next is not None:
            self._shards.close()
            self._shards, self._next = ShardWatches(self._next, self._tls), None
        now = time.time()
        events = self._shards.ask()
        fresh = self._shards.fresh
        from_log, points = self._run.read() if self._run is not None else ([], {})
        state = None if self._run is None else self._run.state
        records = {} if self._run is None else self._run.workers()
        whole = [status for status in fresh if not status.recovering]  # a replay has only some of the workers so far
        events += self._workers.events(whole, len(whole) == len(self._shards.watches))
        lost = shards_without_rows(fresh)
        rows = [watch.row(lost=watch.status in lost) for watch in self._shards.watches]
        down = [row.shard for row in rows if (row.stale or row.health == "recovering") and row.shard is not None]
        series = self._series(rows)
        events = sorted([*from_log, *events], key=lambda event: event.time)
        self.events.extend(events)
        self.series.add(now, series)
        self.last = PanelSample(
            time=now,
            number=0 if self.last is None else self.last.number + 1,
            restarts=0 if self._run is None else self._run.restarts,
            run=state,
            shards=rows,
            workers=self._workers.rows(whole, down, records, state is not None and state.ended),
            staleness=[sum(column) for column in zip_longest(*(s.staleness_seen for s in whole), fillvalue=0)],
            bytes=_bytes_of(records, self._shards.watches),
            series=series,
            points=points,
            events=events[-KEPT_EVENTS:],
        )
        return self.last

    def _series(self, rows: Sequence[ShardRow]) -> dict[str, float | None]:
        shares = {"p50": 0.5, "p99": 0.99}
        latencies = {name: self._shards.milliseconds(f"{name[:4]}_seconds", shares[name[5:]]) for name in LATENCIES}
        names = ("pulled_rows", "pushed_rows", "received", "sent")
        return {**latencies, **{name: _sum_of(rows, name) for name in names}}

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self._publish(self.sample())
            except Exception:  # what is wrong with one sample must not end the watching
                if not self._stop.is_set():  # `close` cancels what the last round asks
                    _log.exception("a sample failed")
            due = max(due + self._interval, time.monotonic())
            self._stop.wait(due - time.monotonic())


def _sum_of(rows: Sequence[ShardRow], name: str) -> float | None:
    values = [getattr(row, name) for row in rows if getattr(row, name) is not None]
    return sum(values) if values else None


def _bytes_of(records: Mapping[int, Line], watches: Sequence[ShardWatch]) -> list[Mapping[str, object]]:
    """The bytes that the first worker recorded, by direction and part, with the codecs of those tables."""
    moved = records[min(records)].get("bytes") if records else None
    parts = [part for part in moved if isinstance(part, dict)] if isinstance(moved, list) else []
    tables = next((watch.status.tables for watch in watches if watch.status is not None), ()) if parts else ()
    return [{**part, "codec": _codecs_of(part, tables)} for part in parts]


def _codecs_of(part: Mapping[str, object], tables: Sequence[TableStatus]) -> str:
    """The codecs of all tables for a part of rows, or of dense weights; empty for other parts."""
    if part.get("part") not in ("rows", "dense"):
        return ""
    mine = [table for table in tables if (table.name == "dense") == (part["part"] == "dense")]
    return ", ".join(dict.fromkeys(codec_of(getattr(table, f"{part.get('direction')}_codec", "")) for table in mine))
