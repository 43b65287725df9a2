"""Rows and gradients that travel compressed, as a shard reads and writes them."""

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
from embershard.proto.messages import PACKED, Declare, Load, Pull, Push, Pushed, TableGradients, TableIds
from embershard.proto.protobuf import dumps, loads
from harness.shards import join, make_shard, push, table

DIM = 8
IDS = np.arange(0, 60, 3, dtype=np.int64)
PLAIN, INT8, BF16 = map(find_values, ("none", "int8", "bf16"))
ROWS = np.random.default_rng(1).standard_normal((len(IDS), DIM)).astype(np.float32)


def make(optimizer=spec.SGD(lr=1.0), **settings):  # noqa: B008
    tables = [table(name, DIM, optimizer=optimizer, initializer=spec.Normal(), seed=3) for name in ("t", "other")]
    return make_shard(*tables, **settings)


@pytest.fixture
def shard():
    return make()


def pull(shard, *parts):
    return shard.handle(Pull(1, parts or (TableIds("t", IDS),)))


def rows(shard):
    return pull(shard).tables[0]


def coded(payload, ids=IDS, **changes):
    return replace(TableGradients("t", ids, payload, codec=PACKED), **changes)


def plain(name="t"):
    return TableGradients(name, IDS, ROWS)


class TestPull:
    @pytest.mark.parametrize("name", ["fp16s", "bf16", "int8"])
    def test_rows_come_as_the_codec_writes_them_rounded_to_nearest(self, shard, name):
        shard.handle(Load("t", 1, IDS, ROWS))
        codec = find_values(name)
        reply = pull(shard, TableIds("t", IDS, codec=name), TableIds("other", IDS), TableIds("t", IDS[:0], codec=name))
        assert reply.codecs == (name, "", name)
        want = np.empty(codec.nbytes(len(IDS), DIM), np.uint8)
        codec.encode(ROWS, want, None)
        assert reply.tables[0].tobytes() == want.tobytes()
        assert reply.tables[1].dtype == np.float32
        assert reply.tables[2].nbytes == codec.nbytes(0, DIM)

    def test_a_reply_says_how_long_coding_took_for_it_alone(self, shard):
        good = coded(encode_rows(ROWS, INT8, 1))
        assert pull(shard, TableIds("t", IDS, codec="int8")).coding_seconds > 0
        without = pull(shard, TableIds("t", IDS, codec="none"))
        assert (without.coding_seconds, without.codecs) == (0.0, ())  # not once more
        assert 0 < loads(Pushed, dumps(shard.handle(push(good)))).coding_seconds < 10
        assert shard.handle(push(plain(), seq=2)).coding_seconds == 0.0
        with pytest.raises(UnknownTable):
            shard.handle(push(good, replace(good, table="nowhere"), seq=3))
        assert shard.handle(push(plain(), seq=4)).coding_seconds == 0.0

    def test_the_limit_counts_the_bytes_that_travel(self):
        ids, shard = np.arange(1000, dtype=np.int64), make(max_message_bytes=20_000)
        packed = TableIds("t", ids, codec="int8")
        assert pull(shard, packed).tables[0].nbytes == 1000 * (DIM + 2)
        for parts in ([TableIds("t", ids)], [packed, packed]):
            with pytest.raises(MessageTooLarge):
                pull(shard, *parts)

    def test_ids_may_come_packed_and_be_named_by_the_push(self, shard):
        message = Pull(1, (TableIds("t", IDS, 7, "fp16s", packed=encode_ids(IDS)),), worker=0, epoch=1)
        shard.handle(loads(Pull, dumps(message)))
        before = rows(shard)
        shard.handle(push(coded(encode_rows(ROWS, PLAIN, None), IDS[:0], route=7)))
        np.testing.assert_array_equal(rows(shard), before - ROWS)


