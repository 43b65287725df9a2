"""Disks that fill up and machines that lose power, for bench/chaos.py. Both need root, to mount a file system.

SmallDisk    a tmpfs that can be filled up
PowerDisk    an ext4 in a file whose machine loses power: what was not synced is gone, and the machine starts anew

A loss of power is EXT4_IOC_SHUTDOWN without a flush of the journal, by which the kernel's own tests do it: from then on
the file system writes nothing and fails what it is asked. Mounted again it has what was written out before: what was
synced, and what the kernel happened to write. The machine's new start is another boot_id, mounted over that of /proc.

`own_mounts` puts this process into a mount namespace of its own: nobody else sees these mounts, and they end with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHUTDOWN, _WITHOUT_FLUSH = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH of linux/fs/ext4/ext4.h
_OWN_MOUNTS = "EMBERSHARD_BENCH_OWN_MOUNTS"
_UNMOUNT_SECONDS = 60.0


def own_mounts() -> bool:
    """Begin this script again with mounts of its own, once; whether it has them."""
    if os.environ.get(_OWN_MOUNTS):
        return True
    if os.geteuid() != 0 or _run("unshare", "--mount", "true"):
        return False
    sys.stdout.flush()
    os.execvpe("unshare", ["unshare", "--mount", sys.executable, "-u", *sys.argv], {**os.environ, _OWN_MOUNTS: "1"})


def _run(*words: str) -> int:
    return subprocess.run(words, capture_output=True, check=False).returncode


def _unmount(folder: Path) -> None:
    """Unmount, once nobody uses it any more: a process that was killed may not have ended yet."""
    end = time.monotonic() + _UNMOUNT_SECONDS
    while _run("umount", str(folder)):
        if time.monotonic() > end:
            raise TimeoutError(f"{folder} is in use")
        time.sleep(0.1)


class FillableDisk:
    """A file system of which `fill` leaves no free byte, until `free`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take all that is left."""
        with self._filler.open("ab") as file:
            size, end = shutil.disk_usage(self.folder).free, file.tell()
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), end, size)
                    end += size
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Give it back, for good: a loss of power would bring the file back that was not forgotten by the disk."""
        self._filler.unlink(missing_ok=True)
        folder = os.open(self._filler.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class SmallDisk(FillableDisk):
    """A tmpfs of some bytes."""

    @classmethod
    @contextmanager
    def mounted(cls, folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
        """One at a folder, until the block ends."""
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)
        try:
            yield cls(folder)
        finally:
            _unmount(folder)


class PowerDisk(FillableDisk):
    """An ext4 in a file, and the machine around it, which loses power by `cut` and has it again by `restore`."""

    def __init__(self, folder: Path, image: Path, boot_id: Path) -> None:
        super().__init__(folder)
        self._image, self._boot_id = image, boot_id

    @classmethod
    @contextmanager
    def mounted(cls, folder: Path, num_bytes: int) -> Iterator[PowerDisk]:
        """One at a folder, until the block ends; its file lies beside the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        image, boot_id = folder.with_suffix(".ext4"), folder.with_suffix(".boot_id")
        with image.open("wb") as file:
            file.truncate(num_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        disk = cls(folder, image, boot_id)
        disk._start()
        subprocess.run(["mount", "--bind", str(boot_id), str(BOOT_ID)], check=True)
        try:
            yield disk
        finally:
            _unmount(BOOT_ID)
            _unmount(folder)
            image.unlink()
            boot_id.unlink()

    def sync(self) -> None:
        """Have the kernel write all that it has for this disk."""
        subprocess.run(["sync", "--file-system", str(self.folder)], check=True)

    def cut(self) -> None:
        """Take the power from the disk. The machine's processes must be killed then."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(descriptor)

    def restore(self) -> None:
        """Start the machine again: its processes have ended."""
        _unmount(self.folder)
        self._start()

    def _start(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self._image), str(self.folder)], check=True)
        self._boot_id.write_text(f"{uuid.uuid4()}\n")  # in place: what is mounted is this file
