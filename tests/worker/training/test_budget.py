"""A worker's share of a job: its segments, how many steps they make, and where it goes on after a checkpoint."""

import math
from itertools import chain
from types import SimpleNamespace

import pytest

from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.training.budget import Position, TrainingPlan, steps_of
from harness.clicks import click_data
from harness.job import make_job

SAMPLES = 700  # 14 batches


def job(**train):
    evaluate, save = train.pop("evaluate", None), train.pop("save", None)
    checkpoint = {"folder": "x", "every": save}
    return make_job(train=train, evaluate={"every": evaluate}, checkpoint=checkpoint)


def plan(trained, samples=SAMPLES, **settings):
    return TrainingPlan(trained, click_data(train=samples), WorkerGroup(), **settings)


@pytest.mark.parametrize(
    "trained",
    [
        job(epochs=3),
        job(epochs=3, accumulate=4),  # a step of the two batches that are left of each epoch
        job(epochs=5, accumulate=4, evaluate=2),
        job(epochs=6, accumulate=3, evaluate=3, save=2),
        job(steps=21, accumulate=4, evaluate=10, save=3),
        job(samples=1900, accumulate=3, evaluate=500),
    ],
    ids=lambda trained: f"{trained.train.budget} by {trained.train.accumulate}",
)
def test_the_steps_of_a_run_are_those_that_its_segments_make(trained):
    budget = plan(trained)
    steps = 0
    for segment in budget.segments():
        for part in segment.parts:
            steps += math.ceil(len(list(part)) / trained.train.accumulate)
    assert budget.total_steps == steps


def test_every_split_ends_with_a_step_of_its_own():
    splits = SimpleNamespace(num_splits=4)  # of 175 samples: 4 batches, so 2 steps
    budget = TrainingPlan(job(epochs=3, accumulate=3), click_data(train=SAMPLES), WorkerGroup(0, 2), splits=splits)
    assert budget.total_steps == 3 * 4 * 2 // 2


@pytest.mark.parametrize(("unit", "given"), [("steps", 10), ("samples", 5)])
def test_other_workers_go_on_at_the_same_sample(unit, given):
    trained = job(**{unit: 1000})
    one = plan(trained)
    one.position = Position(epoch=2, batch=4, given=10)
    two = TrainingPlan(trained, click_data(train=SAMPLES), WorkerGroup(1, 2))
    two.load_state_dict(one.state_dict())
    assert two.position == Position(epoch=2, batch=2, given=given)
    back = plan(trained)
    back.load_state_dict(two.state_dict())
    assert (back.position.epoch, back.position.batch) == (2, 4)


def test_of_a_split_or_the_rest_of_an_epoch_there_may_be_nothing_that_will_do():
    splits = SimpleNamespace(num_splits=100, deal=lambda epoch: iter(range(100)))  # of 7 samples each
    budget = plan(job(epochs=1), smallest_batch=8, splits=splits)
    assert [list(part) for segment in budget.segments() for part in segment.parts] == [[]] * 100

    resumed = plan(job(epochs=2), smallest_batch=2)
    resumed.load_state_dict({"epoch": 0, "batch": 13, "given": 13, "world_size": 1})
    assert [len(list(part)) for segment in resumed.segments() for part in segment.parts] == [1, 14]
    alone = plan(job(epochs=2), 701, smallest_batch=2)
    alone.load_state_dict({"epoch": 0, "batch": 14, "given": 14, "world_size": 1})
    assert [len(list(part)) for segment in alone.segments() for part in segment.parts] == [0, 14]


def test_a_worker_that_is_to_leave_finishes_its_split_and_asks_for_none_of_another_epoch():
    asked, group = [], WorkerGroup()
    splits = SimpleNamespace(num_splits=4, deal=lambda epoch: (asked.append((epoch, n)) or n for n in range(4)))
    budget = TrainingPlan(job(epochs=3), click_data(train=SAMPLES), group, splits=splits)
    trained = []
    for part in (part for segment in budget.segments() for part in segment.parts):
        group.leaving = asked[-1] == (1, 1)
        trained.append(len(list(part)))
    assert trained == [4] * 6
    assert asked[-1] == (1, 2)  # which says that the one before is done


@pytest.mark.parametrize(
    ("first", "late", "want"),
    [
        (Position(epoch=7, batch=3, given=101), True, [7, 8]),
        (Position(epoch=6, batch=14, given=98), True, [7, 8]),  # over
        (Position(epoch=1, batch=13, given=27), True, [1, 2]),  # which this worker was in, too
        (Position(epoch=7, batch=3, given=101), False, [1, 2]),
    ],
    ids=["in an epoch", "behind one", "in the same epoch", "from the start"],
)
def test_who_comes_late_to_a_run_of_steps_begins_with_the_epoch_of_the_others(monkeypatch, first, late, want):
    steps = job(steps=500, evaluate=20)
    one = plan(steps)
    one.position = first
    data, epochs = click_data(train=SAMPLES), []
    read = data.train
    monkeypatch.setattr(data, "train", lambda epoch, *share: (epochs.append(epoch), read(epoch, *share))[1])
    other = TrainingPlan(steps, data, WorkerGroup())
    segments = other.segments()
    for part in next(segments).parts:  # it is in epoch 1 then
        list(part)
    epochs.clear()
    other.follow(one.shared_state, late=late)
    assert sum(1 for part in next(segments).parts for _ in part) == 20
    assert epochs == (want if want[0] > 1 else want[1:])
    assert other.state_dict()["epoch"] == want[1]


@pytest.mark.parametrize(("batch", "epochs"), [(5, 2), (13, 2), (14, 1)], ids=["begun", "nearly over", "over"])
def test_an_epoch_that_was_begun_is_dealt_out_whole(batch, epochs):
    before = plan(job(steps=100))
    before.position = Position(epoch=1, batch=batch, given=14 + batch)
    splits = SimpleNamespace(num_splits=4, deal=lambda epoch: iter(range(4)))
    budget = plan(job(epochs=3), splits=splits)
    budget.load_state_dict(before.state_dict())
    parts = chain.from_iterable(segment.parts for segment in budget.segments())
    assert sum(len(batch) for part in parts for _, batch in part) == epochs * SAMPLES


@pytest.mark.parametrize(
    ("unit", "before", "now", "want"), [("epochs", 1, 2, 14), ("samples", 2, 1, 56), ("steps", 1, 2, 28)]
)
def test_the_steps_of_other_workers_count_by_their_samples(unit, before, now, want):
    assert steps_of(job(**{unit: 100}), 28, before=before, now=now) == want


def test_a_worker_that_was_not_there_counts_what_the_others_were_given():
    budget = plan(job(steps=40, evaluate=10))
    segments = budget.segments()
    next(segments)  # trained by the others
    for part in next(segments).parts:
        assert len(list(part)) == 10
    assert budget.position.given == 20
    later = plan(job(steps=40, evaluate=10))
    later.load_state_dict(budget.state_dict())
    assert [len(list(chain.from_iterable(segment.parts))) for segment in later.segments()] == [10, 10]


@pytest.mark.parametrize(("strategy", "epoch"), [("ddp", 2), ("local", 5)])
def test_who_is_ahead_goes_back_where_the_workers_make_their_steps_together(strategy, epoch):
    ahead = plan(job(epochs=6).model_copy(update={"strategy": strategy}))
    ahead.load_state_dict({"epoch": 5, "batch": 1, "given": 9, "world_size": 1})
    ahead.follow({"begun": 2, "epoch": 2}, late=False)
    assert ahead.position.epoch == epoch
