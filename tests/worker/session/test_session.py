import copy
import dataclasses
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.errors import ClientClosed, TableMismatch
from embershard.proto.messages import GetStatus, Pull, Push
from embershard.proto.protobuf import dumps, loads
from embershard.ps.coordination.pushes import RouteCache
from embershard.worker.session import gradients
from harness.wires import PATIENCE

SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
IDS = torch.tensor([1, 2, 1])


def test_a_step_pushes_the_gradient_and_the_next_read_sees_it(make_session):
    session = make_session(2)
    module = es.Embedding(session.table(SPEC))
    module(IDS).sum().backward()
    session.step()
    assert (session.stats.pushed_rows, session.clock) == (2, 1)
    torch.testing.assert_close(module(IDS).detach()[:, 0], torch.tensor([-2.0, -1.0, -2.0]))


def test_a_step_without_gradients_sends_nothing(make_wires):
    wires = make_wires(2)
    session = wires.session()
    es.Embedding(session.table(SPEC))(IDS)
    session.step()
    assert session.clock == 1
    assert not wires.sent(Push)


def test_gradients_of_several_backwards_accumulate_until_the_step(make_session):
    session = make_session(2)
    module = es.Embedding(session.table(SPEC))
    module(IDS).sum().backward()
    loss = module(IDS).sum()
    loss.backward(retain_graph=True)
    loss.backward()  # through one graph twice
    session.step()
    torch.testing.assert_close(module.table.pull(IDS)[:, 0], torch.tensor([-6.0, -3.0, -6.0]))


def test_a_forward_without_a_backward_leaves_nothing_behind(make_session):
    session = make_session(1)
    module = es.Embedding(session.table(SPEC))
    out = module(IDS)
    node = out.grad_fn.next_functions[0][0]
    leaf = weakref.ref(node.variable)
    del node
    assert leaf() is not None
    del out
    gc.collect()
    assert leaf() is None


def test_no_grad_and_inference_read_the_same_rows_and_record_nothing(make_session):
    session = make_session(2)
    module = es.Embedding(session.table(SPEC))
    module(IDS).sum().backward()
    session.step()
    expected = module(IDS).detach()
    with torch.no_grad():
        out = module(IDS)
    assert not out.requires_grad
    with torch.inference_mode():
        inferred = module(IDS + 0)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(inferred.clone(), expected)
    session.step()
    assert session.stats.pushed_rows == 2  # of the first step


@pytest.mark.parametrize(
    "drop", [lambda session: session.skip(), lambda session: (session.zero_grad(), session.step())]
)
def test_a_skipped_step_and_dropped_gradients_move_the_clock_and_no_weight(make_session, drop):
    session = make_session(2)
    model = es.wrap(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), session, optimizer=es.SGD(lr=1.0))
    before = model(IDS)
    before.sum().backward()
    drop(session)
    assert (session.clock, session.stats.pushed_rows) == (1, 0)
    torch.testing.assert_close(model(IDS), before, rtol=0, atol=0)


def test_a_factor_of_the_learning_rate_arrives_to_the_last_bit(make_wires):
    wires = make_wires(1)
    session = wires.session()
    module = es.Embedding(session.table(SPEC))
    for scales in (None, {"t": 1 / 3}):
        session.lr_scale = 0.1
        module(IDS).sum().backward()
        session.step(scales)
    arrived = [part.lr_scale for push in wires.sent(Push) for part in loads(Push, dumps(push)).tables]
    assert arrived == [0.1, 1 / 3 * 0.1]


