"""The training loop over shards in this process: what it reaches, when it evaluates, when it stops."""

import math
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embershard.proto.errors import JobError
from embershard.proto.timing import Recorder
from embershard.worker.client.worker_group import Evicted, MembershipChanged, WorkerGroup
from embershard.worker.data.batch import Batch, Schema
from embershard.worker.data.interactions.movielens import NcfData
from embershard.worker.metrics import Users
from embershard.worker.training.saver import Saver
from embershard.worker.training.step import NonFiniteLoss
from embershard.worker.training.trainer import Trainer
from harness.clicks import NUM_IDS, STANDING, Notes, click_data, click_job


def dataset(count=2000, splits=("valid", "test")):
    return click_data(train=count, **dict.fromkeys(splits, 500))


def run(session, job, data=None, group=None):
    notes = Notes()
    result = Trainer(job, data or dataset(), session, group or WorkerGroup(), [notes]).run()
    assert notes.result is result
    return result, notes


def test_training_learns_what_the_data_holds(make_session):
    result, notes = run(make_session(), click_job(train={"epochs": 5}))
    assert result.figures["test"]["auc"] > 0.85
    assert notes.intervals[-1].loss < 0.9 * notes.intervals[0].loss
    assert (result.samples, result.steps, result.epochs) == (10_000, 100, 5)
    assert 0 < result.wait_share < 1
    assert result.table_rows["embedding"] == NUM_IDS
    assert (notes.plan.total_samples, notes.plan.split) == (10_000, "valid")


