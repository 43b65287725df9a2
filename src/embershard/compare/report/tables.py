"""The tables of a report: all figures of the pictures, the conditions, and the runs that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from embershard.compare.report.page import ReportTable
from embershard.compare.results import FP16_BASELINE, BreakEven, Quality, Results, Speed, StepPart
from embershard.compare.units import (
    NONE,
    bits_text,
    bytes_text,
    difference_text,
    digits,
    link_text,
    metric_name,
    metric_text,
    ratio_text,
    signed,
    speed_up_text,
)

STEP_PARTS = tuple("step data route pull wait shards receive decode forward backward gather encode push send".split())
DIRECTIONS = ("push", "pull", "other")
BYTE_PARTS = ("ids", "gradients", "rows", "dense gradients", "dense weights", "residuals", "other")
_PARTS = {
    ("push", "rows"): "gradients",
    ("push", "dense"): "dense gradients",
    ("pull", "dense"): "dense weights",
    ("push", "residual"): "residuals",
}


def part_name(direction: str, part: str) -> str:
    """Name a part of the bytes in words."""
    return _PARTS.get((direction, part), part)


def fp16_baseline(results: Results) -> str | None:
    """Name the arm of 16-bit floats that codecs have to beat; None where there is none, or it is the baseline."""
    labels = [arm.label for arm in results.arms]
    return FP16_BASELINE if FP16_BASELINE in labels and results.baseline != FP16_BASELINE else None


def even_text(even: BreakEven, significant: int = 3) -> str:
    """Write a measured break-even bandwidth with its interval."""
    if even.measured is None:
        return NONE
    bounds = even_bounds(even, significant)
    return bits_text(even.measured, significant) + (f" [{bounds[0]}, {bounds[1]}]" if bounds else "")


def even_bounds(even: BreakEven, significant: int = 3) -> tuple[str, str] | None:
    """Write the bounds of a measured break-even bandwidth; None with one seed."""
    if even.low is None:
        return None
    low = bits_text(even.low, significant) if even.low else "below all links"
    return low, "no limit" if even.high is None else bits_text(even.high, significant)


def bytes_sent(results: Results, arm: str) -> float | None:
    """Sum an arm's bytes per step and worker, both directions."""
    return sum(volume.sent for volume in results.volumes if volume.arm == arm) or None


def short_table(results: Results) -> ReportTable:
    """Tabulate the verdicts, a line per arm."""
    links = results.bandwidths
    metric = metric_name(results.metric)
    columns = ["arm", "outcome", "pays on", "bytes per step", "fewer bytes"]
    columns += [f"speed-up, {link_text(link)}" for link in links]
    columns += [f"{metric} difference", "quality"]
    verdicts = {verdict.arm: verdict for verdict in results.verdicts}
    rows = []
    for arm in results.arms:
        verdict, sent = verdicts.get(arm.label), bytes_sent(results, arm.label)
        pays_on = [link_text(link) for link in links if verdict and link.label in verdict.pays_on]
        cells = [arm.label, verdict.outcome if verdict else "baseline", ", ".join(pays_on) or NONE]
        cells.append(bytes_text(sent) if sent else NONE)
        cells.append(ratio_text(verdict.bytes_ratio) if verdict and verdict.bytes_ratio else NONE)
        for link in links:
            speed = results.speed_of(arm.label, results.baseline, link.label) if verdict else None
            cells.append(speed_up_text(speed.speed_up) if speed else "1x" if verdict is None else NONE)
        cells.append(difference_text(verdict.difference) if verdict and verdict.difference else NONE)
        cells.append(verdict.quality if verdict else NONE)
        rows.append(cells)
    return ReportTable(
        title=f"Every arm beside {results.baseline}",
        columns=columns,
        rows=rows,
        words=("outcome", "quality", "pays on"),
        note=f"Bytes of one worker's step, both directions. In brackets: 95 % intervals over {_seeds(results)}.",
    )


