"""Strategies, dense modes and consistency in job files: what they say, and which of them contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embershard.worker.job import checks as job_modes
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.session import local_steps

JOB = """\
model: {name: lr}
data: {reader: ctr_csv, train: train.csv, ids: global}
embedding: {optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 8, epochs: 1}
workers: 2
shards: 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text("label,a\n1,2\n")
    return tmp_path


def load(folder: Path, *overrides: str, text: str = JOB) -> Job:
    path = folder / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def mistakes(folder: Path, *overrides: str, text: str = JOB) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load(folder, *overrides, text=text)
    return [str(mistake).removeprefix(f"{folder}/") for mistake in caught.value.mistakes]


@pytest.mark.parametrize(
    ("word", "bound", "local_steps"), [("0", 0, None), ("4", 4, None), ("off", None, None), ("local(8)", None, 8)]
)
def test_staleness_is_a_number_off_or_local(
    folder: Path, word: str, bound: int | None, local_steps: int | None
) -> None:
    train = load(folder, f"train.staleness={word}").train
    assert (train.bound, train.local_steps, train.prefetch) == (bound, local_steps, 0)


@pytest.mark.parametrize("word", ["-1", "true", "local", "local(0)", "1.5", "[1]"])
def test_another_staleness_is_refused(folder: Path, word: str) -> None:
    (line,) = mistakes(folder, f"train.staleness={word}")
    assert "train.staleness: must be 0, a number of clocks, off or local(steps), got" in line


def test_hybrid_is_ps_with_dense_weights_in_the_workers(folder: Path) -> None:
    assert load(folder).dense_mode == load(folder, "dense.mode=ps").dense_mode == "ps"
    assert load(folder, "strategy=hybrid").dense_mode == "ddp"
    assert load(folder, "strategy=hybrid", "dense.mode=fsdp").dense_mode == "fsdp"
    assert load(folder, "dense.mode=ddp").all_reduces
    assert not load(folder).all_reduces


OF_SHARDS = """\
model: {name: lr}
data: {reader: ctr_csv, train: train.csv, ids: global, splits: 4}
embedding: {optimizer: {name: adagrad, lr: 0.1}, cache: {rows: 9}}
dense: {mode: ddp}
train: {batch_size: 8, epochs: 1, staleness: 4, lease: 3, staleness_aware_lr: true, prefetch: 2, restart_workers: 1}
compression: {push: int8}
network: {bandwidth: 100mbit}
workers: 2
shards: 3
"""


@pytest.mark.parametrize("strategy", ["local", "ddp"])
def test_an_override_of_the_strategy_sets_aside_what_the_file_says_of_shards(folder: Path, strategy: str) -> None:
    job = load(folder, f"strategy={strategy}", text=OF_SHARDS)
    assert not job.has_shards
    assert job.workers == (2 if strategy == "ddp" else 1)
    assert not job.model_fields_set & {"shards", "compression"}
    assert not job.train.model_fields_set & {"staleness", "lease", "staleness_aware_lr", "prefetch", "restart_workers"}
    assert job.data.splits is None
    assert "mode" not in job.dense.model_fields_set
    assert job.embedding.cache is None
    assert job.network.bandwidth == "unlimited"
    assert job.loader_processes(1) == 0


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rmsprop", "adam", "adamw"])
def test_dense_weights_in_workers_take_the_optimizers_of_torch(folder: Path, name: str) -> None:
    job = load(folder, "dense.mode=ddp", f"dense.optimizer={{name: {name}, lr: 0.1}}")
    assert job.dense.optimizer is not None
    assert job.dense.optimizer.name == name


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
def test_tables_in_workers_take_the_optimizers_of_torch_for_sparse_gradients(folder: Path, name: str) -> None:
    job = load(folder, "strategy=ddp", f"embedding.optimizer={{name: {name}, lr: 0.1}}")
    assert job.embedding.optimizer.name == name


IN_FILE = [
    ("strategy: ddp\n", "job.yaml:6: shards: strategy ddp has no shards; remove it"),
    (
        "strategy: local\n",
        "job.yaml:5: workers: strategy local trains in one process; set it to 1, or use strategy ddp",
    ),
]


