"""Compiled functions: loaded from numba's cache at their first call, and compiled once where the cache has none."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys
from numba.core.typing.templates import Signature

F = TypeVar("F", bound=Callable[..., object])
_OPTIONS = {"nogil": True, "error_model": "numpy"}

_log = logging.getLogger(__name__)


def compiled(
    signature: Signature, *parts: ModuleType | str, inline: str = "never", registries: bool = False
) -> Callable[[F], F]:
    """njit with this signature, without the GIL; loaded or compiled at the first call, and kept in numba's cache.

    parts: the modules (or their files) whose `inlined` and `called` functions it is made of. numba looks for changes in
    the function's own file alone, and would take what it kept from an older version of the others. What is kept beside
    the function's file is loaded where that folder cannot be written, too (an image, an install that root made).
    Where nothing is kept and nothing can be written, the function is compiled anew in every process.
    registries: import all that numba can compile before the function is loaded, as numba itself does (0.3 s, scipy
    included); for a user's function, which may be linked against any of it.
    """

    def decorate(function: F) -> F:
        dispatcher = numba.njit(inline=inline, **_OPTIONS)(function)
        _pending[dispatcher] = _FirstCall(dispatcher, signature, parts, registries)
        return dispatcher  # type: ignore[no-any-return]

    return decorate


def inlined(function: F) -> F:
    """njit for a part of a compiled function's hot path: written out there, compiled and kept with it."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


def called(function: F) -> F:
    """njit for a rare part of a compiled function: compiled with it and kept with it, as a call."""
    return numba.njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def load(function: F) -> F:
    """The compiled function, loaded now."""
    first_call = _pending.get(function)
    if first_call is not None:
        first_call.load()
    return function


def compile_missing() -> None:
    """Compile what the cache lacks of the compiled functions imported so far; what it has is loaded when it is called.

    A process calls it before others wait for its answers: compiling everything takes a minute.
    """
    for first_call in list(_pending.values()):
        first_call.compile_if_missing()


def cache_folder(function: Callable[..., object]) -> str | None:
    """The folder in which numba keeps a compiled function; None where it can be kept nowhere."""
    folder: str | None = load(function).stats.cache_path  # type: ignore[attr-defined]
    return folder


def sources(*parts: ModuleType | str) -> str:
    """Digest of the files of these modules, and of those whose functions may be anywhere."""
    files = [Path(__file__), Path(__file__).with_name("open_addressing.py"), Path(__file__).parents[1] / "routing.py"]
    files += [Path(str(part if isinstance(part, str) else part.__file__)) for part in parts]
    return hashlib.sha256(b"".join(_digest(file, file.stat().st_mtime_ns) for file in files)).hexdigest()


class _ReadOnlyLocator(InTreeCacheLocator):  # type: ignore[misc]
    """The folder beside a function's file, whether or not it can be written."""

    def ensure_cache_path(self) -> None:
        """Nothing: numba would write a file."""


class _ReadOnlyCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ReadOnlyLocator,)


class _ReadOnlyCache(FunctionCache):  # type: ignore[misc]
    """What is kept beside a function's file."""

    _impl_class = _ReadOnlyCacheImpl


