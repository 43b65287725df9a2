"""Schedulers of torch by their name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch.optim import lr_scheduler

# they take functions, other schedulers, or what an evaluation says
_NOT_BY_NAME = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


class UnknownScheduler(ValueError):
    """A name that is no scheduler's."""


def make_scheduler(
    name: str, arguments: Mapping[str, object], optimizer: torch.optim.Optimizer
) -> lr_scheduler.LRScheduler:
    """A scheduler of torch.optim.lr_scheduler.

    UnknownScheduler for a class that it has not, ValueError for arguments that the class does not take.
    """
    kind = getattr(lr_scheduler, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and name[0].isupper()):
        raise UnknownScheduler(f"torch.optim.lr_scheduler has no class {name!r}")
    if name in ("LRScheduler", *_NOT_BY_NAME):
        raise UnknownScheduler(
            f"{name} cannot be written in a job file; use it in a loop of your own, on es.ShardOptimizer"
        )
    taken = [key for key in inspect.signature(kind).parameters if key not in ("optimizer", "last_epoch", "verbose")]
    unknown = sorted(set(arguments) - set(taken))
    if unknown:
        raise ValueError(f"{name} takes no {unknown[0]!r}; it takes {', '.join(taken)}")
    try:
        make: Callable[..., lr_scheduler.LRScheduler] = kind
        return make(optimizer, **arguments)
    except (TypeError, ValueError, ArithmeticError, KeyError, AssertionError) as error:
        raise ValueError(f"{name}: {error}") from None


def check_scheduler(name: str, arguments: Mapping[str, object]) -> None:
    """ValueError where `make_scheduler` will refuse it."""
    make_scheduler(name, arguments, torch.optim.Adagrad([torch.zeros(1)], lr=1.0))  # like shards without a momentum
