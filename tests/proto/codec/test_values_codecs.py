import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba import njit
from numba.core import config

from embershard.proto.codec import reference
from embershard.proto.codec.name import BUILTIN_VALUES
from embershard.proto.codec.values import half
from embershard.proto.codec.values.half import float_in_integers, float_of_half, half_in_integers, half_of
from embershard.proto.codec.values.registry import BUILTIN, find_values
from embershard.proto.errors import DamagedPayload, UnknownCodec

LOSSY = ["fp16s", "bf16", "int8", "onebit"]
FLOATS = st.floats(width=32)
# 1 % below the largest: rounding may carry what is above into infinity
MOST = np.float32(0.99 * float(np.finfo(np.float32).max))
ROUNDED = st.floats(width=32, min_value=-MOST, max_value=MOST)
KEYS = st.none() | st.integers(0, 2**64 - 1)

every_codec = pytest.mark.parametrize("name", BUILTIN_VALUES)
lossy_codecs = pytest.mark.parametrize("name", LOSSY)


def rows_of(elements):
    """(R, dim) of odd dims around a block, with many equal floats, as zeros are."""
    shapes = st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 130]))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=elements, fill=elements))


def encoded(name, rows, key=None):
    codec = find_values(name)
    out = np.full(codec.nbytes(*rows.shape), 0xA5, np.uint8)
    codec.encode(rows, out, key)
    return out


def decoded(name, payload, shape):
    out = np.full(shape, 77, np.float32)
    find_values(name).decode(payload, out)
    return out


def there_and_back(name, rows, key=None):
    return decoded(name, encoded(name, rows, key), rows.shape)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


GOLDEN_ROWS = np.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-6, -3e-6, 2e-6]], np.float32)


@pytest.mark.parametrize(
    ("name", "key", "golden"),
    [
        ("none", None, "0000803f 000000c0 0000003f 00000000 00000000 00000000 bd378635 9c5349b6 bd370636"),
        ("fp16s", None, "0038 00bc 0034 0000 0000 0000 3238 4bbe 323c 01 81 ed"),
        ("bf16", None, "803f 00c0 003f 0000 0000 0000 8635 49b6 0636"),
        ("int8", None, "3f8220 000000 2a8155 823c 0000 cb32"),
        ("int8", 7, "3f821f 000000 2a8255 823c 0000 cb32"),
        ("onebit", None, "0009 881cc73e"),
    ],
)
def test_a_codec_writes_its_golden_bytes_and_keeps_its_number(name, key, golden):
    assert encoded(name, GOLDEN_ROWS, key).tobytes().hex() == golden.replace(" ", "")
    assert BUILTIN[name].code == BUILTIN_VALUES.index(name) == [*BUILTIN].index(name)


@lossy_codecs
@settings(max_examples=60)
@given(rows=rows_of(FLOATS), key=KEYS)
def test_the_kernel_writes_what_the_reference_does(name, rows, key):
    assert encoded(name, rows, key).tobytes() == getattr(reference, f"encode_{name}")(rows, key).tobytes()


@lossy_codecs
@pytest.mark.parametrize("shape", [(300, 16), (40, 100), (3, 1500)])
def test_many_rows_are_written_as_the_reference_does(name, shape):
    want = getattr(reference, f"encode_{name}")(normal(*shape), 9)
    assert encoded(name, normal(*shape), 9).tobytes() == want.tobytes()


@lossy_codecs
@settings(max_examples=60)
@given(data=st.data(), num_rows=st.integers(0, 3), dim=st.sampled_from([0, 1, 5, 16, 65, 700]))
def test_any_bytes_are_read_as_the_reference_reads_them(name, data, num_rows, dim):
    size = find_values(name).nbytes(num_rows, dim)
    payload = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    want = getattr(reference, f"decode_{name}")(payload, num_rows, dim)
    np.testing.assert_array_equal(decoded(name, payload, (num_rows, dim)), want)


