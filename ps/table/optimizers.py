"""Row optimizers: the ones that every shard has, and those of the modules that a shard was started with.

A user-defined one is a decorated function:

    @row_optimizer(state_per_dim=1, settings={"eps": 1e-10})
    def my_adagrad(row, state, grad, hyper):
        lr, eps = hyper[0], hyper[1]
        for j in range(row.size):
            state[j] += grad[j] * grad[j]
            row[j] -= lr * grad[j] / (np.sqrt(state[j]) + eps)

A shard that was started with the module `mine` finds it as "mine:my_adagrad".

The last float of `hyper`, behind the settings, is the row's age: of how many gradients of a worker `grad` is the sum.
It is 1, but for rows that the codec `rows` kept back. A function that divides by a root of squared gradients may use
it: a sum of n is larger than one of them (proto/optim/formulas.py: adam).
"""

from __future__ import annotations

from collections.abc import Sequence

from embershard.proto import spec
from embershard.proto.codec.user_defined import CustomCodec
from embershard.proto.errors import BadModule, UnknownOptimizer
from embershard.proto.optim.formulas import BUILTIN
from embershard.proto.optim.user_defined import RowOptimizer, row_optimizer
from embershard.proto.user_modules import members_of

__all__ = ["OptimizerRegistry", "RowOptimizer", "row_optimizer"]


class OptimizerRegistry:
    """The row optimizers of one shard, by name.

    modules: names of user modules. They are imported and their optimizers compiled at once, so that a mistake stops the
    shard at its start. BadModule names a module that cannot be imported or has neither one nor a codec, BadOptimizer a
    function that does not compile.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._known = dict(BUILTIN)
        for module in modules:
            self._known.update(_optimizers_of(module))

    def find(self, optimizer: spec.Optimizer) -> RowOptimizer:
        """The row optimizer of a spec.

        UnknownOptimizer when this shard has none of its name, BadOptimizer when it has no such setting.
        """
        found = self._known.get(optimizer.name)
        if found is None:
            raise UnknownOptimizer(optimizer=optimizer.name, known=", ".join(self._known))
        found.params(optimizer)
        return found


def _optimizers_of(module: str) -> dict[str, RowOptimizer]:
    members = members_of(module)
    found = {f"{module}:{name}": member for name, member in members.items() if isinstance(member, RowOptimizer)}
    if not found and not any(isinstance(member, CustomCodec) for member in members.values()):
        raise BadModule(module=module, reason="has no function decorated with @row_optimizer or @values_codec")
    for member in found.values():
        _ = member.compiled
    return found
