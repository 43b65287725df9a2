"""The memory that a worker shares: what is used again, what never is, and where there is none."""

import errno
import fcntl
import gc
import os
import random
import subprocess

import numpy as np
import pytest

from embershard.proto import shared_memory
from embershard.proto.shared_memory import (
    SHARED_FROM_BYTES,
    Process,
    SharedHeap,
    SharedMemory,
    empty_floats,
    shared_heap,
)
from harness.eventually import eventually

UNIT = 4096  # floats; 8 of them are the smallest array


@pytest.fixture
def heap():
    return SharedHeap(16 * SHARED_FROM_BYTES)


@pytest.fixture
def fresh(monkeypatch):
    """This process has shared nothing yet."""
    monkeypatch.setattr(shared_memory, "_heap", None)
    monkeypatch.setattr(shared_memory, "_is_possible", True)


def test_both_sides_see_what_one_writes(heap):
    rows = heap.floats(256, 256)
    other = SharedMemory(heap.file, heap.nbytes)
    rows[...] = 7
    offset = heap.offset_of(rows[3:])
    assert np.frombuffer(other.view(offset, rows[3:].nbytes), np.float32).tolist() == rows[3:].reshape(-1).tolist()
    np.frombuffer(other.view(offset, 4), np.float32)[0] = 9
    assert rows[3, 0] == 9


def test_memory_is_used_again_once_nobody_has_an_array_of_it(heap):
    rows = heap.floats(16 * UNIT)
    view, place = rows.reshape(16, UNIT)[5:7].T, heap.offset_of(rows)
    del rows
    gc.collect()
    assert heap.offset_of(heap.floats(16 * UNIT)) != place
    del view
    assert heap.offset_of(heap.floats(16 * UNIT)) == place


def test_abandoned_memory_is_not_used_again_until_its_process_has_ended(heap):
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process(child.pid)
        rows = heap.floats(16 * UNIT)
        place = heap.offset_of(rows)
        heap.abandon([rows[4:], rows[:2]], process)
        heap.abandon([rows], None)
        del rows
        gc.collect()
        places = {heap.offset_of(heap.floats(UNIT * size)) for size in (16, 32, 48)}
        assert place not in places
        assert heap.abandoned_bytes == 4 * 16 * UNIT  # once
        heap._abandoned.pop()
        assert not process.has_ended()
        child.kill()
        assert eventually(process.has_ended)
    assert heap.offset_of(heap.floats(16 * UNIT)) == place
    assert heap.abandoned_bytes == 0


def test_pages_are_taken_by_who_makes_an_array(heap):
    before = heap._touched
    rows = heap.floats(16 * UNIT)
    assert heap._touched == before + rows.nbytes
    del rows
    assert heap.floats(16 * UNIT) is not None
    assert heap._touched == before + 4 * 16 * UNIT


def test_arrays_do_not_overlap_and_all_memory_comes_back(heap):
    rng, held = random.Random(5), {}
    for number in range(2000):
        if held and rng.random() < 0.5:
            del held[rng.choice(list(held))]
        elif (array := heap.floats(rng.randrange(8 * UNIT, 40 * UNIT))) is not None:
            assert heap.offset_of(array) % 64 == 0
            array.fill(number)
            held[number] = array
        assert all((array == number).all() for number, array in held.items())
    held.clear()
    del array
    assert heap.floats(heap.nbytes // 4) is not None


@pytest.mark.parametrize("floats", [SHARED_FROM_BYTES // 4 - 1, 16 * SHARED_FROM_BYTES // 4 + 1])
def test_small_arrays_and_too_large_ones_are_not_made(heap, floats):
    assert heap.floats(floats) is None
    assert heap.copy(np.ones(floats, np.float32)) is None


def test_what_lies_outside_has_no_place(heap):
    assert heap.offset_of(np.ones(4, np.float32)) is None
    for offset, nbytes in ((-4, 4), (heap.nbytes, 1), (heap.nbytes - 4, 8)):
        with pytest.raises(ValueError, match="bytes at"):
            heap.view(offset, nbytes)


def test_an_array_lies_there_once_a_connection_shares_it(fresh):
    assert type(empty_floats(256, 256).base) is type(None)
    heap = shared_heap()
    rows = empty_floats(256, 256)
    assert heap.offset_of(rows) == 0
    assert heap.offset_of(empty_floats(2, 4)) is None
    assert rows.shape == (256, 256)
    assert shared_heap() is heap


def test_a_heap_of_which_much_was_lost_is_replaced(fresh):
    heap = shared_heap()
    rows = heap.floats(heap.nbytes // 32)
    heap.abandon([rows] * 9, None)
    assert shared_heap() is heap
    others = [heap.floats(heap.nbytes // 32) for _ in range(4)]
    heap.abandon(others, None)
    assert shared_heap() is not heap


def refuse(code):
    def refusing(*_):
        raise OSError(code, os.strerror(code))

    return refusing


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENOMEM])
def test_a_system_that_gives_none_is_done_without(fresh, monkeypatch, caplog, code):
    monkeypatch.setattr(os, "memfd_create", refuse(code))
    caplog.set_level("INFO")
    assert shared_heap() is shared_heap() is None
    assert empty_floats(256, 256).shape == (256, 256)
    assert [record.getMessage() for record in caplog.records] == [
        f"no memory is shared with shards, which sockets serve: {os.strerror(code)}"
    ]


def test_a_user_may_switch_it_off(fresh):
    shared_memory.switch_off()
    assert shared_heap() is None


@pytest.mark.parametrize(("module", "name"), [(os, "memfd_create"), (fcntl, "F_GET_SEALS")])
def test_a_python_that_was_built_without_it_is_done_without(fresh, monkeypatch, module, name):
    monkeypatch.delattr(module, name)
    assert shared_heap() is None
    assert not shared_memory.is_possible()


def test_a_forked_child_makes_its_own(fresh):
    heap = shared_heap()
    rows = empty_floats(256, 256)
    rows.fill(1)
    child = os.fork()
    if not child:
        try:
            mine = empty_floats(256, 256)
            mine.fill(2)
            own = shared_heap()
            empty_floats(256, 256).fill(3)
            os._exit(0 if own is not heap else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert (rows == 1).all()
