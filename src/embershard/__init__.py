"""embershard: a sharded parameter server for recommender models in PyTorch.

The public names are those of __init__.pyi. They are imported when they are first used, so that a shard's process never
loads torch.
"""

from __future__ import annotations

import atexit
import sys
from functools import cache
from importlib import import_module


def __getattr__(name: str) -> object:
    if name == "__all__":
        return list(_modules())
    module = _modules().get(name)
    if module is None:
        raise AttributeError(f"module 'embershard' has no attribute {name!r}")
    try:
        value = import_module(f"{module}.{name}") if module == __name__ else getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in ("torch", "pyarrow"):
            raise
        reason = f"embershard.{name} needs {missing}, which is not installed: pip install 'embershard[train]'"
        raise ModuleNotFoundError(reason, name=missing) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


@cache
def _modules() -> dict[str, str]:
    """The module of each public name."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _end_io_thread() -> None:
    """End the I/O thread, behind what programs register after this import, which may still use it."""
    if module := sys.modules.get(f"{__name__}.proto.transport.io_thread"):
        module.end()


atexit.register(_end_io_thread)
