"""What a job file says of the training step: trained with, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.errors import JobError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import RowsDataset, Samples, Schema
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.patterns import choose, freeze, matches
from embershard.worker.reporting.records import Evaluation, Interval, RunPlan, RunResult
from embershard.worker.session.session import Session
from embershard.worker.training.trainer import Trainer
from harness.job import make_job

MakeSession = Callable[..., Session]
F, PER_FIELD, D = 3, 20, 2


def rows(count: int, seed: int) -> Samples:
    """Clicks that a linear model of the ids explains."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PER_FIELD, (count, F)) + np.arange(F) * PER_FIELD
    effects = np.random.default_rng(0).normal(0, 2, F * PER_FIELD)
    labels = (rng.random(count) < 1 / (1 + np.exp(-effects[ids].sum(1)))).astype(np.float32)
    return Samples(ids, rng.random((count, D), np.float32), labels)


def dataset() -> RowsDataset:
    schema = Schema(tuple("abc"), D, F * PER_FIELD)
    return RowsDataset(schema, {"train": rows(1000, 1), "valid": rows(500, 2)}, where="made up", seed=3)


def job(train: dict[str, object] | None = None, **sections: object) -> Job:
    embedding = {"optimizer": {"name": "adagrad", "lr": 0.1}, "initializer": {"name": "normal", "std": 0.01}}
    given: dict[str, object] = {"epochs": 4, **(train or {})}
    if {"steps", "samples"} & set(given):
        del given["epochs"]
    model = {"name": "deepfm", "hidden": [16, 8]}
    return make_job(
        **{"model": model, "embedding": embedding, **sections, "train": {"seed": 5, "linear": "torch", **given}}
    )


@dataclasses.dataclass
class Notes:
    """An observer that writes down what it is told."""

    intervals: list[Interval] = dataclasses.field(default_factory=list)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)

    def started(self, plan: RunPlan) -> None:
        pass

    def trained(self, interval: Interval) -> None:
        self.intervals.append(interval)

    def evaluating(self) -> None:
        pass

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def finished(self, result: RunResult) -> None:
        pass

    def close(self) -> None:
        pass


def trainer_of(job: Job, session: Session | None, notes: Notes | None = None) -> Trainer:
    return Trainer(job, dataset(), session, WorkerGroup(), [notes] if notes else [])


def run(job: Job, session: Session | None, notes: Notes | None = None) -> RunResult:
    return trainer_of(job, session, notes).run()


FEATURES: list[dict[str, object]] = [
    {"amp": "bf16"},
    {"amp": "fp16", "accumulate": 2},
    {"accumulate": 3, "epochs": 8},
    {"clip_norm": 0.5},
    {"non_finite": "skip"},
    {"checkpoint_activations": True},
    {"average": {"decay": 0.9}},
    {"lr_schedule": {"name": "torch", "class": "CosineAnnealingWarmRestarts", "args": {"T_0": 40}, "warmup_steps": 5}},
]


@pytest.mark.parametrize("strategy", ["ps", pytest.param("local", marks=pytest.mark.long)])
@pytest.mark.parametrize("train", FEATURES, ids=lambda train: "-".join(train))
def test_every_feature_of_a_step_learns(make_session, train, strategy):
    result = run(job(train, strategy=strategy), make_session() if strategy == "ps" else None)
    assert result.figures["valid"]["auc"] > 0.8
    assert result.skipped_steps == 0


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_all_of_them_learn_together(make_session, strategy):
    train: dict[str, object] = {"epochs": 8}
    for feature in FEATURES:
        train |= {key: value for key, value in feature.items() if key != "epochs"}
    result = run(job({**train, "accumulate": 2}, strategy=strategy), make_session() if strategy == "ps" else None)
    assert result.figures["valid"]["auc"] > 0.8
    assert result.steps == 8 * 10


@pytest.mark.parametrize(
    ("budget", "steps", "samples"),
    [({"epochs": 2}, 2 * 7, 2000), ({"steps": 4}, 4, 600), ({"samples": 500}, 4, 500)],
    ids=["epochs", "steps", "samples"],
)
def test_a_step_is_several_batches_where_they_are_accumulated(make_session, budget, steps, samples):
    session = make_session()
    trainer = trainer_of(job({"accumulate": 3, **budget}), session)
    assert trainer._budget.total_steps == steps  # after which a schedule ends
    result = trainer.run()
    assert (result.steps, result.samples, session.clock) == (steps, samples, steps)


def test_steps_that_are_left_out_are_told(make_session, monkeypatch):
    trainer = trainer_of(job({"steps": 12, "non_finite": "skip"}), make_session())
    calls: list[int] = []

    def poisoned(model, batch):
        calls.append(1)
        return objective(model, batch) * (float("nan") if len(calls) % 4 == 0 else 1.0)

    objective = trainer._learn._loss
    monkeypatch.setattr(trainer._learn, "_loss", poisoned)
    result = trainer.run()
    assert (result.steps, result.skipped_steps) == (12, 3)


