"""How the cost of a step grows with its work: the same bench again and again, with one setting changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from embershard.benchmark.measure import BenchResult, measure_pull_push, measure_train
from embershard.benchmark.settings import (
    Batch,
    Count,
    Dim,
    Ids,
    PullPush,
    Rows,
    Seed,
    Shards,
    Staleness,
    Train,
    TransportName,
    Workers,
)

_ROWS_OF_MESSAGES = 1_000_000  # all resident, when the number of rows is not what changes


class Axis(StrEnum):
    """A curve, named after what changes along it; `messages` are shards, and ids per step."""

    ROWS = "rows"
    MESSAGES = "messages"
    SHARDS = "shards"
    WORKERS = "workers"
    BATCH = "batch"


class Sweep(BaseModel):
    """The values along each curve, and how long each point is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    axes: tuple[Axis, ...] = tuple(Axis)
    rows: tuple[Rows, ...] = (100_000, 1_000_000, 10_000_000)
    shards: tuple[Shards, ...] = (1, 2, 4, 8)
    ids: tuple[Ids, ...] = (256, 4_096, 65_536)  # per step, for each number of shards; `messages` alone
    workers: tuple[Workers, ...] = (1, 2, 4)
    batch: tuple[Batch, ...] = (512, 2_048, 8_192)
    dim: Dim = 16
    prefetch: Staleness = 2
    steps: Count = 20  # per round and worker; pull and push alone, which is quick, takes five times as many
    rounds: Count = 3
    seed: Seed = 0


AnyResult = BenchResult[PullPush] | BenchResult[Train]
Points = Mapping[str, list[AnyResult]]


Plan = Mapping[str, Sequence[PullPush | Train]]


def plan(sweep: Sweep) -> Plan:
    """Return the measurements of a sweep, by the curve that each is a point of.

    `rows`: pull and push of resident rows, one shard, uniform ids. `messages`: the same over shards and ids per step,
    by TCP: what a message and what a row cost. `shards`, `workers` and `batch`: training.
    """
    every = {"rounds": sweep.rounds, "seed": sweep.seed, "dim": sweep.dim}
    pull_push = PullPush.model_validate(
        {**every, "steps": 5 * sweep.steps, "fill": True, "skew": 0.0, "workers": 1, "rows": _ROWS_OF_MESSAGES}
    )
    train = Train.model_validate({**every, "steps": sweep.steps, "prefetch": sweep.prefetch, "beside_torch": False})
    curves: dict[str, list[PullPush | Train]] = {}
    if Axis.ROWS in sweep.axes:
        base = pull_push.model_copy(update={"shards": 1, "ids": 16_384})
        curves["rows"] = [base.model_copy(update={"rows": rows}) for rows in sweep.rows]
    if Axis.MESSAGES in sweep.axes:
        base = pull_push.model_copy(update={"transport": TransportName.TCP})
        curves["messages"] = [
            base.model_copy(update={"shards": shards, "ids": ids}) for shards in sweep.shards for ids in sweep.ids
        ]
    if Axis.SHARDS in sweep.axes:
        curves["shards"] = [train.model_copy(update={"shards": shards}) for shards in sweep.shards]
    if Axis.WORKERS in sweep.axes:
        curves["workers"] = [train.model_copy(update={"workers": workers}) for workers in sweep.workers]
    if Axis.BATCH in sweep.axes:
        curves["batch"] = [train.model_copy(update={"batch": batch}) for batch in sweep.batch]
    return curves


def run_sweep(planned: Plan, report: Callable[[str, AnyResult], None]) -> Points:
    """Measure every point; `report` gets each, with the name of its curve, as soon as it is there."""
    points: dict[str, list[AnyResult]] = {}
    for curve, settings in planned.items():
        points[curve] = []
        for one in settings:
            result: AnyResult = measure_pull_push(one) if isinstance(one, PullPush) else measure_train(one)
            points[curve].append(result)
            report(curve, result)
    return points
