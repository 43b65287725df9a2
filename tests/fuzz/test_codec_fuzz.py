"""Hostile payloads and ids: a value within what the message accounts for, or DamagedPayload, whatever comes.

`make fuzz` runs a hundred times as many. Case n depends on n alone; a failure names it.
"""

import os
import random
import tracemalloc

import numpy as np

from embershard.proto.codec.flat import flat_nbytes
from embershard.proto.codec.ids import decode_ids, encode_even_ids, encode_ids
from embershard.proto.codec.integers import decode_integers, encode_integers, read_varint
from embershard.proto.codec.low_rank import Factors, PlainRun, encode_low_rank
from embershard.proto.codec.payload import MAX_AGE, decode, decode_elements, encode_elements, encode_rows
from embershard.proto.codec.positions import decode_positions, encode_drawn, encode_positions
from embershard.proto.codec.values.registry import BUILTIN
from embershard.proto.errors import DamagedPayload

CASES = int(os.environ.get("EMBERSHARD_FUZZ_FRAMES", "1000"))
VALUES = list(BUILTIN.values())


def floats(rng: random.Random, *shape: int) -> np.ndarray:
    """Any bits: NaN, infinities and subnormal numbers, too."""
    size = int(np.prod(shape))
    if rng.random() < 0.5:
        return np.frombuffer(rng.randbytes(4 * size), np.float32).reshape(shape)
    return np.array([rng.gauss(0, 1) for _ in range(size)], np.float32).reshape(shape)


def some_of(rng: random.Random, limit: int) -> np.ndarray:
    return np.array(sorted(rng.sample(range(limit), rng.randint(0, limit))), np.int64)


def low_rank(rng: random.Random, size: int) -> np.ndarray:
    pieces: list[PlainRun | Factors] = []
    if size >= 24 and rng.random() < 0.7:
        pieces.append(Factors(0, rng.randint(21, 24), 0, floats(rng, 2, 4), floats(rng, 2, 6)))
        if size > 24:
            pieces.append(PlainRun(24, floats(rng, rng.randint(1, size - 24))))
    return encode_low_rank(pieces, rng.choice(VALUES), rng.getrandbits(64))


def valid_payload(rng: random.Random, num_ids: int, dim: int) -> np.ndarray:
    values, key = rng.choice(VALUES), rng.choice([None, rng.getrandbits(64)])
    form = rng.randrange(4)
    if form == 0:
        return encode_rows(floats(rng, num_ids, dim), values, key)
    if form == 1:
        at = some_of(rng, num_ids)
        ages = np.array([rng.choice([1, 2, 30, MAX_AGE]) for _ in at], np.float32) if rng.random() < 0.7 else None
        return encode_rows(floats(rng, at.size, dim), values, key, positions=at, ages=ages, num_ids=num_ids)
    if form == 2:
        at = some_of(rng, num_ids * dim)
        drawn = rng.getrandbits(64) if rng.random() < 0.2 else None
        ages = np.array([rng.choice([1, 2, 30, MAX_AGE]) for _ in range(num_ids)], np.float32)
        told = ages if rng.random() < 0.5 else None
        return encode_elements(at, floats(rng, at.size), (num_ids, dim), values, key, drawn=drawn, ages=told)
    return low_rank(rng, num_ids * dim)


def mutated(rng: random.Random, valid: np.ndarray) -> np.ndarray:
    data = bytearray(valid.tobytes())
    for _ in range(rng.choice([1, 1, 2, 4])):
        # most of what decides lies at the front
        at = rng.randrange(min(len(data), rng.choice([3, 8, 30, 10**6])) + 1)
        size = rng.choice([1, 1, 4, 20])
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.choice([0, 1, 2, 3, 4, 56, 64, 65, 66, 67, 127, 128, 255])
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = rng.randbytes(size)
            case _:
                data[at : at + size] = rng.randbytes(size)
    return np.frombuffer(bytes(data), np.uint8)


def random_bytes(rng: random.Random, _: int = 0) -> np.ndarray:
    head = bytes([rng.randrange(6), rng.choice([0, 1, 2, 3, 4, 255])])
    return np.frombuffer(head[: rng.randint(0, 2)] + rng.randbytes(rng.randint(0, 60)), np.uint8)


def everything(rng: random.Random, num_elements: int) -> np.ndarray:
    """Few bytes for many elements: all positions in one, and a bit for each."""
    bits = BUILTIN["onebit"]
    every = encode_positions(np.arange(num_elements), num_elements)
    values = np.frombuffer(rng.randbytes(flat_nbytes(num_elements, bits)), np.uint8)
    return np.concatenate([np.array([2, bits.code], np.uint8), every, values])


def aged(rng: random.Random, num_elements: int) -> np.ndarray:
    """Few bytes for many rows of dim 1, or their elements: a bit for each position, each age and each value."""
    bits, at = BUILTIN["onebit"], np.flatnonzero(np.arange(num_elements) != rng.randrange(num_elements))
    head, ages = np.array([rng.choice([1, 4]), bits.code], np.uint8), encode_integers(np.zeros(at.size, np.uint64))
    values = np.zeros(bits.nbytes(at.size, 1), np.uint8)
    return np.concatenate([head, encode_positions(at, num_elements), ages, values])


