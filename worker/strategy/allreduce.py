"""Workers whose gradients torch all-reduces: they make their steps together, or not at all."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from embershard.proto.errors import JobError, WorkerLost
from embershard.worker.client.worker_group import first_line
from embershard.worker.device import is_dtensor
from embershard.worker.strategy.protocol import StepBatch


class SynchronousSteps:
    """This worker's part in steps that all workers make.

    A worker that comes to the end of its data is idle: it repeats its last batch, which then weighs nothing, until all
    are there, because forward and backward hold collectives that every worker must join.
    """

    @classmethod
    def join(cls, set_idle: Callable[[bool], None] = lambda _: None) -> SynchronousSteps | None:
        """Train in step with the workers of torch's process group; None where this one is alone."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return None if alone else cls(set_idle)

    def __init__(self, set_idle: Callable[[bool], None]) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.waited = 0.0  # seconds, for the others
        self.any_idle = False  # whether somebody has come to the end of its data before the others
        self._share = 0.0  # of a batch's weight: this worker's
        self._weighs = False
        self._set_idle = set_idle  # told whether the next batch is one without data of its own

    def weigh_gradients_of(self, module: DistributedDataParallel) -> None:
        """Multiply its gradients by each worker's share of the weight, and add them up: a sum as on the shards.

        Batches keep their weight then, and losses are not scaled, which would round elsewhere. Call it before the
        first batch, and not where several batches make one step: each has shares of its own.
        """
        self._weighs = True
        # torch looks at the hook's annotations, and takes them for wrong where they are texts
        module.register_comm_hook(None, lambda _, bucket: self._weighted_sum(bucket))

    def _weighted_sum(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if self._share > 0:
            gradients.mul_(self._share)
        else:
            gradients.zero_()  # a batch of weight 0 may have NaN
        summed: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(gradients, async_op=True).get_future()
        return summed.then(lambda done: done.value()[0])

    def batches(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Yield as many batches on all workers; a step's gradient is the mean over the batches of all of them."""
        last: StepBatch | None = None
        while True:
            batch = next(batches, None)
            weight, idle = (0.0, 1) if batch is None else (batch.weight, 0)
            total, idle_workers = self._reduce([weight, idle], dist.ReduceOp.SUM)
            if idle_workers == self.world_size:
                return
            self.any_idle = idle_workers > 0
            self._set_idle(batch is None)
            if batch is None and last is not None:
                batch = replace(last, samples=0, weight=0.0)
            if batch is None:
                reason = f"worker {self.rank} has no batch to begin with; use fewer workers or smaller batches"
                raise JobError(where="workers", reason=reason)
            last, self._share = batch, batch.weight / total if total else 0.0
            if self._weighs:
                yield replace(batch, joint=total)
            else:  # gradients are averaged over the workers, whatever each one's batch
                scale = batch.weight * self.world_size / total if total else 0.0
                yield replace(batch, loss_scale=scale, weight=1.0, joint=total)

    def agree(self, norm: float) -> float:
        """The largest of all workers' norms."""
        return self._reduce([norm], dist.ReduceOp.MAX)[0]

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
        start = time.perf_counter()
        with self.collective_errors():
            dist.all_reduce(numbers, operation)
        self.waited += time.perf_counter() - start
        return [float(number) for number in numbers]

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """WorkerLost where a collective fails: it does when somebody is gone, or late by the group's timeout."""
        try:
            yield
        except RuntimeError as error:
            if not _of_collective(error):
                raise
            raise WorkerLost(worker=self.rank, world_size=self.world_size, reason=first_line(error)) from None


def all_reduced(model: nn.Module, *, views: bool, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """A model whose gradients the workers average; buffers are every worker's own. `views` is for dense ones only."""
    with warnings.catch_warnings():
        # what torch 2.13 has in its place is unknown to versions before it
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(
            model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=views
        )


def check_used(module: nn.Module, loss: torch.Tensor) -> None:
    """JobError where backward would give no gradient to a parameter that FSDP is to sum: all would hang."""
    if not _sharded_parts(module):
        return
    used, seen, nodes = set(), set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return  # its part of the graph is made in backward
        seen.add(node)
        used.add(id(getattr(node, "variable", None)))
        nodes += [before for before, _ in node.next_functions]
    unused = [name for name, its in module.named_parameters() if its.requires_grad and id(its) not in used]
    if unused:
        raise _left_out(unused)


def check_reduced(module: nn.Module) -> None:
    """JobError where backward left a gradient to be summed, after which all would hang, or each worker has its own."""
    _check_sharded(module)
    if not isinstance(module, DistributedDataParallel):
        return
    try:
        module._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        trained = [(name, parameter) for name, parameter in module.module.named_parameters() if parameter.requires_grad]
        raise _left_out([name for name, parameter in trained if parameter.grad is None]) from None


def _sharded_parts(module: nn.Module) -> list[nn.Module]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who shards a model has imported it
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def _check_sharded(module: nn.Module) -> None:
    # FSDP sums the gradients of a part whose forward was called; else they stay with the whole weights
    in_parts = {id(parameter) for part in _sharded_parts(module) for parameter in part.parameters()}
    named = module.named_parameters() if in_parts else ()
    alone = [name for name, its in named if id(its) in in_parts and its.grad is not None and not is_dtensor(its)]
    if alone:
        reason = (
            f"fsdp did not sum the gradient of {', '.join(alone)}: it does where a module is called, as in "
            "self.encoder(x), and not where another method of it, or its weight, is used: call it, or use ddp"
        )
        raise JobError(where="model", reason=reason)


def _left_out(parameters: Sequence[str]) -> JobError:
    names = ", ".join(parameters) or "a parameter"
    reason = (
        f"a batch left {names} without a gradient, for which the other workers wait: use "
        "every parameter in each forward, freeze those that are never used, or use strategy ps and dense.mode ps"
    )
    return JobError(where="model", reason=reason)


def _of_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or re.search("gloo|nccl|connection|peer", str(error), re.I) is not None
