"""Strategies without shards: the same job and the same figures, by torch alone."""

import numpy as np
import pytest
import torch

from embershard.proto.errors import JobError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import RowsDataset, Samples, Schema
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.build import choose_strategy
from embershard.worker.training.trainer import Trainer
from harness.job import make_job

F, PER_FIELD, D = 3, 20, 2


def rows(count, seed):
    """Clicks that a linear model of the ids explains."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PER_FIELD, (count, F)) + np.arange(F) * PER_FIELD
    effects = np.random.default_rng(0).normal(0, 2, F * PER_FIELD)
    labels = (rng.random(count) < 1 / (1 + np.exp(-effects[ids].sum(1)))).astype(np.float32)
    return Samples(ids, rng.random((count, D), np.float32), labels)


def dataset(num_ids=F * PER_FIELD):
    schema = Schema(tuple("abc"), D, num_ids)
    return RowsDataset(schema, {"train": rows(1500, 1), "test": rows(500, 2)}, where="made up", seed=3)


def job(strategy="local", name="lr", **embedding):
    return make_job(
        strategy,
        model={"name": name},
        data={"ids": "global"},
        embedding={
            "optimizer": {"name": "adagrad", "lr": 0.1},
            "initializer": {"name": "constant", "value": 0.01},
            **embedding,
        },
        dense={"optimizer": {"name": "adam", "lr": 0.01}},
        train={"batch_size": 100, "seed": 5, "epochs": 3, "lr_schedule": {"name": "linear", "warmup_steps": 4}},
    )


def run(job, session=None):
    return Trainer(job, dataset(), session, WorkerGroup()).run()


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_one_process_of_torch_reaches_what_shards_reach(make_session, optimizer):
    settings = {"optimizer": {"name": optimizer, "lr": 0.1, "weight_decay": 0.001}}
    alone, on_shards = run(job(**settings)), run(job("ps", **settings), make_session())
    for metric, value in on_shards.figures["test"].items():
        assert alone.figures["test"][metric] == pytest.approx(value, abs=1e-5)
    assert alone.figures["test"]["auc"] > 0.75
    assert (alone.samples, alone.steps, alone.wait_share) == (on_shards.samples, on_shards.steps, 0.0)
    assert alone.table_rows == {"linear": F * PER_FIELD}


def test_the_same_seed_gives_the_same_first_values():
    first = {"initializer": {"name": "normal", "std": 0.1}}
    one, two = (choose(job(**first)).model.linear.weight.detach() for _ in range(2))
    assert torch.equal(one, two)
    assert float(one.std()) == pytest.approx(0.1, rel=0.3)
    uniform = choose(job(initializer={"name": "uniform", "low": 1.0, "high": 2.0})).model.linear.weight.detach()
    assert 1.0 <= uniform.min().item() < uniform.max().item() <= 2.0


def choose(job):
    model = job.model.build(dataset().schema, job.dim, "meta")
    strategy = choose_strategy(job, model, None, torch.device("cpu"))
    assert isinstance(strategy, TorchStrategy)
    return strategy


def test_a_skipped_step_changes_nothing():
    strategy = choose(job(name="fm"))
    before = [parameter.detach().clone() for parameter in strategy.model.parameters()]
    batch = next(iter(dataset().train(0, 0, 1, 10)))
    strategy.module(batch.ids, batch.dense).sum().backward()
    strategy.skip()
    strategy.step(1.0)  # there is nothing left that it could do
    assert all(torch.equal(a, b) for a, b in zip(before, strategy.model.parameters(), strict=True))


def test_a_skipped_step_leaves_no_gradient_in_a_worker_of_hybrid(make_session):
    settings = job("hybrid")
    model = settings.model.build(dataset().schema, settings.dim, "meta")
    strategy = choose_strategy(settings, model, make_session(), torch.device("cpu"))
    batch = next(iter(dataset().train(0, 0, 1, 10)))
    strategy.module(batch.ids, batch.dense).sum().backward()
    assert any(parameter.grad is not None for parameter in strategy.model.parameters())
    strategy.skip()
    assert all(parameter.grad is None for parameter in strategy.model.parameters())


def test_a_table_that_memory_cannot_hold_is_refused():
    model = job().model.build(Schema(tuple("abc"), D, None), 16, "meta")  # hashed ids
    with pytest.raises(JobError, match=r"table 'linear' of 4,611,686,018,427,387,904 rows .* strategy ps holds"):
        choose_strategy(job(), model, None, torch.device("cpu"))


def test_what_workers_hold_can_be_saved_and_restored():
    one, other = choose(job(name="fm")), choose(job(name="fm", initializer={"name": "normal"}))
    batch = next(iter(dataset().train(0, 0, 1, 10)))
    for strategy in (one, other):
        strategy.module(batch.ids, batch.dense).sum().backward()
        strategy.step(1.0)
    other.local_weights.load_state_dict(one.local_weights.state_dict())
    for strategy in (one, other):  # the optimizers' states, too
        strategy.module(batch.ids, batch.dense).sum().backward()
        strategy.step(1.0)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="other weights"):
        choose(job()).local_weights.load_state_dict(one.local_weights.state_dict())