MODELS = {
    "deepfm": {"hidden": [16], "batch_norm": True, "dropout": 0.2},
    "dlrm": {"bottom": [8], "hidden": [16]},
    "lr": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_run_with_prefetch_or_without(make_session, name):
    def figures(shards, **train):
        session = make_session(shards)
        found = run(session, click_job(name, model=MODELS[name], train=train), dataset(500))[0]
        assert session.missed_reads == 0
        return found.figures, found.steps

    one = figures(1, prefetch=None)
    torch.manual_seed(99)
    assert figures(2, prefetch=None) == one
    assert figures(2, prefetch=0) == one
    assert name == "lr" or figures(1, seed=6) != one


def test_dropout_differs_between_workers_and_not_between_runs(make_session):
    def draws(rank, seed=5):
        Trainer(click_job("lr", train={"seed": seed}), dataset(), make_session(), WorkerGroup(rank, 2))
        return torch.rand(3).tolist()

    assert draws(0) == draws(0)
    assert draws(1) != draws(0) != draws(0, seed=7)


@pytest.mark.parametrize("splits", [("valid", "test"), ("test", "valid")])
def test_the_reported_figures_are_those_of_the_best_evaluation(make_session, splits):
    found = click_job(train={"epochs": 6}, evaluate={"metric": "logloss"})
    result, notes = run(make_session(), found, dataset(600, splits))
    losses = [e.figures["valid"]["logloss"] for e in notes.evaluations]
    best = int(np.argmin(losses))
    assert result.figures == notes.evaluations[best].figures
    assert (result.best_epoch, result.best_step) == (best + 1, 6 * (best + 1))
    assert [e.improved for e in notes.evaluations] == [loss == min(losses[: i + 1]) for i, loss in enumerate(losses)]


def test_early_stopping_waits_for_its_patience(make_session):
    result, notes = run(
        make_session(), click_job(train={"epochs": 50, "early_stop": {"patience": 3}}, embedding=STANDING)
    )
    assert [e.improved for e in notes.evaluations] == [True, False, False, False]
    assert result.stopped_early
    assert (result.best_epoch, result.epochs) == (1, 4)


@pytest.mark.parametrize(("min_delta", "improved"), [(0.0, [True, True]), (1.0, [True, False])])
def test_an_evaluation_is_better_by_more_than_min_delta(make_session, min_delta, improved):
    train = {"steps": 20, "early_stop": {"patience": 1, "min_delta": min_delta}}
    _, notes = run(make_session(), click_job(train=train, evaluate={"every": 10, "metric": "logloss"}))
    assert [e.improved for e in notes.evaluations] == improved


@pytest.mark.parametrize(
    ("train", "every", "steps"),
    [
        ({"epochs": 3}, None, [4, 8, 12]),
        ({"epochs": 5}, 2, [8, 16, 20]),
        ({"steps": 10}, None, [10]),
        ({"steps": 10}, 3, [3, 6, 9, 10]),
        ({"samples": 990}, 400, [4, 8, 10]),
    ],
)
def test_evaluations_come_when_the_job_says(make_session, train, every, steps):
    _, notes = run(make_session(), click_job("lr", train=train, evaluate={"every": every}), dataset(400))
    assert [e.step for e in notes.evaluations] == steps
    assert notes.begun == list(range(len(steps)))


def test_a_pause_for_a_checkpoint_is_no_evaluation(make_session, tmp_path):
    saved = {"folder": str(tmp_path), "every": 15, "keep": 9, "best": False}
    _, notes = run(make_session(), click_job("lr", train={"steps": 50}, evaluate={"every": 20}, checkpoint=saved))
    assert [e.step for e in notes.evaluations] == [20, 40, 50]
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == [15, 30, 45, 50]


def test_a_run_trains_on_while_a_checkpoint_is_written_and_waits_for_its_last_one(make_session, tmp_path, monkeypatch):
    class Left(WorkerGroup):
        """Who is left when another worker is lost."""

        def retry_on_membership_change(self, work):
            with suppress(MembershipChanged):
                return work()
            return work()

    saves = []

    def save(saver, step, *, best, due, wait):
        assert due
        saves.append((step, wait))
        if len(saves) == 1:
            raise MembershipChanged

    monkeypatch.setattr(Saver, "save", save)
    saved = {"folder": str(tmp_path)}
    run(make_session(), click_job("lr", train={"epochs": 3}, checkpoint=saved), group=Left())
    assert saves == [(20, False), (20, False), (40, False), (60, True)]
    stops = {"epochs": 9, "early_stop": {"patience": 1}}
    run(make_session(), click_job("lr", train=stops, checkpoint=saved, embedding=STANDING))
    assert saves[4:] == [(20, False), (40, True)]


class Others(WorkerGroup):
    """Workers that were in these segments, each time when this one entered, and go on without it in segment `leave`."""

    def __init__(self, *entries, leave=None):
        super().__init__()
        self.entries, self.leave = list(entries), leave

    def join_segment(self, shared_state):
        segment, said = self.entries.pop(0)
        self.late, self.over = bool(said), bool(said.get("over"))
        return segment, {**shared_state, **said}

    def end_segment(self, segment, *, last=False):
        if segment == self.leave:
            raise Evicted


@pytest.mark.parametrize(
    ("group", "epochs", "samples"),
    [
        (Others((0, {}), (3, {"stopped": False, "steps": 0, "clock": 0}), leave=1), [1, 4], 6000),
        (Others((2, {"stopped": False, "steps": 0, "clock": 0})), [3, 4], 4000),
        (Others((3, {"stopped": True, "steps": 0, "clock": 0})), [], 0),
        (Others((1, {"over": True})), [], 0),
    ],
    ids=["left behind", "late", "stopped", "over"],
)
def test_who_comes_late_or_was_left_behind_goes_on_where_the_others_are(make_session, group, epochs, samples):
    result, notes = run(make_session(), click_job("lr", train={"epochs": 4}), group=group)
    assert [e.epoch for e in notes.evaluations] == epochs
    assert result.samples == samples  # what it made of epoch 2 counts, epoch 3 was the others'


def test_a_plateau_lowers_the_learning_rate(make_session, monkeypatch):
    monkeypatch.setattr("embershard.worker.reporting.throughput.INTERVAL_SECONDS", math.inf)  # one of each epoch
    train = {"epochs": 4, "lr_schedule": {"name": "plateau", "factor": 0.5}}
    _, notes = run(make_session(), click_job(train=train, embedding=STANDING))
    assert [i.lr_scale for i in notes.intervals] == [1.0, 1.0, 0.5, 0.25]


def test_a_loss_that_is_not_finite_stops_the_run_or_its_step_is_left_out_and_counted(make_session):
    data = dataset()
    data._rows["train"].dense[1500] = np.nan
    with pytest.raises(NonFiniteLoss, match=r"worker 0: the loss of step \d+ is nan; lower the learning"):
        run(make_session(), click_job("lr"), data)
    result, notes = run(make_session(), click_job("lr", train={"epochs": 3, "non_finite": "skip"}), data)
    assert (result.skipped_steps, result.steps, result.samples) == (3, 60, 6000)
    assert np.isfinite([interval.loss for interval in notes.intervals]).all()


@pytest.mark.parametrize(("name", "fields", "samples"), [("deepfm", {"batch_norm": True}, 300), ("fm", {}, 301)])
def test_a_last_batch_of_one_sample_is_left_out_under_batch_norm(make_session, name, fields, samples):
    fields = {"hidden": [4], **fields} if fields else {}
    assert run(make_session(), click_job(name, model=fields, train={"epochs": 1}), dataset(301))[0].samples == samples


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 5}, {"samples": 5}], ids=str)
def test_a_share_in_which_no_batch_will_do_for_batch_norm_ends_the_run(make_session, length):
    fields = {"hidden": [4], "batch_norm": True}
    with pytest.raises(JobError, match=r"batch_size: epoch 1 has no batch of 2 samples or more for worker 0 of 1"):
        run(make_session(), click_job("deepfm", model=fields, train={"batch_size": 1, **length}), dataset(3))


