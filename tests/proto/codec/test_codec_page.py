"""docs/payloads.md, checked byte by byte."""

import re
from pathlib import Path

import numpy as np
import pytest

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.ids import encode_even_ids, encode_ids
from embershard.proto.codec.integers import MAX_RICE, RAW, VARINT, encode_integers
from embershard.proto.codec.low_rank import MAX_PIECES, Factors, encode_low_rank
from embershard.proto.codec.name import MAX_RANK, CodecName
from embershard.proto.codec.payload import CUSTOM, MAX_AGE, encode_elements, encode_rows
from embershard.proto.codec.positions import DRAWN, EVERY, encode_positions
from embershard.proto.codec.predict import predict_bytes
from embershard.proto.codec.select import random_positions
from embershard.proto.codec.values.registry import BUILTIN

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "payloads.md").read_text()
EXAMPLES = {name: bytes.fromhex(text) for name, text in re.findall(r"```hex ([\w -]+)\n(.*?)```", PAGE, re.DOTALL)}
ROWS = np.array([[0.5, -1], [2, 0]], np.float32)
FLOATS = np.array([0.5, -1, 2], np.float32)
BF16, FP16S = BUILTIN["bf16"], BUILTIN["fp16s"]


def values(name):
    coded = np.empty(BUILTIN[name].nbytes(2, 2), np.uint8)
    BUILTIN[name].encode(ROWS, coded, None)
    return coded


def test_every_example_is_what_we_write():
    """And the tests of each kind of number and payload show that what is written is read."""
    at, ages = np.array([3, 4, 11]), np.array([1, 4, 9, 9, 9, 2], np.float32)
    rows_at, row_ages = np.array([1, 4]), np.array([1, 3], np.float32)
    written = {
        "integers 0 1 5 2": encode_integers(np.array([0, 1, 5, 2], np.uint64)),
        "integers 0 0 0 0 0 0 0 0 1099511627776": encode_integers(np.array([0] * 8 + [2**40], np.uint64)),
        "ids -3 5 6 1000": encode_ids(np.array([-3, 5, 6, 1000])),
        "even ids 0 2 3": encode_even_ids(np.array([0, 2, 3]), 5, 7),
        "positions 2 3 10 40 of 64": encode_positions(np.array([2, 3, 10, 40]), 64),
        **{name: values(name) for name in BUILTIN},
        "all rows": encode_rows(ROWS, FP16S, None),
        "some rows": encode_rows(ROWS, BF16, None, positions=rows_at, ages=row_ages, num_ids=6),
        "elements": encode_elements(at, FLOATS, (6, 2), BF16, None),
        "aged elements": encode_elements(at, FLOATS, (6, 2), BF16, None, ages=ages),
        "drawn elements": encode_elements(random_positions(12, 3, 7), FLOATS, (6, 2), BF16, None, drawn=7),
        "low rank": encode_low_rank([Factors(2, 6, 0, np.array([[1, 2]], np.float32), FLOATS[None])], BF16, None),
    }
    assert {name: coded.tobytes() for name, coded in written.items()} == EXAMPLES
    assert len(EXAMPLES) == PAGE.count("```hex")
    assert random_positions(12, 3, 7).tolist() == [0, 7, 10]


@pytest.mark.parametrize(
    "line",
    [
        f"0 to {MAX_RICE}: Rice codes with this parameter k; {VARINT}: varints; {RAW}: raw",
        f"| {EVERY} | none | every position",
        f"| {DRAWN} | 8: key |",
        f"| {CUSTOM} | user-defined |",
        *[f"| {codec.code} | {codec.name} |" for codec in BUILTIN.values()],
        f"| an age | 2^{MAX_AGE.bit_length() - 1} |",
        f"| pieces | {MAX_PIECES:,} |",
        f"| a rank | {MAX_RANK} |",
        f"at most {MAX_MESSAGE_BYTES // 2**20} MiB |",
        f"| {MAX_MESSAGE_BYTES // 8:,} |",
    ],
)
def test_the_page_has_the_numbers_of_the_code(line):
    assert line in PAGE


def test_the_page_has_the_ratios_of_random_positions():
    table = re.findall(r"^\| (0\.\d+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(table) == 4
    for ratio, *told in table:
        for name, want in zip(("none", "fp16s", "int8"), told, strict=True):
            codec = CodecName(select="topk", number=float(ratio), values=name)
            assert 4e7 / predict_bytes(codec, 10**7, 1) == pytest.approx(float(want), rel=0.01)
