"""How tables travel, both ways, between a model and shards in this process: what codecs save and cost, which of them
keep every bit, what a run that is resumed goes on with, and how settings choose them."""

import importlib
from itertools import groupby

import numpy as np
import pytest
import torch
from half_codec import HALF_CODEC
from torch import nn

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import encode_elements
from embershard.proto.codec.select import REUSE, SMALL
from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import DamagedPayload
from embershard.proto.messages import Pull, Rows
from embershard.proto.routing import even_ids, make_route
from embershard.proto.spec import TableSpec
from embershard.proto.timing import Recorder
from embershard.proto.transport.local import LocalTransport
from embershard.worker.checkpoint.tensors import pack, unpack
from embershard.worker.client.byte_counts import BytePart
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.compression.deltas import apply_delta
from embershard.worker.compression.error_feedback import EncodeOptions, Feedback, ShardGradients
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.compression.settings import Compression, warmup_density
from embershard.worker.session.local_steps import LocalSteps
from embershard.worker.session.session import Session
from embershard.worker.strategy.predicted_bytes import predict_volumes
from harness.models import BagModel

ADAGRAD, SGD = es.Adagrad(lr=0.1), es.SGD(lr=0.1)


class Run:
    """A model and its session, trained batch by batch."""

    def __init__(
        self, compression=None, shards=2, *, optimizer=ADAGRAD, dense=SGD, num_ids=50, dim=8, hidden=40, batch=5
    ):
        torch.manual_seed(0)
        shards = InProcessShards(shards) if isinstance(shards, int) else shards
        self.session = Session(Client(shards.transports()), compression=compression)
        self.compressor, self.stats = self.session.client.compressor, self.session.client.stats
        model = BagModel(num_ids, dim, hidden)
        self.model = es.wrap(model, self.session, optimizer=optimizer, dense_optimizer=dense)
        self.num_ids, self.batch = num_ids, batch

    def batches(self, start, stop):
        for number in range(start, stop):
            yield torch.randint(0, self.num_ids, (self.batch, 3), generator=torch.Generator().manual_seed(number))

    def train(self, start, stop, *, ahead=True, schedule=False):
        """The mean loss of the last ten steps."""
        losses, batches = [], self.batches(start, stop)
        for number, ids in enumerate(self.session.prefetch(batches) if ahead else batches, start):
            if schedule:  # what is held counts by the rate of its own push
                self.session.lr_scale = 1.0 / (1 + number // 4)
            loss = (self.model(ids) - ids.float().mean(1) / self.num_ids).square().mean()
            loss.backward()
            self.session.step()
            losses.append(loss.item())
        return float(np.mean(losses[-10:]))

    def weights(self):
        rows = self.session.tables[0].pull(torch.arange(self.num_ids)).numpy()
        self.session.pull([], self.session.dense_weights)
        return b"".join([rows.tobytes(), *(part.detach().numpy().tobytes() for part in self.model.parameters())])

    def bytes(self, *part):
        """Bytes that travelled and that would have without a codec, of a direction, and parts or tables."""
        moved = [moved for found, moved in self.session.client.stats.volume.items() if found[: len(part)] == part]
        return sum(each.wire for each in moved), sum(each.raw for each in moved)


def large(compression=None):
    return Run(compression, num_ids=400, dim=32, hidden=0, batch=64, dense=es.SGD(lr=0.05))


@pytest.mark.parametrize("codec", ["topk:0.05", "rows:0.2", "randomk:0.5", "dgc:0.05", "topk:0.05+int8", "onebit"])
def test_what_is_held_back_is_trained_on_later(codec):
    run = large(Compression(push="none" if codec == "onebit" else codec, dense={"push": codec}, warmup_steps=2))
    first = run.train(0, 3)
    assert run.train(40, 80) < 0.5 * first
    wire, raw = run.bytes("push", "dense") if codec == "onebit" else run.bytes("push")
    assert raw / wire > (25 if codec == "onebit" else 1)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_onebit_scales_a_parameter_by_its_own_floats_and_not_by_the_padding_of_its_block(num_shards):
    session = Session(
        Client(InProcessShards(num_shards).transports()), compression=Compression(dense={"push": "onebit"})
    )
    model = es.wrap(nn.Linear(1500, 1), session, optimizer=es.SGD(lr=1.0))
    inputs = torch.randn(4, 1, 1500, generator=torch.Generator().manual_seed(0))
    session.pull([], session.dense_weights)
    want = [part.detach().numpy().reshape(-1).copy() for part in model.parameters()]
    residuals = [np.zeros_like(part) for part in want]
    for batch in inputs:
        model(batch).sum().backward()
        session.step()
        for part, residual, gradient in zip(want, residuals, (batch.numpy().reshape(-1), np.ones(1)), strict=True):
            residual += gradient
            for block in range(0, part.size, 1024):
                at = slice(block, block + 1024)
                sent = np.where(residual[at] < 0, -1, 1) * np.abs(residual[at]).mean()
                part[at] -= sent
                residual[at] -= sent
    session.pull([], session.dense_weights)
    for part, found in zip(want, model.parameters(), strict=True):
        np.testing.assert_allclose(found.detach().numpy().reshape(-1), part, atol=1e-5)


def test_tables_are_chosen_by_name_and_kind():
    own = {"b*": {"push": "topk:0.5"}, "dense": {"push": "fp16s"}}
    run = Run(Compression(push="int8", dense={"pull": "bf16"}, tables=own))
    ways = {name: (str(push), str(pull)) for name, (push, pull) in run.compressor.directions().items()}
    assert ways == {"bag": ("topk:0.5", "none"), "dense": ("fp16s", "bf16")}


WRONG = [{"push": "onebit"}, {"pull": "topk:0.1"}, {"residual_rows": 0}, {"momentum": 1.0}, {"warmup_steps": -1}]


@pytest.mark.parametrize("settings", [*WRONG, {"clip_norm": float("nan")}, {"dense": {"pushes": "none"}}], ids=str)
def test_settings_that_cannot_be_are_refused_at_once(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=value if isinstance(value, str) else name):
        Compression(**settings)


@pytest.mark.parametrize(
    ("ratio", "per_density", "want"),
    [
        (0.001, 2, [(0.25, 2), (0.0625, 2), (0.015625, 2), (0.004, 2), (0.001, 2)]),
        (0.01, 3, [(0.25, 3), (0.0625, 3), (0.015625, 3), (0.01, 1)]),
        (0.0625, 4, [(0.25, 4), (0.0625, 6)]),
        (0.5, 4, [(0.5, 10)]),
        (0.001, 0, [(0.001, 10)]),
    ],
)
def test_dgc_is_warmed_up_over_the_densities_above_its_ratio(ratio, per_density, want):
    densities = [warmup_density(ratio, step, per_density) for step in range(10)]
    assert [(density, len(list(steps))) for density, steps in groupby(densities)] == want


def test_a_table_whose_optimizer_has_momentum_refuses_dgc():
    session = es.local(compression=Compression(push="dgc:0.1"))
    with pytest.raises(ValueError, match="momentum"):
        session.table(TableSpec(name="t", dim=4, optimizer=es.SGD(lr=0.1, momentum=0.9)))
    session = es.local(compression=Compression(momentum=0.9))
    session.table(TableSpec(name="t", dim=4, optimizer=es.Adam(lr=0.1)))
    with pytest.raises(ValueError, match="beta1"):
        session.compress("t", push="dgc:0.1")
    assert session.client.compressor.directions()["t"].push == CodecName()


def test_every_table_switches_or_none():
    run = Run()
    for tables, codec in [("user", "int8"), ("*", "powersgd:2"), ("*", "onebit")]:
        with pytest.raises(ValueError, match=r"known: dense, bag|dense weights|one bit"):
            run.session.compress(tables, push=codec)
        assert all(ways.push.is_plain for ways in run.compressor.directions().values())
    assert run.session.compress("dense", push="onebit") == ["dense"]
    assert run.session.compress("*", push="none") == ["bag", "dense"]


def test_bytes_are_not_predicted_of_a_table_that_used_several_codecs():
    run = Run(Compression(push="int8"))
    client = run.session.client
    run.session.compress("bag", push="fp16s")  # before its first push: one codec
    run.train(0, 2)
    assert {part.table for part in predict_volumes(client.stats.volume, client)} == {"bag", "dense", ""}
    run.session.compress("bag", push="int8")
    run.train(2, 4)
    assert {part.table for part in predict_volumes(client.stats.volume, client)} == {"dense", ""}


def test_rows_that_were_assigned_see_no_gradient_of_before():
    session = es.local(2, compression=Compression(push="topk:0.1"))
    table = session.table(TableSpec(name="t", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Constant()))
    ids, some = torch.arange(50), torch.arange(10, 30)
    session.client.push([("t", table.route(ids), np.ones((50, 4), np.float32))], clock=0)
    assert float(table.pull(ids).sum()) > -50
    for keep_state, held in ((True, 50), (False, 30)):
        rows = table.pull(some) if keep_state else torch.zeros(20, 4)
        route = table.route(some)
        ordered = np.empty((20, 4), np.float32)
        ordered[route.index] = rows.numpy()
        table.load(route, ordered, keep_state=keep_state)
        assert len(session.client.compressor.residual("t").ids) == held
    session.compress("t", push="none")
    session.client.push([], clock=1)
    want = torch.full((50, 4), -1.0)
    want[some] = 0
    torch.testing.assert_close(table.pull(ids), want)


def turned(pull):
    """Rows at their max_norm after steps that are smaller than what a codec makes of them."""
    torch.manual_seed(0)
    session = es.local(1, compression=Compression(pull=pull))
    model = es.wrap(nn.Sequential(nn.Embedding(20, 16, max_norm=1.0)), session, optimizer=es.SGD(lr=0.001))
    for _ in range(60):
        model(torch.arange(20))[:, 0].sum().backward()
        session.step()
    session.compress("0", pull="none")
    return session.tables[0].pull(torch.arange(20))


def test_rows_that_max_norm_scales_are_not_rounded_on_the_shards():
    plain = turned("none")
    for codec in ("int8", "bf16"):
        assert float((turned(codec) - plain).abs().max()) < 2e-3


@pytest.mark.parametrize("optimizer", [es.SGD(lr=0.01), es.Adagrad(lr=0.05), es.Adam(lr=0.01)], ids=lambda o: o.name)
def test_what_sends_everything_is_none_to_the_bit(optimizer):
    def trained(codec, shards=2, ahead=True):
        run = Run(Compression(push=codec, dense={"push": codec}), shards, optimizer=optimizer, dense=optimizer)
        run.train(0, 6, ahead=ahead)
        return run.weights()

    plain = trained("none")
    for codec, shards, ahead in (
        ("topk:1", 2, True),
        ("topk:1", 2, False),
        ("rows:1", 1, True),
        ("randomk:1", 2, True),
    ):
        assert trained(codec, shards, ahead) == plain, (codec, shards, ahead)


def test_none_is_a_session_without_compression_to_the_bit_and_byte():
    found = []
    for compression in (None, Compression(push="none", pull="none", tables={"*": {"push": "none"}})):
        run = Run(compression, optimizer=es.Adam(lr=0.01))
        run.train(0, 12)
        found.append((run.weights(), run.session.stats.sent_bytes, run.session.stats.received_bytes))
    assert found[0] == found[1]


def test_rows_that_give_way_are_pulled_again_by_a_loop_that_runs_ahead():
    weights = []
    for ahead in (True, False):
        run = Run(Compression(push="topk:0.02", residual_rows=8), optimizer=es.SGD(lr=0.01), dense=es.SGD(lr=0.01))
        run.train(0, 40, ahead=ahead)
        weights.append(run.weights())
    assert weights[0] == weights[1]


def begin(push="topk:0.1", dense="none", shards=2):
    compression = Compression(push=push, dense={"push": dense}, residual_rows=60, warmup_steps=3, momentum=0.5)
    return Run(compression, shards, optimizer=SGD, dense=es.SGD(lr=0.01), num_ids=300, hidden=200, batch=16)


def saved(run):
    return unpack(pack(run.compressor.state_dict()))


@pytest.mark.parametrize(
    ("push", "dense"),
    [
        ("topk:0.1", "topk:0.02"),
        ("int8", "int8"),
        ("dgc:0.05+fp16s", "dgc:0.001"),
        ("rows:0.2+int8", "onebit"),
        ("randomk:0.3", "powersgd:2"),
    ],
)
def test_a_resumed_run_is_equal_to_one_that_was_not_stopped(push, dense):
    whole, shards = begin(push, dense), InProcessShards(2)
    whole.train(0, 24, schedule=True)
    first = begin(push, dense, shards)
    first.train(0, 12, schedule=True)
    first.session.close()
    second = begin(push, dense, shards)
    second.compressor.load_state_dict(saved(first))
    second.train(12, 24, schedule=True)
    assert second.weights() == whole.weights()


LARGE = 9000  # rows of 8 elements: more than are selected exactly


def large_pushes(start, feedback):
    """Payloads of some pushes of a table that is selected from by a threshold; it soon fits no more, by a little."""
    options = EncodeOptions(CodecName.parse("topk:0.01"), find_values("none"), 0.01, key=0)
    for number in range(start, start + 6):
        rows = np.random.default_rng(number).standard_normal((LARGE, 8)).astype(np.float32)
        gradients = ShardGradients(np.arange(LARGE), rows * np.float32(0.9**number), 1.0)
        yield feedback.pack(gradients, options).payload.tobytes()


def test_a_threshold_goes_on_from_a_checkpoint():
    assert LARGE * 8 > SMALL
    whole, resumed, sampled_anew = (Feedback(8, None) for _ in range(3))
    list(large_pushes(0, whole))
    state = unpack(pack(whole.state_dict()))
    resumed.load_state_dict(state)
    sampled_anew.load_state_dict({**state, "threshold": [0, REUSE]})
    want = list(large_pushes(6, whole))
    assert list(large_pushes(6, resumed)) == want
    assert list(large_pushes(6, sampled_anew)) != want


def test_what_is_held_back_can_be_dropped():
    run = begin(dense="dgc:0.05")
    run.train(0, 6)
    assert set(run.compressor.residual_rows()) == {"bag", "dense"}
    run.compressor.clear_residuals()
    assert not run.compressor.residual_rows()


def held(run, table):
    """Ids and ages of the rows of a table that wait, and what they would change, were they pushed now."""
    held = run.compressor.residual(table)
    order = np.argsort(held.ids)
    return held.ids[order], held.ages[order], (run.compressor.share * held.rates[:, None] * held.rows)[order]


@pytest.mark.parametrize("num_shards", [2, 3])
def test_what_was_held_counts_as_it_would_have_on_any_number_of_shards(num_shards):
    four = begin(dense="topk:0.01")
    four.compressor.share = 0.25  # one of four synchronous workers
    four.train(0, 8, schedule=True)
    alone = begin(dense="topk:0.01", shards=num_shards)
    alone.compressor.load_state_dict(saved(four))
    for times in (1, 2):
        for table in ("bag", "dense"):
            ids, ages, effects = held(four, table)
            assert len(ids)
            for found, want in zip(held(alone, table), (ids, ages, times * effects), strict=True):
                np.testing.assert_allclose(found, want, rtol=1e-5)
        alone.compressor.hold(saved(four))  # another of the four, who is gone


@pytest.mark.parametrize(("staleness", "want"), [(0, 0.25), (2, 1.0), (None, 1.0)])
def test_a_push_counts_as_one_of_those_that_are_gathered(make_shards, staleness, want):
    client = Client([LocalTransport(shard.handle, "local") for shard in make_shards(1)])
    client.join(Terms(workers=4, staleness=staleness))
    assert client.compressor.share == want
    client.close()


@pytest.mark.parametrize("local", [False, True])
def test_gradients_are_not_held_for_a_run_that_pushes_differences(caplog, local):
    run, other = begin(), begin()
    run.compressor.differences, other.compressor.differences = not local, local
    run.train(0, 6)
    other.compressor.load_state_dict(saved(run))
    other.compressor.hold(saved(run))
    assert not other.compressor.residual_rows()
    assert "table bag: its residual is dropped" in caplog.text


# Dense weights that are pulled by what changed: the same bits as pulled whole.

DIM, ROWS = 64, 40
SPEC = TableSpec(name="dense", dim=DIM, optimizer=es.SGD(lr=0.5), initializer=es.Normal())
IDS = even_ids(ROWS, SPEC.space_key)


class Counting(LocalTransport):
    """Counts the elements of rows that come."""

    elements = 0

    def submit(self, request, timeout, into=()):
        pending = super().submit(request, timeout, into)
        if isinstance(request, Pull) and isinstance(reply := pending.result(), Rows):
            Counting.elements += sum(rows.size for rows in reply.tables if rows.dtype == np.float32)
        return pending


def dense_client(shards, pull="delta", worker=0):
    client = Client([Counting(shard.handle, f"local/{i}") for i, shard in enumerate(shards)], worker=worker)
    client.compressor.settings = Compression(dense={"pull": pull})
    client.declare(SPEC, dense=True)
    return client, make_route(IDS, SPEC.space_key, client.placement)


@pytest.mark.parametrize("limit", [2**20, 2000], ids=["one message", "several messages"])
@pytest.mark.parametrize("seed", range(3))
def test_pulls_of_what_changed_are_whole_pulls_to_the_bit(make_shards, limit, seed):
    shards, rng = make_shards(2, max_message_bytes=limit), np.random.default_rng(seed)
    clients = [dense_client(shards, worker=worker)[0] for worker in range(3)]
    plain, everything = dense_client(shards, "none", worker=3)
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
    client, route = dense_client(make_shards(2))
    client.push([("dense", route, np.ones((ROWS, DIM), np.float32))], clock=0)
    client.pull([("dense", route)])
    Counting.elements = 0
    for _ in range(3):
        client.pull([("dense", route)])
    assert Counting.elements == 0
    client.compressor.choose("dense", pull=CodecName())
    client.pull([("dense", route)])
    assert Counting.elements == ROWS * DIM


def test_a_round_of_local_steps_pulls_what_changed(make_shards):
    client, route = dense_client(make_shards(2))
    local = LocalSteps(client, 1)
    local.add(SPEC)
    for clock in range(4):
        gradients = np.eye(ROWS, DIM, dtype=np.float32)
        Counting.elements = 0
        local.pull([("dense", route)])
        assert Counting.elements == (0 if clock > 1 else ROWS * DIM)  # before an update there is no version to hold
        local.push([("dense", route, gradients)], clock=clock)


@pytest.mark.parametrize("pull", ["delta", "fp16s"])
@pytest.mark.parametrize("some", [slice(None), slice(0, None, 3)], ids=["all blocks", "some"])
def test_the_ids_of_blocks_take_a_bit_each(make_shards, pull, some):
    client, route = dense_client(make_shards(2), pull)
    client.compressor.lay_out("dense", DenseLayout(IDS, [ParameterSlice(0, (ROWS, DIM))]))
    (whole,) = client.pull([("dense", route)])
    before = client.stats.volume[BytePart("pull", "ids", "dense")].wire
    (rows,) = client.pull([("dense", make_route(IDS[some].copy(), SPEC.space_key, client.placement))])
    assert rows.tobytes() == whole[some].tobytes()
    assert client.stats.volume[BytePart("pull", "ids", "dense")].wire - before <= 2 * 17 + 2 * ROWS / 8


def test_a_damaged_delta_is_an_error():
    rows = np.zeros((3, 4), np.float32)
    good = encode_elements(np.array([1, 11]), np.ones(2, np.float32), (3, 4), find_values("none"), None)
    apply_delta(good, rows)
    assert np.flatnonzero(rows).tolist() == [1, 11]
    for bad in (good[:-1], good[:1], np.append(good, good[:1])):
        with pytest.raises(DamagedPayload):
            apply_delta(bad, rows)


# User-defined codecs from a module on both sides.

NAME = "codecs_of_a_worker"
HALF = Compression(push=f"{NAME}:half", pull=f"{NAME}:half")


@pytest.fixture
def module(tmp_path, monkeypatch):
    slow = HALF_CODEC.replace("half", "slow").replace("    return ", "    time.sleep(0.01)\n    return ")
    (tmp_path / f"{NAME}.py").write_text(f"import time\n{HALF_CODEC}{slow}")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return NAME


def third_of_a_step(session):
    """Rows before and after a step whose gradient is 1/3 everywhere."""
    ids = torch.arange(5)
    table = es.Embedding(session.table(TableSpec(name="t", dim=3, optimizer=es.SGD(lr=1.0), initializer=es.Uniform())))
    before = table(ids)
    (before.sum() / 3).backward()
    session.step()
    return before.detach(), table(ids).detach()


def test_rows_and_gradients_travel_as_the_module_says(module):
    with es.local(shards=2, imports=[module], compression=HALF) as session:
        before, after = third_of_a_step(session)
        session.compress("t", pull="none")
        exact_after = session.tables[0].pull(torch.arange(5))
    assert torch.equal(before, before.half().float())
    assert torch.equal(after, exact_after.half().float())
    with es.local(shards=2) as plain:
        first, _ = third_of_a_step(plain)
    torch.testing.assert_close(exact_after, first - float(np.float16(1 / 3)), rtol=0, atol=1e-7)


def test_what_a_shard_spends_on_a_codec_is_a_part_of_the_step_and_not_of_waiting(module):
    with es.local(shards=2, imports=[module], compression=Compression(push=f"{module}:slow")) as session:
        with Recorder() as recorder:
            third_of_a_step(session)
            recorder.end()
        coded = recorder.split().parts
        session.compress("t", push="none")
        with Recorder() as recorder:
            session.tables[0].pull(torch.arange(5))
            recorder.end()
    assert coded["shards"].mean_ms >= 10
    assert coded["wait"].mean_ms >= 0
    assert "shards" not in recorder.split().parts


def test_a_table_may_name_its_codecs_itself(module):
    half = CodecName.parse(f"{NAME}:half")
    with es.local(imports=[module]) as session:
        session.table(TableSpec(name="t", dim=3, optimizer=SGD, push_codec=half))
        (status,) = session.client.status()
        assert session.client.compressor.directions()["t"].push == half
        assert [(table.push_codec, table.pull_codec) for table in status.tables] == [(str(half), "none")]
