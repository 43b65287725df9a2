"""Copies of hot rows: no older than the bound, no more than the room, and those that are read again and again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import embershard as es
from embershard.worker.session.row_cache import RowCache

DIM = 3
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(-9, 9), unique=True), st.booleans()), max_size=25)


def values(ids, clock):
    """Rows that tell their id and the clock at which they were pulled."""
    return np.stack([ids, np.full(len(ids), clock), -ids], axis=1).astype(np.float32)


@settings(max_examples=100)
@given(room=st.integers(1, 40), staleness=st.integers(1, 4), steps=STEPS)
def test_a_copy_is_of_its_id_and_never_older_than_the_bound(room, staleness, steps):
    cache = RowCache(room, DIM, staleness)
    clock = 0
    pulled_at = {}  # the reference: when every id was last stored
    for passed, drawn, drop in steps:
        clock += passed
        ids = np.array(drawn, np.int64)
        if drop:
            cache.drop(ids)
            for id_ in drawn:
                pulled_at.pop(id_, None)
            continue
        out = np.full((len(ids), DIM), np.nan, np.float32)
        missed = cache.lookup(ids, clock, out)
        assert np.isnan(out[missed]).all()
        for position in np.setdiff1d(np.arange(len(ids)), missed):
            at = pulled_at[drawn[position]]
            assert clock - at <= staleness
            np.testing.assert_array_equal(out[position], values(ids[position : position + 1], at)[0])
        cache.store(ids[missed], values(ids[missed], clock), clock)
        pulled_at.update(dict.fromkeys(ids[missed].tolist(), clock))


def test_it_holds_no_more_rows_than_it_has_room_for():
    for room in (1, 7, 8, 100):
        cache = RowCache(room, DIM, 4)
        ids = np.arange(10_000)
        for clock in range(3):
            cache.store(ids, values(ids, clock), clock)
        found = len(ids) - len(cache.lookup(ids, 2, np.empty((len(ids), DIM), np.float32)))
        assert 0.5 * room <= found <= room


def test_rows_that_come_in_every_batch_stay_although_many_come_once():
    cache = RowCache(1_000, DIM, 4)
    hot = np.arange(500)
    found = 0
    for clock in range(40):
        cold = np.arange(10_000) + 10_000 * (clock + 1)
        ids = np.random.default_rng(clock).permutation(np.concatenate([hot, cold]))
        missed = cache.lookup(ids, clock, np.empty((len(ids), DIM), np.float32))
        cache.store(ids[missed], values(ids[missed], clock), clock)
        found += len(ids) - len(missed)
    # at best four of five reads of a hot row find a copy that is young enough
    assert found > 0.75 * 0.8 * 40 * len(hot)


def add_one(module, ids):
    """Forward and backward of a step that adds 1 to each row, whatever the rows are; the rows that were read."""
    rows = module(ids)
    (-rows).sum().backward()
    return rows.detach()


def counting(session):
    """A table whose rows count their pushes."""
    spec = es.TableSpec(name="any", dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Constant())
    return es.Embedding(session.table(spec))


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_forward_shows_all_pushes_but_the_last_ones_within_the_bound(make_session, staleness):
    session = make_session(2)
    session.cache_rows(rows=64, staleness=staleness)
    module = counting(session)
    seen = []
    for step in range(12):
        seen.append(add_one(module, torch.arange(5)))
        session.step()
        assert step - staleness <= seen[-1].min()
        assert seen[-1].max() <= step
    assert any(rows.max() < step for step, rows in enumerate(seen))  # copies were read at all
    assert session.stats.cache_lookups == 60
    assert session.stats.cache_hits == 60 - 5 * len(range(0, 12, staleness + 1))
    assert torch.equal(module.table.pull(torch.arange(5)), torch.full((5, DIM), 12.0))


@pytest.mark.parametrize("ahead", [0, 2])
def test_prefetched_rows_are_within_the_sum_of_both_bounds(make_session, ahead):
    session = make_session(2)
    session.cache_rows(rows=64, staleness=2)
    module = counting(session)
    rng = np.random.default_rng(0)
    batches = [torch.from_numpy(rng.integers(0, 12, 6)).unique() for _ in range(40)]
    pushes = np.zeros((12, 40), int)

    def loop():
        yield from session.prefetch(batches, staleness=ahead, inputs=lambda batch: {"any": batch})

    for step, ids in enumerate(loop()):
        rows = add_one(module, ids)[:, 0].numpy()
        known = pushes[ids.numpy()]
        assert (rows >= known[:, : max(0, step - ahead - 2)].sum(1)).all()
        assert (rows <= known.sum(1)).all()
        session.step()
        pushes[ids.numpy(), step] = 1
    assert session.missed_reads == 0
    assert session.stats.cache_hits > 0


def test_loaded_rows_are_read_at_once_and_refresh_reads_what_others_pushed(make_session):
    session = make_session(1)
    session.cache_rows()
    module = counting(session)
    ids = torch.arange(4)
    module(ids)
    route = module.table.route(ids)
    module.table.load(route, np.full((4, DIM), 7, np.float32))
    assert module(ids).eq(7).all()
    session.client.load("any", route, np.full((4, DIM), 9, np.float32))  # as another worker would
    assert module(ids).eq(7).all()
    session.refresh()
    assert module(ids).eq(9).all()


def test_a_refresh_inside_the_loop_reads_what_others_pushed(make_session):
    session = make_session(1)
    session.cache_rows(staleness=50)
    module = counting(session)
    ids = torch.arange(4)
    seen = []
    for step, batch in enumerate(session.prefetch([ids] * 6, inputs=lambda batch: {"any": batch})):
        seen.append(module(batch)[0, 0].item())
        if step == 2:
            rows = np.full((4, DIM), 9, np.float32)
            session.client.load("any", module.table.route(ids), rows)  # as another worker would
            session.refresh()
    assert seen[:3] == [0, 0, 0]
    assert seen[-1] == 9


def test_dense_weights_are_never_copies(make_session):
    session = make_session(2)
    session.cache_rows()
    model = es.wrap(torch.nn.Linear(3, 1, bias=False), session, optimizer=es.SGD(lr=1.0))
    before = model.weight.detach().clone()
    for step in range(3):
        (-model(torch.ones(1, 3))).sum().backward()
        assert torch.equal(model.weight.detach(), before + step)
        session.step()
    assert session.stats.cache_lookups == 0


@pytest.mark.parametrize(("rows", "staleness", "text"), [(0, 4, "rows must be at least 1"), (5, 0, "got 0")])
def test_a_cache_without_room_or_bound_is_refused(make_session, rows, staleness, text):
    with pytest.raises(ValueError, match=text):
        make_session(1).cache_rows(rows=rows, staleness=staleness)