def quality_table(results: Results, against: str) -> ReportTable | None:
    """Tabulate metrics and paired differences beside one arm."""
    judged = [one for one in results.quality if one.against == against and one.arm != against]
    if not judged:
        return None
    own = {(one.metric, one.rate): one for one in results.quality if one.arm == one.against == against}
    rates = list(dict.fromkeys(one.rate for one in judged))
    rows = []
    for metric in dict.fromkeys(one.metric for one in judged):
        for rate in rates:
            if (metric, rate) in own:
                value = metric_text(own[metric, rate].value)
                rows.append([against, metric_name(metric), rate, value, NONE, NONE, NONE, "compared with"])
            rows += [_quality_row(one) for one in judged if (one.metric, one.rate) == (metric, rate)]
    columns = ["arm", "metric", "learning rate", "value", "pairs", "difference", "margin", "verdict"]
    if len(rates) == 1:
        columns, *rows = (row[:2] + row[3:] for row in [columns, *rows])
    return ReportTable(
        title=f"Quality beside {against}",
        columns=columns,
        rows=rows,
        words=("metric", "learning rate", "verdict"),
        note="Differences are paired: runs of equal seed. Verdicts are read off the 95 % interval in brackets. "
        "Equivalent: it lies inside the margin. Better or worse: it lies on one side of 0. Not worse: it lies above "
        "the worse end of the margin. The first of these that holds counts; everything else is undecided.",
    )


def _quality_row(one: Quality) -> list[str]:
    return [
        one.arm,
        metric_name(one.metric),
        one.rate,
        metric_text(one.value),
        f"{one.difference.seeds}",
        difference_text(one.difference),
        NONE if one.margin is None else f"{one.margin:g}",
        one.verdict,
    ]


def speed_table(results: Results) -> ReportTable:
    """Tabulate samples per second and speed-ups over the baseline and the fp16 baseline."""
    beside = fp16_baseline(results)
    columns = ["arm", "link", "samples/s of all workers", f"over {results.baseline}", "verdict"]
    columns += [f"over {beside}", "verdict"] if beside else []
    rows = []
    for link in results.bandwidths:
        for arm in results.arms:
            speed = results.speed_of(arm.label, results.baseline, link.label)
            if speed is None:
                rows.append([arm.label, link_text(link)] + [NONE] * (len(columns) - 2))
                continue
            rate = speed.samples_per_second
            bounds = (
                f" [{max(rate.low, 0):,.0f}, {rate.high:,.0f}]"
                if rate.low is not None and rate.high is not None
                else ""
            )
            cells = [arm.label, link_text(link), f"{rate.mean:,.0f}/s{bounds}"]
            cells += _over(speed if arm.label != results.baseline else None)
            if beside:
                cells += _over(results.speed_of(arm.label, beside, link.label) if arm.label != beside else None)
            rows.append(cells)
    part = f"The first {results.skipped_share:.0%} of each run is left out. " if results.skipped_share else ""
    return ReportTable(
        title="Samples per second",
        columns=columns,
        rows=rows,
        words=("link", "verdict"),
        note=f"{part}Speed-ups are geometric means over pairs of runs with equal seeds. Faster or slower: the 95 % "
        "interval leaves 1 out.",
    )


def _over(speed: Speed | None) -> list[str]:
    return [NONE, NONE] if speed is None else [speed_up_text(speed.speed_up), speed.verdict]


def waiting_table(results: Results) -> ReportTable | None:
    """Tabulate what share of the training time each arm waits, by what it waits for, as means over the runs."""
    rows = []
    for link in results.bandwidths:
        for arm in results.arms:
            runs = [run for run in results.runs_of(arm.label, link.label) if run.wait_shards is not None]
            if runs:
                shares = [sum(getattr(run, field) or 0.0 for run in runs) / len(runs) for field, _ in _WAITS]
                rows.append([arm.label, link_text(link), *(f"{share:.0%}" for share in shares)])
    if not rows:
        return None
    return ReportTable(
        title="Waiting",
        columns=["arm", "link", *(name for _, name in _WAITS)],
        rows=rows,
        words=("link",),
        note="Shares of the training time, means over the runs. The first is the sum of the others.",
    )


_WAITS = (
    ("wait_share", "waiting"),
    ("wait_shards", "for shards"),
    ("wait_workers", "for other workers"),
    ("wait_data", "for data"),
)


