"""Jobs of models that learn from lists of items: their losses train, and what does not fit is refused with its line."""

import pytest

from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.training.trainer import Trainer

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
