"""The figures of a run as tables."""

from __future__ import annotations

from collections.abc import Sequence

from part import Figures


def tables(result: Figures) -> str:
    """Every part, what was compared, DLRM's programs side by side, and where the time of their steps goes."""
    figures = result["figures"]
    found = [f"{result['seconds']} s in all"]
    found.append(
        _table(["part", "", "s"], [[name, _ending(it), it["seconds"]] for name, it in result["parts"].items()])
    )
    checks = [[f"{it['part']}: {it['check']}", it["found"], it["bound"]] for it in figures if "check" in it]
    if checks:
        found.append(_table(["check", "found", "at most"], checks))
    programs = [it for it in figures if "samples_per_s" in it]
    if programs:
        header = ["program", "dim", "batch", "samples/s", "GPU busy", "overlap", "step p50 ms", "p99 ms", "best is"]
        found.append(
            "DLRM; overlap: share of the time of pulls and pushes in which nobody waited for them\n"
            + _table(header, [_row(it, programs) for it in programs])
        )
        found.append(
            "Parts of a step, p50/p99 ms: training thread (host), other threads (beside), between marks (device)\n"
            + _table(["program", "dim", "batch", "where", "parts"], [row for it in programs for row in _parts(it)])
        )
    return "\n\n".join(found)


def _ending(part: Figures) -> str:
    return part.get("last_line", "passed")[:70] if part["passed"] else part["error"]


def _row(its: Figures, programs: Sequence[Figures]) -> list[object]:
    cell = [it["samples_per_s"] for it in programs if (it["dim"], it["batch"]) == (its["dim"], its["batch"])]
    times = max(cell) / its["samples_per_s"]
    shares = [_share(its.get(name)) for name in ("gpu_busy", "overlap")]
    head = [its["program"], its["dim"], its["batch"], f"{its['samples_per_s']:,.0f}"]
    return [*head, *shares, *its["step_ms"], f"{times:.2f}x"]


def _parts(its: Figures) -> list[list[object]]:
    head = [its["program"], its["dim"], its["batch"]]
    groups = {"host": its["host_ms"], "beside": its["beside_ms"], "device": its["device_ms"]}
    return [
        [*head, where, ", ".join(f"{name} {p50:.2f}/{p99:.2f}" for name, (p50, p99) in parts.items())]
        for where, parts in groups.items()
        if parts
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