@pytest.mark.parametrize(("line", "want"), IN_FILE)
def test_a_file_that_contradicts_itself_is_refused(folder: Path, line: str, want: str) -> None:
    assert any(found.startswith(want) for found in mistakes(folder, text=JOB + line))


CONTRADICTIONS = [
    (["strategy=ddp", "shards=2"], "shards: strategy ddp has no shards"),
    (["strategy=local", "workers=2"], "workers: strategy local trains in one process"),
    (["strategy=ddp", "train.staleness=4"], "train.staleness: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.lease=4"], "train.lease: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.staleness_aware_lr=true"], "train.staleness_aware_lr: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.prefetch=2"], "train.prefetch: has no meaning for strategy ddp"),
    (["strategy=ddp", "embedding.cache={rows: 9}"], "embedding.cache: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.staleness=0", "train.prefetch=1"], "train.prefetch: has no meaning for strategy ddp"),
    (["strategy=ddp", "dense.mode=fsdp"], "dense.mode: has no meaning for strategy ddp"),
    (["strategy=local", "dense.mode=ddp"], "dense.mode: has no meaning for strategy local"),
    (["strategy=ddp", "data.ids=hashed"], "strategy: strategy ddp needs tables in memory, and hashed ids have 2**62"),
    (["strategy=ddp", "embedding.optimizer.name=rmsprop"], "embedding.optimizer.name: strategy ddp trains by torch"),
    (["strategy=ddp", "embedding.optimizer={name: ftrl, lr: 1}"], "embedding.optimizer.name: strategy ddp trains by"),
    (
        [
            "strategy=ddp",
            "embedding={optimizer: {name: ftrl, lr: 1}, groups: [{match: x, optimizer: {name: sgd, lr: 1}}]}",
        ],
        "embedding.optimizer.name: strategy ddp trains by torch",
    ),
    (
        ["strategy=ddp", "embedding.optimizer={name: sgd, lr: 1, momentum: 0.9}"],
        "embedding.optimizer.momentum: strategy ddp trains by torch",
    ),
    (["strategy=ddp", "dense.optimizer={name: ftrl, lr: 1}"], "dense.optimizer.name: torch applies it to the dense"),
    (["dense.mode=ddp", "dense.optimizer={name: ftrl, lr: 1}"], "dense.optimizer.name: torch applies it to the dense"),
    (["dense.mode=ddp", "embedding.optimizer.name=ftrl"], "embedding.optimizer.name: torch applies it to the dense"),
    (
        ["strategy=ddp", "embedding.groups=[{match: linear, optimizer: {name: ftrl, lr: 1}}]"],
        "embedding.groups.0.optimizer.name: strategy ddp trains by torch",
    ),
    (
        ["train.staleness=local(2)", "embedding.optimizer.name=ftrl"],
        "embedding.optimizer.name: train.staleness local(2)",
    ),
    (
        ["train.staleness=local(2)", "dense.optimizer={name: ftrl, lr: 1}"],
        "dense.optimizer.name: train.staleness local(2)",
    ),
    (
        ["dense.mode=ddp", "dense.groups=[{match: first_order, optimizer: {name: ftrl, lr: 1}}]"],
        "dense.groups.0.optimizer.name: torch applies it",
    ),
    (
        ["dense.mode=ddp", "dense.optimizer={name: sgd, lr: 1, clip_norm: 1}"],
        "dense.optimizer.clip_norm: bounds a block of 1024 dense floats",
    ),
    (["strategy=hybrid", "dense.mode=ps"], "dense.mode: strategy hybrid keeps dense weights in the workers"),
    (["strategy=hybrid", "train.staleness=local(2)"], "strategy: all-reduces dense weights at every step"),
    (["dense.mode=fsdp", "train.staleness=local(2)"], "dense.mode: all-reduces dense weights at every step"),
    (["train.staleness=local(2)", "train.prefetch=1"], "train.prefetch: train.staleness local(2) reads copies of its"),
    (["train.staleness=local(2)", "embedding.cache={rows: 9}"], "embedding.cache: train.staleness local(2) reads cop"),
    (
        ["train.staleness=local(2)", "embedding.optimizer={name: ftrl, lr: 0.1}"],
        "train.staleness local(2) trains copies of rows, which knows no ftrl; use sgd, adagrad, rowwise_adagrad",
    ),
    (
        ["train.staleness=local(2)", "train.staleness_aware_lr=true"],
        "train.staleness_aware_lr: with train.staleness local(2)",
    ),
    (
        ["train.staleness=0", "train.staleness_aware_lr=true"],
        "train.staleness_aware_lr: with train.staleness 0 no push is stale",
    ),
    (["train.staleness=0", "train.prefetch=1"], "train.prefetch: pulls 1 clocks ahead, beyond train.staleness 0"),
    (["train.staleness=0", "embedding.cache={staleness: 1}"], "embedding.cache: its copies may be 1 clocks old"),
    (["train.staleness=4", "train.prefetch=5"], "train.prefetch: pulls 5 clocks ahead, beyond train.staleness 4"),
    (
        ["train.staleness=4", "train.prefetch=4", "embedding.cache={staleness: 1}"],
        "embedding.cache: its copies may be 5 clocks old",
    ),
    (["train.lease=0"], "train.lease: input should be greater than or equal to 0.1"),
]


