"""Delimited text files, read block by block and shared out over workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from embershard.proto.errors import JobError
from embershard.worker.data.files import (
    BLOCK_BYTES,
    Block,
    check_readable,
    count_lines,
    line_starts,
    read_blocks,
    read_range,
    reading,
)
from embershard.worker.data.rows import Samples
from embershard.worker.data.text import Layout, parse, read_tables, without_lines

_LOOK_BYTES = 64 << 10  # of each file, before anything is trained


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Files of one layout; `to_rows` makes samples of a parsed table.

    Plain files are cut into ranges of bytes, read in any order. A gzipped file can only be read from its start, so
    each worker reads all of it, parses the blocks of its share and leaves the mixing to the shuffle buffer.
    """

    paths: Sequence[Path]
    layout: Layout
    to_rows: Callable[[pa.Table, Layout], Samples]
    has_header: bool = False
    block_bytes: int = BLOCK_BYTES

    @property
    def where(self) -> str:
        """The first file."""
        return str(self.paths[0])

    def check(self) -> None:
        """Parse the start of every file."""
        for path in self.paths:
            next(read_tables(path, self.layout, skip_lines=int(self.has_header), block_bytes=_LOOK_BYTES))

    def num_rows(self) -> int | None:
        """Not known."""
        return None

    def load(self) -> Samples:
        """Everything."""
        tables = (read_tables(path, self.layout, skip_lines=int(self.has_header)) for path in self.paths)
        return Samples.concat([self.to_rows(table, self.layout) for part in tables for table in part])

    def blocks(self, rank: int, world_size: int, shuffle: np.random.Generator | None) -> Iterator[Samples]:
        """This worker's blocks."""
        gzipped = [path for path in self.paths if check_readable(path)]
        ranges = self._ranges([path for path in self.paths if path not in gzipped], world_size)
        if shuffle is not None:
            ranges = [ranges[i] for i in shuffle.permutation(len(ranges))]
        for path, start, end in ranges[rank::world_size]:
            yield from self._parse_range(path, start, end)
        unpacked = ((path, block) for path in gzipped for block in read_blocks(path, self.block_bytes))
        for number, (path, block) in enumerate(unpacked, len(ranges)):  # a small file is one block: count on over files
            if number % world_size == rank:
                yield from self._parse(path, block)

    def _ranges(self, paths: list[Path], world_size: int) -> list[tuple[Path, int, int]]:
        """(path, start, end) in bytes; about 32 or more for each worker, so that shares differ by little.

        Each has a line of data: else a share could be empty in some epochs, as the order falls out.
        """
        sizes = [_size(path) for path in paths]
        step = max(1, min(self.block_bytes, sum(sizes) // (32 * world_size)))
        whole = step == self.block_bytes  # which no line is longer than: look for none among a large file's ranges
        ranges = []
        for path, size in zip(paths, sizes, strict=True):
            starts = range(0, size, step) if whole else _line_starts(path, size, step, self.has_header)
            ranges += [(path, start, end) for start, end in pairwise((*starts, size))]
        return ranges

    def _parse_range(self, path: Path, start: int, end: int) -> Iterator[Samples]:
        begin, text = read_range(path, start, end)
        if begin == 0:
            yield from self._parse(path, Block(1, text))
            return
        try:
            yield from self._parse(path, Block(2, text))  # not the first line: that is all that matters yet
        except JobError:  # its line number is wrong: count the lines before, which is slow, and parse again
            yield from self._parse(path, Block(1 + count_lines(path, begin), text))

    def _parse(self, path: Path, block: Block) -> Iterator[Samples]:
        if self.has_header and block.first_line == 1:
            block = without_lines(block, 1)
        if block.text.strip():
            yield self.to_rows(parse(path, block, self.layout), self.layout)


@cache  # the same in each epoch, and in each part of one that is dealt out; a few numbers each
def _line_starts(path: Path, size: int, step: int, has_header: bool) -> tuple[int, ...]:
    return tuple(line_starts(path, (max(int(has_header), start) for start in range(0, size, step))))


def _size(path: Path) -> int:
    with reading(path):
        return path.stat().st_size
