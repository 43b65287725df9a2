"""Spans: what counts where, and that nothing counts while nobody looks."""

import threading

import pytest

from embershard.proto import timing as spans
from embershard.proto.timing import Recorder, charge_to, span


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move by hand: clock[0] is the time."""
    now = [0.0]
    monkeypatch.setattr(spans.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def passes(clock):
    """Let milliseconds pass, in a span of this name or in none."""

    def pass_(ms, name=None):
        if name is None:
            clock[0] += ms / 1000
        else:
            with span(name):
                clock[0] += ms / 1000

    return pass_


def p50_ms(recorder):
    return {name: part.p50_ms for name, part in recorder.split().parts.items()}


def test_a_span_without_a_recorder_is_one_shared_nothing():
    assert span("pull") is span("push")
    with Recorder(), span("pull") as inside:
        assert inside is None
    assert span("pull") is span("push")


def test_a_part_counts_its_own_time_without_that_of_the_spans_inside(passes):
    with Recorder() as recorder:
        with span("push"):
            passes(1)
            passes(4, "wait")
            with span("encode"):
                passes(2)
                passes(8, "route")
        passes(16)
        recorder.end()
    split = recorder.split()
    assert p50_ms(recorder) == pytest.approx({"push": 1, "wait": 4, "encode": 2, "route": 8, "other": 16})
    assert split.step.p50_ms == pytest.approx(31)
    assert sum(part.share for part in split.parts.values()) == pytest.approx(1)
    assert next(iter(split.parts)) == "other"  # the largest first
    assert "  other                16.000 ms   16.000 ms   51.6%" in str(split)


def test_time_is_set_apart_from_a_span_as_far_as_it_is_its_own(passes):
    with Recorder() as recorder:
        with span("wait"):
            passes(5)
            charge_to("shards", 0.002)
        with span("wait"):
            passes(1)
            passes(10, "encode")
            charge_to("shards", 0.008)
        charge_to("shards", 0.1)  # no span is open
        recorder.end()
    parts = {name: part.mean_ms for name, part in recorder.split().parts.items()}
    assert parts == pytest.approx({"wait": 3, "shards": 3, "encode": 10, "other": 0}, abs=1e-9)
    charge_to("shards", 0.002)  # nobody looks


def test_a_part_is_summed_within_a_step_and_ranked_over_steps(passes):
    with Recorder() as recorder:
        for step in range(100):
            for _ in range(2):
                passes(500 if step == 99 else 5, "wait")
            recorder.end()
    wait = recorder.split().parts["wait"]
    assert wait.p50_ms == pytest.approx(10)
    assert 10 < wait.p99_ms < 1000
    assert recorder.split().step.p50_ms == pytest.approx(10)


def test_what_happens_between_steps_does_not_count(passes):
    with Recorder() as recorder:
        assert "0 steps" in str(recorder.split())
        passes(5000, "wait")
        recorder.begin()
        passes(1, "wait")
        recorder.end()
    assert recorder.split().step.p99_ms == recorder.split().parts["wait"].p99_ms == pytest.approx(1)


def test_only_the_last_steps_are_kept(passes):
    with Recorder(kept_steps=4) as recorder:
        for step in range(10):
            passes(1000 * step, "forward" if step < 6 else "backward")
            recorder.end()
    split = recorder.split()
    assert (split.steps, split.parts["forward"].share, split.parts["backward"].share) == (10, 0, 1)
    assert split.step.p50_ms == pytest.approx(7500)


def test_other_threads_are_reported_apart_and_do_not_nest_into_this_one(passes):
    with Recorder() as recorder:
        with span("wait"):
            passes(1)
            thread = threading.Thread(target=passes, args=(2, "receive"))
            thread.start()
            thread.join()
        recorder.end()
    assert p50_ms(recorder)["wait"] == pytest.approx(3)
    overlapped = {name: part.p50_ms for name, part in recorder.split().overlapped.items()}
    assert overlapped == pytest.approx({"receive": 2})


def test_a_span_left_by_an_error_counts_and_leaves_nothing_open(passes):
    def fail():
        passes(1)
        raise KeyError

    with Recorder() as recorder:
        with pytest.raises(KeyError), span("push"), span("wait"):
            fail()
        passes(1, "forward")
        recorder.end()
    assert p50_ms(recorder) == pytest.approx({"wait": 1, "push": 0, "forward": 1, "other": 0}, abs=1e-9)
