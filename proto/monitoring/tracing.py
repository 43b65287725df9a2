"""Traces of some steps: from a worker's step into the shards and back, sent to an OpenTelemetry collector.

Whether a step is traced is decided at its begin, one in so many, before anything else is done: another step costs a
look at a variable for each of its spans and requests. What a traced one did is noted as plain tuples; a thread of its
own makes spans of them, and sends them by OTLP over HTTP. Nothing waits for it: where the collector does not answer, or
more comes than it takes, traces are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from embershard.proto.errors import TracingNotInstalled

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_BYTES, SPAN_BYTES = 16, 8
_QUEUED = 256  # steps or requests that wait to be sent
_SEND_SECONDS, _CLOSE_SECONDS = 5.0, 5.0

_log = logging.getLogger(__name__)


class Context(NamedTuple):
    """A trace, and the span in it that others belong to."""

    trace: bytes  # (16)
    span: bytes  # (8)

    @staticmethod
    def new() -> Context:
        """A new trace, with random ids."""
        return Context(secrets.token_bytes(TRACE_BYTES), secrets.token_bytes(SPAN_BYTES))

    @staticmethod
    def read(data: bytes) -> Context | None:
        """The context that a request brings; None where it brings none, or nothing that is one."""
        if len(data) != TRACE_BYTES + SPAN_BYTES:
            return None
        return Context(data[:TRACE_BYTES], data[TRACE_BYTES:])


class Span(NamedTuple):
    """Something that took time, from and to time.perf_counter(), which on Linux is time.monotonic()."""

    name: str
    span: bytes
    parent: bytes  # empty: of a trace's first span
    start: float
    end: float
    attributes: Mapping[str, str | int]
    serves: bool = False  # a request of another process: a span of kind SERVER


step_trace = b""  # what a request of this step carries: empty, but where the step is traced
# of the request that this thread handles: the apply thread of a shard that runs beside a worker has its own
_request: ContextVar[Context | None] = ContextVar("traced request", default=None)


def current() -> Context | None:
    """The trace to which what this thread does now belongs, and the span; None where it is not traced."""
    return _request.get() or Context.read(step_trace)


def is_collector_url(url: str) -> bool:
    """Whether a URL is one of HTTP, with a host, and a port if there is one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, a bracket too few
        return False


def is_tracing_installed() -> bool:
    """Whether the packages of the extra `tracing` are there: other programs install an exporter by gRPC alone."""
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:  # not even those above them
        return False


class SpanSender:
    """Sends spans to the collector at `url` ("http://host:4318"), from a thread. TracingNotInstalled."""

    def __init__(self, url: str, service: str, **resource: str | int) -> None:
        if not is_tracing_installed():
            raise TracingNotInstalled()
        self._url = url.rstrip("/") + "/v1/traces"
        self._resource = {"service.name": service, **resource}
        self._queue: queue.Queue[tuple[bytes, Sequence[Span], int] | None] = queue.Queue(_QUEUED)
        self.dropped = 0  # steps or requests
        self._closed = threading.Event()  # what still waits then is dropped
        self._exporter: SpanExporter | None = None  # made by the thread: its import takes a while
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, trace: bytes, spans: Sequence[Span]) -> None:
        """Send spans of a trace, soon; drop them where too many wait."""
        epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)  # of the clock of the spans
        try:
            self._queue.put_nowait((trace, spans, epoch_ns))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what waits, for a few seconds at most, and drop the rest."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._closed.set()
        if self._exporter is not None:
            self._exporter.shutdown()  # ends its wait for the next try

    def _run(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = self._exporter = OTLPSpanExporter(endpoint=self._url, timeout=_SEND_SECONDS)
        # it logs each batch that a collector does not take, with a traceback
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        told = False
        while (waiting := self._queue.get()) is not None and not self._closed.is_set():
            try:
                result = exporter.export(self._made(*waiting))
                failed = result.name != "SUCCESS"
            except Exception:
                _log.debug("spans were not sent", exc_info=True)
                failed = True
            self.dropped += failed
            if failed and not told:
                told = True
                _log.warning("traces are dropped: the collector at %s does not take them", self._url)

    def _made(self, trace: bytes, spans: Sequence[Span], epoch_ns: int) -> list[Any]:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        def context(span: bytes) -> SpanContext | None:
            if not span:
                return None
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(int.from_bytes(trace), int.from_bytes(span), is_remote=False, trace_flags=flags)

        resource = Resource(self._resource)
        return [
            ReadableSpan(
                name=one.name,
                context=context(one.span),
                parent=context(one.parent),
                resource=resource,
                attributes=one.attributes,
                kind=SpanKind.SERVER if one.serves else SpanKind.INTERNAL,
                start_time=epoch_ns + int(one.start * 1e9),
                end_time=epoch_ns + int(one.end * 1e9),
            )
            for one in spans
        ]


class StepTracer:
    """Traces one step in `every`, the first one of them: what a Recorder (proto/timing.py) tells it."""

    def __init__(self, sender: SpanSender, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._sender, self._every = sender, every
        self._steps = 0
        self._started = 0.0

    def begin(self) -> list[Span] | None:
        """A step begins: where its spans go, None where it is not traced."""
        global step_trace
        self._steps += 1
        if (self._steps - 1) % self._every:
            step_trace = b""
            return None
        context = Context.new()
        step_trace = context.trace + context.span
        self._started = time.perf_counter()
        return []

    def end(self, spans: list[Span]) -> None:
        """The step that was traced has ended."""
        global step_trace
        context, step_trace = Context.read(step_trace), b""
        if context is None:
            return
        root = Span("step", context.span, b"", self._started, time.perf_counter(), {"step": self._steps})
        # those without a parent are parts of the step; what began before it is another one's
        own = [one if one.parent else one._replace(parent=context.span) for one in spans if one.start >= self._started]
        self._sender.send(context.trace, [root, *own])

    def stop(self) -> None:
        """Stop tracing: requests carry no context from here on."""
        global step_trace
        step_trace = b""


class RequestTracer:
    """Makes a span of a traced request on a shard, and of its parts."""

    def __init__(self, sender: SpanSender) -> None:
        self._sender = sender

    def begin(self, context: Context) -> None:
        """This thread handles a request of `context`, in a span of its own, until `end`."""
        _request.set(Context(context.trace, secrets.token_bytes(SPAN_BYTES)))

    def end(self) -> None:
        """This thread handles no traced request any more."""
        _request.set(None)

    def handled(self, context: Context, name: str, moments: Sequence[float], parts: Sequence[str]) -> None:
        """The request was handled: `moments` are its arrival and the ends of its parts."""
        own = _request.get()
        assert own is not None
        spans = [Span(name, own.span, context.span, moments[0], moments[-1], {}, serves=True)]
        for part, start, end in zip(parts, moments[:-1], moments[1:], strict=True):
            spans.append(Span(part, secrets.token_bytes(SPAN_BYTES), own.span, start, end, {}))
        self._sender.send(context.trace, spans)
