"""A step that is traced: its spans and the shard's arrive at a collector, nested; other steps leave no trace."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OTLPSpan

from embershard.proto import spec
from embershard.proto.messages import Pull, Push, PushToken, TableIds
from embershard.proto.monitoring import tracing
from embershard.proto.monitoring.tracing import (
    Context,
    RequestTracer,
    Span,
    SpanSender,
    StepTracer,
    TracingNotInstalled,
)
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import make_route
from embershard.proto.timing import Recorder, span
from embershard.proto.transport.addresses import transport_for
from embershard.worker.client.client import Client
from harness.eventually import eventually
from harness.served import ServedShard


class Collector:
    """A receiver of OTLP over HTTP, which keeps what it is sent."""

    def __init__(self):
        received = self.received = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                received.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def spans(self):
        """Every span, with its service."""
        found = []
        for path, request in list(self.received):
            assert path == "/v1/traces"
            for resource in request.resource_spans:
                service = {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"]
                found += [(service, one) for scope in resource.scope_spans for one in scope.spans]
        return found

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def test_one_step_in_so_many_is_traced_from_the_worker_into_the_shard_and_back(collector):
    shard, table = ServedShard(), spec.TableSpec(name="t", dim=4, optimizer=spec.SGD(lr=0.1))
    with (
        SpanSender(collector.url, "shard") as to_shard,
        SpanSender(collector.url, "worker") as to_worker,
        contextlib.closing(Client([transport_for(shard.address)])) as client,
    ):
        shard.dispatch.tracer = RequestTracer(to_shard)
        client.declare(table)
        route = make_route(np.arange(100), table.space_key, client.placement)
        with Recorder() as recorder:
            recorder.tracer = StepTracer(to_worker, every=3)
            recorder.begin()
            for step in range(6):
                with span("forward"):
                    rows = client.pull([("t", route)])
                client.push([("t", route, rows[0])], clock=step)
                recorder.end()
        eventually(lambda: len(collector.received) >= 2 + 2 * 2)
    shard.stop()
    spans = collector.spans()
    roots = {one.span_id: one for _, one in spans if not one.parent_span_id}
    assert [one.name for one in roots.values()] == ["step", "step"]
    assert len({one.trace_id for _, one in spans}) == 2
    by_id = {one.span_id: one for _, one in spans}
    for root in roots.values():
        mine = [(service, one) for service, one in spans if one.trace_id == root.trace_id]
        names = {(service, one.name) for service, one in mine}
        assert {("shard", name) for name in ("Pull", "Push", "queue", "decode", "gather", "apply", "encode")} <= names
        assert {("worker", name) for name in ("step", "forward", "pull", "wait")} <= names
        served = {(service, one.name) for service, one in mine if one.kind == OTLPSpan.SPAN_KIND_SERVER}
        assert served == {("shard", "Pull"), ("shard", "Push")}
        for _, one in mine:
            if one.parent_span_id:
                parent = by_id[one.parent_span_id]
                # the readings of the clocks from which both are counted are microseconds apart
                assert parent.start_time_unix_nano - 1e6 <= one.start_time_unix_nano
                assert one.end_time_unix_nano <= parent.end_time_unix_nano + 1e6
    nested = next(one for service, one in spans if one.name == "wait" and service == "worker")
    assert by_id[nested.parent_span_id].name in ("pull", "step", "push")


def test_a_step_that_is_not_traced_sends_nothing_and_marks_no_request():
    class Sender:
        sent = []  # noqa: RUF012

        def send(self, trace, spans):
            self.sent.append(spans)

    tracer = StepTracer(Sender(), every=2)
    spans = tracer.begin()
    assert len(tracing.step_trace) == 24
    tracer.end(spans)
    assert tracing.step_trace == b""
    assert tracer.begin() is None
    assert tracing.step_trace == b""
    assert len(Sender.sent) == 1
    assert tracer.begin() is not None
    tracer.stop()
    assert tracing.step_trace == b""


def test_a_collector_that_is_away_costs_traces_and_nothing_else(monkeypatch):
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.2)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # nothing listens, and no other test gets the port
        sender = SpanSender(f"http://127.0.0.1:{unheard.getsockname()[1]}", "worker")
        for _ in range(2000):
            sender.send(b"t" * 16, [Span("step", b"s" * 8, b"", 0.0, 1.0, {})])
        assert sender.dropped > 1000
        sender.close()
        sender._thread.join(10)
    assert not sender._thread.is_alive(), "it goes on sending what waits, maybe to another program at that port"


def test_the_trace_of_a_request_travels_and_an_old_peer_skips_it():
    ids = np.arange(3)
    pull = Pull(1, (TableIds("t", ids),), trace=b"x" * 24)
    push = Push(PushToken(0, 1, 1, 1), 0, 1, (), trace=b"y" * 24)
    assert loads(Pull, dumps(pull)).trace == b"x" * 24
    assert loads(Push, dumps(push)).trace == b"y" * 24
    without = Pull(1, (TableIds("t", ids),))
    assert dumps(pull).startswith(dumps(without))  # the field comes last, and takes nothing where there is no trace
    assert Context.read(b"") is None
    assert Context.read(b"x" * 23) is None


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_packages_the_command_says_what_to_install(monkeypatch, missing):
    def find(name):
        """As importlib: a part of a package that is not there is an error."""
        if name.startswith(f"{missing}."):
            raise ModuleNotFoundError(name)
        return None if name == missing else object()

    monkeypatch.setattr(tracing, "find_spec", find)
    with pytest.raises(TracingNotInstalled):
        SpanSender("http://127.0.0.1:1", "worker")
