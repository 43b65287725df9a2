"""Dense weights that are pulled by what changed: the same bits as pulled whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.proto.arrays import Array
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import encode_elements
from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import DamagedPayload
from embershard.proto.messages import Pull, Rows, TableIds
from embershard.proto.routing import even_ids, make_route
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.worker.client.byte_counts import BytePart
from embershard.worker.client.client import Client
from embershard.worker.compression.deltas import apply_delta
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.compression.settings import Compression
from embershard.worker.session.local_steps import LocalSteps
from embershard.worker.session.session import Session

DIM, ROWS = 64, 40
SPEC = es.TableSpec(name="dense", dim=DIM, optimizer=es.SGD(lr=0.5), initializer=es.Normal())


class Counting(LocalTransport):
    """Counts the elements of rows that come."""

    elements = 0

    def submit(self, request, timeout, into=()):  # type: ignore[no-untyped-def]
        pending = super().submit(request, timeout, into)
        if isinstance(request, Pull) and isinstance(reply := pending.result(), Rows):
            whole: list[Array] = [rows for rows in reply.tables if rows.dtype == np.float32]
            Counting.elements += sum(rows.size for rows in whole)
        return pending


def client_of(shards: list[Shard], worker: int, pull: str) -> Client:
    client = Client([Counting(shard.handle, f"local/{i}") for i, shard in enumerate(shards)], worker=worker)
    client.compressor.settings = Compression(dense={"pull": pull})
    client.declare(SPEC, dense=True)
    return client


@pytest.mark.parametrize("limit", [2**20, 2000], ids=["one message", "several messages"])
@pytest.mark.parametrize("seed", range(3))
def test_pulls_of_what_changed_are_whole_pulls_to_the_bit(make_shards, limit, seed):
    shards, rng = make_shards(2, max_message_bytes=limit), np.random.default_rng(seed)
    clients = [client_of(shards, worker, "delta") for worker in range(3)]
    plain = client_of(shards, 3, "none")
    everything = make_route(even_ids(ROWS, SPEC.space_key), SPEC.space_key, plain.placement)
    part = make_route(everything.ids[::3].copy(), SPEC.space_key, plain.placement)
    for clock in range(60):
        client = clients[rng.integers(3)]
        if rng.random() < 0.5:
            gradients = rng.standard_normal((ROWS, DIM)).astype(np.float32)
            gradients[rng.random(gradients.shape) < rng.choice([0.2, 0.99])] = 0
            client.push([("dense", everything, gradients)], clock=clock)
        else:
            route = part if rng.random() < 0.2 else everything
            (rows,) = client.pull([("dense", route)])
            assert rows.tobytes() == plain.pull([("dense", route)])[0].tobytes()
            rows[...] = np.nan  # they are the caller's


def test_what_is_held_is_not_pulled_again(make_shards):
    shards = make_shards(2)
    client = client_of(shards, 0, "delta")
    route = make_route(even_ids(ROWS, SPEC.space_key), SPEC.space_key, client.placement)
    client.push([("dense", route, np.ones((ROWS, DIM), np.float32))], clock=0)
    client.pull([("dense", route)])
    Counting.elements = 0
    for _ in range(3):
        client.pull([("dense", route)])
    assert Counting.elements == 0
    client.compressor.choose("dense", pull=CodecName.parse("none"))
    client.pull([("dense", route)])
    assert Counting.elements == ROWS * DIM


def test_what_changed_comes_over_a_stream(stream_shard):
    client = Client.connect([stream_shard])
    client.compressor.settings = Compression(dense={"pull": "delta"})
    client.declare(SPEC, dense=True)
    route = make_route(even_ids(ROWS, SPEC.space_key), SPEC.space_key, client.placement)
    gradients = np.zeros((ROWS, DIM), np.float32)
    for clock in range(6):
        gradients[...] = 0
        gradients[:, clock :: clock * clock + 1] = 1
        client.push([("dense", route, gradients.copy())], clock=clock)
        before = client.stats.received_bytes
        (rows,) = client.pull([("dense", route)])
        received = client.stats.received_bytes - before
        plain = client.ask_all(Pull(client.placement.epoch, (TableIds("dense", route.ids),)))[0]
        assert isinstance(plain, Rows)
        assert rows.tobytes() == plain.tables[0].tobytes()
        assert (received < rows.nbytes) == (clock > 0)
    client.close()


@pytest.mark.parametrize("pull", ["delta", "fp16s"])
@pytest.mark.parametrize("some", [slice(None), slice(0, None, 3)], ids=["all blocks", "some"])
def test_the_ids_of_blocks_take_a_bit_each(make_shards, pull, some):
    client = client_of(make_shards(2), 0, pull)
    ids = even_ids(ROWS, SPEC.space_key)
    client.compressor.lay_out("dense", DenseLayout(ids, [ParameterSlice(0, (ROWS, DIM))]))
    (whole,) = client.pull([("dense", make_route(ids, SPEC.space_key, client.placement))])
    before = client.stats.volume[BytePart("pull", "ids", "dense")].wire
    (rows,) = client.pull([("dense", make_route(ids[some].copy(), SPEC.space_key, client.placement))])
    assert rows.tobytes() == whole[some].tobytes()
    assert client.stats.volume[BytePart("pull", "ids", "dense")].wire - before <= 2 * 17 + 2 * ROWS / 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 4)
        self.hidden, self.unused, self.out = nn.Linear(4, 600), nn.Linear(40, 40), nn.Linear(600, 1)

    def embedding_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"embedding": ids}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.embedding(ids)))).squeeze(1)


def trained(session: Session, cache: bool) -> bytes:
    torch.manual_seed(5)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    if cache:
        session.cache_rows(10, staleness=2)
    batches = [torch.randint(0, 30, (6,)) for _ in range(12)]
    for number, ids in enumerate(session.prefetch(batches)):
        model(ids).square().mean().backward()
        session.step()
        if number == 5:
            model.hidden.requires_grad_(False)  # another part of the blocks is pulled from here on
    for ids in batches[:4]:
        model(ids).square().mean().backward()
        session.step()
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


@pytest.mark.parametrize("cache", [False, True])
def test_a_model_trains_to_the_same_bits(cache):
    weights = []
    for pull in ("none", "delta"):
        session = Session(Client(InProcessShards(2).transports()), compression=Compression(dense={"pull": pull}))
        weights.append(trained(session, cache))
    assert weights[0] == weights[1]


def test_a_damaged_delta_is_an_error():
    rows = np.zeros((3, 4), np.float32)
    good = encode_elements(np.array([1, 11]), np.ones(2, np.float32), (3, 4), find_values("none"), None)
    apply_delta(good, rows)
    assert np.flatnonzero(rows).tolist() == [1, 11]
    for bad in (good[:-1], good[:1], np.append(good, good[:1])):
        with pytest.raises(DamagedPayload):
            apply_delta(bad, rows)


def test_a_round_of_local_steps_pulls_what_changed(make_shards):
    client = client_of(make_shards(2), 0, "delta")
    local = LocalSteps(client, 1)
    local.add(SPEC)
    route = make_route(even_ids(ROWS, SPEC.space_key), SPEC.space_key, client.placement)
    for clock in range(4):
        gradients = np.zeros((ROWS, DIM), np.float32)
        gradients[0] = 1
        Counting.elements = 0
        local.pull([("dense", route)])
        assert Counting.elements == (0 if clock > 1 else ROWS * DIM)  # before an update there is no version to hold
        local.push([("dense", route, gradients)], clock=clock)
