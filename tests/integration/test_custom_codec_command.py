"""`embershard train --import`: a codec of one's own, on the shards and on the workers."""

import pytest

from harness.processes import said

pytestmark = pytest.mark.integration

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 500, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: sgd, lr: 0.05}}
train: {batch_size: 256, samples: 1024}
compression: {push: "mine:half", pull: "mine:half"}
"""
MODULE = """
import numpy as np
import embershard as es

def read_half(payload, rows, dim):
    return payload.view(np.float16).reshape(rows, dim).astype(np.float32)

@es.values_codec(decode=read_half, nbytes=lambda rows, dim: 2 * rows * dim)
def half(rows, key):
    open(f"{key is None}-{rows.shape[1]}.written", "w").close()
    return rows.astype(np.float16)
"""


def test_a_module_named_once_reaches_shards_and_workers(start, tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    said(start(JOB, "--shards", "1", "--import", "mine"))
    assert (tmp_path / "False-4.written").exists()  # a push, which has a key
    assert (tmp_path / "True-4.written").exists()  # a pull
