"""Workers that make every step together: who is out of data, what a batch counts, and what a lost worker is called."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from embershard.proto.errors import JobError, WorkerLost
from embershard.worker.data.batch import Batch
from embershard.worker.strategy.allreduce import SynchronousSteps
from embershard.worker.strategy.protocol import StepBatch


class Pair(SynchronousSteps):
    """The first of two workers; the other one has batches of the given sizes."""

    def __init__(self, other):
        self.idle = []
        with patch.object(dist, "get_rank", return_value=0), patch.object(dist, "get_world_size", return_value=2):
            super().__init__(self.idle.append)
        self._other = iter(other)

    def _reduce(self, values, operation):
        other = next(self._other, 0)
        if operation == dist.ReduceOp.MAX:
            return [max(*values, other)]
        samples, idle = values
        return [samples + other, idle + (other == 0)]


def turns(*samples):
    return (
        StepBatch(0, Batch(torch.zeros(n, 1, dtype=torch.int64), None, torch.zeros(n)), n, weight=n) for n in samples
    )


def test_a_batch_counts_by_its_share_of_the_step():
    made = list(Pair([4, 4, 1]).batches(turns(4, 4, 3)))
    assert [turn.samples for turn in made] == [4, 4, 3]
    assert [turn.loss_scale for turn in made] == [1.0, 1.0, 1.5]  # mean of two, of 3 and 1 samples
    assert [turn.weight for turn in made] == [1.0, 1.0, 1.0]
    assert [turn.joint for turn in made] == [8, 8, 4]  # what its batches weigh, where several make a step


def test_a_worker_without_data_keeps_the_other_company_until_it_is_done():
    pair = Pair([4, 4, 2])
    made = list(pair.batches(turns(4)))
    assert [(turn.samples, turn.loss_scale) for turn in made] == [(4, 1.0), (0, 0.0), (0, 0.0)]
    assert [len(turn.batch) for turn in made] == [4, 4, 4]
    assert [turn.joint for turn in made] == [8, 4, 2]
    assert pair.idle == [False, True, True]
    assert pair.any_idle  # the one without data is no other's affair alone: its rows are those of all
    longer = Pair([4])
    assert [(turn.samples, longer.any_idle) for turn in longer.batches(turns(4, 4))] == [(4, False), (4, True)]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_gradients_are_weighed_by_the_workers_samples_where_losses_are_not_scaled():
    layer = nn.Linear(1, 1, bias=False)
    parallel = DistributedDataParallel(layer)
    pair = Pair([4, 1, 2])
    pair.weigh_gradients_of(parallel)
    found = []
    for turn in pair.batches(turns(4, 3)):
        parallel(torch.full((1, 1), 10.0 if turn.samples else float("nan"))).sum().backward()
        found.append((turn.samples, turn.loss_scale, turn.weight, turn.joint, float(layer.weight.grad)))
        layer.zero_grad()
    # the last one is company: what its gradient holds does not count
    assert found == [(4, 1.0, 4, 8, 5.0), (3, 1.0, 3, 4, 7.5), (0, 1.0, 0.0, 2, 0.0)]


def test_a_worker_that_never_had_a_batch_is_named():
    with pytest.raises(JobError, match="worker 0 has no batch to begin with; use fewer workers or smaller batches"):
        list(Pair([4]).batches(turns()))


def test_workers_agree_on_the_largest_norm():
    assert [Pair([3]).agree(2.0), Pair([1]).agree(2.0)] == [3.0, 2.0]


def test_nobody_has_data():
    assert list(Pair([0]).batches(turns())) == []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]"),
        RuntimeError("Application timeout caused pair closure (gloo)"),
        dist.DistNetworkError("The client socket has timed out"),
    ],
)
def test_a_failed_collective_says_that_a_worker_is_lost(error):
    with pytest.raises(WorkerLost), Pair([]).collective_errors():
        raise error


def test_another_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), Pair([]).collective_errors():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
