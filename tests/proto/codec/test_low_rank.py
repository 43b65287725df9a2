"""Payload form 3: parts of matrices as two factors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from embershard.proto.codec.low_rank import MAX_PIECES, Chunk, Factors, PlainRun, decode_low_rank, encode_low_rank
from embershard.proto.codec.name import MAX_RANK
from embershard.proto.codec.values.registry import BUILTIN, find_values
from embershard.proto.errors import DamagedPayload

DIM = 8


def factors(position: int, elements: int, skip: int, columns: int, rank: int, seed: int = 0) -> Factors:
    random = np.random.default_rng(seed)
    rows = -(-(skip + elements) // columns)
    left, right = random.standard_normal((rank, rows)), random.standard_normal((rank, columns))
    return Factors(position, elements, skip, left.astype(np.float32), right.astype(np.float32))


def reference(piece: Factors) -> np.ndarray:
    matrix = piece.left.astype(np.float64).T @ piece.right.astype(np.float64)
    return matrix.reshape(-1)[piece.skip : piece.skip + piece.elements]


def test_golden_bytes():
    left, right = np.array([[2.0, 1.0]], np.float32), np.array([[1.0, -1.0, 0.5, 4.0]], np.float32)
    pieces: list[Chunk] = [Factors(1, 7, 1, left, right), PlainRun(9, np.array([3.0], np.float32))]
    payload = encode_low_rank(pieces, find_values("none"), None)
    assert payload.tobytes().hex() == (
        "0300" "02000000"
        "01000000" "07000000" "01000000" "04000000" "01000000"
        "09000000" "01000000" "00000000" "00000000" "00000000"
        "00000040" "0000803f" "0000803f" "000080bf" "0000003f" "00008040" "00004040"
    )  # fmt: skip
    rows = decode_low_rank(payload[2:], find_values("none"), 5, 2)
    assert rows.tolist() == [[0.0, -2.0], [1.0, 8.0], [1.0, -1.0], [0.5, 4.0], [0.0, 3.0]]


@pytest.mark.parametrize("name", BUILTIN)
def test_what_lies_between_the_pieces_is_zero(name):
    piece = PlainRun(DIM, np.ones(DIM, np.float32))
    values = find_values(name)
    rows = decode_low_rank(encode_low_rank([piece], values, 7)[2:], values, 3, DIM)
    assert rows[[0, 2]].tolist() == [[0.0] * DIM] * 2
    np.testing.assert_allclose(rows[1], 1.0, atol=0.02)


@given(st.integers(2, 20), st.integers(0, 19), st.integers(6, 300), st.integers(1, 4), st.integers(0, 3))
def test_a_run_of_a_matrix_is_the_product_of_its_factors(columns, skip, elements, rank, position):
    skip %= columns
    assume(rank * (-(-(skip + elements) // columns) + columns) < elements)
    piece = factors(position, elements, skip, columns, rank)
    values = find_values("none")
    num_ids = 40
    rows = decode_low_rank(encode_low_rank([piece], values, None)[2:], values, num_ids, DIM)
    found = rows.reshape(-1)[position : position + elements]
    np.testing.assert_allclose(found, reference(piece), rtol=1e-5, atol=1e-5)
    assert found.tobytes() == piece.product.tobytes()


@pytest.mark.parametrize(("name", "relative"), [("fp16s", 2**-10), ("bf16", 2**-7), ("int8", 0.03)])
def test_factors_travel_as_any_values(name, relative):
    values, piece = find_values(name), factors(0, 2000, 3, 50, 2)
    payload = encode_low_rank([piece], values, 5)
    rows = decode_low_rank(payload[2:], values, 250, DIM)
    error = np.abs(rows.reshape(-1) - reference(piece)).max()
    assert 0 < error < 3 * relative * 3 * 3  # each of two factors of up to 3 is off by the relative error
    assert payload.tobytes() == encode_low_rank([piece], values, 5).tobytes()


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
    values, columns = find_values("none"), 4 * MAX_RANK
    for rank in (MAX_RANK, MAX_RANK + 1):
        payload = encode_low_rank([factors(0, columns**2, 0, columns, rank)], values, None)[2:]
        if rank == MAX_RANK:
            assert decode_low_rank(payload, values, columns, columns).shape == (columns, columns)
        else:
            with pytest.raises(DamagedPayload, match="rank 257 for 1048576 elements"):
                decode_low_rank(payload, values, columns, columns)


def test_more_pieces_than_weights_have_are_refused():
    heads = np.zeros((MAX_PIECES + 1, 5), "<u4")
    heads[:, 0], heads[:, 1] = np.arange(len(heads)), 1
    floats = np.zeros(4 * len(heads), np.uint8)
    data = np.concatenate([np.array([len(heads)], "<u4").view(np.uint8), heads.reshape(-1).view(np.uint8), floats])
    with pytest.raises(DamagedPayload, match="65537 pieces, of at most 65536"):
        decode_low_rank(data, find_values("none"), len(heads), 1)


def test_pieces_that_overlap_are_refused():
    pieces = [PlainRun(0, np.ones(4, np.float32)), PlainRun(3, np.ones(4, np.float32))]
    with pytest.raises(DamagedPayload, match="elements 3 to 7 of 24, after 4"):
        decode_low_rank(encode_low_rank(pieces, find_values("none"), None)[2:], find_values("none"), 3, DIM)


@given(st.binary(max_size=200), st.sampled_from(sorted(BUILTIN)))
def test_any_bytes_give_rows_or_a_named_error(data, name):
    try:
        rows = decode_low_rank(np.frombuffer(data, np.uint8), find_values(name), 3, DIM)
    except DamagedPayload:
        return
    assert rows.shape == (3, DIM)


@given(st.data())
def test_a_payload_with_changed_bytes_gives_rows_or_a_named_error(data):
    payload = encode_low_rank([factors(0, 11, 1, 3, 1), PlainRun(12, np.ones(3, np.float32))], find_values("int8"), 1)[
        2:
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, payload.size - 1))] = data.draw(st.integers(0, 255))
    cut = payload[: data.draw(st.integers(0, payload.size))]
    for broken in (payload, cut):
        try:
            assert decode_low_rank(broken, find_values("int8"), 3, DIM).shape == (3, DIM)
        except DamagedPayload:
            continue


@pytest.mark.parametrize(("key", "alike"), [(7, False), (None, True)])
def test_equal_factors_are_rounded_by_other_random_numbers(key, alike):
    factor = np.random.default_rng(0).standard_normal((1, 100)).astype(np.float32)
    payload = encode_low_rank([Factors(0, 10_000, 0, factor, factor)], find_values("int8"), key)
    left, right = payload[-208:].reshape(2, -1)
    assert np.array_equal(left, right) == alike
