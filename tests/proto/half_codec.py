"""A module with a user-defined codec, as a user writes it."""

HALF_CODEC = """
import numpy as np
import embershard as es

def read_half(payload, rows, dim):
    return payload.view(np.float16).reshape(rows, dim).astype(np.float32)

@es.values_codec(decode=read_half, nbytes=lambda rows, dim: 2 * rows * dim)
def half(rows, key):
    return rows.astype(np.float16)
"""