def test_an_evaluation_is_of_the_averaged_weights(make_session):
    kept = run(job({"average": {"decay": 0.999999}}), make_session())
    moved = run(job({"average": {"decay": 0.0}}), make_session())
    plain = run(job(), make_session())
    assert moved.figures == plain.figures
    assert kept.figures["valid"]["logloss"] > plain.figures["valid"]["logloss"]


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_a_scheduler_of_torch_moves_the_rates(make_session, monkeypatch, strategy):
    monkeypatch.setattr("embershard.worker.reporting.throughput.INTERVAL_SECONDS", 0.0)
    schedule = {"name": "torch", "class": "StepLR", "args": {"step_size": 2, "gamma": 0.5}, "warmup_steps": 2}
    notes = Notes()
    settings = job({"steps": 7, "lr_schedule": schedule}, strategy=strategy)
    run(settings, make_session() if strategy == "ps" else None, notes)
    scales = [interval.lr_scale for interval in notes.intervals]
    assert scales[:7] == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25])


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_what_is_frozen_keeps_its_values_and_the_rest_learns(make_session, strategy):
    session = make_session() if strategy == "ps" else None
    trainer = trainer_of(job({"epochs": 2}, strategy=strategy, freeze=["linear", "deep.0*"]), session)
    trainer.strategy.refresh()
    if session is not None:
        session.read_dense()
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.run()
    if session is not None:
        session.read_dense()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert {"deep.2.weight", "output.weight"} <= moved
    assert not {"deep.0.weight", "deep.0.bias", "linear.weight"} & moved
    if session is not None:
        rows = {table.name: table.rows for status in session.client.status() for table in status.tables}
        assert rows["embedding"] > 0
        assert rows["linear"] == 0  # nothing was pushed


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_groups_have_their_own_optimizers_and_first_values(make_session, strategy):
    settings = job(
        strategy=strategy,
        embedding={
            "optimizer": {"name": "adagrad", "lr": 0.1},
            "initializer": {"name": "normal", "std": 0.01},
            "groups": [
                {
                    "match": "lin*",
                    "optimizer": {"name": "sgd", "lr": 0.5},
                    "initializer": {"name": "constant", "value": 0.25},
                }
            ],
        },
        dense={"groups": [{"match": "deep", "optimizer": {"name": "adam", "lr": 1e-3}}]},
    )
    session = make_session() if strategy == "ps" else None
    trainer = trainer_of(settings, session)
    if session is not None:
        specs = {table.spec.name: table.spec for table in session.tables}
        assert specs["linear"].optimizer == es.SGD(lr=0.5)
        assert specs["linear"].initializer == es.Constant(value=0.25)
        assert specs["embedding"].optimizer == es.Adagrad(lr=0.1)
        assert specs["dense.1"].optimizer == es.Adam(lr=1e-3)
        assert specs["dense"].optimizer == es.Adagrad(lr=0.1)
    else:
        kinds = [(type(o).__name__, len(o.param_groups[0]["params"])) for o in trainer.strategy.optimizers]
        assert kinds == [("SGD", 1), ("Adagrad", 1), ("Adam", 4), ("Adagrad", 4)]
        assert float(trainer.model.linear.weight.detach()[0, 0]) == 0.25
    assert trainer.run().figures["valid"]["auc"] > 0.8


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"freeze": ["linaer"]}, "freeze: 'linaer' matches nothing"),
        ({"freeze": ["*"]}, "freeze: .* leaves no parameter to train"),
        (
            {"dense": {"groups": [{"match": "embedding", "optimizer": {"name": "sgd", "lr": 1}}]}},
            "dense.groups: 'embedding' matches nothing that is left .known: first_order.bias, ",
        ),
        (
            {
                "embedding": {
                    "optimizer": {"name": "sgd", "lr": 1},
                    "groups": [{"match": "deep", "optimizer": {"name": "sgd", "lr": 1}}],
                }
            },
            "embedding.groups: 'deep' matches nothing that is left .known: embedding, linear",
        ),
    ],
    ids=["name", "everything", "dense", "embedding"],
)
def test_a_pattern_that_fits_nothing_is_refused_before_a_table_is_made(make_session, sections, where):
    session = make_session()
    with pytest.raises(JobError, match=where):
        trainer_of(job(**sections), session)
    assert session.tables == ()


# Patterns


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("top.0.weight", "top", True),
        ("top.0.weight", "top.*", True),
        ("top.0.weight", "*.weight", True),
        ("top.0.weight", "top.0", True),
        ("top.0.weight", "to", False),
        ("top.0.weight", "0.weight", False),
        ("", "*", True),
        ("Top", "top", False),
    ],
)
def test_a_pattern_fits_a_name_or_a_module_that_it_lies_in(name, pattern, fits):
    assert matches(name, pattern) == fits


