"""Metrics in Prometheus's text format (version 0.0.4).

https://prometheus.io/docs/instrumenting/exposition_formats. A scrape runs beside training and takes the GIL from it, so
that what the lines of a metric begin with, names and labels, is made once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from embershard.proto.monitoring.metrics import HistogramValue, Metric, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_KEPT = 20_000  # beginnings: tables come and go


class Exposition:
    """Writes samples of `metrics`, each with the constant `labels`. For one thread at a time."""

    def __init__(self, metrics: Iterable[Metric], labels: Mapping[str, str]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._labels = dict(labels)
        self._kept: dict[tuple[object, ...], tuple[str, ...]] = {}  # what the lines of a sample begin with

    def text(self, samples: Iterable[Sample]) -> bytes:
        """The lines of all samples, those of a metric together. KeyError for a metric that was not named."""
        families = dict[str, list[str]]()
        kept = self._kept
        for name, value, labels in samples:
            lines = families.get(name)
            if lines is None:
                lines = families[name] = [_head(self._metrics[name])]
            if isinstance(value, HistogramValue):
                *buckets, count, total = kept.get((name, labels, value.bounds)) or self._keep(
                    name, labels, value.bounds
                )
                below = 0
                for bucket, more in zip(buckets, value.counts, strict=True):
                    below += more
                    lines.append(f"{bucket}{below}\n")
                lines.append(f"{count}{below}\n{total}{_number(value.sum)}\n")
            else:
                (begin,) = kept.get((name, labels)) or self._keep(name, labels)
                lines.append(f"{begin}{value if type(value) is int else _number(value)}\n")
        return "".join(["".join(lines) for lines in families.values()]).encode()

    def _keep(self, name: str, values: tuple[str, ...], bounds: tuple[float, ...] | None = None) -> tuple[str, ...]:
        """Build and keep the beginnings of a sample's lines; a histogram has its buckets, its count and its sum."""
        metric = self._metrics[name]
        labels = {**self._labels, **dict(zip(metric.labels, values, strict=True))}
        begins: tuple[str, ...] = (_begin(name, labels),)
        if bounds is not None:
            edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
            begins = tuple(_begin(f"{name}_bucket", {**labels, "le": edge}) for edge in edges)
            begins += _begin(f"{name}_count", labels), _begin(f"{name}_sum", labels)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[(name, values) if bounds is None else (name, values, bounds)] = begins
        return begins


def _head(metric: Metric) -> str:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {metric.type}\n"


def _begin(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return f"{name} "
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}} "


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    """As Go reads it; also of a bool, or of a number of numpy's."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
