"""Write figures for people: with significant digits and a unit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from embershard.compare.results import Bandwidth, Estimate

NONE = "–"  # noqa: RUF001 - an en dash in a table: there is no such figure


def digits(value: float, significant: int = 3) -> str:
    """Write a number with so many significant digits and thousands separators, never as a power of ten."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NONE
    decimals = significant - 1 - math.floor(math.log10(abs(float(f"{value:.{significant - 1}e}"))))
    return f"{value:,.{min(max(decimals, 0), 12)}f}"


def bytes_text(count: float) -> str:
    """Write a number of bytes in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} B"


def bits_text(per_second: float, significant: int = 3) -> str:
    """Format a bandwidth, in bits per second."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if per_second >= 0.9995 * size:
            return f"{digits(per_second / size, significant).removesuffix('.00').removesuffix('.0')} {unit}"
    return f"{per_second:.0f} bit/s"


def link_text(bandwidth: Bandwidth) -> str:
    """Name a link in a column or on an axis."""
    return "no limit" if bandwidth.bits_per_second is None else bits_text(bandwidth.bits_per_second)


def milliseconds(value: float) -> str:
    """Write milliseconds; less than a microsecond is 0."""
    return f"{digits(value)} ms" if value >= 0.001 else "0 ms"


def seconds_text(value: float) -> str:
    """Format a duration, given in seconds."""
    if value < 60:
        return f"{digits(value)} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def count_text(value: float) -> str:
    """Write a count on an axis."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ratio_text(ratio: float) -> str:
    """Format a ratio, with an x."""
    return f"{_ratio(ratio)}x"


def _ratio(ratio: float) -> str:
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def signed(value: float, decimals: int) -> str:
    """Write a difference with its sign; 0 has none."""
    text = f"{value:+.{decimals}f}"
    return text if any(digit in text for digit in "123456789") else f"{0:.{decimals}f}"


def estimate_decimals(estimate: Estimate, at_least: int) -> int:
    """Choose the decimals that leave two digits of the interval's half width, at most five."""
    if estimate.low is None or estimate.high is None or estimate.high <= estimate.low:
        return at_least
    half = (estimate.high - estimate.low) / 2
    return min(max(at_least, 1 - math.floor(math.log10(half))), 5)


def metric_text(estimate: Estimate) -> str:
    """Write the mean of a metric and its interval."""
    decimals = estimate_decimals(estimate, 4)
    return _with_interval(estimate, lambda value: f"{value:.{decimals}f}")


def difference_text(estimate: Estimate) -> str:
    """Write a mean difference and its interval, signed."""
    decimals = estimate_decimals(estimate, 4)
    return _with_interval(estimate, lambda value: signed(value, decimals))


def speed_up_text(estimate: Estimate) -> str:
    """Write a mean ratio and its interval."""
    return _with_interval(estimate, _ratio, "x")


def _with_interval(estimate: Estimate, text: Callable[[float], str], unit: str = "") -> str:
    mean = f"{text(estimate.mean)}{unit}"
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} [{text(estimate.low)}, {text(estimate.high)}]"


# of built-in metrics that papers write otherwise; others, as those of a user, keep their names
_AS_IN_PAPERS = {name: name.upper() for name in ("auc", "gauc", "ne", "hr", "ndcg", "map")} | {"recall": "Recall"}


def metric_name(metric: str) -> str:
    """Write a metric's name as papers do; its label, or its k, stays as it is."""
    name = re.split("[:@]", metric, maxsplit=1)[0]
    return _AS_IN_PAPERS.get(name, name) + metric[len(name) :]


def is_or_are(count: int) -> str:
    """Choose the verb of so many things."""
    return "is" if count == 1 else "are"


def listed(names: Sequence[str]) -> str:
    """Join names as in: a, b and c."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