def test_data_without_splits_is_trained_on_and_not_judged(make_session):
    result, notes = run(make_session(), click_job("lr"), dataset(splits=()))
    assert not notes.evaluations
    assert result.figures == {}
    assert result.samples == 4000


def test_decay_over_data_of_unknown_length_is_refused(make_session):
    data = dataset()
    data.num_samples = lambda split: None
    with pytest.raises(JobError, match="linear needs the number of steps"):
        run(make_session(), click_job(train={"lr_schedule": {"name": "linear"}}), data)


def test_a_gpu_that_is_not_there_is_named(make_session):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(JobError, match="no CUDA device"):
        Trainer(click_job(train={"device": "cuda"}), dataset(), make_session(), WorkerGroup())


def test_candidates_are_ranked_by_user(make_session, tmp_path):
    rng = np.random.default_rng(0)
    liked = {(u, (u * 3 + k) % 30) for u in range(20) for k in range(6)}
    (tmp_path / "p.train.pairs").write_text("".join(f"{u}\t{i}\n" for u, i in sorted(liked)))
    (tmp_path / "p.test.rating").write_text("".join(f"{u}\t{(u * 3 + 6) % 30}\t5\t0\n" for u in range(20)))
    others = [[i for i in rng.permutation(30) if (u, i) not in liked and i != (u * 3 + 6) % 30][:15] for u in range(20)]
    lines = (f"({u},{(u * 3 + 6) % 30})\t" + "\t".join(map(str, others[u])) + "\n" for u in range(20))
    (tmp_path / "p.test.negative").write_text("".join(lines))
    trained = click_job("gmf", data={"reader": "ncf", "prefix": "p"}, train={"epochs": 3, "batch_size": 64})
    result = Trainer(trained, NcfData(tmp_path / "p"), make_session(), WorkerGroup()).run()
    assert set(result.figures["test"]) == {"hr@10", "ndcg@10", "users"}
    assert result.figures["test"]["users"] == 20


class Taste:
    """Users of two kinds, who took half of the items of their kind: the other half is to be found among all items."""

    schema = Schema(("user", "item"), 0, 60)
    evaluation = "ranking"
    splits = ("test",)
    items = torch.arange(20, 60), None

    def __init__(self):
        rng = np.random.default_rng(0)
        items = np.stack([rng.permutation(20) * 2 + u % 2 for u in range(20)])  # (20, 20): columns of a score matrix
        users = np.repeat(np.arange(20), 10)
        self.taken, self.wanted = (np.stack([users, half.ravel()]) for half in (items[:, :10], np.sort(items[:, 10:])))

    def num_samples(self, split):
        return self.taken.shape[1]

    def train(self, epoch, rank, world_size, batch_size):
        order = np.random.default_rng(epoch).permutation(self.taken.shape[1])
        ids = torch.from_numpy(np.add(self.taken, [[0], [20]]).T[order])
        return (Batch(part, None, torch.ones(len(part))) for part in ids.split(batch_size))

    def evaluate(self, split, rank, world_size, batch_size):
        raise AssertionError("ranked in full")

    def users(self, split, rank, world_size, batch_size):
        yield Users(torch.arange(20), *self.taken, *self.wanted)


