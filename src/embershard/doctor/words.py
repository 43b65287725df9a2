"""How quantities and lists are written in findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 4


def size(num_bytes: int) -> str:
    """Bytes for people."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def some(parts: Sequence[str]) -> str:
    """The first ones, and how many there are beyond."""
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def numbers(values: Iterable[int]) -> str:
    """Numbers with commas between them."""
    return ", ".join(map(str, values))
