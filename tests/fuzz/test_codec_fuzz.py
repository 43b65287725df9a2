"""Hostile payloads and ids: a value within what the message accounts for, or DamagedPayload, whatever comes.

`make fuzz` runs a thousand times as many.
"""

import itertools
import random
import tracemalloc
from contextlib import suppress

import numpy as np

from embershard.proto.codec.flat import flat_nbytes
from embershard.proto.codec.ids import decode_ids, encode_even_ids, encode_ids
from embershard.proto.codec.integers import decode_integers, encode_integers, read_varint, varint
from embershard.proto.codec.low_rank import Factors, PlainRun, encode_low_rank
from embershard.proto.codec.payload import MAX_AGE, decode, decode_elements, encode_elements, encode_rows
from embershard.proto.codec.positions import decode_positions, encode_drawn, encode_positions
from embershard.proto.codec.values.registry import BUILTIN
from embershard.proto.errors import DamagedPayload
from harness.fuzz import CASES, mutate, run_cases

VALUES = list(BUILTIN.values())


def floats(rng, *shape):
    """Any bits: NaN, infinities and subnormal numbers, too."""
    size = int(np.prod(shape))
    if rng.random() < 0.5:
        return np.frombuffer(rng.randbytes(4 * size), np.float32).reshape(shape)
    return np.array([rng.gauss(0, 1) for _ in range(size)], np.float32).reshape(shape)


def some_of(rng, limit):
    return np.array(sorted(rng.sample(range(limit), rng.randint(0, limit))), np.int64)


def low_rank(rng, size):
    pieces = []
    if size >= 24 and rng.random() < 0.7:
        pieces.append(Factors(0, rng.randint(21, 24), 0, floats(rng, 2, 4), floats(rng, 2, 6)))
        if size > 24:
            pieces.append(PlainRun(24, floats(rng, rng.randint(1, size - 24))))
    return encode_low_rank(pieces, rng.choice(VALUES), rng.getrandbits(64))


def valid_payload(rng, num_ids, dim):
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


def mutated(rng, valid):
    data = bytearray(valid.tobytes())
    for _ in range(rng.choice([1, 1, 2, 4])):
        # most of what decides lies at the front
        at = rng.randrange(min(len(data), rng.choice([3, 8, 30, 10**6])) + 1)
        if at < len(data) and rng.random() < 0.2:
            data[at] = rng.choice([0, 1, 2, 3, 4, 56, 64, 65, 66, 67, 127, 128, 255])
        else:
            mutate(rng, data, at, rng.choice([1, 1, 4, 20]))
    return np.frombuffer(bytes(data), np.uint8)


def random_bytes(rng, _=0):
    head = bytes([rng.randrange(6), rng.choice([0, 1, 2, 3, 4, 255])])
    return np.frombuffer(head[: rng.randint(0, 2)] + rng.randbytes(rng.randint(0, 60)), np.uint8)


def everything(rng, num_elements):
    """Few bytes for many elements: all positions in one, and a bit for each."""
    bits = BUILTIN["onebit"]
    every = encode_positions(np.arange(num_elements), num_elements)
    values = np.frombuffer(rng.randbytes(flat_nbytes(num_elements, bits)), np.uint8)
    return np.concatenate([np.array([2, bits.code], np.uint8), every, values])


def aged(rng, num_elements):
    """Few bytes for many rows of dim 1, or their elements: a bit for each position, each age and each value."""
    bits, at = BUILTIN["onebit"], np.flatnonzero(np.arange(num_elements) != rng.randrange(num_elements))
    head, ages = np.array([rng.choice([1, 4]), bits.code], np.uint8), encode_integers(np.zeros(at.size, np.uint64))
    values = np.zeros(bits.nbytes(at.size, 1), np.uint8)
    return np.concatenate([head, encode_positions(at, num_elements), ages, values])


