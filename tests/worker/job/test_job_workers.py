"""Settings of several workers that contradict each other are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job

JOB = """\
model: {name: fm}
data: {reader: clicks, samples: 1000, splits: auto}
embedding: {optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
workers: 3
"""


def load(folder: Path, *sets: str) -> Job:
    (folder / "job.yaml").write_text(JOB)
    return load_job(folder / "job.yaml", sets)


def test_an_epoch_is_dealt_in_eight_splits_for_each_worker_or_as_many_as_the_job_says(tmp_path: Path) -> None:
    assert load(tmp_path).num_splits(3) == 24
    assert load(tmp_path, "data.splits=5").num_splits(3) == 5
    assert load(tmp_path, "data.splits=null").num_splits(3) == 0
    assert load(tmp_path).num_splits(1) == 0  # who is alone has all of it
    assert load(tmp_path).elastic(3)
    assert not load(tmp_path).elastic(1)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            ("dense.mode=ddp",),
            "data.splits: gives workers uneven numbers of steps, but dense.mode ddp makes",
        ),
        (("train.steps=10",), "data.splits: deals out whole epochs: give train.epochs in place of train.steps"),
        (("data.splits=2",), "data.splits: must be at least as many as workers, which are 3"),
        (("data.splits=0",), "data.splits: must be a number of parts, auto or null, got 0"),
        (
            ("data.splits=null", "dense.mode=fsdp", "train.restart_workers=1"),
            "train.restart_workers: has no meaning for",
        ),
        (
            ("strategy=ddp", "workers=1", "data.splits=null", "train.restart_workers=1"),
            "train.restart_workers: has no meaning for strategy ddp, which ends",
        ),
        (
            ("strategy=ddp", "data.splits=4"),
            "data.splits: gives workers uneven numbers of steps, but strategy ddp makes",
        ),
        (("train.samples=10",), "data.splits: deals out whole epochs: give train.epochs in place of train.samples"),
        (("workers=1", "train.restart_workers=1"), "train.restart_workers: starts workers again beside others"),
    ],
)
def test_a_contradiction_is_named(tmp_path: Path, sets: tuple[str, ...], words: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load(tmp_path, *sets)
    (mistake,) = caught.value.mistakes
    assert words in str(mistake)


@pytest.mark.parametrize(
    "sets",
    [
        ("data.splits=3",),
        ("workers=2", "train.restart_workers=1"),
        ("workers=1",),
        ("dense.mode=ddp", "data.splits=null"),
        ("data.splits=null", "train.steps=10"),
    ],
    ids=" ".join,
)
def test_what_is_no_contradiction_is_taken(tmp_path: Path, sets: tuple[str, ...]) -> None:
    load(tmp_path, *sets)


def test_gzipped_text_is_not_dealt_out_where_it_streams(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"")
    with pytest.raises(JobFileError, match=r"data.splits: a.csv.gz would be read from its start for every split"):
        load(tmp_path, "data={reader: ctr_csv, train: a.csv.gz, stream: true, splits: 8}")
    load(tmp_path, "data={reader: ctr_csv, train: a.csv.gz, splits: 8}")  # read once, into memory
    (tmp_path / "a.csv").write_text("label,a\n1,2\n")
    load(tmp_path, "data={reader: ctr_csv, train: a.csv, stream: true, splits: 8}")
