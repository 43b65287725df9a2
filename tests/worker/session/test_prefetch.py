"""Training ahead of itself: the same weights as without prefetch at staleness 0, and pulls in an order that shows."""

import copy
import gc
import itertools
import os
import random
import signal
import threading
import time
import traceback
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import embershard as es
from embershard.proto.errors import ClientClosed, InvalidRequest, UnknownTable
from embershard.proto.messages import Pull, Push
from embershard.worker.kernels import overlap
from embershard.worker.session.dense import ParameterChanged
from harness.models import skewed_pairs
from harness.wires import PATIENCE, reads

ROWS = 60
pairs = partial(skewed_pairs, num_rows=ROWS)


@pytest.fixture
def wire(make_wires):
    """Wires to so many shards, and a session over them."""

    def make(shards):
        wires = make_wires(shards)
        return wires, wires.session()

    return make


def pushes(clock):
    return lambda r: isinstance(r, Push) and r.clock == clock


@pytest.fixture(autouse=True)
def _threads_end():
    def left():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("embershard pu")]

    yield
    if left():
        gc.collect()  # an error's traceback may hold a loop that it left
    assert not left()


class Net(nn.Module):
    """Two tables read by one tensor, one by a view of it, a padding row, and dense weights."""

    def __init__(self, max_norm=None, announce=None):
        super().__init__()
        self.users = nn.Embedding(ROWS, 4, padding_idx=0, max_norm=max_norm)
        self.items = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.wide = nn.Embedding(ROWS, 1)
        self.head = nn.Linear(8, 1)
        if announce is not None:
            self.embedding_inputs = announce

    def forward(self, ids):
        deep = self.head(torch.cat([self.users(ids[:, 0]), self.items(ids)], 1))
        return deep.squeeze(1) + self.wide(ids).sum((1, 2))


def everything(ids):
    return {"users": ids[:, 0], "items": ids, "wide": ids}


Announcing = partial(Net, announce=everything)
# one table, and another with the wrong ids
Partly = partial(Net, announce=lambda ids: {"users": ids[:, 1], "items": ids})


def weights(model):
    """Every weight as the shards have it."""
    modules = [m for m in model.modules() if isinstance(m, es.Embedding | es.EmbeddingBag)]
    session = modules[0].table.session
    session.refresh()
    model.eval()
    model(torch.zeros(1, 3, dtype=torch.int64))
    rows = [module.table.pull(torch.arange(ROWS)) for module in modules]
    return rows + [parameter.detach().clone() for parameter in model.parameters()]


def train(model, session, loader):
    losses = []
    for step, (ids, target) in enumerate(loader):
        session.lr_scale = 1 / (1 + step)
        loss = (model(ids) - target).square().mean()
        loss.backward()
        session.step()
        losses.append(loss.item())
    return losses


def sleepy(seed):
    dice = random.Random(seed)
    return lambda _: time.sleep(dice.choice([0, 0, 0, 0.0005, 0.001]))


def check_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def wrapped(build, session, optimizer):
    torch.manual_seed(0)
    return es.wrap(build(), session, optimizer=optimizer, id_space={"items": "x", "wide": "x"})


@pytest.mark.parametrize(
    ("shards", "optimizer", "max_norm"),
    [(1, es.Adagrad(lr=0.1), 1.0), (2, es.Adam(lr=0.1), None)],
    ids=["adagrad, max_norm", "adam"],
)
@pytest.mark.parametrize("kind", [Announcing, Partly, Net], ids=["announcing", "partly", "silent"])
def test_at_staleness_0_the_weights_have_the_bits_of_a_loop_without_prefetch(wire, shards, optimizer, max_norm, kind):
    results = []
    for prefetched in (False, True):
        wires, session = wire(shards)
        model = wrapped(lambda: kind(max_norm), session, optimizer)
        wires.hold(sleepy(1), sleepy(2))
        loader = pairs()
        if prefetched:
            inputs = None if kind is not Net else (lambda batch: {"wide": batch[0]})
            loader = session.prefetch(loader, inputs=inputs)
        losses = train(model, session, loader)
        results.append([torch.tensor(losses), *weights(model)])
    check_same(*results)