def bytes_table(results: Results) -> ReportTable:
    """Tabulate counted and predicted bytes by direction and part, with their sums."""
    rows = []
    base = bytes_sent(results, results.baseline)
    for arm in results.arms:
        volumes = [volume for volume in results.volumes if volume.arm == arm.label and (volume.sent or volume.raw)]
        volumes.sort(
            key=lambda one: (DIRECTIONS.index(one.direction), BYTE_PARTS.index(part_name(one.direction, one.part)))
        )
        for one in volumes:
            where = [arm.label, one.direction, part_name(one.direction, one.part)]
            rows.append(where + _bytes_cells(one.sent, one.raw, one.predicted, one.ratio))
        if volumes:
            sent = sum(one.sent for one in volumes)
            raw = _sum([one.raw for one in volumes])
            predicted = _sum([one.predicted for one in volumes if one.direction != "other"])  # nobody can: resent, lost
            ratio = base / sent if base and sent else None
            rows.append([arm.label, "both", "all", *_bytes_cells(sent, raw, predicted, ratio)])
    return ReportTable(
        title="Bytes per step",
        columns=["arm", "direction", "part", "counted", "without codec", "predicted", "prediction off by", "fewer"],
        rows=rows,
        words=("direction", "part"),
        note="Bytes of one worker's step with all shards. Predicted: from the numbers of rows and messages, and the "
        f"codec's sizes. Fewer: the bytes of {results.baseline} over these; below 1x it is more.",
    )


def _bytes_cells(sent: float, raw: float | None, predicted: float | None, ratio: float | None) -> list[str]:
    off = f"{signed((predicted / sent - 1) * 100, 2)} %" if predicted is not None and sent else NONE
    counted = [NONE if count is None else bytes_text(count) for count in (sent, raw, predicted)]
    return [*counted, off, ratio_text(ratio) if ratio else NONE]


def _sum(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) if there and len(there) == len(values) else None


def break_even_table(results: Results) -> ReportTable | None:
    """Tabulate break-even bandwidths, measured and by formula."""
    rows = []
    for even in results.break_even:
        off = NONE
        if even.formula and even.measured:
            off = f"{(even.formula / even.measured - 1) * 100:+.0f} %"
        formula = bits_text(even.formula) if even.formula is not None else _FORMULA.get(even.formula_says, "not known")
        measured = even_text(even) if even.measured is not None else _MEASURED.get(even.measured_says, "not shown")
        rows.append([even.arm, even.against, measured, formula, off])
    if not rows:
        return None
    return ReportTable(
        title="Break-even bandwidth",
        columns=["arm", "beside", "measured", "by formula (W*)", "formula off by"],
        rows=rows,
        words=("beside",),
        note="On slower links the arm is faster. Measured: where the interpolated costs of the two arms are equal; in "
        "brackets the 95 % interval, the links on which neither arm is shown to cost less. By formula: W* = bytes "
        "saved per step / seconds that coding adds to a step, in the worker and in the shards that it waits for.",
    )


_MEASURED = {"always": "none: faster on all links", "never": "below all measured links"}
_FORMULA = {"always": "costs no time", "never": "saves no bytes"}


def step_table(results: Results, bandwidth: str, name: str) -> ReportTable | None:
    """Tabulate the parts of a step at p50 and p99, as means over the runs."""
    steps = {arm.label: mean_step(part for run in results.runs_of(arm.label, bandwidth) for part in run.step)
             for arm in results.arms}  # fmt: skip
    steps = {arm: parts for arm, parts in steps.items() if parts}
    names = sorted({(part.overlapped, step_order(part.name), part.name) for parts in steps.values() for part in parts})
    if not names:
        return None
    rows = []
    for arm, parts in steps.items():
        found = {(part.name, part.overlapped): part for part in parts}
        rows.append([arm] + [_p50_p99(found.get((part, overlapped))) for overlapped, _, part in names])
    return ReportTable(
        title=f"Time of a step, {name}",
        columns=["arm"] + [f"{part}, beside" if overlapped else part for overlapped, _, part in names],
        rows=rows,
        note="p50 / p99 in ms of the first worker's steps, means over the runs. Beside: in other threads, at the "
        "same time.",
    )


def step_order(part: str) -> int:
    """The place of a part in the order in which a step runs; `other` comes last."""
    return STEP_PARTS.index(part) if part in STEP_PARTS else len(STEP_PARTS) + (part == "other")


