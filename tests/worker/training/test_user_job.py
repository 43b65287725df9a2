"""Models, losses, metrics and callbacks of users: in a job they train as in plain torch, or are refused by name."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from embershard.proto.errors import EmbershardError, UserCodeFailed
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Batch, RowsDataset, Samples, Schema
from embershard.worker.job.job import Job
from embershard.worker.models.loss import loss_of
from embershard.worker.models.user_defined import LARGE, build_model
from embershard.worker.reporting.callbacks import Callback
from embershard.worker.training.build import job_model
from embershard.worker.training.evaluate import metrics_of
from embershard.worker.training.trainer import Trainer
from embershard.worker.training.try_model import try_model
from embershard.worker.training.user_metric import UserMetric

MODULE = """\
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
class Tower(nn.Module):
    def __init__(self, num_ids, num_fields, dim, width=4):
        super().__init__()
        self.emb = nn.Embedding(num_ids, dim)
        nn.init.normal_(self.emb.weight, std=0.01)
        self.bag = nn.EmbeddingBag(num_ids, 2, mode="sum")
        self.mlp = nn.Sequential(nn.Linear(num_fields * dim + 2, width), nn.ReLU(), nn.Linear(width, 1))
    def forward(self, ids):
        return self.mlp(torch.cat([self.emb(ids).flatten(1), self.bag(ids)], 1))
class Wide(Tower):
    def forward(self, ids):  # two
        return self.mlp(torch.cat([self.emb(ids).flatten(1), self.bag(ids)], 1)).repeat(1, 2)
class Small(Tower):
    def __init__(self, num_fields, dim):
        super().__init__(7, num_fields, dim)
class NaN(Tower):
    def forward(self, ids):
        return super().forward(ids) * float("nan")
class Detached(Tower):
    def forward(self, ids):
        return super().forward(ids).detach()
class Three(Tower):
    def forward(self, ids, dense, labels):
        return super().forward(ids)
class Raising(Tower):
    def forward(self, ids):
        raise KeyError("user")
class Padded(Tower):
    def __init__(self, num_ids, num_fields, dim):
        super().__init__(num_ids, num_fields, dim)
        self.emb = nn.Embedding(num_ids, dim, padding_idx=5)
class Listed(Tower):
    def __init__(self, num_ids, num_fields, dim):
        super().__init__(num_ids, num_fields, dim)
        self.tables = [nn.Embedding(num_ids, dim)]
class Huge(Tower):
    def __init__(self, num_ids, num_fields, dim):
        super().__init__(num_ids, num_fields, dim)
        self.rows = nn.Parameter(torch.empty((2**22, 2**10)))
class Empty(nn.Module):
    def forward(self, ids):
        return ids.sum(1)
class Needy(nn.Module):
    def __init__(self, depth):
        super().__init__()
def text():
    return "text"
def whole(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch.ids).squeeze(1), batch.labels)
def squared(logits, labels):
    return ((torch.sigmoid(logits) - labels) ** 2).mean()
def weighed_squares(logits, labels, *, weights):
    return ((torch.sigmoid(logits) - labels) ** 2 * weights).sum() / weights.sum()
def each(logits, labels):
    return (logits - labels) ** 2
class Weighted:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, logits, labels):
        return self.factor * squared(logits, labels)
def accuracy(labels, scores):
    return ((scores > 0) == (labels > 0.5)).mean()
def weighed(labels, scores, weights):
    return float((labels * weights).sum())
def by_group(labels, scores, groups):
    return float(len(set(groups.tolist())))
def two_classes(labels, scores):
    if len(set(labels.tolist())) != 2:
        raise ValueError("one class")
    return 1.0
def of_two_classes(labels, scores):
    if not len(labels):
        raise ValueError("no samples")
    return float(labels.mean() + scores.sum()) if len(set(labels.tolist())) == 2 else float("nan")
def word(labels, scores):
    return "good"
