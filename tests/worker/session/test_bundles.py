"""Tables that are read, pulled and pushed together: the bits of one table at a time, in every mode."""

import contextlib
import dataclasses
import gc
import itertools
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import embershard as es
from embershard.proto.messages import Pull, Push
from embershard.proto.routing import Placement, make_bundle, make_routes
from embershard.ps.shard import Shard
from embershard.worker.client import byte_counts
from embershard.worker.training.step import global_norm

ROWS, TABLES = 40, 5
OPTIMIZERS = {"tables.0": es.Adam(lr=0.1), "tables.1": es.SGD(lr=0.1, momentum=0.9), "*": es.Adagrad(lr=0.1)}


class Model(nn.Module):
    """Five tables, of which one has another dim, and what a forward makes of them."""

    def __init__(self, forward=None, rows=ROWS, dims=(4, 4, 4, 4, 3), **arguments):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(rows, dim, **arguments) for dim in dims)
        self.linear = nn.Linear(sum(dims), 1)
        self.use = forward or (lambda model, parts: model.linear(torch.cat(parts, -1)))

    def forward(self, ids):
        return self.use(self, [table(ids[..., i]) for i, table in enumerate(self.tables)])


class Announced(Model):
    """The same, of which it is known before a forward what it reads."""

    def embedding_inputs(self, ids):
        return {f"tables.{i}": ids[..., i] for i in range(TABLES)}


def batches(count=6, shape=(30,), rows=ROWS):
    draw = np.random.default_rng(0)
    return [torch.from_numpy(draw.integers(0, rows, (*shape, TABLES))) for _ in range(count)]


@pytest.fixture
def seen(monkeypatch):
    """The pulls and pushes that shards were sent."""
    requests = []
    handle = Shard.handle

    def watched(self, request, *arguments, **named):
        if isinstance(request, Pull | Push):
            requests.append(request)
        return handle(self, request, *arguments, **named)

    monkeypatch.setattr(Shard, "handle", watched)
    return requests


def bundles(requests, kind):
    return [part for request in requests if isinstance(request, kind) for part in request.tables if part.members]


def weights(session, model):
    """All rows of the tables, and the dense weights."""
    rows = [table.table.pull(torch.arange(ROWS)) for table in model.tables]
    return [*rows, *(parameter.detach().clone() for parameter in model.linear.parameters())]


def train(make, shards, data, *, prefetch=None, step=None, optimizer=OPTIMIZERS, **local):
    """The weights after a step for each batch."""
    with es.local(shards, **local) as session:
        model = es.wrap(make(), session, optimizer=optimizer, dense_optimizer=es.SGD(lr=0.1))
        for ids in data if prefetch is None else session.prefetch(data, staleness=prefetch):
            if step is None:
                model(ids).square().mean().backward()
                session.step()
            else:
                step(session, model, ids)
        return weights(session, model)


def check_equal(*results):
    for other in results[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("shards", "shape"), [(1, (30,)), (2, (30,)), (3, (4, 5)), (1, (0,)), (3, (0,)), (2, ())], ids=str
)
def test_a_bundle_trains_to_the_bits_of_one_table_at_a_time(shards, shape, seen):
    data = batches(shape=shape)
    expected = train(Model, shards, data)
    assert not bundles(seen, Pull)
    found = [train(Announced, shards, data)]
    pulled, pushed = bundles(seen, Pull), bundles(seen, Push)
    assert {part.members for part in pulled} <= {tuple(f"tables.{i}" for i in range(4))}
    if 0 not in shape:
        assert pulled
        assert pushed
        assert all(part.route for part in pushed)  # ids travel once
    found += [train(Announced, shards, data, prefetch=0)]
    check_equal(expected, *found)


def test_with_staleness_bundles_have_the_bits_of_one_table_at_a_time(seen):
    # of several workers' clocks, too: with a bound of 0 every pull shows every push
    data = batches(12)
    check_equal(train(Model, 2, data), train(Announced, 2, data, prefetch=0))
    assert all(torch.isfinite(one).all() for one in train(Announced, 2, data, prefetch=2))
    assert bundles(seen, Push)


def one_use(model, parts):
    return parts[1].sum() * model.linear.bias


def several_forwards(session, model, ids):
    for part in (ids[:10], ids[10:], ids[:10]):
        (model(part).square().mean() / 3).backward()
    session.step()


def in_place(model, parts):
    return model.linear(torch.cat([part.mul_(0.5) for part in parts], -1))


