"""Job files that tests begin with, and what is wrong with one."""

from pathlib import Path

import pytest

from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job

GOOD = """\
model:
  name: deepfm
  hidden: [8, 4]
data:
  reader: ctr_csv
  root: data
  train: train.csv
  valid: valid.csv
embedding:
  dim: 4
  optimizer: {name: adam, lr: 1e-3, weight_decay: 0.05}
  initializer: {name: normal, std: 1e-4}
train:
  batch_size: 32
  epochs: 3
  lr_schedule: {name: plateau, factor: 0.1}
  early_stop: {patience: 2}
"""
MODES = """\
model: {name: lr}
data: {reader: ctr_csv, train: train.csv, ids: global}
embedding: {optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 8, epochs: 1}
workers: 2
shards: 3
"""
CODECS = """\
model: {name: deepfm}
data: {reader: ctr_csv, train: train.csv, ids: global}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 8, epochs: 1}
"""
SPLITS = """\
model: {name: fm}
data: {reader: clicks, samples: 1000, splits: auto}
embedding: {optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
workers: 3
"""
NCF = {"p.train.pairs": "0\t1\n1\t2\n", "p.test.rating": "0\t2\t1\t0\n", "p.test.negative": "(0,2)\t3\n"}


def load(folder: Path, text: str = GOOD, *overrides: str) -> Job:
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml", overrides)


def mistakes(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def changed(*replacements: tuple[str, str]) -> str:
    text = GOOD
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
