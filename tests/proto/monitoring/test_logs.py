"""Logs as JSON: every event is one object, whatever its text is."""

import io
import json
import logging

import pytest

from embershard.proto.monitoring.logs import JsonFormatter, log_as_json, logs_json


@pytest.fixture
def lines():
    root, before = logging.getLogger(), None
    before = root.handlers[:], root.level
    stream = io.StringIO()
    formatter = log_as_json(stream, shard=3)
    formatter.fields["instance"] = "ab"
    assert logs_json()
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], root.level = before


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


def test_fields_of_an_event_and_its_trace_follow(lines):
    logging.getLogger("embershard").info("train", extra={"fields": {"loss": 0.5}, "trace_id": "ff"})
    (line,) = lines()
    assert (line["loss"], line["trace_id"]) == (0.5, "ff")


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
