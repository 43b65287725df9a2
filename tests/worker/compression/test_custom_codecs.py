"""User-defined codecs from a module on both sides: what a session pushes and pulls with them."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from half_codec import HALF_CODEC

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.errors import UnknownCodec
from embershard.proto.timing import Recorder
from embershard.worker.client.client import Client
from embershard.worker.compression.settings import Compression

NAME = "codecs_of_a_worker"
HALF = Compression(push=f"{NAME}:half", pull=f"{NAME}:half")


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text(HALF_CODEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return NAME


def trained(session: es.Session) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows before and after a step whose gradient is 1/3 everywhere."""
    ids = torch.arange(5)
    spec = es.TableSpec(name="t", dim=3, optimizer=es.SGD(lr=1.0), initializer=es.Uniform())
    table = es.Embedding(session.table(spec))
    before = table(ids)
    (before.sum() / 3).backward()
    session.step()
    return before.detach(), table(ids).detach()


def test_rows_and_gradients_travel_as_the_module_says(module):
    with es.local(shards=2, imports=[module], compression=HALF) as session:
        before, after = trained(session)
        session.compress("t", pull="none")
        exact_after = session.tables[0].pull(torch.arange(5))
    assert torch.equal(before, before.half().float())
    assert torch.equal(after, exact_after.half().float())
    with es.local(shards=2) as plain:
        first, _ = trained(plain)
    third = float(np.float16(1 / 3))
    torch.testing.assert_close(exact_after, first - third, rtol=0, atol=1e-7)


def test_what_a_shard_spends_on_a_codec_is_a_part_of_the_step_and_not_of_waiting(tmp_path, monkeypatch):
    slow = HALF_CODEC.replace("    return payload", "    time.sleep(0.05)\n    return payload")
    (tmp_path / "slow_codec.py").write_text(f"import time\n{slow}")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with es.local(shards=2, imports=["slow_codec"], compression=Compression(push="slow_codec:half")) as session:
        with Recorder() as recorder:
            trained(session)
            recorder.end()
        coded = recorder.split().parts
        session.compress("t", push="none")
        with Recorder() as recorder:
            session.tables[0].pull(torch.arange(5))
            recorder.end()
        plain = recorder.split().parts
    assert coded["shards"].mean_ms >= 50
    assert coded["wait"].mean_ms >= 0
    assert "shards" not in plain


def declare(session: es.Session) -> None:
    session.table(es.TableSpec(name="t", dim=3, optimizer=es.SGD(lr=1.0)))


def test_a_worker_that_was_not_started_with_the_module_says_so_before_it_trains(module):
    client = Client(InProcessShards(imports=[module]).transports())
    with es.Session(client, compression=HALF) as session, pytest.raises(UnknownCodec, match="--import MODULE"):
        declare(session)


def test_a_shard_that_was_not_started_with_the_module_says_so_before_training(module):
    client = Client(InProcessShards().transports())
    client.compressor.find = CodecRegistry([module]).find
    with es.Session(client, compression=HALF) as session:
        for _ in range(2):
            with pytest.raises(UnknownCodec, match=r"local/0.*--import MODULE"):
                declare(session)


def test_a_table_may_name_its_codecs_itself(module):
    half = CodecName.parse(f"{NAME}:half")
    with es.local(imports=[module]) as session:
        session.table(es.TableSpec(name="t", dim=3, optimizer=es.SGD(lr=1.0), push_codec=half))
        (status,) = session.client.status()
        assert session.client.compressor.directions()["t"].push == half
        assert [(table.push_codec, table.pull_codec) for table in status.tables] == [(str(half), "none")]
