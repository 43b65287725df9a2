import ctypes
import platform

import pytest

from embershard.worker.memory import keep_freed_memory


class Library:
    """A C library that notes what it is told."""

    def __init__(self, accepts: bool = True) -> None:
        self.told: dict[int, int] = {}
        self.accepts = accepts

    def mallopt(self, setting: int, value: int) -> int:
        self.told[setting] = value
        return int(self.accepts)


def test_malloc_is_told_when_to_trim_how_far_to_grow_and_what_to_map(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert keep_freed_memory()
    assert library.told == {-1: 512 * 2**20, -2: 64 * 2**20, -3: 32 * 2**20}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_...


def test_it_says_where_malloc_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(accepts=False))
    assert not keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not keep_freed_memory()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_glibc_takes_the_settings() -> None:
    assert keep_freed_memory()
