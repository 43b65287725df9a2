"""`embershard compile`: what shards and workers run, compiled before any of them starts."""

from __future__ import annotations

import importlib
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

import embershard

PACKAGES = ("proto", "ps", "worker")


def compile(
    for_wheel: Annotated[
        bool,
        typer.Option("--for-wheel", help="Compile for all processors of this architecture, for a wheel."),
    ] = False,
) -> None:
    """Compile the kernels of shards and workers, and store them beside the package, for container images and
    system-wide installations.

    Otherwise the first start of each user compiles the kernels that it needs, which takes some seconds, unless they are
    in the wheel. Without torch only the kernels of shards are compiled.
    """
    from embershard.proto.compiled import kept

    if for_wheel:
        cpus = kept.BASELINES.get(platform.machine(), ())
        if not cpus:
            raise typer.BadParameter(f"a wheel has kernels for {', '.join(kept.BASELINES)}, not {platform.machine()}")
        # of their own: numba compiles for one processor in a process
        with ProcessPoolExecutor(len(cpus), multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
            missing = set().union(*processes.map(_compile_for_wheel, cpus))
    else:
        kept.compile_here()
        missing = _compile()
    left_out = f" (without what needs {', '.join(sorted(missing))}, which is not installed)" if missing else ""
    typer.echo(f"compiled{left_out}")


def _compile_for_wheel(cpu: str) -> set[str]:
    from embershard.proto.compiled import kept

    kept.compile_for_wheel(cpu)
    return _compile()


def _compile() -> set[str]:
    """Compile everything; the packages that are not installed and without which some of it was left out."""
    from embershard.proto.compiled.jit import compile_missing
    from embershard.proto.optim.formulas import BUILTIN

    missing = {name for module in _modules() if (name := _import(module))}
    compile_missing(everything=True)
    for optimizer in BUILTIN.values():
        _ = optimizer.compiled
    return missing


def _modules() -> list[str]:
    found = []
    for package in PACKAGES:
        folder = Path(embershard.__file__).parent / package
        for file in sorted(folder.resolve().rglob("*.py")):  # resolved: rglob enters no link
            parts = file.relative_to(folder.resolve()).with_suffix("").parts
            if parts[-1] != "__init__":
                found.append(".".join(("embershard", package, *parts)))
    return found


def _import(module: str) -> str:
    """Import a module; the package that it needs and that is not installed, empty where it has all."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name == "embershard":
            raise
        return name
    return ""
