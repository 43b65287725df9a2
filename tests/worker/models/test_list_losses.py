"""The losses over lists against their papers' formulas, pair by pair."""

import math

import pytest
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch
from embershard.worker.models.list_losses import ListLoss
from embershard.worker.models.loss import loss_of
from embershard.worker.models.retrieval.two_tower import TwoTower

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


@pytest.mark.parametrize("name", ["bpr", "sampled_softmax"])
def test_weights_of_samples_that_it_would_not_use_are_refused(name):
    model = TwoTower(30, 4, temperature=1.0)
    batch = Batch(IDS, None, torch.ones(4), weights=torch.ones(4))
    with pytest.raises(JobError, match="weights"):
        loss_of(model, lambda model, batch: batch.labels, name)(model, batch)


def test_a_loss_over_lists_needs_a_model_that_is_trained_on_them():
    with pytest.raises(ValueError, match="bpr"):
        loss_of(torch.nn.Linear(1, 1), lambda model, batch: batch.labels, "bpr")
