"""Reserved address space: costs nothing until it is written, and moves with its content."""

import mmap
from pathlib import Path

import numpy as np
import psutil
import pytest

from embershard.proto.monitoring.memory import physical_memory
from embershard.ps.table import arena as module
from embershard.ps.table.arena import Arena

MB = 1 << 20


def resident():
    return psutil.Process().memory_info().rss


def test_a_reservation_far_over_the_memory_takes_none_of_it():
    before = resident()
    arena = Arena(4 * physical_memory())
    arena.use_huge_pages(32 * MB)
    array = arena.array(np.float32)
    array[:1000] = 1
    array[-1000:] = 1
    assert resident() - before < 16 * MB


def test_arrays_are_zero_and_begin_at_a_huge_page():
    arena = Arena(100)
    for dtype in (np.float32, np.uint64):
        array = arena.array(dtype)
        assert array.nbytes == arena.nbytes == 4096
        assert not array.any()
        assert array.ctypes.data % (2 * MB) == 0
        assert array.flags.writeable


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_no_huge_pages_are_taken_before_they_are_asked_for_where_the_system_gives_them_to_all():
    arena = Arena(64 * MB)
    assert "nh" in flags_of(arena)
    arena.grow(256 * MB)
    assert "nh" in flags_of(arena)
    arena.use_huge_pages(64 * MB)
    assert "nh" not in flags_of(arena)


def flags_of(arena):
    """What the system was told of the memory of an arena: nh says that it gets no huge pages."""
    first = f"{arena.array(np.uint8).ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(first))
    return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_an_arena_takes_an_eighth_more_than_is_in_use_of_it_at_most():
    for used in (3 * MB, 9 * MB, 17 * MB, 33 * MB):
        arena, before = Arena(64 * MB), resident()
        arena.use_huge_pages(used)
        arena.array(np.uint8)[:used] = 1
        assert resident() - before < used * 9 / 8 + MB // 4


@pytest.mark.parametrize("can_move", [True, False])
def test_what_was_written_is_there_after_a_growth(monkeypatch, can_move):
    monkeypatch.setattr(module, "_can_move", can_move and module._can_move)
    arena = Arena(8 * MB)
    arena.use_huge_pages(32 * MB)
    arena.array(np.int64)[:] = np.arange(MB)
    arena.grow(MB)
    assert arena.nbytes == 8 * MB
    arena.grow(64 * MB)
    array = arena.array(np.int64)
    assert array.nbytes == 64 * MB
    assert np.array_equal(array[:MB], np.arange(MB))
    assert not array[MB:].any()


@pytest.mark.skipif(not module._can_move, reason="arrays are copied here")
def test_an_arena_that_grows_copies_nothing_and_stays_one_range_of_addresses_so_that_it_can_move_again():
    arena = Arena(8 * MB)
    arena.use_huge_pages(32 * MB)
    for nbytes in (8 * MB, 32 * MB, 128 * MB):
        before = resident()
        arena.grow(nbytes)
        assert abs(resident() - before) < 8 * MB
        array = arena.array(np.uint8)
        array[::4096] += 1
        start, end = array.ctypes.data, array.ctypes.data + nbytes
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(low, 16) <= start and end <= int(high, 16) for low, high in ranges)
    assert (array[0], array[-4096]) == (3, 1)


def test_a_reservation_or_a_growth_that_is_refused_leaves_what_was_there():
    with pytest.raises(OSError, match="memory"):
        Arena(1 << 60)
    arena = Arena(4096)
    arena.array(np.int64)[0] = 7
    with pytest.raises(OSError, match="memory"):
        arena.grow(1 << 60)
    assert arena.nbytes == 4096
    assert arena.array(np.int64)[0] == 7


def test_memory_stays_as_long_as_an_array_and_returns_when_the_last_one_goes():
    before = resident()
    array = Arena(64 * MB).array(np.int64)
    array[:] = 1
    assert resident() - before > 60 * MB
    del array
    assert resident() - before < 16 * MB


def test_memory_that_is_populated_is_taken_at_once_and_keeps_its_content():
    arena = Arena(64 * MB)
    array = arena.array(np.uint8)
    array[16 * MB] = 7
    before = resident()
    if not arena.populate(16 * MB, 32 * MB):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert 31 * MB < resident() - before < 40 * MB
    assert array[16 * MB] == 7
    assert not array[16 * MB + 1 : 48 * MB].any()


def test_memory_is_populated_to_the_end_at_most():
    arena = Arena(8 * MB)
    if not arena.populate(6 * MB, 4 * MB):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert arena.nbytes == 8 * MB


def test_without_the_system_call_nothing_is_populated(monkeypatch):
    monkeypatch.setattr(module, "_can_move", False)
    assert not Arena(8 * MB).populate(0, 8 * MB)
