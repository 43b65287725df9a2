"""Text files as blocks of whole lines, plain or gzipped, with true line numbers and errors that name the file."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from embershard.proto.errors import JobError

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 64 << 20  # far above any sample; without it a binary file would be read into memory whole
BLOCK_BYTES = 8 << 20  # large enough for a parser's fixed costs to vanish, small enough for many workers' memory
LOOK_BYTES = 64 << 10  # of each file, before anything is trained


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file; `text` ends with a newline unless the file does not."""

    first_line: int  # number of its first line, from 1
    text: bytes


def is_delimiter(text: str) -> bool:
    """Whether it can part the fields of a line: parsers take one byte, which has no other meaning."""
    return len(text) == 1 and text.isascii() and text not in '"\r\n'


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While a file or folder is looked at or read: JobError in place of what the system says of it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise JobError(where=str(path), reason="no such file; check the path") from None
    except OSError as error:
        if error.errno is None:  # not of the system: gzip and Arrow say by it what is wrong with the content
            raise
        raise JobError(where=str(path), reason=f"cannot be read: {os.strerror(error.errno)}") from None


def check_readable(path: Path) -> bool:
    """Whether the file is gzipped, by its first bytes. JobError if it is missing, no file, unreadable or empty."""
    with reading(path), path.open("rb") as file:
        magic = file.read(2)
    if not magic:
        raise JobError(where=str(path), reason="the file is empty")
    gzipped = magic == GZIP_MAGIC
    if path.suffix == ".gz" and not gzipped:
        raise JobError(where=str(path), reason="it is named .gz but is not gzipped; rename it or get it again")
    return gzipped


def read_blocks(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """A file from its start; JobError if it is missing, empty, or a cut or broken gzip file."""
    line = 1
    for text in _whole_lines(path, block_bytes):
        yield Block(line, text)
        line += text.count(b"\n")


def read_range(path: Path, start: int, end: int) -> tuple[int, bytes]:
    """The lines of a plain file that start in its bytes [start, end), and where the first of them starts."""
    with reading(path), path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline(MAX_LINE_BYTES)
        begin = file.tell()
        text = file.read(max(0, end - begin))
        if text and not text.endswith(b"\n"):
            text += file.readline(MAX_LINE_BYTES)
    return begin, text


def line_starts(path: Path, positions: Iterable[int]) -> list[int]:
    """Where the first line that is not empty begins at or behind each of a plain file's bytes, each place once.

    Positions ascend.
    """
    starts: list[int] = []
    with reading(path), path.open("rb") as file:
        for position in positions:
            if starts and position <= starts[-1]:
                continue
            file.seek(max(0, position - 1))
            if position:
                file.readline(MAX_LINE_BYTES)
            start = file.tell()
            while (line := file.readline(MAX_LINE_BYTES)) and not line.strip(b"\r\n"):
                start = file.tell()
            if not line:
                break
            starts.append(start)
    return starts


def count_lines(path: Path, end: int) -> int:
    """Lines that end in the first `end` bytes of a plain file."""
    lines = 0
    with reading(path), path.open("rb") as file:
        while end > 0 and (data := file.read(min(end, BLOCK_BYTES))):
            lines += data.count(b"\n")
            end -= len(data)
    return lines


def read_text(path: Path) -> bytes:
    """Read the whole of a small file."""
    return b"".join(block.text for block in read_blocks(path))


def _whole_lines(path: Path, block_bytes: int) -> Iterator[bytes]:
    gzipped = check_readable(path)
    rest = b""
    done = 0
    with reading(path), cast(BinaryIO, gzip.open(path, "rb")) if gzipped else path.open("rb") as file:
        while True:
            try:
                data = file.read(block_bytes)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                where = f"{path}: after {done + len(rest)} bytes of text"
                raise JobError(where=where, reason=f"the gzip file is cut or broken ({error}); get it again") from None
            if not data:
                break
            end = data.rfind(b"\n") + 1
            if end:
                yield rest + data[:end]
                done += len(rest) + end
                rest = data[end:]
            else:
                rest += data
                if len(rest) > MAX_LINE_BYTES:
                    raise JobError(where=str(path), reason=f"no line ends within {len(rest)} bytes; is it a text file?")
    if rest:
        yield rest
    elif not done:
        raise JobError(where=str(path), reason="the file is empty")
