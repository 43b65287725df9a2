"""What compression goes on with: a run that was resumed is one that was never stopped, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from bag_model import BagModel
from torch import nn

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.select import REUSE, SMALL
from embershard.proto.codec.values.registry import find_values
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.worker.checkpoint.tensors import pack, unpack
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.compression.error_feedback import EncodeOptions, Feedback, ShardGradients
from embershard.worker.session.session import Session

NUM_IDS, DIM = 300, 8
Shards = Callable[..., list[Shard]]


def batches(start: int, stop: int) -> Iterator[torch.Tensor]:
    for number in range(start, stop):
        yield torch.randint(0, NUM_IDS, (16, 3), generator=torch.Generator().manual_seed(number))


def begun(shards: list[Shard], push: str, dense: str) -> tuple[Session, nn.Module]:
    torch.manual_seed(0)
    transports = [LocalTransport(shard.handle, f"local/{i}") for i, shard in enumerate(shards)]
    compression = es.Compression(push=push, dense={"push": dense}, residual_rows=60, warmup_steps=3, momentum=0.5)
    session = Session(Client(transports), compression=compression)
    return session, es.wrap(
        BagModel(NUM_IDS, DIM, hidden=200), session, optimizer=es.SGD(lr=0.1), dense_optimizer=es.SGD(lr=0.01)
    )


def train(session: Session, model: nn.Module, start: int, stop: int) -> None:
    for number, ids in enumerate(session.prefetch(batches(start, stop)), start):
        session.lr_scale = 1.0 / (1 + number // 4)  # as a schedule: what is held counts by that of its own push
        (model(ids) - ids.float().mean(1) / NUM_IDS).square().mean().backward()
        session.step()


def weights(session: Session, model: nn.Module) -> list[np.ndarray]:
    rows = session.tables[0].pull(torch.arange(NUM_IDS)).numpy()
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
def test_a_resumed_run_is_equal_to_one_that_was_not_stopped(push: str, dense: str, make_shards: Shards) -> None:
    whole = begun(make_shards(2), push, dense)
    train(*whole, 0, 24)

    shards = make_shards(2)
    first = begun(shards, push, dense)
    train(*first, 0, 12)
    state = unpack(pack(first[0].client.compressor.state_dict()))
    first[0].close()
    second = begun(shards, push, dense)
    second[0].client.compressor.load_state_dict(state)
    train(*second, 12, 24)
    for mine, other in zip(weights(*second), weights(*whole), strict=True):
        assert mine.tobytes() == other.tobytes()


LARGE = 9000  # rows of DIM elements: more than are selected exactly


def large_pushes(start: int, feedback: Feedback) -> list[bytes]:
    """Payloads of some pushes of a table that is selected from by a threshold; it soon fits no more, by a little."""
    how = EncodeOptions(CodecName.parse("topk:0.01"), find_values("none"), 0.01, key=0)
    sent = []
    for number in range(start, start + 6):
        rows = np.random.default_rng(number).standard_normal((LARGE, DIM)).astype(np.float32)
        sent.append(
            feedback.pack(ShardGradients(np.arange(LARGE), rows * np.float32(0.9**number), 1.0), how).payload.tobytes()
        )
    return sent


def test_a_threshold_goes_on_from_a_checkpoint() -> None:
    assert LARGE * DIM > SMALL
    whole, resumed, sampled_anew = (Feedback(DIM, None) for _ in range(3))
    large_pushes(0, whole)
    state = unpack(pack(whole.state_dict()))
    resumed.load_state_dict(state)
    sampled_anew.load_state_dict({**state, "threshold": [0, REUSE]})
    want = large_pushes(6, whole)
    assert large_pushes(6, resumed) == want
    assert large_pushes(6, sampled_anew) != want


def test_what_is_held_back_can_be_dropped(make_shards: Shards) -> None:
    session, *rest = begun(make_shards(2), "topk:0.1", "dgc:0.05")
    train(session, *rest, 0, 6)
    compressor = session.client.compressor
    assert any(len(compressor.held(name).ids) for name in session.table_names)
    compressor.clear_residuals()
    assert not any(len(compressor.held(name).ids) for name in session.table_names)


def test_without_its_state_it_would_not_be(make_shards: Shards) -> None:
    whole, shards = begun(make_shards(2), "topk:0.1", "none"), make_shards(2)
    train(*whole, 0, 24)
    train(*begun(shards, "topk:0.1", "none"), 0, 12)
    second = begun(shards, "topk:0.1", "none")
    train(*second, 12, 24)
    assert weights(*second)[0].tobytes() != weights(*whole)[0].tobytes()


def test_on_another_number_of_shards_what_was_held_is_held(make_shards: Shards) -> None:
    session, model = begun(make_shards(3), "topk:0.1", "topk:0.01")
    train(session, model, 0, 12)
    state = unpack(pack(session.client.compressor.state_dict()))
    other, _ = begun(make_shards(2), "topk:0.1", "topk:0.01")
    other.client.compressor.load_state_dict(state)
    for table in ("bag", "dense"):
        before, after = (s.client.compressor.held(table) for s in (session, other))
        one, two = np.argsort(before.ids), np.argsort(after.ids)
        np.testing.assert_array_equal(before.ids[one], after.ids[two])
        np.testing.assert_array_equal(before.rows[one], after.rows[two])
        np.testing.assert_array_equal(before.ages[one], after.ages[two])


def test_a_worker_that_stays_holds_for_one_that_is_gone(make_shards: Shards) -> None:
    sessions = [begun(make_shards(2), "topk:0.1", "none") for _ in range(2)]
    for number, (session, model) in enumerate(sessions):
        train(session, model, 10 * number, 10 * number + 8)
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
def test_what_was_held_counts_as_it_would_have(make_shards: Shards, num_shards: int) -> None:
    four = begun(make_shards(2), "topk:0.1", "none")
    four[0].client.compressor.share = 0.25  # one of four synchronous workers
    train(*four, 0, 8)
    state = unpack(pack(four[0].client.compressor.state_dict()))
    alone, _ = begun(make_shards(num_shards), "topk:0.1", "none")
    alone.client.compressor.load_state_dict(state)
    want = held_in_effect(four[0])
    assert np.abs(want).max() > 0
    np.testing.assert_allclose(held_in_effect(alone), want, rtol=1e-6)
    alone.client.compressor.hold(state)  # another of the four, who is gone
    np.testing.assert_allclose(held_in_effect(alone), 2 * want, rtol=1e-5)


@pytest.mark.parametrize(("staleness", "want"), [(0, 0.25), (2, 1.0), (None, 1.0)])
def test_a_push_counts_as_one_of_those_that_are_gathered(
    make_shards: Shards, staleness: int | None, want: float
) -> None:
    client = Client([LocalTransport(shard.handle, "local") for shard in make_shards(1)])
    client.join(Terms(workers=4, staleness=staleness))
    assert client.compressor.share == want
    client.close()


@pytest.mark.parametrize("local", [False, True])
def test_gradients_are_not_held_for_a_run_that_pushes_differences(
    make_shards: Shards, caplog: pytest.LogCaptureFixture, local: bool
) -> None:
    session, model = begun(make_shards(2), "topk:0.1", "none")
    compressor = session.client.compressor
    compressor.differences = not local
    train(session, model, 0, 6)
    state = unpack(pack(compressor.state_dict()))
    other, _ = begun(make_shards(2), "topk:0.1", "none")
    other.client.compressor.differences = local
    other.client.compressor.load_state_dict(state)
    other.client.compressor.hold(state)
    assert not len(other.client.compressor.held("bag").ids)
    then, now = ("gradients", "differences of weights") if local else ("differences of weights", "gradients")
    assert f"table bag: what was held back is dropped: it is of {then}, and pushes are {now}" in caplog.text


def test_a_state_of_before_there_were_shares_is_that_of_the_same_run(make_shards: Shards) -> None:
    session, model = begun(make_shards(2), "topk:0.1", "none")
    train(session, model, 0, 6)
    state = unpack(pack(session.client.compressor.state_dict()))
    for table in state.values():
        del table["share"], table["differences"]
    other, _ = begun(make_shards(2), "topk:0.1", "none")
    other.client.compressor.load_state_dict(state)
    np.testing.assert_array_equal(held_in_effect(other), held_in_effect(session))
