"""The tables of a report that say what was run, where, and what failed."""

from __future__ import annotations

from embershard.compare.report.page import Table
from embershard.compare.results import Results
from embershard.compare.units import NONE, digits, link_text, metric_name


def failures_table(results: Results) -> Table | None:
    """Runs that did not end well."""
    rows = [
        [run.arm, f"{run.seed}", run.bandwidth, run.kind, f"{run.attempts}", run.error or "no message", run.folder]
        for run in results.runs
        if not run.ok
    ]
    if not rows:
        return None
    columns = ["arm", "seed", "link", "kind", "attempts", "what it said last", "its logs"]
    note = "They are in no figure."
    return Table(title="Runs that failed twice", columns=columns, rows=rows, words=columns, note=note)


def arms_table(results: Results) -> Table:
    """What was compared."""
    rows = []
    for arm in results.arms:
        kind = "baseline" if arm.label == results.baseline else "added as yardstick" if arm.added else ""
        rows.append([arm.label, kind, arm.meaning, ", ".join(arm.settings) or "the job as it is"])
    columns = ["arm", "role", "in words", "settings"]
    return Table(title="Arms", columns=columns, rows=rows, words=columns)


def conditions_table(results: Results) -> Table:
    """Where and with what it ran, and how it was measured."""
    where = results.conditions
    speed = "whole runs" if results.speed_steps is None else f"runs of {results.speed_steps:,} steps"
    rows = [
        ["machine", f"{where.machine}, {where.cores} cores, {where.memory_gib} GiB"],
        ["system", f"{where.system}, Python {where.python}"],
        ["versions", ", ".join(f"{name} {version}" for name, version in where.versions.items())],
        *(["changed between runs", words] for words in where.mixed),
        ["load average at the start of a run", _loads(results)],
        ["workers and shards", f"{results.workers} and {results.shards}"],
        ["links", ", ".join(link_text(link) for link in results.bandwidths) + f"; limited by a {results.link}"],
        ["speed on limited links", speed],
        ["seeds", ", ".join(f"{seed}" for seed in results.seeds)],
        ["judged on", f"{metric_name(results.metric)} of {results.split}, at the best evaluation on "
                      f"{results.deciding_split}"],
        *(["what no model can beat", f"{metric_name(metric)} {value:.4f}"]
          for metric, value in results.reachable.items() if value is not None),
        ["runs", f"{len(results.runs)}, of which {sum(not run.ok for run in results.runs)} failed"],
        ["time of all runs", digits(results.seconds / 60) + " min"],
    ]  # fmt: skip
    columns = ["", ""]
    return Table(title="Conditions", columns=columns, rows=rows, words=columns)


def _loads(results: Results) -> str:
    loads = [run.load_average for run in results.runs]
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else NONE
