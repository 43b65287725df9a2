"""Jobs of models that learn from lists of items: their losses train, and what does not fit is refused with its line."""

import re
from types import SimpleNamespace

import pytest

from embershard.proto.errors import JobError
from embershard.worker.checkpoint.checkpoint import checkpoint_at
from embershard.worker.checkpoint.snapshots import restore_snapshot
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.job.training import CheckpointSection
from embershard.worker.trained.evaluation import trained_evaluator
from embershard.worker.training.trainer import Trainer
from harness.raises import raises

JOB = """\
model: {model}
data: {data}
loss: {loss}
embedding: {{dim: 8, optimizer: {{name: sgd, lr: 0.1}}}}
train: {{epochs: 1, batch_size: 4}}
"""
LISTS = "{reader: lists, train: lists.txt, test: lists.txt, negatives: 2}"
ACTIONS = "{reader: sequences, actions: actions.txt, max_length: 3, candidates: 2}"


def job_of(folder, model, data, loss):
    items = {user: [(user + i) % 9 for i in range(4)] for user in range(6)}
    (folder / "lists.txt").write_text("".join(f"{u} {' '.join(map(str, own))}\n" for u, own in items.items()))
    (folder / "actions.txt").write_text("".join(f"{u} {item}\n" for u, own in items.items() for item in own))
    (folder / "job.yaml").write_text(JOB.format(model=model, data=data, loss=loss))
    return load_job(folder / "job.yaml")


@pytest.mark.parametrize("loss", ["bce", "bpr", "sampled_softmax"])
@pytest.mark.parametrize(
    ("model", "data"), [("{name: two_tower}", LISTS), ("{name: simplex}", LISTS), ("{name: sasrec, heads: 2}", ACTIONS)]
)
def test_a_loss_that_a_job_names_trains(make_session, tmp_path, model, data, loss):
    job = job_of(tmp_path, model, data, loss)
    Trainer(job, job.data.open(tmp_path, 0), make_session(2), WorkerGroup()).run()


@pytest.mark.parametrize(
    ("model", "data", "weight"),
    [("simplex", LISTS[:-1] + ", history: 2", "project.weight"), ("sasrec", ACTIONS[:-1], "position")],
)
def test_a_sampled_softmax_knows_how_often_each_item_is_drawn(make_session, tmp_path, model, data, weight):
    job = job_of(tmp_path, f"{{name: {model}}}", data + ", negatives_by: popularity}", "sampled_softmax")

    def trained(dataset):
        trainer = Trainer(job, dataset, make_session(2), WorkerGroup())
        trainer.run()
        return trainer.model.get_parameter(weight)

    dataset = job.data.open(tmp_path, 0)
    unknown = SimpleNamespace(**{name: getattr(dataset, name) for name in dir(dataset) if name[0] != "_"})
    unknown.log_q = None
    assert (trained(dataset) - trained(unknown)).abs().max() > 1e-4


def test_weights_are_not_taken_for_those_of_other_items_once_there_is_a_new_user(make_session, tmp_path):
    job = job_of(tmp_path, "{name: two_tower}", LISTS, "bce")
    job = job.model_copy(update={"checkpoint": CheckpointSection(folder=str(tmp_path / "kept"))})
    Trainer(job, job.data.open(tmp_path, 0), make_session(2), WorkerGroup()).run()
    kept = checkpoint_at(str(tmp_path / "kept"))
    lists = (tmp_path / "lists.txt").read_text()

    def resume():
        session = make_session(2)
        restore_snapshot(session.client, kept.url, "shards")
        return Trainer(job, job.data.open(tmp_path, 0), session, WorkerGroup(), resume=kept)

    (tmp_path / "lists.txt").write_text(lists.replace("5 5", "5 9 5"))
    resume().run()  # a new item has a new row
    (tmp_path / "lists.txt").write_text(lists + "6 1 2\n")
    error = re.compile("the ids of 'item' begin at 7, .* and began at 6 when the checkpoint was trained")
    with raises(JobError, where="data", reason=error):
        resume()
    with raises(JobError, where="data", reason=error):
        trained_evaluator(job, job.data.open(tmp_path, 0), make_session(2), kept)


@pytest.mark.parametrize(
    ("model", "data", "loss", "want"),
    [
        ("{name: sasrec, heads: 3}", ACTIONS, "bce", "job.yaml:1: model.heads: must divide embedding.dim, which is 8"),
        (
            "{name: two_tower}",
            LISTS,
            "{name: bce, label_weights: [2]}",
            "job.yaml:3: loss.label_weights: weigh several labels",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(tmp_path, model, data, loss, want):
    with pytest.raises(JobFileError) as found:
        job_of(tmp_path, model, data, loss)
    assert want in str(found.value)
