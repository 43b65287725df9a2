"""Tables as users write them: on shards and in torch alone they train as nn.Embedding does."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from embershard.proto.errors import JobError
from embershard.proto.monitoring import memory
from embershard.worker.models.user_defined import take_first_values
from embershard.worker.strategy.allreduce import all_reduced
from embershard.worker.strategy.torch_only import materialise, row_gradients
from embershard.worker.training.build import choose_strategy
from harness.job import make_job

ROWS, DIM = 12, 3
IDS = torch.tensor([[1, 2, 3], [3, 3, 5], [0, 7, 2], [1, 9, 9]])
LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0])


class Base(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.emb = nn.Embedding(ROWS, DIM, **settings)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.head(self.emb(ids).mean(1)).squeeze(1)


class ReadAsAWhole(Base):
    def forward(self, ids):
        return F.linear(self.emb(ids).mean(1), self.emb.weight).logsumexp(1) + super().forward(ids)


class Regularised(Base):
    def forward(self, ids):
        return super().forward(ids) + 0.1 * self.emb.weight.square().sum()


class TiedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(DIM, ROWS)  # before the table: torch looks at the first module of a parameter
        self.emb = nn.Embedding(ROWS, DIM)
        self.out.weight = self.emb.weight

    def forward(self, ids):
        return self.out(self.emb(ids).mean(1)).logsumexp(1)


class OneWeightTwice(Base):
    def __init__(self):
        super().__init__()
        self.other = nn.Embedding(ROWS, DIM)
        self.other.weight = self.emb.weight

    def forward(self, ids):
        return super().forward(ids) + self.other(ids[:, 0]).sum(1)


class OneTableTwice(Base):
    def __init__(self):
        super().__init__()
        self.same = self.emb

    def forward(self, ids):
        return super().forward(ids[:, :2]) + self.same(ids[:, 2]).sum(1)


class Bag(nn.Module):
    def __init__(self, weighted=False, **settings):
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, **settings)
        self.weighted = weighted
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids):
        weights = {"per_sample_weights": torch.full(ids.shape, 0.5)} if self.weighted else {}
        return self.head(self.bag(ids, **weights)).squeeze(1)


class FlatBag(Bag):
    def forward(self, ids):
        offsets = torch.arange(len(ids)) * ids.shape[1]
        return self.head(self.bag(ids.flatten(), offsets, None)).squeeze(1)


class Scaled(nn.Embedding):
    def __init__(self):
        super().__init__(ROWS, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))


class OwnParameters(Base):
    def __init__(self):
        super().__init__()
        self.emb = Scaled()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.full((DIM,), 0.5))])

    def forward(self, ids):
        rows = self.emb(ids).mean(1) * self.emb.scale * self.parts[0] + self.parts[1]
        return self.head(rows).squeeze(1)


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.emb.weight.requires_grad_(False)


MODELS = {
    "plain": Base,
    "whole": ReadAsAWhole,
    "regularised": Regularised,
    "tied": TiedLayer,
    "one weight twice": OneWeightTwice,
    "one table twice": OneTableTwice,
    "own parameters": OwnParameters,
    "frozen": Frozen,
    "padding": lambda: Base(padding_idx=3),
    "max_norm": lambda: Base(max_norm=0.5),
    "by frequency": lambda: Base(scale_grad_by_freq=True),
    "bag of sums": lambda: Bag(mode="sum"),
    "bag of means": lambda: Bag(mode="mean", padding_idx=2),
    "bag of maxima": lambda: Bag(mode="max"),
    "weighted bag": lambda: Bag(mode="sum", weighted=True),
    "flat bag": lambda: FlatBag(mode="sum", max_norm=0.5),
}


def make(model):
    torch.manual_seed(4)
    return MODELS[model]()


def loss_of(module):
    return F.binary_cross_entropy_with_logits(module(IDS), LABELS)


def values(model):
    tables = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    with torch.no_grad():
        rows = {name: m.weight.detach().clone() for name, m in tables.items()}
        return rows | {n: p.detach().clone() for n, p in model.named_parameters() if n.rpartition(".")[0] not in tables}


def trained(model, strategy, optimizer, session=None):
    job = make_job(strategy, embedding={"optimizer": optimizer}, dense={"optimizer": {"name": "sgd", "lr": 0.1}})
    chosen = choose_strategy(job, make(model), session, torch.device("cpu"))
    for _ in range(4):
        loss_of(chosen.module).backward()
        chosen.step(1.0)
    return values(chosen.model)


def cases(*strategies):
    on_shards_no = ("hybrid", "tied"), ("ps", "own parameters"), ("hybrid", "own parameters")
    return [case for case in product(strategies, MODELS) if case not in on_shards_no]


@pytest.mark.parametrize(("strategy", "model"), cases("local", "dp", "ps", "hybrid"))
def test_a_table_trains_as_in_plain_torch(make_session, model, strategy):
    plain = make(model)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(plain).backward()
        optimizer.step()
    session = make_session() if strategy in ("ps", "hybrid") else None
    found = trained(model, strategy, {"name": "sgd", "lr": 0.1}, session)
    torch.testing.assert_close(found, values(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", ["tied", "whole", "one weight twice", "max_norm", "bag of means", "flat bag"])
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_a_table_decays_in_torch_alone_as_on_shards(make_session, model, optimizer):
    settings = {"name": optimizer, "lr": 0.1, "weight_decay": 0.01}
    on_shards, alone = trained(model, "ps", settings, make_session()), trained(model, "local", settings)
    torch.testing.assert_close(alone, on_shards, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("strategy", "model"), [("hybrid", "tied"), ("ps", "own parameters")])
def test_a_table_that_shards_cannot_hold_is_refused_by_name(make_session, strategy, model):
    with pytest.raises(JobError, match="'emb'"):
        trained(model, strategy, {"name": "sgd", "lr": 0.1}, make_session())


def test_tables_of_one_weight_get_one_where_the_job_has_first_values():
    model = OneWeightTwice()
    take_first_values(model, lambda name: True)
    materialise(model, {"*": None}, 0, torch.device("cpu"))
    assert model.emb.weight is model.other.weight
    assert not model.emb.weight.is_meta


def test_a_table_beyond_the_containers_memory_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(memory, "smallest_memory_limit", lambda: 2**28)
    model = nn.ModuleDict({"emb": nn.Embedding(2**20, 32, device="meta")})  # of 2^27 bytes, and its optimizer's state
    with pytest.raises(JobError, match=r"'emb' of 1,048,576 rows .* 0\.25 GiB of memory that this process may use"):
        materialise(model, {"*": None}, 0, torch.device("cpu"))
    assert model["emb"].weight.is_meta


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("model", [name for name in MODELS if name != "frozen"])
def test_distributed_data_parallel_adds_up_the_same_gradients(model):
    plain, model = make(model), make(model)
    row_gradients(model, materialise(model, {"*": None}, 0, torch.device("cpu")))
    module = all_reduced(model, views=False)
    for one in (plain, module, plain, module):
        loss_of(one).backward()
    for own, its in zip(plain.parameters(), model.parameters(), strict=True):
        gradient = its.grad.to_dense() if its.grad.is_sparse else its.grad
        torch.testing.assert_close(gradient, own.grad, rtol=0, atol=1e-6)
