"""Reserved address space: costs nothing until it is written, and moves with its content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from embershard.ps.memory import physical_memory
from embershard.ps.table import arena as module
from embershard.ps.table.arena import Arena


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_reservation_far_over_the_memory_takes_none_of_it():
    before = resident()
    arena = Arena(4 * physical_memory())
    arena.use_huge_pages(4 << 20)
    array = arena.array(np.float32)
    array[:1000] = 1
    array[-1000:] = 1
    assert resident() - before < 16 << 20


def test_arrays_are_zero_and_begin_at_a_huge_page():
    arena = Arena(100)
    for dtype in (np.float32, np.uint64):
        array = arena.array(dtype)
        assert array.nbytes == arena.nbytes == 4096
        assert not array.any()
        assert array.ctypes.data % (2 << 20) == 0
        assert array.flags.writeable


@pytest.mark.parametrize("can_move", [True, False])
def test_what_was_written_is_there_after_a_growth(monkeypatch, can_move):
    monkeypatch.setattr(module, "_can_move", can_move and module._can_move)
    arena = Arena(8 << 20)
    arena.use_huge_pages(4 << 20)
    arena.array(np.int64)[:] = np.arange(1 << 20)
    arena.grow(1 << 20)
    assert arena.nbytes == 8 << 20
    arena.grow(64 << 20)
    array = arena.array(np.int64)
    assert array.nbytes == 64 << 20
    assert np.array_equal(array[: 1 << 20], np.arange(1 << 20))
    assert not array[1 << 20 :].any()


def test_a_growth_copies_nothing():
    arena = Arena(64 << 20)
    arena.array(np.uint8)[:] = 1
    before = resident()
    arena.grow(256 << 20)
    assert abs(resident() - before) < 8 << 20


@pytest.mark.skipif(not module._can_move, reason="arrays are copied here")
def test_an_arena_stays_one_range_of_addresses_so_that_it_can_move_again():
    arena = Arena(8 << 20)
    arena.use_huge_pages(4 << 20)
    for nbytes in (8 << 20, 32 << 20, 128 << 20):
        arena.grow(nbytes)
        array = arena.array(np.uint8)
        array[::4096] += 1
        start, end = array.ctypes.data, array.ctypes.data + nbytes
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(low, 16) <= start and end <= int(high, 16) for low, high in ranges)
    assert array[0] == 3
    assert array[-4096] == 1


def test_arrays_keep_the_memory_alive():
    array = Arena(1 << 16).array(np.int64)
    array[:100] = np.arange(100)
    assert array.sum() == 4950


def test_an_impossible_reservation_is_an_oserror():
    with pytest.raises(OSError, match="memory"):
        Arena(1 << 60)


def test_a_growth_that_is_refused_leaves_what_was_there():
    arena = Arena(4096)
    arena.array(np.int64)[0] = 7
    with pytest.raises(OSError, match="memory"):
        arena.grow(1 << 60)
    assert arena.nbytes == 4096
    assert arena.array(np.int64)[0] == 7


def test_memory_returns_when_the_last_array_goes():
    before = resident()
    array = Arena(64 << 20).array(np.int64)
    array[:] = 1
    assert resident() - before > 60 << 20
    del array
    assert resident() - before < 16 << 20
