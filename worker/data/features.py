"""Where a feature's values stand in a batch, and which table its ids belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embershard.worker.data.inputs.rows import PADDING as PADDING

Pooling = Literal["none", "mean", "sum", "max", "sequence"]


@dataclass(frozen=True, slots=True)
class Field:
    """The columns of one feature in a batch: `width` columns of ids, filled from the left, the rest PADDING.

    `pooling` makes one vector of a list's rows; "none" is that of a single value, "sequence" leaves them one by one.
    """

    name: str
    table: str
    start: int  # its first column of ids
    width: int = 1
    pooling: Pooling = "none"
    weights: int | None = None  # first column of its weights among the dense features, `width` of them


@dataclass(frozen=True, slots=True)
class IdTable:
    """An embedding table and its ids."""

    name: str
    num_ids: int | None  # None: hashes in 0..2**62-1
    dim: int | None = None  # None: that of the job
