"""Which parameters are meant: patterns over the names that the model gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a client that trains nothing imports this module, too
    from torch import nn


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern (as of the shell, * and ? and [...]) is that of a name, or of a module that it lies in.

    "top", "top.*" and "*.weight" all match the parameter "top.0.weight".
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1)) or pattern == "*"


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that matches a name, if any does."""
    return next((pattern for pattern in patterns if matches(name, pattern)), None)


def choose(names: Iterable[str], rules: Mapping[str, object], what: str) -> dict[str, str]:
    """The pattern of each name: the first of the rules' that matches it.

    ValueError for a name that no pattern matches, and for a pattern, but for "*", that is no name's.
    """
    chosen: dict[str, str] = {}
    for name in names:
        pattern = first_match(name, rules)
        if pattern is None:
            raise ValueError(f"{what}: no pattern matches {name!r} (there are: {', '.join(rules)}); add one, or '*'")
        chosen[name] = pattern
    _refuse_unused([pattern for pattern in rules if pattern not in {"*", *chosen.values()}], chosen, what)
    return chosen


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let the parameters that a pattern matches keep their values, before the model is wrapped; their names.

    ValueError for a pattern that matches none, and where nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = [name for name in names if any(matches(name, pattern) for pattern in patterns)]
    unused = [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]
    _refuse_unused(unused, names, "freeze")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze: {', '.join(patterns)} leaves no parameter to train")
    return frozen


def _refuse_unused(unused: Sequence[str], names: Iterable[str], what: str) -> None:
    if unused:
        raise ValueError(f"{what}: {unused[0]!r} matches nothing that is left (known: {', '.join(names) or 'none'})")
