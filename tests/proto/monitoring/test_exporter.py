"""Metrics and probes over HTTP: what is shown, to whom, and what a client cannot do."""

import http.client
import json
import socket
import struct
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from embershard.proto.errors import CannotListen
from embershard.proto.monitoring import exporter
from embershard.proto.monitoring.exporter import MetricsServer, check_addresses, parse_address
from embershard.proto.monitoring.histogram import DurationHistogram
from embershard.proto.monitoring.metrics import (
    MAX_TABLES,
    OTHER,
    SHARD_METRICS,
    WORKER_METRICS,
    HistogramValue,
    Metric,
    Sample,
    by_table,
)
from harness.eventually import eventually

METRICS = (
    Metric(name="rows", type="gauge", help="Rows.", source="here", labels=("table",)),
    Metric(name="pushes_total", type="counter", help="Pushes.", source="here"),
    Metric(name="pull_seconds", type="histogram", help="Pulls.", source="here", labels=("method",)),
)


class Shown:
    """What a test wants to be shown."""

    def __init__(self):
        self.values, self.dead, self.unready = [], "", ""

    def samples(self):
        return self.values

    def not_live(self):
        return self.dead

    def not_ready(self):
        return self.unready

    def as_json(self):
        return {"rows": 3}


@pytest.fixture
def server():
    with MetricsServer(":0", METRICS, {"shard": "1"}) as server:
        server.monitored = Shown()
        yield server


def get(server, path):
    connection = http.client.HTTPConnection(server.address, timeout=20)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def families(server):
    return {one.name: one for one in text_string_to_metric_families(get(server, "/metrics")[1])}


def test_values_are_shown_with_the_constant_labels_and_their_own(server):
    durations = DurationHistogram()
    for seconds in (1e-6, 3e-3, 60.0):
        durations.add(seconds)
    server.monitored.values = [
        Sample("rows", 7, ("a",)),
        Sample("rows", 8, ('"b"\n',)),
        Sample("pushes_total", 4),
        Sample("pull_seconds", HistogramValue.of(durations), ("Pull",)),
    ]
    found = families(server)
    assert [(one.labels, one.value) for one in found["rows"].samples] == [
        ({"shard": "1", "table": "a"}, 7),
        ({"shard": "1", "table": '"b"\n'}, 8),
    ]
    assert found["pushes"].samples[0].value == 4
    buckets = {one.labels.get("le"): one.value for one in found["pull_seconds"].samples}
    assert (buckets["5e-05"], buckets["0.0016"], buckets["0.0032"], buckets["1.6384"], buckets["+Inf"]) == (
        1, 1, 2, 2, 3,
    )  # fmt: skip
    assert buckets[None] == pytest.approx(60.003001)  # the sum, which comes last


def test_probes_say_why_not(server):
    assert get(server, "/livez") == get(server, "/readyz") == (200, "ok\n")
    server.monitored.dead, server.monitored.unready = "the loop hangs", "it recovers"
    assert get(server, "/livez") == (503, "the loop hangs\n")
    assert get(server, "/readyz") == (503, "it recovers\n")
    server.monitored = None
    assert (get(server, "/livez")[0], get(server, "/readyz")[0]) == (200, 503)


@pytest.mark.parametrize(
    ("host", "code"), [("localhost:7790", 200), ("[::1]", 200), ("evil.example", 421), ("127.0.0.1.evil.example", 421)]
)
def test_a_page_on_loopback_is_not_shown_to_a_strangers_page_in_a_browser(server, host, code):
    for path in ("/metrics", "/status.json"):
        connection = http.client.HTTPConnection(server.address, timeout=20)
        connection.request("GET", path, headers={"Host": host})
        assert connection.getresponse().status == code


def test_other_pages_are_there_or_not(server):
    status, body = get(server, "/status.json?pretty")
    assert (status, json.loads(body)) == (200, {"rows": 3})
    assert get(server, "/")[0] == get(server, "/etc/passwd")[0] == 404


