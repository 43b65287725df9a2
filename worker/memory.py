"""How this process's C library handles memory that tensors freed."""

from __future__ import annotations

import ctypes

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 512 * 2**20  # several steps' activations of a model of this kind
_TOP_PAD_BYTES = 64 * 2**20
_LARGEST_KEPT_BLOCK = 32 * 2**20  # the most that glibc takes here


def keep_freed_memory() -> bool:
    """Have malloc keep up to 512 MiB of what tensors freed for those of the next step; whether it can.

    By default glibc gives blocks of some MiB back to the system, and every step pays for the same memory again, page by
    page: 500 to 1,300 page faults in a DLRM step of 2,048 samples on a CPU, up to 4 % of its time. It holds for the
    whole process, so it is yours to call, before the first step; `embershard worker` does. Other C libraries have no
    such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _M_TRIM_THRESHOLD: _KEPT_BYTES,
        _M_TOP_PAD: _TOP_PAD_BYTES,
        _M_MMAP_THRESHOLD: _LARGEST_KEPT_BLOCK,
    }
    return all([mallopt(setting, value) == 1 for setting, value in settings.items()])