def test_two_towers_learn_to_rank_all_items(make_session):
    first = {"optimizer": {"name": "adagrad", "lr": 0.1}, "initializer": {"name": "normal", "std": 0.1}}
    train = {"epochs": 10, "batch_size": 32}
    trained = click_job("two_tower", train=train, embedding={"dim": 8, **first}, evaluate={"metric": "recall@10"})
    session = make_session()
    result = Trainer(trained, Taste(), session, WorkerGroup()).run()
    assert result.figures["test"]["recall@10"] > 0.7  # 1/3 by chance
    assert session.missed_reads == 0


def test_the_vectors_of_items_are_computed_once_for_all_splits(make_session):
    class Counted(Taste):
        splits, reads = ("valid", "test"), 0

        @property
        def items(self):
            self.reads += 1
            return Taste.items

    data = Counted()
    trained = click_job("two_tower", evaluate={"metric": "recall@10"})
    figures = Trainer(trained, data, make_session(1), WorkerGroup())._evaluator.evaluate()
    assert (data.reads, figures["valid"]) == (1, figures["test"])


def test_evaluation_leaves_the_model_training_and_scores_what_others_pushed(make_session):
    session = make_session(1)
    trainer = Trainer(click_job("lr"), dataset(), session, WorkerGroup())
    before = trainer._evaluator.evaluate()
    assert trainer.model.training
    route = session.registry.tables["linear"].route(torch.arange(60))
    noise = np.random.default_rng(0).normal(0, 9, (60, 1)).astype(np.float32)
    session.client.push([("linear", route, noise)], clock=0, lr_scale=1.0)
    assert trainer._evaluator.evaluate() != before


@pytest.mark.parametrize("prefetch", [None, 0])
def test_the_parts_of_a_step_add_up_to_it(make_session, prefetch):
    with Recorder() as recorder:
        run(make_session(), click_job(train={"epochs": 3, "prefetch": prefetch}))
    split = recorder.split()
    assert split.steps == 60
    assert {"forward", "backward", "push", "gather", "wait", "other"} <= set(split.parts)
    ahead = {"data", "route"}  # where batches are fetched in a thread of its own
    assert ahead <= set(split.parts if prefetch is None else split.overlapped)
    assert sum(part.share for part in split.parts.values()) == pytest.approx(1)
    assert all(part.share >= 0 for part in split.parts.values())  # nothing counts twice


def test_a_loader_makes_the_batches_where_there_is_one(make_session):
    data, epochs = dataset(), []
    loader = SimpleNamespace(train=lambda epoch, split=-1: (epochs.append(epoch), data.train(epoch, 0, 1, 100))[1])
    result = Trainer(click_job(), data, make_session(), WorkerGroup(), loader=loader).run()
    assert result.figures == run(make_session(), click_job())[0].figures
    assert epochs == [0, 1]


def test_a_job_may_cache_hot_rows_and_says_how_many_it_found(make_session, monkeypatch):
    monkeypatch.setattr("embershard.worker.reporting.throughput.INTERVAL_SECONDS", 0.0)
    settings = {"optimizer": {"name": "adagrad", "lr": 0.1}, "cache": {"rows": 1000, "staleness": 2}}
    for prefetch in (0, 1):
        train = {"prefetch": prefetch, "steps": 20}
        session = make_session()
        _, notes = run(session, click_job(train=train, embedding=settings))
        shares = [interval.cached_share for interval in notes.intervals if interval.cached_share is not None]
        assert 0.0 <= min(shares) <= max(shares) <= 1.0
        assert max(shares) > 0.3  # two of three steps read copies
        assert 0.3 < session.stats.cache_hits / session.stats.cache_lookups < 1.0
    _, notes = run(make_session(), click_job(train={"steps": 5}))
    assert {interval.cached_share for interval in notes.intervals} == {None}
