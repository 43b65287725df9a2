"""Payloads: what is packed is what is read, and how many bytes that takes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.flat import decode_flat, encode_flat, flat_nbytes
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import MAX_AGE, decode, decode_elements, encode_elements, encode_rows
from embershard.proto.codec.predict import predict_bytes
from embershard.proto.codec.select import Threshold, count_of, random_positions, row_norms
from embershard.proto.codec.values.registry import BUILTIN, find_values
from embershard.proto.errors import DamagedPayload

PLAIN, BF16, INT8 = BUILTIN["none"], BUILTIN["bf16"], BUILTIN["int8"]
TWO_ROWS = np.array([[0.5, -1], [2, 0]], np.float32)

codecs = pytest.mark.parametrize("values", BUILTIN.values(), ids=list(BUILTIN))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def through(values, rows, key):
    """What a values codec alone makes of the rows."""
    coded, out = np.empty(values.nbytes(*rows.shape), np.uint8), np.empty_like(rows)
    values.encode(rows, coded, key)
    values.decode(coded, out)
    return out


@codecs
@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 16), (3, 100)])
def test_all_rows_are_what_their_codec_makes_of_them(values, key, shape):
    rows = normal(*shape)
    payload = encode_rows(rows, values, key)
    decoded = decode(payload, *shape)
    assert decoded.positions is decoded.ages is None
    assert np.array_equal(decoded.rows, through(values, rows, key))
    assert payload.size == 2 + values.nbytes(*shape)


@codecs
@settings(max_examples=50)
@given(st.sets(st.integers(0, 40)), st.booleans(), st.integers(1, 20))
def test_some_rows_come_back_with_positions_and_ages(values, chosen, aged, dim):
    positions = np.array(sorted(chosen), np.int64)
    rows = normal(positions.size, dim)
    ages = (positions % 7 * 1000 + 2).astype(np.float32) if aged and chosen else None
    decoded = decode(encode_rows(rows, values, 3, positions=positions, ages=ages, num_ids=41), 41, dim)
    assert np.array_equal(decoded.positions, positions)
    assert np.array_equal(decoded.rows, through(values, rows, 3))
    assert decoded.ages is None if ages is None else np.array_equal(decoded.ages, ages)


def test_rows_of_all_ids_may_have_ages_up_to_the_largest_and_those_of_one_push_take_no_bytes():
    decoded = decode(encode_rows(TWO_ROWS, PLAIN, None, ages=np.array([3, 2.0**30], np.float32)), 2, 2)
    assert (decoded.positions.tolist(), decoded.ages.tolist()) == ([0, 1], [3, MAX_AGE])
    ones, at = np.ones(3, np.float32), np.array([1, 2])
    assert np.array_equal(encode_rows(TWO_ROWS, PLAIN, None, ages=ones[:2]), encode_rows(TWO_ROWS, PLAIN, None))
    ones[2] = 7  # of a row without elements
    aged, plain = (encode_elements(at, TWO_ROWS[0], (3, 2), PLAIN, None, ages=told) for told in (ones, None))
    assert np.array_equal(aged, plain)


@codecs
@settings(max_examples=50)
@given(st.integers(0, 30), st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**32))
def test_elements_come_back_in_their_rows(values, num_ids, dim, share, seed):
    at = np.flatnonzero(np.random.default_rng(seed).random(num_ids * dim) < share)
    floats, want = normal(at.size, seed=seed), np.zeros(num_ids * dim, np.float32)
    payload = encode_elements(at, floats, (num_ids, dim), values, 3)
    positions, sent = decode_elements(payload, num_ids, dim)
    assert np.array_equal(positions, at)
    assert (sent * floats >= 0).all()  # signs are sent, though magnitudes are selected
    want[at] = sent
    decoded = decode(payload, num_ids, dim)
    assert np.array_equal(decoded.positions, np.unique(at // dim))
    assert np.array_equal(decoded.rows, want.reshape(num_ids, dim)[decoded.positions])


@given(st.integers(1, 30), st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**32), st.booleans())
def test_elements_come_back_with_the_ages_of_their_rows(num_ids, dim, share, seed, is_drawn):
    rng, shape = np.random.default_rng(seed), (num_ids, dim)
    at = np.flatnonzero(rng.random(num_ids * dim) < share)
    drawn = seed if is_drawn else None
    if is_drawn:
        at = random_positions(num_ids * dim, at.size, seed)
    ages, floats = rng.integers(1, 9, num_ids).astype(np.float32), normal(at.size, seed=seed)
    aged = decode(encode_elements(at, floats, shape, BF16, 3, drawn=drawn, ages=ages), *shape)
    plain = decode(encode_elements(at, floats, shape, BF16, 3), *shape)
    assert np.array_equal(aged.positions, plain.positions)
    assert np.array_equal(aged.rows, plain.rows)
    want = ages[np.unique(at // dim)]
    assert aged.ages is None if (want == 1).all() else np.array_equal(aged.ages, want)


def test_drawn_positions_cost_a_key():
    at, floats = random_positions(1000, 100, 9), normal(100)
    payload = encode_elements(at, floats, (10, 100), BF16, None, drawn=9)
    assert payload.size == 2 + 1 + 1 + 8 + 200
    assert np.array_equal(decode_elements(payload, 10, 100)[0], at)


@codecs
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_floats_travel_as_rows_of_64(values, size):
    floats, out, whole = normal(size), np.empty(size, np.float32), size // 64 * 64
    coded = encode_flat(floats, values, None)
    decode_flat(coded, values, out)
    parts = floats[:whole].reshape(-1, 64), floats[None, whole:]
    assert np.array_equal(out, np.concatenate([through(values, part, None).reshape(-1) for part in parts]))
    assert coded.size == flat_nbytes(size, values)


def test_the_rest_of_floats_is_rounded_by_other_random_numbers_and_other_sizes_are_damaged():
    floats = normal(60)
    coded = encode_flat(np.concatenate([floats, np.zeros(4, np.float32), floats]), INT8, 7)
    assert not np.array_equal(coded[:60], coded[66:126])
    with pytest.raises(DamagedPayload):
        decode_flat(np.zeros(11, np.uint8), PLAIN, np.empty(3, np.float32))


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
def test_what_no_encoder_writes_is_damaged(text, reason):
    with pytest.raises(DamagedPayload, match=reason):
        decode(np.frombuffer(bytes.fromhex(text), np.uint8), 2, 2)


def test_elements_are_asked_of_elements_alone():
    with pytest.raises(DamagedPayload):
        decode_elements(encode_rows(TWO_ROWS, PLAIN, None), 2, 2)


@pytest.mark.parametrize("text", ["00 04", "01 04 80 80 80 04 42 ff", "02 00 80 80 80 04 42", "03 00 00 00 00 00"])
def test_twenty_bytes_take_no_gigabytes(text):
    """The ids of a message may be few bytes, too, so its rows must fit a message as they are."""
    num_ids = MAX_MESSAGE_BYTES // 8
    with pytest.raises(DamagedPayload, match=f"{num_ids} rows of dim 65536 are over"):
        decode(np.frombuffer(bytes.fromhex(text), np.uint8), num_ids, 65536)


def test_every_cut_is_noticed():
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


def pushed(codec, num_ids, dim, steps):
    """Bytes and mean age of the payload of a push with error feedback of random gradients, the last of some."""
    values, rng = find_values(codec.values), np.random.default_rng(0)
    rows, ages, threshold = np.zeros((num_ids, dim), np.float32), np.zeros(num_ids, np.float32), Threshold()
    flat = rows.reshape(-1)
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
            at = threshold.select(flat, count) if drawn is None else random_positions(rows.size, count, step)
            told = ages if steps > 1 else None
            payload = encode_elements(at, flat[at], rows.shape, values, step, drawn=drawn, ages=told)
            flat[at], ages[at // dim] = 0, 0
    decoded = decode(payload, num_ids, dim)
    return payload.size, 1.0 if decoded.ages is None else float(decoded.ages.mean())


def predicted(text, num_ids=1000, dim=16):
    return predict_bytes(CodecName.parse(text), num_ids, dim)


sizes = pytest.mark.parametrize(("num_ids", "dim"), [(10_000, 1), (1_000, 16), (3_000, 64)])


@sizes
@pytest.mark.parametrize(
    "text",
    "fp16s bf16 int8 topk:0.01 topk:0.01+fp16s topk:0.1+int8 topk:0.5 topk:1 dgc:0.02+fp16s randomk:0.01+int8 "
    "rows:0.1+int8 rows:0.4 rows:1".split(),
)
def test_bytes_are_predicted_within_a_percent(text, num_ids, dim):
    size, _ = pushed(CodecName.parse(text), num_ids, dim, steps=30 if text.startswith("rows") else 1)
    assert predicted(text, num_ids, dim) == pytest.approx(size, rel=0.01)


@sizes
@pytest.mark.parametrize("text", ["topk:0.1", "topk:0.05+fp16s", "randomk:0.1+int8", "rows:0.1+int8"])
def test_bytes_with_ages_are_predicted_from_their_mean(text, num_ids, dim):
    size, age = pushed(CodecName.parse(text), num_ids, dim, steps=30)
    # what has waited is not sent quite at random
    assert predict_bytes(CodecName.parse(text), num_ids, dim, age=age) == pytest.approx(size, rel=0.025)


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
