"""Shards in this process without a transport, and the requests that tests hand to them."""

import numpy as np

from embershard.proto import spec
from embershard.proto.messages import Declare, Join, Pull, Push, PushToken, TableGradients, TableIds
from embershard.proto.routing import Placement
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry


def table(name="items", dim=3, **settings) -> spec.TableSpec:
    """A table of zeros with SGD of lr 1, where `settings` say nothing else."""
    plain = {"optimizer": spec.SGD(lr=1.0), "initializer": spec.Constant(value=0.0)}
    return spec.TableSpec(name=name, dim=dim, **{**plain, **settings})


def make_shard(*tables, now=0.0, **settings) -> Shard:
    """The only shard of its job, with these tables, which were declared long ago."""
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), **settings)
    for one in tables:
        shard.handle(Declare(one), now)
    return shard


def ids_of(*ids) -> np.ndarray:
    return np.array(ids, np.int64)


def join(worker=0, *, epoch=1, clock=0, staleness=0, workers=1, lease_ms=60_000, **rest) -> Join:
    fields = {"staleness": staleness, "workers": workers, "lease_ms": lease_ms, **rest}
    return Join(worker=worker, epoch=epoch, clock=clock, **fields)


def push(*parts, worker=0, epoch=1, seq=1, first=1, clock=0, placement=1, **fields) -> Push:
    """A push of TableGradients."""
    return Push(PushToken(worker, epoch, seq, first), clock, placement, parts, **fields)


def gradients(ids, value=1.0, name="items", dim=3, **changes) -> TableGradients:
    """Gradients that are `value` everywhere, or those among the changes."""
    return TableGradients(name, ids_of(*ids), **{"gradients": np.full((len(ids), dim), value, np.float32), **changes})


def rows(shard, *ids, name="items", **fields) -> np.ndarray:
    """The rows that a pull returns."""
    return shard.handle(Pull(1, (TableIds(name, ids_of(*ids)),), **fields)).tables[0]
