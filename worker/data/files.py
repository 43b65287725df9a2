"""Text files as blocks of whole lines, plain or compressed, here or at a URL; errors name the file and the line."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import IO, cast

import numpy as np

from embershard.proto.errors import JobError

File = Path | str  # a local file, or a URL that fsspec reads
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")  # of a frame, and of the one that pzstd writes before each
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_PARQUET = b"PAR1"
_UNREADABLE = {b"\xfd7zXZ\0": "xz", b"PK\3\4": "zip"} | {b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)}
MAX_LINE_BYTES = 64 << 20  # far above any sample; without it a binary file would be read into memory whole
BLOCK_BYTES = 8 << 20  # large enough for a parser's fixed costs to vanish, small enough for many workers' memory
LOOK_BYTES = 64 << 10  # of each file, before anything is trained
_PRINTED_BYTES, _PRINTED_BLOCKS = 4 << 10, 4096  # a fingerprint's: of a block, and in all files, two in each at least


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file; `text` ends with a newline unless the file does not."""

    first_line: int  # number of its first line, from 1
    text: bytes

    @property
    def is_blank(self) -> bool:
        """Whether it has no line with more than blanks."""
        return not self.text or self.text.isspace()


def is_delimiter(text: str) -> bool:
    """Whether it can part the fields of a line: parsers take one byte, which has no other meaning."""
    return len(text) == 1 and text.isascii() and text not in '"\r\n'


@contextmanager
def reading(path: File) -> Iterator[None]:
    """While a file or folder is looked at or read: JobError in place of what the system says of it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise JobError(where=str(path), reason="no such file; check the path") from None
    except IsADirectoryError:
        raise JobError(where=str(path), reason="is a folder, and a file is needed; name one in it") from None
    except OSError as error:
        if error.errno is None:  # not of the system: gzip and Arrow say by it what is wrong with the content
            raise
        raise JobError(where=str(path), reason=f"cannot be read: {os.strerror(error.errno)}") from None


def is_url(path: File) -> bool:
    """Whether fsspec is to read it."""
    return isinstance(path, str) and "://" in path


def as_file(folder: Path, name: str) -> File:
    """A file that a job names: a URL, or a path that starts at a folder."""
    return name if is_url(name) else folder / name


def real_path(path: File) -> str:
    """Return one name for all names of a local file, as d/../a.csv or a link; a URL as it is."""
    return str(path) if is_url(path) else os.path.realpath(path)


def open_binary(path: File) -> IO[bytes]:
    """A file's bytes, as they are stored. JobError where a storage cannot be reached; what `reading` turns into one."""
    if not is_url(path):
        return Path(path).open("rb")
    import fsspec

    try:
        return cast(IO[bytes], fsspec.open(path, "rb").open())
    except FileNotFoundError:
        raise
    except Exception as error:  # a storage's own package may fail in any way
        raise JobError(where=str(path), reason=f"cannot be read: {error}") from None


def expand(path: File, endings: tuple[str, ...]) -> list[File]:
    """The files of a folder that end so, those that a pattern with * fits, or the file itself; in order of names.

    Of several files those without a byte, compressed ones as well, are left out: Spark writes one for a partition
    without rows.
    """
    if is_url(path):
        import fsspec

        try:
            files, root = fsspec.core.url_to_fs(path)
            scheme = str(path).partition("://")[0]
            if "*" in str(path):
                found = list(files.glob(root, detail=True).values())
            elif files.isdir(root):
                found = [info for info in files.ls(root, detail=True) if info["name"].lower().endswith(endings)]
            else:
                return [path]
        except Exception as error:  # a storage's own package may fail in any way
            raise JobError(where=str(path), reason=f"cannot be read: {error}") from None
        sizes: dict[File, int | None] = {
            f"{scheme}://{info['name'].lstrip('/') if scheme != 'file' else info['name']}": info.get("size")
            for info in found
        }
    elif "*" in (local := Path(path)).as_posix() and not local.exists():
        with reading(path):
            folder = next(parent for parent in local.parents if parent.exists())  # whose [1], say, is no pattern
            found = glob.glob(str(local.relative_to(folder)), root_dir=folder, recursive=True)
            sizes = {folder / name: os.path.getsize(folder / name) for name in found}
    else:
        with reading(path):  # glob would take a folder that cannot be read for an empty one
            if not S_ISDIR(local.stat().st_mode):
                return [path]
            sizes = {p: p.stat().st_size for p in local.iterdir() if p.name.lower().endswith(endings)}
    if not sizes:
        kinds = " or ".join(f"*{ending}" for ending in endings)
        what = "no file fits the pattern" if "*" in str(path) else f"no {kinds} file in this folder"
        raise JobError(where=str(path), reason=what)
    filled = [file for file, size in sizes.items() if size != 0 and not (size and _is_packed_nothing(file, size))]
    return sorted(filled or sizes, key=str)


