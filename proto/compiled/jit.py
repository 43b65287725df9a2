"""Numba as this project uses it: decorators for compiled functions that are kept on disk where that is possible."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import numba
from numba.core.typing.templates import Signature

F = TypeVar("F", bound=Callable[..., object])
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(signature: Signature, *parts: ModuleType | str, inline: str = "never") -> Callable[[F], F]:
    """njit with this signature, without the GIL, kept beside its source or in the user's cache folder.

    parts: the modules (or their files) whose `inlined` and `called` functions it is made of. numba looks for changes in
    the function's own file alone, and would take what it kept from an older version of the others. Where nothing can be
    written (a read-only image without a home), the function is compiled anew at every start.
    """

    def decorate(function: F) -> F:
        try:
            dispatcher = numba.njit(cache=True, inline=inline, **_OPTIONS)(function)
            cache_file = dispatcher._cache._cache_file
            # In the version, which is compared before the index is unpickled: an index names classes by their modules,
            # and would raise where one was renamed since.
            cache_file._version += sources(*parts, function.__code__.co_filename)
        except (RuntimeError, AttributeError):  # nowhere to keep it, or a numba whose cache cannot be told of parts
            dispatcher = numba.njit(inline=inline, **_OPTIONS)(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher  # type: ignore[no-any-return]

    return decorate


def inlined(function: F) -> F:
    """njit for a part of a compiled function's hot path: written out there, compiled and kept with it."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


def called(function: F) -> F:
    """njit for a rare part of a compiled function: compiled with it and kept with it, as a call."""
    return numba.njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def sources(*parts: ModuleType | str) -> str:
    """Digest of the files of these modules, and of those whose functions may be anywhere."""
    files = [Path(__file__), Path(__file__).parents[1] / "routing.py"]
    files += [Path(str(part if isinstance(part, str) else part.__file__)) for part in parts]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
