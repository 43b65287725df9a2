"""Payload form 3: parts of matrices as two factors. tests/fuzz reads damaged ones."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from embershard.proto.codec.low_rank import MAX_PIECES, Factors, PlainRun, decode_low_rank, encode_low_rank
from embershard.proto.codec.name import MAX_RANK
from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import DamagedPayload

DIM = 8


def factors(position, elements, skip, columns, rank) -> Factors:
    random, rows = np.random.default_rng(0), -(-(skip + elements) // columns)
    left, right = random.standard_normal((rank, rows)), random.standard_normal((rank, columns))
    return Factors(position, elements, skip, left.astype(np.float32), right.astype(np.float32))


def reference(piece) -> np.ndarray:
    matrix = piece.left.astype(np.float64).T @ piece.right.astype(np.float64)
    return matrix.reshape(-1)[piece.skip : piece.skip + piece.elements]


def ones(position, count) -> PlainRun:
    return PlainRun(position, np.ones(count, np.float32))


def through(pieces, num_ids, dim=DIM, name="none", key=None) -> np.ndarray:
    """The rows that pieces become on the wire."""
    values = find_values(name)
    return decode_low_rank(encode_low_rank(pieces, values, key)[2:], values, num_ids, dim)


def test_golden_bytes():
    left, right = np.array([[2.0, 1.0]], np.float32), np.array([[1.0, -1.0, 0.5, 4.0]], np.float32)
    pieces = [Factors(1, 7, 1, left, right), PlainRun(9, np.array([3.0], np.float32))]
    assert encode_low_rank(pieces, find_values("none"), None).tobytes().hex() == (
        "0300" "02000000"
        "01000000" "07000000" "01000000" "04000000" "01000000"
        "09000000" "01000000" "00000000" "00000000" "00000000"
        "00000040" "0000803f" "0000803f" "000080bf" "0000003f" "00008040" "00004040"
    )  # fmt: skip
    assert through(pieces, 5, 2).tolist() == [[0.0, -2.0], [1.0, 8.0], [1.0, -1.0], [0.5, 4.0], [0.0, 3.0]]


@given(st.integers(2, 20), st.integers(0, 19), st.integers(6, 300), st.integers(1, 4), st.integers(0, 3))
def test_a_run_of_a_matrix_is_the_product_of_its_factors(columns, skip, elements, rank, position):
    skip %= columns
    assume(rank * (-(-(skip + elements) // columns) + columns) < elements)
    piece = factors(position, elements, skip, columns, rank)
    found = through([piece], 40).reshape(-1)[position : position + elements]
    np.testing.assert_allclose(found, reference(piece), rtol=1e-5, atol=1e-5)
    assert found.tobytes() == piece.product.tobytes()


@pytest.mark.parametrize(("name", "relative"), [("fp16s", 2**-10), ("bf16", 2**-7), ("int8", 0.03)])
def test_factors_travel_as_any_values(name, relative):
    piece = factors(0, 2000, 3, 50, 2)
    error = np.abs(through([piece], 250, name=name, key=5).reshape(-1) - reference(piece)).max()
    assert 0 < error < 3 * relative * 3 * 3  # each of two factors of up to 3 is off by the relative error


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ((0, 25, 0, 0, 0), "elements 0 to 25 of 24, after 0"),
        ((30, 1, 0, 0, 0), "elements 30 to 31 of 24"),
        ((0, 0, 0, 0, 0), "elements 0 to 0 of 24"),
        ((0, 4, 3, 3, 1), "rank 1 with 3 columns, of which 3 are skipped"),
        ((0, 4, 0, 0, 1), "rank 1 with 0 columns"),
        ((0, 4, 1, 0, 0), "rank 0 with 0 columns, of which 1"),
        ((0, 24, 0, 2**32 - 1, 2**32 - 1), "rank 4294967295 for 24 elements of 1 rows of 4294967295 columns"),
        ((0, 18, 0, 3, 2), "rank 2 for 18 elements of 6 rows of 3 columns"),
        ((0, 1, 0, 2**28, 1), "rank 1 for 1 elements of 1 rows of 268435456 columns"),
        ((0, 24, 0, 6, 2), "bytes, not 104"),
        ((0, 4, 0, 0, 0), "bytes, not 40"),
    ],
)
def test_a_head_that_cannot_be_is_refused(piece, reason):
    data = np.array([1, *piece], "<u4").view(np.uint8)
    with pytest.raises(DamagedPayload, match=reason):
        decode_low_rank(data, find_values("none"), 3, DIM)


def test_a_rank_over_the_largest_is_refused():
    """Multiplying is work that a few bytes ask for."""
    columns = 4 * MAX_RANK
    at_limit, over = (factors(0, columns**2, 0, columns, rank) for rank in (MAX_RANK, MAX_RANK + 1))
    assert through([at_limit], columns, columns).shape == (columns, columns)
    with pytest.raises(DamagedPayload, match="rank 257 for 1048576 elements"):
        through([over], columns, columns)


def test_more_pieces_than_weights_have_and_pieces_that_overlap_are_refused():
    heads = np.zeros((MAX_PIECES + 1, 5), "<u4")
    heads[:, 0], heads[:, 1] = np.arange(len(heads)), 1
    data = np.concatenate([np.array([len(heads)], "<u4"), heads.reshape(-1), heads[:, 0]]).view(np.uint8)
    with pytest.raises(DamagedPayload, match="65537 pieces, of at most 65536"):
        decode_low_rank(data, find_values("none"), len(heads), 1)
    with pytest.raises(DamagedPayload, match="elements 3 to 7 of 24, after 4"):
        through([ones(0, 4), ones(3, 4)], 3)


@pytest.mark.parametrize(("key", "alike"), [(7, False), (None, True)])
def test_equal_factors_are_rounded_by_other_random_numbers(key, alike):
    factor = np.random.default_rng(0).standard_normal((1, 100)).astype(np.float32)
    payload = encode_low_rank([Factors(0, 10_000, 0, factor, factor)], find_values("int8"), key)
    left, right = payload[-208:].reshape(2, -1)
    assert np.array_equal(left, right) == alike
