"""Fetches the packages that a machine without network lacks, as wheels for its Python: `make gpu-wheels`.

What is needed is read off the environment that this runs in: embershard's own requirements and those of its tests, and
what they need in turn, in the versions that are installed here; without torch, which is chosen by its CUDA, and without
what the machine has already. With a limit on what can be carried at once the wheels are spread over folders 1, 2, ...
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

TESTS = ("pytest", "pytest-timeout", "hypothesis")
MIB = 1 << 20


def needed(has: set[str], python: str) -> dict[str, str]:
    """Package -> version of all that is to be fetched."""
    target = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    target |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    found: dict[str, str] = {}
    waiting = [*(distribution("embershard").requires or ()), *TESTS]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = normal(requirement.name)
        if name in found or name in has or (requirement.marker and not requirement.marker.evaluate(target)):
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed here: run make setup") from None
        waiting += distribution(name).requires or ()
    return dict(sorted(found.items()))


def normal(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(packages: dict[str, str], python: str, platforms: list[str], folder: Path) -> None:
    """Exactly these; SystemExit with pip's words where one has no wheel for that Python and these platforms."""
    words = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    words += [word for name in platforms for word in ("--platform", name)]
    pins = [f"{name}=={its}" for name, its in packages.items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *words]
    if subprocess.run([*command, "--dest", str(folder), *pins], check=False).returncode:
        raise SystemExit("not all of them could be fetched: another of --platform may have the missing one")


def spread(files: list[Path], limit: int) -> list[list[Path]]:
    """Files in groups of at most `limit` bytes, the largest first; a file above the limit has a group of its own."""
    groups: list[list[Path]] = []
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        size = file.stat().st_size
        fitting = (group for group in groups if sum(it.stat().st_size for it in group) + size <= limit)
        group = next(fitting, None)
        if group is None:
            groups.append(group := [])
        group.append(file)
    return groups


def main() -> None:
    """Fetch, spread and list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--platform", action="append", dest="platforms", help="pip's name; may be given several times")
    parser.add_argument("--has", nargs="*", default=[], help="packages that the machine has, beside torch")
    parser.add_argument("--limit-mib", type=float, help="the most that one folder may hold")
    parser.add_argument("--to", type=Path, default=Path(".wheels"))
    options = parser.parse_args()
    platforms = options.platforms or [f"manylinux_2_28_{platform.machine()}"]
    packages = needed({"torch", *map(normal, options.has)}, options.python)
    shutil.rmtree(options.to, ignore_errors=True)
    options.to.mkdir(parents=True)
    if packages:
        download(packages, options.python, platforms, options.to)
    files = sorted(options.to.glob("*.whl"))
    total = sum(file.stat().st_size for file in files)
    print(f"{len(files)} wheels, {total / MIB:.1f} MiB, in {options.to}")
    if options.limit_mib is None:
        return
    for number, group in enumerate(spread(files, int(options.limit_mib * MIB)), start=1):
        folder = options.to / str(number)
        folder.mkdir()
        size = sum(file.stat().st_size for file in group) / MIB
        names = ", ".join(sorted(file.name.split("-")[0] for file in group))
        for file in group:
            file.rename(folder / file.name)
        print(f"  {folder}: {size:.1f} MiB{' (above the limit)' if size > options.limit_mib else ''}: {names}")


if __name__ == "__main__":
    main()