class TwoTables(nn.Module):
    """Reads two tables by one tensor of ids, and has dense weights."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Embedding(50, 1), nn.Embedding(50, 4)
        self.head = nn.Linear(4, 1)

    def embedding_inputs(self, ids):
        return {"wide": ids, "deep": ids}

    def forward(self, ids):
        logits = self.wide(ids) + self.head(self.deep(ids))
        return logits.squeeze(-1)


SPACES = {"wide": "features", "deep": "features"}


def test_a_step_is_one_pull_and_one_push_per_shard_that_names_the_ids_of_its_pull(make_wires):
    wires = make_wires(2)
    session = wires.session()
    model = es.wrap(TwoTables(), session, optimizer=es.SGD(lr=0.1), id_space=SPACES)
    for _ in range(2):
        for wire in wires.wires:
            wire.seen.clear()
        model(torch.arange(40)).sum().backward()
        session.step()
        for wire in wires.wires:
            assert [type(request) for request in wire.seen] == [Pull, Push]
            numbers, pushed = ({part.table: part.route for part in request.tables} for request in wire.seen)
            assert numbers.keys() == {"wide", "deep", "dense"}
            assert pushed == numbers
            assert len(set(numbers.values()) - {0}) == len(numbers)
    with torch.no_grad():  # no push follows
        model(torch.arange(40))
    assert {part.route for pull in wires.sent(Pull)[-2:] for part in pull.tables} == {0}


def test_ids_that_a_shard_dropped_are_sent_again(make_shards, make_session):
    shards = make_shards(2)
    session = make_session(shards=shards)
    table = session.table(SPEC)
    es.Embedding(table)(IDS).sum().backward()
    for shard in shards:
        shard._routes = RouteCache()
    session.step()
    assert session.stats.pushed_rows == 2
    torch.testing.assert_close(table.pull(IDS)[:, 0], torch.tensor([-2.0, -1.0, -2.0]))


def test_ids_changed_in_place_are_read_anew(make_session):
    class Shifted(TwoTables):
        def forward(self, ids):
            ids += 1  # what embedding_inputs promised no longer holds
            return super().forward(ids)

    plain, shifted = TwoTables(), Shifted()
    shifted.load_state_dict(plain.state_dict())
    session = make_session(2)
    es.wrap(shifted, session, optimizer=es.SGD(lr=0.1))
    torch.testing.assert_close(shifted(torch.arange(10)), plain(torch.arange(1, 11)))


def test_nothing_read_ahead_outlives_the_forward(make_session):
    session = make_session(2)
    model = es.wrap(TwoTables(), session, optimizer=es.SGD(lr=0.1))
    model(torch.arange(10))
    assert not session._prefetched.forward

    class Failing(TwoTables):
        def forward(self, ids):
            raise KeyError("in the middle")

    failing = es.wrap(Failing(), session, optimizer=es.SGD(lr=0.1), prefix="f/")
    with pytest.raises(KeyError):
        failing(torch.arange(10))
    assert not session._prefetched.forward


def test_the_creator_loads_the_values_and_others_take_them(make_shards, make_session):
    shards = make_shards(2)
    sessions = [make_session(shards=shards, worker=k) for k in range(2)]
    models = [nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 1)) for _ in sessions]  # two sets of random values
    expected = copy.deepcopy(models[0])(torch.arange(30))
    for model, session in zip(models, sessions, strict=True):
        es.wrap(model, session, optimizer=es.SGD(lr=0.1))
    for model in models:
        torch.testing.assert_close(model(torch.arange(30)), expected)


def test_workers_that_start_together_agree_on_the_values(make_wires):
    wires, outs = make_wires(), []

    def work(session):
        model = nn.Sequential(nn.Embedding(3000, 4), nn.Linear(4, 1))  # with values of its own
        outs.append(es.wrap(model, session, optimizer=es.SGD(lr=0.1))(torch.arange(3000)).detach())

    for worker in range(3):
        wires.session(worker)
    wires.run(work)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_dense_weights_follow_other_workers_with_the_clock_and_on_refresh(make_shards, make_session):
    shards = make_shards(2)
    sessions = [make_session(shards=shards, worker=k) for k in range(2)]
    models = [es.wrap(nn.Linear(3, 1, bias=False), session, optimizer=es.SGD(lr=1.0)) for session in sessions]
    x = torch.ones(1, 3)
    before = models[1](x).detach()
    models[0](x).sum().backward()
    sessions[0].step()
    torch.testing.assert_close(models[1](x).detach(), before)  # the same clock: the same weights
    sessions[1].refresh()
    torch.testing.assert_close(models[1](x).detach(), before - 3)
    models[0](x).sum().backward()
    sessions[0].step()
    sessions[1].step()
    torch.testing.assert_close(models[1](x).detach(), before - 6)


def test_stats_count_rows_bytes_and_waiting(make_session):
    session = make_session(2)
    module = es.Embedding(session.table(SPEC))
    module(IDS).sum().backward()
    session.step()
    stats = session.stats
    assert (stats.pulled_rows, stats.pushed_rows, stats.skipped_rows) == (2, 2, 0)
    assert stats.sent_bytes == 2 * 8 + 2 * 8  # ids, and gradients by the number of these ids
    assert stats.received_bytes >= 2 * 8
    assert stats.wait_seconds > 0
    module(IDS).sum().backward()
    session.step()
    assert (session.stats.pushed_rows, stats.pushed_rows) == (4, 2)  # what was read stays as it was


def test_a_table_declared_twice_is_one_table_and_other_settings_are_refused(make_session):
    session = make_session(2)
    assert session.table(SPEC) is session.table(SPEC)
    with pytest.raises(TableMismatch, match="dim: 2, not 3"):
        session.table(es.TableSpec(name="t", dim=3, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0)))


def test_sessions_and_wrapped_models_refuse_to_be_copied(make_session):
    session = make_session(1)
    model = es.wrap(nn.Sequential(nn.Embedding(5, 2)), session, optimizer=es.SGD(lr=1.0))
    with pytest.raises(TypeError, match="copy the model before wrapping it"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="holds connections"):
        copy.deepcopy(session)


def test_close_says_how_many_rows_a_codec_held_back_unless_they_were_sent(caplog):
    def train(session):
        module = es.Embedding(session.table(SPEC))
        (module(IDS) * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum().backward()
        session.step()
        return module

    compression = es.Compression(push="topk:0.25")
    session = es.local(2, compression=compression)
    train(session)
    held = session.client.compressor.residual_rows()
    assert held["t"] > 0
    session.close()
    assert [(record.args[0], record.args[1]) for record in caplog.records] == [("t", held["t"])]
    caplog.clear()
    session = es.local(2, compression=compression)
    module = train(session)
    session.compress("*", push="none")
    session.step()
    plain = train(es.local(2))
    torch.testing.assert_close(module.table.pull(IDS), plain.table.pull(IDS))
    session.close()
    assert not caplog.records


def test_a_forgotten_step_is_said_while_training_and_at_the_end(make_session, caplog, monkeypatch):
    monkeypatch.setattr("embershard.worker.session.gradients._MANY_BACKWARDS", 5)
    monkeypatch.setattr("embershard.worker.session.gradients._MANY_PARTS", 3)
    for backwards, steps, said in ((4, 0, [4]), (7, 0, [5]), (4, 1, []), (1, 0, [])):
        caplog.clear()
        with make_session(1) as session:
            model = es.wrap(nn.Embedding(10, 2), session, optimizer=es.SGD(lr=0.1))
            for number in range(backwards):
                (model(torch.tensor([number])) + model(torch.tensor([0]))).sum().backward()
                assert len(session._collected) < 3
            assert torch.equal(model.weight.grad[:, 0].nonzero().flatten(), torch.arange(backwards))
            for _ in range(steps):
                session.step()
        assert [record.args[0] for record in caplog.records] == said


def test_gradients_of_more_tables_than_are_kept_apart_are_summed_seldom(make_session, monkeypatch):
    merges, merge = [], gradients.merge
    monkeypatch.setattr(gradients, "_MANY_PARTS", 3)
    monkeypatch.setattr(gradients, "merge", lambda *arguments: merges.append(1) or merge(*arguments))
    with make_session(1) as session:
        modules = [es.Embedding(session.table(dataclasses.replace(SPEC, name=f"t{k}"))) for k in range(12)]
        for _ in range(3):
            sum(module(IDS).sum() for module in modules).backward()
            assert len(session._collected) < 24
        session.step()
        for module in modules:
            torch.testing.assert_close(module.table.pull(IDS)[:, 0], torch.tensor([-6.0, -3.0, -6.0]))
    assert len(merges) < 8  # of 36 parts


def test_a_table_whose_first_values_are_there_is_not_asked_for(make_wires):
    """A shard's status is of all its tables."""
    wires = make_wires(2)
    for worker in range(2):
        session = wires.session(worker)
        for number in range(3):
            es.wrap(nn.Embedding(4, 2), session, optimizer=es.SGD(lr=0.1), prefix=f"{number}/")
    assert not wires.sent(GetStatus)


def test_two_threads_cannot_step_with_one_session_at_a_time(make_wires):
    wires = make_wires(1)
    session = wires.session()
    module, sent, go_on = es.Embedding(session.table(SPEC)), threading.Event(), threading.Event()

    def hold(request):
        if isinstance(request, Push):
            sent.set()
            assert go_on.wait(PATIENCE)

    wires.hold(hold)
    module(IDS).sum().backward()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(session.step)
        assert sent.wait(PATIENCE)
        with pytest.raises(RuntimeError, match="another thread"):
            session.step()
        go_on.set()
        first.result(PATIENCE)
    session.step()
    assert session.clock == 2


def test_a_prefetch_loop_whose_session_another_thread_closes_raises(make_session):
    session, asked = make_session(1), threading.Event()

    def loader():
        yield IDS
        asked.set()
        while session._prefetcher is not None:  # as if the next batch took long
            time.sleep(0.001)

    def train():
        for _ in session.prefetch(loader(), inputs=lambda ids: {"t": ids}):
            pass

    session.table(SPEC)
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(train)
        assert asked.wait(PATIENCE)
        time.sleep(0.1)  # until the loop waits for that batch
        session.close()
        with pytest.raises(ClientClosed):
            loop.result(PATIENCE)
