"""Memory that a worker shares with the shards of its machine: rows and gradients lie there, and no socket copies them.

A worker makes it, as a memfd, and gives it to a shard when it connects by a Unix socket (docs/wire.md). It alone says
what lies where; a shard checks that it is within, and nothing else of what it finds there is trusted.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import sys
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from embershard.proto.arrays import Array, Floats

HEAP_BYTES = 2**27  # that a worker shares: pages that nobody touches take no memory
SHARED_FROM_BYTES = 2**17  # smaller arrays are as fast through the socket: what is read of them is still in its cache

_ALIGNMENT = 64
_log = logging.getLogger(__name__)


class SharedMemory:
    """A memfd that this process has mapped."""

    def __init__(self, file: int, nbytes: int) -> None:
        """Map `nbytes` of a descriptor, which its caller still has to close."""
        self.nbytes = nbytes
        self._mapping = mmap.mmap(file, nbytes)
        self._whole = np.frombuffer(self._mapping, np.uint8)
        self._address: int = self._whole.ctypes.data

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The memory at an offset, as bytes. ValueError where that is not within."""
        if not 0 <= offset <= self.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of {self.nbytes}")
        return memoryview(self._mapping)[offset : offset + nbytes]

    def offset_of(self, array: Array) -> int | None:
        """Where an array lies, in bytes from the start; None where it is not within."""
        offset: int = array.ctypes.data - self._address
        return offset if 0 <= offset <= self.nbytes - array.nbytes else None


class Descriptor:
    """A file descriptor, closed with this object.

    weakref.finalize would do the same, but Python runs through its list at exit, and a thread that changes the list
    meanwhile makes that fail.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit `os` may be gone already
        close(self.number)


class Process:
    """Another process of this machine. OSError where the system cannot watch it."""

    def __init__(self, number: int) -> None:
        self._file = Descriptor(os.pidfd_open(number))

    def has_ended(self) -> bool:
        """Whether it has ended, whoever may have its number now."""
        poll = select.poll()
        poll.register(self._file.number, select.POLLIN)
        return bool(poll.poll(0))


class SharedHeap(SharedMemory):
    """Shared memory of which arrays are made; the memory of one that nobody has any more is used again.

    Not that of an array which a shard may still read or write, since it did not answer: see `abandon`. Safe for use by
    several threads. OSError where the system has no such memory.
    """

    def __init__(self, nbytes: int = HEAP_BYTES) -> None:
        self._file = Descriptor(os.memfd_create("embershard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        self.file = self._file.number
        os.ftruncate(self.file, nbytes)
        # no access of the shard may be behind its end
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        super().__init__(self.file, nbytes)
        self._abandoned: list[tuple[Process | None, Array]] = []  # blocks, and which process may still use them
        self._free = [(0, nbytes)]  # (start, end), ascending
        self._touched = 0  # up to where this process has taken pages
        self._blocks: dict[int, weakref.ref[Array]] = {}  # by their start
        # A callback of the garbage collector may run within any line, that of a thread with the lock too: so it notes
        # only which block is free.
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def floats(self, *shape: int) -> Floats | None:
        """A new float32 array, its values undefined; None where there is no room, or it is too small to be worth it."""
        nbytes = 4 * int(np.prod(shape))
        if nbytes < SHARED_FROM_BYTES or nbytes > self.nbytes:
            return None
        with self._lock:
            start = self._take(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        if start is None:
            return None
        # the base of all of its views, so that it lives as long as one of them
        block = np.frombuffer(self._mapping, np.float32, nbytes // 4, start)
        freed, end = self._freed, start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._blocks[start] = weakref.ref(block, lambda _: freed.append((start, end)))
        return block.reshape(shape)

    def copy(self, array: Floats) -> Floats | None:
        """A copy of an array; None where there is no room for it."""
        copied = self.floats(*array.shape)
        if copied is not None:
            copied[...] = array
        return copied

    def abandon(self, arrays: Iterable[Array], process: Process | None) -> None:
        """Use the memory of these no more until `process` has ended, which may read or write it at any time.

        None: never. They belong to a request that got no answer.
        """
        with self._lock:
            for array in arrays:
                self._abandoned.append((process, array.base if isinstance(array.base, np.ndarray) else array))

    @property
    def abandoned_bytes(self) -> int:
        """Bytes that are not used again, as far as is known."""
        return sum({id(block): block.nbytes for _, block in tuple(self._abandoned)}.values())

    def _take(self, nbytes: int) -> int | None:
        """The start of a block that is free: the first that is large enough, of which pages were touched before."""
        if self._abandoned:
            self._abandoned = [one for one in self._abandoned if one[0] is None or not one[0].has_ended()]
        while self._freed:
            self._give_back(*self._freed.popleft())
        for place, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[place : place + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                if start + nbytes > self._touched:  # pages are charged to who touches them first: not to the shard
                    self._whole[self._touched : start + nbytes] = 0
                    self._touched = start + nbytes
                return start
        return None

    def _give_back(self, start: int, end: int) -> None:
        del self._blocks[start]
        free = self._free
        place = bisect_left(free, (start, end))
        first, last = place, place
        if place and free[place - 1][1] == start:
            first, start = place - 1, free[place - 1][0]
        if place < len(free) and free[place][0] == end:
            last, end = place + 1, free[place][1]
        free[first:last] = [(start, end)]


_heap: SharedHeap | None = None
_lock = threading.Lock()
_is_possible = True


def is_possible() -> bool:
    """Whether this process can share memory: its Python and system have it, and nobody has switched it off."""
    return _is_possible and sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_GET_SEALS")


def switch_off() -> None:
    """Share no memory over the connections that this process makes or takes from here on."""
    global _is_possible
    _is_possible = False


def shared_heap() -> SharedHeap | None:
    """The heap of this process for a new connection, made at the first; None where there is none.

    It is another one once half of it is not used again. A forked child makes its own.
    """
    global _heap, _is_possible
    with _lock:
        if not is_possible():
            return None
        if _heap is not None and _heap.abandoned_bytes > _heap.nbytes // 2:
            _heap = None
        if _heap is None:
            try:
                _heap = SharedHeap()
            except OSError as error:  # a container's rules, or no memory
                _is_possible = False
                _log.info("no memory is shared with shards, which sockets serve: %s", error.strerror or error)
        return _heap


def empty_floats(num_rows: int, dim: int) -> Floats:
    """An array for rows or their gradients, its values undefined: in shared memory once a shard has it, if it fits."""
    heap = _heap
    found = None if heap is None else heap.floats(num_rows, dim)
    return np.empty((num_rows, dim), np.float32) if found is None else found


def zero_floats(num_rows: int, dim: int) -> Floats:
    """An array of zeros for gradients that are summed in it: in shared memory once a shard has it, if it fits."""
    found = empty_floats(num_rows, dim)
    found.fill(0)
    return found


def _forget() -> None:
    """In a forked child: the heap is its parent's."""
    global _heap, _lock
    _heap, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