def test_what_was_pulled_ahead_is_found_by_views_and_copies_of_the_ids(wire):
    wires, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    train(model, session, ((ids.clone(), target) for ids, target in session.prefetch(pairs())))
    assert session.missed_reads == 0
    # with staleness above 0 a batch is one pull and one push per shard
    wires.heard.clear()
    train(model, session, session.prefetch(pairs(), staleness=1))
    kinds = [type(request) for said, request in wires.heard if said == "sent"]
    assert (kinds.count(Pull), kinds.count(Push)) == (8 * 2, 8 * 2)


def train_plain(model, session, loader):
    for ids in loader:
        model(ids).sum().backward()
        session.step()


def own_and_shared(count):
    """Batch t reads id 100 + t, and id 1 as all others do."""
    return [torch.tensor([1, 100 + t]) for t in range(count)]


def test_at_staleness_0_rows_of_their_own_come_during_the_batch_before_and_shared_ones_after_its_push(wire):
    wires, session = wire(1)
    model = net_of_ids(session)
    wires.heard.clear()
    count = 5
    for t, ids in enumerate(session.prefetch(own_and_shared(count))):
        if t + 1 < count:
            wires.wait("answered", reads("table", 101 + t))
        model(ids).sum().backward()
        session.step()
    for t in range(1, count):
        own = wires.when("answered", reads("table", 100 + t))
        assert own < wires.when("sent", pushes(t - 1))
        acknowledged = wires.when("answered", pushes(t - 1))
        later = [r for said, r in wires.heard[own + 1 : wires.when("sent", pushes(t))] if said == "sent"]
        shared = [r for r in later if reads("table", 1)(r)]
        assert len(shared) == 1
        assert wires.when("sent", lambda r, it=shared[0]: r is it) > acknowledged
        assert reads("dense")(shared[0])
        assert not reads("table", 100 + t)(shared[0])


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_staleness_is_used_and_never_exceeded(wire, staleness):
    wires, session = wire(1)
    model = net_of_ids(session)
    wires.heard.clear()
    count = 9

    def hold(request):
        # a push is acknowledged once as many batches were pulled without it as may be
        if isinstance(request, Push) and request.clock + staleness < count:
            wires.wait("answered", reads("table", 100 + request.clock + staleness))

    wires.hold(after=hold)
    for ids in session.prefetch(own_and_shared(count), staleness=staleness):
        model(ids).sum().backward()
        session.step()
    for t in range(count):
        pulled = wires.when("sent", reads("table", 100 + t))
        if t - 1 - staleness >= 0:
            assert wires.when("answered", pushes(t - 1 - staleness)) < pulled
        if t - staleness >= 0:
            assert pulled < wires.when("answered", pushes(t - staleness))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_does_not_wait_for_its_push_but_for_a_permit(wire, staleness):
    wires, session = wire(1)
    model = net_of_ids(session)
    stepped = threading.Event()
    wires.hold(after=lambda r: isinstance(r, Push) and not stepped.wait(PATIENCE))
    for ids in session.prefetch(own_and_shared(1), staleness=staleness):
        for _ in range(staleness + 1):  # as many pushes may be in flight
            model.head.bias.grad = torch.ones(1)  # without a forward, which would wait for the pushes before it
            session.step()
        assert wires.when("answered", pushes(0)) < 0
        stepped.set()
        session.step()
        assert wires.when("answered", pushes(0)) >= 0
        assert len(ids) == 2
    assert session.clock == staleness + 2


def test_a_push_carries_the_gradients_the_clock_and_the_rate_of_its_step(wire):
    pushed = []
    for prefetched in (False, True):
        wires, session = wire(1)
        model = wrapped(Announcing, session, es.SGD(lr=0.0))  # the same weights, however late pushes are
        seen = {}

        def note(request, seen=seen):
            if isinstance(request, Push):
                time.sleep(0.01)  # as if it were sent only now
                seen[request.clock] = [(p.table, p.lr_scale, p.ids.copy(), p.gradients.copy()) for p in request.tables]

        wires.hold(note)
        loader = pairs()
        train(model, session, session.prefetch(loader, staleness=2) if prefetched else loader)
        pushed.append(seen)
    assert pushed[0].keys() == pushed[1].keys()
    for clock, parts in pushed[0].items():
        for mine, other in zip(parts, pushed[1][clock], strict=True):
            assert mine[:2] == other[:2]
            np.testing.assert_array_equal(mine[2], other[2])
            np.testing.assert_array_equal(mine[3], other[3])


