"""What strategies promise: the figures of torch alone, steps that workers make together, and counts of this run."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import embershard as es
from embershard.proto.errors import JobError, WorkerLost
from embershard.proto.transport.local import LocalTransport
from embershard.worker.client.client import Client
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Batch
from embershard.worker.session.session import Session
from embershard.worker.strategy.allreduce import SynchronousSteps, check_reduced
from embershard.worker.strategy.dense import _shard
from embershard.worker.strategy.protocol import StepBatch
from embershard.worker.strategy.shards import ShardCounters
from embershard.worker.training.build import choose_strategy
from embershard.worker.training.trainer import Trainer
from harness.clicks import NUM_IDS, click_data, click_job, copied

DATA = click_data(train=1500, test=500)


def job(strategy="local", name="lr", **embedding):
    first = {"optimizer": {"name": "adagrad", "lr": 0.1}, "initializer": {"name": "constant", "value": 0.01}}
    return click_job(
        name,
        strategy,
        data={"ids": "global"},
        embedding={**first, **embedding},
        dense={"optimizer": {"name": "adam", "lr": 0.01}},
        train={"epochs": 3, "lr_schedule": {"name": "linear", "warmup_steps": 4}},
    )


def run(job, session=None):
    return Trainer(job, DATA, session, WorkerGroup()).run()


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_one_process_of_torch_reaches_what_shards_reach(make_session, optimizer):
    settings = {"optimizer": {"name": optimizer, "lr": 0.1, "weight_decay": 0.001}}
    alone, on_shards = run(job(**settings)), run(job("ps", **settings), make_session())
    for metric, value in on_shards.figures["test"].items():
        assert alone.figures["test"][metric] == pytest.approx(value, abs=1e-5)
    assert alone.figures["test"]["auc"] > 0.75
    assert (alone.samples, alone.steps, alone.wait_shards) == (on_shards.samples, on_shards.steps, 0.0)
    assert alone.wait_data > 0  # the training thread made the batches
    assert alone.table_rows == {"linear": NUM_IDS}


def test_the_same_seed_gives_the_same_first_values():
    first = {"initializer": {"name": "normal", "std": 0.1}}
    one, two = (choose(job(**first)).model.linear.weight.detach() for _ in range(2))
    assert torch.equal(one, two)
    assert float(one.std()) == pytest.approx(0.1, rel=0.3)
    uniform = choose(job(initializer={"name": "uniform", "low": 1.0, "high": 2.0})).model.linear.weight.detach()
    assert 1.0 <= uniform.min().item() < uniform.max().item() <= 2.0


@pytest.mark.parametrize("strategy", ["local", "ps"])
def test_rows_start_small_where_a_job_names_no_first_values(make_session, strategy):
    session = make_session() if strategy == "ps" else None
    chosen = choose(job(strategy, initializer=None), session)
    rows = chosen.model.linear(torch.arange(NUM_IDS)).detach()
    assert float(rows.std()) == pytest.approx(0.01, rel=0.3)


def choose(job, session=None):
    return choose_strategy(job, job.model.build(DATA.schema, job.dim, "meta"), session, torch.device("cpu"))


def backward(strategy):
    batch = next(iter(DATA.train(0, 0, 1, 10)))
    strategy.module(batch.ids, batch.dense).sum().backward()


def test_a_skipped_step_changes_nothing():
    strategy = choose(job(name="fm"))
    before = copied(strategy.model)
    backward(strategy)
    strategy.skip()
    strategy.step(1.0)  # there is nothing left that it could do
    torch.testing.assert_close(copied(strategy.model), before, rtol=0, atol=0)


def test_a_skipped_step_leaves_no_gradient_in_a_worker_of_hybrid(make_session):
    strategy = choose(job("hybrid"), make_session())
    backward(strategy)
    assert any(parameter.grad is not None for parameter in strategy.model.parameters())
    strategy.skip()
    assert all(parameter.grad is None for parameter in strategy.model.parameters())


def test_a_table_that_memory_cannot_hold_is_refused():
    model = job().model.build(click_data(None, train=1).schema, 16, "meta")  # hashed ids
    with pytest.raises(JobError, match=r"table 'linear' of 4,611,686,018,427,387,904 rows .* strategy ps holds"):
        choose_strategy(job(), model, None, torch.device("cpu"))


def test_what_workers_hold_can_be_saved_and_restored():
    one, other = choose(job(name="fm")), choose(job(name="fm", initializer={"name": "normal"}))
    for strategy in (one, other):
        backward(strategy)
        strategy.step(1.0)
    other.local_weights.load_state_dict(one.local_weights.state_dict())
    for strategy in (one, other):  # the optimizers' states, too
        backward(strategy)
        strategy.step(1.0)
    torch.testing.assert_close(copied(one.model), copied(other.model), rtol=0, atol=0)
    with pytest.raises(ValueError, match="other weights"):
        choose(job()).local_weights.load_state_dict(one.local_weights.state_dict())


SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=0.1))
IDS = torch.arange(64)  # so many are on two shards


class Worker:
    """Trains on some shards, which may be replaced."""

    def __init__(self, shards, rank):
        transports = [
            LocalTransport(lambda message, i=i: shards[i].handle(message), f"local/{i}") for i in range(len(shards))
        ]
        self.session = Session(Client(transports, worker=rank))
        self._module = es.Embedding(self.session.table(SPEC))

    def push(self, *before):
        """A step, whose rows miss those of others."""
        loss = self._module(IDS).sum()
        for other in before:
            other.push()
        loss.backward()
        self.session.step()


def test_what_was_counted_before_is_not_of_this_run(make_shards):
    shards = make_shards(2)
    mine, other = Worker(shards, 0), Worker(shards, 1)
    mine.push()  # the first one's version says nothing
    mine.push(other, other)
    before = mine.session.staleness_seen()
    counted = ShardCounters(mine.session.client)
    assert sum(counted.staleness_seen()) == counted.expired_leases() == 0

    mine.push()
    mine.push(other)
    now = mine.session.staleness_seen()
    assert before[:3] == (4, 0, 2)
    assert now[:3] == (8, 2, 2)
    assert counted.staleness_seen()[:3] == (4, 2, 0)
    assert counted.table_rows() == {"t": 64}

    shards[1] = make_shards(2)[1]  # restarted, empty
    assert counted.staleness_seen()[:3] == (2, 1, 0)


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


def test_a_worker_that_never_had_a_batch_is_named_unless_nobody_has():
    with pytest.raises(JobError, match="worker 0 has no batch to begin with"):
        list(Pair([4]).batches(turns()))
    assert list(Pair([0]).batches(turns())) == []


def test_workers_agree_on_the_largest_norm():
    assert [Pair([3]).agree(2.0), Pair([1]).agree(2.0)] == [3.0, 2.0]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]"), WorkerLost),
        (RuntimeError("Application timeout caused pair closure (gloo)"), WorkerLost),
        (dist.DistNetworkError("The client socket has timed out"), WorkerLost),
        (dist.DistBackendError(""), WorkerLost),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_a_failed_collective_says_that_a_worker_is_lost(error, found):
    with pytest.raises(found) as caught, Pair([]).collective_errors():
        raise error
    assert type(caught.value) is found


class Tower(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.layer(x))


class Towers(nn.Module):
    """A layer that is in a list, and in the tower before it."""

    def __init__(self):
        super().__init__()
        self.tower = Tower(nn.Linear(4, 4))
        self.layers = nn.ModuleList([self.tower.layer])

    def forward(self, x):
        return self.layers[0](self.tower(x))


@pytest.mark.usefixtures("one_process")
def test_fsdp_shards_a_part_of_another_one_first():
    model, wanted = Towers(), Towers()
    wanted.load_state_dict(model.state_dict())
    _shard(model, torch.device("cpu"))
    wanted(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(gradients[name].grad.full_tensor(), parameter.grad)


class Methods(nn.Module):
    """What reads rows by `lookup` of their embedding, which projects them, or a layer by a method of its own."""

    def __init__(self):
        super().__init__()
        fields = (es.Field("tags", "tag", 0, 2, "mean"),)
        self.embedding = es.FeatureEmbedding(es.Schema(("tags",), 0, None, fields, (es.IdTable("tag", 5, 3),)), 4)
        self.embedding.tag.requires_grad_(False)
        self.tower = Tower(nn.Linear(4, 4))

    def forward(self, ids, *, called=True):
        x = self.embedding.lookup(ids).pooled().squeeze(1)
        return self.tower(x) if called else nn.functional.linear(x, self.tower.last.weight)


@pytest.mark.usefixtures("one_process")
def test_fsdp_sums_the_gradients_of_projections_and_refuses_those_that_it_would_not_sum():
    model, ids = Methods(), torch.tensor([[1, 4], [2, -1]])
    wanted = copy.deepcopy(model)
    parts = _shard(model, torch.device("cpu"))
    for each in (wanted, model):
        each(ids).sum().backward()
        check_reduced(each)
    torch.testing.assert_close(model.embedding.tag_map.weight.grad.full_tensor(), wanted.embedding.tag_map.weight.grad)
    for part in parts:
        part.unshard()
    model(ids, called=False).sum().backward()
    with pytest.raises(JobError, match=r"fsdp did not sum the gradient of tower\.last\.weight: it does where"):
        check_reduced(model)


@pytest.mark.usefixtures("one_process")
def test_fsdp_refuses_a_part_with_parameters_of_two_types():
    model = nn.Sequential(Tower(nn.Linear(4, 4)))
    model[0].last.double()
    reason = r"0 has parameters of torch\.float32 and torch\.float64, and fsdp takes one type: use ddp"
    with pytest.raises(JobError, match=reason):
        _shard(model, torch.device("cpu"))


@pytest.mark.usefixtures("one_process")
def test_fsdp_takes_a_part_of_another_type_within_a_part():
    model = Towers()
    model.tower.layer.double()
    assert _shard(model, torch.device("cpu")) == [model.layers[0], model.tower]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("other", ["last", "output"])
def test_fsdp_refuses_a_parameter_of_two_parts(other):
    """Each part trained its own, and one that is the model's, too, was not averaged."""
    model = Towers()
    if other == "last":
        model.tower.last.weight = model.tower.layer.weight
    else:
        model.output = model.tower.layer.weight
    with pytest.raises(JobError, match="are one parameter, and fsdp shards the modules that have them apart: use ddp"):
        _shard(model, torch.device("cpu"))
