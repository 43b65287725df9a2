"""docs/payloads.md, checked byte by byte."""

import re
from pathlib import Path

import numpy as np
import pytest

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.ids import decode_ids, encode_even_ids, encode_ids
from embershard.proto.codec.integers import MAX_RICE, RAW, VARINT, decode_integers, encode_integers
from embershard.proto.codec.low_rank import MAX_PIECES, Factors, encode_low_rank
from embershard.proto.codec.name import MAX_RANK, CodecName
from embershard.proto.codec.payload import CUSTOM, MAX_AGE, decode, encode_elements, encode_rows
from embershard.proto.codec.positions import DRAWN, EVERY, decode_positions, encode_positions
from embershard.proto.codec.predict import predict_bytes
from embershard.proto.codec.select import random_positions
from embershard.proto.codec.values.registry import BUILTIN
from embershard.proto.routing import even_ids

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "payloads.md").read_text()
EXAMPLES = {name: bytes.fromhex(text) for name, text in re.findall(r"```hex ([\w -]+)\n(.*?)```", PAGE, re.DOTALL)}
ROWS = np.array([[0.5, -1], [2, 0]], np.float32)
FLOATS = np.array([0.5, -1, 2], np.float32)
BF16, FP16S = BUILTIN["bf16"], BUILTIN["fp16s"]


def numbers(name: str) -> np.ndarray:
    return np.array([int(word) for word in name.split(" of ")[0].split()[1:]])


def example(name: str) -> np.ndarray:
    return np.frombuffer(EXAMPLES[name], np.uint8)


def test_no_example_is_left_out():
    assert len(EXAMPLES) == PAGE.count("```hex") == 16


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("integers")])
def test_integers(name):
    values = numbers(name).astype(np.uint64)
    assert encode_integers(values).tobytes() == EXAMPLES[name]
    assert np.array_equal(decode_integers(example(name), values.size)[0], values)


def test_ids():
    name = "ids -3 5 6 1000"
    assert encode_ids(numbers(name)).tobytes() == EXAMPLES[name]
    assert np.array_equal(decode_ids(example(name), 4), numbers(name))


def test_even_ids():
    name = "even ids 0 2 3"
    assert encode_even_ids(np.array([0, 2, 3]), 5, 7).tobytes() == EXAMPLES[name]
    assert np.array_equal(decode_ids(example(name), 3), even_ids(5, 7)[[0, 2, 3]])


def test_positions():
    name = "positions 2 3 10 40 of 64"
    assert encode_positions(numbers(name), 64).tobytes() == EXAMPLES[name]
    assert np.array_equal(decode_positions(example(name), 64)[0], numbers(name))


@pytest.mark.parametrize("name", BUILTIN)
def test_values(name):
    values = BUILTIN[name]
    coded = np.empty(values.nbytes(2, 2), np.uint8)
    values.encode(ROWS, coded, None)
    assert coded.tobytes() == EXAMPLES[name]
    assert f"| {values.code} | {name} |" in PAGE


def test_rows():
    ages = np.array([1, 3], np.float32)
    some = encode_rows(ROWS, BF16, None, positions=np.array([1, 4]), ages=ages, num_ids=6)
    assert encode_rows(ROWS, FP16S, None).tobytes() == EXAMPLES["all rows"]
    assert some.tobytes() == EXAMPLES["some rows"]
    assert np.array_equal(decode(example("some rows"), 6, 2).rows, ROWS)


def test_elements():
    drawn = random_positions(12, 3, 7)
    assert drawn.tolist() == [0, 7, 10]
    coded = encode_elements(np.array([3, 4, 11]), FLOATS, (6, 2), BF16, None)
    assert coded.tobytes() == EXAMPLES["elements"]
    ages = np.array([1, 4, 9, 9, 9, 2], np.float32)
    coded = encode_elements(np.array([3, 4, 11]), FLOATS, (6, 2), BF16, None, ages=ages)
    assert coded.tobytes() == EXAMPLES["aged elements"]
    coded = encode_elements(drawn, FLOATS, (6, 2), BF16, None, drawn=7)
    assert coded.tobytes() == EXAMPLES["drawn elements"]


def test_low_rank():
    piece = Factors(2, 6, 0, np.array([[1, 2]], np.float32), FLOATS[None])
    assert encode_low_rank([piece], BF16, None).tobytes() == EXAMPLES["low rank"]
    assert decode(example("low rank"), 5, 2).rows.tolist() == [[0, 0], [0.5, -1], [2, 1], [-2, 4], [0, 0]]


def test_the_page_has_the_numbers_of_the_code():
    assert f"0 to {MAX_RICE}: Rice codes with this parameter k; {VARINT}: varints; {RAW}: raw" in PAGE
    assert f"| {EVERY} | none | every position" in PAGE
    assert f"| {DRAWN} | 8: key |" in PAGE
    assert f"| {CUSTOM} | user-defined |" in PAGE
    assert f"| an age | 2^{MAX_AGE.bit_length() - 1} |" in PAGE
    assert f"| pieces | {MAX_PIECES:,} |" in PAGE
    assert f"| a rank | {MAX_RANK} |" in PAGE
    assert f"at most {MAX_MESSAGE_BYTES // 2**20} MiB |" in PAGE
    assert f"| {MAX_MESSAGE_BYTES // 8:,} |" in PAGE


def test_the_page_has_the_ratios_of_random_positions():
    table = re.findall(r"^\| (0\.\d+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(table) == 4
    for ratio, *told in table:
        for values, want in zip(("none", "fp16s", "int8"), told, strict=True):
            codec = CodecName(select="topk", number=float(ratio), values=values)
            assert 4e7 / predict_bytes(codec, 10**7, 1) == pytest.approx(float(want), rel=0.01)