def products(rng, num_elements):
    """Few bytes for large factors: of a high rank, or of a long row."""
    bits, columns, rank = BUILTIN["onebit"], rng.choice([1, 100, 10**6]), rng.choice([1, 200, 10**5])
    rows = -(-num_elements // columns)
    size = flat_nbytes(rank * rows, bits) + flat_nbytes(rank * columns, bits)
    head = np.array([1, 0, num_elements, 0, columns, rank], "<u4").view(np.uint8)
    return np.concatenate([np.array([3, bits.code], np.uint8), head, np.zeros(min(size, 2**24), np.uint8)])


def shape(rng):
    return rng.choice([0, 1, 2, 5, 40]), rng.choice([1, 2, 3, 16, 70])


def ascends(positions, limit):
    ends = positions.size == 0 or (positions[0] >= 0 and positions[-1] < limit)
    return ends and (positions[1:] > positions[:-1]).all()


def assert_read(payload, num_ids, dim):
    """It gives rows that a table can take, or is damaged."""
    decoded = decode(payload, num_ids, dim)
    count = num_ids if decoded.positions is None else decoded.positions.size
    assert (decoded.rows.shape, decoded.rows.dtype) == ((count, dim), np.float32)
    assert decoded.rows.flags.c_contiguous
    assert decoded.positions is None or ascends(decoded.positions, num_ids)
    if decoded.ages is not None:
        assert decoded.ages.shape == (count,)
        assert ((decoded.ages >= 1) & (decoded.ages <= MAX_AGE)).all()
    if payload[0] == 2:
        positions, values = decode_elements(payload, num_ids, dim)
        assert ascends(positions, num_ids * dim)
        assert values.shape == positions.shape


def test_mutated_payloads_give_rows_or_are_damaged():
    def check(rng):
        num_ids, dim = shape(rng)
        assert_read(mutated(rng, valid_payload(rng, num_ids, dim)), num_ids, dim)
        return True

    given = run_cases(check, DamagedPayload)
    assert CASES // 10 < given < CASES * 9 // 10, "the mutations reach the checks, and what is behind them"


def test_random_payloads_give_rows_or_are_damaged():
    run_cases(lambda rng: assert_read(random_bytes(rng), *shape(rng)), DamagedPayload)


def test_mutated_ids_give_ids_or_are_damaged():
    def check(rng):
        top = rng.choice([30, 1000, 2**40, 2**63 - 1])
        ids = np.array(sorted({rng.randint(-top, top) for _ in range(rng.randint(0, 30))}), np.int64)
        even = encode_even_ids(some_of(rng, 30), 30, rng.getrandbits(10))
        data = mutated(rng, even if rng.random() < 0.3 else encode_ids(ids))
        decoded = decode_ids(data, 40)
        assert np.unique(decoded).size == decoded.size <= 40
        if read_varint(data, 40, "the count")[0]:  # not even ones, whose 0 may take several bytes
            assert (decoded[1:] > decoded[:-1]).all()
            assert np.array_equal(decode_ids(encode_ids(decoded), 40), decoded)
        return True

    assert CASES // 10 < run_cases(check, DamagedPayload) < CASES * 9 // 10


def test_mutated_integers_and_positions_are_read_within_their_bytes():
    def check_positions(rng):
        limit = rng.choice([0, 1, 100, 10_000])
        at = some_of(rng, min(limit, 100))
        drawn = encode_drawn(at.size, rng.getrandbits(10))
        data = mutated(rng, drawn if rng.random() < 0.1 else encode_positions(at, limit))
        positions, used = decode_positions(data, limit)
        assert used <= data.size
        assert ascends(positions, limit)

    def check_integers(rng):
        values = np.array([rng.getrandbits(rng.choice([1, 8, 30, 64])) for _ in range(rng.randint(0, 20))], np.uint64)
        data, count = mutated(rng, encode_integers(values)), values.size + rng.choice([0, 0, 1, 10**15])
        integers, used = decode_integers(data, count)
        assert used <= data.size
        assert integers.size == count

    run_cases(check_positions, DamagedPayload)
    run_cases(check_integers, DamagedPayload)


def test_no_ids_take_more_memory_than_their_limit_accounts_for():
    def even(places, count):
        head = [np.array([0], np.uint8), varint(count), np.zeros(8, np.uint8)]
        return np.concatenate([*head, places])

    count = 20_000
    for data in (
        encode_ids(np.arange(count)),
        even(encode_drawn(count, 1), count + 1),
        even(encode_positions(np.arange(count), count + 1), count + 1),
        encode_even_ids(np.arange(count), count, 3),
    ):
        decode_ids(data, count)  # a first use imports modules
        for limit, peak in ((count, 6 * 8 * count), (count - 1, 0)):
            tracemalloc.start()
            try:
                with suppress(DamagedPayload):
                    decode_ids(data, limit)
                assert tracemalloc.get_traced_memory()[1] < peak + 20_000, (data.size, limit)
            finally:
                tracemalloc.stop()


def test_no_payload_takes_more_memory_than_its_message_accounts_for():
    makers = [random_bytes, everything, aged, products]
    for make, number in itertools.product(makers, range(20)):  # first uses import modules
        with suppress(DamagedPayload):
            decode(make(random.Random(number), 320), 20, 16)

    def check(rng):
        num_ids, dim = rng.choice([(2000, 16), (30_000, 1), (1, 30_000)])
        payload = rng.choice(makers)(rng, num_ids * dim)
        tracemalloc.start()
        try:
            decode(payload, num_ids, dim)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 4 * (4 * num_ids * dim + 8 * num_ids) + 20_000

    run_cases(check, DamagedPayload, CASES // 10)