class TestPush:
    @pytest.mark.parametrize("codec", BUILTIN.values(), ids=list(BUILTIN))
    def test_gradients_are_applied_as_they_decode(self, shard, codec):
        before, payload = rows(shard), encode_rows(ROWS, codec, 5)
        message = push(coded(payload, packed=encode_ids(IDS)))
        assert shard.handle(loads(Push, dumps(message))) == Pushed(False, len(IDS), 0)
        decoded = np.empty_like(ROWS)
        codec.decode(payload[2:], decoded)
        np.testing.assert_array_equal(rows(shard), before - decoded)

    @pytest.mark.parametrize("elements", [False, True])
    def test_rows_and_elements_that_a_payload_leaves_out_are_left_alone(self, shard, elements):
        want, positions = rows(shard), np.array([0, 9, 10, 19])
        if elements:
            payload = encode_elements(positions, ROWS[0, :4], (len(IDS), DIM), PLAIN, None)
            want.reshape(-1)[positions] -= ROWS[0, :4]
        else:
            payload = encode_rows(ROWS[:4], PLAIN, None, positions=positions, num_ids=len(IDS))
            want[positions] -= ROWS[:4]
        assert shard.handle(push(coded(payload))) == Pushed(False, 3 if elements else 4, 0)
        np.testing.assert_array_equal(rows(shard), want)

    def test_rows_that_are_not_finite_are_skipped_and_counted_and_a_difference_is_added(self, shard):
        gradients, want = ROWS.copy(), rows(shard)
        gradients[3, 2], gradients[5, 0] = np.nan, np.inf
        for seq, name in enumerate(["none", "fp16s", "bf16", "int8"], start=1):
            message = push(coded(encode_rows(gradients, find_values(name), 1)), seq=seq, difference=seq == 1)
            assert shard.handle(message) == Pushed(False, len(IDS) - 2, 2), name
            if seq == 1:
                finite = np.isfinite(gradients).all(axis=1)
                want[finite] += ROWS[finite]
                np.testing.assert_array_equal(rows(shard), want)
        np.testing.assert_array_equal(rows(shard)[~finite], want[~finite])

    def test_the_age_of_a_row_reaches_its_optimizer_also_where_its_push_is_gathered(self):
        shards = [make(spec.Adam(lr=0.1)) for _ in range(3)]
        aged = coded(encode_rows(ROWS, PLAIN, None, ages=np.arange(1, len(IDS) + 1, dtype=np.float32)))
        for worker in (0, 1):
            shards[2].handle(join(worker, workers=2))
        for shard, part, worker in zip([*shards, shards[2]], [plain(), aged, aged, aged], (0, 0, 0, 1), strict=True):
            shard.handle(push(part, worker=worker))
        without, alone, gathered = map(rows, shards)
        np.testing.assert_array_equal(alone[0], without[0])
        assert not np.isclose(alone[1:], without[1:]).any()
        np.testing.assert_array_equal(gathered, alone)

    @pytest.mark.parametrize(
        "damage", [lambda p: p[:-1], lambda p: p[:0], lambda p: np.append(p, p[:1]), lambda p: p + 1]
    )
    def test_nothing_of_a_push_with_a_damaged_payload_is_applied(self, shard, damage):
        both = TableIds("t", IDS), TableIds("other", IDS)
        before = pull(shard, *both).tables
        payload, good = encode_rows(ROWS, INT8, 1), plain("other")
        with pytest.raises(DamagedPayload, match="20 ids of table 't'"):
            shard.handle(push(good, coded(damage(payload)), good))
        np.testing.assert_array_equal(pull(shard, *both).tables, before)
        # the same token, once more: it was not taken
        assert shard.handle(push(good, coded(payload))) == Pushed(False, 2 * len(IDS), 0)

    @pytest.mark.parametrize("codec", ["bf16", "int9"])
    def test_a_push_names_no_values_codec_as_a_pull_does(self, shard, codec):
        """A client that does is not told of damage."""
        part = coded(encode_rows(ROWS, find_values("bf16"), None), codec=codec)
        with pytest.raises(InvalidRequest, match=f"table 't': a push has no codec '{codec}'.*'packed'") as refused:
            shard.handle(push(part))
        assert type(refused.value) is InvalidRequest

    def test_a_payload_takes_no_more_memory_than_a_message(self):
        shard, ids = make(max_message_bytes=1 << 20), np.arange((1 << 15) + 1, dtype=np.int64)
        nothing = encode_elements(np.empty(0, np.int64), np.empty(0, np.float32), (1 << 15, DIM), PLAIN, None)
        all_rows = coded(encode_rows(np.zeros((1 << 14, DIM), np.float32), BF16, None), ids[: 1 << 14])
        assert shard.handle(push(coded(nothing, ids[:-1]))) == Pushed(False, 0, 0)
        assert shard.handle(push(all_rows, all_rows, seq=2)) == Pushed(False, 1 << 15, 0)
        for parts in ([coded(nothing, ids)], [all_rows] * 3):
            with pytest.raises(MessageTooLarge):
                shard.handle(push(*parts, seq=3))


class TestUserDefined:
    NAME = "codecs_of_mine:half"

    @pytest.fixture
    def registry(self, tmp_path, monkeypatch):
        (tmp_path / "codecs_of_mine.py").write_text(HALF_CODEC)
        monkeypatch.syspath_prepend(str(tmp_path))
        return CodecRegistry(["codecs_of_mine"])

    def test_a_codec_of_a_module_serves_pulls_and_pushes(self, registry):
        half = table("t", DIM, initializer=spec.Normal(), push_codec=CodecName.parse(self.NAME))
        shard = make_shard(half, codecs=registry)
        before, reply = rows(shard), pull(shard, TableIds("t", IDS, codec=self.NAME))
        assert reply.codecs == (self.NAME,)
        assert reply.tables[0].tobytes() == before.astype(np.float16).tobytes()
        shard.handle(push(coded(encode_rows(ROWS, registry.find(self.NAME), None), codec=self.NAME)))
        np.testing.assert_array_equal(rows(shard), before - ROWS.astype(np.float16).astype(np.float32))

    def test_a_shard_without_it_says_so_when_a_table_is_declared_and_when_it_is_used(self, shard, registry):
        payload = encode_rows(ROWS, registry.find(self.NAME), None)
        named = [Declare(table("n", **{f: CodecName.parse(self.NAME)})) for f in ("push_codec", "pull_codec")]
        used = (Pull(1, (TableIds("t", IDS, codec=self.NAME),)), push(coded(payload, codec=self.NAME)))
        for request in (*named, *used):
            with pytest.raises(UnknownCodec, match=f"{self.NAME}.*--import"):
                shard.handle(request)
        assert [one.name for one in shard.status().tables] == ["t", "other"]
