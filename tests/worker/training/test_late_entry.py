"""A Trainer that comes to others who train already, or was left behind by them: what it skips, and what it goes by."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from test_trainer import Notes, dataset, job

from embershard.worker.client.worker_group import Evicted, SharedState, WorkerGroup
from embershard.worker.job.job import Job
from embershard.worker.session.session import Session
from embershard.worker.strategy.shards import ShardStrategy
from embershard.worker.training.saver import Saver
from embershard.worker.training.trainer import Trainer

MakeSession = Callable[..., Session]
EPOCHS, STEPS = 4, 20  # of each epoch


class Others(WorkerGroup):
    """Workers that were in these segments, and had said that, each time when this one entered.

    They go on without it where it comes to the end of segment `leave`.
    """

    def __init__(self, *entries: tuple[int, SharedState], leave: int | None = None) -> None:
        super().__init__()
        self._entries, self._leave = list(entries), leave
        self.calls: list[tuple[str, int]] = []
        self.words: list[dict[str, Any]] = []

    def join_segment(self, shared_state: SharedState) -> tuple[int, SharedState]:
        segment, said = self._entries.pop(0)
        self.late = bool(said)
        self.over = bool(said.get("over"))
        self.calls.append(("enter", segment))
        return segment, {**shared_state, **said}

    def end_segment(self, segment: int, *, last: bool = False) -> None:
        self.calls.append(("end" if last else "assemble", segment))
        if segment == self._leave:
            raise Evicted

    def begin_segment(self, segment: int, resume: Callable[[int], None], clock: int, shared_state: SharedState) -> None:
        self.calls.append(("dismiss", clock))
        self.words.append(json.loads(json.dumps(shared_state)))
        super().begin_segment(segment, resume, clock, shared_state)


@pytest.fixture
def train(make_session, monkeypatch):
    """A run whose loss stays as it is, with a group, on shards that count that many clocks."""

    def run(group, *, clock=0, early_stop=None, splits=("valid",), **fields):
        standing = {"optimizer": {"name": "sgd", "lr": 0.0}}
        schedule = {"name": "plateau", "factor": 0.5, "patience": 1}
        stop = {} if early_stop is None else {"early_stop": {"patience": early_stop}}
        settings: Job = job(
            "lr", embedding=standing, train={"epochs": EPOCHS, "lr_schedule": schedule, **stop, **fields}
        )
        monkeypatch.setattr("embershard.worker.reporting.throughput.INTERVAL_SECONDS", math.inf)  # one of each segment
        monkeypatch.setattr(ShardStrategy, "clock", property(lambda strategy: clock))
        notes = Notes()
        return Trainer(settings, dataset(splits=splits), make_session(), group, [notes]).run(), notes

    return run


def test_who_comes_late_goes_on_by_what_the_others_say(train):
    first = Others((0, {}))
    result, notes = train(first)
    assert [e.improved for e in notes.evaluations] == [True, False, False, False]
    assert [word["stopped"] for word in first.words] == [False] * EPOCHS

    # one plateau, one worse in a row; since then their clocks went from 40 to 57
    late = Others((2, {**first.words[1], "began": 0.0, "clock": 2 * STEPS}))
    found, notes = train(late, clock=57)
    assert [(e.epoch, e.step) for e in notes.evaluations] == [(3, 57 + STEPS), (4, 57 + 2 * STEPS)]
    assert [interval.lr_scale for interval in notes.intervals] == [0.5, 0.25]
    assert not any(e.improved for e in notes.evaluations)
    assert all(e.seconds > 1e9 for e in notes.evaluations)  # since 1970
    assert (found.best_epoch, found.best_step, found.figures) == (1, STEPS, result.figures)
    assert found.steps == 57 + 2 * STEPS
    assert late.words == [
        {**word, "began": pytest.approx(0.0, abs=60.0), "steps": step, "clock": 57}
        for word, step in zip(first.words[2:], (57 + STEPS, 57 + 2 * STEPS), strict=True)
    ]
    assert late.calls == [
        ("enter", 2), ("assemble", 2), ("dismiss", 57), ("assemble", 3), ("dismiss", 57), ("end", 4)
    ]  # fmt: skip


@pytest.mark.parametrize(("fields", "want"), [({}, 550), ({"staleness": "local(4)"}, 700)], ids=str)
def test_who_comes_late_counts_the_steps_that_a_run_had_before_and_those_of_a_round(train, fields, want):
    late = Others((2, {"stopped": False, "steps": 500, "clock": 7}))  # as of a run that was resumed
    found, _ = train(late, clock=57, **fields)
    assert found.steps == want + 2 * STEPS


def test_who_comes_late_to_a_run_of_steps_trains_its_share_of_the_epoch_of_the_others(make_session, monkeypatch):
    settings = job("lr", train={"steps": 5 * STEPS}, evaluate={"every": STEPS})
    first = Others((0, {}))
    Trainer(settings, dataset(), make_session(), first).run()
    data, epochs = dataset(), []
    read = data.train
    monkeypatch.setattr(data, "train", lambda epoch, *share: (epochs.append(epoch), read(epoch, *share))[1])
    Trainer(settings, data, make_session(), Others((3, first.words[2]))).run()
    assert epochs == [3, 4]


def test_who_comes_late_holds_nothing_back_and_who_was_left_behind_what_it_did(train, monkeypatch):
    dropped: list[bool] = []
    monkeypatch.setattr(Saver, "forget_held", lambda saver: dropped.append(True))
    train(Others((0, {}), (3, {"stopped": False}), leave=1))
    assert not dropped
    train(Others((2, {"stopped": False})))
    assert dropped == [True]


def test_who_comes_when_the_others_have_stopped_trains_no_more(train):
    first = Others((0, {}))
    result, _ = train(first, early_stop=2)
    assert [word["stopped"] for word in first.words] == [False, False, True]
    late = Others((3, {**first.words[-1], "clock": 3 * STEPS}))
    found, notes = train(late, clock=3 * STEPS, early_stop=2)
    assert not notes.intervals
    assert found.stopped_early
    assert (found.steps, found.best_step, found.figures) == (60, STEPS, result.figures)
    assert late.calls == [("enter", 3), ("end", 3)]


def test_who_comes_when_all_is_over_trains_no_more(train):
    late = Others((1, {"over": True}))
    found, notes = train(late)
    assert not notes.intervals
    assert not notes.evaluations
    assert found.samples == 0


@pytest.mark.parametrize("clock", [5, 47])
def test_who_was_left_behind_goes_on_where_the_others_are(train, clock):
    group = Others((0, {}), (3, {"stopped": False, "steps": 0, "clock": 0}), leave=1)
    result, notes = train(group, clock=clock)
    assert [e.epoch for e in notes.evaluations] == [1, 4]
    assert result.samples == 3 * 100 * STEPS  # what it made of epoch 2 counts, epoch 3 was the others'
    assert notes.evaluations[-1].step == max(2 * STEPS, clock) + STEPS  # steps never count backwards
    assert group.calls == [
        ("enter", 0), ("assemble", 0), ("dismiss", clock), ("assemble", 1),
        ("enter", 3), ("assemble", 3), ("dismiss", clock), ("end", 4),
    ]  # fmt: skip


def test_the_clock_waits_for_nobody_while_the_workers_meet(train, monkeypatch):
    group = Others((0, {}))
    monkeypatch.setattr(ShardStrategy, "pause", lambda strategy: group.calls.append(("pause", 0)))
    monkeypatch.setattr(ShardStrategy, "resume", lambda strategy, clock: group.calls.append(("resume", clock)))
    train(group, clock=9)
    pauses = [
        call
        for segment in range(EPOCHS)
        for call in (("pause", 0), ("assemble", segment), ("dismiss", 9), ("resume", 9))
    ]
    assert group.calls == [("enter", 0), *pauses, ("pause", 0), ("end", EPOCHS)]


def test_workers_that_have_nothing_to_do_together_meet_at_the_end_alone(train):
    group = Others((0, {}))
    result, _ = train(group, splits=())
    assert result.steps == EPOCHS * STEPS
    assert group.calls == [("enter", 0), ("end", 0)]
