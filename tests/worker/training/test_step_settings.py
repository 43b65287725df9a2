"""What a job says of its step reaches the step."""

from __future__ import annotations

import math

import pytest
import torch
from test_step_of_job import dataset, job
from torch import nn

from embershard.worker.strategy.protocol import StepBatch
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.build import choose_strategy, step_of
from embershard.worker.training.step import NonFiniteLoss, StepSettings, TrainStep

CPU = torch.device("cpu")


def made(train: dict[str, object], worker: int = 0) -> tuple[TrainStep, nn.Module]:
    """The step of a job, and its model."""
    settings = job(train, strategy="local")
    model = settings.model.build(dataset().schema, settings.dim, "meta")
    strategy = choose_strategy(settings, model, None, CPU)
    return step_of(settings, strategy, None, CPU, worker=worker), strategy.model


def turn() -> StepBatch:
    batch = next(iter(dataset().train(0, 0, 1, 8)))
    return StepBatch(0, batch, len(batch))


def test_a_step_has_the_settings_of_the_job():
    train: dict[str, object] = {"amp": "bf16", "accumulate": 3, "clip_norm": 0.5, "non_finite": "skip"}
    assert made(train)[0]._settings == StepSettings(**train)  # type: ignore[arg-type]


def test_an_error_names_the_worker():
    step, model = made({}, worker=3)
    nn.init.constant_(model.get_parameter("output.bias"), math.nan)
    with pytest.raises(NonFiniteLoss, match="worker 3: the loss of step 1 is nan"):
        step(turn())


def test_workers_leave_out_together_what_one_of_them_must(monkeypatch):
    monkeypatch.setattr(TorchStrategy, "agree", property(lambda strategy: lambda norm: math.inf))
    step, _ = made({"non_finite": "skip"})
    step(turn())
    assert step.skipped == 1


def test_activations_are_computed_again():
    step, model = made({"checkpoint_activations": True})
    runs: list[int] = []
    model.get_submodule("deep.0").register_forward_hook(lambda *_: runs.append(1))
    step(turn())
    assert len(runs) == 2


def test_the_dense_part_is_compiled(monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr("embershard.worker.training.build.compile_dense", compiled.append)
    assert made({"compile": True})[1] in compiled
    made({})
    assert len(compiled) == 1


def test_dense_weights_are_averaged_and_tables_are_not():
    step, model = made({"average": {"decay": 0.9}})
    for _ in range(2):
        step(turn())
    now = {name: value.detach().clone() for name, value in model.named_parameters()}
    with step.averaged(lambda values: None):
        averaged = {name for name, value in model.named_parameters() if not torch.equal(value, now[name])}
    assert "output.weight" in averaged
    assert averaged.isdisjoint({"embedding.weight", "linear.weight"})
