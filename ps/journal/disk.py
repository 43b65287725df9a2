"""What a log needs of a disk, and the disk of this machine; a simulated one takes its place in tests."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from embershard.proto.snapshot import folders

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MAX_PIECES = 1024  # IOV_MAX of Linux: what one pwritev takes
_BATCH_BYTES = 4 * 2**20  # that one thread hands to another at a time, so that small records cost no switch each
_BATCH_ITEMS = 1024
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # connections have taken all that a process, or the machine, may open
_DESCRIPTOR_PAUSE = 0.1  # seconds until the next look for one that is free
_DIRECT_BYTES = 2**20  # less is left to the page cache and what it reads ahead

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item")


def page_aligned(num_bytes: int) -> memoryview:
    """Memory that begins with a page, into which a file can be read past the page cache."""
    memory = np.empty(num_bytes + mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + num_bytes].data


class DiskFile(Protocol):
    """An open file, read and written at offsets; OSError where the disk refuses."""

    def size(self) -> int:
        """The size of the file in bytes."""
        ...

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """The bytes at an offset; fewer only at the end of the file."""
        ...

    def pread_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` with the bytes at an offset; how many there are: fewer only at the end of the file."""
        ...

    def pwritev(self, pieces: Sequence[ReadableBuffer], offset: int) -> None:
        """Write all pieces, one behind the other. After an error, any part of them may be written."""
        ...

    def sync(self) -> None:
        """Wait until what was written is on the disk, and what is needed to read it."""
        ...

    def truncate(self, num_bytes: int) -> None:
        """Set its size; new bytes are 0."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Have the disk give a new file room for so many bytes, which are 0. OSError where it has not that much."""
        ...

    def close(self) -> None:
        """Close the file; what was not synced may still be lost with the machine's power."""
        ...


class DiskLock(Protocol):
    """The lock of a folder, until it is closed or its process ends."""

    def is_held(self) -> bool:
        """Whether it is still this process's: a network drive may lose a lock without a word."""
        ...

    def close(self) -> None:
        """Unlock the folder, so that another process can use it."""
        ...


class Disk(Protocol):
    """The files of a machine. All methods raise OSError."""

    def list(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder."""
        ...

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, where they are missing."""
        ...

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> DiskFile:
        """Open a file; one that `create` makes must be new."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of the file that has it."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; it may come back after a loss of power until its folder is synced."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder without files."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        ...

    def lock(self, path: Path) -> DiskLock:
        """Lock by this file; BlockingIOError, with its holder, while another process does."""
        ...

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this process may still write there."""
        ...

    def boot_id(self) -> int:
        """A number that the machine gets anew with each start; 0 where it is not known."""
        ...

    def read_ahead(self, items: Iterator[_Item], num_bytes: Callable[[_Item], int] | None = None) -> Iterator[_Item]:
        """The items of an iterator that reads files, made while the caller handles those before.

        One item is made ahead, and the memory of the one before it may be used for the next. With `num_bytes`, the size
        of an item, it is a batch of them, so that small ones cost no switch of threads each; an error of the iterator
        may then come before the last items that it made.
        """
        ...


class LocalDisk:
    """The file systems of this machine."""

    def list(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder."""
        return os.listdir(folder)

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, where they are missing."""
        folders.make_folder(folder)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> DiskFile:
        """Open a file; one that `create` makes must be new."""
        flags = os.O_RDWR if write else os.O_RDONLY
        descriptor = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0) | os.O_CLOEXEC, 0o644)
        return _LocalFile(descriptor, path)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of the file that has it."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file; it may come back after a loss of power until its folder is synced."""
        path.unlink()

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder without files."""
        folder.rmdir()

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        is_stalled = False
        while True:
            try:
                folders.sync(folder)
            except OSError as error:  # one that was not tried has not failed
                if error.errno not in NO_DESCRIPTORS:
                    raise
                if not is_stalled:
                    _log.error("a folder of the event log is not synced yet, pushes may wait: %s", error)
                is_stalled = True
                time.sleep(_DESCRIPTOR_PAUSE)
            else:
                return

    def lock(self, path: Path) -> DiskLock:
        """Lock by this file; BlockingIOError, with its holder, while another process does."""
        return _LocalLock(path)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this process may still write there."""
        return shutil.disk_usage(folder).free

    def boot_id(self) -> int:
        """A number that the machine gets anew with each start; 0 where it is not known."""
        with suppress(OSError):
            return xxh3_64_intdigest(Path("/proc/sys/kernel/random/boot_id").read_bytes())
        return 0

    def read_ahead(self, items: Iterator[_Item], num_bytes: Callable[[_Item], int] | None = None) -> Iterator[_Item]:
        """The items of an iterator that reads files, made by a thread while the caller handles those before."""

        def next_batch() -> list[_Item]:
            batch: list[_Item] = []
            left = _BATCH_BYTES
            while left > 0 and len(batch) < _BATCH_ITEMS:
                item = next(items, None)
                if item is None:
                    break
                batch.append(item)
                left -= _BATCH_BYTES if num_bytes is None else num_bytes(item)
            return batch

        with ThreadPoolExecutor(1, "read-ahead") as thread:
            future = thread.submit(next_batch)
            while batch := future.result():
                future = thread.submit(next_batch)
                yield from batch


