"""docs/payloads.json: payloads, and what a client in another language has to read in them and to write.

`python tests/proto/codec/test_payload_vectors.py` writes the file anew; the tests say where it differs.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from embershard.proto.codec.ids import decode_ids, encode_even_ids, encode_ids
from embershard.proto.codec.integers import decode_integers, encode_integers
from embershard.proto.codec.low_rank import Factors, PlainRun, encode_low_rank
from embershard.proto.codec.payload import decode, encode_elements, encode_rows
from embershard.proto.codec.positions import decode_positions, encode_drawn, encode_positions
from embershard.proto.codec.select import random_positions
from embershard.proto.codec.values.registry import BUILTIN
from embershard.proto.errors import DamagedPayload
from embershard.proto.routing import even_ids_at

FILE = Path(__file__).resolve().parents[3] / "docs" / "payloads.json"
LOW, HIGH, U64 = -(2**63), 2**63 - 1, 2**64 - 1
MANY = 10_000  # more ids than any vector has

INTEGERS = [
    [], [0], [1], [U64], [0, 1, 5, 2], [0] * 20, [0] * 8 + [2**40], [2**63, U64, 2**62 + 1], [7, 300, 2, 90, 55, 1000],
    [2**33 + 5, 2**34, 2**33], [2**57, 3 * 2**56, 2**57 + 1],
]  # fmt: skip
IDS = [
    [], [0], [-1], [LOW], [HIGH], [LOW, HIGH], [LOW, -1, 0, 1, HIGH], [-3, 5, 6, 1000], list(range(-2, 18)),
    [-7646118215131834000, -4611686018427387905, 1234567890123456789, 8070450532247928832],
]  # fmt: skip
EVEN_IDS = [
    (5, 7, [0, 2, 3]),
    (1, 0, [0]),
    (3, U64, []),
    (4, 0x47E6D0F54373DB35, [0, 1, 2, 3]),
    (2**30, 9, [0, 2**30 - 1]),
]
POSITIONS = [(0, []), (5, []), (1, [0]), (5, [0, 1, 2, 3, 4]), (5, [4]), (64, [2, 3, 10, 40]), (2**24, [0, 2**24 - 1])]
DRAWN = [(12, 3, 7), (5, 0, 7), (5, 5, U64), (1000, 9, 0)]

MOST, LEAST, NORMAL = 3.4028234663852886e38, 1e-45, 1.1754943508222875e-38  # of float32; NORMAL: its least normal one
ROWS = [
    np.zeros((0, 3)),
    np.array([[0.0]]),
    np.array([[-2.5]]),
    np.array([[0.5, -1], [2, 0]]),
    np.array([[0.0, -0.0, 0.0], [LEAST, -3 * LEAST, 0], [NORMAL, -NORMAL / 2, NORMAL / 3], [1e-20, 1e20, -1]]),
    np.array([[MOST, -MOST / 4, 1.0], [65504, 65520, -1e-8], [127, 0.5, -1.5], [1.00390625, 1.01171875, -1.0]]),
    np.array([[1.0, np.inf], [np.nan, 2], [3, -np.inf], [4, 5]]),
    (np.arange(130) * 37 % 101 - 50).reshape(2, 65) / 8,
]
LONG = (np.arange(1027) * 37 % 101 - 50).reshape(1, -1) / 8  # two blocks of onebit
SOME = np.array([[0.5, -1, 3], [2, 0, 0.25]], np.float32)


def hexed(data):
    return np.ascontiguousarray(data).view(np.uint8).tobytes().hex()


def floats(rows):
    return hexed(np.asarray(rows, "<f4").reshape(-1))


def data(text):
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def coded(codec, rows, key):
    out, back = np.empty(codec.nbytes(*rows.shape), np.uint8), np.empty_like(rows)
    codec.encode(rows, out, key)
    codec.decode(out, back)
    return out, back


def values_vectors():
    cases = [(codec, rows, None) for codec in BUILTIN.values() for rows in ROWS]
    cases += [(BUILTIN["onebit"], LONG, None), (BUILTIN["int8"], ROWS[-1], 5)]
    for codec, rows, key in cases:
        rows = rows.astype(np.float32)
        out, back = coded(codec, rows, key)
        yield {
            "codec": codec.name, "rows": rows.shape[0], "dim": rows.shape[1], "key": key and str(key),
            "floats": floats(rows), "hex": hexed(out), "read": floats(back),
        }  # fmt: skip


def payloads():
    """(ids, dim, payload)."""
    none, bf16, fp16s, int8, onebit = (BUILTIN[name] for name in ("none", "bf16", "fp16s", "int8", "onebit"))
    ages, two = np.array([1, 3], np.float32), np.array([1, 4])
    for codec in BUILTIN.values():
        yield 2, 3, encode_rows(SOME, codec, None)
        yield 6, 3, encode_rows(SOME, codec, None, positions=two, ages=ages, num_ids=6)
    yield 0, 3, encode_rows(SOME[:0], none, None)
    yield 6, 3, encode_rows(SOME[:0], none, None, positions=two[:0], num_ids=6)
    yield 6, 3, encode_rows(SOME, none, None, positions=two, num_ids=6)
    yield 2, 3, encode_rows(SOME, none, None, ages=np.array([2**24, 1], np.float32))
    at, few = np.array([3, 4, 11]), np.array([0.5, -1, 2], np.float32)
    yield 6, 2, encode_elements(at, few, (6, 2), bf16, None)
    yield 6, 2, encode_elements(at, few, (6, 2), int8, None, ages=np.array([1, 4, 9, 9, 9, 2], np.float32))
    yield 6, 2, encode_elements(at[:0], few[:0], (6, 2), fp16s, None)
    yield 6, 2, encode_elements(random_positions(12, 3, 7), few, (6, 2), none, None, drawn=7)
    for codec in (fp16s, int8, onebit):  # loose floats: a row of 64, and the rest
        yield 22, 3, encode_elements(np.arange(66), ROWS[-1].reshape(-1)[:66].astype(np.float32), (22, 3), codec, None)
    left, right = np.array([[1, 2, -0.5]], np.float32), np.array([[0.5, -1, 2, 0]], np.float32)
    three = np.concatenate([left, [[0.1, 0.2, 0.3]]]).astype(np.float32)
    both = np.concatenate([right, [[3, 0.7, -0.3, 1e-20]]]).astype(np.float32)
    run = PlainRun(0, few)
    yield 5, 2, encode_low_rank([Factors(2, 6, 0, left[:, :2], right[:, :3])], bf16, None)
    yield 10, 2, encode_low_rank([run, Factors(4, 9, 2, left, right), PlainRun(19, few[:1])], none, None)
    yield 12, 5, encode_low_rank([Factors(1, 46, 1, np.tile(three, 4), both)], none, None)


def refused():
    """(why, what, of what, bytes): each one breaks one rule of the page."""
    rows, six = {"ids": 2, "dim": 2}, {"ids": 6, "dim": 2}
    return [
        ("it ends before its kind", "ids", {}, "01" + "00" * 8),
        ("it ends in its first id", "ids", {}, "01" + "00" * 7),
        ("an id above 2^63 - 1", "ids", {}, "02" + "ff" * 7 + "7f" + "0001"),
        ("bytes after the last id", "ids", {}, "01" + "00" * 8 + "0000"),
        ("an unknown kind of integers", "ids", {}, "02" + "00" * 8 + "3901"),
        ("a bit behind the last Rice code", "ids", {}, "02" + "00" * 8 + "0003"),
        ("a Rice code that does not end", "ids", {}, "02" + "00" * 8 + "0000"),
        ("a varint that does not end", "ids", {}, "02" + "00" * 8 + "4080"),
        ("a varint of 2^64", "ids", {}, "02" + "00" * 8 + "40" + "80" * 9 + "02"),
        ("even ids of more than 2^30", "ids", {}, "00" + "8180808004" + "00" * 8 + "0000"),
        ("a position at the limit", "positions", {"limit": 5}, "010020"),
        ("more positions than the limit", "positions", {"limit": 2}, "030007"),
        ("every position, but fewer than the limit", "positions", {"limit": 3}, "0242"),
        ("it ends in the key of its positions", "positions", {"limit": 3}, "0243" + "00" * 7),
        ("it ends before its values codec", "payload", rows, "00"),
        ("an unknown form", "payload", rows, "0500" + "00" * 16),
        ("an unknown values codec", "payload", rows, "0005" + "00" * 16),
        ("a user-defined values codec that the message does not name", "payload", rows, "00ff" + "00" * 16),
        ("a byte is missing", "payload", rows, "0000" + "00" * 15),
        ("a byte too many", "payload", rows, "0000" + "00" * 17),
        ("no ages", "payload", rows, "01000242"),
        ("an age of 2^24 + 1", "payload", six, "0100" + "010001" + "40" + "80808008" + "00" * 8),
        ("a piece without elements", "payload", six, "0300" + "01000000" + "00" * 20),
        ("a piece beyond the rows", "payload", six, piece(10, 3, 0, 0, 0) + "00" * 12),
        ("rank 0 with columns", "payload", six, piece(0, 3, 0, 2, 0) + "00" * 12),
        ("as many elements before a piece as it has columns", "payload", six, piece(0, 12, 3, 3, 1) + "00" * 32),
        ("as many floats as elements", "payload", six, piece(0, 4, 0, 2, 1) + "00" * 16),
    ]


def piece(*head):
    return "030001000000" + np.array(head, "<u4").tobytes().hex()


def read_payload(payload, num_ids, dim):
    read = decode(payload, num_ids, dim)
    return {
        "positions": list(range(num_ids)) if read.positions is None else read.positions.tolist(),
        "ages": [1] * len(read.rows) if read.ages is None else [int(age) for age in read.ages],
        "rows": floats(read.rows),
    }


def written():
    """The contents of the file, by what we write today."""
    return {
        "integers": [
            {"values": list(map(str, one)), "hex": hexed(encode_integers(np.array(one, np.uint64)))} for one in INTEGERS
        ],
        "ids": [{"ids": list(map(str, ids)), "hex": hexed(encode_ids(np.array(ids, np.int64)))} for ids in IDS]
        + [
            {
                "n": n, "key": str(key), "indices": at,
                "ids": list(map(str, even_ids_at(np.array(at, np.int64), n, key).tolist())),
                "hex": hexed(encode_even_ids(np.array(at, np.int64), n, key)),
            }
            for n, key, at in EVEN_IDS
        ],
        "positions": [
            {"limit": limit, "positions": at, "hex": hexed(encode_positions(np.array(at, np.int64), limit))}
            for limit, at in POSITIONS
        ]
        + [
            {
                "limit": limit, "key": str(key), "positions": random_positions(limit, count, key).tolist(),
                "hex": hexed(encode_drawn(count, key)),
            }
            for limit, count, key in DRAWN
        ],
        "values": list(values_vectors()),
        "payloads": [
            {"ids": ids, "dim": dim, "hex": hexed(payload), **read_payload(payload, ids, dim)}
            for ids, dim, payload in payloads()
        ],
        "refused": [{"why": why, "what": what, **of, "hex": text} for why, what, of, text in refused()],
    }  # fmt: skip


def text_of(vectors):
    """JSON with a line for each vector."""
    parts = [
        json.dumps(part) + ": [\n" + ",\n".join("  " + json.dumps(one) for one in ones) + "\n]"
        for part, ones in vectors.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


VECTORS = json.loads(FILE.read_text()) if FILE.exists() else {}


def each(part):
    return pytest.mark.parametrize("vector", VECTORS.get(part, []), ids=lambda one: one.get("why", one["hex"][:24]))


def test_what_we_write_is_in_the_file():
    assert FILE.read_text() == text_of(written())


@each("integers")
def test_integers_are_read_as_the_file_says(vector):
    values, used = decode_integers(data(vector["hex"]), len(vector["values"]))
    assert (list(map(str, values.tolist())), used) == (vector["values"], len(vector["hex"]) // 2)


@each("ids")
def test_ids_are_read_as_the_file_says(vector):
    assert list(map(str, decode_ids(data(vector["hex"]), MANY).tolist())) == vector["ids"]


@each("positions")
def test_positions_are_read_as_the_file_says(vector):
    positions, used = decode_positions(data(vector["hex"]), vector["limit"])
    assert (positions.tolist(), used) == (vector["positions"], len(vector["hex"]) // 2)


@each("values")
def test_values_are_read_as_the_file_says(vector):
    back = np.empty((vector["rows"], vector["dim"]), np.float32)
    BUILTIN[vector["codec"]].decode(data(vector["hex"]), back)
    np.testing.assert_array_equal(back.reshape(-1), data(vector["read"]).view("<f4"))


@each("payloads")
def test_a_payload_is_read_as_the_file_says(vector):
    read = read_payload(data(vector["hex"]), vector["ids"], vector["dim"])
    assert read == {name: vector[name] for name in read}


def read_refused(vector):
    match vector["what"]:
        case "ids":
            decode_ids(data(vector["hex"]), MANY)
        case "positions":
            decode_positions(data(vector["hex"]), vector["limit"])
        case "payload":
            decode(data(vector["hex"]), vector["ids"], vector["dim"])


@each("refused")
def test_bytes_that_break_a_rule_are_refused(vector):
    with pytest.raises(DamagedPayload):
        read_refused(vector)


if __name__ == "__main__":
    FILE.write_text(text_of(written()))
