import importlib

import numpy as np
import pytest
from half_codec import HALF_CODEC

from embershard.proto.codec.payload import decode, encode_elements, encode_rows
from embershard.proto.codec.user_defined import CodecRegistry, CustomCodec, load_codecs, values_codec
from embershard.proto.codec.values.registry import BUILTIN
from embershard.proto.errors import BadCodec, BadModule, DamagedPayload, UnknownCodec

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write a module of this name and text where it can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    return write


def make_codec(
    write=lambda rows, key: rows,
    read=lambda payload, rows, dim: payload.view(np.float32).reshape(rows, dim),
    size=lambda rows, dim: 4 * rows * dim,
):
    return values_codec(decode=read, nbytes=size)(write)


def coded(codec, rows=ROWS, key=None):
    payload, out = np.empty(codec.nbytes(*rows.shape), np.uint8), np.empty_like(rows)
    codec.encode(rows, payload, key)
    codec.decode(payload, out)
    return out


def test_two_functions_of_a_module_are_a_codec_beside_the_built_in_ones(user_module):
    registry = CodecRegistry([user_module("mine_half", HALF_CODEC)])
    codec = registry.find("mine_half:half")
    assert (codec.name, codec.nbytes(3, 4)) == ("mine_half:half", 24)
    assert all(registry.find(name) is built_in for name, built_in in BUILTIN.items())
    packed = encode_rows(ROWS, codec, None)
    assert np.array_equal(decode(packed, 3, 4, registry.find, codec.name).rows, ROWS)
    packed = encode_elements(np.array([2, 5]), np.array([7.0, 8.0], np.float32), (3, 4), codec, None)
    assert decode(packed, 3, 4, registry.find, codec.name).rows.tolist() == [[0, 0, 7, 0], [0, 8, 0, 0]]
    assert load_codecs([user_module("mine_nothing", "")]) == {}


def test_one_that_is_not_here_is_named_with_what_to_do():
    with pytest.raises(UnknownCodec, match=r"'mine:half'.*known: none, fp16s, .*--import MODULE"):
        CodecRegistry().find("mine:half")


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("codec_broken", "numpy as np", "nothing_of_this_name", "^module 'codec_broken' cannot be imported: Modul"),
        ("codec_syntax", "def ", "def def ", "cannot be imported: SyntaxError"),
        ("codec_one", "rows, key", "rows", "half must take .rows, key."),
        ("codec_two", "payload, rows, dim", "payload, rows", "decode must take .payload, rows, dim."),
        ("codec_raises", "np.float16)\n", "np.float17)\n", r"raised AttributeError.*codec_raises.py:10"),
        ("codec_size", "2 * rows", "3 * rows", "gave 256 bytes for 2 rows of dim 64, its nbytes says 384"),
        ("codec_wide", ".astype(np.float32)", "", r"gave \(2, 64\) of float16, not \(2, 64\) of float32"),
        ("codec_read", ".view(np.float16)", ".view(no)", "its decode raised NameError"),
    ],
)
def test_a_bad_module_is_refused_at_the_start(user_module, name, old, new, reason):
    with pytest.raises((BadModule, BadCodec), match=reason):
        CodecRegistry([user_module(name, HALF_CODEC.replace(old, new))])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_it_may_give_bytes_and_gets_the_key(kind):
    keys = []
    codec = make_codec(lambda rows, key: keys.append(key) or kind(rows.tobytes()))
    assert np.array_equal(coded(codec, key=17), ROWS)
    coded(codec)
    assert keys == [17, None]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_it_is_not_asked_about_nothing(shape):
    codec = CustomCodec("m:f", None, None, None)
    assert codec.nbytes(*shape) == 0
    assert coded(codec, np.zeros(shape, np.float32)).shape == shape


@pytest.mark.parametrize(
    ("functions", "error", "reason"),
    [
        ({"write": lambda rows, key: rows.fill(0)}, BadCodec, "read-only"),  # the gradients are not its own
        ({"read": lambda payload, rows, dim: payload.fill(0)}, DamagedPayload, "read-only"),  # nor is the message
        ({"write": lambda rows, key: [1, 2]}, BadCodec, "it gave a list, not an array or bytes"),
        ({"write": lambda rows, key: None}, BadCodec, "it gave a NoneType"),
        ({"write": lambda rows, key: rows.astype(object)}, BadCodec, r"it gave \(3, 4\) of object"),
        ({"write": lambda rows, key: rows[:2]}, BadCodec, "32 bytes for 3 rows of dim 4, its nbytes says 48"),
        ({"write": lambda rows, key: 1 / 0}, BadCodec, r"it raised ZeroDivisionError: .*test_custom_codec.py:\d+"),
        ({"size": lambda rows, dim: -1}, BadCodec, "nbytes gave -1 for 3 rows of dim 4"),
        ({"size": lambda rows, dim: 2.5}, BadCodec, "nbytes gave 2.5"),
        ({"size": lambda rows, dim: 1 / 0}, BadCodec, "nbytes raised ZeroDivisionError"),
        ({"read": lambda payload, rows, dim: None}, BadCodec, "its decode gave a NoneType"),
        ({"read": lambda payload, rows, dim: payload}, BadCodec, r"decode gave \(48,\) of uint8, not \(3, 4\)"),
        ({"read": lambda payload, rows, dim: payload[1:].view(np.float32)}, DamagedPayload, "raised ValueError"),
    ],
)
def test_what_it_gets_wrong_is_an_error_that_names_it(functions, error, reason):
    codec = make_codec(**functions)
    with pytest.raises(error, match=reason) as caught:
        coded(codec)
    assert caught.value.fields["codec"] == codec.name


def test_other_sizes_are_a_damaged_payload():
    with pytest.raises(DamagedPayload, match="47 bytes, but 3 rows of dim 4 take 48"):
        make_codec().decode(np.zeros(47, np.uint8), np.empty((3, 4), np.float32))
