"""Address space for tables that grow without moving: reserved at once, backed by memory when first written."""

from __future__ import annotations

import mmap
import os
from typing import TypeVar

import numpy as np
import numpy.typing as npt

# Linux's value on every architecture that numba knows; the mmap module names it only from Python 3.13 on
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_HUGEPAGE") else 0)
_HUGE_PAGE = 2 << 20

S = TypeVar("S", bound=np.generic)


class Arena:
    """One reserved mapping, handed out as arrays of zeros from its start.

    OSError when the system refuses the reservation (`ulimit -v`, vm.overcommit_memory=2).
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _pages(nbytes)
        self._used = 0
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)

    def take(self, dtype: type[S], count: int, *, huge: bool = False) -> npt.NDArray[S]:
        """(count,) zeros of the next pages; `huge` advises huge pages after 2 MiB, so that small stays small."""
        start = self._used
        nbytes = count * np.dtype(dtype).itemsize
        self._used += _pages(nbytes)
        assert self._used <= self.nbytes
        if huge and nbytes > _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE, start + _HUGE_PAGE, _pages(nbytes) - _HUGE_PAGE)
        return np.frombuffer(self._map, dtype, count, start)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
