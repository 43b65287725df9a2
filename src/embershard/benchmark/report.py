"""A bench's result as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter
from rich.table import Table

from embershard.benchmark.measure import BenchResult
from embershard.benchmark.settings import PullPush, Train
from embershard.benchmark.sweep import AnyResult, Points

# the curve's name, the setting that changes along it, and what it changes in words
AXES = {
    "rows": ("rows", "resident rows"),
    "messages": ("shards", "shards, by ids per step"),
    "shards": ("shards", "shards"),
    "workers": ("workers", "workers"),
    "batch": ("batch", "samples per step"),
}


def result_json(result: AnyResult) -> dict[str, object]:
    """Return the whole result, with the settings that reproduce it, as values for JSON."""
    adapter: TypeAdapter[AnyResult] = TypeAdapter(type(result))
    values: dict[str, object] = adapter.dump_python(result, mode="json")
    return values


def points_json(points: Points) -> dict[str, object]:
    """All curves of a sweep."""
    curves = {name: [result_json(result) for result in results] for name, results in points.items()}
    return {"bench": "scale", "curves": curves}


def write_json(values: Mapping[str, object], path: Path) -> None:
    """One object, for people to read too."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def parts_table(result: AnyResult) -> Table:
    """A step and its parts."""
    table = Table("part of a step", "p50 ms", "p99 ms", box=None)
    for title, parts in (("", result.parts), ("beside it, in other threads", result.overlapped)):
        if title and parts:
            table.add_row(title)
        for name, part in parts.items():
            shown = name if name == "step" else f"  {name}"
            table.add_row(shown, f"{part.p50_ms:.3f}", f"{part.p99_ms:.3f}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def figures(result: BenchResult[PullPush] | BenchResult[Train]) -> list[str]:
    """Speeds and costs, a line each."""
    lines = [f"{result.rows_per_second:,.0f} rows/s pulled and pushed, {result.mb_per_second:,.1f} MB/s"]
    if isinstance(result.settings, Train):
        speed = f"{result.samples_per_second:,.0f} samples/s"
        if result.ratio_to_torch is not None:
            speed += f", {result.ratio_to_torch:.2f}x of torch in one process ({result.torch_samples_per_second:,.0f})"
        lines.insert(0, speed)
    shards = "unknown" if result.shard_cpu_ms is None else f"{result.shard_cpu_ms:.2f} ms"
    lines.append(
        f"{result.rows_per_step:,.0f} unique rows per step; CPU per step: worker {result.worker_cpu_ms:.2f} ms, "
        f"all shards {shards}"
    )
    if result.other_cores is not None:
        others = "all other processes, those shards included," if result.settings.ps else "other processes"
        lines.append(f"meanwhile {others} kept {result.other_cores:.2f} of {result.conditions.cores} cores busy")
    return lines


def curve_row(curve: str, result: AnyResult) -> str:
    """One point of a sweep in a line."""
    setting, words = AXES[curve]
    value = f"{getattr(result.settings, setting):,}"
    if isinstance(result.settings, PullPush) and curve == "messages":
        value += f" x {result.settings.ids:,} ids"
        words = "shards" if result.settings.workers == 1 else f"shards, {result.settings.workers} workers"
    speed = f"{result.samples_per_second:>12,.0f} {'ids' if result.bench == 'ps' else 'samples'}/s"
    cost = "" if result.shard_cpu_ms is None else f", CPU ms {result.worker_cpu_ms:.2f} + {result.shard_cpu_ms:.2f}"
    step = result.parts["step"]
    return f"{value:>18} {words:<18}{speed}, step p50 {step.p50_ms:.2f} p99 {step.p99_ms:.2f} ms{cost}"
