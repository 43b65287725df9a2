"""Spans: what counts where, and that nothing counts while nobody looks."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from embershard.proto import timing as spans
from embershard.proto.timing import Recorder, charge_to, span


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move by hand: clock[0] is the time."""
    now = [0.0]
    monkeypatch.setattr(spans.time, "perf_counter", lambda: now[0])
    return now


def test_a_span_without_a_recorder_is_one_shared_nothing():
    assert span("pull") is span("push")
    with Recorder(), span("pull") as inside:
        assert inside is None
    assert span("pull") is span("push")


def test_a_part_counts_its_own_time_without_that_of_the_spans_inside(clock):
    with Recorder() as recorder:
        with span("push"):
            clock[0] += 0.001
            with span("wait"):
                clock[0] += 0.004
            with span("encode"):
                clock[0] += 0.002
                with span("route"):
                    clock[0] += 0.008
        clock[0] += 0.016
        recorder.end()
    split = recorder.split()
    parts = {name: part.p50_ms for name, part in split.parts.items()}
    assert parts == pytest.approx({"push": 1, "wait": 4, "encode": 2, "route": 8, "other": 16})
    assert split.step.p50_ms == pytest.approx(31)
    assert sum(part.share for part in split.parts.values()) == pytest.approx(1)
    assert next(iter(split.parts)) == "other"  # the largest first


def test_time_is_set_apart_from_a_span_as_far_as_it_is_its_own(clock):
    with Recorder() as recorder:
        with span("wait"):
            clock[0] += 0.005
            charge_to("shards", 0.002)
        with span("wait"):
            clock[0] += 0.001
            with span("encode"):
                clock[0] += 0.010
            charge_to("shards", 0.008)
        charge_to("shards", 0.1)  # no span is open
        recorder.end()
    parts = {name: part.mean_ms for name, part in recorder.split().parts.items()}
    assert parts == pytest.approx({"wait": 3, "shards": 3, "encode": 10, "other": 0}, abs=1e-9)
    charge_to("shards", 0.002)  # nobody looks


def test_a_part_is_summed_within_a_step_and_ranked_over_steps(clock):
    with Recorder() as recorder:
        for step in range(100):
            for _ in range(2):
                with span("wait"):
                    clock[0] += 0.5 if step == 99 else 0.005
            recorder.end()
    wait = recorder.split().parts["wait"]
    assert wait.p50_ms == pytest.approx(10)
    assert 10 < wait.p99_ms < 1000
    assert recorder.split().step.p50_ms == pytest.approx(10)


def test_what_happens_between_steps_does_not_count(clock):
    with Recorder() as recorder:
        with span("wait"):
            clock[0] += 5.0
        recorder.begin()
        with span("wait"):
            clock[0] += 0.001
        recorder.end()
    assert recorder.split().step.p99_ms == pytest.approx(1)
    assert recorder.split().parts["wait"].p99_ms == pytest.approx(1)


def test_only_the_last_steps_are_kept(clock):
    with Recorder(kept_steps=4) as recorder:
        for step in range(10):
            with span("forward" if step < 6 else "backward"):
                clock[0] += float(step)
            recorder.end()
    split = recorder.split()
    assert split.steps == 10
    assert split.parts["forward"].share == 0
    assert split.parts["backward"].share == 1
    assert split.step.p50_ms == pytest.approx(7500)


def test_other_threads_are_reported_apart_and_do_not_nest_into_this_one(clock):
    def receive():
        with span("receive"):
            clock[0] += 0.002

    with Recorder() as recorder:
        with span("wait"):
            clock[0] += 0.001
            thread = threading.Thread(target=receive)
            thread.start()
            thread.join()
        recorder.end()
    split = recorder.split()
    assert split.parts["wait"].p50_ms == pytest.approx(3)
    assert {name: part.p50_ms for name, part in split.overlapped.items()} == pytest.approx({"receive": 2})


def test_a_span_left_by_an_error_counts_and_leaves_nothing_open(clock):
    def fail():
        clock[0] += 0.001
        raise KeyError

    with Recorder() as recorder:
        with pytest.raises(KeyError), span("push"), span("wait"):
            fail()
        with span("forward"):
            clock[0] += 0.001
        recorder.end()
    assert recorder.split().parts["wait"].p50_ms == pytest.approx(1)
    assert recorder.split().parts["push"].p50_ms == pytest.approx(0)
    assert recorder.split().parts["forward"].p50_ms == pytest.approx(1)


def test_a_recorder_without_steps_has_a_table_too(clock):
    with Recorder() as recorder:
        assert "0 steps" in str(recorder.split())
        with span("forward"):
            clock[0] += 0.002
        recorder.end()
    assert "  forward               2.000 ms    2.000 ms  100.0%" in str(recorder.split())


def test_spans_of_all_threads_are_ranges_of_a_profilers_trace(tmp_path):
    def background():
        with span("receive"):
            torch.ones(4).sum()

    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with Recorder(), torch.profiler.profile(experimental_config=settings) as profiler:
        with span("forward"), span("wait"):
            torch.ones(4).sum()
        thread = threading.Thread(target=background)
        thread.start()
        thread.join()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["name"]: e["tid"] for e in events if e.get("name") in ("forward", "wait", "receive")}
    assert set(threads) == {"forward", "wait", "receive"}
    assert threads["forward"] == threads["wait"] != threads["receive"]
