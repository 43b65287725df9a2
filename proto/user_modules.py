"""Modules of users, in which a process finds what a job or a command names as `module:name`; what fails there.

And which files and versions of modules and packages are used.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from embershard.proto.errors import BadModule, EmbershardError, UserCodeFailed

# where code lies that is rarely the user's: installed packages, Python's own modules, and this package
INSTALLED = tuple(
    f"{path}{os.sep}"
    for path in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[1],
    )
)


def search_from(folder: Path) -> None:
    """Have this process, and those that it starts, find modules in a folder.

    The folder comes last, so that a module in it hides no installed one.
    """
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)


def environment_for_child() -> dict[str, str]:
    """Return the environment for a process that is to find the modules that this one finds.

    These may lie in the folder of a notebook, a test or a script.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def members_of(module: str) -> Mapping[str, object]:
    """Import a module and return its members by name. BadModule, with file and line, where it cannot be imported.

    What it prints goes to stderr: stdout may be read by a program.
    """
    if module.endswith(".py") or "/" in module or os.sep in module:
        file = Path(module)
        reason = f"is a file: write its module, {file.stem}, with its folder, {file.absolute().parent}, in PYTHONPATH"
        raise BadModule(module=module, reason=reason)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return vars(importlib.import_module(module))
    except EmbershardError:  # it says by itself what is wrong
        raise
    except (Exception, SystemExit) as error:  # a user's module may fail in any way, and end itself
        said = f"{type(error).__name__}: {error}"
        place = f" ({found})" if (found := where_raised(error)) and found.partition(":")[0] != __file__ else ""
        reason = f"cannot be imported: {said}{place}; `python -c 'import {module}'` has to work here"
        raise BadModule(module=module, reason=reason) from error


def files_of(modules: Sequence[str]) -> dict[str, Path]:
    """The files of imported modules, by name, and of those that they have imported of the same package, or folder."""
    found = {}
    for name in modules:
        top = sys.modules.get(name.partition(".")[0])
        packages = tuple(getattr(top, "__path__", ()))  # several folders may have a part of one without __init__.py
        folders = packages or (os.path.dirname(getattr(top, "__file__", None) or ""),)
        beside = tuple(f"{folder}{os.sep}" for folder in folders if folder)
        is_shared = not packages and "".join(beside).startswith(INSTALLED)
        others = tuple(path for path in INSTALLED if not "".join(beside).startswith(path))  # as in .venv beside it
        for other, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None) or ""
            is_beside = not is_shared and path.startswith(beside) and not path.startswith(others)
            if path and (other == name or (is_beside and path.endswith(".py"))):
                found[other] = Path(path)
    return found


def sha256_of_modules(modules: Sequence[str]) -> dict[str, str]:
    """Map the names in `files_of` the modules to the sha256 of their files, which tells whether their code changed."""
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files_of(modules).items()}


def version_of(package: str = "embershard") -> str:
    """Return the version of an installed package; `unknown` of one that is not, as of a checkout on the path."""
    from importlib import metadata  # takes part of the time of a command that only shows its help

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def find(name: str) -> object:
    """Import a module and return its member `module:name`; the name may have dots. BadModule where there is none."""
    module, _, path = name.partition(":")
    members = members_of(module)
    found: object = members.get(path.partition(".")[0], inspect.Parameter.empty)
    for part in path.split(".")[1:]:
        found = getattr(found, part, inspect.Parameter.empty)
    if found is inspect.Parameter.empty:
        public = [member for member in members if not member.startswith("_")]
        own = [member for member in public if getattr(members[member], "__module__", "") == module]
        near = difflib.get_close_matches(path, public, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join((own or public)[:20]) or 'nothing'}"
        raise BadModule(module=module, reason=f"({members.get('__file__', '?')}) has no {path!r}; {hint}")
    return found


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise UserCodeFailed, with file and line, for whatever the body raises; embershard's own errors pass."""
    try:
        yield
    except EmbershardError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may fail in any way, and end itself
        raise UserCodeFailed(
            what=what, reason=f"raised {type(error).__name__}: {error}", where=where_raised(error)
        ) from error


def where_raised(error: BaseException) -> str:
    """file:line of the last line of a user's code that an error came through; "" for one that was not raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", str(Path(importlib.__file__).parent)))
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(theirs or frames)), "")


def where_running(frame: FrameType | None) -> str:
    """file:line of the innermost line of a user's code on a stack; "" where there is none."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(("<", *INSTALLED)):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def where_defined(member: object) -> str:
    """file:line of a class or a function, or of an object's class; "" where no source is known."""
    for found in (member, type(member)):
        with contextlib.suppress(TypeError, OSError):
            return f"{inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]}"  # type: ignore[arg-type]
    return ""
