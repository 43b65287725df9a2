"""Files of compiled functions: one for each function, processor and version of Python.

numba compiles them, and chooses the folder. What is taken of a file is said here: numba's own cache looks at the source
file of the function alone, and a damaged file would end the process.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.typing.templates import Signature

SHIPPED = Path(__file__).with_name("kernels")  # what a wheel brings
# What wheels are compiled for, by machine, best first: AVX-512; AVX2 and FMA, which servers have had since 2015; NEON
BASELINES = {"x86_64": ("x86-64-v4", "x86-64-v3"), "aarch64": ("generic",)}
_V3 = {"+avx2", "+bmi", "+bmi2", "+f16c", "+fma", "+lzcnt", "+movbe", "+popcnt"}  # as LLVM calls what is needed
_NEEDED = {
    "x86-64-v4": {*_V3, "+avx512bw", "+avx512cd", "+avx512dq", "+avx512f", "+avx512vl"},
    "x86-64-v3": _V3,
    "generic": set[str](),
}
_DIGEST_BYTES = hashlib.sha256().digest_size

Magic = tuple[str, str, str]  # numba's: the platform, the processor and its features

_log = logging.getLogger(__name__)
_aim: Literal["run", "here", "wheel"] = "run"


def compile_here() -> None:
    """Have this process take nothing that was compiled for less than the processor that is here."""
    global _aim
    _aim = "here"


def compile_for_wheel(cpu: str) -> None:
    """Have this process compile for one of BASELINES, and keep that where a wheel brings it.

    Called before a function of numba is declared, else RuntimeError.
    """
    global _aim
    config.CPU_NAME, config.CPU_FEATURES = cpu, ""
    if cpu_target.target_context.codegen().magic_tuple()[1:] != (cpu, ""):
        raise RuntimeError("numba compiles for this machine's processor already")
    SHIPPED.mkdir(exist_ok=True)
    _aim = "wheel"


class KeptFunction:
    """Where a compiled function is kept: the cache of its dispatcher, whose methods numba calls.

    sources: digest of the files that the function is made of. What was compiled from others, by another numba or for
    another processor is not taken. What is damaged is not either, and said.
    """

    def __init__(self, function: Callable[..., object], signature: Signature, sources: str) -> None:
        self._function, self._signature, self._sources = function, signature, sources
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.kept_in: Path | None = None  # the folder that it was loaded from, or written to

    @property
    def cache_path(self) -> str | None:
        """The folder that the function is written to; None where there is none that can be."""
        if _aim == "wheel":
            return str(SHIPPED)
        return None if self._impl is None else str(self._impl.locator.get_cache_path())

    def load_overload(self, _: Signature, context: Any) -> Any:
        """The function as it was compiled once; None where no file has it."""
        for path in self._found(context.codegen().magic_tuple()):
            try:
                numbas = IndexDataCacheFile(str(path.parent), path.stem, None)
                result = CompileResult._rebuild(context, *numbas._load_data(path.name))
            except Exception as error:  # numba and LLVM raise what they please
                self._warn(path, f"cannot be loaded: {error!r}")
            else:
                self.kept_in = path.parent
                return result
        return None

    def save_overload(self, _: Signature, result: Any) -> None:
        """Keep what was compiled; where it cannot be written (a full disk), that is logged."""
        if self._impl is None or not self._impl.check_cachable(result):
            return
        magic = result.codegen.magic_tuple()
        path, _ = next(self._places(magic))
        content = dumps(self._impl.reduce(result)) + self._stamp(magic)  # numba reads no further than its own part
        try:
            _replace(path, content + hashlib.sha256(content).digest())
            self.kept_in = path.parent
        except OSError as error:
            self._warn(path, f"cannot be written: {error}")

    def is_kept(self, magic: Magic) -> bool:
        """Whether a file has the function, undamaged."""
        return any(True for _ in self._found(magic))

    @functools.cached_property
    def _impl(self) -> Any:
        try:
            return CompileResultCacheImpl(self._function)
        except RuntimeError:  # no folder can be written
            return None

    def _places(self, magic: Magic) -> Iterator[tuple[Path, Magic]]:
        """Where the function may be, and the processor that it was compiled for there; first where it is written."""
        if _aim != "wheel":
            beside = Path(self._function.__code__.co_filename).parent / "__pycache__"
            if self.cache_path is not None:
                yield Path(self.cache_path, self._file_name(magic)), magic
            if not os.access(beside, os.W_OK):  # of an image, or an install that root made
                yield beside / self._file_name(magic), magic
        for baseline in BASELINES.get(platform.machine(), ()):
            shipped = (magic[0], baseline, "")
            if magic == shipped or (_aim == "run" and _NEEDED[baseline] <= set(magic[2].split(","))):
                package = self._function.__module__.rpartition(".")[0]
                yield SHIPPED / f"{package}.{self._file_name(shipped)}", shipped

    def _found(self, magic: Magic) -> Iterator[Path]:
        """The files that have the function, undamaged."""
        for path, of_place in self._places(magic):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._warn(path, f"cannot be read: {error}")
                continue
            content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
            if hashlib.sha256(content).digest() != digest:
                self._warn(path, "is damaged")
            elif content.endswith(self._stamp(of_place)):
                yield path

    def _warn(self, path: Path, what: str) -> None:
        """Say once in a process what is wrong with a file; the function is compiled where no other one has it."""
        if path not in _warned:
            _warned.add(path)
            _log.warning("%s, which keeps %s compiled, %s", path, self.name, what)

    def _file_name(self, magic: Magic) -> str:
        code, python = self._function.__code__, f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        name = f"{Path(code.co_filename).stem}.{self._function.__qualname__}-{code.co_firstlineno}"
        features = hashlib.sha256(magic[2].encode()).hexdigest()[:8]
        return f"{name.replace('<', '').replace('>', '')}.{python}.{magic[1]}-{features}.nbc"

    def _stamp(self, magic: Magic) -> bytes:
        """Digest of everything that the compiled function depends on."""
        closure = self._function.__closure__
        cells = b"" if closure is None else dumps(tuple(cell.cell_contents for cell in closure))
        parts = (numba.__version__, self._sources, str(self._signature), magic, self._function.__code__.co_code, cells)
        return hashlib.sha256(repr(parts).encode()).digest()


_warned: set[Path] = set()


def _replace(path: Path, data: bytes) -> None:
    """Write a file that others may be reading or writing now."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}")
    try:
        new.write_bytes(data)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
