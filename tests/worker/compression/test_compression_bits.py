"""Codecs that send everything, and none at all: the bits of a session that knows no compression."""

from __future__ import annotations

import pytest
import torch
from bag_model import BagModel

import embershard as es
from embershard.worker.session.session import Session

NUM_IDS = 50


def trained(
    optimizer: object, compression: es.Compression | None, *, shards: int = 2, ahead: bool = True, steps: int = 12
) -> tuple[bytes, Session]:
    """All weights after some steps."""
    torch.manual_seed(0)
    session = es.local(shards, compression=compression)
    model = es.wrap(BagModel(NUM_IDS, 8, hidden=40), session, optimizer=optimizer, dense_optimizer=optimizer)  # type: ignore[arg-type]
    batches = [torch.randint(0, NUM_IDS, (5, 3), generator=torch.Generator().manual_seed(n)) for n in range(steps)]
    for ids in session.prefetch(batches) if ahead else batches:
        (model(ids) - ids.float().mean(1)).square().mean().backward()
        session.step()
    rows = session.tables[0].pull(torch.arange(NUM_IDS)).numpy()
    session.pull([], session.dense_weights)
    return b"".join([rows.tobytes(), *(p.detach().numpy().tobytes() for p in model.parameters())]), session


OPTIMIZERS = {"sgd": es.SGD(lr=0.01), "adagrad": es.Adagrad(lr=0.05), "adam": es.Adam(lr=0.01)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("codec", ["topk:1", "rows:1", "randomk:1"])
def test_what_sends_everything_is_none_to_the_bit(codec: str, optimizer: str) -> None:
    compression = es.Compression(push=codec, dense={"push": codec})
    plain, _ = trained(OPTIMIZERS[optimizer], None)
    for shards, ahead in ((2, True), (1, True), (2, False)):
        assert trained(OPTIMIZERS[optimizer], compression, shards=shards, ahead=ahead)[0] == plain


def test_none_is_a_session_without_compression_to_the_bit_and_byte() -> None:
    plain, before = trained(es.Adam(lr=0.01), None)
    none, after = trained(es.Adam(lr=0.01), es.Compression(push="none", pull="none", tables={"*": {"push": "none"}}))
    assert none == plain
    assert after.stats.sent_bytes == before.stats.sent_bytes
    assert after.stats.received_bytes == before.stats.received_bytes


def test_rows_that_give_way_are_pulled_again_by_a_loop_that_runs_ahead() -> None:
    compression = es.Compression(push="topk:0.02", residual_rows=8)
    ahead, _ = trained(es.SGD(lr=0.01), compression, ahead=True, steps=40)
    assert trained(es.SGD(lr=0.01), compression, ahead=False, steps=40)[0] == ahead
