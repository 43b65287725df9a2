"""Ids as bytes: any int64, ascending."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.codec.ids import decode_ids, encode_even_ids, encode_ids
from embershard.proto.errors import DamagedPayload
from embershard.proto.routing import even_ids

LOW, HIGH = -(2**63), 2**63 - 1
IDS = st.one_of(
    st.sets(st.integers(LOW, HIGH), max_size=100),
    st.sets(st.integers(-300, 300), max_size=100),
    st.sets(st.sampled_from([LOW, LOW + 1, -1, 0, 1, HIGH - 1, HIGH])),
)


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def data(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.uint8)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (ids_of(), "00"),
        (ids_of(-2), "01 fe ff ff ff ff ff ff ff 00"),
        (ids_of(-3, 5, 6, 1000), "04 fd ff ff ff ff ff ff ff 08 0f 02 60 38"),
        (ids_of(LOW, HIGH), "02 00 00 00 00 00 00 00 80 41 fe ff ff ff ff ff ff ff"),
    ],
)
def test_golden_bytes(ids, text):
    assert encode_ids(ids).tobytes() == bytes.fromhex(text)
    assert decode_ids(data(text), len(ids)).tolist() == ids.tolist()


@given(IDS)
def test_all_of_int64_is_read_back(ids):
    ascending = ids_of(*sorted(ids))
    assert decode_ids(encode_ids(ascending), len(ids)).tolist() == ascending.tolist()


@given(IDS)
def test_they_never_take_more_than_raw_ones_and_a_few_bytes(ids):
    assert encode_ids(ids_of(*sorted(ids))).size <= 8 * len(ids) + 3


@given(st.integers(1, 200), st.integers(0, 2**64 - 1), st.data())
def test_even_ids_are_read_back_in_their_order(count, key, draw):
    places = ids_of(*sorted(draw.draw(st.sets(st.integers(0, count - 1)))))
    coded = encode_even_ids(places, count, key)
    assert decode_ids(coded, len(places)).tolist() == even_ids(count, key)[places].tolist()
    assert coded.size <= 17 + count // 7


def test_dense_ids_take_bits_and_hashed_ones_less_than_8_bytes():
    rng = np.random.default_rng(0)
    dense = np.unique(rng.integers(0, 100_000, 50_000))
    hashed = np.unique(rng.integers(LOW, HIGH, 100_000))
    assert 8 * encode_ids(dense).size / dense.size < 3
    assert encode_ids(hashed).size / hashed.size < 6.2


@pytest.mark.parametrize(
    ("text", "max_ids", "reason"),
    [
        ("", 9, "the count of ids does not end"),
        ("0a", 9, "the count of ids is 10, over 9"),
        ("ff ff ff ff ff ff ff ff ff 01", 9, "over 9"),
        ("01 00 00", 9, "ends in its first id"),
        ("02 00 00 00 00 00 00 00 00", 9, "ends where integers should begin"),
        ("00 05 00", 9, "ends in the key of its ids"),
        ("00 80 80 80 80 08 07 00 00 00 00 00 00 00 00 00", 9, "the number that ids are of is 2147483648, over"),
        ("00 0a 07 00 00 00 00 00 00 00 0a 42", 9, "the count of ids is 10, over 9"),
        ("00 05 07 00 00 00 00 00 00 00 01 00 01 00", 9, "1 bytes follow its 1 ids"),
        ("01 00 00 00 00 00 00 00 00 00 00", 9, "1 bytes follow its 1 ids"),
        ("02 ff ff ff ff ff ff ff 7f 40 00", 9, "leave the range of int64"),
        ("02 01 00 00 00 00 00 00 80 41 fe ff ff ff ff ff ff ff", 9, "leave the range of int64"),
    ],
)
def test_what_nobody_writes_is_damaged(text, max_ids, reason):
    with pytest.raises(DamagedPayload, match=reason):
        decode_ids(data(text), max_ids)
