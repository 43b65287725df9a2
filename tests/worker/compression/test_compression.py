"""How a session's tables travel, both ways, between a model and shards in this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bag_model import BagModel
from torch import nn

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.spec import TableSpec
from embershard.worker.session.session import Session

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
def plain() -> tuple[float, int, int]:
    """The loss and the bytes of a session without compression."""
    session, model = session_of()
    return train(session, model), session.stats.sent_bytes, session.stats.received_bytes


@pytest.mark.parametrize(("codec", "ratio"), [("fp16s", 1.9), ("bf16", 1.9), ("int8", 3.0)])
def test_values_codecs_train_alike_with_fewer_bytes_both_ways(
    codec: str, ratio: float, plain: tuple[float, int, int]
) -> None:
    session, model = session_of(es.Compression(push=codec, pull=codec, dense={"push": codec, "pull": codec}))
    loss = train(session, model)
    assert loss == pytest.approx(plain[0], rel=0.05)
    sent, received = session.stats.sent_bytes, session.stats.received_bytes
    assert (plain[1] + plain[2]) / (sent + received) > ratio


@pytest.mark.parametrize("codec", ["topk:0.05", "rows:0.2", "randomk:0.5", "dgc:0.05", "topk:0.05+int8"])
def test_what_is_held_back_is_trained_on_later(codec: str, plain: tuple[float, int, int]) -> None:
    session, model = session_of(es.Compression(push=codec, dense={"push": codec}, warmup_steps=2))
    first = train(session, model, count=3)
    assert train(session, model, seed=1) < 0.5 * first
    assert session.stats.sent_bytes < plain[1]


def test_one_bit_serves_dense_weights() -> None:
    session, model = session_of(es.Compression(dense={"push": "onebit"}))
    first = train(session, model, count=3)
    assert train(session, model, seed=1) < 0.5 * first
    pushed = sum(moved.wire for part, moved in session.stats.volume.items() if part[:2] == ("push", "dense"))
    raw = sum(moved.raw for part, moved in session.stats.volume.items() if part[:2] == ("push", "dense"))
    assert raw / pushed > 25


def test_ids_that_ascend_travel_as_gaps() -> None:
    sent = {}
    for pull in ("none", "fp16s"):
        session, _ = session_of(es.Compression(pull=pull))
        for _ in session.prefetch(batches(5)):
            pass
        sent[pull] = sum(moved.wire for part, moved in session.stats.volume.items() if part[:2] == ("pull", "ids"))
    assert sent["fp16s"] < 0.3 * sent["none"]


def test_tables_are_chosen_by_name_and_kind() -> None:
    settings = es.Compression(
        push="int8", dense={"pull": "bf16"}, tables={"b*": {"push": "topk:0.5"}, "dense": {"push": "fp16s"}}
    )
    session, _ = session_of(settings)
    ways = {name: (str(push), str(pull)) for name, (push, pull) in session.client.compressor.directions().items()}
    assert ways == {"bag": ("topk:0.5", "none"), "dense": ("fp16s", "bf16")}


def test_codecs_change_at_run_time_and_nothing_that_was_held_is_lost() -> None:
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


def test_what_one_codec_held_the_next_one_sends() -> None:
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
def test_settings_that_cannot_be_are_refused_at_once(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        es.Compression(**settings)  # type: ignore[arg-type]


def test_a_table_whose_optimizer_has_momentum_refuses_dgc() -> None:
    session = es.local(compression=es.Compression(push="dgc:0.1"))
    with pytest.raises(ValueError, match="momentum"):
        session.table(TableSpec(name="t", dim=4, optimizer=es.SGD(lr=0.1, momentum=0.9)))
    session = es.local(compression=es.Compression(momentum=0.9))
    session.table(TableSpec(name="t", dim=4, optimizer=es.Adam(lr=0.1)))
    with pytest.raises(ValueError, match="beta1"):
        session.compress("t", push="dgc:0.1")
    assert session.client.compressor.directions()["t"].push == CodecName()


def test_compress_names_what_there_is() -> None:
    session, _ = session_of()
    with pytest.raises(ValueError, match=r"\(known: dense, bag\)"):
        session.compress("user", push="int8")
    with pytest.raises(ValueError, match="it serves dense weights"):
        session.compress("*", push="powersgd:2")
    assert all(ways.push.is_plain for ways in session.client.compressor.directions().values())


@pytest.mark.parametrize("name", ["bag", "dense"])
def test_compress_names_what_there_is_once(name: str) -> None:
    session = es.local()
    session.table(es.TableSpec(name=name, dim=1, optimizer=es.SGD(lr=1.0)))
    with pytest.raises(ValueError, match=rf"\(known: {name}\)"):
        session.compress("nope", push="int8")


def test_every_table_switches_or_none() -> None:
    session, _ = session_of()
    with pytest.raises(ValueError, match="one bit"):
        session.compress("*", push="onebit")
    assert session.compress("dense", push="onebit") == ["dense"]


def test_rows_that_were_assigned_see_no_gradient_of_before() -> None:
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


def test_rows_that_max_norm_scales_are_not_rounded_on_the_shards() -> None:
    plain = turned("none")
    for codec in ("int8", "bf16"):
        assert float((turned(codec) - plain).abs().max()) < 2e-3