@pytest.mark.parametrize("use", [one_use, in_place], ids=lambda use: use.__name__)
@pytest.mark.parametrize("shards", [1, 2])
def test_outputs_are_used_in_part_and_changed_in_place(use, shards):
    data = batches()
    check_equal(
        train(lambda: Model(use), shards, data),
        train(lambda: Announced(use), shards, data),
        train(lambda: Announced(use), shards, data, prefetch=0),
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_several_forwards_are_summed(shards):
    data = batches()
    check_equal(*(train(make, shards, data, step=several_forwards) for make in (Model, Announced)))


def test_a_module_may_be_called_again_and_parts_may_have_backwards_of_their_own():
    def use(model, parts):
        again = model.tables[0](model.ids[..., 0])
        return sum((part.square().sum() for part in [*parts, again]), torch.zeros(()))

    def step(session, model, ids):
        model.ids = ids
        model(ids).backward()
        session.step()

    data = batches()
    check_equal(*(train(lambda make=make: make(use), 2, data, step=step) for make in (Model, Announced)))

    def split(model, parts):
        return parts

    def backwards(session, model, ids):
        parts = model(ids)
        for part in (parts[0], parts[2], parts[4]):
            part.square().sum().backward()
        (parts[1] * parts[3]).sum().backward()
        session.step()

    check_equal(*(train(lambda make=make: make(split), 2, data, step=backwards) for make in (Model, Announced)))


@pytest.mark.parametrize(
    "arguments", [{"padding_idx": 3}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=lambda its: next(iter(its))
)
def test_tables_with_rules_of_their_own_are_read_alone(arguments, seen):
    data = batches()
    check_equal(train(lambda: Model(**arguments), 2, data), train(lambda: Announced(**arguments), 2, data))
    assert not bundles(seen, Pull)


def test_an_evaluation_and_a_table_that_is_frozen_read_the_same_rows(seen):
    def step(session, model, ids):
        with torch.no_grad():
            model.scores = model(ids)
        model.tables[0].weight.requires_grad_(session.clock % 2 == 0)
        loss = model(ids).square().mean()
        assert torch.equal(loss, model.scores.square().mean())
        loss.backward()
        session.step()

    check_equal(train(Model, 2, batches(), step=step), train(Announced, 2, batches(), step=step))
    assert bundles(seen, Push)


def test_gradients_of_a_bundle_are_there_by_table_and_can_be_changed():
    def step(session, model, ids):
        model(ids).square().mean().backward()
        for part in session.gradients():
            part.gradients.mul_(0.5)
        model.tables[2].weight.grad.mul_(2)
        model.tables[3].weight.grad = None
        assert sorted(part.spec.name for part in session.gradients()) == [f"tables.{i}" for i in (0, 1, 2, 4)]
        session.step()

    check_equal(*(train(make, shards, batches(), step=step) for make in (Model, Announced) for shards in (1, 2)))


def test_gradients_are_clipped_by_a_norm_of_the_same_bits():
    def step(session, model, ids):
        model(ids).square().mean().backward()
        gradients = [part.gradients for part in session.gradients()]
        model.norms.append(global_norm(gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.01 / model.norms[-1]))
        session.step()

    def trained(make):
        model = make()
        model.norms = []
        return train(lambda: model, 2, batches(12), step=step), model.norms

    (alone, norms), (together, others) = trained(Model), trained(Announced)
    assert norms == others
    check_equal(alone, together)


def test_a_second_backward_is_refused_by_every_table_that_had_one():
    """As torch does, of a model that saves nothing else; and not of one that had none, or was to retain its graph."""
    refused = pytest.raises(RuntimeError, match="backward through the graph a second time")

    def step(session, model, ids):
        parts = [part.sum() for part in model(ids)]
        parts[0].backward()
        parts[1].backward(retain_graph=True)
        (parts[1] + parts[2]).backward()
        parts[3].backward()
        for again in parts[:4]:
            with refused:
                again.backward()
        session.step()

    def split(model, parts):
        return parts

    check_equal(*(train(lambda make=make: make(split), 2, batches(), step=step) for make in (Model, Announced)))


def test_second_derivatives_pass_through_a_bundle():
    def step(session, model, ids):
        loss = model(ids).pow(3).mean()
        (slope,) = torch.autograd.grad(loss, model.linear.bias, create_graph=True)
        (loss + slope.sum()).backward()
        session.step()

    check_equal(train(Model, 2, batches(), step=step), train(Announced, 2, batches(), step=step))


@pytest.mark.parametrize("rates", [{"tables.1": 0.5}, {f"tables.{i}": 0.5 for i in range(TABLES)}], ids=["one", "all"])
def test_learning_rates_by_table_divide_a_bundle_where_they_differ(rates, seen):
    def step(session, model, ids):
        model(ids).square().mean().backward()
        session.step(rates)

    check_equal(train(Model, 2, batches(), step=step), train(Announced, 2, batches(), step=step))
    assert bool(bundles(seen, Push)) == (len(rates) > 1)


def test_a_codec_takes_a_table_out_of_its_bundle_at_any_step(seen):
    def step(session, model, ids):
        codecs = {2: {"push": "int8"}, 4: {"push": "none", "pull": "fp16s"}}.get(session.clock, {})
        if codecs:
            session.compress("tables.1", **codecs)
        seen.clear()
        model(ids).square().mean().backward()
        session.step()
        members = {name for part in bundles(seen, Pull) for name in part.members}
        assert "tables.0" in members or not bundles(seen, Pull)
        assert ("tables.1" in members) == (session.clock <= 2 and bool(members))

    check_equal(train(Model, 2, batches(), step=step), train(Announced, 2, batches(), step=step))


def test_a_switch_of_codecs_between_pull_and_push_divides_the_bundle():
    def step(session, model, ids):
        loss = model(ids).square().mean()
        if session.clock == 2:
            session.compress("tables.1", push="fp16s")
        loss.backward()
        session.step()

    check_equal(train(Model, 2, batches(), step=step), train(Announced, 2, batches(), step=step))


def test_shards_that_do_not_know_bundles_get_one_table_at_a_time(seen):
    def step(session, model, ids):
        for connection in session.client.connections:
            connection.greeting.bundles = False
        model(ids).square().mean().backward()
        session.step()

    alone = train(Announced, 2, batches(), step=step)
    assert not bundles(seen, Pull)
    check_equal(train(Announced, 2, batches()), alone)


def test_a_placement_that_changes_between_pull_and_push_divides_the_bundle():
    def step(session, model, ids):
        loss = model(ids).square().mean()
        placement = session.placement
        session.client.use_placement(dataclasses.replace(placement, epoch=placement.epoch + 1))
        for connection in session.client.connections:
            connection.transport._shard._placement = session.placement
        loss.backward()
        session.step()

    check_equal(train(Model, 2, batches(), step=step), train(Announced, 2, batches(), step=step))


def test_ids_out_of_range_are_refused_by_the_table_that_has_them():
    with es.local(2) as session:
        model = es.wrap(Announced(), session, optimizer=es.SGD(lr=0.1))
        for wrong in (ROWS, -1):
            ids = batches(1)[0]
            ids[3, 2] = wrong
            with pytest.raises(IndexError, match=f"table 'tables.2': id {wrong} is out of range"):
                model(ids)


def test_ids_that_change_in_place_between_stage_and_use_are_read_anew():
    def use(model, parts):
        model.ids.add_(1).remainder_(ROWS)
        return model.linear(torch.cat([table(model.ids[..., i]) for i, table in enumerate(model.tables)], -1))

    def step(session, model, ids):
        model.ids = ids.clone()
        model(model.ids).square().mean().backward()
        session.step()

    check_equal(*(train(lambda make=make: make(use), 2, batches(), step=step) for make in (Model, Announced)))


def test_a_large_batch_is_divided_into_messages(seen):
    def step(session, model, ids):
        session.client.limits.update({0: 4500, 1: 4500})  # a block of dense weights fits
        model(ids).square().mean().backward()
        session.step()

    data = batches(shape=(800,), rows=20 * ROWS)
    found = [train(lambda make=make: make(rows=20 * ROWS), 2, data, step=step) for make in (Model, Announced)]
    check_equal(*found)
    assert any(0 in part.counts for part in bundles(seen, Pull))
    assert any(0 in part.counts for part in bundles(seen, Push))


@pytest.mark.parametrize("use", [one_use, lambda model, parts: model.linear(torch.cat(parts, -1))], ids=["part", "all"])
@pytest.mark.parametrize("prefetch", [None, 1])
def test_rows_of_a_step_are_freed_without_the_collector_of_garbage(use, prefetch):
    """Also where some outputs are never asked for: autograd's graph holds no way back to them."""
    seen = []

    def forward(model, parts):
        seen.extend(weakref.ref(result[0].rows) for result in model.session._prefetched.forward.values())
        return use(model, parts)

    def step(session, model, ids):
        model.session, model.tables[2].forward = session, model.tables[1].forward  # table 2 is announced, and not read
        model(ids).square().mean().backward()
        session.step()

    gc.disable()
    try:
        train(lambda: Announced(forward, dims=[4] * TABLES), 1, batches(), step=step, prefetch=prefetch)
        alive = [rows for rows in seen if rows() is not None]
    finally:
        gc.enable()
    assert len(seen) == 6 * TABLES
    assert not alive


class Bags(nn.Module):
    """Bags of several lengths and modes, and rows, of one dim."""

    KINDS = (("sum", 3), ("mean", 3), ("sum", 1), ("mean", 7), ("rows", 2), ("max", 2), ("sum", 5))

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, 4) if how == "rows" else nn.EmbeddingBag(ROWS, 4, mode=how) for how, _ in self.KINDS
        )
        self.linear = nn.Linear(4 * (len(self.KINDS) + 1), 1)

    def ids(self, ids):
        ends = np.cumsum([length for _, length in self.KINDS])
        return [ids[:, end - length : end] for end, (_, length) in zip(ends, self.KINDS, strict=True)]

    def forward(self, ids):
        parts = [table(its) for table, its in zip(self.tables, self.ids(ids), strict=True)]
        return self.linear(torch.cat([part.flatten(1) for part in parts], -1))