class _LocalFile:
    """A file descriptor; `path` is what errors of reads name."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path
        self._direct: int | None = None  # the same file, past the page cache

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def pread(self, num_bytes: int, offset: int) -> bytes:
        try:
            data = os.pread(self._descriptor, num_bytes, offset)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} at byte {offset}", str(self._path)) from None
        if len(data) == num_bytes or not data:
            return data
        return data + self.pread(num_bytes - len(data), offset + len(data))  # a signal, or 2 GiB: Linux's limit

    def pread_into(self, target: memoryview, offset: int) -> int:
        done = self._pread_directly(target, offset)
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} at byte {offset + done}", str(self._path)) from None
            if not count:
                break
            done += count
        return done

    def _pread_directly(self, target: memoryview, offset: int) -> int:
        """Read past the page cache what can be, into the start of `target`; how many bytes.

        Memory for the page cache and a copy out of it cost more than the disk does. What is in the page cache is read
        from there, as it is after the end of a process alone.
        """
        num_bytes = len(target) // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes < _DIRECT_BYTES or offset % mmap.PAGESIZE or self._is_cached(offset):
            return 0
        try:
            if self._direct is None:
                # by the descriptor: another file may be at the path by now
                self._direct = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_DIRECT)
            return os.preadv(self._direct, [target[:num_bytes]], offset)
        except OSError:  # not every file system can, nor into any memory; errors of the disk come again after this
            return 0

    def _is_cached(self, offset: int) -> bool:
        try:
            os.preadv(self._descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except (OSError, AttributeError):  # not every system, or file system, can say it
            pass
        return True

    def pwritev(self, pieces: Sequence[ReadableBuffer], offset: int) -> None:
        for start in range(0, len(pieces), _MAX_PIECES):
            batch = pieces[start : start + _MAX_PIECES]
            want = sum(memoryview(piece).nbytes for piece in batch)
            done = os.pwritev(self._descriptor, batch, offset)
            if done < want:
                self._write_rest(b"".join(batch), done, offset)
            offset += want

    def _write_rest(self, data: bytes, done: int, offset: int) -> None:
        """Write what a short write left: where the disk is full, the next one says so."""
        while done < len(data):
            done += os.pwrite(self._descriptor, memoryview(data)[done:], offset + done)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)

    def reserve(self, num_bytes: int) -> None:
        os.posix_fallocate(self._descriptor, 0, num_bytes)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)


class _LocalLock:
    """A lock by flock(2); the file says whose it is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
            self._words = f"{os.getpid()} {socket.gethostname()} {secrets.token_hex(8)}\n".encode()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._words, 0)
        except OSError:
            os.close(self._descriptor)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process, _, machine = os.pread(self._descriptor, 200, 0).decode(errors="replace").partition(" ")
            holder = f"process {process} on {machine.partition(' ')[0]}" if machine else "another process"
            raise BlockingIOError(errno.EWOULDBLOCK, holder) from None
        with self._path.open() as other:  # some network drives grant every lock
            with suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise OSError(errno.ENOLCK, "its file system grants one lock to two")

    def is_held(self) -> bool:
        try:
            return self._path.read_bytes() == self._words
        except OSError as error:
            return error.errno in NO_DESCRIPTORS and self._is_held_by_descriptor()

    def _is_held_by_descriptor(self) -> bool:
        """As `is_held`, without another descriptor; what a network drive would say anew may be in a cache here."""
        try:
            is_here = os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
            return is_here and os.pread(self._descriptor, len(self._words) + 1, 0) == self._words
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)
