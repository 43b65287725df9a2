"""Memory of tensors: copies from the host to a module's device, and what the host's malloc keeps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 512 * 2**20  # several steps' activations of a model of this kind
_TOP_PAD_BYTES = 64 * 2**20
_LARGEST_KEPT_BLOCK = 32 * 2**20  # the most that glibc takes here


def host_rows(count: int, dim: int, device: torch.device) -> torch.Tensor:
    """An uninitialised (count, dim) float32 tensor on the host, pinned where rows go to a GPU from it."""
    return torch.empty((count, dim), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the host, pinned where it goes to a GPU from there."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; the copy runs ahead of the host, which torch's pinned allocator allows for."""
    if device.type == "cpu":
        return tensor
    if tensor.is_cuda:  # of another stream: its memory is not to be used again before this one is done with it
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor
    return pinned(tensor, device).to(device, non_blocking=True)


def unique_on_gpu(ids: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct ids, ascending, (U,) int64 on the host, and the place of each of `ids` among them, on the GPU.

    A GPU sorts them in a tenth of the time that a core takes to find them. On `side_stream`, it does not wait for the
    steps that were queued before.
    """
    stream = side_stream(device)
    if ids.is_cuda:
        stream.wait_stream(torch.cuda.current_stream(device))  # where they may still be computed
    with torch.cuda.stream(stream):
        there = ids.detach().to(device, non_blocking=ids.is_pinned()).to(torch.int64)
        unique, places = torch.unique(there, return_inverse=True)
        return unique.cpu(), places


def places_of(places: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """order[places] of places that `unique_on_gpu` gave, computed when it returns; `order` (U,) is on the host."""
    stream = side_stream(places.device)
    with torch.cuda.stream(stream):
        index = order.to(places.device)[places]
    stream.synchronize()
    return index


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU for what is computed beside the steps."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def with_current_gpu(work: Callable[[], None]) -> Callable[[], None]:
    """`work` for a new thread, which would begin with GPU 0: torch keeps the current GPU by thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    device = torch.cuda.current_device()

    def run() -> None:
        torch.cuda.set_device(device)
        work()

    return run


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; none exists before its module is imported, which is a fifth of a worker's start."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def keep_freed_memory() -> None:
    """Have malloc keep up to 512 MiB of what tensors freed for those of the next step.

    By default glibc gives blocks of some MiB back to the system, and every step pays for the same memory again, page by
    page: 500 to 1,300 page faults in a DLRM step of 2,048 samples on a CPU, up to 4 % of its time. It holds for the
    whole process, so call it before the first step. Other C libraries have no such setting, and nothing changes there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)
