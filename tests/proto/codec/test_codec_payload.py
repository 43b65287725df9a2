"""Payloads: what is packed is what is read, and how many bytes that takes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec import flat
from embershard.proto.codec.flat import decode_flat, encode_flat, flat_nbytes
from embershard.proto.codec.low_rank import Factors, encode_low_rank
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import MAX_AGE, Decoded, decode, decode_elements, encode_elements, encode_rows
from embershard.proto.codec.predict import predict_bytes
from embershard.proto.codec.select import Threshold, count_of, random_positions, row_norms
from embershard.proto.codec.values import int8
from embershard.proto.codec.values.registry import BUILTIN, ValuesCodec, find_values
from embershard.proto.errors import DamagedPayload

PLAIN, BF16, INT8 = BUILTIN["none"], BUILTIN["bf16"], BUILTIN["int8"]
TWO_ROWS = np.array([[0.5, -1], [2, 0]], np.float32)

codecs = pytest.mark.parametrize("values", BUILTIN.values(), ids=list(BUILTIN))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def data(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def through(values: ValuesCodec, rows: np.ndarray, key: int | None) -> np.ndarray:
    """What a values codec alone makes of the rows."""
    coded = np.empty(values.nbytes(*rows.shape), np.uint8)
    values.encode(rows, coded, key)
    out = np.empty_like(rows)
    values.decode(coded, out)
    return out


def placed(decoded: Decoded, num_ids: int, dim: int) -> np.ndarray:
    out = np.zeros((num_ids, dim), np.float32)
    out[slice(None) if decoded.positions is None else decoded.positions] = decoded.rows
    return out


class TestRows:
    @codecs
    @pytest.mark.parametrize("key", [None, 5])
    @pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 16), (3, 100)])
    def test_all_rows_are_what_their_codec_makes_of_them(self, values, key, shape):
        rows = normal(*shape)
        payload = encode_rows(rows, values, key)
        decoded = decode(payload, *shape)
        assert decoded.positions is None
        assert decoded.ages is None
        assert np.array_equal(decoded.rows, through(values, rows, key))
        assert payload.size == 2 + values.nbytes(*shape)

    @codecs
    @given(st.sets(st.integers(0, 40)), st.booleans(), st.integers(1, 20))
    def test_some_rows_come_back_with_positions_and_ages(self, values, chosen, aged, dim):
        positions = np.array(sorted(chosen), np.int64)
        rows = normal(positions.size, dim)
        ages = (positions % 7 * 1000 + 2).astype(np.float32) if aged and chosen else None
        decoded = decode(encode_rows(rows, values, 3, positions=positions, ages=ages, num_ids=41), 41, dim)
        assert decoded.positions is not None
        assert np.array_equal(decoded.positions, positions)
        assert np.array_equal(decoded.rows, through(values, rows, 3))
        assert decoded.ages is None if ages is None else np.array_equal(decoded.ages, ages)

    def test_rows_of_all_ids_may_have_ages(self):
        ages = np.array([3, 1], np.float32)
        decoded = decode(encode_rows(TWO_ROWS, PLAIN, None, ages=ages), 2, 2)
        assert decoded.positions is not None
        assert decoded.positions.tolist() == [0, 1]
        assert decoded.ages is not None
        assert decoded.ages.tolist() == [3, 1]

    def test_ages_of_one_push_take_no_bytes(self):
        ones = np.ones(2, np.float32)
        assert np.array_equal(encode_rows(TWO_ROWS, PLAIN, None, ages=ones), encode_rows(TWO_ROWS, PLAIN, None))

    def test_an_age_over_the_largest_is_the_largest(self):
        ages = np.array([1, 2.0**30], np.float32)
        decoded = decode(encode_rows(TWO_ROWS, PLAIN, None, ages=ages), 2, 2)
        assert decoded.ages is not None
        assert decoded.ages.tolist() == [1, MAX_AGE]


class TestElements:
    @codecs
    @given(st.integers(0, 30), st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**32))
    def test_elements_come_back_in_their_rows(self, values, num_ids, dim, share, seed):
        at = np.flatnonzero(np.random.default_rng(seed).random(num_ids * dim) < share)
        floats = normal(at.size, seed=seed)
        payload = encode_elements(at, floats, (num_ids, dim), values, 3)
        positions, sent = decode_elements(payload, num_ids, dim)
        assert np.array_equal(positions, at)
        want = np.zeros(num_ids * dim, np.float32)
        want[at] = sent
        decoded = decode(payload, num_ids, dim)
        assert np.array_equal(placed(decoded, num_ids, dim), want.reshape(num_ids, dim))
        assert np.array_equal(np.unique(at // dim), np.array(decoded.positions))

    @given(st.integers(1, 30), st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**32), st.booleans())
    def test_elements_come_back_with_the_ages_of_their_rows(self, num_ids, dim, share, seed, is_drawn):
        rng = np.random.default_rng(seed)
        at = np.flatnonzero(rng.random(num_ids * dim) < share)
        drawn = seed if is_drawn else None
        if is_drawn:
            at = random_positions(num_ids * dim, at.size, seed)
        ages, floats = rng.integers(1, 9, num_ids).astype(np.float32), normal(at.size, seed=seed)
        aged = decode(encode_elements(at, floats, (num_ids, dim), BF16, 3, drawn=drawn, ages=ages), num_ids, dim)
        plain = decode(encode_elements(at, floats, (num_ids, dim), BF16, 3), num_ids, dim)
        assert np.array_equal(aged.positions, plain.positions)
        assert np.array_equal(aged.rows, plain.rows)
        want = ages[np.unique(at // dim)]
        assert aged.ages is None if (want == 1).all() else np.array_equal(aged.ages, want)

    def test_ages_of_one_push_take_no_bytes(self):
        at, ages = np.array([1, 2]), np.array([1, 1, 7], np.float32)
        aged, plain = (encode_elements(at, TWO_ROWS[0], (3, 2), PLAIN, None, ages=told) for told in (ages, None))
        assert np.array_equal(aged, plain)

    def test_signs_are_sent(self):
        """To send the largest magnitudes, as topk(abs(g)) does, loses them."""
        gradient = normal(20, 8)
        at = Threshold().select(gradient.reshape(-1), 30)
        for values in BUILTIN.values():
            decoded = placed(decode(encode_elements(at, gradient.reshape(-1)[at], (20, 8), values, 1), 20, 8), 20, 8)
            assert np.array_equal(np.sign(decoded.reshape(-1)[at]), np.sign(gradient.reshape(-1)[at]))
            assert (decoded < 0).any()

    def test_drawn_positions_cost_a_key(self):
        at = random_positions(1000, 100, 9)
        floats = normal(100)
        payload = encode_elements(at, floats, (10, 100), BF16, None, drawn=9)
        assert payload.size == 2 + 1 + 1 + 8 + 200
        positions, sent = decode_elements(payload, 10, 100)
        assert np.array_equal(positions, at)
        assert np.array_equal(sent, through(BF16, floats[None], None)[0])

    def test_a_row_that_is_not_finite_stays_alone(self):
        """A shard leaves out and counts such a row, and applies the others."""
        for values in BUILTIN.values():
            floats = np.ones(256, np.float32)
            floats[200] = np.nan
            rows = decode(encode_elements(np.arange(256), floats, (256, 1), values, 1), 256, 1).rows
            assert not np.isfinite(rows[200]).any()
            if values.name != "onebit":  # whose blocks are longer
                assert np.isfinite(rows[:192]).all()


class TestLowRank:
    def test_factors_are_multiplied(self):
        piece = Factors(2, 6, 0, normal(1, 2), normal(1, 3, seed=1))
        decoded = decode(encode_low_rank([piece], PLAIN, None), 5, 2)
        assert decoded.positions is None
        assert np.array_equal(decoded.rows.reshape(-1)[2:8], piece.product)
        assert not decoded.rows.reshape(-1)[[0, 1, 8, 9]].any()


class TestFlat:
    @codecs
    @pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
    def test_floats_travel_as_rows_of_64(self, values, size):
        floats = normal(size)
        coded, out = encode_flat(floats, values, None), np.empty(size, np.float32)
        decode_flat(coded, values, out)
        whole = size // 64 * 64
        parts = floats[:whole].reshape(-1, 64), floats[None, whole:]
        want = [through(values, part, None).reshape(-1) for part in parts]
        assert np.array_equal(out, np.concatenate(want))
        assert coded.size == flat_nbytes(size, values)

    def test_the_rest_is_rounded_by_other_random_numbers(self):
        floats = np.tile(normal(60), 2)
        floats[60:64] = 0
        coded = encode_flat(np.concatenate([floats[:60], np.zeros(4, np.float32), floats[:60]]), INT8, 7)
        assert not np.array_equal(coded[:60], coded[66:126])

    def test_a_retry_sends_the_same_bytes(self):
        assert np.array_equal(encode_flat(normal(100), INT8, 2**64 - 1), encode_flat(normal(100), INT8, 2**64 - 1))

    def test_other_sizes_are_damaged(self):
        with pytest.raises(DamagedPayload, match="11 bytes for 3 floats"):
            decode_flat(np.zeros(11, np.uint8), PLAIN, np.empty(3, np.float32))


class TestDamaged:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "ends after 0 bytes"),
            ("00", "ends after 1 bytes"),
            ("05 00", "form 5"),
            ("04 00 01 00 01", "3 bytes for 1 elements"),
            ("04 00 01 00 01 40 80 80 80 08 00 00", "a row of age 16777217"),
            ("04 00 01 00 01 ff" + "00" * 5, "5 bytes for 1 floats"),
            ("04 04 00 00", "ends where ages should begin"),
            ("00 05", "values codec 5"),
            ("00 ff", "values codec 255"),  # without a name in the message
            ("00 00 00", "1 bytes for 2 rows of dim 2"),
            ("00 00" + "00" * 17, "17 bytes for 2 rows of dim 2"),
            ("01 00", "the count of positions does not end"),
            ("01 00 01 00 01", "ends where ages should begin"),
            ("01 00 02 42 00", "2 integers of kind 0 in 0 bytes"),
            ("01 00 01 00 01 40 80 80 80 08", "a row of age 16777217"),
            ("01 00 01 00 01 ff 00", "1 bytes for 1 rows of dim 2"),
            ("02 00", "the count of elements does not end"),
            ("02 00 05", "the count of elements is 5, over 4"),
            ("02 00 04 42", "2 bytes for 4 elements"),
            ("02 00 01 00 01" + "00" * 5, "5 bytes for 1 floats"),
            ("03 00", "powersgd"),
        ],
    )
    def test_bytes_that_nobody_writes(self, text, reason):
        with pytest.raises(DamagedPayload, match=reason):
            decode(data(text), 2, 2)

    def test_elements_are_asked_of_elements_alone(self):
        with pytest.raises(DamagedPayload, match="form 0 where elements should be"):
            decode_elements(encode_rows(TWO_ROWS, PLAIN, None), 2, 2)

    @pytest.mark.parametrize("text", ["00 04", "01 04 80 80 80 04 42 ff", "02 00 80 80 80 04 42", "03 00 00 00 00 00"])
    def test_twenty_bytes_take_no_gigabytes(self, text):
        """The ids of a message may be few bytes, too, so its rows must fit a message as they are."""
        num_ids = MAX_MESSAGE_BYTES // 8
        with pytest.raises(DamagedPayload, match=f"{num_ids} rows of dim 65536 are over"):
            decode(data(text), num_ids, 65536)

    def test_every_cut_is_noticed(self):
        ages = np.array([5, 6], np.float32)
        for payload in (
            encode_rows(TWO_ROWS, INT8, None),
            encode_rows(TWO_ROWS, INT8, None, positions=np.array([1, 3]), ages=ages, num_ids=4),
            encode_elements(np.array([1, 5]), TWO_ROWS[0], (4, 2), BF16, None),
            encode_elements(np.array([1, 5]), TWO_ROWS[0], (4, 2), BF16, None, ages=np.array([2, 1, 3, 1], np.float32)),
        ):
            for end in range(payload.size):
                with pytest.raises(DamagedPayload):
                    decode(payload[:end], 2 if payload[0] == 0 else 4, 2)


CHOICES = [
    "fp16s",
    "bf16",
    "int8",
    "topk:0.01",
    "topk:0.01+fp16s",
    "topk:0.1+int8",
    "topk:0.5",
    "topk:1",
    "dgc:0.02+fp16s",
    "randomk:0.01+int8",
    "rows:0.1+int8",
    "rows:0.4",
    "rows:1",
]


def pushed(codec: CodecName, num_ids: int, dim: int, steps: int) -> tuple[int, float]:
    """Bytes and mean age of the payload of a push with error feedback of random gradients, the last of some."""
    values, rng = find_values(codec.values), np.random.default_rng(0)
    rows, ages, threshold = np.zeros((num_ids, dim), np.float32), np.zeros(num_ids, np.float32), Threshold()
    payload = np.empty(0, np.uint8)
    for step in range(steps):
        rows += rng.standard_normal(rows.shape).astype(np.float32)
        ages += 1
        if codec.select == "all":
            return encode_rows(rows, values, step).size, 1.0
        if codec.select == "rows":
            at = threshold.select(row_norms(rows), count_of(codec.number, num_ids))
            payload = encode_rows(rows[at], values, step, positions=at, ages=ages[at], num_ids=num_ids)
            rows[at], ages[at] = 0, 0
        else:
            count = count_of(codec.number, rows.size)
            drawn = step if codec.select == "randomk" else None
            at = threshold.select(rows.reshape(-1), count)
            if drawn is not None:
                at = random_positions(rows.size, count, drawn)
            told = ages if steps > 1 else None
            payload = encode_elements(at, rows.reshape(-1)[at], rows.shape, values, step, drawn=drawn, ages=told)
            rows.reshape(-1)[at] = 0
            ages[at // dim] = 0
    decoded = decode(payload, num_ids, dim)
    return payload.size, 1.0 if decoded.ages is None else float(decoded.ages.mean())


class TestPredicted:
    @pytest.mark.parametrize("text", CHOICES)
    @pytest.mark.parametrize(("num_ids", "dim"), [(10_000, 1), (1_000, 16), (3_000, 64)])
    def test_bytes_are_predicted_within_a_percent(self, text, num_ids, dim):
        codec = CodecName.parse(text)
        size, _ = pushed(codec, num_ids, dim, steps=30 if codec.select == "rows" else 1)
        assert predict_bytes(codec, num_ids, dim) == pytest.approx(size, rel=0.01)

    @pytest.mark.parametrize("text", ["topk:0.1", "topk:0.05+fp16s", "randomk:0.1+int8", "rows:0.1+int8"])
    @pytest.mark.parametrize(("num_ids", "dim"), [(10_000, 1), (1_000, 16), (3_000, 64)])
    def test_bytes_with_ages_are_predicted_from_their_mean(self, text, num_ids, dim):
        size, age = pushed(CodecName.parse(text), num_ids, dim, steps=30)
        # what has waited is not sent quite at random
        assert predict_bytes(CodecName.parse(text), num_ids, dim, age=age) == pytest.approx(size, rel=0.025)

    def test_positions_at_ratio_a_half_are_a_loss(self):
        """Against fp16 of everything; with int64 positions it was one against float32, too."""
        assert predict_bytes(CodecName.parse("topk:0.5"), 1000, 16) > predict_bytes(CodecName.parse("fp16s"), 1000, 16)
        for text in ("topk:1", "topk:0.99", "rows:1"):
            assert predict_bytes(CodecName.parse(text), 1000, 16) > predict_bytes(CodecName.parse("none"), 1000, 16)

    @pytest.mark.parametrize("select", ["topk", "rows", "randomk", "dgc"])
    @pytest.mark.parametrize("num_ids", [0, 1, 100])
    def test_of_a_tiny_ratio_one_row_or_element_is_sent(self, select, num_ids):
        least = predict_bytes(CodecName(select=select, number=1e-20), num_ids, 16)
        assert least == predict_bytes(CodecName(select=select, number=1e-4), num_ids, 16)

    def test_a_smaller_ratio_is_never_more_bytes(self):
        predicted = [
            predict_bytes(CodecName(select="topk", number=ratio), 1000, 16) for ratio in np.geomspace(1e-4, 1, 50)
        ]
        assert all(low <= high for low, high in pairwise(predicted[:-1]))

    def test_what_cannot_be_known_is_the_most_or_an_error(self):
        assert predict_bytes(CodecName.parse("delta"), 10, 4) == predict_bytes(CodecName.parse("none"), 10, 4) == 160
        with pytest.raises(ValueError, match="shapes of the parameters"):
            predict_bytes(CodecName.parse("powersgd:4"), 10, 4)


def test_a_row_of_floats_is_a_block_of_int8():
    assert flat.ROW == int8.BLOCK