@every_codec
@pytest.mark.parametrize("more", [-1, 1, 4096])
def test_other_sizes_are_a_damaged_payload(name, more):
    payload = np.zeros(find_values(name).nbytes(3, 20) + more, np.uint8)
    with pytest.raises(DamagedPayload, match=rf"{name}.*{payload.size} bytes, but 3 rows of dim 20 take"):
        decoded(name, payload, (3, 20))


@every_codec
def test_rows_that_may_only_be_read_are_coded_at_any_byte_of_a_message(name):
    rows, codec = normal(5, 19), find_values(name)
    rows.flags.writeable = False
    message = np.zeros(codec.nbytes(5, 19) + 1, np.uint8)
    codec.encode(rows, message[1:], 3)
    message.flags.writeable = False
    assert np.array_equal(decoded(name, message[1:], rows.shape), there_and_back(name, rows, 3))


def test_an_unknown_codec_is_named_with_the_known_ones():
    with pytest.raises(UnknownCodec, match=r"'gzip' here .known: none, fp16s, bf16, int8, onebit"):
        find_values("gzip")


@given(rows=rows_of(FLOATS), key=KEYS)
@settings(max_examples=50)
def test_none_changes_nothing(rows, key):
    assert there_and_back("none", rows, key).tobytes() == rows.tobytes()


@given(rows=rows_of(ROUNDED))
@settings(max_examples=50)
def test_fp16s_and_bf16_are_off_by_half_their_last_bit(rows):
    exact = rows.astype(np.float64)
    largest = np.abs(exact).max(axis=1, initial=0, keepdims=True)
    allowed = np.maximum(2.0**-11 * np.abs(rows), 2.0**-25 * largest) + 2.0**-150
    assert (np.abs(there_and_back("fp16s", rows) - exact) <= allowed).all()
    assert (np.abs(there_and_back("bf16", rows) - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-134).all()


@given(rows=rows_of(ROUNDED), key=KEYS)
@settings(max_examples=50)
def test_int8_is_off_by_half_a_level_or_by_one_with_a_key(rows, key):
    got = there_and_back("int8", rows, key)
    for start in range(0, rows.shape[1], 64):
        block = rows[:, start : start + 64].astype(np.float64)
        level = np.abs(block).max(axis=1, initial=0, keepdims=True) / 127 * (1 + 2.0**-7) + 2.0**-133
        allowed = level * (0.5 if key is None else 1.0) * (1 + 1e-6)
        assert (np.abs(got[:, start : start + 64] - block) <= allowed).all()


@given(rows=rows_of(ROUNDED))
@settings(max_examples=50)
def test_onebit_keeps_signs_and_the_mean_size(rows):
    out = there_and_back("onebit", rows)
    assert (out[rows < 0] <= 0).all()
    assert (out[rows >= 0] >= 0).all()
    means = [np.abs(floats).mean(dtype=np.float64) if rows.size else 0.0 for floats in (out, rows)]
    np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-44)


def test_onebit_scales_blocks_of_1024_by_themselves():
    rows = np.repeat([1.0, 100.0, 3.0], [1024, 1024, 100]).astype(np.float32).reshape(1, -1)
    assert np.array_equal(there_and_back("onebit", -rows), -rows)


@pytest.mark.parametrize("name", ["fp16s", "bf16", "int8"])
def test_powers_of_two_beside_their_127_fold_arrive_exactly(name):
    rows = np.array([[127, 1], [-1, 127], [2.0**-30, -127 * 2.0**-30], [127 * 2.0**100, 2.0**100]], np.float32)
    assert np.array_equal(there_and_back(name, rows), rows)


