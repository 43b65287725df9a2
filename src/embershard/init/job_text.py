"""The text of a job for a table with a label."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.init.columns import A_TIME, FEW, describe_column, shared_tables, yaml_name
from embershard.init.labels import find_label, label_values, leak
from embershard.init.look import BYTES, ROWS, CannotInit, Look, data_files, setting_lines

# the last two are of pandas
_ROW_NUMBERS = ("id", "index", "row", "row_id", "uuid", "(column 1)", "unnamed: 0", "__index_level_0__")

# A first step of Adagrad moves every element by the whole rate, and DeepFM adds up the products of all pairs of them.
_MANY = 20  # features
_RATE, _RATE_OF_MANY = 0.05, 0.01


def job_text(data: Path, look: Look, label: str | None, folder: Path) -> str:
    """Return the job file for a table. CannotInit where no column can be the label, or none is left for features."""
    label, is_named = find_label(data, look, label), label is not None
    rows, texts = len(look.columns[label]), label_values(look.columns[label], named=is_named)
    shared = shared_tables({name: values for name, values in look.columns.items() if name != label})
    features: dict[str, str] = {}
    skipped, times = [], []
    for name, values in look.columns.items():
        if name == label:
            continue
        found = leak(name, values, look.columns[label])
        if not found and name.lower() in _ROW_NUMBERS and _are_distinct(values, look.starts):
            found = "# NAME: left out, it numbers the rows"
        if name in look.partial:
            found = "# NAME: left out, some files have no such column"
        if name in look.unlike:
            found = f"# NAME: left out, its numbers have {look.unlike[name]}: write all alike"
        found = found or describe_column(name, values, rows, shared.get(name))
        if found.startswith("#"):
            skipped.append(f"  {found.replace('NAME', name if name.isprintable() else json.dumps(name))}")
            times += [name] if found == A_TIME else []
        else:
            features[name] = found
    if blanks := [name for name, found in features.items() if _has_blanks(look, name, found)]:
        reason = "  # blanks in front of a name or a value, or behind it, are a part of it, as in"
        skipped.append(f"{reason} {yaml_name(blanks[0])}: rows of a served model need them, too")
    if not features:
        raise CannotInit(path=str(data), reason="no column but the label is left to learn from")
    if all("type: number" in found for found in features.values()):  # every model has embeddings
        features = dict.fromkeys(features, "{type: number, bucketise: 10}")
    split = "{by: random"
    if times := [name for name in times if None not in look.columns[name]]:
        finest = max(times, key=lambda name: len(set(look.columns[name])))  # of an event, and no date of birth
        files = data_files(data)
        is_whole = len(files) == 1 and rows < ROWS and files[0].stat().st_size < BYTES
        if not is_whole or _parts_by_time(look.columns[finest]):
            split = f"{{by: time, column: {yaml_name(finest)}"
    rate = _RATE if len(features) < _MANY else _RATE_OF_MANY
    path = os.path.relpath(data.absolute(), folder)
    seen = f"its first {rows:,} rows" if len(look.starts) == 1 else f"{rows:,} rows of {len(look.starts)} of its files"
    lines = [
        f"# Written by `embershard init {data.name}` from {seen}. Check what each column is.",
        "model: {name: deepfm, hidden: [64, 32]}",
        "data:",
        "  reader: tabular",
        f"  train: {json.dumps(path)}",
        *setting_lines(look.settings),
        f"  label: {yaml_name(label)}",
        *([f"  label_values: {json.dumps(texts, ensure_ascii=False)}     # of 0, and of 1: check it"] if texts else []),
        f"  split: {split}, valid: 0.1, test: 0.1}}     # or name files: valid: valid.csv, test: test.csv",
        "features:                             # text and ids are hashed to 62 bits: no vocabulary is needed",
        *(f"  {yaml_name(name)}: {found}" for name, found in features.items()),
        *skipped,
        "embedding:",
        "  dim: 16",
        f"  optimizer: {{name: adagrad, lr: {rate}}}",
        "dense:",
        "  optimizer: {name: adam, lr: 0.001}",
        "train:",
        f"  batch_size: {4096 if sum(file.stat().st_size for file in data_files(data)) > 2**25 else 512}",
        "  epochs: 5",
        "  early_stop: {patience: 2}           # ends when so many evaluations in a row are not better",
        "workers: 1",
        "shards: 2",
    ]
    return "\n".join(lines) + "\n"


def _has_blanks(look: Look, name: str, feature: str) -> bool:
    """Whether a feature's name, or some of its values that are no numbers, begin or end with blanks."""
    if name != name.strip() or "type: number" in feature:
        return name != name.strip()
    values = look.columns[name]
    return name in look.blanks or any(isinstance(value, str) and value != value.strip() for value in values)


def _are_distinct(values: Sequence[object], starts: Sequence[int]) -> bool:
    """Whether no value is in a file twice, of more than a few."""
    ends = (*starts[1:], len(values))
    return len(values) > FEW and all(
        len(set(map(str, values[start:end]))) == end - start for start, end in zip(starts, ends, strict=True)
    )


def _parts_by_time(times: Sequence[Any]) -> bool:
    """Whether the latest tenth of all rows, and the tenth before it, are parts of their own: not where few days are."""
    ordered = sorted(times)
    valid, test = (ordered[math.ceil(share * (len(ordered) - 1))] for share in (0.8, 0.9))
    return bool(ordered[0] < valid < test)
