"""What a GPU changes: where rows, gradients and states lie, and that training there follows the CPU."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard as es
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.device import to_device
from embershard.worker.session import reads
from embershard.worker.session.gradients import to_host
from embershard.worker.training.saver import RandomNumbers
from embershard.worker.training.trainer import Trainer
from harness.clicks import click_data, click_job
from harness.models import SumModel

pytestmark = pytest.mark.cuda


@pytest.fixture(params=["host", "gpu"], autouse=True)
def _finder_of_distinct_ids(request, monkeypatch):
    """Who finds the distinct ids of a batch: a GPU does it where they are many."""
    if request.param == "gpu":
        monkeypatch.setattr(reads, "MANY_IDS", 1)


CPU = torch.device("cpu")
ROWS, DIM = 50, 6


def trained(session, module, device, *inputs):
    """What three steps read, and the table's rows afterwards, on the host."""
    module.to(device)
    found = []
    for _ in range(3):
        out = module(*inputs)
        found.append(out.detach().cpu())
        assert out.device == device
        out.square().sum().backward()
        session.step()
    return [*found, module.table.pull(torch.arange(ROWS))]


def assert_close(found, want):
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # a GPU sums in any order


def table_of(session):
    return session.table(es.TableSpec(name="t", dim=DIM, optimizer=es.Adagrad(lr=0.1), initializer=es.Normal(), seed=3))


@pytest.mark.parametrize(
    "settings", [{}, {"padding_idx": 3}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"frozen": True}], ids=str
)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_an_embedding_on_a_gpu_does_what_it_does_on_the_cpu(make_session, gpu, settings, kind):
    ids = torch.randint(ROWS, (8, 4), generator=torch.Generator().manual_seed(1)).to(kind)
    ids[0] = 3
    found = []
    for device in (CPU, gpu):
        session = make_session(2)
        module = es.Embedding(table_of(session), ROWS, **settings)
        frozen = settings.get("frozen")
        found.append([module.to(device)(ids).cpu()] if frozen else trained(session, module, device, ids))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_bag_on_a_gpu_does_what_it_does_on_the_cpu(make_session, gpu, mode, shards):
    ids, offsets = torch.tensor([3, 7, 7, 1, 9, 4, 30, 3]), torch.tensor([0, 3, 3, 6])
    found = []
    for device in (CPU, gpu):
        session = make_session(shards)
        module = es.EmbeddingBag(table_of(session), ROWS, mode=mode, padding_idx=4)
        inputs = (ids, offsets, torch.linspace(0.5, 2, 8)) if mode == "sum" else (ids, offsets)
        found.append(trained(session, module, device, *inputs))
    assert_close(found[1], found[0])


def test_copies_arrive_whole_while_their_buffers_are_used_again(gpu):
    arrived = []
    for number in range(50):  # each frees its pinned memory while its copy may be under way
        arrived.append(to_device(torch.full((1 << 16,), float(number)), gpu))
    assert [float(values.sum()) / (1 << 16) for values in arrived] == list(range(50))
    back = [to_host([values * 2, values.double()]) for values in arrived]
    for number, (twice, once) in enumerate(back):
        assert (twice.min(), twice.max(), once.min(), once.max()) == (2 * number, 2 * number, number, number)
        assert twice.dtype == once.dtype == np.float32


def batches(count):
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(ROWS, (64, 4), generator=generator) for _ in range(count)]
    return [(part, (part.sum(1) % 2).float()) for part in ids]


def test_dense_weights_follow_a_model_to_the_gpu_and_back(make_session, gpu):
    start, curves = SumModel(ROWS, DIM), []
    for places in ([CPU] * 3, [CPU, gpu, CPU]):
        session = make_session(2)
        model, curve = es.wrap(copy.deepcopy(start), session, optimizer=es.Adam(lr=0.01)), []
        for device in places:
            model.to(device)
            for ids, labels in batches(4):
                loss = binary_cross_entropy_with_logits(model(ids), labels.to(device))
                loss.backward()
                session.step()
                curve.append(loss.item())
        session.read_dense()
        storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        assert len(storages) == len(list(model.parameters()))  # savers drop all but one tensor of a storage
        curves.append([*curve, *(parameter.detach().sum().item() for parameter in model.parameters())])
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-4)


def test_the_generator_of_the_gpu_goes_on_where_it_was(gpu):
    numbers = RandomNumbers(gpu)
    state = copy.deepcopy(numbers.state_dict())
    first = torch.rand(5, device=gpu)
    assert not torch.equal(torch.rand(5, device=gpu), first)
    numbers.load_state_dict(state)
    assert torch.equal(torch.rand(5, device=gpu), first)


def auc(session, strategy, device, train):
    """Of a job whose device this is."""
    embedding = {"optimizer": {"name": "adagrad", "lr": 0.1}, "initializer": {"name": "normal", "std": 0.1}}
    job = click_job(
        "dlrm",
        strategy,
        model={"bottom": [8], "hidden": [16]},
        data={"ids": "global"},
        embedding={"dim": 4, **embedding},
        dense={"optimizer": {"name": "adam", "lr": 0.01}},
        train={"epochs": 3, "device": device.type, **train},
    )
    return Trainer(job, click_data(train=3000, test=1000), session, WorkerGroup()).run().figures["test"]["auc"]


@pytest.mark.parametrize("count", [0, 1, 300_000])
@pytest.mark.parametrize("ids_are_there", [False, True], ids=["ids on the host", "ids on the gpu"])
def test_rows_of_many_ids_are_found_again_for_a_copy_of_them(make_session, gpu, count, ids_are_there):
    session = make_session(3)
    table = torch.nn.Embedding(ROWS, DIM)
    ids = torch.randint(ROWS, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    want = table(ids).detach()
    model = es.wrap(torch.nn.Sequential(table), session, optimizer=es.SGD(lr=0.1)).to(gpu)
    batches = [ids.to(gpu) if ids_are_there else ids for _ in range(3)]
    for batch in session.prefetch(batches, inputs=lambda ids: {"0": ids}, staleness=0):
        assert torch.equal(model(batch.to(gpu).clone()).cpu(), want)
    assert session.missed_reads == 0


TRAIN = [
    {},
    {"amp": "bf16"},
    {"amp": "fp16", "accumulate": 2, "clip_norm": 10.0},
    {"amp": "fp16", "non_finite": "skip", "average": {"decay": 0.9}},
]


@pytest.mark.parametrize("train", TRAIN, ids=str)
@pytest.mark.parametrize("strategy", ["ps", "hybrid", "local"])
def test_a_job_on_a_gpu_reaches_what_it_reaches_on_the_cpu(make_session, gpu, strategy, train):
    sessions = [None if strategy == "local" else make_session(2) for _ in range(2)]
    plain = {key: value for key, value in train.items() if key != "amp"}
    want = auc(sessions[0], strategy, CPU, plain)
    assert want > 0.75
    assert auc(sessions[1], strategy, gpu, train) == pytest.approx(want, abs=0.02)
