"""A worker exports every metric that the table names while it trains, and what it exports is what happened."""

import time
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from embershard import connect, local
from embershard.proto.monitoring.exporter import MetricsServer
from embershard.proto.monitoring.metrics import MAX_TABLES, OTHER, WORKER_METRICS
from embershard.proto.security.tls import TLS
from embershard.proto.timing import Recorder
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.reporting.prometheus import MonitoredWorker, StepCounters
from embershard.worker.training.trainer import Trainer
from harness.certificates import issue
from harness.clicks import Notes, click_data, click_job
from harness.eventually import eventually
from harness.secure_shard import SecureShard

CERTIFICATE_EXPIRY = "embershard_worker_certificate_expiry_timestamp_seconds"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run's result, and its samples: name -> labels -> value."""
    folder = tmp_path_factory.mktemp("certificates")
    job = click_job(compression={"push": "fp16s", "pull": "fp16s"})
    shard = SecureShard(issue(folder / "shard"))
    session = connect(shard.tcp, tls=issue(folder / "worker", days=30))
    notes, steps = Notes(), StepCounters()
    trainer = Trainer(job, click_data(train=700, valid=200), session, WorkerGroup(), [notes])
    with MetricsServer(":0", WORKER_METRICS, {"worker": "0", "run": "r"}) as server, Recorder() as recorder:
        server.monitored = shown = trainer.monitored(steps)
        recorder.watch = steps
        before = shown.not_ready()
        result = trainer.run()
        text = server.text().decode()
    session.close()
    shard.stop()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault((family.type, sample.name), []).append((sample.labels, sample.value))
    assert before != ""
    assert (shown.not_ready(), shown.not_live()) == ("", "")
    assert shown.as_json()["samples"] == result.samples
    return result, samples


def test_every_metric_of_the_table_is_exported_with_its_labels(exported):
    _, samples = exported
    found = {}
    for (kind, name), values in samples.items():
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") if kind == "histogram" else name
        for labels, _ in values:
            found.setdefault(base, set()).update(labels.keys() - {"le"})
    assert found == {metric.name: {"worker", "run", *metric.labels} for metric in WORKER_METRICS}


def test_the_codecs_of_tables_that_are_added_up_are_information_and_no_number():
    compressor = SimpleNamespace(coded_pushes={}, coded_pulls={})
    tables = {f"t{number}" for number in range(MAX_TABLES + 9)}
    session = SimpleNamespace(table_names=tables, client=SimpleNamespace(compressor=compressor))
    shown = MonitoredWorker(*(SimpleNamespace() for _ in range(4)), None)
    shown._session = session
    samples = list(shown._codecs())
    assert samples[-1].labels == (OTHER, "float32", "float32")
    assert {sample.value for sample in samples} == {1}


def test_the_values_are_those_of_the_result(exported):
    result, samples = exported

    def value(kind, metric, **labels):
        return next(v for own, v in samples[kind, f"embershard_worker_{metric}"] if labels.items() <= own.items())

    assert value("counter", "steps_total") == value("histogram", "step_duration_seconds_count") == result.steps
    assert value("counter", "samples_total") == result.samples
    assert abs(value("gauge", "certificate_expiry_timestamp_seconds") - (time.time() + 29 * 86400)) < 120
    figures = result.figures["valid"]
    assert value("gauge", "metric", name="auc", split="valid") == pytest.approx(figures["auc"])
    step = value("histogram", "step_duration_seconds_sum")
    parts = [v for own, v in samples["histogram", "embershard_worker_step_part_duration_seconds_sum"]
             if own["overlapped"] == "no"]  # fmt: skip
    assert 0 < sum(parts) <= step
    wire = sum(v for _, v in samples["counter", "embershard_worker_transferred_bytes_total"])
    raw = sum(v for _, v in samples["counter", "embershard_worker_uncompressed_bytes_total"])
    assert 0 < wire < raw


def test_the_end_of_the_certificate_follows_a_rotation_and_is_not_there_without_tls(tmp_path):
    def monitored(session):
        trainer = Trainer(click_job(), click_data(train=100, valid=100), session, WorkerGroup(), [Notes()])
        return trainer.monitored(StepCounters())

    def expiry(worker):
        return {one.metric: one.value for one in worker.samples()}.get(CERTIFICATE_EXPIRY)

    shard, folder = SecureShard(issue(tmp_path / "shard")), tmp_path / "worker"
    tls = TLS(issue(folder, days=30).folder, poll_interval=timedelta(milliseconds=1))
    with closing(connect(shard.tcp, tls=tls)) as session:
        worker = monitored(session)
        before = expiry(worker)
        issue(folder, days=90)
        assert eventually(lambda: expiry(worker) == pytest.approx(before + 60 * 86400, abs=60))
    shard.stop()
    with closing(local()) as session:
        assert expiry(monitored(session)) is None
