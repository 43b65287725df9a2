"""Several workers at one clock: what they push, what they wait for, and what they do not do any more."""

import threading
from datetime import timedelta

import pytest
import torch

import embershard as es
from embershard.proto.messages import Pull, Push, Request
from embershard.worker.client.membership import Terms
from harness.models import SumModel, skewed_pairs
from harness.wires import PATIENCE

SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
ROWS = 40
SEED = threading.Lock()  # torch has one generator for all threads


@pytest.fixture
def make_workers(make_wires):
    def make(workers, staleness, *, shards=2, staleness_aware_lr=False, **settings):
        wait = timedelta(seconds=PATIENCE)
        terms = Terms(workers=workers, staleness=staleness, staleness_aware_lr=staleness_aware_lr, wait_timeout=wait)
        wires = make_wires(shards, **settings)
        for number in range(workers):
            wires.session(number, terms)
        return wires

    return make


def wrapped(session, optimizer):
    with SEED:
        torch.manual_seed(0)
        model = SumModel(ROWS)
    return es.wrap(model, session, optimizer=optimizer)


def train(model, session, data, prefetch=None):
    for ids, target in data if prefetch is None else session.prefetch(data, staleness=prefetch):
        (model(ids) - target).square().mean().backward()
        session.step(weight=len(ids))


def weights(model, session):
    session.refresh()
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
        return [model.rows.table.pull(torch.arange(ROWS)), *(p.detach().clone() for p in model.parameters())]


def in_one(data, optimizer):
    with es.local(2) as session:
        model = wrapped(session, optimizer)
        train(model, session, data)
        return weights(model, session)


@pytest.mark.parametrize(
    ("workers", "prefetch", "optimizer"),
    [
        (workers, prefetch, es.SGD(lr=0.1) if (workers == 2) == (prefetch is None) else es.Adam(lr=0.01))
        for workers in (1, 2, 4)
        for prefetch in (None, 0)
    ],
    ids=str,
)
def test_synchronous_workers_train_as_one_on_the_joint_batch(make_workers, workers, prefetch, optimizer):
    data = skewed_pairs(6, 12, ROWS)
    sizes = {1: [12], 2: [9, 3], 4: [1, 5, 4, 2]}[workers]  # a sample counts alike wherever it is
    job = make_workers(workers, 0)
    found = {}

    def work(session):
        number, model = session.client.worker, wrapped(session, optimizer)
        start, stop = sum(sizes[:number]), sum(sizes[: number + 1])
        train(model, session, [(ids[start:stop], target[start:stop]) for ids, target in data], prefetch)
        found[number] = weights(model, session)

    job.run(work)
    exact = {"atol": 0, "rtol": 0}
    torch.testing.assert_close(
        found[0], in_one(data, optimizer), **(exact if workers == 1 else {"atol": 1e-6, "rtol": 1e-5})
    )
    assert all(torch.equal(mine, other) for mine, other in zip(found[0], found[workers - 1], strict=True))


@pytest.mark.parametrize("staleness", [0, 4])
def test_every_shard_hears_of_every_clock_that_ends_by_the_last_message_of_a_push(make_workers, staleness):
    job = make_workers(1, staleness, shards=3, max_message_bytes=1024)
    session = job.sessions[0]
    module = es.Embedding(session.table(SPEC))
    for ids in (torch.tensor([1]), torch.arange(900), torch.tensor([1])):  # one id lives on one shard
        module(ids).sum().backward()
        session.step()
    for wire in job.wires:
        lasts = [(request.clock, request.last) for request in wire.seen if isinstance(request, Push)]
        assert [clock for clock, last in lasts if last] == [0, 1, 2]
        assert lasts == sorted(lasts)
        assert len(lasts) > 4
        assert wire.shard.status().clock == 3


def test_a_step_that_is_skipped_lets_the_others_go_on(make_workers):
    job = make_workers(2, 0)

    def work(session):
        module = es.Embedding(session.table(SPEC))
        for clock in range(4):
            module(torch.tensor([1])).sum().backward()
            if session.client.worker == 1 and clock % 2:
                session.skip()
            else:
                session.step()

    job.run(work)
    row = job.sessions[0].table(SPEC).pull(torch.tensor([1]))
    torch.testing.assert_close(row, torch.full((1, 2), -4.0))  # the mean of those that pushed: 1 each time


