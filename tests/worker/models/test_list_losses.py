"""The losses over lists against their papers' formulas, pair by pair."""

import itertools
import math

import pytest
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch
from embershard.worker.models.list_losses import ListLoss
from embershard.worker.models.loss import loss_of
from embershard.worker.models.recommender import ListRecommender
from embershard.worker.models.retrieval.simplex import SimpleX
from embershard.worker.models.retrieval.two_tower import TwoTower
from embershard.worker.models.sequence.sasrec import SASRec

IDS = torch.tensor([[0, 10, 20], [1, 11, 21], [2, 10, 22], [3, 12, 10]])  # user, item, negative


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def scores_of(model, items):
    """(own, others) of each user among items, without the own item again."""
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(model.embedding.weight, dim=1)
        for user, own, _ in IDS.tolist():
            scores = (vectors[items] @ vectors[user]).tolist()
            yield (
                float(vectors[own] @ vectors[user]),
                [score for score, item in zip(scores, items.tolist(), strict=True) if item != own],
            )


def bce(own, others, count):
    return -math.log(sigmoid(own)), -sum(math.log(1 - sigmoid(other)) for other in others) / count


def bpr(own, others, count):
    return 0.0, -sum(math.log(sigmoid(own - other)) for other in others) / count


def ccl(own, others, count):
    return 1 - own, 3.0 * sum(max(0.0, other - 0.1) for other in others) / count


def softmax(own, others, count):
    return -math.log(math.exp(own) / sum(math.exp(x) for x in [own, *others])), 0.0


@pytest.mark.parametrize(
    ("name", "args", "formula"),
    [
        ("bce", {}, bce),
        ("bpr", {}, bpr),
        ("ccl", {"margin": 0.1, "negative_weight": 3.0}, ccl),
        ("sampled_softmax", {}, softmax),
    ],
)
@pytest.mark.parametrize("negatives", [True, False], ids=["uniform negatives alone", "items of the batch"])
def test_a_loss_is_its_formula(name, args, formula, negatives):
    torch.manual_seed(1)
    model = TwoTower(30, 4, temperature=1.0)
    items = IDS[:, 2] if negatives else IDS[:, 1]
    parts = [formula(own, others, len(items)) for own, others in scores_of(model, items)]
    batch = Batch(IDS if negatives else IDS[:, :2], None, torch.ones(4))
    loss = ListLoss(model, name, args)(model, batch)
    assert loss.item() == pytest.approx(sum(map(sum, parts)) / len(parts), rel=1e-5)
    loss.backward()
    assert bool(model.embedding.weight.grad.isfinite().all())


SEQUENCES = torch.tensor([[3, 4, 4, 20, 21, 5, 22, 23], [6, -1, 7, 24, 25, -1, -1, -1]])
NEGATIVES = [20, 21, 22, 10]  # of all rows of IDS


@pytest.mark.parametrize(
    ("model", "ids", "own", "others"),
    [
        (SimpleX(30, 4, 0, gamma=1.0), IDS, [10, 11, 10, 12], [NEGATIVES] * 4),
        (SASRec(30, 4, 2, dropout=0.0), SEQUENCES, [4, 5, 7], [[20, 21], [22, 23], [24, 25]]),
    ],
    ids=["simplex", "sasrec"],
)
def test_a_sampled_softmax_alone_corrects_each_score_for_how_often_its_item_is_drawn(model, ids, own, others):
    log_q = torch.randn(30, generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, None, torch.ones(len(ids)))
    scores = model.split_lists(model(ids, None, True), ids)
    pairs = zip(scores, (torch.tensor(own), torch.tensor(others)), strict=True)
    corrected = [(part - log_q[items]).tolist() for part, items in pairs]
    want = [softmax(*pair, 0)[0] for pair in zip(*corrected, strict=True)]
    found = loss_of(model, model, "sampled_softmax", log_q=log_q)(model, batch)
    assert found.item() == pytest.approx(sum(want) / len(want), rel=1e-5)
    for name in ("bce", "bpr", "ccl"):
        assert torch.equal(ListLoss(model, name, {}, log_q)(model, batch), ListLoss(model, name)(model, batch))


class OneUser(ListRecommender):
    """A score of each item."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(scores)

    def forward(self, ids, dense=None, lists=False):
        return self.scores[ids]

    def list_items(self, ids):
        return ids[:, 0], ids[:, 1:]


@pytest.mark.parametrize("negatives", [1, 2, 3])
def test_items_drawn_by_popularity_train_what_a_softmax_over_all_items_does(negatives):
    taken, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.6, 0.1, 0.2])

    def gradient(log_q):
        """That of the expected loss, over all lists that can be drawn, at the optimum of the softmax over all items."""
        model = OneUser(taken.log())
        loss = ListLoss(model, "sampled_softmax", {}, log_q)
        for own, *others in itertools.product(range(4), repeat=1 + negatives):
            batch = Batch(torch.tensor([[own, *others]]), None, torch.ones(1))
            (taken[own] * q[others].prod() * loss(model, batch)).backward()
        return model.scores.grad

    torch.testing.assert_close(gradient(q.log()), torch.zeros(4), rtol=0, atol=1e-6)
    assert gradient(None).abs().max() > 0.03


@pytest.mark.parametrize("name", ["bpr", "sampled_softmax"])
def test_weights_of_samples_that_it_would_not_use_are_refused(name):
    model = TwoTower(30, 4, temperature=1.0)
    batch = Batch(IDS, None, torch.ones(4), weights=torch.ones(4))
    with pytest.raises(JobError, match="weights"):
        loss_of(model, lambda model, batch: batch.labels, name)(model, batch)


def test_a_loss_over_lists_needs_a_model_that_is_trained_on_them():
    with pytest.raises(ValueError, match="bpr"):
        loss_of(torch.nn.Linear(1, 1), lambda model, batch: batch.labels, "bpr")