def accumulate(model, session, ids, target):
    (model(ids) - target).square().mean().backward()


def ordinary(model, session, ids, target):
    accumulate(model, session, ids, target)
    session.step()


def evaluate_between(model, session, ids, target):
    for step in (False, True):
        model.eval()
        with torch.no_grad():
            model(ids.flip(0) // 2)
        model.train()
        if step:
            ordinary(model, session, ids, target)
        session.refresh()


def load_rows(model, session, ids, target):
    table = model.wide.table
    for step in (True, False):
        route = table.route((ids + 3 + step) % ROWS)
        table.load(route, np.full((len(route.ids), 1), 0.25, np.float32))
        if step:
            ordinary(model, session, ids, target)


def skip(*_):
    pass


ACTS = {
    "ordinary": ordinary,
    "accumulate": accumulate,
    "drop": lambda model, session, *batch: (accumulate(model, session, *batch), session.zero_grad()),
    "skip": skip,
    "twice": lambda *step: (ordinary(*step), ordinary(*step)),
    "two forwards": lambda *step: (accumulate(*step), ordinary(*step)),
    "evaluate between": evaluate_between,
    "other ids": lambda model, session, ids, target: ordinary(model, session, (ids + 7) % ROWS, target),
    "in place": lambda model, session, ids, target: ordinary(model, session, ids.copy_((ids + 5) % ROWS), target),
    "load rows": load_rows,
}


OF_ROWS = ("ordinary", "evaluate between", "in place", "load rows")  # acts in which max_norm has a part


@pytest.mark.parametrize(("act", "max_norm"), [*((act, None) for act in ACTS), *((act, 0.5) for act in OF_ROWS)])
def test_whatever_a_loop_does_the_bits_are_the_same(wire, act, max_norm):
    compare_loops(wire, [ACTS[act], ordinary] * 4, max_norm, seed=0)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12))])
def test_random_loops_with_random_delays_have_the_same_bits(wire, seed):
    dice = random.Random(seed)
    acts = [dice.choice([ordinary, *ACTS.values()]) for _ in range(8)]
    compare_loops(wire, acts, dice.choice([None, 0.5]), seed)


def compare_loops(wire, acts, max_norm, seed):
    results = []
    for prefetched in (False, True):
        wires, session = wire(1 + seed % 2)
        model = wrapped(lambda: Announcing(max_norm), session, es.Adagrad(lr=0.3))
        if prefetched:
            wires.hold(sleepy(seed), sleepy(seed + 1))
        loader = copy.deepcopy(pairs(len(acts)))
        for act, (ids, target) in zip(
            itertools.chain(acts, [skip]), session.prefetch(loader) if prefetched else loader, strict=False
        ):
            act(model, session, ids, target)
        session.step()
        results.append(weights(model))
    check_same(*results)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_loader_may_be_shorter_than_the_staleness(wire, count, staleness):
    _, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    assert len(train(model, session, session.prefetch(pairs(count), staleness=staleness))) == count
    assert session.clock == count


def failing(request, clock):
    if isinstance(request, Push) and request.clock == clock:
        raise InvalidRequest(reason="told to")


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("clock", [2, 7])
def test_the_error_of_a_push_is_raised_by_the_loop(wire, clock, staleness):
    wires, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    wires.hold(lambda r: failing(r, clock))
    with pytest.raises(InvalidRequest, match="told to"):
        train(model, session, session.prefetch(pairs(8), staleness=staleness))
    assert clock < session.clock <= clock + 2 + staleness
    session.flush()  # raised once