class AnnouncedBags(Bags):
    def embedding_inputs(self, ids):
        return {f"tables.{i}": its for i, its in enumerate(self.ids(ids))}


@pytest.mark.parametrize("size", [0, 5, 300])
@pytest.mark.parametrize("shards", [1, 2])
def test_bags_in_a_bundle_have_the_bits_of_one_table_at_a_time(shards, size, seen):
    length = sum(length for _, length in Bags.KINDS)
    draw = np.random.default_rng(0)
    # many equal ids in a bag and across bags: the order of their gradients shows
    data = [torch.from_numpy(draw.zipf(1.3, (size, length)) % ROWS) for _ in range(4)]
    expected = train(Bags, shards, data, optimizer=es.Adagrad(lr=0.1))
    assert not bundles(seen, Pull)
    for prefetch in (None, 0):
        seen.clear()
        check_equal(expected, train(AnnouncedBags, shards, data, optimizer=es.Adagrad(lr=0.1), prefetch=prefetch))
        if size:
            assert {3, 2} <= {len(part.members) for part in bundles(seen, Pull)}  # sums and means


def test_bags_of_a_bundle_may_be_called_with_weights_or_without_gradients():
    def step(session, model, ids):
        first = model.tables[0], model.ids(ids)[0]
        with torch.no_grad():
            plain = model(ids)
        out = model(ids)
        assert torch.equal(out, plain)
        again = first[0](first[1], per_sample_weights=torch.linspace(0, 1, first[1].numel()).view_as(first[1]))
        (out.square().mean() + again.sum()).backward()
        session.step()

    length = sum(length for _, length in Bags.KINDS)
    data = [ids[..., :1].repeat(1, length) for ids in batches()]
    check_equal(*(train(make, 2, data, step=step) for make in (Bags, AnnouncedBags)))


