"""Local steps: a worker's own copies follow torch's optimizers, and shards see the differences of a round."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.messages import Pull, Push
from embershard.worker.client.membership import Terms
from embershard.worker.kernels import IdIndex
from embershard.worker.session.session import Session
from harness.models import SumModel
from harness.wires import PATIENCE

ROWS = 30
SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))


def start(wires, steps, terms=None):
    """One more worker, that takes so many local steps a round."""
    return wires.session(len(wires.sessions), terms, local_steps=steps)


def begin(make_wires, steps):
    wires = make_wires()
    session = start(wires, steps)
    return wires, session, es.Embedding(session.table(SPEC))


def shard_rows(wires, spec, ids):
    return Session(wires.client(99)).table(spec).pull(torch.tensor(ids))


def build():
    torch.manual_seed(0)
    return SumModel(ROWS)


def batches(count):
    """Every batch reads every row, so that a row's step counter is torch's."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randperm(ROWS, generator=generator).view(-1, 3), torch.rand(ROWS // 3, generator=generator))
        for _ in range(count)
    ]


def train(model, data, step):
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
    make_wires, case,
    prefetched,
):  # fmt: skip
    optimizer, in_torch = case
    session, theirs, data = start(make_wires(), 4), build(), batches(10)
    mine = es.wrap(build(), session, optimizer=optimizer)
    train(mine, session.prefetch(data) if prefetched else data, session.step)
    reference = in_torch(theirs.parameters())
    train(theirs, data, lambda: (reference.step(), reference.zero_grad()))
    session.flush()  # the last round has two steps
    session.refresh()
    with torch.no_grad():
        torch.testing.assert_close(mine(data[0][0]), theirs(data[0][0]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.rows.table.pull(torch.arange(ROWS)), theirs.rows.weight.data, atol=1e-5, rtol=1e-5)


def test_local_clips_are_those_of_the_shards(make_wires):
    clipped = es.SGD(lr=1.0, clip_value=0.5, clip_norm=0.6)
    results = []
    for steps in (None, 1):
        wires = make_wires()
        session = es.local(2) if steps is None else start(wires, steps)
        spec = es.TableSpec(name="t", dim=2, optimizer=clipped, initializer=es.Constant(value=0.0))
        module = es.Embedding(session.table(spec))
        (module(torch.tensor([1, 2, 3])) * torch.tensor([[0.1, 3.0], [0.1, 0.1], [3.0, 0.5]])).sum().backward()
        session.step()
        results.append(module.table.pull(torch.tensor([1, 2, 3])))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0].norm(dim=1).tolist(), [0.26**0.5, 0.02**0.5, 0.6])


def test_local_steps_follow_the_schedule_of_each_table(make_wires):
    session = start(make_wires(), 4)
    module = es.Embedding(session.table(SPEC))
    session.lr_scale = 0.5
    for scales in (None, {"t": 0.5}, {"another": 9.0}):
        module(torch.tensor([1])).sum().backward()
        session.step(scales)
    assert module(torch.tensor([1]))[0, 0] == -0.5 - 0.25 - 0.5


def test_shards_hear_once_per_round_of_what_has_changed(make_wires):
    wires, session, module = begin(make_wires, 3)
    wires.heard.clear()
    for count in (1, 2):
        module(torch.tensor([1, 2])).sum().backward()
        session.step()
        assert module(torch.tensor([1])).detach()[0, 0] == -count
    assert shard_rows(wires, SPEC, [1])[0, 0] == 0
    module(torch.tensor([2, 3])).sum().backward()
    session.step()
    assert shard_rows(wires, SPEC, [1, 2, 3])[:, 0].tolist() == [-2.0, -3.0, -1.0]
    pulled = [id_ for r in wires.sent(Pull, worker=0) for part in r.tables for id_ in part.ids.tolist()]
    assert sorted(pulled) == [1, 2, 3]
    pushes = wires.sent(Push)
    assert all(push.difference for push in pushes)
    assert {push.clock for push in pushes} == {0}


def test_a_round_pushes_no_change_of_the_one_before(make_wires):
    wires, session, module = begin(make_wires, 1)
    for row in (1, 2, 3):
        module(torch.tensor([row])).sum().backward()
        session.step()
    assert shard_rows(wires, SPEC, [1, 2, 3])[:, 0].tolist() == [-1.0] * 3


def test_a_round_in_which_no_step_was_made_does_not_end(make_wires):
    wires = make_wires()
    session = start(wires, 1, Terms(staleness=0))
    es.Embedding(session.table(SPEC))(torch.tensor([1])).sum().backward()
    session.step()
    session.flush()
    assert {wire.shard.status().clock for wire in wires.wires} == {1}


