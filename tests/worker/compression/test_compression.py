"""How tables travel, both ways, between a model and shards in this process: what codecs save and cost, which
of them keep every bit, and what a run that is resumed goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.select import REUSE, SMALL
from embershard.proto.codec.values.registry import find_values
from embershard.proto.spec import TableSpec
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.worker.checkpoint.tensors import pack, unpack
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.compression.error_feedback import EncodeOptions, Feedback, ShardGradients
from embershard.worker.session.session import Session
from harness.models import BagModel

NUM_IDS, DIM = 400, 32


def batches(count: int, seed: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(0, NUM_IDS, (64, 4), generator=generator)


def session_of(compression: es.Compression | None = None, shards: int = 2) -> tuple[Session, nn.Module]:
    torch.manual_seed(0)
    session = es.local(shards, compression=compression)
    return session, es.wrap(
        BagModel(NUM_IDS, DIM), session, optimizer=es.Adagrad(lr=0.1), dense_optimizer=es.SGD(lr=0.05)
    )


def train(session: Session, model: nn.Module, count: int = 40, seed: int = 0) -> float:
    losses = []
    for ids in session.prefetch(batches(count, seed)):
        loss = (model(ids) - ids.float().mean(1) / NUM_IDS).square().mean()
        loss.backward()
        session.step()
        losses.append(loss.item())
    return float(np.mean(losses[-10:]))


@pytest.fixture(scope="module")
def plain():
    """The loss and the bytes of a session without compression."""
    session, model = session_of()
    return train(session, model), session.stats.sent_bytes, session.stats.received_bytes


@pytest.mark.parametrize(("codec", "ratio"), [("fp16s", 1.9), ("bf16", 1.9), ("int8", 3.0)])
def test_values_codecs_train_alike_with_fewer_bytes_both_ways(codec, ratio, plain):
    session, model = session_of(es.Compression(push=codec, pull=codec, dense={"push": codec, "pull": codec}))
    loss = train(session, model)
    assert loss == pytest.approx(plain[0], rel=0.05)
    sent, received = session.stats.sent_bytes, session.stats.received_bytes
    assert (plain[1] + plain[2]) / (sent + received) > ratio


@pytest.mark.parametrize("codec", ["topk:0.05", "rows:0.2", "randomk:0.5", "dgc:0.05", "topk:0.05+int8"])
def test_what_is_held_back_is_trained_on_later(codec, plain):
    session, model = session_of(es.Compression(push=codec, dense={"push": codec}, warmup_steps=2))
    first = train(session, model, count=3)
    assert train(session, model, seed=1) < 0.5 * first
    assert session.stats.sent_bytes < plain[1]


def test_one_bit_serves_dense_weights():
    session, model = session_of(es.Compression(dense={"push": "onebit"}))
    first = train(session, model, count=3)
    assert train(session, model, seed=1) < 0.5 * first
    pushed = sum(moved.wire for part, moved in session.stats.volume.items() if part[:2] == ("push", "dense"))
    raw = sum(moved.raw for part, moved in session.stats.volume.items() if part[:2] == ("push", "dense"))
    assert raw / pushed > 25


def test_ids_that_ascend_travel_as_gaps():
    sent = {}
    for pull in ("none", "fp16s"):
        session, _ = session_of(es.Compression(pull=pull))
        for _ in session.prefetch(batches(5)):
            pass
        sent[pull] = sum(moved.wire for part, moved in session.stats.volume.items() if part[:2] == ("pull", "ids"))
    assert sent["fp16s"] < 0.3 * sent["none"]


def test_tables_are_chosen_by_name_and_kind():
    settings = es.Compression(
        push="int8", dense={"pull": "bf16"}, tables={"b*": {"push": "topk:0.5"}, "dense": {"push": "fp16s"}}
    )
    session, _ = session_of(settings)
    ways = {name: (str(push), str(pull)) for name, (push, pull) in session.client.compressor.directions().items()}
    assert ways == {"bag": ("topk:0.5", "none"), "dense": ("fp16s", "bf16")}


def test_codecs_change_at_run_time_and_nothing_that_was_held_is_lost():
    session, model = session_of(es.Compression(push="topk:0.01", dense={"push": "topk:0.01"}))
    train(session, model, 10)
    held = session.client.compressor.held("bag")
    assert len(held.ids)
    assert session.compress("*", push="none") == ["bag", "dense"]
    before = session.tables[0].pull(torch.from_numpy(held.ids)).numpy()
    for ids in batches(1):
        (0.0 * model(ids)).sum().backward()
    session.step()
    assert not len(session.client.compressor.held("bag").ids)
    assert (session.tables[0].pull(torch.from_numpy(held.ids)).numpy() != before).any(axis=1).all()


def test_what_one_codec_held_the_next_one_sends():
    session, model = session_of(es.Compression(push="topk:0.01"))
    train(session, model, 10)
    held = len(session.client.compressor.held("bag").ids)
    session.compress("bag", push="rows:0.5")
    assert len(session.client.compressor.held("bag").ids) == held
    train(session, model, 20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"push": "onebit"}, "cannot say so in one bit"),
        ({"pull": "topk:0.1"}, "a pull has no later"),
        ({"push": "topk:2"}, "above 0 and at most 1"),
        ({"push": "topk:nan"}, "must be a number"),
        ({"push": "zip"}, "known: none, fp16s"),
        ({"dense": {"pushes": "none"}}, "no 'pushes'"),
        ({"residual_rows": 0}, "residual_rows"),
        ({"momentum": 1.0}, "momentum"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        es.Compression(**settings)  # type: ignore[arg-type]


def test_a_table_whose_optimizer_has_momentum_refuses_dgc():
    session = es.local(compression=es.Compression(push="dgc:0.1"))
    with pytest.raises(ValueError, match="momentum"):
        session.table(TableSpec(name="t", dim=4, optimizer=es.SGD(lr=0.1, momentum=0.9)))
    session = es.local(compression=es.Compression(momentum=0.9))
    session.table(TableSpec(name="t", dim=4, optimizer=es.Adam(lr=0.1)))
    with pytest.raises(ValueError, match="beta1"):
        session.compress("t", push="dgc:0.1")
    assert session.client.compressor.directions()["t"].push == CodecName()


def test_compress_names_what_there_is():
    session, _ = session_of()
    with pytest.raises(ValueError, match=r"\(known: dense, bag\)"):
        session.compress("user", push="int8")
    with pytest.raises(ValueError, match="it serves dense weights"):
        session.compress("*", push="powersgd:2")
    assert all(ways.push.is_plain for ways in session.client.compressor.directions().values())


@pytest.mark.parametrize("name", ["bag", "dense"])
def test_compress_names_what_there_is_once(name):
    session = es.local()
    session.table(es.TableSpec(name=name, dim=1, optimizer=es.SGD(lr=1.0)))
    with pytest.raises(ValueError, match=rf"\(known: {name}\)"):
        session.compress("nope", push="int8")


def test_every_table_switches_or_none():
    session, _ = session_of()
    with pytest.raises(ValueError, match="one bit"):
        session.compress("*", push="onebit")
    assert session.compress("dense", push="onebit") == ["dense"]


def test_rows_that_were_assigned_see_no_gradient_of_before():
    session = es.local(2, compression=es.Compression(push="topk:0.1"))
    table = session.table(TableSpec(name="t", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Constant()))
    ids, some = torch.arange(50), torch.arange(10, 30)
    session.client.push([("t", table.route(ids), np.ones((50, 4), np.float32))], clock=0)
    before = table.pull(ids)
    for keep_state, held in ((True, 50), (False, 30)):
        rows = table.pull(some) if keep_state else torch.zeros(20, 4)
        route = table.route(some)
        ordered = np.empty((20, 4), np.float32)
        ordered[route.index] = rows.numpy()
        table.load(route, ordered, keep_state=keep_state)
        assert len(session.client.compressor.held("t").ids) == held
    session.compress("t", push="none")
    session.client.push([], clock=1)
    want = torch.full((50, 4), -1.0)
    want[some] = 0
    assert float(before.sum()) > -50
    torch.testing.assert_close(table.pull(ids), want)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 16, max_norm=1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows(ids)
        return rows


def turned(pull: str) -> torch.Tensor:
    """Rows at their max_norm after steps that are smaller than what a codec makes of them."""
    torch.manual_seed(0)
    session = es.local(1, compression=es.Compression(pull=pull))
    model = es.wrap(Normed(), session, optimizer=es.SGD(lr=0.001))
    for _ in range(60):
        model(torch.arange(20))[:, 0].sum().backward()
        session.step()
    session.compress("rows", pull="none")
    return session.tables[0].pull(torch.arange(20))


def test_rows_that_max_norm_scales_are_not_rounded_on_the_shards():
    plain = turned("none")
    for codec in ("int8", "bf16"):
        assert float((turned(codec) - plain).abs().max()) < 2e-3


FEW_IDS = 50


def trained(
    optimizer: object, compression: es.Compression | None, *, shards: int = 2, ahead: bool = True, steps: int = 12
) -> tuple[bytes, Session]:
    """All weights after some steps."""
    torch.manual_seed(0)
    session = es.local(shards, compression=compression)
    model = es.wrap(BagModel(FEW_IDS, 8, hidden=40), session, optimizer=optimizer, dense_optimizer=optimizer)  # type: ignore[arg-type]
    batches = [torch.randint(0, FEW_IDS, (5, 3), generator=torch.Generator().manual_seed(n)) for n in range(steps)]
    for ids in session.prefetch(batches) if ahead else batches:
        (model(ids) - ids.float().mean(1)).square().mean().backward()
        session.step()
    return b"".join(part.tobytes() for part in weights(session, model, FEW_IDS)), session


OPTIMIZERS = {"sgd": es.SGD(lr=0.01), "adagrad": es.Adagrad(lr=0.05), "adam": es.Adam(lr=0.01)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("codec", ["topk:1", "rows:1", "randomk:1"])
def test_what_sends_everything_is_none_to_the_bit(codec, optimizer):
    compression = es.Compression(push=codec, dense={"push": codec})
    plain, _ = trained(OPTIMIZERS[optimizer], None)
    for shards, ahead in ((2, True), (1, True), (2, False)):
        assert trained(OPTIMIZERS[optimizer], compression, shards=shards, ahead=ahead)[0] == plain


def test_none_is_a_session_without_compression_to_the_bit_and_byte():
    plain, before = trained(es.Adam(lr=0.01), None)
    none, after = trained(es.Adam(lr=0.01), es.Compression(push="none", pull="none", tables={"*": {"push": "none"}}))
    assert none == plain
    assert after.stats.sent_bytes == before.stats.sent_bytes
    assert after.stats.received_bytes == before.stats.received_bytes


def test_rows_that_give_way_are_pulled_again_by_a_loop_that_runs_ahead():
    compression = es.Compression(push="topk:0.02", residual_rows=8)
    ahead, _ = trained(es.SGD(lr=0.01), compression, ahead=True, steps=40)
    assert trained(es.SGD(lr=0.01), compression, ahead=False, steps=40)[0] == ahead


SOME_IDS = 300
Shards = Callable[..., list[Shard]]


def numbered_batches(start: int, stop: int) -> Iterator[torch.Tensor]:
    for number in range(start, stop):
        yield torch.randint(0, SOME_IDS, (16, 3), generator=torch.Generator().manual_seed(number))


def begun(shards: list[Shard], push: str, dense: str) -> tuple[Session, nn.Module]:
    torch.manual_seed(0)
    transports = [LocalTransport(shard.handle, f"local/{i}") for i, shard in enumerate(shards)]
    compression = es.Compression(push=push, dense={"push": dense}, residual_rows=60, warmup_steps=3, momentum=0.5)
    session = Session(Client(transports), compression=compression)
    return session, es.wrap(
        BagModel(SOME_IDS, 8, hidden=200), session, optimizer=es.SGD(lr=0.1), dense_optimizer=es.SGD(lr=0.01)
    )


def train_from(session: Session, model: nn.Module, start: int, stop: int) -> None:
    for number, ids in enumerate(session.prefetch(numbered_batches(start, stop)), start):
        session.lr_scale = 1.0 / (1 + number // 4)  # as a schedule: what is held counts by that of its own push
        (model(ids) - ids.float().mean(1) / SOME_IDS).square().mean().backward()
        session.step()


def weights(session: Session, model: nn.Module, num_ids: int = SOME_IDS) -> list[np.ndarray]:
    rows = session.tables[0].pull(torch.arange(num_ids)).numpy()
    session.pull([], session.dense_weights)
    return [rows, *(parameter.detach().numpy().copy() for parameter in model.parameters())]


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
def test_a_resumed_run_is_equal_to_one_that_was_not_stopped(push, dense, make_shards):
    whole = begun(make_shards(2), push, dense)
    train_from(*whole, 0, 24)

    shards = make_shards(2)
    first = begun(shards, push, dense)
    train_from(*first, 0, 12)
    state = unpack(pack(first[0].client.compressor.state_dict()))
    first[0].close()
    second = begun(shards, push, dense)
    second[0].client.compressor.load_state_dict(state)
    train_from(*second, 12, 24)
    for mine, other in zip(weights(*second), weights(*whole), strict=True):
        assert mine.tobytes() == other.tobytes()


LARGE = 9000  # rows of 8 elements: more than are selected exactly


def large_pushes(start: int, feedback: Feedback) -> list[bytes]:
    """Payloads of some pushes of a table that is selected from by a threshold; it soon fits no more, by a little."""
    how = EncodeOptions(CodecName.parse("topk:0.01"), find_values("none"), 0.01, key=0)
    sent = []
    for number in range(start, start + 6):
        rows = np.random.default_rng(number).standard_normal((LARGE, 8)).astype(np.float32)
        sent.append(
            feedback.pack(ShardGradients(np.arange(LARGE), rows * np.float32(0.9**number), 1.0), how).payload.tobytes()
        )
    return sent


def test_a_threshold_goes_on_from_a_checkpoint():
    assert LARGE * 8 > SMALL
    whole, resumed, sampled_anew = (Feedback(8, None) for _ in range(3))
    large_pushes(0, whole)
    state = unpack(pack(whole.state_dict()))
    resumed.load_state_dict(state)
    sampled_anew.load_state_dict({**state, "threshold": [0, REUSE]})
    want = large_pushes(6, whole)
    assert large_pushes(6, resumed) == want
    assert large_pushes(6, sampled_anew) != want


def test_what_is_held_back_can_be_dropped(make_shards):
    session, *rest = begun(make_shards(2), "topk:0.1", "dgc:0.05")
    train_from(session, *rest, 0, 6)
    compressor = session.client.compressor
    assert any(len(compressor.held(name).ids) for name in session.table_names)
    compressor.clear_residuals()
    assert not any(len(compressor.held(name).ids) for name in session.table_names)


def test_without_its_state_it_would_not_be(make_shards):
    whole, shards = begun(make_shards(2), "topk:0.1", "none"), make_shards(2)
    train_from(*whole, 0, 24)
    train_from(*begun(shards, "topk:0.1", "none"), 0, 12)
    second = begun(shards, "topk:0.1", "none")
    train_from(*second, 12, 24)
    assert weights(*second)[0].tobytes() != weights(*whole)[0].tobytes()


def test_on_another_number_of_shards_what_was_held_is_held(make_shards):
    session, model = begun(make_shards(3), "topk:0.1", "topk:0.01")
    train_from(session, model, 0, 12)
    state = unpack(pack(session.client.compressor.state_dict()))
    other, _ = begun(make_shards(2), "topk:0.1", "topk:0.01")
    other.client.compressor.load_state_dict(state)
    for table in ("bag", "dense"):
        before, after = (s.client.compressor.held(table) for s in (session, other))
        one, two = np.argsort(before.ids), np.argsort(after.ids)
        np.testing.assert_array_equal(before.ids[one], after.ids[two])
        np.testing.assert_array_equal(before.rows[one], after.rows[two])
        np.testing.assert_array_equal(before.ages[one], after.ages[two])


def test_a_worker_that_stays_holds_for_one_that_is_gone(make_shards):
    sessions = [begun(make_shards(2), "topk:0.1", "none") for _ in range(2)]
    for number, (session, model) in enumerate(sessions):
        train_from(session, model, 10 * number, 10 * number + 8)
    held = [session.client.compressor.held("bag") for session, _ in sessions]
    stays, gone = (session.client.compressor for session, _ in sessions)
    stays.hold(unpack(pack(gone.state_dict())))
    total = sum((part.rows * part.rates[:, None]).sum(0, dtype=np.float64) for part in held)
    now = stays.held("bag")
    np.testing.assert_allclose((now.rows * now.rates[:, None]).sum(0, dtype=np.float64), total, atol=1e-5)


def held_in_effect(session: Session) -> np.ndarray:
    """What the rows of a table that wait would change, were they pushed now."""
    compressor = session.client.compressor
    held = compressor.held("bag")
    return compressor.share * (held.rows * held.rates[:, None]).sum(0, dtype=np.float64)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_what_was_held_counts_as_it_would_have(make_shards, num_shards):
    four = begun(make_shards(2), "topk:0.1", "none")
    four[0].client.compressor.share = 0.25  # one of four synchronous workers
    train_from(*four, 0, 8)
    state = unpack(pack(four[0].client.compressor.state_dict()))
    alone, _ = begun(make_shards(num_shards), "topk:0.1", "none")
    alone.client.compressor.load_state_dict(state)
    want = held_in_effect(four[0])
    assert np.abs(want).max() > 0
    np.testing.assert_allclose(held_in_effect(alone), want, rtol=1e-6)
    alone.client.compressor.hold(state)  # another of the four, who is gone
    np.testing.assert_allclose(held_in_effect(alone), 2 * want, rtol=1e-5)


@pytest.mark.parametrize(("staleness", "want"), [(0, 0.25), (2, 1.0), (None, 1.0)])
def test_a_push_counts_as_one_of_those_that_are_gathered(make_shards, staleness, want):
    client = Client([LocalTransport(shard.handle, "local") for shard in make_shards(1)])
    client.join(Terms(workers=4, staleness=staleness))
    assert client.compressor.share == want
    client.close()


@pytest.mark.parametrize("local", [False, True])
def test_gradients_are_not_held_for_a_run_that_pushes_differences(make_shards, caplog, local):
    session, model = begun(make_shards(2), "topk:0.1", "none")
    compressor = session.client.compressor
    compressor.differences = not local
    train_from(session, model, 0, 6)
    state = unpack(pack(compressor.state_dict()))
    other, _ = begun(make_shards(2), "topk:0.1", "none")
    other.client.compressor.differences = local
    other.client.compressor.load_state_dict(state)
    other.client.compressor.hold(state)
    assert not len(other.client.compressor.held("bag").ids)
    then, now = ("gradients", "differences of weights") if local else ("differences of weights", "gradients")
    assert f"table bag: what was held back is dropped: it is of {then}, and pushes are {now}" in caplog.text


def test_a_state_of_before_there_were_shares_is_that_of_the_same_run(make_shards):
    session, model = begun(make_shards(2), "topk:0.1", "none")
    train_from(session, model, 0, 6)
    state = unpack(pack(session.client.compressor.state_dict()))
    for table in state.values():
        del table["share"], table["differences"]
    other, _ = begun(make_shards(2), "topk:0.1", "none")
    other.client.compressor.load_state_dict(state)
    np.testing.assert_array_equal(held_in_effect(other), held_in_effect(session))