def _is_packed_nothing(path: File, size: int) -> bool:
    """Whether it is a small file that a compressor made of no byte. What is wrong with one is said when it is read."""
    if size > 256 or not str(path).lower().endswith((".gz", ".zst")):
        return False
    try:
        with _open_text(path, _compression(path)) as file:
            return not file.read(1)
    except (EOFError, zlib.error, OSError, JobError):
        return False


def check_readable(path: File) -> bool:
    """Whether the file can be read from its start alone: it is compressed, or at a URL.

    JobError if it is missing, no file, unreadable, empty or not as its name says.
    """
    return bool(_compression(path)) or is_url(path)


def _compression(path: File) -> str:
    """gzip, zstd or nothing, by the first bytes."""
    with reading(path), open_binary(path) as file:
        start = file.read(10)
    if not start:
        raise JobError(where=str(path), reason="the file is empty")
    magic = start[:4]
    if packed := next((kind for known, kind in _UNREADABLE.items() if start.startswith(known)), ""):
        reason = f"it is packed by {packed}, which is not read: unpack it, or pack it by gzip or zstd"
        raise JobError(where=str(path), reason=reason)
    if magic[:2] in _UTF_16:
        raise JobError(where=str(path), reason="it is UTF-16 text: save it as UTF-8")
    if magic == _PARQUET:
        reason = "it is a Parquet file, no text: let its name end with .parquet, and take reader: tabular"
        raise JobError(where=str(path), reason=reason)
    found = "gzip" if magic[:2] == GZIP_MAGIC else "zstd" if magic in ZSTD_MAGICS else ""
    for ending, named in ((".gz", "gzip"), (".zst", "zstd")):
        if str(path).endswith(ending) and found != named:
            what = "gzipped" if named == "gzip" else "zstd"
            raise JobError(where=str(path), reason=f"it is named {ending} but is not {what}; rename it or get it again")
    return found


def fingerprint(paths: Sequence[File]) -> dict[str, object]:
    """Number, bytes and a hash of local files in this order: of all that are small, and of blocks all over larger ones.

    Empty where one is at a URL, of which each block would be a request.
    """
    if any(map(is_url, paths)):
        return {}
    most, total, digest = max(2, min(64, _PRINTED_BLOCKS // len(paths))), 0, hashlib.sha256()
    for path in paths:
        with reading(path), Path(path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            total += size
            digest.update(f"{size} ".encode())
            blocks = min(most, -(-size // _PRINTED_BYTES))
            for start in np.linspace(0, max(0, size - _PRINTED_BYTES), blocks).astype(int).tolist():
                file.seek(start)
                digest.update(file.read(_PRINTED_BYTES))
    return {"files": len(paths), "bytes": total, "sha256": digest.hexdigest()}


def _open_text(path: File, compression: str) -> IO[bytes]:
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(open_binary(path) if is_url(path) else path, "rb"))
    if compression == "zstd":
        import pyarrow as pa

        return cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(open_binary(path), "r"), "zstd"))
    return open_binary(path)


def read_blocks(path: File, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """A file from its start; JobError if it is missing, empty, or a cut or broken compressed file."""
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
    """Return the beginnings of the first lines that are not empty at or behind these bytes of a plain file, each once.

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


def read_text(path: File) -> bytes:
    """Read the whole of a small file."""
    return b"".join(block.text for block in read_blocks(path))


def _whole_lines(path: File, block_bytes: int) -> Iterator[bytes]:
    compression = _compression(path)
    rest: list[bytes] = []  # joined once: a line as long as many reads would be copied with each of them
    held = done = 0
    with reading(path), _open_text(path, compression) as file:
        while True:
            try:
                data = file.read(block_bytes)
            except (EOFError, zlib.error, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the content
                    raise
                where = f"{path}: after {done + held} bytes of text"
                reason = f"the {compression or 'remote'} file is cut or broken ({error}); get it again"
                raise JobError(where=where, reason=reason) from None
            if not data:
                break
            end = data.rfind(b"\n") + 1
            if end:
                yield b"".join((*rest, data[:end]))
                done += held + end
                rest, held = [data[end:]], len(data) - end
            else:
                rest.append(data)
                held += len(data)
                if held > MAX_LINE_BYTES:
                    raise JobError(where=str(path), reason=f"no line ends within {held} bytes; is it a text file?")
    if held:
        yield b"".join(rest)
    elif not done:
        raise JobError(where=str(path), reason="the file is empty")