class Mean:
    def reset(self):
        self.sum, self.count = 0.0, 0
    def update(self, preds, target):
        assert target.dtype == torch.int64
        self.sum, self.count = self.sum + float(target.sum()), self.count + len(target)
    def compute(self):
        return torch.tensor(self.sum / self.count)
TOLD = []
class Teller:
    def started(self, plan):
        TOLD.append(plan.name)
    def evaluated(self, evaluation):
        TOLD.append(sorted(evaluation.figures["valid"]))
    def finished(self, result):
        TOLD.append(result.metric)
class Fails:
    def evaluated(self, evaluation):
        raise OSError("no network")
"""
ROWS, FIELDS = 20, 3


@pytest.fixture(autouse=True)
def line_of(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine_job", raising=False)
    (tmp_path / "mine_job.py").write_text(MODULE)

    def line(text):
        return f"{tmp_path / 'mine_job.py'}:{MODULE[: MODULE.index(text)].count(chr(10)) + 1}"

    return line


def samples(count, labels=None):
    random = np.random.default_rng(count)
    ids = random.integers(0, ROWS, (count, FIELDS))
    return Samples(ids, None, (ids.sum(1) % 2 if labels is None else np.full(count, labels)).astype(np.float32))


def dataset(labels=None):
    splits = {"train": samples(64), "valid": samples(32, labels)}
    return RowsDataset(Schema(("a", "b", "c"), 0, ROWS), splits, where="here")


def job(model="Tower", args=None, **sections):
    return Job.model_validate(
        {
            "model": {"class": f"mine_job:{model}", "args": args or {}},
            "data": {"reader": "clicks", "samples": 64},
            "embedding": {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.5}},
            "train": {"batch_size": 16, "epochs": 2},
            "strategy": "local",
            **sections,
        }
    )


def first_batches(data):
    return {"train": next(data.train(0, 0, 1, 16)), "valid": next(data.evaluate("valid", 0, 1, 16))}


@pytest.mark.parametrize("strategy", ["ps", "local"])
@pytest.mark.parametrize("loss", [None, "mine_job:whole", "mine_job:squared", "torch.nn:BCEWithLogitsLoss"])
def test_a_users_model_and_loss_train_as_in_plain_torch(make_session, strategy, loss):
    data, settings = dataset(), job(strategy=strategy, loss=loss, args={"width": 8})
    torch.manual_seed(settings.train.seed)
    plain = job_model(settings, data.schema)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for epoch in range(2):
        for batch in data.train(epoch, 0, 1, 16):
            logits = plain(batch.ids).squeeze(1)
            if loss == "mine_job:squared":
                value = ((logits.sigmoid() - batch.labels) ** 2).mean()
            else:
                value = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    trainer = Trainer(settings, data, make_session() if strategy == "ps" else None, WorkerGroup())
    result = trainer.run()
    assert result.steps == 8
    ids = samples(16).batch().ids
    with torch.no_grad():
        torch.testing.assert_close(trainer.model(ids), plain(ids), rtol=0, atol=1e-6)


def test_a_users_loss_gets_the_weights_of_the_samples_or_is_refused(line_of):
    model, weights = nn.Linear(3, 1), torch.rand(16)
    batch = dataclasses.replace(first_batches(dataset())["train"], weights=weights)
    forward = lambda model, batch: model(batch.ids.float()).squeeze(1)  # noqa: E731
    squares = (forward(model, batch).sigmoid() - batch.labels) ** 2
    torch.testing.assert_close(
        loss_of(model, forward, "mine_job:weighed_squares")(model, batch), squares @ weights / weights.sum()
    )
    with pytest.raises(UserCodeFailed, match="give it a parameter called weights") as error:
        try_model(job(loss="mine_job:squared"), dataset().schema, {"train": batch})
    assert error.value.fields["where"] == line_of("def squared")


def test_tables_keep_the_users_first_values_unless_the_job_has_some():
    schema = dataset().schema
    own = job_model(job(), schema)
    assert own.emb.weight.std() < 0.02
    given = job_model(
        job(embedding={"optimizer": {"name": "sgd", "lr": 1}, "initializer": {"name": "constant", "value": 1}}), schema
    )
    assert given.emb.weight.is_meta
    assert given.bag.weight.is_meta
    hashed = build_model("mine_job:Padded", {}, Schema(("a",), 0, None), 4)
    assert (hashed.emb.weight.is_meta, hashed.emb.num_embeddings, hashed.emb.padding_idx) == (True, 2**62, 5)
    assert 2**62 * 2 > LARGE


def test_a_job_with_code_of_its_own_comes_back_from_what_is_written_of_it():
    metrics = ["auc", {"class": "mine_job:accuracy", "lower_is_better": True}]
    given = job(args={"width": 8}, loss="mine_job:squared", metrics=metrics, callbacks=["mine_job:Teller"])
    written = given.model_dump(mode="json")
    assert written["model"] == {"class": "mine_job:Tower", "args": {"width": 8}}
    assert Job.model_validate(written) == given


def test_metrics_and_callbacks_of_a_user_are_computed_and_told():
    metrics = ["logloss", "mine_job:accuracy", {"class": "mine_job:Mean"}]
    settings = job(metrics=metrics, evaluate={"metric": "accuracy"}, callbacks=["mine_job:Teller"])
    callback = Callback(settings.callbacks[0].code, {})
    data = dataset()
    result = Trainer(settings, data, None, WorkerGroup(), [callback]).run()
    figures = result.figures["valid"]
    assert list(figures) == ["logloss", "accuracy", "Mean", "ne", "samples"]
    assert figures["Mean"] == pytest.approx(samples(32).labels.mean())
    told = __import__("mine_job").TOLD
    assert told == ["mine_job:Tower on clicks", *[sorted(figures)] * 2, "accuracy"]


@pytest.mark.parametrize(
    ("settings", "judged"),
    [({}, True), ({"metrics": ["auc"]}, True), ({"metrics": ["auc"], "loss": "mine_job:squared"}, False)],
)
def test_the_first_evaluation_is_judged_by_ne_whatever_metrics_a_job_lists(settings, judged):
    # with a loss of the user's own, logits need not be log-odds
    metrics = metrics_of(job(**settings))
    (collector,) = metrics.collectors()
    collector.update(np.array([9.0, -9.0]), np.array([0.0, 1.0]))
    assert ("ne" in metrics.compute([collector])) == judged


@pytest.mark.parametrize(
    ("settings", "what", "text", "at"),
    [
        ({"model": "Nobody"}, "module", "no 'Nobody'", None),
        ({"model": "Needy"}, "model", "'depth'", "class Needy"),
        ({"args": {"wdith": 3}}, "model", "'wdith'", "class Tower"),
        ({"model": "Empty"}, "model", "no parameters", "class Empty"),
        ({"model": "text"}, "model", "no nn.Module", "def text"),
        ({"model": "Huge"}, "model", "rows of more than 1 GiB", "class Huge"),
        ({"model": "Wide"}, "model", "(16, 2)", "def forward(self, ids):  # two"),
        ({"model": "Three"}, "model", "(ids, dense, labels)", "def forward(self, ids, dense, labels)"),
        ({"model": "Raising"}, "model", "KeyError", 'raise KeyError("user")'),
        ({"model": "NaN"}, "model", "nan", "class NaN"),
        ({"model": "Detached"}, "model", "without a gradient", "class Detached"),
        ({"model": "Small"}, "model", "7 rows", "class Small"),
        ({"model": "Listed"}, "model", "nn.ModuleList", "class Listed"),
        ({"loss": "mine_job:each"}, "loss", "(16,)", "def each"),
        ({"loss": "mine_job:Weighted"}, "loss", "'factor'", "class Weighted"),
        ({"loss": "torch.nn:Bilinear"}, "loss", "in1_features", None),
        ({"metrics": ["mine_job:by_group"]}, "metric", "groups", "def by_group"),
        ({"metrics": ["mine_job:word"]}, "metric", "'good'", "def word"),
    ],
)
def test_what_does_not_work_is_refused_with_file_and_line(line_of, settings, what, text, at):
    data = dataset()
    with pytest.raises(EmbershardError) as error:
        try_model(job(**settings), data.schema, first_batches(data))
    assert text in str(error.value)
    if at is not None:
        found = error.value.fields
        assert (found["what"].split()[0], found["where"]) == (what, line_of(at))


def test_a_metric_that_wants_two_classes_is_tried_with_both_and_named_where_the_data_has_one(line_of):
    settings, data = job(metrics=["auc", "mine_job:two_classes"]), dataset(labels=1.0)
    try_model(settings, data.schema, first_batches(data))
    with pytest.raises(UserCodeFailed) as error:
        Trainer(settings, data, None, WorkerGroup()).run()
    assert error.value.fields["where"] == line_of('raise ValueError("one class")')
    assert "valid, whose 32 labels are all 1" in error.value.fields["what"]


def test_a_metric_is_tried_as_it_is_computed_of_one_label_without_missing_ones_and_by_the_groups_of_the_job():
    schema = Schema(("C1", "b", "c"), 0, ROWS, labels=("x", "y"))
    labels = torch.stack([torch.ones(16), torch.arange(16.0) % 2], 1)
    labels[3, 0] = torch.nan
    batch = dataclasses.replace(first_batches(dataset())["valid"], labels=labels)
    metrics = ["auc", "mine_job:two_classes", "mine_job:by_group"]
    settings = job("Wide", metrics=metrics, evaluate={"groups": "C1"})
    try_model(settings, schema, {"train": batch, "valid": batch})


def test_the_mean_of_a_metric_leaves_out_labels_without_samples_and_undefined_ones():
    job_metrics = metrics_of(job(metrics=["mine_job:of_two_classes"]))
    (collector,) = collectors = job_metrics.collectors(("whole", "one", "none"))
    labels = torch.tensor([[0.0, 1.0, torch.nan], [1.0, 1.0, torch.nan]])
    collector.update(torch.zeros(2, 3), labels)
    found = job_metrics.of_user(collectors, "valid")
    assert found["of_two_classes"] == found["of_two_classes:whole"] == 0.5
    assert np.isnan([found["of_two_classes:one"], found["of_two_classes:none"]]).all()
    collector.update(torch.full((1, 3), torch.nan), torch.ones(1, 3))  # of a model that diverged
    assert np.isnan(job_metrics.of_user(collectors)["of_two_classes"])


def test_groups_reach_a_metric_and_a_callback_that_fails_ends_the_run(line_of):
    metric = UserMetric("mine_job:by_group", {})
    assert metric(np.zeros(3, np.float32), np.zeros(3, np.float32), np.array([4, 4, 5])) == 2.0
    metric, none = UserMetric("mine_job:weighed", {}), np.zeros(3, np.float32)
    assert metric(np.ones(3, np.float32), none, None, np.array([1, 2, 3], np.float32)) == 6.0
    with pytest.raises(UserCodeFailed):
        metric(none, none, None)
    settings = job(callbacks=["mine_job:Fails"])
    with pytest.raises(UserCodeFailed) as error:
        Trainer(settings, dataset(), None, WorkerGroup(), [Callback("mine_job:Fails", {})]).run()
    assert error.value.fields["where"] == line_of('raise OSError("no network")')
    with pytest.raises(UserCodeFailed, match="none of the methods"):
        Callback("mine_job:text", {})


def test_a_batch_of_dense_features_needs_a_model_that_takes_them():
    schema = Schema(("a", "b", "c"), 2, ROWS)
    batch = Batch(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 2), torch.tensor([0.0, 1, 0, 1]))
    with pytest.raises(UserCodeFailed, match="takes no dense features"):
        try_model(job(), schema, {"train": batch})
