"""Read what is readable of a run's folder: log.jsonl and profile.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embershard.worker.reporting.log import FILE_NAME

PROFILE_FILE = "profile.json"  # worker/reporting/profile.py writes it, and imports torch
_LARGEST_PROFILE = 16 * 2**20  # bytes; one of ours has a few thousand

Line = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The last run in a folder; `mistake` is why nothing of it can be read."""

    folder: Path
    mistake: str = ""
    config: Line | None = None
    train: Sequence[Line] = ()
    evaluations: Sequence[Line] = ()
    result: Line | None = None
    damaged: int = 0  # lines that are no JSON object
    profile: Line | None = None
    profile_mistake: str = ""


def read_run(folder: Path) -> RunRecord:
    """The last run that a folder tells of; memory is bounded by its lines."""
    file = folder / FILE_NAME
    config, result, damaged = None, None, 0
    train: list[Line] = []
    evaluations: list[Line] = []
    try:
        for line in _lines(file):
            match None if line is None else line.get("record"):
                case None:
                    damaged += 1
                case "config":
                    config, result, train, evaluations = line, None, [], []
                case "train":
                    train.append(line or {})
                case "eval":
                    evaluations.append(line or {})
                case "result":
                    result = line
    except OSError as error:
        return RunRecord(folder, mistake=f"{file} cannot be read: {error.strerror or error}")
    if config is None:
        return RunRecord(folder, mistake=f"{file} has no `config` line: it is no log of a run")
    profile, mistake = _profile(folder / PROFILE_FILE)
    return RunRecord(folder, "", config, train, evaluations, result, damaged, profile, mistake)


def number(line: Line | None, *keys: str) -> float | None:
    """The number at a path of keys; None where there is none, or no finite one."""
    value: object = line
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _lines(file: Path) -> Iterator[Line | None]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            if text.strip():
                yield _object(text)


def _object(text: str) -> Line | None:
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _profile(file: Path) -> tuple[Line | None, str]:
    if not file.exists():
        return None, ""
    try:
        if file.stat().st_size > _LARGEST_PROFILE:
            return None, f"{file} is no profile of ours: it is too large"
        profile = _object(file.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return None, f"{file} cannot be read: {error.strerror or error}"
    return profile, "" if profile is not None else f"{file} is not JSON"
