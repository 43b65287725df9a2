"""A disk in memory that fails as disks do: power that goes, no room, errors of writes and syncs.

It implements `ps.journal.disk.Disk`. What was not synced is lost, kept or torn by sectors of 512 bytes; names that were
not synced are lost from some moment on, as a journaling file system does.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

SECTOR = 512

Item = TypeVar("Item")


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)  # what processes see
    durable: bytearray = field(default_factory=bytearray)  # what the disk has
    unsynced: set[int] = field(default_factory=set)  # sectors
    smallest: int = 0  # its size at the smallest since it was synced
    allocated: set[int] = field(default_factory=set)

    def write_back(self) -> None:
        """Have the disk have what processes see, but for what an earlier sync has failed to write."""
        size = len(self.data)
        del self.durable[self.smallest :]
        self.durable.extend(bytes(size - len(self.durable)))
        for sector in self.unsynced:  # and no others: after a sync that failed the rest counts as written
            start, end = sector * SECTOR, min((sector + 1) * SECTOR, size)
            self.durable[start:end] = self.data[start:end]
        self.unsynced.clear()
        self.smallest = size


class SimulatedDisk:
    """`capacity` is in bytes (None: no end). `before` is called with each operation and its path, and may raise."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.before: Callable[[str, Path], None] = lambda operation, path: None
        self.operations: list[str] = []
        self.boot = 1
        self._names: dict[Path, Inode] = {}
        self._durable_names: dict[Path, Inode] = {}
        self._changes: list[tuple[Path | None, Path | None, Inode]] = []  # old and new name, not synced
        self._folders: set[Path] = set()
        self._locks: dict[Path, object] = {}

    def list(self, folder: Path) -> list[str]:
        self._do("list", folder)
        if folder not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        return [path.name for path in (*self._names, *self._folders) if path.parent == folder]

    def make_folder(self, folder: Path) -> None:
        self._do("make_folder", folder)
        self._folders.add(folder)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> SimulatedFile:
        self._do("open", path)
        if create and path.parent not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if create and path not in self._names:
            self._names[path] = Inode()
            self._changes.append((None, path, self._names[path]))
        elif create:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        elif path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return SimulatedFile(self, path, self._names[path])

    def rename(self, old: Path, new: Path) -> None:
        self._do("rename", old)
        self._names[new] = self._names.pop(old)
        self._changes.append((old, new, self._names[new]))

    def remove(self, path: Path) -> None:
        self._do("remove", path)
        self._changes.append((path, None, self._names.pop(path)))

    def remove_folder(self, folder: Path) -> None:
        self._do("remove_folder", folder)
        if self.list(folder):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))
        self._folders.remove(folder)

    def sync_folder(self, folder: Path) -> None:
        self._do("sync_folder", folder)
        self._durable_names = dict(self._names)
        self._changes.clear()

    def lock(self, path: Path) -> SimulatedLock:
        self._do("lock", path)
        if path in self._locks:
            raise BlockingIOError(errno.EWOULDBLOCK, "process 1 on simulated")
        return SimulatedLock(self._locks, path)

    def free_bytes(self, folder: Path) -> int:
        if self.capacity is None:
            return 2**62
        return self.capacity - SECTOR * sum(len(inode.allocated) for inode in self._inodes())

    def boot_id(self) -> int:
        return self.boot

    def read_ahead(self, items: Iterator[Item], num_bytes: Callable[[Item], int] | None = None) -> Iterator[Item]:
        return items  # a simulation has one thread

    # what happens to it

    def kill(self) -> None:
        """The process ends; the machine goes on."""
        self._locks.clear()
        self.before = lambda operation, path: None

    def lose_power(self, random: random.Random) -> None:
        """The machine ends, and starts again with what the disk has."""
        self.kill()
        self.boot += 1
        names = dict(self._durable_names)
        for old, new, inode in self._changes[: random.randint(0, len(self._changes))]:
            if old is not None:
                names.pop(old, None)
            if new is not None:
                names[new] = inode
        self._names, self._durable_names, self._changes = names, dict(names), []
        self._folders |= {path.parent for path in names}  # one that was removed may come back, as its files do
        for inode in self._inodes():
            _tear(inode, random)

    def write_back(self) -> None:
        """The kernel writes what it has to the disk, as it does from time to time."""
        self._durable_names = dict(self._names)
        self._changes.clear()
        for inode in self._inodes():
            inode.write_back()

    def copy(self) -> SimulatedDisk:
        """The same disk, as a copy of what processes see, all of it synced."""
        other = SimulatedDisk(self.capacity)
        other.boot, other._folders = self.boot, set(self._folders)
        for path, inode in self._names.items():
            allocated = set(inode.allocated)
            other._names[path] = Inode(bytearray(inode.data), bytearray(inode.data), set(), len(inode.data), allocated)
        other._durable_names = dict(other._names)
        return other

    def content(self, path: Path) -> bytearray:
        """The bytes of a file, to be changed at will."""
        return self._names[path].data

    def _do(self, operation: str, path: Path) -> None:
        self.operations.append(operation)
        self.before(operation, path)

    def _inodes(self) -> list[Inode]:
        return list({id(inode): inode for inode in self._names.values()}.values())

    def _allocate(self, inode: Inode, sector: int) -> None:
        if sector not in inode.allocated:
            if self.free_bytes(Path()) < SECTOR:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            inode.allocated.add(sector)


