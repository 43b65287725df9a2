"""Files of who took which item, as their authors publish them, read without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Ids
from embershard.proto.errors import JobError
from embershard.worker.data.files import LOOK_BYTES, Block, read_blocks
from embershard.worker.data.text import BOM, Layout, column, read_tables

_PAIRS = Layout(columns={"user": "id", "item": "id"}, delimiter="\t")
_RATING = Layout(columns={"user": "id", "item": "id", "rating": "number", "time": "number"}, delimiter="\t")


def look_at_lists(paths: Iterable[Path]) -> None:
    """Parse the first lines of interaction lists. JobError names file:line of what is wrong."""
    for path in paths:
        for number, line in _lines(next(read_blocks(path, LOOK_BYTES))):
            _parse_list(path, number, line.split())


def look_at_ncf(prefix: Path) -> None:
    """Parse the first lines of the three files of the NCF paper. JobError names file:line of what is wrong."""
    for path, layout in ((Path(f"{prefix}.train.pairs"), _PAIRS), (Path(f"{prefix}.test.rating"), _RATING)):
        next(read_tables(path, layout, block_bytes=LOOK_BYTES))
    path = Path(f"{prefix}.test.negative")
    for number, line in _lines(next(read_blocks(path, LOOK_BYTES))):
        _parse_candidates(path, number, line)


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """Numbers and texts of the lines of a block that are not empty; as Arrow, they end at LF, CR LF or CR."""
    text = block.text.removeprefix(BOM) if block.first_line == 1 else block.text
    return ((number, line) for number, line in enumerate(text.splitlines(), block.first_line) if line.strip())


def read_lists(path: Path) -> tuple[Ids, Ids]:
    """(N,) users and items of a file, in file order."""
    lines: dict[int, int] = {}  # user -> line number
    users, items, counts = [], [], []
    for block in read_blocks(path):
        for number, line in _lines(block):
            fields = line.split()
            numbers = _parse_list(path, number, fields)
            user = int(numbers[0])
            if user in lines:
                raise JobError(where=f"{path}:{number}", reason=f"user {user} has a line already: {lines[user]}")
            lines[user] = number
            users.append(user)
            items.append(numbers[1:])
            counts.append(len(fields) - 1)
    flat = np.concatenate(items) if items else np.empty(0, np.int64)
    return np.repeat(np.array(users, np.int64), counts), flat


def _parse_list(path: Path, number: int, fields: list[bytes]) -> Ids:
    """The user and the items of a line."""
    try:
        numbers = np.array(fields).astype(np.int64)
    except (ValueError, OverflowError):
        numbers = np.array([-1])
    if numbers.min() < 0:
        raise JobError(where=f"{path}:{number}", reason="expected a user and its items, as integers >= 0")
    return numbers


def read_actions(path: Path, delimiter: str) -> tuple[Ids, Ids]:
    """(N,) users and items of a file, a line `user item` per action, in file order."""
    layout = Layout(columns=_PAIRS.columns, delimiter=delimiter)
    parts = [(column(t, "user"), column(t, "item")) for t in read_tables(path, layout)]
    users, items = (np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True))
    return users, items


def look_at_actions(path: Path, delimiter: str) -> None:
    """Parse the first lines of a file of actions. JobError names file:line of what is wrong."""
    next(read_tables(path, Layout(columns=_PAIRS.columns, delimiter=delimiter), block_bytes=LOOK_BYTES))


def read_candidates(prefix: Path) -> tuple[Ids, Ids, npt.NDArray[np.float32]]:
    """(N,) users ascending, items and labels: per user the distinct items, the held-out one last and labelled 1."""
    held_out = _read_held_out(Path(f"{prefix}.test.rating"))
    path = Path(f"{prefix}.test.negative")
    lists: dict[int, list[int]] = {}
    count = 0
    for block in read_blocks(path):
        for number, line in _lines(block):
            user, item, items = _parse_candidates(path, number, line)
            if held_out.get(user) != item:
                reason = f"user {user} has item {item} here, but {held_out.get(user)} in {prefix.name}.test.rating"
                raise JobError(where=f"{path}:{number}", reason=reason)
            count = count or len(items)
            if len(items) != count:
                reason = f"{len(items)} negative items, but {count} in the lines before (cut short?)"
                raise JobError(where=f"{path}:{number}", reason=reason)
            lists[user] = [i for i in dict.fromkeys(items) if i != item] + [item]
    missing = sorted(held_out.keys() - lists.keys())
    if missing:
        raise JobError(where=str(path), reason=f"no line for user {missing[0]} of {prefix.name}.test.rating")
    order = sorted(lists)
    users = np.repeat(order, [len(lists[u]) for u in order]).astype(np.int64)
    labels = np.concatenate([np.r_[np.zeros(len(lists[u]) - 1), 1.0] for u in order]).astype(np.float32)
    return users, np.concatenate([lists[u] for u in order]).astype(np.int64), labels


def _parse_candidates(path: Path, number: int, line: bytes) -> tuple[int, int, list[int]]:
    """The user, the item and its negatives of a line."""
    pair, *rest = line.split()
    try:
        user, item = (int(part) for part in pair[1:-1].split(b","))
        items = [int(part) for part in rest]
        if pair[:1] + pair[-1:] != b"()" or user < 0 or item < 0 or min(items, default=-1) < 0:
            raise ValueError
    except ValueError:
        reason = "expected (user,item) and its negative items, separated by tabs"
        raise JobError(where=f"{path}:{number}", reason=reason) from None
    return user, item, items


def _read_held_out(path: Path) -> dict[int, int]:
    held_out: dict[int, int] = {}
    for table in read_tables(path, _RATING):
        held_out |= dict(zip(column(table, "user").tolist(), column(table, "item").tolist(), strict=True))
    return held_out