@every_codec
@pytest.mark.parametrize("bad", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("key", [None, 3])
def test_nan_in_a_block_of_zeros(name, bad, key):
    rows = np.zeros((3, 1024), np.float32)
    rows[2] = -0.0
    rows.view(np.uint32)[1, 700] = bad  # the bits of a NaN or of an infinity
    out = there_and_back(name, rows, key)
    assert not np.isfinite(out[1]).all()
    assert not out[::2].any()


@lossy_codecs
@given(rows=rows_of(FLOATS), key=KEYS)
@settings(max_examples=50)
def test_a_row_that_is_not_finite_never_looks_finite(name, rows, key):
    bad = ~np.isfinite(rows).all(axis=1)
    assert not np.isfinite(there_and_back(name, rows, key)[bad]).all(axis=1).any()


def test_int8_rounds_up_as_often_as_a_fraction_says():
    rows, total, count = normal(1, 64), np.zeros(64), 2000
    for key in range(count):
        total += there_and_back("int8", rows, key)[0]
    level = np.abs(rows).max() / 127 * (1 + 2.0**-7)
    # the deviation of one is half a level at most; five of them for the mean of all
    assert np.abs(total / count - rows[0]).max() < 5 * level / 2 / np.sqrt(count)


def test_the_sum_of_what_int8_rounds_in_one_call_is_right_too():
    rows = np.full((4000, 33), 0.3, np.float32)
    rows[:, 0] = 127
    assert abs(there_and_back("int8", rows, 11)[:, 1:].mean() - 0.3) < 5 * 0.5 / np.sqrt(4000 * 32)


def test_int8_leaves_whole_levels_alone_under_every_key():
    rows = np.arange(-127, 128, 2, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    rows[:, 0] = 127
    assert all(np.array_equal(there_and_back("int8", rows, key), rows) for key in range(50))


def test_neighbours_among_keys_share_no_random_numbers():
    rows = np.full((1, 1024), 0.5, np.float32)
    rows[0, ::64] = 127
    ups = [there_and_back("int8", rows, key)[0] == 1 for key in range(4)]
    # counters that a key merely xors would give keys 0 and 1 the same four numbers for every four floats
    in_fours = [up[4:64].reshape(-1, 4).sum(axis=1).tolist() for up in ups]
    assert all(counts != in_fours[0] for counts in in_fours[1:])
    assert all((up == ups[0]).mean() < 0.6 for up in ups[1:])


# Conversions between float32 and fp16 inside kernels, against numpy's.

BITS = np.arange(2**16, dtype=np.uint16)


def converted(convert, values, dtype):
    @njit
    def run(values, out):
        for i in range(values.size):
            out[i] = convert(values[i])

    out = np.empty(values.size, dtype)
    run(values, out)
    return out


@pytest.mark.parametrize("convert", [float_of_half, float_in_integers])
def test_every_fp16_is_the_float_that_numpy_reads(convert):
    out, want = converted(convert, BITS, np.float32), BITS.view(np.float16).astype(np.float32)
    assert np.array_equal(np.isnan(out), np.isnan(want))
    assert np.array_equal(out[~np.isnan(want)].view(np.uint32), want[~np.isnan(want)].view(np.uint32))


@pytest.mark.parametrize("convert", [half_of, half_in_integers])
def test_floats_are_rounded_to_nearest_even(convert):
    exact = BITS.view(np.float16).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] + exact[:-1]) / 2
    tiny = np.float32(2.0) ** np.arange(-149, -24, dtype=np.float32)
    values = np.concatenate([exact, middle, np.nextafter(middle, 9e9), np.nextafter(middle, -9e9), tiny, -tiny])
    floats = values.astype(np.float32)
    assert np.array_equal(converted(convert, floats, np.uint16), floats.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize(
    ("features", "machine", "told", "want"),
    [
        ({"f16c": True}, "x86_64", "", True),
        ({"f16c": False}, "x86_64", "", False),
        ({}, "x86_64", "", False),
        ({}, "aarch64", "", True),
        ({"f16c": True}, "x86_64", "+sse2", False),
        ({"f16c": True}, "x86_64", "+f16c,-avx", False),
        (None, "x86_64", "", False),
    ],
)
def test_instructions_are_used_where_there_are_some(features, machine, told, want, monkeypatch):
    def host():
        if features is None:
            raise RuntimeError("not known")
        return features

    monkeypatch.setattr(half.llvm, "get_host_cpu_features", host)
    monkeypatch.setattr(half.platform, "machine", lambda: machine)
    monkeypatch.setattr(config, "CPU_FEATURES", told)
    monkeypatch.setattr(config, "CPU_NAME", None)
    assert half.processor_converts() is want
