"""Integers, positions and ids as bytes: against a plain reader written from docs/payloads.md."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.codec.ids import decode_ids, encode_even_ids, encode_ids
from embershard.proto.codec.integers import MAX_RICE, RAW, VARINT, decode_integers, encode_integers, read_varint, varint
from embershard.proto.codec.positions import EVERY, decode_positions, encode_positions
from embershard.proto.errors import DamagedPayload
from embershard.proto.routing import even_ids

U64 = 2**64 - 1
LOW, HIGH = -(2**63), 2**63 - 1
SIZES = [st.integers(0, top) for top in (0, 1, 9, 200, 2**20, 2**40, 2**60, U64)]
IDS = st.one_of(
    st.sets(st.integers(LOW, HIGH), max_size=100),
    st.sets(st.integers(-300, 300), max_size=100),
    st.sets(st.sampled_from([LOW, LOW + 1, -1, 0, 1, HIGH - 1, HIGH])),
)


def data(text):
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def plain_varint(source, at):
    value = shift = 0
    while True:
        byte = source[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def plain_integers(source, count):
    """The reference: bit by bit."""
    kind, body = source[0], source[1:]
    if kind == RAW:
        return [int.from_bytes(body[8 * i : 8 * i + 8], "little") for i in range(count)]
    values, at = [], 0
    if kind == VARINT:
        for _ in range(count):
            value, at = plain_varint(body, at)
            values.append(value)
        return values
    bits = int.from_bytes(body, "little")
    for _ in range(count):
        quotient = 0
        while not bits >> at & 1:
            quotient, at = quotient + 1, at + 1
        values.append(quotient << kind | bits >> at + 1 & (1 << kind) - 1)
        at += 1 + kind
    return values


def plain_positions(source, limit):
    count, at = plain_varint(source, 0)
    if source[at] == EVERY:
        return list(range(limit))
    positions, end = [], 0
    for gap in plain_integers(source[at:], count):
        positions.append(end + gap)
        end += gap + 1
    return positions


@pytest.mark.parametrize(
    ("encode", "decode", "numbers", "limit", "text"),
    [
        (encode_integers, decode_integers, [], None, "00"),
        (encode_integers, decode_integers, [0] * 8 + [300], None, "04 21 84 10 42 08 00 00 64"),
        (encode_integers, decode_integers, [U64], None, "41 ff ff ff ff ff ff ff ff"),
        (encode_positions, decode_positions, [], 0, "00 42"),
        (encode_positions, decode_positions, [], 9, "00 00"),
        (encode_positions, decode_positions, list(range(5)), 5, "05 42"),
        (encode_positions, decode_positions, list(range(0, 64, 2)), 64, "20 00" + "55" * 8),
        (encode_ids, decode_ids, [], None, "00"),
        (encode_ids, decode_ids, [-2], None, "01 fe ff ff ff ff ff ff ff 00"),
        (encode_ids, decode_ids, [LOW, HIGH], None, "02 00 00 00 00 00 00 00 80 41 fe ff ff ff ff ff ff ff"),
    ],
)
def test_numbers_have_their_golden_bytes(encode, decode, numbers, limit, text):
    array = np.array(numbers, np.uint64 if encode is encode_integers else np.int64)
    assert encode(array, *[] if limit is None else [limit]).tobytes() == bytes.fromhex(text)
    read = decode(data(text), len(numbers) if limit is None else limit)
    assert (read if decode is decode_ids else read[0]).tolist() == numbers


@given(st.one_of([st.lists(size, max_size=200) for size in SIZES]) | st.lists(st.one_of(SIZES), max_size=50))
def test_integers_are_read_by_the_reference_and_by_us_and_take_the_shortest_form(values):
    encoded = encode_integers(np.array(values, np.uint64))
    assert plain_integers(encoded.tobytes(), len(values)) == values
    tail = np.concatenate([encoded, data("ff 00 ff 00 ff 00 ff 00 ff")])  # what follows is not looked at
    decoded, used = decode_integers(tail, len(values))
    assert decoded.tolist() == values
    assert used == encoded.size
    rice = min(len(values) * (k + 1) + sum(v >> k for v in values) for k in range(MAX_RICE + 1))
    varints = sum(max(1, -(-v.bit_length() // 7)) for v in values)
    assert encoded.size == 1 + min(-(-rice // 8), varints, 8 * len(values))


@given(st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**32))
def test_positions_are_read_by_the_reference_and_by_us(limit, density, seed):
    positions = np.flatnonzero(np.random.default_rng(seed).random(limit) < density)
    encoded = encode_positions(positions, limit)
    assert plain_positions(encoded.tobytes(), limit) == positions.tolist()
    decoded, used = decode_positions(np.append(encoded, np.uint8(255)), limit)
    assert decoded.tolist() == positions.tolist()
    assert used == encoded.size


@given(st.sets(st.integers(0, 2**62), max_size=50))
def test_positions_may_be_far_apart(positions):
    ascending = np.array(sorted(positions), np.int64)
    assert np.array_equal(decode_positions(encode_positions(ascending, 2**62 + 1), 2**62 + 1)[0], ascending)


@given(IDS)
def test_all_of_int64_is_read_back_as_an_id_and_takes_no_more_than_raw_ones_and_a_few_bytes(ids):
    coded = encode_ids(np.array(sorted(ids), np.int64))
    assert decode_ids(coded, len(ids)).tolist() == sorted(ids)
    assert coded.size <= 8 * len(ids) + 3


@given(st.integers(1, 200), st.integers(0, U64), st.data())
def test_even_ids_are_read_back_in_their_order(count, key, draw):
    places = np.array(sorted(draw.draw(st.sets(st.integers(0, count - 1)))), np.int64)
    coded = encode_even_ids(places, count, key)
    assert decode_ids(coded, len(places)).tolist() == even_ids(count, key)[places].tolist()
    assert coded.size <= 17 + count // 7


@given(st.integers(0, U64))
def test_a_varint_is_read_back(value):
    assert read_varint(varint(value), U64, "it") == (value, max(1, -(-value.bit_length() // 7)))
    with pytest.raises(DamagedPayload, match=f"it is {value}, over {value - 1}"):
        read_varint(varint(value), value - 1, "it")


def test_positions_and_ids_take_the_bits_that_they_should():
    rng = np.random.default_rng(0)
    for density in (0.001, 0.1, 0.5, 0.9, 1.0):  # never more than a bit for each position that there is
        assert encode_positions(np.flatnonzero(rng.random(10_000) < density), 10_000).size <= 1 + 3 + 1250
    hundredth = np.flatnonzero(rng.random(1_000_000) < 0.01)  # Golomb's bound is 8.08
    assert 8.0 < 8 * encode_positions(hundredth, 1_000_000).size / hundredth.size < 8.2
    dense, hashed = np.unique(rng.integers(0, 100_000, 50_000)), np.unique(rng.integers(LOW, HIGH, 100_000))
    assert 8 * encode_ids(dense).size / dense.size < 3
    assert encode_ids(hashed).size / hashed.size < 6.2


# Of 40 integers with 56 bits each, the first leaves room for a quotient of 256 zeros, which no 64 bits hold.
LONG_QUOTIENT = (1 << 256 | sum(1 << 256 + 57 * i for i in range(1, 40))).to_bytes(-(-(256 + 57 * 40) // 8), "little")


@pytest.mark.parametrize(
    ("decode", "text", "limit", "reason"),
    [
        (decode_integers, "", 1, "ends where integers should begin"),
        (decode_integers, "42 00", 1, "kind 66"),
        (decode_integers, "00", 1, "1 integers of kind 0 in 0 bytes"),
        (decode_integers, "00 00", 1, "do not end"),
        (decode_integers, "01 cd", 4, "do not end"),
        (decode_integers, "01 cd 82", 4, "do not end"),  # a bit behind the last code
        (decode_integers, "40 ff ff", 2, "do not end"),
        (decode_integers, "40 ff ff ff ff ff ff ff ff ff 02", 1, "too large"),
        (decode_integers, "40 ff ff ff ff ff ff ff ff ff 81 00", 1, "too large"),
        (decode_integers, "41 00 00 00 00 00 00 00", 1, "in 7 bytes"),
        (decode_integers, "38" + LONG_QUOTIENT.hex(), 40, "too large"),
        *[(decode_integers, f"{kind:02x} ff", 2**60, "in 1 bytes") for kind in (0, MAX_RICE, VARINT, RAW)],
        (decode_positions, "", 9, "the count of positions does not end"),
        (decode_positions, "0a", 9, "the count of positions is 10, over 9"),
        (decode_positions, "03", 9, "ends where integers should begin"),
        (decode_positions, "03 42", 9, "every position is named, but there are 3, not 9"),
        (decode_positions, "01 00 06 04", 9, "do not end"),  # a bit behind the last position
        (decode_positions, "02 00 02 04", 9, "not 2 below 9"),
        (decode_positions, "02 40 05 03", 9, "not 2 below 9"),
        (decode_positions, "02 41" + "00" * 8 + "ff" * 8, 9, "not 2 below 9"),  # over 64 bits
        (decode_positions, "02 43 00", 9, "ends in the key"),
        (decode_positions, "02 44 00", 9, "kind 68"),
        (decode_ids, "", 9, "the count of ids does not end"),
        (decode_ids, "0a", 9, "the count of ids is 10, over 9"),
        (decode_ids, "01 00 00", 9, "ends in its first id"),
        (decode_ids, "02" + "00" * 8, 9, "ends where integers should begin"),
        (decode_ids, "00 05 00", 9, "ends in the key of its ids"),
        (decode_ids, "00 80 80 80 80 08 07" + "00" * 9, 9, "the number that ids are of is 2147483648, over"),
        (decode_ids, "00 0a 07 00 00 00 00 00 00 00 0a 42", 9, "the count of ids is 10, over 9"),
        (decode_ids, "00 05 07 00 00 00 00 00 00 00 01 00 01 00", 9, "1 bytes follow its 1 ids"),
        (decode_ids, "01" + "00" * 10, 9, "1 bytes follow its 1 ids"),
        (decode_ids, "02 ff ff ff ff ff ff ff 7f 40 00", 9, "leave the range of int64"),
        (decode_ids, "02 01 00 00 00 00 00 00 80 41 fe ff ff ff ff ff ff ff", 9, "leave the range of int64"),
    ],
)
def test_what_no_encoder_writes_is_damaged(decode, text, limit, reason):
    with pytest.raises(DamagedPayload, match=reason):
        decode(data(text), limit)
