"""`embershard compile`: what shards and workers run, compiled before any of them starts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

import embershard

PACKAGES = ("proto", "ps", "worker")


def compile(
    for_wheel: Annotated[
        bool,
        typer.Option(
            "--for-wheel",
            help="For all processors of this kind (x86-64-v3, or 64-bit ARM), into the folder that wheels bring.",
        ),
    ] = False,
) -> None:
    """Compile what shards and workers run, and keep it beside the package: for images, and installs that root makes.

    Without it the first start of each user compiles what it needs, for some seconds, unless the wheel brought it.
    Without torch only what shards run is compiled.
    """
    from embershard.proto.compiled import kept

    try:
        kept.compile_for("wheel" if for_wheel else "here")
    except KeyError as error:
        raise typer.BadParameter(f"wheels have kernels for {', '.join(kept.BASELINES)}; this is {error}") from None
    from embershard.proto.compiled.jit import compile_missing
    from embershard.proto.optim.formulas import BUILTIN

    missing = {name for module in _modules() if (name := _import(module))}
    compile_missing(everything=True)
    for optimizer in BUILTIN.values():
        _ = optimizer.compiled
    left_out = f" (without what needs {', '.join(sorted(missing))}, which is not installed)" if missing else ""
    typer.echo(f"compiled{left_out}")


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
