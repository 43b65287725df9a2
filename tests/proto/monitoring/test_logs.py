"""Logs as JSON: every event is one object, whatever its text is."""

import io
import json
import logging
import subprocess
import sys
import threading
from contextlib import closing
from datetime import timedelta

import pytest

from embershard.proto.errors import InternalError
from embershard.proto.messages import Declare, Pull, TableIds
from embershard.proto.monitoring import tracing
from embershard.proto.monitoring.logs import JsonFormatter, log_as_json, logs_json
from embershard.proto.monitoring.tracing import Context, RequestTracer, StepTracer
from embershard.proto.transport.stream import StreamTransport
from harness.served import ServedShard
from harness.shards import ids_of, table

SOON = timedelta(seconds=20)


@pytest.fixture
def lines():
    root, before = logging.getLogger(), None
    before = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    stream = io.StringIO()
    formatter = log_as_json(stream, shard=3)
    formatter.fields["instance"] = "ab"
    assert logs_json()
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], root.level = before
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def test_an_event_has_its_time_its_level_its_text_and_whose_it_is(lines):
    logging.getLogger("embershard.ps").warning("dropping %s", 'the "peer"\nshard 4 ERROR forged')
    (line,) = lines()
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "warning",
        "event": 'dropping the "peer"\nshard 4 ERROR forged',
        "logger": "embershard.ps",
        "shard": 3,
        "instance": "ab",
    }


def test_fields_of_an_event_follow(lines):
    logging.getLogger("embershard").info("train", extra={"fields": {"loss": 0.5}})
    (line,) = lines()
    assert line["loss"] == 0.5


class Sender:
    """Keeps the spans that it is to send, with their traces."""

    def __init__(self):
        self.sent = []

    def send(self, trace, spans):
        self.sent.append((trace, spans))


def test_what_is_logged_in_a_traced_step_has_its_trace_and_its_span_and_other_lines_have_none(lines):
    tracer, log = StepTracer(Sender(), every=2), logging.getLogger("embershard")
    log.info("before")
    tracer.end(tracer.begin())
    log.info("between")
    assert tracer.begin() is None
    log.info("a step that is not traced")
    spans = tracer.begin()
    thread = threading.Thread(target=log.info, args=("a thread of the step",))
    thread.start()
    thread.join()
    trace = tracing.step_trace
    tracer.end(spans)
    assert [line["event"] for line in lines() if "trace_id" in line or "span_id" in line] == ["a thread of the step"]
    (line,) = (line for line in lines() if "trace_id" in line)
    assert (line["trace_id"], line["span_id"]) == (trace[:16].hex(), trace[16:].hex())


def test_what_a_shard_logs_in_a_traced_request_has_its_trace_and_the_span_that_is_sent(lines, monkeypatch):
    shard, sender, log = ServedShard(), Sender(), logging.getLogger("embershard.ps")
    shard.dispatch.tracer = RequestTracer(sender)
    handle = shard.shard.handle

    def logged(request, *rest):
        log.info(type(request).__name__)
        if isinstance(request, Pull) and request.worker == 7:
            raise KeyError("a defect")
        return handle(request, *rest)

    monkeypatch.setattr(shard.shard, "handle", logged)
    with closing(StreamTransport(shard.address)) as transport:
        traced = Context.new()
        ids, trace = (TableIds("items", ids_of(1)),), traced.trace + traced.span
        for request in (Declare(table()), Pull(1, ids, trace=trace), Pull(1, ids)):
            transport.submit(request, SOON).result()
        with pytest.raises(InternalError):
            transport.submit(Pull(1, ids, worker=7, trace=trace), SOON).result()
    shard.stop()
    ((sent, spans),) = sender.sent
    assert sent == traced.trace
    found = [(line["event"], line.get("trace_id"), line.get("span_id")) for line in lines()]
    declared, first, untraced, broken, defect = found
    assert declared == ("Declare", None, None)
    assert first == ("Pull", traced.trace.hex(), spans[0].span.hex())
    assert untraced == ("Pull", None, None)
    assert broken[1] == defect[1] == traced.trace.hex()
    assert broken[2] == defect[2] != first[2]
    assert "defect" in defect[0]


def test_a_traceback_is_part_of_its_event(lines):
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("embershard").exception("a defect")
    (line,) = lines()
    assert "KeyError: 'lost'" in line["traceback"]


def test_values_that_json_does_not_know_are_texts():
    record = logging.LogRecord("a", logging.INFO, "", 0, "event", (), None)
    record.fields = {"path": object}
    assert "class" in json.loads(JsonFormatter({}).format(record))["path"]


STRAY = """
import sys, threading, warnings
from embershard.proto.monitoring.logs import log_as_json
log_as_json(sys.stdout, shard=3)
warnings.warn("careful")
thread = threading.Thread(target=lambda: {}["in a thread"])
thread.start()
thread.join()
class Bad:
    def __del__(self):
        raise ValueError("while it was deleted")
Bad()
raise LookupError("at the end")
"""


def test_warnings_and_exceptions_that_nobody_catches_are_events():
    done = subprocess.run([sys.executable, "-c", STRAY], capture_output=True, text=True, timeout=60)
    warning, *errors = (json.loads(line) for line in done.stdout.splitlines())
    assert "careful" in warning["event"]
    assert [line["event"].partition(":")[0] for line in errors] == ["KeyError", "ValueError", "LookupError"]
    assert all("Traceback" in line["traceback"] for line in errors)
    assert (done.stderr, done.returncode) == ("", 1)


PRINTS = """
import logging, sys
from embershard.proto.monitoring.logs import log_as_json
log_as_json(sys.stdout, shard=3)
print("seen", 7, end=" ", flush=True)
print("rows\\nand more")
logging.getLogger("x").info("an event")
sys.stdout.write("without an end")
"""


def test_what_is_printed_to_the_stream_of_the_log_is_an_event():
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, timeout=60)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["logger"], line["event"]) for line in found] == [
        ("stdout", "seen 7 rows"),
        ("stdout", "and more"),
        ("x", "an event"),
        ("stdout", "without an end"),
    ]
    assert (done.stderr, done.returncode) == ("", 0)


HABITS = """
import logging, sys
from embershard.proto.monitoring.logs import log_as_json
for _ in range(2):
    log_as_json(sys.stdout)
logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("x").warning("an event")
logging.disable()
for percent in range(100):
    print(f"{percent} %\\r", end="")
print("done\\r")
print(sys.stdout.encoding.lower(), sys.stdout.errors, sys.stdout.buffer.mode)
"""


def test_what_users_do_with_stdout_goes_well_beside_json():
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", HABITS], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["logger"], line["event"]) for line in found] == [
        ("x", "an event"),
        ("stdout", "an event"),  # by the user's handler
        ("stdout", "done"),
        ("stdout", "utf-8 surrogateescape wb"),
    ]


FULL = """
import logging, sys
from embershard.proto.monitoring.logs import log_as_json
log_as_json(open("/dev/full", "w"), shard=3)
for _ in range(2):
    logging.getLogger("x").warning("hello")
"""


def test_a_stream_that_takes_no_line_is_said_once():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    (line,) = (json.loads(line) for line in done.stderr.splitlines() if "Exception ignored" not in line)
    assert line["level"] == "error"
    assert "No space left on device" in line["event"]
