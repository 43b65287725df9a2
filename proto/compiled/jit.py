"""Compiled functions: loaded from numba's cache at their first call, and compiled once where the cache has none."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, TypeVar

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.runtime import rtsys
from numba.core.typing.templates import Signature

from embershard.proto.compiled.kept import KeptFunction

F = TypeVar("F", bound=Callable[..., object])
Parts = tuple[ModuleType | str, ...]
# a wrapper for callers in C is compiled for seconds, and nobody calls it
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

_log = logging.getLogger(__name__)


def compiled(
    signature: Signature,
    *parts: ModuleType | str,
    inline: str = "never",
    registries: bool = False,
    at_start: bool = False,
) -> Callable[[F], F]:
    """njit with this signature, without the GIL; loaded or compiled at the first call, and kept.

    parts: the modules (or their files) whose `inlined` and `called` functions it is made of: what was compiled before
    one of them changed is not taken. What is kept beside the function's file is loaded where that folder cannot be
    written, too (an image, an install that root made). Where nothing is kept and nothing can be written, the function
    is compiled anew in every process.
    registries: import all that numba can compile before the function is loaded, as numba itself does (0.3 s, scipy
    included); for a user's function, which may be linked against any of it.
    at_start: the first step of any job needs it, so `compile_missing` compiles it.
    """

    def decorate(function: F) -> F:
        dispatcher = numba.njit(inline=inline, **_OPTIONS)(function)
        _pending[dispatcher] = _FirstCall(dispatcher, signature, parts, registries=registries, at_start=at_start)
        return dispatcher  # type: ignore[no-any-return]

    return decorate


def inlined(function: F) -> F:
    """njit for a part of a compiled function's hot path: written out there, compiled and kept with it."""
    return _part(function, forceinline=True)


def called(function: F) -> F:
    """njit for a rare part of a compiled function: compiled with it and kept with it, as a call."""
    return _part(function)


def _part(function: F, **options: bool) -> F:
    """njit without a wrapper for Python, which is most of what a small function compiles.

    Where Python calls the part all the same (a reference in plain Python), it is compiled again, with a wrapper.
    """
    dispatcher = numba.njit(no_cpython_wrapper=True, **_OPTIONS, **options)(function)
    wrapped: list[Any] = []

    def compile_for_python(*args: object) -> object:
        if not wrapped:
            wrapped.append(numba.njit(**_OPTIONS)(function))
        return wrapped[0]._compile_for_args(*args)

    def add_overload(result: Any) -> None:  # numba's own would have Python call what has no wrapper
        dispatcher.overloads[tuple(result.signature.args)] = result

    dispatcher._compile_for_args, dispatcher.add_overload = compile_for_python, add_overload
    return dispatcher  # type: ignore[no-any-return]


def load(function: F) -> F:
    """The compiled function, loaded now."""
    first_call = _pending.get(function)
    if first_call is not None:
        first_call.load()
    return function


def compile_missing(*, everything: bool = False) -> None:
    """Compile what is kept nowhere of the functions imported so far that are needed at the start.

    A process calls it before others wait for its answers. Processes that do so at once share the work: each takes what
    no other one is compiling.
    """
    modules: dict[str, list[_FirstCall]] = {}
    for first_call in list(_pending.values()):
        if (everything or first_call.at_start) and not first_call.is_kept():
            modules.setdefault(first_call.module, []).append(first_call)
    left = [calls for calls in modules.values() if not _compile_all(calls, wait=False)]
    for calls in left:
        _compile_all(calls, wait=True)


def cache_folder(function: Callable[..., object]) -> Path | None:
    """The folder in which a compiled function is kept; None where it can be kept nowhere."""
    folder: Path | None = load(function)._cache.kept_in  # type: ignore[attr-defined]
    return folder


def sources(*parts: ModuleType | str) -> str:
    """Digest of the files of these modules, and of those whose functions may be anywhere."""
    files = [Path(__file__), Path(__file__).with_name("open_addressing.py"), Path(__file__).parents[1] / "routing.py"]
    files += [Path(str(part if isinstance(part, str) else part.__file__)) for part in parts]
    return hashlib.sha256(b"".join(_digest(file, file.stat().st_mtime_ns) for file in files)).hexdigest()


