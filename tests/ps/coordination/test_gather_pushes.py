"""The sum of several workers' gradients against its plain reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import spec
from embershard.proto.arrays import mix64
from embershard.ps.coordination import aggregate
from embershard.ps.coordination.aggregate import sum_gradients
from embershard.ps.table import reference
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from embershard.ps.table.tables import CheckedGradients

OPTIMIZER = OptimizerRegistry().find(spec.SGD(lr=1.0))
TABLES = {dim: Table(spec.TableSpec(name="t", dim=dim, optimizer=spec.SGD(lr=1.0)), OPTIMIZER) for dim in (1, 3, 16)}


def check(dim, pushes):
    """The sum of these pushes (scale, ids, rows, ages), which has the bits of the reference."""
    gathered = sum_gradients(
        [(scale, CheckedGradients(TABLES[dim], ids, rows, 0.5, ages)) for scale, ids, rows, ages in pushes]
    )
    ones = [np.ones(len(ids), np.float32) if ages is None else ages for _, ids, _, ages in pushes]
    want, want_ages = reference.sum_gradients([(*push[:3], ages) for push, ages in zip(pushes, ones, strict=True)])
    assert gathered.ids.tolist() == list(want)  # in the order of their first finite row
    for row, id_ in zip(gathered.gradients, gathered.ids.tolist(), strict=True):
        assert row.tobytes() == want[id_].tobytes()
    aged = any(ages is not None for *_, ages in pushes)
    assert (gathered.ages.tolist() if aged else gathered.ages) == (list(want_ages.values()) if aged else None)
    return gathered


@settings(max_examples=100)
@given(st.data())
def test_sums_have_the_bits_of_the_reference(data):
    dim = data.draw(st.sampled_from(sorted(TABLES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pushes = []
    for _ in range(data.draw(st.integers(1, 4))):
        count, spread = data.draw(st.integers(0, 200)), data.draw(st.sampled_from([3, 100, 2**62]))
        rows = rng.standard_normal((count, dim), np.float32)
        rows[rng.random((count, dim)) < 0.02] = rng.choice([np.nan, np.inf, -np.inf])
        ages = rng.integers(1, 30, count).astype(np.float32) if data.draw(st.booleans()) else None
        pushes.append((np.float32(rng.random()), rng.integers(-spread, spread, count), rows, ages))
    check(dim, pushes)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4096])
def test_ids_that_share_one_place_of_the_index_are_told_apart(count, monkeypatch):
    monkeypatch.setattr(aggregate, "_KEY", np.uint64(0))
    cells = max(2, 1 << (4 * count - 1).bit_length())
    made = np.arange(200 * cells, dtype=np.int64)
    same = made[mix64(made, 0) % np.uint64(cells) == 0][:count]
    rows, ages = np.ones((len(same), 1), np.float32), np.full(len(same), 9, np.float32)
    gathered = check(1, [(np.float32(0.5), same, rows, ages), (np.float32(0.25), same[::-1].copy(), rows, None)])
    assert (gathered.ages == 5).all()  # 4.5 + 0.25
