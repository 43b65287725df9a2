"""Rows and gradients that travel compressed, as a shard reads and writes them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from half_codec import HALF_CODEC

from embershard.proto import spec
from embershard.proto.codec.ids import encode_ids
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import encode_elements, encode_rows
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.codec.values.registry import BUILTIN, find_values
from embershard.proto.errors import DamagedPayload, InvalidRequest, MessageTooLarge, UnknownCodec, UnknownTable
from embershard.proto.messages import (
    PACKED,
    Declare,
    Join,
    Load,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rows,
    TableGradients,
    TableIds,
)
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import Placement
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

DIM = 8
IDS = np.arange(0, 60, 3, dtype=np.int64)
PLAIN = find_values("none")


def make(optimizer: spec.Optimizer | None = None, **settings: int) -> Shard:
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), **settings)
    for name in ("t", "other"):
        shard.handle(Declare(spec.TableSpec(name=name, dim=DIM, optimizer=optimizer or spec.SGD(lr=1.0), seed=3)))
    return shard


@pytest.fixture
def shard():
    return make()


def rows_of(seed: int, count: int = len(IDS)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def pull(shard: Shard, *parts: TableIds) -> Rows:
    reply = shard.handle(Pull(1, parts or (TableIds("t", IDS),)))
    assert isinstance(reply, Rows)
    return reply


def push(*parts: TableGradients, seq: int = 1, worker: int = 0) -> Push:
    return Push(PushToken(worker, 1, seq, 1), 0, 1, parts)


def coded(payload: np.ndarray, ids: np.ndarray = IDS, **changes: object) -> TableGradients:
    return replace(TableGradients("t", ids, payload, codec=PACKED), **changes)  # type: ignore[arg-type]


class TestPull:
    @pytest.mark.parametrize("name", ["fp16s", "bf16", "int8"])
    def test_rows_come_as_the_codec_writes_them_rounded_to_nearest(self, shard, name):
        shard.handle(Load("t", 1, IDS, rows_of(0)))
        codec = find_values(name)
        reply = pull(shard, TableIds("t", IDS, codec=name), TableIds("other", IDS), TableIds("t", IDS[:0], codec=name))
        assert reply.codecs == (name, "", name)
        want = np.empty(codec.nbytes(len(IDS), DIM), np.uint8)
        codec.encode(rows_of(0), want, None)
        assert reply.tables[0].tobytes() == want.tobytes()
        assert reply.tables[1].dtype == np.float32
        assert reply.tables[2].nbytes == codec.nbytes(0, DIM)

    def test_a_reply_says_how_long_coding_took_where_there_was_some(self, shard):
        assert pull(shard, TableIds("t", IDS, codec="int8")).coding_seconds > 0
        assert pull(shard).coding_seconds == 0.0  # not once more
        reply = shard.handle(push(coded(encode_rows(rows_of(1), find_values("int8"), 1))))
        assert isinstance(reply, Pushed)
        assert 0 < loads(Pushed, dumps(reply)).coding_seconds < 10
        reply = shard.handle(push(TableGradients("t", IDS, rows_of(1)), seq=2))
        assert isinstance(reply, Pushed)
        assert reply.coding_seconds == 0.0

    def test_what_coding_took_in_a_request_that_failed_is_told_in_no_reply(self, shard):
        good = coded(encode_rows(rows_of(1), find_values("int8"), 1))
        with pytest.raises(UnknownTable):
            shard.handle(push(good, replace(good, table="nowhere")))
        reply = shard.handle(push(TableGradients("t", IDS, rows_of(1)), worker=1))
        assert isinstance(reply, Pushed)
        assert reply.coding_seconds == 0.0

    def test_a_reply_without_codecs_names_none(self, shard):
        assert pull(shard, TableIds("t", IDS, codec="none")).codecs == ()

    def test_the_limit_counts_the_bytes_that_travel(self):
        ids = np.arange(1000, dtype=np.int64)
        shard = make(max_message_bytes=20_000)
        with pytest.raises(MessageTooLarge):
            pull(shard, TableIds("t", ids))
        assert pull(shard, TableIds("t", ids, codec="int8")).tables[0].nbytes == 1000 * (DIM + 2)
        with pytest.raises(MessageTooLarge):
            pull(shard, *[TableIds("t", ids, codec="int8")] * 2)

    def test_ids_may_come_packed_and_be_named_by_the_push(self, shard):
        message = Pull(1, (TableIds("t", IDS, 7, "fp16s", packed=encode_ids(IDS)),), worker=0, epoch=1)
        shard.handle(loads(Pull, dumps(message)))
        before = pull(shard).tables[0]
        shard.handle(push(coded(encode_rows(rows_of(1), PLAIN, None), IDS[:0], route=7)))
        np.testing.assert_array_equal(pull(shard).tables[0], before - rows_of(1))

    def test_an_unknown_codec_is_named(self, shard):
        with pytest.raises(UnknownCodec, match=r"mine:half.*--import"):
            pull(shard, TableIds("t", IDS, codec="mine:half"))


class TestPush:
    @pytest.mark.parametrize("codec", BUILTIN.values(), ids=list(BUILTIN))
    def test_gradients_are_applied_as_they_decode(self, shard, codec):
        gradients, before = rows_of(1), pull(shard).tables[0]
        payload = encode_rows(gradients, codec, 5)
        packed = coded(payload, packed=encode_ids(IDS))
        assert shard.handle(loads(Push, dumps(push(packed)))) == Pushed(False, len(IDS), 0)
        decoded = np.empty_like(gradients)
        codec.decode(payload[2:], decoded)
        np.testing.assert_array_equal(pull(shard).tables[0], before - decoded)

    def test_rows_that_a_payload_leaves_out_are_left_alone(self, shard):
        positions, gradients, before = np.array([1, 4, 19]), rows_of(1, 3), pull(shard).tables[0]
        payload = encode_rows(gradients, PLAIN, None, positions=positions, num_ids=len(IDS))
        assert shard.handle(push(coded(payload))) == Pushed(False, 3, 0)
        before[positions] -= gradients
        np.testing.assert_array_equal(pull(shard).tables[0], before)

    def test_elements_are_added_to_their_own(self, shard):
        positions, values = np.array([0, 9, 10, 8 * 19 + 7]), np.array([1, 2, 3, -4], np.float32)
        before = pull(shard).tables[0]
        payload = encode_elements(positions, values, (len(IDS), DIM), PLAIN, None)
        assert shard.handle(push(coded(payload))) == Pushed(False, 3, 0)
        before.reshape(-1)[positions] -= values
        np.testing.assert_array_equal(pull(shard).tables[0], before)

    def test_the_age_of_a_row_reaches_its_optimizer(self):
        gradients, ages = rows_of(1), np.arange(1, len(IDS) + 1, dtype=np.float32)
        shard, twin = make(spec.Adam(lr=0.1)), make(spec.Adam(lr=0.1))
        shard.handle(push(coded(encode_rows(gradients, PLAIN, None, ages=ages))))
        twin.handle(push(TableGradients("t", IDS, gradients)))
        got, plain = pull(shard).tables[0], pull(twin).tables[0]
        np.testing.assert_array_equal(got[0], plain[0])
        assert not np.isclose(got[1:], plain[1:]).any()

    def test_a_gathered_push_keeps_its_ages_until_the_clock_closes(self):
        gradients, ages = rows_of(1), np.full(len(IDS), 9, np.float32)
        shards = make(spec.Adam(lr=0.1)), make(spec.Adam(lr=0.1))
        for worker in (0, 1):
            shards[0].handle(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
        payload = encode_rows(gradients, PLAIN, None, ages=ages)
        for worker in (0, 1):
            shards[0].handle(replace(push(coded(payload), worker=worker), weight=1.0))
        shards[1].handle(push(coded(payload)))
        np.testing.assert_array_equal(*(pull(shard).tables[0] for shard in shards))

    def test_rows_that_are_not_finite_are_skipped_and_counted(self, shard):
        gradients, before = rows_of(1), pull(shard).tables[0]
        gradients[3, 2], gradients[5, 0] = np.nan, np.inf
        for seq, name in enumerate(["none", "fp16s", "bf16", "int8"], start=1):
            payload = encode_rows(gradients, find_values(name), 1)
            assert shard.handle(push(coded(payload), seq=seq)) == Pushed(False, len(IDS) - 2, 2), name
        np.testing.assert_array_equal(pull(shard).tables[0][[3, 5]], before[[3, 5]])

    def test_a_difference_may_be_compressed(self, shard):
        before = pull(shard).tables[0]
        shard.handle(replace(push(coded(encode_rows(rows_of(1), PLAIN, None))), difference=True))
        np.testing.assert_array_equal(pull(shard).tables[0], before + rows_of(1))

    @pytest.mark.parametrize(
        "damage", [lambda p: p[:-1], lambda p: p[:0], lambda p: np.append(p, p[:1]), lambda p: p + 1]
    )
    def test_nothing_of_a_push_with_a_damaged_payload_is_applied(self, shard, damage):
        before = pull(shard, TableIds("t", IDS), TableIds("other", IDS)).tables
        payload = encode_rows(rows_of(1), find_values("int8"), 1)
        good = TableGradients("other", IDS, rows_of(2))
        with pytest.raises(DamagedPayload, match="20 ids of table 't'"):
            shard.handle(push(good, coded(damage(payload)), good))
        after = pull(shard, TableIds("t", IDS), TableIds("other", IDS)).tables
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
        # the same token, once more: it was not taken
        assert shard.handle(push(good, coded(payload))) == Pushed(False, 2 * len(IDS), 0)

    def test_a_payload_takes_no_more_memory_than_a_message(self):
        shard = make(max_message_bytes=1 << 20)
        ids = np.arange(1 << 15, dtype=np.int64)
        nothing = encode_elements(np.empty(0, np.int64), np.empty(0, np.float32), (len(ids), DIM), PLAIN, None)
        one = coded(nothing, ids)
        assert shard.handle(push(one)) == Pushed(False, 0, 0)
        with pytest.raises(MessageTooLarge):
            shard.handle(push(coded(nothing, np.arange((1 << 15) + 1, dtype=np.int64)), seq=2))
        all_rows = coded(encode_rows(np.zeros((1 << 14, DIM), np.float32), find_values("bf16"), None), ids[: 1 << 14])
        assert shard.handle(push(all_rows, all_rows, seq=3)) == Pushed(False, 1 << 15, 0)
        with pytest.raises(MessageTooLarge):
            shard.handle(push(all_rows, all_rows, all_rows, seq=4))

    def test_any_payload_is_applied_or_refused(self, shard):
        rng = np.random.default_rng(0)
        payloads = [
            encode_rows(rows_of(1), find_values("int8"), 1, positions=np.arange(20), ages=np.full(20, 3), num_ids=20),
            encode_elements(np.arange(0, 160, 7), rng.random(23).astype(np.float32), (20, DIM), find_values("bf16"), 1),
        ]
        for seq in range(1, 400):
            payload = payloads[seq % 2].copy()
            payload[rng.integers(0, len(payload), 3)] = rng.integers(0, 256, 3)
            with suppress(InvalidRequest):
                shard.handle(replace(push(coded(payload)), token=PushToken(0, 1, seq, seq)))


class TestUserDefined:
    @pytest.fixture
    def registry(self, tmp_path, monkeypatch):
        (tmp_path / "codecs_of_mine.py").write_text(HALF_CODEC)
        monkeypatch.syspath_prepend(str(tmp_path))
        return CodecRegistry(["codecs_of_mine"])

    def test_a_codec_of_a_module_serves_pulls_and_pushes(self, registry):
        shard, name = Shard(0, Placement.even(1), OptimizerRegistry(), codecs=registry), "codecs_of_mine:half"
        table = spec.TableSpec(name="t", dim=DIM, optimizer=spec.SGD(lr=1.0), push_codec=CodecName.parse(name))
        shard.handle(Declare(table))
        before = pull(shard).tables[0]
        reply = pull(shard, TableIds("t", IDS, codec=name))
        assert reply.codecs == (name,)
        assert reply.tables[0].tobytes() == before.astype(np.float16).tobytes()
        payload = encode_rows(rows_of(1), registry.find(name), None)
        shard.handle(push(coded(payload, codec=name)))
        half = rows_of(1).astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(pull(shard).tables[0], before - half)

    def test_a_shard_without_it_says_so_when_a_table_is_declared_and_when_it_is_used(self, shard, registry):
        name = "codecs_of_mine:half"
        for field in ("push_codec", "pull_codec"):
            table = spec.TableSpec(name="new", dim=DIM, optimizer=spec.SGD(lr=1.0))
            with pytest.raises(UnknownCodec, match="codecs_of_mine:half"):
                shard.handle(Declare(replace(table, **{field: CodecName.parse(name)})))
        with pytest.raises(UnknownCodec, match="codecs_of_mine:half"):
            shard.handle(push(coded(encode_rows(rows_of(1), registry.find(name), None), codec=name)))