@pytest.mark.parametrize(("overrides", "want"), CONTRADICTIONS, ids=[" ".join(c[0]) for c in CONTRADICTIONS])
def test_modes_that_contradict_each_other_are_refused(folder: Path, overrides: list[str], want: str) -> None:
    found = mistakes(folder, *overrides)
    assert len(found) == 1, found
    assert want in found[0]


def test_without_shards_a_job_may_say_that_nothing_is_stale(folder: Path) -> None:
    nothing = ("train.staleness=0", "train.prefetch=0", "train.staleness_aware_lr=false")
    assert not load(folder, "strategy=ddp", *nothing).has_shards
    assert not load(folder, "strategy=ddp", "dense.mode=ddp").has_shards  # as it does anyway


def test_local_steps_are_promised_for_what_trains_copies() -> None:
    assert set(job_modes.LOCAL_OPTIMIZERS) == set(local_steps.LOCAL_OPTIMIZERS)


@pytest.mark.parametrize("staleness", ["4", "off"])
def test_learning_rates_are_damped_where_pushes_may_be_stale(folder: Path, staleness: str) -> None:
    assert load(folder, f"train.staleness={staleness}", "train.staleness_aware_lr=true").train.staleness_aware_lr


def test_a_cache_within_the_bound_is_taken(folder: Path) -> None:
    assert load(folder, "train.staleness=4", "train.prefetch=1", "embedding.cache={staleness: 3}").embedding.cache


def test_dense_weights_in_workers_take_adagrad_for_rowwise_adagrad(folder: Path) -> None:
    assert load(folder, "dense.mode=ddp", "embedding.optimizer.name=rowwise_adagrad").all_reduces


def test_dense_weights_in_workers_need_nothing_of_the_optimizer_of_rows_beside_their_own(folder: Path) -> None:
    rows, dense = "embedding.optimizer={name: ftrl, lr: 1}", "dense.optimizer={name: adam, lr: 1}"
    assert load(folder, "dense.mode=ddp", rows, dense).all_reduces


def test_data_parallel_needs_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = mistakes(folder, "strategy=dp")
    assert "strategy: dp (DataParallel) splits a batch over GPUs, and this machine has none; use local or ddp" in line
    assert len(mistakes(folder, "strategy=dp", "train.device=cpu")) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(folder, "strategy=dp").workers == 1
    (line,) = mistakes(folder, "strategy=dp", "workers=2")
    assert "workers: strategy dp trains in one process; set it to 1" in line
    want = "model.name: two_tower compares each sample with the whole batch, which strategy dp splits; use ddp"
    assert any(want in line for line in mistakes(folder, "strategy=dp", "model.name=two_tower"))
    (line,) = mistakes(folder, "strategy=dp", "train.device=cpu")
    assert "train.device: strategy dp needs GPUs" in line
