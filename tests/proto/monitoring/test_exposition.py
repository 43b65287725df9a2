"""Our text format says what prometheus_client's does, and what a parser of it reads is what was exported."""

import math

import numpy as np
import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from embershard.proto.monitoring import exposition
from embershard.proto.monitoring.exposition import Exposition
from embershard.proto.monitoring.metrics import HistogramValue, Metric, Sample

METRICS = (
    Metric(name="rows", type="gauge", help='Rows "of" a table,\nin C:\\.', source="here", labels=("table",)),
    Metric(name="pushes_total", type="counter", help="Pushes.", source="here"),
    Metric(name="pull_seconds", type="histogram", help="Pulls.", source="here", labels=("method",)),
    Metric(name="no_sample", type="gauge", help="None.", source="here"),
)
LABELS = {"shard": "1", "run": 'a "run"\\'}
NUMBERS = [0, 7, 2**63, -1, True, 0.1, 1e-9, 1e300, math.inf, -math.inf, math.nan, np.float64(0.5), np.int64(3)]


class Theirs:
    """The same samples, as prometheus_client's collector."""

    def __init__(self, samples):
        self.samples = samples

    def collect(self):
        makers = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        families = {}
        for name, value, labels in self.samples:
            metric = next(one for one in METRICS if one.name == name)
            names = [*LABELS, *metric.labels]
            family = families.setdefault(name, makers[metric.type](name, metric.help, labels=names))
            if isinstance(value, HistogramValue):
                edges = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
                buckets = list(zip(edges, np.cumsum(value.counts).tolist(), strict=True))
                family.add_metric([*LABELS.values(), *labels], buckets, value.sum)
            else:
                family.add_metric([*LABELS.values(), *labels], value)
        return families.values()


def read(text):
    return [
        (one.name, one.type, one.documentation, [(s.name, s.labels, repr(float(s.value))) for s in one.samples])
        for one in text_string_to_metric_families(text.decode())
    ]


def some(*tables):
    pulls = HistogramValue((50e-6, 1e-4, 1.6384), (1, 0, 2, 3), 7.25)
    return [
        *(Sample("rows", number, (f"t{i}",)) for i, number in enumerate(NUMBERS)),
        Sample("pull_seconds", pulls, ("Pull",)),
        Sample("pushes_total", 4),
        *(Sample("rows", 8, (name,)) for name in tables),  # again, after others
        Sample("pull_seconds", HistogramValue((1.0, 2.0), (0, 0, 0), 0.0), ("Push",)),
    ]


def test_it_says_what_prometheus_client_does():
    writer, samples = Exposition(METRICS, LABELS), some('"b"\n', "c\\d", "\u00e4", "")
    for _ in range(2):  # the second time from what was kept
        text = writer.text(samples)
        assert read(text) == read(generate_latest(Theirs(samples)))
    assert text.count(b"# TYPE rows gauge") == 1
    assert b"no_sample" not in text


def test_a_histogram_that_gets_other_bounds_has_their_buckets():
    writer = Exposition(METRICS, {})
    for bounds in ((), (1.0,), (1.0, 2.0)):
        value = HistogramValue(bounds, (1,) * (len(bounds) + 1), 1.0)
        text = writer.text([Sample("pull_seconds", value, ("Pull",))])
        assert text.count(b"_bucket") == len(bounds) + 1


def test_what_is_kept_of_tables_that_come_and_go_is_bounded(monkeypatch):
    monkeypatch.setattr(exposition, "_MOST_KEPT", 10)
    writer = Exposition(METRICS, LABELS)
    for i in range(100):
        samples = [Sample("rows", i, (f"t{i}",)), Sample("pushes_total", i)]
        assert read(writer.text(samples)) == read(generate_latest(Theirs(samples)))
        assert len(writer._kept) <= 10


def test_a_metric_that_was_not_named_is_a_defect():
    with pytest.raises(KeyError):
        Exposition(METRICS, LABELS).text([Sample("other", 1)])
