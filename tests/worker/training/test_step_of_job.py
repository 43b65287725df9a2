"""What a job says of the training step: trained with, or refused by name."""

import math

import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.errors import JobError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.models.user_defined import forward_of
from embershard.worker.patterns import choose, freeze, matches
from embershard.worker.strategy.protocol import StepBatch
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.build import choose_strategy, step_of
from embershard.worker.training.trainer import Trainer
from harness.clicks import Notes, click_data, click_job, copied
from harness.job_files import mistakes

CPU = torch.device("cpu")
SCHEDULE = {"name": "torch", "class": "StepLR", "args": {"step_size": 2, "gamma": 0.5}, "warmup_steps": 2}
EVERYTHING = {
    "amp": "fp16",
    "accumulate": 2,
    "clip_norm": 0.5,
    "non_finite": "skip",
    "checkpoint_activations": True,
    "average": {"decay": 0.9},
    "lr_schedule": {"name": "torch", "class": "CosineAnnealingWarmRestarts", "args": {"T_0": 40}, "warmup_steps": 5},
}


def job(strategy="ps", train=(), **sections):
    train = {"batch_size": 50, "linear": "torch", **dict(train)}
    return click_job("deepfm", strategy, **{"model": {"hidden": [16, 8]}, **sections}, train=train)


@pytest.fixture
def make_trainer(make_session):
    def make(job, *observers):
        session = make_session() if job.strategy == "ps" else None
        return Trainer(job, click_data(train=1000, valid=500), session, WorkerGroup(), observers), session

    return make


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_everything_that_a_step_can_do_learns_together(make_trainer, strategy):
    result = make_trainer(job(strategy, {**EVERYTHING, "epochs": 8}))[0].run()
    assert result.figures["valid"]["auc"] > 0.8
    assert (result.steps, result.skipped_steps) == (8 * 10, 0)


@pytest.mark.parametrize(
    ("budget", "steps", "samples"),
    [({"epochs": 2}, 2 * 7, 2000), ({"steps": 4}, 4, 600), ({"samples": 500}, 4, 500)],
    ids=["epochs", "steps", "samples"],
)
def test_a_step_is_several_batches_where_they_are_accumulated(make_trainer, budget, steps, samples):
    notes = Notes()
    trainer, session = make_trainer(job(train={"accumulate": 3, **budget}), notes)
    assert trainer._budget.total_steps == steps  # after which a schedule ends
    result = trainer.run()
    assert (result.steps, result.samples, session.clock) == (steps, samples, steps)
    # the batches that are too few for a step make one before an evaluation
    assert [e.step for e in notes.evaluations] == ([7, 14] if "epochs" in budget else [steps])


def test_an_evaluation_is_of_the_averaged_weights(make_trainer):
    def losses(**train):
        return make_trainer(job(train=train))[0].run().figures["valid"]["logloss"]

    plain = losses()
    assert losses(average={"decay": 0.0}) == plain
    assert losses(average={"decay": 0.999999}) > plain


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_a_scheduler_of_torch_moves_the_rates(make_trainer, monkeypatch, strategy):
    monkeypatch.setattr("embershard.worker.reporting.throughput.INTERVAL_SECONDS", 0.0)
    notes = Notes()
    make_trainer(job(strategy, {"steps": 7, "lr_schedule": SCHEDULE}), notes)[0].run()
    scales = [interval.lr_scale for interval in notes.intervals]
    assert scales[:7] == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25])


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_what_is_frozen_keeps_its_values_and_the_rest_learns(make_trainer, strategy):
    trainer, session = make_trainer(job(strategy, freeze=["linear", "deep.0*"]))
    trainer.strategy.refresh()
    if session is not None:
        session.read_dense()
    before = copied(trainer.model)
    trainer.run()
    if session is not None:
        session.read_dense()
        rows = {table.name: table.rows for status in session.client.status() for table in status.tables}
        assert rows["embedding"] > 0
        assert rows["linear"] == 0  # nothing was pushed
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert {"deep.2.weight", "output.weight"} <= moved
    assert not {"deep.0.weight", "deep.0.bias", "linear.weight"} & moved


def group(match, name, lr, **fields):
    return {"match": match, "optimizer": {"name": name, "lr": lr}, **fields}


@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_groups_have_their_own_optimizers_and_first_values(make_trainer, strategy):
    embedding = {
        "optimizer": {"name": "adagrad", "lr": 0.1},
        "initializer": {"name": "normal", "std": 0.01},
        "groups": [group("lin*", "sgd", 0.5, initializer={"name": "constant", "value": 0.25})],
    }
    dense = {"groups": [group("deep", "adam", 1e-3)]}
    trainer, session = make_trainer(job(strategy, {"epochs": 4}, embedding=embedding, dense=dense))
    if session is not None:
        specs = {table.spec.name: table.spec for table in session.tables}
        assert specs["linear"].initializer == es.Constant(value=0.25)
        assert {name: spec.optimizer for name, spec in specs.items()} == {
            "linear": es.SGD(lr=0.5),
            "embedding": es.Adagrad(lr=0.1),
            "dense.1": es.Adam(lr=1e-3),
            "dense": es.Adagrad(lr=0.1),
        }
    else:
        kinds = [(type(o).__name__, len(o.param_groups[0]["params"])) for o in trainer.strategy.optimizers]
        assert kinds == [("SGD", 1), ("Adagrad", 1), ("Adam", 4), ("Adagrad", 4)]
        assert float(trainer.model.linear.weight.detach()[0, 0]) == 0.25
    assert trainer.run().figures["valid"]["auc"] > 0.8