def test_the_error_of_a_push_in_a_loop_that_was_left_is_raised_by_the_next_use(wire, caplog):
    wires, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    wires.hold(lambda r: failing(r, 2))
    for ids, _ in session.prefetch(pairs(), staleness=1):
        model(ids).sum().backward()
        session.step()
        if session.clock == 3:
            break
    assert "an error as the loop was left" in caplog.text
    with pytest.raises(InvalidRequest, match="told to"):
        session.flush()
    train(model, session, session.prefetch(pairs()))


def test_the_error_of_a_pull_is_raised_where_its_batch_would_come(wire):
    wires, session = wire(1)
    model = net_of_ids(session)

    def refuse(request):
        if reads("table", 102)(request):
            raise UnknownTable(table="table", known="none")

    wires.hold(refuse)
    with pytest.raises(UnknownTable):
        train_plain(model, session, session.prefetch(own_and_shared(5), staleness=1))
    assert session.clock == 2


def test_the_error_of_a_loader_has_its_own_traceback_after_the_batches_before_it(wire):
    def reading():
        yield from pairs(3)
        raise KeyError("a broken line")

    _, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    with pytest.raises(KeyError, match="a broken line") as caught:
        train(model, session, session.prefetch(reading(), staleness=2))
    assert session.clock == 3
    assert "reading" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_push_names_no_ids_of_a_pull_that_is_on_its_way(wire):
    wires, session = wire(1)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))

    def behind_the_first_push(request):
        if isinstance(request, Pull) and wires.when("answered", lambda r: isinstance(r, Pull)) >= 0:
            wires.wait("answered", pushes(0))

    wires.hold(before=behind_the_first_push)
    train(model, session, session.prefetch(pairs(3), staleness=1))
    assert sum(said == "sent" and pushes(0)(r) for said, r in wires.heard) == 1


def test_a_loop_that_is_left_waits_for_its_pushes_and_the_session_goes_on(wire):
    wires, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    wires.hold(after=lambda _: time.sleep(0.002))
    for ids, _ in session.prefetch(itertools.cycle(pairs()), staleness=2):
        model(ids).sum().backward()
        session.step()
        if session.clock == 5:
            break
    answered = [r.clock for said, r in wires.heard if said == "answered" and isinstance(r, Push)]
    assert sorted(answered) == sorted(push.clock for push in wires.sent(Push))
    assert max(answered) == 4
    train(model, session, pairs(2))
    assert session.clock == 7


def test_after_a_loop_that_was_left_dense_weights_show_every_push_as_rows_do(wire):
    _, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    for ids, _ in session.prefetch(itertools.cycle(pairs()), staleness=2):
        if session.clock == 5:
            break
        model(ids).sum().backward()
        session.step()
    shown = model.head.weight.detach().clone()
    session.refresh()
    check_same(shown, model.head.weight.detach())


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_change_of_dense_weights_is_an_error_after_a_loop_that_was_left(wire, staleness):
    _, session = wire(2)
    model = wrapped(Announcing, session, es.SGD(lr=0.1))
    for ids, _ in session.prefetch(pairs(), staleness=staleness):
        model(ids).sum().backward()
        with torch.no_grad():
            model.head.weight.mul_(2)
        break
    with pytest.raises(ParameterChanged):
        session.step()
    loop = session.prefetch(pairs(), staleness=staleness)
    model(next(loop)[0])
    with torch.no_grad():
        model.head.weight.mul_(2)
    session.close()
    with pytest.raises(ClientClosed):
        session.client.status()