@pytest.mark.parametrize("prefetch", [None, 0])
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_activation_checkpoints_compute_a_part_of_a_bundle_again(kind, prefetch):
    """The tensors that autograd saves in a forward are those of the second one, counted from the first."""

    def make(announced, again):
        base = (AnnouncedBags if announced else Bags) if kind == "bags" else (Announced if announced else Model)

        class Checkpointed(base):
            def forward(self, ids):
                each = self.ids(ids) if kind == "bags" else ids.unbind(-1)

                def some(*numbers):
                    return torch.cat([self.tables[i](each[i]).flatten(1) for i in numbers], -1).tanh()

                def kept(*numbers):
                    return checkpoint(some, *numbers, use_reentrant=False) if again else some(*numbers)

                return self.linear(torch.cat([kept(0, 1), some(2), kept(*range(3, len(self.tables)))], -1))

        return Checkpointed

    data = batches()
    if kind == "bags":
        data = [ids[..., :1].repeat(1, sum(length for _, length in Bags.KINDS)) for ids in data]
    check_equal(
        train(make(False, False), 2, data),
        train(make(False, True), 2, data),
        train(make(True, False), 2, data, prefetch=prefetch),
        train(make(True, True), 2, data, prefetch=prefetch),
    )


@pytest.mark.parametrize("hooks", [torch.autograd.graph.save_on_cpu, contextlib.nullcontext])
def test_tensors_that_somebody_else_saves_do_not_change_what_is_learned(hooks):
    def step(session, model, ids):
        with hooks():
            loss = model(ids).square().mean()
        loss.backward()
        session.step()

    check_equal(train(Model, 2, batches()), train(Announced, 2, batches(), step=step))