def mean_step(parts: Iterable[StepPart]) -> list[StepPart]:
    """Average the parts of a step over several runs, in their order."""
    groups: dict[tuple[str, bool], list[StepPart]] = {}
    for part in parts:
        groups.setdefault((part.name, part.overlapped), []).append(part)
    return [
        StepPart(
            name=name,
            overlapped=overlapped,
            p50_ms=_mean([part.p50_ms for part in group]),
            p99_ms=_mean([part.p99_ms for part in group]),
            mean_ms=_mean([part.mean_ms for part in group]),
        )
        for (name, overlapped), group in groups.items()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _p50_p99(part: StepPart | None) -> str:
    return NONE if part is None else f"{_ms(part.p50_ms)} / {_ms(part.p99_ms)}"


def _ms(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def rates_table(results: Results) -> ReportTable | None:
    """Tabulate the learning rates that were tried; None where the job's own was kept."""
    if len(results.multiples) < 2:
        return None
    rows = []
    for arm in results.arms:
        decided = {
            multiple: [run.decided for run in results.runs if run.ok and run.decided is not None
                       and (run.kind, run.arm, run.multiple) == ("tune", arm.label, multiple)]
            for multiple in results.multiples
        }  # fmt: skip
        cells = [f"{_mean(found):.4f}" if found else NONE for found in decided.values()]
        chosen = results.tuned.get(arm.label)
        rows.append([arm.label, *cells, NONE if chosen is None else f"{chosen:g}x"])
    return ReportTable(
        title="Learning rates that were tried",
        columns=["arm", *(f"{multiple:g}x" for multiple in results.multiples), "chosen"],
        rows=rows,
        note=f"{metric_name(results.metric)} on the split {results.deciding_split}, of one run each, with a seed that "
        "is in no other figure; columns are multiples of the job's learning rates. The chosen ones are judged above as "
        "tuned.",
    )


def _seeds(results: Results) -> str:
    return f"{len(results.seeds)} seeds" if len(results.seeds) > 1 else "seeds, but one seed has none"


def tables(*found: ReportTable | None) -> Iterator[ReportTable]:
    """Leave out the tables that are None."""
    return (table for table in found if table is not None)


def failures_table(results: Results) -> ReportTable | None:
    """Tabulate the runs that failed; None where none did."""
    rows = [
        [run.arm, f"{run.seed}", run.bandwidth, run.kind, f"{run.attempts}", run.error or "no message", run.folder]
        for run in results.runs
        if not run.ok
    ]
    if not rows:
        return None
    columns = ["arm", "seed", "link", "kind", "attempts", "last output", "its logs"]
    note = "They are in no figure."
    return ReportTable(title="Runs that failed twice", columns=columns, rows=rows, words=columns, note=note)


def arms_table(results: Results) -> ReportTable:
    """Tabulate the arms and their settings."""
    rows = []
    for arm in results.arms:
        kind = "baseline" if arm.label == results.baseline else "added as fp16 baseline" if arm.added else ""
        rows.append([arm.label, kind, arm.meaning, ", ".join(arm.settings) or "the job as it is"])
    columns = ["arm", "role", "in words", "settings"]
    return ReportTable(title="Arms", columns=columns, rows=rows, words=columns)


def conditions_table(results: Results) -> ReportTable:
    """Tabulate machine, versions and how it was measured."""
    where = results.conditions
    speed = "whole runs" if results.speed_steps is None else f"runs of {results.speed_steps:,} steps"
    is_limited = any(link.bits_per_second is not None for link in results.bandwidths)
    limit = f"; limited by a {results.link}" if is_limited else ""
    rows = [
        ["machine", f"{where.machine}, {where.cores} cores, {where.memory_gib} GiB"],
        ["system", f"{where.system}, Python {where.python}"],
        ["versions", ", ".join(f"{name} {version}" for name, version in where.versions.items())],
        *(["changed between runs", words] for words in where.mixed),
        ["load average at the start of a run", _loads(results)],
        ["workers and shards", f"{results.workers} and {results.shards}"],
        ["links", ", ".join(link_text(link) for link in results.bandwidths) + limit],
        *([["speed on limited links", speed]] if limit else []),
        ["seeds", ", ".join(f"{seed}" for seed in results.seeds)],
        ["judged on", f"{metric_name(results.metric)} of {results.split}, at the best evaluation on "
                      f"{results.deciding_split}"],
        *(["what no model can beat", f"{metric_name(metric)} {value:.4f}"]
          for metric, value in results.reachable.items() if value is not None),
        ["runs", f"{len(results.runs)}, of which {sum(not run.ok for run in results.runs)} failed"],
        ["time of all runs", digits(results.seconds / 60) + " min"],
    ]  # fmt: skip
    columns = ["", ""]
    return ReportTable(title="Conditions", columns=columns, rows=rows, words=columns)


def _loads(results: Results) -> str:
    loads = [run.load_average for run in results.runs]
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else NONE
