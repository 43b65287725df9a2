"""The disk of this machine: writes of many pieces, and systems that take or give less than they were asked for."""

import errno
import os
import resource
import threading
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest

from embershard.proto.errors import LogLocked
from embershard.ps.journal.disk import LocalDisk, page_aligned
from harness.eventually import eventually

PIECES = [bytes([n % 251]) * (n % 5) for n in range(2500)]  # more than one pwritev takes
pread, pwrite = os.pread, os.pwrite


@pytest.fixture
def file(tmp_path):
    with closing(LocalDisk().open(tmp_path / "file", write=True, create=True)) as file:
        yield file


def short_pwritev(descriptor, pieces, offset):
    data = b"".join(pieces)
    return pwrite(descriptor, data[: 1 + len(data) // 3], offset)


@contextmanager
def no_descriptors():
    """This process may open no file more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("is_short", [False, True])
def test_all_pieces_are_written_one_behind_the_other(file, is_short, monkeypatch):
    if is_short:
        monkeypatch.setattr(os, "pwritev", short_pwritev)
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
        monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 1000), offset))
    file.pwritev([b"before", *PIECES], 10)
    file.sync()
    data = bytes(10) + b"before" + b"".join(PIECES)
    assert file.size() == len(data)
    assert file.pread(10**6, 0) == data
    assert file.pread(20, 5) == data[5:25]


def test_a_file_that_is_created_is_new_and_one_that_is_opened_is_there(file, tmp_path):
    disk = LocalDisk()
    with pytest.raises(FileExistsError):
        disk.open(tmp_path / "file", write=True, create=True)
    with pytest.raises(FileNotFoundError):
        disk.open(tmp_path / "other", write=True)
    disk.rename(tmp_path / "file", tmp_path / "other")
    disk.sync_folder(tmp_path)
    assert disk.list(tmp_path) == ["other"]
    disk.remove(tmp_path / "other")
    assert disk.list(tmp_path) == []
    assert disk.free_bytes(tmp_path) > 0
    assert disk.boot_id() == LocalDisk().boot_id()


def test_a_file_that_is_given_room_has_it_on_the_disk_and_reads_as_zeros(file, tmp_path):
    file.reserve(2**20)
    assert file.pread(2**21, 0) == bytes(2**20)
    assert 512 * (tmp_path / "file").stat().st_blocks >= 2**20
    with pytest.raises(OSError, match=r"large|space"):
        file.reserve(2**62)


def test_a_read_that_fails_names_file_and_byte(file, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(OSError, match="4096") as raised:
        file.pread(10, 4096)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path / "file"))


def test_without_a_descriptor_a_lock_is_looked_at_all_the_same(tmp_path):
    path = tmp_path / "LOCK"
    with closing(LocalDisk().lock(path)) as lock:
        with no_descriptors():
            assert lock.is_held()
        path.rename(tmp_path / "elsewhere")
        path.write_bytes((tmp_path / "elsewhere").read_bytes())  # as a copy of the folder
        with no_descriptors():
            assert not lock.is_held()


def test_a_folder_is_synced_once_there_is_a_descriptor_and_the_wait_for_it_is_said_once(tmp_path, caplog):
    with no_descriptors():
        thread = threading.Thread(target=LocalDisk().sync_folder, args=[tmp_path])
        thread.start()
        thread.join(0.15)
        assert thread.is_alive()
    thread.join()
    assert caplog.text.count("pushes may wait") == 1


class TestPageCache:
    DATA = np.random.default_rng(0).bytes(5 * 2**20 + 100)

    @staticmethod
    def is_cached(descriptor, offset):
        """Whether it has a byte of a file; the system may read some more into it, at this place."""
        with suppress(BlockingIOError):
            return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
        return False

    @pytest.fixture
    def uncached(self, tmp_path):
        (tmp_path / "file").write_bytes(self.DATA)
        with (tmp_path / "file").open("rb+") as file:
            try:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if self.is_cached(file.fileno(), 2**20):
                    pytest.skip("this file system keeps files in memory")
            except (AttributeError, OSError) as error:
                pytest.skip(f"this system cannot say it: {error}")
            yield file.fileno()

    @pytest.mark.parametrize("offset", [0, 4096, 100, 3 * 2**20])
    @pytest.mark.parametrize("num_bytes", [1, 2**20, 2 * 2**20 + 5, 8 * 2**20])
    @pytest.mark.parametrize("shift", [0, 8])
    def test_what_is_read_past_it_is_what_the_file_has(self, tmp_path, uncached, offset, num_bytes, shift):
        memory = page_aligned(num_bytes + shift)[shift:]
        with closing(LocalDisk().open(tmp_path / "file")) as file:
            count = file.pread_into(memory, offset)
        assert count == min(num_bytes, len(self.DATA) - offset)
        assert memory[:count] == self.DATA[offset : offset + count]

    def test_reading_a_large_file_that_is_not_in_it_leaves_it_alone(self, tmp_path, uncached):
        with closing(LocalDisk().open(tmp_path / "file")) as file:
            assert file.pread_into(page_aligned(len(self.DATA)), 0) == len(self.DATA)
        assert not self.is_cached(uncached, 4 * 2**20)

    def test_the_file_that_was_opened_is_read_whatever_has_its_name_by_then(self, tmp_path, uncached):
        memory = page_aligned(len(self.DATA))
        with closing(LocalDisk().open(tmp_path / "file")) as file:
            (tmp_path / "file").rename(tmp_path / "spare")
            (tmp_path / "file").write_bytes(bytes(len(self.DATA)))
            assert file.pread_into(memory, 0) == len(self.DATA)
        assert memory == self.DATA

    def test_a_file_that_is_in_it_is_read_from_there(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_bytes(self.DATA)
        with closing(LocalDisk().open(tmp_path / "file")) as file:
            monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it is opened once more"))
            memory = page_aligned(len(self.DATA))
            assert file.pread_into(memory, 0) == len(self.DATA)
        assert memory == self.DATA


class TestReadAhead:
    def test_gives_all_items_in_order_whatever_their_sizes(self):
        for size in (0, 1000, 3 * 2**20, 2**30):
            assert list(LocalDisk().read_ahead(iter(range(3000)), lambda _, size=size: size)) == list(range(3000))

    def test_makes_items_while_others_are_handled_and_at_most_one_batch_ahead(self):
        made = []

        def numbers():
            for number in range(100):
                made.append(number)
                yield number

        items = LocalDisk().read_ahead(numbers())
        assert next(items) == 0
        assert eventually(lambda: made == [0, 1])
        assert next(items) == 1
        assert eventually(lambda: made == [0, 1, 2])

    def test_an_error_reaches_the_caller(self):
        def items():
            yield from range(5)
            raise LogLocked(path="x", holder="y")

        with pytest.raises(LogLocked):
            for _ in LocalDisk().read_ahead(items()):
                pass

    def test_its_thread_ends_with_a_caller_that_wants_no_more(self):
        before = threading.active_count()
        items = LocalDisk().read_ahead(iter(range(100)))
        next(items)
        items.close()
        assert threading.active_count() == before