def test_a_round_is_that_of_the_clock_at_which_the_worker_joined(make_wires):
    wires = make_wires()
    session = start(wires, 1, Terms(staleness=0))
    session.membership.resume(6)
    es.Embedding(session.table(SPEC))(torch.tensor([1])).sum().backward()
    session.step()
    assert {push.clock for push in wires.sent(Push)} == {6}
    assert shard_rows(wires, SPEC, [1])[0, 0] == -1


def test_a_step_on_rows_of_the_round_before_is_not_lost(make_wires):
    wires = make_wires()
    session = start(wires, 100)
    module, ids = es.Embedding(session.table(SPEC)), torch.tensor([1])
    early = module(ids)
    module(ids).sum().backward()
    session.step()
    session.flush()
    early.sum().backward()
    session.step()
    assert module(ids)[0, 0] == -2
    session.flush()
    assert shard_rows(wires, SPEC, [1])[0, 0] == -2


def test_rows_that_arrive_late_take_no_step_back(make_wires, monkeypatch):
    session = start(make_wires(), 100)
    table, local, pull = session.table(SPEC), session.local_steps, session.client.pull
    route = table.route(torch.tensor([1]))

    def slow(*reads, **how):
        monkeypatch.setattr(session.client, "pull", pull)
        rows = pull(*reads, **how)
        local.push([("t", route, np.ones((1, 2), np.float32))], clock=0)  # by another thread, meanwhile
        return rows

    monkeypatch.setattr(session.client, "pull", slow)
    local.pull([("t", route)])
    assert table.pull(torch.tensor([1]))[0, 0] == -1


def test_a_round_takes_fresh_rows(make_wires):
    wires = make_wires()
    mine, other = (start(wires, steps, Terms(workers=2)) for steps in (2, 1))
    table, others = mine.table(SPEC), es.Embedding(other.table(SPEC))
    ids = torch.tensor([1])
    es.Embedding(table)(ids).sum().backward()
    mine.step()
    others(ids).sum().backward()
    other.step()
    assert table.pull(ids)[0, 0] == -1  # its own copy, in the middle of a round
    mine.flush()
    assert table.pull(ids)[0, 0] == -1.0  # half of each


def test_rows_of_a_round_that_is_over_are_not_kept_for_the_next(make_wires):
    wires = make_wires()
    mine, other = (start(wires, steps, Terms(workers=2)) for steps in (100, 1))
    table, ids = mine.table(SPEC), torch.tensor([2])
    es.Embedding(table)(torch.tensor([1])).sum().backward()
    mine.step()
    pulled, go_on = threading.Event(), threading.Event()

    def slow(request):
        if isinstance(request, Pull) and request.worker == 0 and not pulled.is_set():
            pulled.set()
            assert go_on.wait(PATIENCE)

    wires.hold(after=slow)
    thread = threading.Thread(target=lambda: mine.local_steps.pull([("t", table.route(ids))]))
    thread.start()
    assert pulled.wait(PATIENCE)
    mine.flush()  # while the rows are on their way
    go_on.set()
    thread.join(PATIENCE)
    es.Embedding(other.table(SPEC))(ids).sum().backward()
    other.step()
    assert table.pull(ids)[0, 0] == -0.5


@pytest.mark.parametrize("staleness", [0, None])
def test_the_differences_of_several_workers_are_averaged(make_wires, staleness):
    wires = make_wires()
    for _ in range(2):
        start(wires, 3, Terms(workers=2, staleness=staleness))

    def work(session):
        module = es.Embedding(session.table(SPEC))
        for _ in range(3):
            (module(torch.tensor([1, 5 + session.client.worker])) * (1 + session.client.worker)).sum().backward()
            session.step()

    wires.run(work)
    # three steps of 1 and of 2; the other rows are one worker's alone
    assert shard_rows(wires, SPEC, [1, 5, 6])[:, 0].tolist() == [-4.5, -1.5, -3.0]


def test_the_differences_of_synchronous_workers_weigh_as_their_steps_do(make_wires):
    wires = make_wires()
    for _ in range(3):
        start(wires, 2, Terms(workers=3, staleness=0))

    def work(session):
        module = es.Embedding(session.table(SPEC))
        worker = session.client.worker
        for weight in (3, 1):
            if worker == 2:
                session.skip()
                continue
            (module(torch.tensor([1])) * (1 + worker)).sum().backward()
            session.step(weight=weight * (1 + worker))

    wires.run(work)
    # two steps of 1 that weigh 4, two of 2 that weigh 8, and nothing that weighs 0
    assert shard_rows(wires, SPEC, [1])[0, 0].item() == pytest.approx(-(4 * 2 + 8 * 4) / 12)


