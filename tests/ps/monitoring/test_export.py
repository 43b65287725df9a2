"""A live shard exports every metric that the table names, and no other."""

import threading
import time
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from embershard.proto.errors import UnknownTable
from embershard.proto.messages import Declare, Pull, TableIds
from embershard.proto.monitoring.exporter import MetricsServer
from embershard.proto.monitoring.metrics import SHARD_METRICS
from embershard.proto.security.credentials import CertificateFolder
from embershard.proto.transport.stream import StreamTransport
from embershard.ps.dispatch import Dispatch
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.monitoring.export import MonitoredShard
from harness.certificates import issue
from harness.eventually import eventually
from harness.served import ServedShard
from harness.shards import gradients, ids_of, join, push, table

SOON = timedelta(seconds=20)


CERTIFICATE_EXPIRY = "embershard_shard_certificate_expiry_timestamp_seconds"


@pytest.fixture
def certificates(tmp_path):
    return CertificateFolder(issue(tmp_path / "shard", days=30))


@pytest.fixture
def watched(certificates):
    """A shard with some traffic, and what shows it."""
    shard = ServedShard()
    transport = StreamTransport(shard.address)
    for request in (Declare(table()), join(staleness=-1), Pull(1, (TableIds("items", ids_of(1, 2)),))):
        transport.submit(request, SOON).result()
    transport.submit(push(gradients([1, 2]), version=1), SOON).result()
    shard.dispatch.counters.rejected["queue"] += 1
    shown = MonitoredShard(
        shard.dispatch.status,
        shard.dispatch.counters,
        lambda: {"apply thread": shard.apply.idle_seconds},
        certificates,
    )
    with MetricsServer(":0", SHARD_METRICS, {"shard": "0"}) as server:
        server.monitored = shown
        yield shard, transport, server
    transport.close()
    shard.stop()


def exported(server):
    """Metric -> the names of its labels."""
    found = {}
    for family in text_string_to_metric_families(server.text().decode()):
        for sample in family.samples:
            base = sample.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            name = base if family.type == "histogram" else sample.name
            found.setdefault(name, set()).update(sample.labels.keys() - {"le"})
    return found


def test_every_metric_of_the_table_is_exported_with_its_labels(watched):
    _, _, server = watched
    assert exported(server) == {metric.name: {"shard", *metric.labels} for metric in SHARD_METRICS}


def test_the_values_are_those_of_the_shard(watched):
    shard, _, server = watched
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(server.text().decode())
        for sample in family.samples
    }
    own = ("shard", "0")
    assert samples["embershard_shard_table_rows", own, ("table", "items")] == 2
    assert samples["embershard_shard_table_pulled_rows_total", own, ("table", "items")] == 2
    assert samples["embershard_shard_members", own] == 1
    assert samples["embershard_shard_rejected_total", ("reason", "queue"), own] == 1
    pulls = ("method", "Pull"), own, ("transport", "stream")
    assert eventually(lambda: shard.dispatch.status().pull_seconds.sum > 0)
    assert samples["embershard_shard_request_duration_seconds_count", *pulls] == 1
    assert samples["embershard_shard_requests_total", ("method", "Pull"), ("outcome", "ok"), own, pulls[2]] == 1
    assert samples["embershard_shard_ready", own] == 1


def expiry(server):
    """When the certificate ends, as the metric has it; None where it is not exported."""
    values = [
        sample.value
        for family in text_string_to_metric_families(server.text().decode())
        for sample in family.samples
        if sample.name == CERTIFICATE_EXPIRY
    ]
    return values[0] if values else None


def test_the_end_of_the_certificate_follows_a_rotation(watched, certificates):
    _, _, server = watched
    assert abs(expiry(server) - (time.time() + 29 * 86400)) < 60  # it began a day ago
    issue(certificates.tls.path, days=90)
    assert certificates.refresh()  # as the shard does every 10 s
    assert abs(expiry(server) - (time.time() + 89 * 86400)) < 60
    (certificates.tls.path / "tls.crt").write_text("?")
    assert not certificates.refresh()
    assert abs(expiry(server) - (time.time() + 89 * 86400)) < 60  # the one that is in use


def test_there_is_no_end_of_a_certificate_without_tls(watched):
    shard, _, server = watched
    server.monitored = MonitoredShard(shard.dispatch.status, shard.dispatch.counters, lambda: {})
    assert expiry(server) is None


def test_an_apply_thread_that_hangs_is_not_live_and_one_that_is_idle_is(watched, monkeypatch):
    shard, _, server = watched
    monkeypatch.setattr("embershard.proto.monitoring.exporter.STUCK_SECONDS", 0.2)
    time.sleep(0.4)
    assert server.monitored.not_live() == ""
    release = threading.Event()
    held = shard.apply.submit(lambda: release.wait(60), 0, time.monotonic() + 60)
    assert eventually(lambda: "apply thread" in server.monitored.not_live())
    release.set()
    held.result()
    assert eventually(lambda: server.monitored.not_live() == "")


def test_a_shard_is_ready_once_its_first_values_are_loaded_and_until_it_drains(watched):
    shard, transport, server = watched
    transport.submit(Declare(table("slow"), load=True), SOON).result()
    assert "slow" in server.monitored.not_ready()
    with pytest.raises(UnknownTable):
        transport.submit(Pull(1, (TableIds("other", ids_of(1)),)), SOON).result()
    shard.apply.close()
    assert server.monitored.not_ready() != ""
    assert server.monitored.as_json()["draining"] is True


def test_a_shard_that_recovers_is_live_and_not_ready(watched):
    shard, _, _ = watched
    dispatch = Dispatch(shard.shard, shard.apply, RecoveryProgress())
    shown = MonitoredShard(dispatch.status, dispatch.counters, lambda: {})
    assert shown.not_live() == ""
    assert "recovers" in shown.not_ready()
