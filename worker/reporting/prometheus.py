"""The metrics of a worker (proto/monitoring/metrics.py), from what it counts anyway."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from embershard.proto.monitoring.exporter import LoopWatch, stuck
from embershard.proto.monitoring.histogram import DurationHistogram
from embershard.proto.monitoring.metrics import HistogramValue, Sample, by_table
from embershard.proto.transport.io_thread import io_loop
from embershard.worker.reporting.log import finite
from embershard.worker.reporting.report import Report
from embershard.worker.reporting.throughput import Throughput
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import Strategy

_PREFIX = "embershard_worker_"


class StepCounters:
    """Counts steps and their parts: the `watch` of a Recorder (proto/timing.py)."""

    def __init__(self) -> None:
        self.step = DurationHistogram()
        self.parts: defaultdict[tuple[str, bool], DurationHistogram] = defaultdict(DurationHistogram)

    def __call__(self, seconds: float, parts: Mapping[tuple[str, bool], float]) -> None:
        """Count one step more."""
        self.step.add(seconds)
        for key, part in parts.items():
            self.parts[key].add(part)


class MonitoredWorker:
    """A worker as its exporter sees it. Without a `session` it has no shards."""

    def __init__(
        self, steps: StepCounters, meter: Throughput, report: Report, strategy: Strategy, session: Session | None
    ) -> None:
        self._steps, self._meter, self._report, self._strategy = steps, meter, report, strategy
        self._session = session
        self._other_bytes = 0.0
        self._loop = None if session is None else LoopWatch(io_loop())

    def samples(self) -> Iterator[Sample]:
        """Every metric of the worker."""
        yield Sample(f"{_PREFIX}step_duration_seconds", HistogramValue.of(self._steps.step))
        for (name, overlapped), durations in tuple(self._steps.parts.items()):
            where = name, "yes" if overlapped else "no"
            yield Sample(f"{_PREFIX}step_part_duration_seconds", HistogramValue.of(durations), where)
        stats, waited = self._strategy.stats, self._meter.waited
        yield Sample(f"{_PREFIX}steps_total", self._steps.step.count)
        yield Sample(f"{_PREFIX}samples_total", self._meter.samples)
        yield Sample(f"{_PREFIX}skipped_rows_total", stats.skipped_rows)
        yield Sample(f"{_PREFIX}lost_leases_total", stats.lost_leases)
        yield Sample(f"{_PREFIX}clock", self._strategy.clock)
        for reason, seconds in dataclasses.asdict(waited).items():
            yield Sample(f"{_PREFIX}waiting_seconds_total", seconds, (reason,))
        wire, raw = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
        for part, count in stats.volume.items():
            labels = part.table, part.direction, part.kind
            wire[labels], raw[labels] = count.wire, count.raw
        if (other := ("", "other", "other")) in wire:
            # what no call accounts for yet, which falls with each call that ends; a counter only grows
            wire[other] = raw[other] = self._other_bytes = max(self._other_bytes, wire[other])
        yield from by_table(f"{_PREFIX}transferred_bytes_total", wire)
        yield from by_table(f"{_PREFIX}uncompressed_bytes_total", raw)
        if self._session is not None and (expires := self._session.client.certificate_expires) is not None:
            yield Sample(f"{_PREFIX}certificate_expiry_timestamp_seconds", expires.timestamp())
        yield from self._figures()
        yield from self._codecs()

    def _figures(self) -> Iterator[Sample]:
        if (interval := self._meter.last) is not None:
            yield Sample(f"{_PREFIX}loss", interval.loss)
            yield Sample(f"{_PREFIX}samples_per_second", interval.samples_per_second)
        if (evaluation := self._report.last) is not None:
            for split, figures in evaluation.figures.items():
                for name, value in figures.items():
                    yield Sample(f"{_PREFIX}metric", value, (name, split))

    def _codecs(self) -> Iterator[Sample]:
        if self._session is None:
            return
        compressor, codecs = self._session.client.compressor, dict[tuple[str, ...], float]()
        for table in sorted(self._session.table_names):
            push, pull = compressor.coded_pushes.get(table), compressor.coded_pulls.get(table)
            codecs[table, str(push or "float32"), str(pull or "float32")] = 1
        for sample in by_table(f"{_PREFIX}table_codec_info", codecs):
            yield sample._replace(value=1)  # also of tables that are added up

    def not_live(self) -> str:
        """Why the process should be started again: never for what other workers, or shards, do not do."""
        return "" if self._loop is None else stuck({"I/O loop": self._loop.idle_seconds})

    def not_ready(self) -> str:
        """Why it does not train; empty once it has begun."""
        return "" if self._meter.samples else "no step is done: it waits for shards, for other workers or for its data"

    def as_json(self) -> Mapping[str, object]:
        """The last `train` and `eval` records of log.jsonl, and what this worker has done."""
        interval, evaluation = self._meter.last, self._report.last
        state = {
            "steps": self._steps.step.count,
            "samples": self._meter.samples,
            "clock": self._strategy.clock,
            "waited": dataclasses.asdict(self._meter.waited),
            "train": None if interval is None else dataclasses.asdict(interval),
            "eval": None if evaluation is None else dataclasses.asdict(evaluation),
        }
        found = finite(state)
        assert isinstance(found, dict)
        return found
