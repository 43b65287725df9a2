"""Dense weights in the workers, by DistributedDataParallel or FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from embershard.proto.errors import JobError
from embershard.proto.spec import Optimizer
from embershard.worker.job.training import DenseMode
from embershard.worker.models.layers import FeatureEmbedding
from embershard.worker.strategy.allreduce import SynchronousSteps, all_reduced
from embershard.worker.strategy.formula_optimizer import RowFormulaOptimizer
from embershard.worker.strategy.optimizers import by_spec, dense_optimizer, torch_optimizer
from embershard.worker.strategy.protocol import StepBatch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ReplicatedDense:
    """The dense part of a model whose rows are remote: all workers hold it, or (fsdp) a part of it each.

    Remote embeddings have no parameters, so torch sees the dense ones alone. Buffers stay each worker's own during
    training. A model without dense parameters, or a world of one worker, is left as it is.

    With ddp on the CPU the optimizers are the shards' own, so that a step has the bits of dense weights on shards.
    """

    def __init__(self, model: nn.Module, mode: DenseMode, specs: Mapping[str, Optimizer], device: torch.device) -> None:
        self.module: nn.Module = model
        self._sharded: list[FSDPModule] = []
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if trained and dist.is_initialized() and dist.get_world_size() > 1:
            if mode == "fsdp":
                self._sharded = _shard(model, device)
                trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
            else:
                self.module = all_reduced(model, views=True)
        on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for _, p in trained)
        kind = RowFormulaOptimizer if mode == "ddp" and on_cpu else torch_optimizer
        self.optimizers = [dense_optimizer(*group, kind) for group in by_spec(specs, trained)]

    @property
    def skipped(self) -> int:
        """Blocks whose gradient held NaN or Inf, where that is looked at."""
        return sum(optimizer.skipped for optimizer in self.optimizers if isinstance(optimizer, RowFormulaOptimizer))

    def add_up_by(self, together: SynchronousSteps) -> None:
        """Add the workers' gradients up as shards do, where DistributedDataParallel adds them up.

        For steps of one batch: of several, each has other shares, and rows and dense weights would not agree on them.
        """
        if isinstance(self.module, DistributedDataParallel):
            together.weigh_gradients_of(self.module)

    def gather(self) -> None:
        """Have all weights here until the next backward, by collectives in the same order on every worker.

        Workers evaluate different numbers of batches, and a batch may leave a part out. It waits: the weights of a part
        that does not run would stay sharded here, and a checkpoint would gather them on some workers alone.
        """
        for part in self._sharded:
            part.unshard()

    def gathered(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The batches, each with all weights here."""
        for batch in batches:
            self.gather()
            yield batch


def _shard(model: nn.Module, device: torch.device) -> list[FSDPModule]:
    """Each part of a model that has parameters, sharded over all workers."""
    from torch.distributed.device_mesh import init_device_mesh  # a fifth of a worker's start, for this mode alone
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # not the model itself, whose hooks would move the ids to the device before the session can route them
    # one may be in a list, and an attribute; a part of another one has to be sharded before it
    parts = sorted(dict.fromkeys(_parts(model)), key=lambda part: len(list(part.modules())))
    _check_shared(model, parts)
    _check_types(model, parts)
    in_parts = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():  # those of no part are whole on every worker
        if parameter.requires_grad and id(parameter) not in in_parts:
            average = partial(_averaged, group=mesh.get_group())
            parameter.register_hook(average)  # type: ignore[no-untyped-call]
    return [fully_shard(part, mesh=mesh, reshard_after_forward=False) for part in parts]


def _check_shared(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """JobError where modules of several parts share a parameter: each part would train its own."""
    part_of = {module: part for part in reversed(parts) for module in part.modules()}
    found: dict[int, tuple[nn.Module | None, str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            part, first = found.setdefault(id(parameter), (part_of.get(module), name))
            if part is not part_of.get(module) and parameter.requires_grad:
                reason = (
                    f"{first} and {name} are one parameter, and fsdp shards the modules that have them apart: use ddp"
                )
                raise JobError(where="dense.mode", reason=reason)


def _check_types(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """JobError for a part with trained parameters of several types, which torch cannot shard together."""
    names = {module: name for name, module in model.named_modules()}
    inner = set[int]()  # parameters of the parts of a part, which are sharded before it
    for part in parts:
        own = [parameter for parameter in part.parameters() if id(parameter) not in inner]
        inner.update(map(id, own))
        types = {str(parameter.dtype) for parameter in own if parameter.requires_grad}
        if len(types) > 1:
            reason = f"{names[part]} has parameters of {' and '.join(sorted(types))}, and fsdp takes one type: use ddp"
            raise JobError(where="dense.mode", reason=reason)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The children that have parameters; in place of one that may not be called (a list, or dict), its children."""
    for child in module.children():
        if type(child).forward is nn.Module.forward or isinstance(child, FeatureEmbedding):
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


def _averaged(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean over the workers, as of what is sharded."""
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total / group.size()
