"""Planted faults: small changes of the package that lose, double or misplace what was acknowledged.

A file of mutants/ says in its first line what is wrong, then has hunks:

    --- ps/shard.py
    <<<<<<<
    what stands there, once
    =======
    what takes its place
    >>>>>>>

`install` has this process import the package so changed; the files stay as they are. A first line may name the seed
that catches the mutant, with the focus that it was found with: seed 227, focus "". What a seed does moves with the
code: where seeds that catch it are too rare to search for, it names a test that does: test ps/test_shard.py::test_a.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

FOLDER = Path(__file__).parent / "mutants"
ROOT = Path(__file__).resolve().parents[2]
_HUNK = re.compile(r"^--- (\S+)\n<<<<<<<\n(.*?)^=======\n(.*?)^>>>>>>>\n", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    """All of them."""
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


def arguments(name: str, count: int) -> list[str]:
    """What `python -m simulation` is given to catch a mutant: the seed or the test that does, or the first seeds."""
    line = (FOLDER / f"{name}.patch").read_text().partition("\n")[0]
    test = re.search(r"test (\S+::\w+)", line)
    if test is not None:
        return [test[1], "--mutant", name]
    found = re.search(r'seed (\d+)(?:, focus "(.*?)")?', line)
    if found is None:
        return [f"0:{count}", "--mutant", name]
    return [found[1], "--mutant", name, *([] if found[2] is None else ["--focus", found[2]])]


def catcher(arguments: Sequence[str], output: str) -> str:
    """What has caught a mutant, by the output of `python -m simulation` with these arguments; empty if nothing has."""
    if "::" in arguments[0]:
        return arguments[0] if f"FAILED {arguments[0]}" in output else ""
    found = re.search(r"^python -m simulation (\d+) --mutant", output, re.MULTILINE)
    return found[1] if found else ""


def changed_sources(name: str) -> dict[str, str]:
    """The files that a mutant changes, as they are with it. ValueError where a hunk does not fit."""
    text = (FOLDER / f"{name}.patch").read_text()
    sources: dict[str, str] = {}
    hunks = _HUNK.findall(text)
    if not hunks:
        raise ValueError(f"{name}: it has no hunk")
    for path, old, new in hunks:
        source = sources.get(path) or (ROOT / path).read_text()
        if not old.endswith("\n") or source.count(old) != 1:
            old, new = old.removesuffix("\n"), new.removesuffix("\n")  # a part of a line
        if source.count(old) != 1:
            raise ValueError(f"{name}: {path} has this {source.count(old)} times, not once:\n{old}")
        sources[path] = source.replace(old, new)
    return sources


def install(name: str) -> None:
    """Import the package with this mutant from here on; none of the files that it changes may be imported yet."""
    modules = {"embershard." + path.removesuffix(".py").replace("/", "."): (path, text)
               for path, text in changed_sources(name).items()}  # fmt: skip
    imported = sorted(modules.keys() & sys.modules.keys())
    assert not imported, f"{imported} are imported already"
    sys.meta_path.insert(0, _Finder(modules))


class _Finder:
    def __init__(self, modules: dict[str, tuple[str, str]]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        file, text = self._modules[fullname]
        location = ROOT / "src" / "embershard" / file
        return importlib.util.spec_from_file_location(fullname, location, loader=_Loader(fullname, str(location), text))


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> object:  # past the cache of compiled files
        return compile(self._text, self.path, "exec", dont_inherit=True)
