"""Evaluations and `table.pull` read what the shards keep, whatever the codecs; training goes on as without them."""

from pathlib import Path

import pytest
import torch

import embershard as es
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.job import Job
from embershard.worker.session.session import Session
from embershard.worker.trained.evaluation import trained_evaluator
from embershard.worker.trained.reading import NotTrained, ReadOnlySession
from embershard.worker.training.trainer import Trainer
from harness.models import BagModel

NUM_IDS = 50
IDS = torch.arange(NUM_IDS)
BATCHES = [torch.randint(0, NUM_IDS, (5, 3), generator=torch.Generator().manual_seed(n)) for n in range(8)]


def make(local_steps=None, **compression):
    torch.manual_seed(0)
    settings = es.Compression(**compression)
    session = Session(es.local(2).client, local_steps=local_steps, compression=settings)
    return session, es.wrap(BagModel(NUM_IDS, 8, hidden=40), session, optimizer=es.SGD(lr=0.01))


def step(session, model, ids):
    (model(ids) - ids.float().mean(1)).square().mean().backward()
    session.step()


def look(session, model, ids):
    with session.exact(), torch.no_grad():
        return model(ids)


def kept(session):
    """All that the shards keep: rows by id, and the blocks of the dense weights."""
    found = []
    blocks = torch.from_numpy(session.dense_weights[0].ids)
    for table in session.tables:
        route = table.route(blocks if table.spec is session.dense_weights[0].spec else IDS)
        (rows,) = session.client.pull([(table.spec.name, route)], exact=True)
        found.append(torch.from_numpy(rows)[route.index])
    return found


@pytest.mark.parametrize("pull", ["none", "fp16s", "bf16", "int8"])
def test_a_pull_of_a_table_has_the_bits_of_the_shards(pull):
    session, _ = make(pull=pull)
    table = next(table for table in session.tables if table.spec is not session.dense_weights[0].spec)
    assert any(torch.equal(table.pull(IDS), rows) for rows in kept(session))


@pytest.mark.parametrize("local_steps", [None, 3])
def test_inside_exact_a_forward_has_the_bits_of_a_session_without_codecs(local_steps):
    session, model = make(local_steps, pull="int8", dense={"pull": "fp16s"})
    for ids in BATCHES[:3]:
        step(session, model, ids)
    exact = look(session, model, BATCHES[0])
    session.compress("*", pull="none")
    with torch.no_grad():
        assert torch.equal(model(BATCHES[0]), exact)
        if local_steps is None:  # with them the model reads its copies of this round
            session.compress("*", pull="int8")
            assert not torch.equal(model(BATCHES[0]), exact)


def test_a_pull_shows_the_local_steps_of_its_round_on_top_of_the_bits_of_the_shards():
    session, model = make(3, pull="int8")
    table = model.get_submodule("bag").table
    before = table.pull(IDS)
    model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    session.step()  # the round is not over: the shards know nothing of it
    after = table.pull(IDS)
    assert any(torch.equal(before, rows) for rows in kept(session))
    assert torch.equal(after[5:], before[5:])
    assert (after[1:5] != before[1:5]).any(1).all()
    assert (after - before).abs().max() < 0.1


def test_inside_exact_a_batch_that_was_pulled_ahead_is_read_anew():
    session, model = make(pull="int8", dense={"pull": "fp16s"})
    for ids in session.prefetch(BATCHES[:1]):
        exact, rounded = look(session, model, ids), model(ids)
    assert not torch.equal(exact, rounded)
    assert torch.equal(exact, look(session, model, BATCHES[0].clone()))


@pytest.mark.parametrize(
    ("copies", "ahead", "dense"),
    [
        ("", False, "fp16s"), ("", False, "delta"), ("", True, "delta"), ("cache", False, "none"),
        ("cache", True, "fp16s"), ("local steps", False, "delta"), ("local steps", True, "none"),
    ],
)  # fmt: skip
def test_exact_reads_leave_the_bits_of_training(copies, ahead, dense):
    found = []
    for looks in (False, True):
        session, model = make(2 if copies == "local steps" else None, pull="int8", dense={"pull": dense})
        if copies == "cache":
            session.cache_rows(NUM_IDS, 2)
        for ids in session.prefetch(BATCHES) if ahead else BATCHES:
            if looks:
                model.get_submodule("bag").table.pull(IDS)
                look(session, model, ids)
                look(session, model, IDS.unsqueeze(1))
            step(session, model, ids)
        session.flush()
        found.append(kept(session))
    assert all(map(torch.equal, *found))


def test_an_exact_read_leaves_what_delta_holds_of_dense_weights():
    received = []
    for looks in (False, True):
        session, model = make(pull="int8", dense={"push": "topk:0.01", "pull": "delta"})
        for ids in BATCHES[:3]:
            step(session, model, ids)
        if looks:
            look(session, model, BATCHES[0])
        before = session.stats.received_bytes
        for ids in BATCHES[3:5]:
            step(session, model, ids)
        received.append(session.stats.received_bytes - before)
    assert received[1] <= received[0]


def job(**sections):
    return Job.model_validate(
        {
            "model": {"name": "dlrm", "bottom": [8], "hidden": [8]},
            "data": {"reader": "clicks", "eval_samples": 500},
            "embedding": {"dim": 4, "optimizer": {"name": "adagrad", "lr": 0.05}},
            "train": {"batch_size": 128, "samples": 1280, "prefetch": 0},
            "compression": {"pull": "int8", "dense": {"pull": "fp16s"}},
            **sections,
        }
    )


def live(job, session):
    data = job.data.open(Path(), job.train.seed)
    return trained_evaluator(job, data, ReadOnlySession(session.client), None).evaluate()


def figures(job, session):
    return Trainer(job, job.data.open(Path(), 0), session, WorkerGroup()).run().figures


def test_the_figures_of_a_run_are_those_that_the_weights_on_the_shards_have(make_shards, make_session):
    shards = make_shards(2)
    said = figures(job(), make_session(shards=shards))
    assert said == live(job(compression={"pull": "none"}), make_session(shards=shards, worker=READ_ONLY_WORKER))


def test_a_run_that_evaluates_more_often_comes_to_the_same_bits(make_session):
    found = []
    for sections in ({}, {"evaluate": {"every": 256}}):
        session = make_session()
        found.append(figures(job(**sections), session))
        found.append(kept(session))
    assert all(map(torch.equal, found[1], found[3]))


def test_an_onlooker_leaves_shards_without_the_dense_weights_as_they_are(make_shards, make_session):
    shards = make_shards(2)
    hybrid = job(dense={"mode": "ddp"}, compression={})
    figures(hybrid, make_session(shards=shards))
    session = make_session(shards=shards, worker=READ_ONLY_WORKER)
    before = [[table.name for table in status.tables] for status in session.client.status()]
    with pytest.raises(NotTrained, match=r"no table 'dense' of this job"):
        live(job(), session)
    assert [[table.name for table in status.tables] for status in session.client.status()] == before
