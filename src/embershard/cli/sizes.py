"""Sizes in bytes, as options say them."""

from __future__ import annotations

import re

import typer

from embershard.proto.monitoring.memory import usable_memory

_UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", start=1)}}
_UNITS.update({f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", start=1)})
_SMALLEST = 2**20  # bytes


def memory_bytes(text: str) -> int:
    """Bytes of "4GiB", "500MB", "1048576" or "40%", the latter of the container's limit or of the machine."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not found:
        return file_bytes(text, "--memory", "4GiB, 500MB or 80%")
    if float(found[1]) > 100:
        raise typer.BadParameter(f"{text!r} is more than there is; write at most 100%", param_hint="--memory")
    return _checked(text, float(found[1]) * 0.01 * usable_memory(), "--memory")


def file_bytes(text: str, option: str, examples: str = "4GiB or 500MB") -> int:
    """Bytes of "4GiB", "500MB" or "1048576"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found and _UNITS.get(found[2].upper())
    if not found or not unit:
        raise typer.BadParameter(f"{text!r} is no size; write {examples}", param_hint=option)
    return _checked(text, float(found[1]) * unit, option)


def _checked(text: str, size: float, option: str) -> int:
    if not _SMALLEST <= int(size) < 2**63:
        raise typer.BadParameter(f"{text!r} is not between 1 MiB and 8 EiB", param_hint=option)
    return int(size)