def products(rng: random.Random, num_elements: int) -> np.ndarray:
    """Few bytes for large factors: of a high rank, or of a long row."""
    bits, columns, rank = BUILTIN["onebit"], rng.choice([1, 100, 10**6]), rng.choice([1, 200, 10**5])
    rows = -(-num_elements // columns)
    size = flat_nbytes(rank * rows, bits) + flat_nbytes(rank * columns, bits)
    head = np.array([1, 0, num_elements, 0, columns, rank], "<u4").view(np.uint8)
    return np.concatenate([np.array([3, bits.code], np.uint8), head, np.zeros(min(size, 2**24), np.uint8)])


def shape(rng: random.Random) -> tuple[int, int]:
    return rng.choice([0, 1, 2, 5, 40]), rng.choice([1, 2, 3, 16, 70])


def ascends(positions: np.ndarray, limit: int) -> bool:
    return positions.size == 0 or bool(
        positions[0] >= 0 and positions[-1] < limit and (positions[1:] > positions[:-1]).all()
    )


def read(payload: np.ndarray, num_ids: int, dim: int) -> bool:
    """Whether it gave rows; those are what a table can take."""
    try:
        decoded = decode(payload, num_ids, dim)
    except DamagedPayload:
        return False
    count = num_ids if decoded.positions is None else decoded.positions.size
    assert decoded.rows.shape == (count, dim)
    assert decoded.rows.dtype == np.float32
    assert decoded.rows.flags.c_contiguous
    if decoded.positions is not None:
        assert ascends(decoded.positions, num_ids)
    if decoded.ages is not None:
        assert decoded.ages.shape == (count,)
        assert ((decoded.ages >= 1) & (decoded.ages <= MAX_AGE)).all()
    if payload[0] == 2:
        positions, values = decode_elements(payload, num_ids, dim)
        assert ascends(positions, num_ids * dim)
        assert values.shape == positions.shape
    return True


def test_mutated_payloads_give_rows_or_are_damaged():
    given = 0
    for case in range(CASES):
        rng = random.Random(case)
        num_ids, dim = shape(rng)
        payload = mutated(rng, valid_payload(rng, num_ids, dim))
        try:
            given += read(payload, num_ids, dim)
        except Exception as error:
            raise AssertionError(f"case {case}: {num_ids} rows of dim {dim}: {payload.tobytes().hex()}") from error
    assert CASES // 10 < given < CASES * 9 // 10, "the mutations reach the checks, and what is behind them"


def test_random_payloads_give_rows_or_are_damaged():
    for case in range(CASES):
        rng = random.Random(case)
        num_ids, dim = shape(rng)
        payload = random_bytes(rng)
        try:
            read(payload, num_ids, dim)
        except Exception as error:
            raise AssertionError(f"case {case}: {num_ids} rows of dim {dim}: {payload.tobytes().hex()}") from error


def test_mutated_ids_give_ids_or_are_damaged():
    given = 0
    for case in range(CASES):
        rng = random.Random(case)
        top = rng.choice([30, 1000, 2**40, 2**63 - 1])
        ids = np.array(sorted({rng.randint(-top, top) for _ in range(rng.randint(0, 30))}), np.int64)
        is_even = rng.random() < 0.3
        places = np.flatnonzero([rng.random() < 0.5 for _ in range(30)])
        data = mutated(rng, encode_even_ids(places, 30, case) if is_even else encode_ids(ids))
        try:
            decoded = decode_ids(data, 40)
        except DamagedPayload:
            continue
        except Exception as error:
            raise AssertionError(f"case {case}: {data.tobytes().hex()}") from error
        given += 1
        assert decoded.size <= 40, f"case {case}"
        assert np.unique(decoded).size == decoded.size, f"case {case}"
        if read_varint(data, 40, "the count")[0]:  # not even ones, whose 0 may take several bytes
            assert (decoded[1:] > decoded[:-1]).all(), f"case {case}"
            assert np.array_equal(decode_ids(encode_ids(decoded), 40), decoded), f"case {case}"
    assert CASES // 10 < given < CASES * 9 // 10


def test_mutated_integers_and_positions_are_read_within_their_bytes():
    for case in range(CASES):
        rng = random.Random(case)
        limit = rng.choice([0, 1, 100, 10_000])
        at = some_of(rng, min(limit, 100))
        try:
            data = mutated(rng, encode_drawn(at.size, case) if rng.random() < 0.1 else encode_positions(at, limit))
            positions, used = decode_positions(data, limit)
            assert used <= data.size
            assert ascends(positions, limit)
        except DamagedPayload:
            pass
        except Exception as error:
            raise AssertionError(f"case {case}: limit {limit}: {data.tobytes().hex()}") from error
        values = np.array([rng.getrandbits(rng.choice([1, 8, 30, 64])) for _ in range(rng.randint(0, 20))], np.uint64)
        data, count = mutated(rng, encode_integers(values)), values.size + rng.choice([0, 0, 1, 10**15])
        try:
            integers, used = decode_integers(data, count)
            assert used <= data.size
            assert integers.size == count
        except DamagedPayload:
            pass
        except Exception as error:
            raise AssertionError(f"case {case}: {count} integers: {data.tobytes().hex()}") from error


def test_no_payload_takes_more_memory_than_its_message_accounts_for():
    for case in range(CASES // 10):
        rng = random.Random(case)
        num_ids, dim = rng.choice([(2000, 16), (30_000, 1), (1, 30_000)])
        payload = rng.choice([random_bytes, everything, aged, products])(rng, num_ids * dim)
        tracemalloc.start()
        try:
            decode(payload, num_ids, dim)
        except DamagedPayload:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 * (4 * num_ids * dim + 8 * num_ids) + 20_000, f"case {case}"
