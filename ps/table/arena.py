"""Arrays of zeros that grow: address space is reserved in steps, memory is taken when a page is first written."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

# Linux's values on every architecture that numba knows; the mmap module names the first only from Python 3.13 on
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_HUGEPAGE") else 0)
_REMAP_MAYMOVE, _REMAP_FIXED = 1, 2
_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_FAILED = ctypes.c_void_p(-1).value
_HUGE_PAGE = 2 << 20
_FEW_HUGE_PAGES = 8  # the last one is taken whole, and the memory budget counts what is in use of it
_FEW_BYTES = 1 << 26  # whose memory costs less than a thread
_POPULATED_BYTES = 1 << 21  # at once

S = TypeVar("S", bound=np.generic)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
if _can_move := hasattr(_libc, "mremap"):
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapping:
    """A range of addresses that is this object's, and ends with it; numpy keeps it as the base of its arrays."""

    def __init__(self, nbytes: int) -> None:
        # at a multiple of a huge page: only between such places huge pages move whole
        size = nbytes + _HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        found = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if found == _FAILED:
            raise _os_error()
        self.address, self.nbytes = -(-found // _HUGE_PAGE) * _HUGE_PAGE, nbytes
        for start, end in ((found, self.address), (self.address + nbytes, found + size)):
            if start < end:
                _libc.munmap(start, end - start)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def take_over(self, other: _Mapping) -> None:
        """Have the content of a smaller mapping, which has none after it."""
        if not _can_move:
            ctypes.memmove(self.address, other.address, other.nbytes)
        else:
            flags = _REMAP_MAYMOVE | _REMAP_FIXED
            # all of it becomes one range with the other's advice, so that it can move again
            if _libc.mremap(other.address, other.nbytes, self.nbytes, flags, self.address) == _FAILED:
                raise _os_error()
            other.nbytes = 0

    def __del__(self) -> None:
        if getattr(self, "nbytes", 0):
            _libc.munmap(self.address, self.nbytes)


class Arena:
    """One array of zeros. OSError when the system refuses the address space (`ulimit -v`, vm.max_map_count).

    It moves when it grows: whoever holds its array must let go of it first, for the old addresses are no memory then.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping = _Mapping(_pages(nbytes))
        self._huge = False
        self._advise("MADV_NOHUGEPAGE")  # where the system gives them to all, an empty table would take several

    @property
    def nbytes(self) -> int:
        """The bytes of address space that are mapped."""
        return self._mapping.nbytes

    def array(self, dtype: type[S]) -> npt.NDArray[S]:
        """All of it, as numbers of a type."""
        whole: npt.NDArray[np.uint8] = np.asarray(self._mapping)
        return whole[: self.nbytes // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)

    def grow(self, nbytes: int) -> None:
        """Have address space for so many bytes; nothing happens where there is enough."""
        if nbytes > self.nbytes:
            larger = _Mapping(_pages(nbytes))
            larger.take_over(self._mapping)
            self._mapping = larger
            self._huge = self._huge and _can_move

    def use_huge_pages(self, used_bytes: int) -> None:
        """Advise huge pages once more than a few are in use, so that small stays small."""
        if not self._huge and used_bytes > _FEW_HUGE_PAGES * _HUGE_PAGE:
            self._advise("MADV_HUGEPAGE")
            self._huge = True

    def _advise(self, name: str) -> None:
        """Give the system an advice of the mmap module, if it knows it; it may be refused."""
        if (advice := getattr(mmap, name, None)) is not None:
            _libc.madvise(self._mapping.address, self.nbytes, advice)

    @contextmanager
    def populating(self, first: int, end: int, written: Callable[[], int]) -> Iterator[None]:
        """While bytes `first` to `end` are filled in this context, take their memory in a thread, the last first.

        The first use of a page costs more than writing rows into it, where the machine has to find and to clear the
        page first; two threads share that cost. `written` says how far the caller is. Few bytes are left alone.
        """
        if end - first < _FEW_BYTES:
            yield
            return
        ended = threading.Event()

        def populate() -> None:
            for at in range(end - _POPULATED_BYTES, first, -_POPULATED_BYTES):
                if ended.is_set() or written() >= at or not self.populate(at, _POPULATED_BYTES):
                    return

        thread = threading.Thread(target=populate, name="populate", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def populate(self, first: int, nbytes: int) -> bool:
        """Take the memory of so many bytes from byte `first` on now, not at their first use; False where it cannot be.

        The call releases the GIL; other threads may use the array meanwhile.
        """
        first = first // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = min(_pages(nbytes), self.nbytes - first)
        return _can_move and _libc.madvise(self._mapping.address + first, nbytes, _POPULATE_WRITE) == 0


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
