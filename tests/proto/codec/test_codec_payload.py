"""Payloads: what is packed is what is read, and how many bytes that takes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.flat import decode_flat, encode_flat, flat_nbytes
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import MAX_AGE, decode, decode_elements, encode_elements, encode_rows
from embershard.proto.codec.predict import predict_bytes
from embershard.proto.codec.select import Threshold, count_of, random_positions, row_norms
from embershard.proto.codec.values.registry import BUILTIN, ValuesCodec, find_values
from embershard.proto.errors import DamagedPayload

PLAIN, BF16, INT8 = BUILTIN["none"], BUILTIN["bf16"], BUILTIN["int8"]
TWO_ROWS = np.array([[0.5, -1], [2, 0]], np.float32)

CHOICES = (
    "fp16s bf16 int8 topk:0.01 topk:0.01+fp16s topk:0.1+int8 topk:0.5 topk:1 dgc:0.02+fp16s randomk:0.01+int8 "
    "rows:0.1+int8 rows:0.4 rows:1"
).split()

codecs = pytest.mark.parametrize("values", BUILTIN.values(), ids=list(BUILTIN))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def through(values: ValuesCodec, rows: np.ndarray, key: int | None) -> np.ndarray:
    """What a values codec alone makes of the rows."""
    coded = np.empty(values.nbytes(*rows.shape), np.uint8)
    values.encode(rows, coded, key)
    out = np.empty_like(rows)
    values.decode(coded, out)
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
        assert np.array_equal(decoded.positions, positions)
        assert np.array_equal(decoded.rows, through(values, rows, 3))
        assert decoded.ages is None if ages is None else np.array_equal(decoded.ages, ages)

    def test_rows_of_all_ids_may_have_ages_up_to_the_largest(self):
        decoded = decode(encode_rows(TWO_ROWS, PLAIN, None, ages=np.array([3, 2.0**30], np.float32)), 2, 2)
        assert decoded.positions.tolist() == [0, 1]
        assert decoded.ages.tolist() == [3, MAX_AGE]

    def test_ages_of_one_push_take_no_bytes(self):
        ones, at = np.ones(3, np.float32), np.array([1, 2])
        assert np.array_equal(encode_rows(TWO_ROWS, PLAIN, None, ages=ones[:2]), encode_rows(TWO_ROWS, PLAIN, None))
        ones[2] = 7  # of a row without elements
        aged, plain = (encode_elements(at, TWO_ROWS[0], (3, 2), PLAIN, None, ages=told) for told in (ones, None))
        assert np.array_equal(aged, plain)


class TestElements:
    @codecs
    @given(st.integers(0, 30), st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**32))
    def test_elements_come_back_in_their_rows(self, values, num_ids, dim, share, seed):
        at = np.flatnonzero(np.random.default_rng(seed).random(num_ids * dim) < share)
        payload = encode_elements(at, normal(at.size, seed=seed), (num_ids, dim), values, 3)
        positions, sent = decode_elements(payload, num_ids, dim)
        assert np.array_equal(positions, at)
        want = np.zeros(num_ids * dim, np.float32)
        want[at] = sent
        decoded = decode(payload, num_ids, dim)
        assert np.array_equal(decoded.positions, np.unique(at // dim))
        assert np.array_equal(decoded.rows, want.reshape(num_ids, dim)[decoded.positions])

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

    @codecs
    def test_signs_are_sent(self, values):
        """To send the largest magnitudes, as topk(abs(g)) does, loses them."""
        gradient = normal(160)
        at = Threshold().select(gradient, 30)
        _, sent = decode_elements(encode_elements(at, gradient[at], (20, 8), values, 1), 20, 8)
        assert np.array_equal(np.sign(sent), np.sign(gradient[at]))
        assert (sent < 0).any()

    def test_drawn_positions_cost_a_key(self):
        at, floats = random_positions(1000, 100, 9), normal(100)
        payload = encode_elements(at, floats, (10, 100), BF16, None, drawn=9)
        assert payload.size == 2 + 1 + 1 + 8 + 200
        positions, sent = decode_elements(payload, 10, 100)
        assert np.array_equal(positions, at)
        assert np.array_equal(sent, through(BF16, floats[None], None)[0])

    @codecs
    def test_a_row_that_is_not_finite_stays_alone(self, values):
        """A shard leaves out and counts such a row, and applies the others."""
        floats = np.ones(256, np.float32)
        floats[200] = np.nan
        rows = decode(encode_elements(np.arange(256), floats, (256, 1), values, 1), 256, 1).rows
        assert not np.isfinite(rows[200]).any()
        if values.name != "onebit":  # whose blocks are longer
            assert np.isfinite(rows[:192]).all()


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
        floats = normal(60)
        coded = encode_flat(np.concatenate([floats, np.zeros(4, np.float32), floats]), INT8, 7)
        assert not np.array_equal(coded[:60], coded[66:126])

    def test_other_sizes_are_damaged(self):
        with pytest.raises(DamagedPayload):
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
    def test_what_no_encoder_writes_is_damaged(self, text, reason):
        with pytest.raises(DamagedPayload, match=reason):
            decode(np.frombuffer(bytes.fromhex(text), np.uint8), 2, 2)

    def test_elements_are_asked_of_elements_alone(self):
        with pytest.raises(DamagedPayload):
            decode_elements(encode_rows(TWO_ROWS, PLAIN, None), 2, 2)

    @pytest.mark.parametrize("text", ["00 04", "01 04 80 80 80 04 42 ff", "02 00 80 80 80 04 42", "03 00 00 00 00 00"])
    def test_twenty_bytes_take_no_gigabytes(self, text):
        """The ids of a message may be few bytes, too, so its rows must fit a message as they are."""
        num_ids = MAX_MESSAGE_BYTES // 8
        with pytest.raises(DamagedPayload, match=f"{num_ids} rows of dim 65536 are over"):
            decode(np.frombuffer(bytes.fromhex(text), np.uint8), num_ids, 65536)

    def test_every_cut_is_noticed(self):
        at, ages = np.array([1, 5]), np.array([2, 6, 3, 1], np.float32)
        for num_ids, payload in (
            (2, encode_rows(TWO_ROWS, INT8, None)),
            (4, encode_rows(TWO_ROWS, INT8, None, positions=np.array([1, 3]), ages=ages[:2], num_ids=4)),
            (4, encode_elements(at, TWO_ROWS[0], (4, 2), BF16, None)),
            (4, encode_elements(at, TWO_ROWS[0], (4, 2), BF16, None, ages=ages)),
        ):
            for end in range(payload.size):
                with pytest.raises(DamagedPayload):
                    decode(payload[:end], num_ids, 2)


def pushed(codec: CodecName, num_ids: int, dim: int, steps: int) -> tuple[int, float]:
    """Bytes and mean age of the payload of a push with error feedback of random gradients, the last of some."""
    values, rng = find_values(codec.values), np.random.default_rng(0)
    rows, ages, threshold = np.zeros((num_ids, dim), np.float32), np.zeros(num_ids, np.float32), Threshold()
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
            count, drawn = count_of(codec.number, rows.size), step if codec.select == "randomk" else None
            is_drawn = drawn is not None
            at = random_positions(rows.size, count, step) if is_drawn else threshold.select(rows.reshape(-1), count)
            told = ages if steps > 1 else None
            payload = encode_elements(at, rows.reshape(-1)[at], rows.shape, values, step, drawn=drawn, ages=told)
            rows.reshape(-1)[at] = 0
            ages[at // dim] = 0
    decoded = decode(payload, num_ids, dim)
    return payload.size, 1.0 if decoded.ages is None else float(decoded.ages.mean())


def predicted(text: str, num_ids: int = 1000, dim: int = 16) -> float:
    return predict_bytes(CodecName.parse(text), num_ids, dim)


@pytest.mark.parametrize(("num_ids", "dim"), [(10_000, 1), (1_000, 16), (3_000, 64)])
class TestPredicted:
    @pytest.mark.parametrize("text", CHOICES)
    def test_bytes_are_predicted_within_a_percent(self, text, num_ids, dim):
        size, _ = pushed(CodecName.parse(text), num_ids, dim, steps=30 if text.startswith("rows") else 1)
        assert predicted(text, num_ids, dim) == pytest.approx(size, rel=0.01)

    @pytest.mark.parametrize("text", ["topk:0.1", "topk:0.05+fp16s", "randomk:0.1+int8", "rows:0.1+int8"])
    def test_bytes_with_ages_are_predicted_from_their_mean(self, text, num_ids, dim):
        size, age = pushed(CodecName.parse(text), num_ids, dim, steps=30)
        # what has waited is not sent quite at random
        assert predict_bytes(CodecName.parse(text), num_ids, dim, age=age) == pytest.approx(size, rel=0.025)


def test_positions_at_ratio_a_half_are_a_loss():
    """Against fp16 of everything; with int64 positions it was one against float32, too."""
    assert predicted("topk:0.5") > predicted("fp16s")
    assert min(predicted("topk:1"), predicted("topk:0.99"), predicted("rows:1")) > predicted("none")


@pytest.mark.parametrize("select", ["topk", "rows", "randomk", "dgc"])
def test_a_smaller_ratio_is_never_more_bytes_and_of_a_tiny_one_a_row_or_an_element_is_sent(select):
    bytes_ = [predicted(f"{select}:{ratio:.12f}") for ratio in np.geomspace(1e-4, 0.9, 50)]
    assert all(low <= high for low, high in pairwise(bytes_))
    for num_ids in (0, 1, 100):
        assert predicted(f"{select}:1e-20", num_ids) == predicted(f"{select}:1e-4", num_ids)


def test_what_cannot_be_known_is_the_most_or_an_error():
    assert predicted("delta", 10, 4) == predicted("none", 10, 4) == 160
    with pytest.raises(ValueError, match="shapes of the parameters"):
        predicted("powersgd:4")
