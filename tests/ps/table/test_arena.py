"""Reserved address space: costs nothing until it is written."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from embershard.ps.table.arena import Arena, physical_memory


def test_a_reservation_far_over_the_memory_takes_none_of_it():
    before = psutil.Process().memory_info().rss
    arena = Arena(4 * physical_memory())
    array = arena.take(np.float32, physical_memory() // 4, huge=True)
    array[:1000] = 1
    array[-1000:] = 1
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_what_is_handed_out_is_zero_disjoint_and_aligned():
    arena = Arena(1 << 20)
    first, second = arena.take(np.uint32, 5), arena.take(np.uint64, 7)
    assert not first.any()
    assert not second.any()
    first[:] = 0xFFFFFFFF
    assert not second.any()
    assert first.ctypes.data % 4096 == second.ctypes.data % 4096 == 0
    assert first.flags.writeable


def test_arrays_keep_the_memory_alive():
    array = Arena(1 << 16).take(np.int64, 100)
    array[:] = np.arange(100)
    assert array.sum() == 4950


def test_an_impossible_reservation_is_an_oserror():
    with pytest.raises(OSError, match="memory"):
        Arena(1 << 60)


def test_memory_returns_when_the_last_array_goes():
    before = psutil.Process().memory_info().rss
    array = Arena(64 << 20).take(np.int64, 8 << 20)
    array[:] = 1
    assert psutil.Process().memory_info().rss - before > 60 << 20
    del array
    assert psutil.Process().memory_info().rss - before < 16 << 20