@pytest.mark.parametrize(("staleness", "bound"), [(0, [0, 1, 2, 3]), (2, [0, 0, 0, 1]), (None, [0, 0, 0, 0])])
@pytest.mark.parametrize("prefetched", [False, True])
def test_a_pull_waits_for_as_many_clocks_as_the_staleness_wants(make_workers, staleness, bound, prefetched):
    job = make_workers(1, staleness)
    session = job.sessions[0]
    model = wrapped(session, es.SGD(lr=0.1))
    job.heard.clear()
    train(model, session, skewed_pairs(4, 6, ROWS), (staleness or 0) if prefetched else None)
    pulls = [r for r in job.sent(Pull) if any(part.table == "rows" for part in r.tables)]
    assert [pull.required_clock for pull in pulls[::2]] == bound == [pull.required_clock for pull in pulls[1::2]]


def test_prefetch_among_workers_pulls_the_rows_of_a_batch_at_once(make_workers):
    job = make_workers(1, 0, shards=1)
    session = job.sessions[0]
    model = wrapped(session, es.SGD(lr=0.1))
    job.heard.clear()
    train(model, session, skewed_pairs(5, 6, ROWS), 0)
    assert [type(r) for r in job.sent(Request)] == [Pull, Push] * 5
    assert session.missed_reads == 0


def test_prefetch_counts_clocks_not_batches(make_workers):
    job = make_workers(2, 1)

    def work(session):
        model = wrapped(session, es.SGD(lr=0.1))
        # a step of several batches: a pull that waits for a clock per batch would wait for ever
        for batch, (ids, target) in enumerate(session.prefetch(skewed_pairs(12, 6, ROWS)), start=1):
            (model(ids) - target).square().mean().backward()
            if batch % 4 == 0:
                session.step()
        assert session.clock == 3

    job.run(work)


def test_a_push_says_which_version_its_rows_were(make_workers):
    job = make_workers(2, None, shards=1)
    mine, other = job.sessions
    module, others = es.Embedding(mine.table(SPEC)), es.Embedding(other.table(SPEC))

    def push(session, on):
        on(torch.tensor([1])).sum().backward()
        session.step()

    push(mine, module)
    first = module(torch.tensor([1])).sum()  # on version 1
    push(other, others)
    second = module(torch.tensor([2])).sum()  # on version 2
    (first + second).backward()
    mine.step()
    push(mine, module)
    assert [r.version for r in job.sent(Push)] == [0, 1, 1, 3]
    assert mine.staleness_seen()[:3] == (2, 1, 0)


def test_prefetch_and_copies_of_rows_beyond_the_bound_of_the_job_are_refused(make_workers):
    session = make_workers(1, 1).sessions[0]
    wrapped(session, es.SGD(lr=0.1))
    with pytest.raises(ValueError, match=r"prefetch\(staleness=2\).*connect\(staleness=1\)"):
        session.prefetch([], staleness=2)
    with pytest.raises(ValueError, match=r"cache_rows\(staleness=4\).*connect\(staleness=1\)"):
        session.cache_rows()


def test_rows_for_a_cache_are_pulled_so_fresh_that_its_copies_hold_the_bound(make_workers):
    job = make_workers(1, 3)
    session = job.sessions[0]
    model = wrapped(session, es.SGD(lr=0.1))
    session.cache_rows(staleness=2)
    with pytest.raises(ValueError, match=r"prefetch\(staleness=2\).*connect\(staleness=3\).*cache_rows\(staleness=2\)"):
        session.prefetch([], staleness=2)
    for prefetched in (None, 1):
        job.heard.clear()
        before = session.clock
        train(model, session, skewed_pairs(6, 6, ROWS), prefetched)
        pulls = [r for r in job.sent(Pull) if any(part.table == "dense" for part in r.tables)]
        after = sorted(pull.required_clock for pull in pulls)
        assert after == sorted([max(0, before + clock - 1) for clock in range(6)] * 2)