class Worst(random.Random):
    """The numbers of a loss of power by which nothing that was not synced is kept."""

    def choice(self, options: Sequence[object]) -> object:
        return "lost"

    def randint(self, low: int, high: int) -> int:
        return low


def _tear(inode: Inode, random: random.Random) -> None:
    """Give a file the content that it has after a loss of power."""
    after = bytearray(inode.durable)
    if random.random() < 0.5:
        after = after[: len(inode.data)].ljust(len(inode.data), b"\0")
    fate = random.choice(["lost", "kept", "mixed", "mixed"])
    for sector in sorted(inode.unsynced):
        start = sector * SECTOR
        happens = fate if fate != "mixed" else random.choice(["lost", "kept", "torn"])
        length = {"lost": 0, "kept": SECTOR, "torn": random.randint(0, SECTOR)}[happens]
        new = inode.data[start : start + length]
        if start < len(after):
            new = new[: len(after) - start]
            after[start : start + len(new)] = new
    inode.data, inode.durable, inode.unsynced, inode.smallest = bytearray(after), after, set(), len(after)


class SimulatedFile:
    def __init__(self, disk: SimulatedDisk, path: Path, inode: Inode) -> None:
        self._disk, self._path, self._inode = disk, path, inode

    def size(self) -> int:
        return len(self._inode.data)

    def pread(self, num_bytes: int, offset: int) -> bytes:
        self._disk._do("pread", self._path)
        return bytes(self._inode.data[offset : offset + num_bytes])

    def pread_into(self, target: memoryview, offset: int) -> int:
        data = self.pread(len(target), offset)
        target[: len(data)] = data
        return len(data)

    def pwritev(self, pieces: list[bytes | memoryview], offset: int) -> None:
        self._disk._do("pwritev", self._path)
        data = b"".join(pieces)
        inode = self._inode
        for at in range(offset - offset % SECTOR, offset + len(data), SECTOR):
            self._disk._allocate(inode, at // SECTOR)  # what comes before it is written
            start, end = max(at, offset), min(at + SECTOR, offset + len(data))
            inode.data.extend(bytes(max(0, end - len(inode.data))))
            inode.data[start:end] = data[start - offset : end - offset]
            inode.unsynced.add(at // SECTOR)

    def reserve(self, num_bytes: int) -> None:  # as file systems do that cannot reserve
        for offset in range(0, num_bytes, 2**20):
            self.pwritev([bytes(min(2**20, num_bytes - offset))], offset)

    def sync(self) -> None:
        self._disk._do("sync", self._path)
        self._inode.write_back()

    def truncate(self, num_bytes: int) -> None:
        self._disk._do("truncate", self._path)
        data = self._inode.data
        data[:] = data[:num_bytes].ljust(num_bytes, b"\0")
        self._inode.smallest = min(self._inode.smallest, num_bytes)
        self._inode.allocated = {sector for sector in self._inode.allocated if sector * SECTOR < num_bytes}
        self._inode.unsynced = {sector for sector in self._inode.unsynced if sector * SECTOR < num_bytes}

    def close(self) -> None:
        pass


class SimulatedLock:
    def __init__(self, locks: dict[Path, object], path: Path) -> None:
        self._locks, self._path = locks, path
        locks[path] = self

    def is_held(self) -> bool:
        return self._locks.get(self._path) is self

    def close(self) -> None:
        if self.is_held():
            del self._locks[self._path]
