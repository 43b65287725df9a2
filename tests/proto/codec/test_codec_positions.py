"""Integers and positions as bytes: against a plain reader written from docs/payloads.md."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.codec.integers import MAX_RICE, RAW, VARINT, decode_integers, encode_integers, read_varint, varint
from embershard.proto.codec.positions import EVERY, decode_positions, encode_drawn, encode_positions
from embershard.proto.codec.select import random_positions
from embershard.proto.errors import DamagedPayload

U64 = 2**64 - 1


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def data(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def plain_varint(source: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = source[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def plain_integers(source: bytes, count: int) -> list[int]:
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


def plain_positions(source: bytes, limit: int) -> list[int]:
    count, at = plain_varint(source, 0)
    if source[at] == EVERY:
        return list(range(limit))
    positions, end = [], 0
    for gap in plain_integers(source[at:], count):
        positions.append(end + gap)
        end += gap + 1
    return positions


SIZES = [st.integers(0, top) for top in (0, 1, 9, 200, 2**20, 2**40, 2**60, U64)]


class TestIntegers:
    @pytest.mark.parametrize(
        ("values", "text"),
        [
            (words(), "00"),
            (words(0, 1, 5, 2), "01 cd 02"),
            (words(*[0] * 8, 300), "04 21 84 10 42 08 00 00 64"),
            (words(*[0] * 8, 2**40), "40 00 00 00 00 00 00 00 00 80 80 80 80 80 20"),
            (words(U64), "41 ff ff ff ff ff ff ff ff"),
        ],
    )
    def test_golden_bytes(self, values, text):
        assert encode_integers(values).tobytes() == bytes.fromhex(text)
        assert decode_integers(data(text), len(values))[0].tolist() == values.tolist()

    @given(st.one_of([st.lists(size, max_size=200) for size in SIZES]) | st.lists(st.one_of(SIZES), max_size=50))
    def test_what_is_written_is_read_by_the_reference_and_by_us(self, values):
        encoded = encode_integers(words(*values))
        assert plain_integers(encoded.tobytes(), len(values)) == values
        tail = np.concatenate([encoded, data("ff 00 ff 00 ff 00 ff 00 ff")])  # what follows is not looked at
        decoded, used = decode_integers(tail, len(values))
        assert decoded.tolist() == values
        assert used == encoded.size

    @given(st.one_of([st.lists(size, min_size=1, max_size=100) for size in SIZES]))
    def test_the_shortest_of_all_forms_is_taken(self, values):
        rice = min(len(values) * (k + 1) + sum(v >> k for v in values) for k in range(MAX_RICE + 1))
        varints = sum(max(1, -(-v.bit_length() // 7)) for v in values)
        assert encode_integers(words(*values)).size == 1 + min(-(-rice // 8), varints, 8 * len(values))

    @pytest.mark.parametrize(
        ("text", "count", "reason"),
        [
            ("", 1, "ends where integers should begin"),
            ("42 00", 1, "kind 66"),
            ("00", 1, "1 integers of kind 0 in 0 bytes"),
            ("00 00", 1, "do not end"),
            ("01 cd", 4, "do not end"),
            ("01 cd 82", 4, "do not end in 2 bytes, or are too large"),  # a bit behind the last code
            ("40 ff ff", 2, "do not end"),
            ("40 ff ff ff ff ff ff ff ff ff 02", 1, "too large"),
            ("40 ff ff ff ff ff ff ff ff ff 81 00", 1, "too large"),
            ("41 00 00 00 00 00 00 00", 1, "in 7 bytes"),
        ],
    )
    def test_what_nobody_writes_is_damaged(self, text, count, reason):
        with pytest.raises(DamagedPayload, match=reason):
            decode_integers(data(text), count)

    def test_a_quotient_of_more_than_64_bits_is_damaged(self):
        """Of 40 integers with 56 bits each, the first leaves room for 256 zeros."""
        bits = 1 << 256 | sum(1 << 256 + 57 * i for i in range(1, 40))
        block = np.frombuffer(bytes([56]) + bits.to_bytes(-(-(256 + 57 * 40) // 8), "little"), np.uint8)
        with pytest.raises(DamagedPayload, match="too large"):
            decode_integers(block, 40)

    def test_a_count_without_bytes_takes_no_memory(self):
        for kind in (0, MAX_RICE, VARINT, RAW):
            with pytest.raises(DamagedPayload, match="in 1 bytes"):
                decode_integers(np.array([kind, 255], np.uint8), 2**60)

    @given(st.integers(0, U64))
    def test_a_varint_is_read_back(self, value):
        assert read_varint(varint(value), U64, "it") == (value, max(1, -(-value.bit_length() // 7)))
        with pytest.raises(DamagedPayload, match=f"it is {value}, over {value - 1}"):
            read_varint(varint(value), value - 1, "it")


class TestPositions:
    @pytest.mark.parametrize(
        ("positions", "limit", "text"),
        [
            ([], 0, "00 42"),
            ([], 9, "00 00"),
            ([2, 3, 10, 40], 64, "04 03 15 8d 05"),
            (list(range(5)), 5, "05 42"),
            (list(range(0, 64, 2)), 64, "20 00" + "55" * 8),
        ],
    )
    def test_golden_bytes(self, positions, limit, text):
        assert encode_positions(np.array(positions, np.int64), limit).tobytes() == bytes.fromhex(text)
        assert decode_positions(data(text), limit)[0].tolist() == positions

    @given(st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**32))
    def test_what_is_written_is_read_by_the_reference_and_by_us(self, limit, density, seed):
        positions = np.flatnonzero(np.random.default_rng(seed).random(limit) < density)
        encoded = encode_positions(positions, limit)
        assert plain_positions(encoded.tobytes(), limit) == positions.tolist()
        decoded, used = decode_positions(np.append(encoded, np.uint8(255)), limit)
        assert decoded.tolist() == positions.tolist()
        assert used == encoded.size

    @given(st.sets(st.integers(0, 2**62), max_size=50))
    def test_positions_may_be_far_apart(self, positions):
        ascending = np.array(sorted(positions), np.int64)
        assert np.array_equal(decode_positions(encode_positions(ascending, 2**62 + 1), 2**62 + 1)[0], ascending)

    @given(st.sets(st.integers(0, 63), min_size=1))
    def test_codes_of_parameter_0_are_a_bitmap(self, positions):
        bitmap = np.packbits([i in positions for i in range(max(positions) + 1)], bitorder="little")
        decoded, _ = decode_positions(np.concatenate([varint(len(positions)), data("00"), bitmap]), 64)
        assert set(decoded.tolist()) == positions

    def test_they_never_take_more_than_a_bit_for_each_that_there_is(self):
        rng = np.random.default_rng(0)
        for density in (0.001, 0.1, 0.5, 0.9, 1.0):
            positions = np.flatnonzero(rng.random(10_000) < density)
            assert encode_positions(positions, 10_000).size <= 1 + 3 + 1250

    def test_at_ratio_a_hundredth_they_take_8_bits(self):
        """Golomb's bound is 8.08; as int32 they took 32."""
        positions = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < 0.01)
        assert 8.0 < 8 * encode_positions(positions, 1_000_000).size / positions.size < 8.2

    def test_drawn_ones_travel_as_their_key(self):
        encoded = encode_drawn(4, 7)
        assert encoded.tobytes() == bytes.fromhex("04 43 07 00 00 00 00 00 00 00")
        positions, used = decode_positions(np.append(encoded, np.uint8(1)), 1000)
        assert np.array_equal(positions, random_positions(1000, 4, 7))
        assert used == encoded.size

    @pytest.mark.parametrize(
        ("text", "limit", "reason"),
        [
            ("", 9, "the count of positions does not end"),
            ("80", 9, "the count of positions does not end"),
            ("0a", 9, "the count of positions is 10, over 9"),
            ("03", 9, "ends where integers should begin"),
            ("03 42", 9, "every position is named, but there are 3, not 9"),
            ("01 00 06 04", 9, "do not end in 2 bytes, or are"),  # a bit behind the last position
            ("02 00 02 04", 9, "not 2 below 9"),
            ("02 40 05 03", 9, "not 2 below 9"),
            ("02 41 00 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff", 9, "not 2 below 9"),  # over 64 bits
            ("02 43 00", 9, "ends in the key"),
            ("02 44 00", 9, "kind 68"),
        ],
    )
    def test_what_nobody_writes_is_damaged(self, text, limit, reason):
        with pytest.raises(DamagedPayload, match=reason):
            decode_positions(data(text), limit)
