"""Makes the table that job.yaml trains on, of a file with a line `user item` for each action, in the order of time.

python make_table.py ../../../shared/data/amazon-video-games/video.txt clicks

A row is an action: the item, and the 50 items before it. A user's last action is in test.parquet, the others but the
first in train.parquet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH = 50


def main() -> None:
    """Read the actions, write the tables."""
    actions, folder = np.loadtxt(sys.argv[1], np.int64), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    by_user = actions[np.argsort(actions[:, 0], kind="stable")]
    starts = np.flatnonzero(np.diff(by_user[:, 0], prepend=-1))
    parts: dict[str, list[tuple[int, int, list[int]]]] = {"train": [], "test": []}
    for own in np.split(by_user, starts[1:]):
        user, items = int(own[0, 0]), own[:, 1].tolist()
        for place in range(1, len(items)):
            part = "test" if place == len(items) - 1 else "train"
            parts[part].append((user, items[place], items[max(0, place - LENGTH) : place]))
    for name, rows in parts.items():
        columns = dict(zip(("user", "item", "history"), map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=20_000)
        print(f"{folder / name}.parquet: {len(rows):,} rows")


if __name__ == "__main__":
    main()