class _FirstCall:
    """Loads or compiles a dispatcher when it is called first, or when another function that calls it is compiled."""

    def __init__(
        self, dispatcher: Any, signature: Signature, parts: tuple[ModuleType | str, ...], registries: bool
    ) -> None:
        self._dispatcher, self._signature, self._parts, self._registries = dispatcher, signature, parts, registries
        self._prepared = False
        self._call_template = dispatcher.get_call_template
        dispatcher._compile_for_args = self._call  # numba: called where no compiled version fits
        dispatcher.get_call_template = self._template  # and this where another function calls it

    def load(self) -> None:
        with global_compiler_lock:  # re-entrant: the function may call another one that is pending
            if self._dispatcher in _pending:
                if not self._load_kept():
                    self._compile()
                self._dispatcher.disable_compile()
                del self._dispatcher._compile_for_args, self._dispatcher.get_call_template
                del _pending[self._dispatcher]

    def compile_if_missing(self) -> None:
        with global_compiler_lock:
            cache = self._cache()
            if cache is None or self._key(cache) not in cache._cache_file._load_index():
                self.load()

    def _call(self, *args: object) -> object:
        """The code that numba then calls with these arguments, without a further look at them."""
        self.load()
        dispatcher, wanted = self._dispatcher, self._signature.args
        given = [dispatcher.typeof_pyval(arg) for arg in args]
        can_convert = dispatcher.typingctx.can_convert
        if len(given) != len(wanted) or None in map(can_convert, given, wanted):
            raise TypeError(f"{dispatcher.__name__} takes {wanted}, got {tuple(given)}")
        return dispatcher.overloads[wanted].entry_point

    def _template(self, args: object, kwargs: object) -> object:
        self.load()
        return self._call_template(args, kwargs)

    def _cache(self) -> Any:
        """numba's cache of the function; None where nothing can be kept."""
        dispatcher = self._dispatcher
        if not self._prepared:
            with contextlib.suppress(RuntimeError):  # no folder can be written
                dispatcher.enable_caching()
                self._compare_sources(dispatcher._cache)
            if (kept := self._read_only_cache()) is not None:
                dispatcher._cache = kept
            self._prepared = True
        return dispatcher._cache if hasattr(dispatcher._cache, "_cache_file") else None

    def _read_only_cache(self) -> Any:
        """The folder beside the function's file where it has the function and cannot be written; else None."""
        function = self._dispatcher.py_func
        file = Path(function.__code__.co_filename)
        folder = file.parent / "__pycache__"
        if not folder.is_dir() or os.access(folder, os.W_OK) or config.CACHE_LOCATOR_CLASSES:
            return None
        cache = _ReadOnlyCache(function)
        self._compare_sources(cache)
        return cache if self._key(cache) in cache._cache_file._load_index() else None

    def _compare_sources(self, cache: Any) -> None:
        """Have a cache take nothing that was compiled from other sources."""
        # In the version, which is compared before the index is unpickled: an index names classes by their modules, and
        # would raise where one was renamed since.
        cache._cache_file._version += sources(*self._parts, self._dispatcher.py_func.__code__.co_filename)

    def _key(self, cache: Any) -> object:
        return cache._index_key(self._signature, self._dispatcher.targetctx.codegen())

    def _load_kept(self) -> bool:
        """Load the function from the cache; False where it is not there."""
        cache, context = self._cache(), self._dispatcher.targetctx
        if cache is None:
            return False
        if self._registries:
            context.refresh()
        rtsys.initialize(context)  # the symbols that our functions are linked against
        kept = cache._load_overload(self._signature, context)
        if kept is None:
            return False
        self._dispatcher._cache_hits[self._signature] += 1
        context.insert_user_function(kept.entry_point, kept.fndesc, [kept.library])
        self._dispatcher.add_overload(kept)
        return True

    def _compile(self) -> None:
        name = f"{self._dispatcher.__module__}.{self._dispatcher.__name__}"
        cache = self._cache()
        with contextlib.nullcontext() if cache is None else _locked(Path(cache.cache_path), name):
            # another process may have compiled it while this one waited
            if cache is None or not self._load_kept():
                _log.info("compiling %s", name)
                self._dispatcher.compile(self._signature)


_pending: dict[object, _FirstCall] = {}  # by dispatcher


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a cache folder, so that processes that start at once compile a function once."""
    if folder in _held:  # a function that calls this one is compiled: flock would have this process wait for itself
        yield
        return
    with contextlib.ExitStack() as stack:
        # a system or a file system without locks: it is compiled more than once
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "embershard.lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another process that compiles %s", name)
                fcntl.flock(file, fcntl.LOCK_EX)
        _held.add(folder)
        stack.callback(_held.discard, folder)
        yield


_held: set[Path] = set()  # cache folders whose lock this process holds; guarded by numba's compiler lock


@functools.cache
def _digest(file: Path, modified_ns: int) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()