SGD_GROUPS = {"optimizer": {"name": "sgd", "lr": 1}, "groups": [group("deep", "sgd", 1)]}


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"freeze": ["linaer"]}, "freeze: 'linaer' matches nothing"),
        ({"freeze": ["*"]}, "freeze: .* leaves no parameter to train"),
        (
            {"dense": {"groups": [group("embedding", "sgd", 1)]}},
            "dense.groups: 'embedding' matches nothing that is left .known: first_order.bias, ",
        ),
        ({"embedding": SGD_GROUPS}, "embedding.groups: 'deep' matches nothing .* .known: embedding, linear"),
    ],
    ids=["name", "everything", "dense", "embedding"],
)
def test_a_pattern_that_fits_nothing_is_refused_before_a_table_is_made(make_session, sections, where):
    session = make_session()
    with pytest.raises(JobError, match=where):
        Trainer(job(**sections), click_data(train=1000, valid=500), session, WorkerGroup())
    assert session.tables == ()


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
    with pytest.raises(ValueError, match=r"x: no pattern matches 'age' \(there are: user\*\)"):
        choose(["user_id", "age"], {"user*": 1}, "x")
    with pytest.raises(ValueError, match=r"x: '\*_id' matches nothing"):
        choose(["user_id"], rules, "x")


def test_freezing_names_what_it_froze():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert freeze(model, ["0", "*.bias"]) == ["0.weight", "0.bias", "1.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight"]
    assert freeze(model, []) == []


def groups(match, name):
    return f"{{groups: [{{match: '{match}', optimizer: {{name: {name}, lr: 1}}}}]}}"


def torch_schedule(name, args):
    return f"  lr_schedule: {{name: torch, class: {name}, args: {{{args}}}}}"


GOOD = """\
model: {name: deepfm}
data: {reader: ctr_csv, train: t.csv}
embedding:
  optimizer: {name: adagrad, lr: 0.1}
train:
  batch_size: 32
  epochs: 1
"""


@pytest.mark.parametrize(
    ("extra", "want"),
    [
        ("  amp: fp32", "8: train.amp: input should be 'off', 'bf16' or 'fp16', got 'fp32'"),
        ("  accumulate: 0", "8: train.accumulate: input should be greater than or equal to 1, got 0"),
        ("  clip_norm: 0", "8: train.clip_norm: input should be greater than 0, got 0"),
        ("  non_finite: ignore", "8: train.non_finite: input should be 'stop' or 'skip', got 'ignore'"),
        ("  average: {decay: 1}", "8: train.average.decay: input should be less than 1, got 1"),
        ("  compile: true\n  checkpoint_activations: true", "9: train.checkpoint_activations: torch.compile decides"),
        (
            "  amp: bf16\n  linear: onednn",
            "9: train.linear: with train.amp bf16 torch computes the linear layers; use auto",
        ),
        ("  compile: true\nstrategy: hybrid\ndense: {mode: fsdp}", "8: train.compile: with fsdp a worker holds"),
        (f"dense: {groups('deep', 'rowwise_adagrad')}", "8: dense.groups.0.optimizer.name: keeps one accumulator"),
        (f"dense: {groups('*', 'sgd')}", "8: dense.groups.0.match: '*' matches all"),
        (torch_schedule("StepLR", "step: 2"), "8: train.lr_schedule.args: is refused: StepLR takes no 'step'"),
        (torch_schedule("StepLR", "step_size: 2, gamma: .nan"), "8: train.lr_schedule.args.gamma: must be finite"),
        (torch_schedule("Stepp", ""), "8: train.lr_schedule.class: is refused: torch.optim.lr_scheduler has no class"),
        ("  lr_schedule: {name: torch}", "8: train.lr_schedule.class: must name one of torch.optim.lr_scheduler"),
        ("  lr_schedule: {name: constant, class: StepLR}", "8: train.lr_schedule.class: has no meaning for constant"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_line(tmp_path, extra, want):
    (tmp_path / "t.csv").write_text("label,a\n1,2\n")
    (found,) = mistakes(tmp_path, GOOD + extra + "\n")
    assert found.startswith(f"job.yaml:{want}")


def made(worker=0, **train):
    """The step of a job without shards, and its model."""
    settings = job("local", train)
    model = settings.model.build(click_data(train=8).schema, settings.dim, "meta")
    strategy = choose_strategy(settings, model, None, CPU)
    return step_of(settings, strategy, None, CPU, forward_of(model), worker=worker), strategy.model


def turn():
    batch = next(iter(click_data(train=8).train(0, 0, 1, 8)))
    return StepBatch(0, batch, len(batch))


def test_workers_leave_out_together_what_one_of_them_must(monkeypatch):
    monkeypatch.setattr(TorchStrategy, "agree", property(lambda strategy: lambda norm: math.inf))
    step, _ = made(non_finite="skip")
    step(turn())
    assert step.skipped == 1


def test_activations_are_computed_again_and_the_dense_part_is_compiled(monkeypatch):
    (step, model), runs, compiled = made(checkpoint_activations=True), [], []
    model.get_submodule("deep.0").register_forward_hook(lambda *_: runs.append(1))
    step(turn())
    assert len(runs) == 2
    monkeypatch.setattr("embershard.worker.training.build.compile_dense", compiled.append)
    made()
    assert compiled == []
    assert made(compile=True)[1] in compiled


def test_dense_weights_are_averaged_and_tables_are_not():
    step, model = made(average={"decay": 0.9})
    for _ in range(2):
        step(turn())
    now = copied(model)
    with step.averaged(lambda values: None):
        averaged = {name for name, value in model.named_parameters() if not torch.equal(value, now[name])}
    assert "output.weight" in averaged
    assert averaged.isdisjoint({"embedding.weight", "linear.weight"})