class _FirstCall:
    """Loads or compiles a dispatcher when it is called first, or when another function that calls it is compiled."""

    def __init__(
        self, dispatcher: Any, signature: Signature, parts: Parts, *, registries: bool, at_start: bool
    ) -> None:
        self._dispatcher, self._signature, self._parts, self._registries = dispatcher, signature, parts, registries
        self.at_start = at_start
        self._call_template = dispatcher.get_call_template
        # From the beginning: a call looks at this before it finds its arguments' types, and for a version after, and
        # a thread that loads the function meanwhile must not change it.
        dispatcher._can_compile = False
        dispatcher._search_new_conversions = self._search  # numba: called where no version fits, and looks again
        dispatcher.get_call_template = self._template  # and this where another function calls it

    @property
    def module(self) -> str:
        return str(self._dispatcher.__module__)

    @property
    def folder(self) -> str | None:
        return self._kept.cache_path

    def load(self) -> None:
        with global_compiler_lock:  # re-entrant: the function may call another one that is pending
            if self._dispatcher in _pending:
                self._dispatcher._cache = self._kept
                if not self._load_kept():
                    self._compile()
                del self._dispatcher._search_new_conversions, self._dispatcher.get_call_template
                del _pending[self._dispatcher]

    def is_kept(self) -> bool:
        with global_compiler_lock:
            return self._kept.is_kept(self._dispatcher.targetctx.codegen().magic_tuple())

    def _search(self, *args: object) -> bool:
        """Whether numba is to look for a version again: now that there is one."""
        self.load()
        self._dispatcher._search_new_conversions(*args)  # numba's own
        return True

    def _template(self, args: object, kwargs: object) -> object:
        self.load()
        return self._call_template(args, kwargs)

    @functools.cached_property
    def _kept(self) -> KeptFunction:
        function = self._dispatcher.py_func
        files = sources(*self._parts, function.__code__.co_filename)
        constants = repr(_constants(function)) if self._registries else ""  # which may be of the environment, say
        return KeptFunction(function, self._signature, files + constants)

    def _load_kept(self) -> bool:
        """Load the function from where it is kept; False where it is not."""
        context = self._dispatcher.targetctx
        if self._registries:
            context.refresh()
        rtsys.initialize(context)  # the symbols that our functions are linked against
        kept = self._kept.load_overload(self._signature, context)
        if kept is None:
            return False
        self._dispatcher._cache_hits[self._signature] += 1
        context.insert_user_function(kept.entry_point, kept.fndesc, [kept.library])
        self._dispatcher.add_overload(kept)
        return True

    def _compile(self) -> None:
        with _turn(self.folder, self.module, wait=True):
            # another process may have compiled it while this one waited
            if self.folder is None or not self._load_kept():
                _log.info("compiling %s", self._kept.name)
                with _collector_off():
                    self._compile_once()

    def _compile_once(self) -> None:
        """As the dispatcher's own `compile`, which asks whether it can; other threads must not be told so meanwhile."""
        dispatcher, signature = self._dispatcher, self._signature
        dispatcher._cache_misses[signature] += 1
        with dispatcher._compiling_counter:
            result = dispatcher._compiler.compile(signature.args, signature.return_type)
            dispatcher.add_overload(result)
        dispatcher._cache.save_overload(signature, result)


_pending: dict[object, _FirstCall] = {}  # by dispatcher


def _compile_all(calls: Sequence[_FirstCall], *, wait: bool) -> bool:
    """Compile functions of one module, or load what others compiled meanwhile; False where another process is at it."""
    with global_compiler_lock, _turn(calls[0].folder, calls[0].module, wait=wait) as ours:
        for first_call in calls if ours else ():
            first_call.load()
    return ours


@contextlib.contextmanager
def _turn(folder: str | None, module: str, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a module in a cache folder, so that processes that start at once compile its functions once.

    Of a module, not of a function: they share parts, which a process compiles once. False where another process has the
    lock and we do not wait.
    """
    byte = zlib.crc32(module.encode())
    if folder is None or (folder, byte) in _held:
        yield True
        return
    got = _lock(folder, byte, wait=wait)
    if got is None:
        yield False
        return
    _held.add((folder, byte))
    try:
        yield True
    finally:
        _held.discard((folder, byte))
        got()


def _lock(folder: str, byte: int, *, wait: bool) -> Callable[[], object] | None:
    """Lock a byte of the folder's lock file; what gives it back, or None where we do not wait for another process."""
    with contextlib.suppress(ImportError, OSError):  # a system or a file system without locks: all compile everything
        import fcntl

        if folder not in _lock_files:
            os.makedirs(folder, exist_ok=True)
            _lock_files[folder] = Path(folder, "embershard.lock").open("w")
        file = _lock_files[folder]
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            if not wait:
                return None
            _log.info("waiting for another process that compiles")
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
        return functools.partial(fcntl.lockf, file, fcntl.LOCK_UN, 1, byte)
    return lambda: None


# Both guarded by numba's compiler lock
_held: set[tuple[str, int]] = set()  # what this process has locked
_lock_files: dict[str, IO[str]] = {}  # by folder; open to the end: closing one would give back all locks on it


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Have Python collect no garbage: a compiler makes millions of objects, which would be looked through each time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _constants(function: Any, *callers: object) -> list[tuple[str, object]]:
    """The numbers and texts that a function names outside of itself, and those that it calls: compiled as they are."""
    names, found = list(_names(function.__code__)), list[tuple[str, object]]()
    values = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    modules = list[ModuleType]()
    for name, value in values:  # which grows: of package.module.NUMBER, the module is an attribute, too
        if isinstance(value, ModuleType) and value not in modules:
            modules.append(value)
            values += [(name, getattr(value, name)) for name in names if hasattr(value, name)]
        elif isinstance(value, Dispatcher) and value.py_func not in (function, *callers):
            found += _constants(value.py_func, function, *callers)
        elif isinstance(value, np.ndarray):
            found.append((name, (value.dtype.str, value.shape, value.tobytes())))
        elif isinstance(value, tuple):  # of arrays or functions, maybe, whose texts do not say what they are
            found.append((name, len(value)))
            values += [(name, one) for one in value]
        elif isinstance(value, int | float | str | np.generic):
            found.append((name, value))
    return found


def _names(code: CodeType) -> Iterator[str]:
    """The names of what is outside of a function, also those that only a comprehension in it has."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@functools.cache
def _digest(file: Path, modified_ns: int) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()