def test_synchronous_local_steps_read_the_average_of_the_round_before(make_wires):
    wires = make_wires()
    for _ in range(2):
        start(wires, 2, Terms(workers=2, staleness=0))
    seen = {0: [], 1: []}

    def work(session):
        module = es.Embedding(session.table(SPEC))
        for _ in range(4):
            rows = module(torch.tensor([1]))
            seen[session.client.worker].append(rows[0, 0].item())
            (rows * (1 + session.client.worker)).sum().backward()
            session.step()

    wires.run(work)
    assert seen == {0: [0.0, -1.0, -3.0, -4.0], 1: [0.0, -2.0, -3.0, -5.0]}


@pytest.mark.parametrize("end", ["loop", "session"])
def test_the_end_of_a_loop_or_a_session_ends_a_round(make_wires, end):
    wires = make_wires()
    session = start(wires, 100)
    model = es.wrap(build(), session, optimizer=es.SGD(lr=0.1))
    before = model.rows.table.pull(torch.arange(ROWS))
    with session if end == "session" else nullcontext():
        train(model, session.prefetch(batches(3)) if end == "loop" else batches(3), session.step)
    assert not torch.equal(shard_rows(wires, model.rows.table.spec, list(range(ROWS))), before)


def test_a_gradient_with_nan_leaves_its_copy_and_is_counted(make_wires):
    wires, session, module = begin(make_wires, 2)
    for factor in (float("nan"), 1.0):
        (module(torch.tensor([1, 2])) * torch.tensor([[1.0], [factor]])).sum().backward()
        session.step()
    assert shard_rows(wires, SPEC, [1, 2])[:, 0].tolist() == [-2.0, -1.0]
    assert session.stats.skipped_rows == 1


def test_max_norm_and_loads_change_the_copies_too(make_wires):
    wires = make_wires()
    session = start(wires, 2)
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
    torch.testing.assert_close(shard_rows(wires, table.spec, [0, 1]), torch.ones(2, 4))


def test_a_row_that_max_norm_alone_has_changed_is_pushed(make_wires):
    wires = make_wires()
    session = start(wires, 1)
    model = es.wrap(nn.Sequential(nn.Embedding(ROWS, 4, max_norm=0.1)), session, optimizer=es.SGD(lr=0.0))
    with torch.no_grad():
        model(torch.tensor([1]))
    model(torch.tensor([2])).sum().backward()
    session.step()
    torch.testing.assert_close(shard_rows(wires, model[0].table.spec, [1]).norm().item(), 0.1)


def test_a_difference_is_taken_from_what_was_loaded(make_wires):
    wires, session, module = begin(make_wires, 1)
    module.table.load(module.table.route(torch.tensor([1])), np.full((1, 2), 5, np.float32))
    module(torch.tensor([1])).sum().backward()
    session.step()
    assert shard_rows(wires, SPEC, [1])[0, 0] == 4


@pytest.mark.parametrize("optimizer", [es.FTRL(lr=0.1), es.Custom(function="mine:step", lr=0.1)])
def test_an_optimizer_without_a_local_twin_is_refused_before_anything_is_declared(make_wires, optimizer):
    wires = make_wires()
    session = start(wires, 2)
    with pytest.raises(ValueError, match=f"adam, adamw, not {optimizer.name}"):
        es.wrap(build(), session, optimizer=optimizer)
    assert not wires.wires[0].shard.status().tables


def test_local_steps_refuse_what_contradicts_them(make_wires):
    with pytest.raises(ValueError, match="cache_rows and connect"):
        start(make_wires(), 2).cache_rows()
    with pytest.raises(ValueError, match="local_steps must be at least 1"):
        es.connect("127.0.0.1:1", local_steps=0)
    with pytest.raises(ValueError, match="staleness_aware_lr"):
        es.connect("127.0.0.1:1", local_steps=2, workers=2, staleness_aware_lr=True)


def test_ids_keep_their_numbers_while_there_come_more():
    rng, index = np.random.default_rng(0), IdIndex()
    known = {}
    for size in (0, 1, 3000, 10, 50_000):
        ids = np.unique(rng.integers(-(2**62), 2**62, size) % 40_000 - 7)
        expected = [known.setdefault(id_, len(known)) for id_ in ids.tolist()]
        assert index.numbers(ids).tolist() == expected
        assert index.ids.tolist() == list(known)
