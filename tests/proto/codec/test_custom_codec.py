import importlib

import numpy as np
import pytest
from half_codec import HALF_CODEC

from embershard.proto.codec.payload import decode, encode_elements, encode_rows
from embershard.proto.codec.user_defined import CodecRegistry, CustomCodec, load_codecs, values_codec
from embershard.proto.codec.values.registry import BUILTIN
from embershard.proto.errors import BadCodec, BadModule, DamagedPayload, UnknownCodec
from embershard.ps.table.optimizers import OptimizerRegistry

OPTIMIZER = """
import embershard as es

@es.row_optimizer()
def mine(row, state, grad, hyper):
    for j in range(row.size):
        row[j] -= hyper[0] * grad[j]
"""
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


class TestFound:
    def test_two_functions_of_a_module_are_a_codec_beside_the_built_in_ones(self, user_module):
        registry = CodecRegistry([user_module("mine_half", HALF_CODEC)])
        codec = registry.find("mine_half:half")
        assert codec.name == "mine_half:half"
        assert codec.nbytes(3, 4) == 24
        assert np.array_equal(coded(codec), ROWS)
        assert all(registry.find(name) is built_in for name, built_in in BUILTIN.items())
        packed = encode_rows(ROWS, codec, None)
        assert np.array_equal(decode(packed, 3, 4, registry.find, codec.name).rows, ROWS)
        packed = encode_elements(np.array([2, 5]), np.array([7.0, 8.0], np.float32), (3, 4), codec, None)
        assert decode(packed, 3, 4, registry.find, codec.name).rows.tolist() == [[0, 0, 7, 0], [0, 8, 0, 0]]

    def test_a_module_may_hold_optimizers_codecs_or_both(self, user_module):
        modules = [
            user_module("mine_codec", HALF_CODEC),
            user_module("mine_optimizer", OPTIMIZER),
            user_module("mine_both", HALF_CODEC + OPTIMIZER),
        ]
        OptimizerRegistry(modules)
        assert list(load_codecs(modules)) == ["mine_codec:half", "mine_both:half"]

    def test_one_that_is_not_here_is_named_with_what_to_do(self):
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
    def test_a_bad_module_is_refused_at_the_start(self, user_module, name, old, new, reason):
        with pytest.raises((BadModule, BadCodec), match=reason):
            CodecRegistry([user_module(name, HALF_CODEC.replace(old, new))])


class TestUsed:
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_it_may_give_bytes(self, kind):
        assert np.array_equal(coded(make_codec(lambda rows, key: kind(rows.tobytes()))), ROWS)

    def test_it_gets_the_key(self):
        keys = []
        codec = make_codec(lambda rows, key: (keys.append(key), rows)[1])
        coded(codec, key=17)
        coded(codec)
        assert keys == [17, None]

    @pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
    def test_it_is_not_asked_about_nothing(self, shape):
        def fail(*_):
            raise AssertionError

        codec = CustomCodec("m:f", fail, fail, fail)
        assert codec.nbytes(*shape) == 0
        assert coded(codec, np.zeros(shape, np.float32)).shape == shape

    def test_it_cannot_change_the_gradients_or_the_message(self):
        with pytest.raises(BadCodec, match="read-only"):
            coded(make_codec(write=lambda rows, key: rows.fill(0)))
        with pytest.raises(DamagedPayload, match="read-only"):
            coded(make_codec(read=lambda payload, rows, dim: payload.fill(0)))

    @pytest.mark.parametrize(
        ("codec", "reason"),
        [
            (make_codec(write=lambda rows, key: [1, 2]), "it gave a list, not an array or bytes"),
            (make_codec(write=lambda rows, key: None), "it gave a NoneType"),
            (make_codec(write=lambda rows, key: rows.astype(object)), r"it gave \(3, 4\) of object"),
            (make_codec(write=lambda rows, key: rows[:2]), "gave 32 bytes for 3 rows of dim 4, its nbytes says 48"),
            (make_codec(write=lambda rows, key: 1 / 0), r"it raised ZeroDivisionError: .*test_custom_codec.py:\d+"),
            (make_codec(size=lambda rows, dim: -1), "nbytes gave -1 for 3 rows of dim 4"),
            (make_codec(size=lambda rows, dim: 2.5), "nbytes gave 2.5"),
            (make_codec(size=lambda rows, dim: 1 / 0), "nbytes raised ZeroDivisionError"),
            (make_codec(read=lambda payload, rows, dim: None), "its decode gave a NoneType"),
            (make_codec(read=lambda payload, rows, dim: payload), r"its decode gave \(48,\) of uint8, not \(3, 4\)"),
        ],
    )
    def test_what_it_gets_wrong_is_an_error_that_names_it(self, codec, reason):
        with pytest.raises(BadCodec, match=reason) as error:
            coded(codec)
        assert error.value.fields["codec"] == codec.name

    def test_bytes_that_it_cannot_read_are_a_damaged_payload(self):
        codec = make_codec(read=lambda payload, rows, dim: payload[1:].view(np.float32).reshape(rows, dim))
        with pytest.raises(DamagedPayload, match="its decode raised ValueError"):
            coded(codec)
        with pytest.raises(DamagedPayload, match="47 bytes, where 3 rows of dim 4 take 48"):
            codec.decode(np.zeros(47, np.uint8), np.empty((3, 4), np.float32))