@pytest.mark.parametrize("staleness", [0, 2])
def test_ctrl_c_ends_the_loop(wire, staleness):
    wires, session = wire(1)
    model = net_of_ids(session)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

    def press(request):
        if reads("table", 103)(request):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    wires.hold(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_plain(model, session, session.prefetch(own_and_shared(9), staleness=staleness))
    finally:
        signal.signal(signal.SIGINT, before)
    session.flush()
    model(torch.tensor([5])).sum().backward()
    session.step()


def test_a_loader_that_never_gives_its_next_batch_is_left_behind(wire, caplog):
    go_on = threading.Event()

    def stuck():
        yield torch.tensor([1])
        go_on.wait(PATIENCE)

    _, session = wire(1)
    model = net_of_ids(session)
    session.client.timeout /= 300  # a fifth of a second
    for ids in session.prefetch(stuck()):
        model(ids)
        break
    assert "its thread is left behind" in caplog.text
    thread = next(thread for thread in threading.enumerate() if thread.name == "embershard puller")
    go_on.set()
    thread.join(PATIENCE)


def test_closing_a_session_inside_the_loop_ends_it(wire):
    wires, session = wire(1)
    model = net_of_ids(session)
    loop = session.prefetch(own_and_shared(5))
    model(next(loop)).sum().backward()
    session.step()
    session.close()
    assert wires.when("answered", pushes(0)) >= 0
    assert next(loop, None) is None


def test_prefetch_in_a_prefetch_and_a_negative_staleness_are_refused(wire):
    _, session = wire(1)
    net_of_ids(session)
    with pytest.raises(ValueError, match="staleness must be at least 0, got -1"):
        session.prefetch([], staleness=-1)
    for _ in session.prefetch(own_and_shared(2)):
        with pytest.raises(RuntimeError, match="inside a prefetch loop already"):
            next(session.prefetch(own_and_shared(2)))


def test_where_nothing_says_what_a_batch_reads_the_remedy_is_named(wire):
    _, session = wire(1)
    with pytest.raises(ValueError, match=r"this session has 0 wrapped models; pass inputs="):
        session.prefetch([])
    wrapped(Net, session, es.SGD(lr=0.1))
    with pytest.raises(ValueError, match=r"give the model a method embedding_inputs.*inputs=lambda batch: {'users'"):
        session.prefetch([])
    es.wrap(Announcing(), session, optimizer=es.SGD(lr=0.1), prefix="second/")
    with pytest.raises(ValueError, match="2 wrapped models"):
        session.prefetch([])
    with pytest.raises(ValueError, match="inputs names 'nope', which is no embedding"):
        next(session.prefetch(pairs(), inputs=lambda batch: {"nope": batch[0]}))


def test_inputs_name_modules_of_one_model_and_tables_of_several(wire):
    _, session = wire(2)
    first = wrapped(Net, session, es.SGD(lr=0.1))
    train(first, session, session.prefetch(pairs(), inputs=lambda batch: everything(batch[0])))
    assert session.missed_reads == 0
    second = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1), prefix="second/")
    tables = lambda ids: {f"second/{name}": part for name, part in everything(ids).items()}  # noqa: E731
    train(second, session, session.prefetch(pairs(), inputs=lambda batch: tables(batch[0])))
    assert session.missed_reads == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_gives_its_parts_to_embedding_inputs(wire, num_workers):
    _, session = wire(1)
    model = net_of_ids(session)
    data = TensorDataset(torch.arange(12), torch.ones(12))
    loader = DataLoader(data, batch_size=4, num_workers=num_workers)
    for ids, targets in session.prefetch(loader):
        (model(ids).squeeze(1) - targets).sum().backward()
        session.step()
    assert (session.clock, session.missed_reads) == (3, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("staleness", [0, 2])
def test_rows_pulled_ahead_go_to_the_gpu(wire, staleness, gpu):
    curves = []
    for prefetched in (False, True):
        _, session = wire(2)
        model = wrapped(Announcing, session, es.SGD(lr=0.0 if staleness else 0.1)).to(gpu)
        loader = [(ids, target.to(gpu)) for ids, target in pairs()]
        if prefetched:
            loader = session.prefetch(loader, staleness=staleness)
        curves.append(train(model, session, loader))
        assert session.missed_reads == 0
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-4, atol=1e-6)  # a GPU sums in any order


def test_a_model_without_tables_has_its_dense_weights_prefetched(wire):
    wires, session = wire(1)
    model = es.wrap(nn.Linear(3, 1), session, optimizer=es.SGD(lr=0.1))
    model(torch.ones(1, 3))
    wires.heard.clear()
    for x in session.prefetch([torch.ones(1, 3)] * 3):
        model(x).sum().backward()
        session.step()
    assert [type(request) for said, request in wires.heard if said == "sent"] == [Pull, Push] * 3