def test_a_defect_is_told_to_the_log_and_not_to_the_client(server, caplog):
    server.monitored.values = [Sample("no_such_metric", 1)]
    assert get(server, "/metrics") == (500, "see the log\n")
    assert "no_such_metric" in caplog.text


def test_clients_that_say_nothing_or_leave_do_not_keep_others_out(server):
    silent = [socket.create_connection(server.address.split(":")) for _ in range(10)]
    for sock in silent[5:]:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()  # with a reset
    assert get(server, "/livez")[0] == 200
    for sock in silent[:5]:
        sock.close()


def test_no_more_threads_than_a_few_however_many_ask(monkeypatch):
    monkeypatch.setattr(exporter, "_IDLE_SECONDS", 3600.0)  # as of clients that send a byte now and then
    before = threading.active_count()
    with MetricsServer("127.0.0.1:0", METRICS, {}) as server:
        many = [socket.create_connection(server.address.split(":")) for _ in range(30)]  # as many as may wait for it
        for sock in many[:14]:
            sock.settimeout(20)
            assert sock.recv(1) == b""
        assert eventually(lambda: threading.active_count() - before < 20)
        assert get(server, "/livez")[0] == 200  # a probe need not wait for those that say nothing
        for sock in many:
            sock.close()


def test_a_port_in_use_is_named_before_anything_starts(server):
    with pytest.raises(CannotListen, match="is in use"):
        MetricsServer(server.address, METRICS, {})
    port = int(server.address.split(":")[1])
    with pytest.raises(CannotListen, match=f"port {port} is in use"):
        check_addresses(f":{port}", 1)


def test_processes_get_the_ports_from_the_first_one_on():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert check_addresses(f":{port}", 1) == [f"127.0.0.1:{port}"]
    assert check_addresses(":0", 2) == ["127.0.0.1:0"] * 2
    with pytest.raises(CannotListen):
        check_addresses(":65535", 2)


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "a:b", "127.0.0.1:70000", "1.2.3.4:-1"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(CannotListen):
        parse_address(text)


def test_an_address_without_a_host_is_on_loopback():
    assert parse_address("7790") == parse_address(":7790") == ("127.0.0.1", 7790)
    assert parse_address("[::1]:1") == ("::1", 1)


def test_tables_beyond_the_first_are_added_up():
    found = list(by_table("rows", {(f"t{i}", "push"): 1.0 for i in range(MAX_TABLES + 50)}))
    assert len(found) == MAX_TABLES + 1
    assert found[-1] == Sample("rows", 50.0, (OTHER, "push"))


def test_a_table_called_other_is_summed_with_those_that_have_no_series_of_their_own():
    names = [OTHER, *(f"t{i}" for i in range(MAX_TABLES + 1))]
    found = {sample.labels: sample.value for sample in by_table("rows", {(name,): 1.0 for name in names})}
    assert found[OTHER,] == 3.0
    assert len(list(by_table("rows", {(name,): 1.0 for name in names}))) == len(found) == MAX_TABLES


def test_every_metric_is_named_as_prometheus_wants_it():
    names = [metric.name for metric in (*SHARD_METRICS, *WORKER_METRICS)]
    assert len(set(names)) == len(names)
    for metric in (*SHARD_METRICS, *WORKER_METRICS):
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert metric.help.endswith(".")


@pytest.mark.parametrize(
    ("there", "host"),
    [(("127.0.0.1", "::1"), "127.0.0.1"), (("127.0.0.1",), "127.0.0.1"), (("::1",), "::1"), ((), "127.0.0.1")],
)
def test_loopback_is_ipv4_where_the_machine_has_it(there, host, monkeypatch):
    monkeypatch.setattr(exporter, "_can_listen", lambda host: host in there)
    assert exporter.loopback_host() == host


def test_an_address_of_this_machine_can_be_listened_at_and_another_cannot():
    assert exporter._can_listen(exporter.loopback_host())
    assert not exporter._can_listen("192.0.2.1")  # of documentation
