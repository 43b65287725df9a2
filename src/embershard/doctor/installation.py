"""Checks of what is installed: Python, packages, and what compiles our code."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from importlib import metadata

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, warn

_PACKAGE = "embershard"
_AT_LEAST = re.compile(r"([\w.-]+)>=([\d.]+)$")  # how our own requirements are written
_IMPORT_SECONDS = 60.0  # torch from a cold disk; numba's compilation


@check(
    "python",
    asks="whether embershard supports this version of Python and is tested with it",
    remedy="create a virtual environment with one of the Python versions in the message",
)
def python(_: Case) -> Finding:
    """Python's version against the package's own words."""
    about = metadata.metadata(_PACKAGE)
    mine = platform.python_version()
    needed = str(about["Requires-Python"] or "").lstrip(">=")
    marks = (str(mark).rpartition(" :: ")[2] for mark in about.get_all("Classifier") or ())
    tested = sorted((mark for mark in marks if re.fullmatch(r"3\.\d+", mark)), key=_release)
    if _release(mine) < _release(needed):
        return fail(f"Python {mine}; embershard needs {needed} or newer")
    if tested and _release(mine)[:2] > _release(tested[-1]):
        return warn(f"Python {mine} is newer than those that embershard is tested with ({', '.join(tested)})")
    return ok(f"Python {mine}")


def has_torch() -> bool:
    """Whether torch is installed: without the extra `train` it is not."""
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return True


@check(
    "packages",
    asks="whether every package that embershard needs is there, in a version that it works with",
    remedy="pip install --upgrade embershard (in this environment), which installs them",
)
def packages(_: Case) -> Finding:
    """Installed versions against the package's own requirements, with those of training where torch is there."""
    problems, found = [], []
    of_training = '; extra == "train"'
    for requirement in metadata.requires(_PACKAGE) or ():
        named = _AT_LEAST.match(requirement.removesuffix(of_training) if has_torch() else requirement)
        if named is None:  # one of another extra
            continue
        name, needed = named.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if _release(version) < _release(needed):
            problems.append(f"{name} {version} is older than {needed}")
    return fail("; ".join(problems)) if problems else ok(", ".join(found))


@check(
    "torch",
    asks="whether torch can be imported",
    remedy="install torch again for this Python and this processor: https://pytorch.org/get-started",
    seconds=_IMPORT_SECONDS,
)
def torch(case: Case) -> Finding:
    """Torch itself, before the checks that ask it something; a machine that only serves shards needs none."""
    if not has_torch():
        missing = fail if case.job is not None else ok
        return missing("not installed: this machine serves shards; to train, pip install 'embershard[train]'")
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return fail(f"import torch: {error}")
    return ok(f"torch {module.__version__}")


@check(
    "uvloop",
    asks="whether the event loop of the transports can be imported",
    remedy="pip install uvloop; it has no build for Windows: use WSL 2 there",
)
def uvloop(_: Case) -> Finding:
    """The event loop of shards and workers."""
    try:
        importlib.import_module("uvloop")
    except ImportError as error:
        return fail(f"import uvloop: {error}")
    return ok("it can be imported")


@check(
    "compiled kernels",
    asks="whether the compiled kernels are cached on disk, so that a second start compiles nothing",
    remedy="set NUMBA_CACHE_DIR to a writable folder, for shards and workers",
    seconds=_IMPORT_SECONDS,
)
def kernels(_: Case) -> Finding:
    """Check where numba keeps the kernels."""
    module = importlib.import_module("embershard.ps.table.kernels")
    folder = importlib.import_module("embershard.proto.compiled.jit").cache_folder(module.gather)
    if not folder:
        return warn("there is no folder to keep them in: every start of a shard or a worker compiles for seconds")
    return ok(f"kept in {folder}")


@check(
    "compiler",
    asks="whether torch.compile would find a C++ compiler (optional)",
    remedy="install one (apt install g++), or set train.compile to false",
)
def compiler(case: Case) -> Finding:
    """The compiler that torch.compile calls on a CPU; nothing else needs one."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is not None:
        return ok(found)
    if case.job is not None and case.job.train.compile and case.job.train.device == "cpu":
        return fail("none, and train.compile is true")
    return ok("none: training needs none; torch.compile on a CPU would")


CHECKS = (python, packages, torch, uvloop, kernels, compiler)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()
