"""Conversions between float32 and fp16 inside kernels, against numpy's."""

import numpy as np
import pytest
from numba import njit
from numba.core import config

from embershard.proto.codec.values import half
from embershard.proto.codec.values.half import float_in_integers, float_of_half, half_in_integers, half_of

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