def test_reads_that_were_not_announced_are_counted_and_told_of_once(wire, caplog):
    _, session = wire(1)
    model = net_of_ids(session)
    for _ in range(2):
        for ids in session.prefetch(own_and_shared(6)):
            model(ids + 1).sum().backward()
            session.step()
        if caplog.text:
            break
    assert session.missed_reads == 6
    assert caplog.text.count("prefetch pulls rows that the model does not read") == 1


def test_dense_weights_that_are_read_after_a_step_show_it(wire):
    session = wire(1)[1]
    model = net_of_ids(session)
    for ids in session.prefetch(own_and_shared(4), staleness=1):
        model(ids).sum().backward()
        before = model.head.weight.detach().clone()
        session.step()
        after = model.head.weight.detach().clone()
        session.refresh()
        assert torch.equal(model.head.weight, after)
        assert not torch.equal(after, before)


def test_a_refresh_inside_the_loop_holds_for_the_next_batch(wire):
    wires, session = wire(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    es.wrap(model, session, optimizer=es.SGD(lr=0.1))
    wires.heard.clear()
    blocks = lambda: [len(r.tables[0].ids) for said, r in wires.heard if said == "answered" and isinstance(r, Pull)]  # noqa: E731
    for number, x in enumerate(session.prefetch([torch.ones(1, 3)] * 4, staleness=1)):
        model(x).sum().backward()
        session.step()
        if number == 2:
            wires.wait("answered", lambda _: len(blocks()) == 4)  # what is here for the last batch is older
            session.refresh()
    assert len(blocks()) == 5
    assert blocks()[-2:] == [2, 4]  # the weight and the bias that are trained, and then frozen ones, too


@pytest.mark.parametrize("seed", range(5))
def test_overlap_is_that_of_sets(seed):
    rng = np.random.default_rng(seed)
    edges = np.array([0, -1, 2**63 - 1, -(2**63)])
    ids, others = (
        np.unique(np.concatenate([edges[: rng.integers(5)], rng.integers(-50, 50, rng.integers(0, 60))]))
        for _ in range(2)
    )
    np.testing.assert_array_equal(overlap(ids, others), np.isin(ids, others))


def net_of_ids(session):
    plain = nn.Sequential(OrderedDict(table=nn.Embedding(10_000, 2), head=nn.Linear(2, 1)))
    plain.embedding_inputs = lambda ids: {"table": ids}
    return es.wrap(plain, session, optimizer=es.SGD(lr=0.1))


def test_the_time_of_a_loader_is_waiting_for_data_only_while_training_waits_for_it(wire, monkeypatch):
    session, now, taken, loaded = wire(1)[1], [100.0], threading.Event(), threading.Event()
    model = es.wrap(Announcing(), session, optimizer=es.SGD(lr=0.1))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def loader():
        for number, (ids, _) in enumerate(pairs(4)):
            if number == 1:  # slow, while the batch before computes
                assert taken.wait(PATIENCE)
                now[0] += 3.0
                loaded.set()
            if number == 2:  # slow, and waited for
                while session._prefetcher._finished < number:
                    time.sleep(0.001)
                now[0] += 5.0
            yield ids

    for ids in session.prefetch(loader()):
        taken.set()
        assert loaded.wait(PATIENCE)
        model(ids).sum().backward()
        session.step()
    stats = session.stats
    assert (stats.data_wait_seconds, stats.workers_wait_seconds) == (5.0, 0.0)
    assert stats.wait_seconds == 5.0


def test_a_forward_has_no_backward_after_a_batch_with_other_dense_weights(make_session):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x)).square().sum()

    session = make_session(2)
    model = es.wrap(Dense(), session, optimizer=es.SGD(lr=0.1))
    loop = session.prefetch([torch.ones(2, 3)] * 6, staleness=1)
    first = next(loop)
    time.sleep(0.1)  # the second batch is pulled before the first one's push, and the third after it
    model(first).backward()
    session.step()
    before = model(next(loop))
    third = next(loop)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (before + model(third)).backward()
    session.zero_grad()
    same = model(third)
    (same + model(next(loop))).backward()  # no step came in between
    session.step()
    loop.close()
