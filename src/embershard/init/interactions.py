"""The text of a job for a table of interactions, which has no label."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from embershard.init.columns import A_TIME, describe_column, yaml_name
from embershard.init.look import MISSING, CannotInit, Look, setting_lines


def interactions_text(data: Path, look: Look, columns: Mapping[str, str | None], folder: Path) -> str:
    """Return the job file for a table of interactions. CannotInit where it has not the columns, or no one time."""
    known = ", ".join(look.columns)
    for name in columns.values():
        if name is not None and name not in look.columns:
            raise CannotInit(path=str(data), reason=f"no column {name!r} (there are: {known})")
    taken = {columns["user"], columns["item"]}
    times = [
        name
        for name, values in look.columns.items()
        if name not in taken and describe_column(name, values, len(values), None) == A_TIME
    ]
    if columns["time"] is None and len(times) != 1:
        found = f"{len(times)} columns of times: {', '.join(times)}" if times else f"no column of times in {known}"
        raise CannotInit(path=str(data), reason=f"{found}; name that of the interaction by --time")
    rows = len(next(iter(look.columns.values())))
    named = ", ".join(f"{what}: {yaml_name(name or times[0])}" for what, name in columns.items())
    settings = {field: value for field, value in look.settings.items() if field in ("encoding", "delimiter")}
    remarks = [line for what in ("user", "item") for line in _check_names(data, what, str(columns[what]), look)]
    lines = [
        f"# Written by `embershard init {data.name}` from its first {rows:,} rows.",
        "model: {name: two_tower}              # or simplex, with negatives: 8 and history: 30 below",
        "data:",
        "  reader: lists",
        f"  train: {json.dumps(os.path.relpath(data.absolute(), folder))}",
        f"  columns: {{{named}}}",
        *remarks,
        *setting_lines(settings),
        "  hold_out: 1                         # each user's latest item is test, the one before valid; or name files",
        "embedding:",
        "  dim: 32",
        "  optimizer: {name: adam, lr: 0.001}",
        "train:",
        "  batch_size: 512",
        "  epochs: 20",
        "  early_stop: {patience: 3}           # ends when so many evaluations in a row are not better",
        "workers: 1",
        "shards: 2",
    ]
    return "\n".join(lines) + "\n"


def _check_names(data: Path, what: str, name: str, look: Look) -> list[str]:
    """Remarks on a column of users or items. CannotInit where these are floats, which no request has."""
    values, missing = look.columns[name], look.missing.get(name, ())
    words = sorted({value for value in values if isinstance(value, str) and value.strip().lower() in MISSING})
    words += sorted(missing)
    # integers beside such a word are looked at as floats, too
    floats = [look.fractions.get(name, "")] if missing else [str(one) for one in values if isinstance(one, float)][:1]
    if any(floats):
        reason = f"the {what}s in column {name!r} are floats, as {floats[0]}: save integers (pandas makes floats of "
        reason += "those in a column with missing cells: leave these rows out, and cast the column to Int64)"
        raise CannotInit(path=str(data), reason=reason)
    return [f"  # {json.dumps(word)} is read as the {what} of that name: leave its rows out" for word in words[:1]]