def test_the_first_pattern_that_fits_counts():
    rules = {"user*": 1, "*_id": 2, "*": 3}
    assert choose(["user_id", "item_id", "age"], rules, "x") == {"user_id": "user*", "item_id": "*_id", "age": "*"}
    with pytest.raises(ValueError, match=r"x: no pattern matches 'age' \(there are: user\*\); add one, or '\*'"):
        choose(["user_id", "age"], {"user*": 1}, "x")
    with pytest.raises(ValueError, match=r"x: '\*_id' matches nothing that is left"):
        choose(["user_id"], rules, "x")


def test_freezing_names_what_it_froze():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert freeze(model, ["0", "*.bias"]) == ["0.weight", "0.bias", "1.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight"]
    assert freeze(model, []) == []


# Job files

GOOD = """\
model: {name: deepfm}
data: {reader: ctr_csv, train: t.csv}
embedding:
  optimizer: {name: adagrad, lr: 0.1}
train:
  batch_size: 32
  epochs: 1
"""


def mistakes(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "t.csv").write_text("label,a\n1,2\n")
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(JobFileError) as caught:
        load_job(tmp_path / "job.yaml")
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


@pytest.mark.parametrize(
    ("extra", "want"),
    [
        ("  amp: fp32", "job.yaml:8: train.amp: input should be 'off', 'bf16' or 'fp16', got 'fp32'"),
        ("  accumulate: 0", "job.yaml:8: train.accumulate: input should be greater than or equal to 1, got 0"),
        ("  clip_norm: 0", "job.yaml:8: train.clip_norm: input should be greater than 0, got 0"),
        ("  non_finite: ignore", "job.yaml:8: train.non_finite: input should be 'stop' or 'skip', got 'ignore'"),
        ("  average: {decay: 1}", "job.yaml:8: train.average.decay: input should be less than 1, got 1"),
        (
            "  compile: true\n  checkpoint_activations: true",
            "job.yaml:9: train.checkpoint_activations: torch.compile decides itself what backward computes again; "
            "remove it, or train.compile",
        ),
        (
            "  amp: bf16\n  linear: onednn",
            "job.yaml:9: train.linear: with train.amp bf16 torch multiplies itself; use auto",
        ),
        (
            "  compile: true\nstrategy: hybrid\ndense: {mode: fsdp}",
            "job.yaml:8: train.compile: with fsdp a worker holds but a part of each dense weight; use ddp or ps",
        ),
        (
            "dense: {groups: [{match: deep, optimizer: {name: rowwise_adagrad, lr: 1}}]}",
            "job.yaml:8: dense.groups.0.optimizer.name: keeps one accumulator per row, and dense weights have no rows; "
            "use adagrad",
        ),
        (
            "dense: {groups: [{match: '*', optimizer: {name: sgd, lr: 1}}]}",
            "job.yaml:8: dense.groups.0.match: '*' is all of them: that is dense.optimizer",
        ),
        (
            "  lr_schedule: {name: torch, class: StepLR, args: {step: 2}}",
            "job.yaml:8: train.lr_schedule.args: is refused: StepLR takes no 'step'; it takes step_size, gamma",
        ),
        (
            "  lr_schedule: {name: torch, class: StepLR, args: {step_size: 2, gamma: .nan}}",
            "job.yaml:8: train.lr_schedule.args.gamma: must be finite",
        ),
        (
            "  lr_schedule: {name: torch, class: Stepp}",
            "job.yaml:8: train.lr_schedule.class: is refused: torch.optim.lr_scheduler has no class 'Stepp'",
        ),
        (
            "  lr_schedule: {name: torch}",
            "job.yaml:8: train.lr_schedule.class: must name one of torch.optim.lr_scheduler",
        ),
        (
            "  lr_schedule: {name: constant, class: StepLR}",
            "job.yaml:8: train.lr_schedule.class: has no meaning for constant; remove it",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_line(tmp_path, extra, want):
    assert mistakes(tmp_path, GOOD + extra + "\n") == [want]


def test_off_is_off(tmp_path):
    (tmp_path / "t.csv").write_text("label,a\n1,2\n")
    (tmp_path / "job.yaml").write_text(GOOD + "  amp: off\n")
    assert load_job(tmp_path / "job.yaml").train.amp == "off"


def test_a_job_with_a_scheduler_of_torch_is_the_same_after_a_round_trip():
    schedule = {"name": "torch", "class": "StepLR", "args": {"step_size": 2}}
    made = job({"lr_schedule": schedule})
    assert Job.model_validate(made.model_dump(mode="json")) == made
