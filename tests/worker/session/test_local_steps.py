"""Local steps: a worker's own copies follow torch's optimizers, and shards see the differences of a round."""

import threading
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.messages import Pull, Push, Reply, Request
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.kernels import IdIndex
from embershard.worker.session.session import Session
from harness.models import SumModel

Shards = Callable[..., list[Shard]]
PATIENCE = 20.0  # seconds until a test that waits in vain fails
ROWS = 30
SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))


class Job:
    """Shards in this process, what they heard, and workers that take local steps."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards, self.lock = shards, threading.Lock()
        self.heard: list[Request] = []
        self.sessions: list[Session] = []

    def worker(self, steps: int, terms: Terms | None = None) -> Session:
        transports = [LocalTransport(lambda r, it=shard: self.handle(it, r), "local") for shard in self.shards]
        client = Client(transports, worker=len(self.sessions), timeout=timedelta(seconds=PATIENCE))
        if terms is not None:
            client.join(terms)
        self.sessions.append(Session(client, local_steps=steps))
        return self.sessions[-1]

    def handle(self, shard: Shard, request: Request) -> Reply:
        with self.lock:
            self.heard.append(request)
            return shard.handle(request)

    def rows(self, spec: es.TableSpec, ids: list[int]) -> torch.Tensor:
        """As the shards have them."""
        transports = [LocalTransport(shard.handle, "local") for shard in self.shards]
        with self.lock, Session(Client(transports, worker=99)) as session:
            return session.table(spec).pull(torch.tensor(ids))


@pytest.fixture
def make_job(make_shards):
    jobs: list[Job] = []

    def make():
        jobs.append(Job(make_shards(2)))
        return jobs[-1]

    yield make
    for job in jobs:
        for session in job.sessions:
            session.close()


def build() -> nn.Module:
    torch.manual_seed(0)
    return SumModel(ROWS)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch reads every row, so that a row's step counter is torch's."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randperm(ROWS, generator=generator).view(-1, 3), torch.rand(ROWS // 3, generator=generator))
        for _ in range(count)
    ]


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], step: Callable[[], object]) -> None:
    for ids, target in data:
        (model(ids) - target).square().mean().backward()
        step()


CASES = {
    "sgd": (es.SGD(lr=0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    "momentum": (es.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        es.SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        es.Adagrad(lr=0.1, initial_accumulator=0.1, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    ),
    "rmsprop": (es.RMSprop(lr=0.01, momentum=0.5), lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
    "adam": (es.Adam(lr=0.01, beta1=0.8), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.999))),
    "adamw": (es.AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("prefetched", [False, True])
def test_one_worker_with_local_steps_follows_torch(
    make_job, case,
    prefetched,
):  # fmt: skip
    optimizer, in_torch = case
    session, theirs, data = make_job().worker(4), build(), batches(10)
    mine = es.wrap(build(), session, optimizer=optimizer)
    train(mine, session.prefetch(data) if prefetched else data, session.step)
    reference = in_torch(theirs.parameters())
    train(theirs, data, lambda: (reference.step(), reference.zero_grad()))
    session.flush()  # the last round has two steps
    session.refresh()
    with torch.no_grad():
        torch.testing.assert_close(mine(data[0][0]), theirs(data[0][0]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.rows.table.pull(torch.arange(ROWS)), theirs.rows.weight.data, atol=1e-5, rtol=1e-5)


def test_local_clips_are_those_of_the_shards(make_job):
    clipped = es.SGD(lr=1.0, clip_value=0.5, clip_norm=0.6)
    results = []
    for steps in (None, 1):
        job = make_job()
        session = es.local(2) if steps is None else job.worker(steps)
        spec = es.TableSpec(name="t", dim=2, optimizer=clipped, initializer=es.Constant(value=0.0))
        module = es.Embedding(session.table(spec))
        (module(torch.tensor([1, 2, 3])) * torch.tensor([[0.1, 3.0], [0.1, 0.1], [3.0, 0.5]])).sum().backward()
        session.step()
        results.append(module.table.pull(torch.tensor([1, 2, 3])))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0].norm(dim=1).tolist(), [0.26**0.5, 0.02**0.5, 0.6])


def test_local_steps_follow_the_schedule_of_each_table(make_job):
    session = make_job().worker(4)
    module = es.Embedding(session.table(SPEC))
    session.lr_scale = 0.5
    for scales in (None, {"t": 0.5}, {"another": 9.0}):
        module(torch.tensor([1])).sum().backward()
        session.step(scales)
    assert module(torch.tensor([1]))[0, 0] == -0.5 - 0.25 - 0.5


def test_shards_hear_once_per_round_of_what_has_changed(make_job):
    job = make_job()
    session = job.worker(3)
    module = es.Embedding(session.table(SPEC))
    job.heard.clear()
    for count in (1, 2):
        module(torch.tensor([1, 2])).sum().backward()
        session.step()
        assert module(torch.tensor([1])).detach()[0, 0] == -count
    assert job.rows(SPEC, [1])[0, 0] == 0
    module(torch.tensor([2, 3])).sum().backward()
    session.step()
    assert job.rows(SPEC, [1, 2, 3])[:, 0].tolist() == [-2.0, -3.0, -1.0]
    pulled = [id_ for r in job.heard if isinstance(r, Pull) for part in r.tables for id_ in part.ids.tolist()]
    assert sorted(pulled) == [1, 2, 3]
    pushes = [r for r in job.heard if isinstance(r, Push)]
    assert all(push.difference for push in pushes)
    assert {push.clock for push in pushes} == {0}


def test_a_round_pushes_no_change_of_the_one_before(make_job):
    job = make_job()
    session = job.worker(1)
    module = es.Embedding(session.table(SPEC))
    for row in (1, 2, 3):
        module(torch.tensor([row])).sum().backward()
        session.step()
    assert job.rows(SPEC, [1, 2, 3])[:, 0].tolist() == [-1.0] * 3


def test_a_round_in_which_no_step_was_made_does_not_end(make_job):
    job = make_job()
    session = job.worker(1, Terms(staleness=0))
    es.Embedding(session.table(SPEC))(torch.tensor([1])).sum().backward()
    session.step()
    session.flush()
    assert {shard.status().clock for shard in job.shards} == {1}


def test_a_round_is_that_of_the_clock_at_which_the_worker_joined(make_job):
    job = make_job()
    session = job.worker(1, Terms(staleness=0))
    assert session.membership is not None
    session.membership.resume(6)
    es.Embedding(session.table(SPEC))(torch.tensor([1])).sum().backward()
    session.step()
    assert {push.clock for push in job.heard if isinstance(push, Push)} == {6}
    assert job.rows(SPEC, [1])[0, 0] == -1


def test_a_step_on_rows_of_the_round_before_is_not_lost(make_job):
    job = make_job()
    session = job.worker(100)
    module, ids = es.Embedding(session.table(SPEC)), torch.tensor([1])
    early = module(ids)
    module(ids).sum().backward()
    session.step()
    session.flush()
    early.sum().backward()
    session.step()
    assert module(ids)[0, 0] == -2
    session.flush()
    assert job.rows(SPEC, [1])[0, 0] == -2


def test_rows_that_arrive_late_take_no_step_back(make_job, monkeypatch):
    session = make_job().worker(100)
    table, local, pull = session.table(SPEC), session.local_steps, session.client.pull
    route = table.route(torch.tensor([1]))
    assert local is not None

    def slow(*reads, **how):
        monkeypatch.setattr(session.client, "pull", pull)
        rows = pull(*reads, **how)  # type: ignore[arg-type]
        local.push([("t", route, np.ones((1, 2), np.float32))], clock=0)  # by another thread, meanwhile
        return rows

    monkeypatch.setattr(session.client, "pull", slow)
    local.pull([("t", route)])
    assert table.pull(torch.tensor([1]))[0, 0] == -1


def test_a_round_takes_fresh_rows(make_job):
    job = make_job()
    mine, other = (job.worker(steps, Terms(workers=2)) for steps in (2, 1))
    table, others = mine.table(SPEC), es.Embedding(other.table(SPEC))
    ids = torch.tensor([1])
    es.Embedding(table)(ids).sum().backward()
    mine.step()
    others(ids).sum().backward()
    other.step()
    assert table.pull(ids)[0, 0] == -1  # its own copy, in the middle of a round
    mine.flush()
    assert table.pull(ids)[0, 0] == -1.0  # half of each


def test_rows_of_a_round_that_is_over_are_not_kept_for_the_next(make_job):
    job = make_job()
    mine, other = (job.worker(steps, Terms(workers=2)) for steps in (100, 1))
    table, ids = mine.table(SPEC), torch.tensor([2])
    es.Embedding(table)(torch.tensor([1])).sum().backward()
    mine.step()
    handle, pulled, go_on = job.handle, threading.Event(), threading.Event()

    def slow(shard, request):
        reply = handle(shard, request)
        if isinstance(request, Pull) and request.worker == 0 and not pulled.is_set():
            pulled.set()
            assert go_on.wait(PATIENCE)
        return reply

    job.handle = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: mine.local_steps.pull([("t", table.route(ids))]))
    thread.start()
    assert pulled.wait(PATIENCE)
    mine.flush()  # while the rows are on their way
    go_on.set()
    thread.join(PATIENCE)
    es.Embedding(other.table(SPEC))(ids).sum().backward()
    other.step()
    assert table.pull(ids)[0, 0] == -0.5


def run(work: Callable[[Session], object], sessions: list[Session]) -> None:
    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("staleness", [0, None])
def test_the_differences_of_several_workers_are_averaged(make_job, staleness):
    job = make_job()
    sessions = [job.worker(3, Terms(workers=2, staleness=staleness)) for _ in range(2)]

    def work(session):
        module = es.Embedding(session.table(SPEC))
        for _ in range(3):
            (module(torch.tensor([1, 5 + session.client.worker])) * (1 + session.client.worker)).sum().backward()
            session.step()

    run(work, sessions)
    assert sessions[0].membership is not None
    # three steps of 1 and of 2; the other rows are one worker's alone
    assert job.rows(SPEC, [1, 5, 6])[:, 0].tolist() == [-4.5, -1.5, -3.0]


def test_synchronous_local_steps_read_the_average_of_the_round_before(make_job):
    job = make_job()
    sessions = [job.worker(2, Terms(workers=2, staleness=0)) for _ in range(2)]
    seen: dict[int, list[float]] = {0: [], 1: []}

    def work(session):
        module = es.Embedding(session.table(SPEC))
        for _ in range(4):
            rows = module(torch.tensor([1]))
            seen[session.client.worker].append(rows[0, 0].item())
            (rows * (1 + session.client.worker)).sum().backward()
            session.step()

    run(work, sessions)
    assert seen == {0: [0.0, -1.0, -3.0, -4.0], 1: [0.0, -2.0, -3.0, -5.0]}


def test_the_end_of_a_loop_ends_a_round(make_job):
    job = make_job()
    session = job.worker(100)
    model = es.wrap(build(), session, optimizer=es.SGD(lr=0.1))
    before = model.rows.table.pull(torch.arange(ROWS))
    train(model, session.prefetch(batches(3)), session.step)
    assert not torch.equal(job.rows(model.rows.table.spec, list(range(ROWS))), before)


def test_leaving_a_session_ends_a_round(make_job):
    job = make_job()
    with job.worker(100) as session:
        es.Embedding(session.table(SPEC))(torch.tensor([1])).sum().backward()
        session.step()
    assert job.rows(SPEC, [1])[0, 0] == -1


def test_a_gradient_with_nan_leaves_its_copy_and_is_counted(make_job):
    job = make_job()
    session = job.worker(2)
    module = es.Embedding(session.table(SPEC))
    for factor in (float("nan"), 1.0):
        (module(torch.tensor([1, 2])) * torch.tensor([[1.0], [factor]])).sum().backward()
        session.step()
    assert job.rows(SPEC, [1, 2])[:, 0].tolist() == [-2.0, -1.0]
    assert session.stats.skipped_rows == 1


def test_max_norm_and_loads_change_the_copies_too(make_job):
    job = make_job()
    session = job.worker(2)
    plain = nn.Embedding(ROWS, 4, max_norm=0.5)
    values = plain.weight.detach().clone()
    model = nn.Sequential(plain)
    del plain
    es.wrap(model, session, optimizer=es.SGD(lr=0.0))
    ids = torch.arange(ROWS)
    model(ids).sum().backward()
    session.step()
    torch.testing.assert_close(model(ids).detach().norm(dim=1), values.norm(dim=1).clamp(max=0.5))
    table = model[0].table
    table.load(table.route(ids[:2]), np.ones((2, 4), np.float32))
    torch.testing.assert_close(table.pull(ids[:2]), torch.ones(2, 4))
    torch.testing.assert_close(job.rows(table.spec, [0, 1]), torch.ones(2, 4))


def test_a_row_that_max_norm_alone_has_changed_is_pushed(make_job):
    job = make_job()
    session = job.worker(1)
    model = es.wrap(nn.Sequential(nn.Embedding(ROWS, 4, max_norm=0.1)), session, optimizer=es.SGD(lr=0.0))
    with torch.no_grad():
        model(torch.tensor([1]))
    model(torch.tensor([2])).sum().backward()
    session.step()
    torch.testing.assert_close(job.rows(model[0].table.spec, [1]).norm().item(), 0.1)


def test_a_difference_is_taken_from_what_was_loaded(make_job):
    job = make_job()
    session = job.worker(1)
    module = es.Embedding(session.table(SPEC))
    module.table.load(module.table.route(torch.tensor([1])), np.full((1, 2), 5, np.float32))
    module(torch.tensor([1])).sum().backward()
    session.step()
    assert job.rows(SPEC, [1])[0, 0] == 4


@pytest.mark.parametrize("optimizer", [es.FTRL(lr=0.1), es.Custom(function="mine:step", lr=0.1)])
def test_an_optimizer_without_a_local_twin_is_refused_before_anything_is_declared(make_job, optimizer):
    job = make_job()
    session = job.worker(2)
    with pytest.raises(ValueError, match=f"adam, adamw, not {optimizer.name}"):
        es.wrap(build(), session, optimizer=optimizer)
    assert not job.shards[0].status().tables


def test_local_steps_refuse_what_contradicts_them(make_job):
    with pytest.raises(ValueError, match="cache_rows and connect"):
        make_job().worker(2).cache_rows()
    with pytest.raises(ValueError, match="local_steps must be at least 1"):
        es.connect("127.0.0.1:1", local_steps=0)
    with pytest.raises(ValueError, match="staleness_aware_lr"):
        es.connect("127.0.0.1:1", local_steps=2, workers=2, staleness_aware_lr=True)


def test_ids_keep_their_numbers_while_there_come_more():
    rng, index = np.random.default_rng(0), IdIndex()
    known: dict[int, int] = {}
    for size in (0, 1, 3000, 10, 50_000):
        ids = np.unique(rng.integers(-(2**62), 2**62, size) % 40_000 - 7)
        expected = [known.setdefault(id_, len(known)) for id_ in ids.tolist()]
        assert index.numbers(ids).tolist() == expected
        assert index.ids.tolist() == list(known)
