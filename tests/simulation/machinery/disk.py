"""The disk of a simulated machine: operations take time, in which their process may end or its machine lose power."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from harness.simulated_disk import Inode, SimulatedDisk, SimulatedFile

from .world import Process, World

WAITING = {"pwritev": "write", "sync": "sync", "sync_folder": "sync"}


class MachineDisk(SimulatedDisk):
    """`process` is whose operations they are; `on_operation` is called with the kind of each that takes time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.process: Process | None = None
        self.under_way: list[str] = []  # kinds of the operations
        self.writing: list[tuple[Inode, bytes, int]] = []
        self.latency = 2e-4  # seconds
        self.full_until = -1.0
        self.on_operation: Callable[[str, str, float], None] = lambda kind, name, seconds: None
        self.failing: dict[str, str] = {}  # kind of operation -> what happens to the next one

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> SimulatedFile:
        file = super().open(path, write=write, create=create)
        return MachineFile(self, path, file._inode)

    def kill(self) -> None:
        """The process ends, in the middle of what it writes."""
        super().kill()
        self.process = None
        for inode, data, offset in self.writing:
            _write(inode, data[: self.world.random.randint(0, len(data))], offset)
        self.writing.clear()
        self.under_way.clear()
        self.failing.clear()

    def lose_power(self, random: random.Random) -> None:
        super().lose_power(random)
        self.full_until = -1.0

    def sync_all(self) -> None:
        """Have the disk have what processes see."""
        self._durable_names, self._changes = dict(self._names), []
        for inode in self._inodes():
            inode.durable, inode.unsynced, inode.smallest = bytearray(inode.data), set(), len(inode.data)

    def free_bytes(self, folder: Path) -> int:
        return 0 if self.world.now < self.full_until else 2**62

    def _do(self, operation: str, path: Path) -> None:
        kind = WAITING.get(operation)
        if kind is None or self.process is None:
            return
        process, random = self.process, self.world.random
        seconds = self.latency * random.uniform(0.2, 2.0) * (5 if kind == "sync" else 1)
        self.on_operation(kind, path.name, seconds)
        fault = self.failing.pop(kind, "")
        if fault == "slow":
            seconds *= 200
        self.under_way.append(kind)
        self.world.note(process.name, operation, path.name)
        try:
            process.clock.sleep(seconds)
        finally:
            if not process.is_dead:
                self.under_way.remove(kind)
        if fault == "eio" or (fault == "failed sync" and operation == "sync_folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "failed sync":
            self._names[path].unsynced.clear()  # the system says no more of them
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _allocate(self, inode: Inode, sector: int) -> None:
        if sector not in inode.allocated:
            if self.world.now < self.full_until:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            inode.allocated.add(sector)


class MachineFile(SimulatedFile):
    def pwritev(self, pieces: list[bytes | memoryview], offset: int) -> None:
        disk = self._disk
        entry = (self._inode, b"".join(pieces), offset)
        disk.writing.append(entry)
        try:
            super().pwritev([entry[1]], offset)
        finally:
            if any(one is entry for one in disk.writing):
                disk.writing = [one for one in disk.writing if one is not entry]


def _write(inode: Inode, data: bytes, offset: int) -> None:
    if data:
        inode.data.extend(bytes(max(0, offset + len(data) - len(inode.data))))
        inode.data[offset : offset + len(data)] = data
        inode.unsynced.update(range(offset // 512, (offset + len(data) - 1) // 512 + 1))
        inode.allocated.update(range(offset // 512, (offset + len(data) - 1) // 512 + 1))