class Alternating(Announced):
    """A model that announces other tables for every other batch; the rest are read when they are used."""

    def embedding_inputs(self, ids):
        found = super().embedding_inputs(ids)
        return dict(list(found.items())[1:] if int(ids.sum()) % 2 else list(found.items())[:3])


@pytest.mark.parametrize("make", [Announced, Alternating])
def test_rows_that_are_changed_while_they_are_pulled_ahead_come_again(make):
    """By loads, by pushes of another forward, and by batches with other tables in their bundles."""

    def step(session, model, ids):
        if session.clock == 2:
            every = model.tables[1].table.route(torch.arange(ROWS))
            model.tables[1].table.load(every, np.full((ROWS, 4), 0.25, np.float32))
        other = batches(1)[0]
        (model(ids).square().mean() + model(other).square().mean()).backward()
        session.step()

    data = batches(8)
    check_equal(train(Model, 2, data, step=step), train(make, 2, data, step=step, prefetch=0))


def test_copies_of_rows_that_a_bundle_has_pushed_are_dropped(seen):
    """A loop reads announced rows from copies; what it pushes of others, in bundles, is in no copy after that."""

    def trained(make):
        with es.local(2) as session:
            model = es.wrap(make(), session, optimizer=OPTIMIZERS, dense_optimizer=es.SGD(lr=0.1))
            session.cache_rows(1000, staleness=3)
            other = batches(13)
            inputs = partial(Announced.embedding_inputs, model)
            loop = session.prefetch(batches(12), inputs=inputs, staleness=0)
            for number, ids in enumerate(loop):
                model(other[number + 1] if number % 2 else ids).square().mean().backward()
                session.step()
            return weights(session, model)

    expected = trained(Model)
    assert not bundles(seen, Push)
    check_equal(expected, trained(Announced))
    assert bundles(seen, Push)


@pytest.mark.parametrize("most", [64, 1])
def test_bytes_of_bundles_are_counted_by_table(most, monkeypatch):
    monkeypatch.setattr(byte_counts, "_MOST_BUNDLES", most)

    def volume(make):
        counts = {}

        def step(session, model, ids):
            model(ids).square().mean().backward()
            session.step()
            counts.update(session.stats.volume)

        train(make, 2, batches(), step=step)
        return {part: count for part, count in counts.items() if part.kind in ("ids", "rows")}

    assert volume(Model) == volume(Announced) != {}


def test_a_bundle_routes_as_its_tables_do():
    draw, sizes = np.random.default_rng(1), [7, 0, 300, 1]
    flats = [draw.integers(-50, 50, size) for size in sizes]
    keys, names = (5, 6, 5, 7), ("a", "b", "c", "d")
    for shards in (1, 2, 5):
        placement = Placement.even(shards)
        route, least, largest = make_bundle(np.concatenate(flats), np.cumsum(sizes), names, keys, placement)
        assert np.array_equal(route.ids[route.index], np.concatenate(flats))
        alone = dict(zip(names, make_routes(list(zip(flats, keys, strict=True)), placement), strict=True))
        for name, mine, places in route.members():
            assert np.array_equal(mine.ids, alone[name].ids)
            assert np.array_equal(mine.splits, alone[name].splits)
            assert np.array_equal(route.ids[places], mine.ids)
        assert [(int(its.min()), int(its.max())) if len(its) else (0, 0) for its in flats] == list(
            zip(least, largest, strict=True)
        )
        keep = draw.random(len(route.ids)) < 0.3
        kept = {name: mine for name, mine, _ in route.select(keep).members()}
        for name, mine, places in route.members():
            if keep[places].any():
                assert np.array_equal(kept[name].ids, mine.select(keep[places]).ids)
                assert np.array_equal(kept[name].splits, mine.select(keep[places]).splits)
        for shard, cut in itertools.product(range(shards), (0, 1, 3)):
            rows = route.slice_of(shard)
            middle = min(rows.stop, rows.start + cut)
            parts = [route.counts_of(shard, slice(*its)) for its in ((rows.start, middle), (middle, rows.stop))]
            assert tuple(np.sum(parts, 0).tolist()) == route.counts_of(shard, rows)
