"""A bench's result as a picture; needs matplotlib (`pip install 'embershard[bench]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.benchmark.report import AXES
from embershard.benchmark.sweep import AnyResult, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = ("-", "--", ":", "-.")
_WORKER, _SHARDS, _GREY = "#2b6cb0", "#dd6b20", "#718096"


def can_draw() -> bool:
    """Whether matplotlib is installed, which pictures need."""
    return find_spec("matplotlib") is not None


def draw_parts(result: AnyResult, path: Path) -> None:
    """A step and its parts at p50 and p99, as SVG."""
    from matplotlib.figure import Figure

    rows = [(name, part, _WORKER) for name, part in result.parts.items()]
    rows += [(f"{name}, beside it", part, _GREY) for name, part in result.overlapped.items()]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, part, color) in enumerate(rows):
        axes.barh(place, part.p99_ms, height=0.3, color=color, alpha=0.35)
        axes.barh(place, part.p50_ms, height=0.7, color=color)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step: p50 wide, p99 thin")
    settings = result.settings
    what = f"{settings.work}, workers: {settings.workers}, shards: {settings.shards}, dim: {settings.dim}"
    axes.set_title(what, loc="left", fontsize=10)
    _sign(figure, result)
    _save(figure, path)


def draw_curves(points: Points, path: Path) -> None:
    """A panel for every curve of a sweep, as SVG: CPU per step of the worker and of the shards, and its median time."""
    from matplotlib.figure import Figure

    columns = min(2, len(points))
    lines = -(-len(points) // columns)
    figure = Figure(figsize=(6 * columns, 4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes, (curve, results) in zip(panels, points.items(), strict=False):
        _draw_curve(axes, curve, results)
    for axes in panels[len(points) :]:
        axes.set_visible(False)
    _sign(figure, next(iter(points.values()))[0])
    _save(figure, path)


def _draw_curve(axes: Axes, curve: str, results: Sequence[AnyResult]) -> None:
    setting, words = AXES[curve]
    groups: dict[str, list[AnyResult]] = {}
    for result in results:
        groups.setdefault(f"{getattr(result.settings, 'ids', 0):,} ids: " if curve == "messages" else "", []).append(
            result
        )
    for number, (label, group) in enumerate(groups.items()):
        x = [getattr(result.settings, setting) for result in group]
        style = _STYLES[number % len(_STYLES)]
        lines = [
            ("worker CPU", _WORKER, [result.worker_cpu_ms for result in group]),
            ("shard CPU", _SHARDS, [result.shard_cpu_ms or 0.0 for result in group]),
            ("step", _GREY, [result.parts["step"].p50_ms for result in group]),
        ]
        for name, color, y in lines:
            axes.plot(x, y, marker="o", markersize=3, color=color, linestyle=style, label=f"{label}{name}")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    ticks = sorted({getattr(result.settings, setting) for result in results})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(words)
    axes.set_ylabel("ms per step")
    axes.set_title("training DLRM" if results[0].bench == "train" else "pull and push", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def draw_reliability(curves: Mapping[str, Sequence[tuple[float, float, int]]], path: Path) -> None:
    """Mean predictions against mean labels, a line for each curve (mean prediction, mean label, samples), as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, color=_GREY, linewidth=1, linestyle=":")
    for number, (name, points) in enumerate(curves.items()):
        style, color = _STYLES[number % len(_STYLES)], (_WORKER, _SHARDS)[number // len(_STYLES) % 2]
        label = f"{name}, {sum(count for *_, count in points):,} samples"
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, marker="o", markersize=3, linestyle=style, color=color, label=label)
    axes.set_xlabel("mean prediction")
    axes.set_ylabel("mean label")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write SVG whose text stays text; the same figure gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def _sign(figure: Figure, result: AnyResult) -> None:
    """Say where it was measured."""
    conditions = result.conditions
    where = f"{conditions.machine}, {conditions.cores} cores, load {conditions.load_average}, {conditions.time}"
    figure.supxlabel(where, fontsize=7, color=_GREY)
