"""SimpleX against its equations, one user at a time, and the histories that it is given."""

import numpy as np
import pytest
import torch

from embershard.worker.data.interactions.gowalla import InteractionLists
from embershard.worker.data.readers.interactions import Interactions
from embershard.worker.models.retrieval.simplex import SimpleX
from embershard.worker.models.retrieval.two_tower import TwoTower

IDS = torch.tensor([[0, 10, 20, 21, 11, 12, -1], [1, 11, 22, 10, 13, -1, -1], [2, 12, 20, 23, -1, -1, -1]])
HISTORIES = [[11, 12], [13], []]


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=0)


def mean(model, user, taken):
    return taken.mean(0)


def user_attention(model, user, taken):
    scores = torch.stack([model.key(row).tanh() @ user for row in taken])
    return scores.softmax(0) @ taken


@pytest.mark.parametrize("pool", [mean, user_attention], ids=lambda pool: pool.__name__)
def test_users_are_their_row_and_what_they_took_and_share_negatives(pool):
    torch.manual_seed(1)
    model = SimpleX(30, 4, 3, gamma=0.3, pooling=pool.__name__)
    weight = model.embedding.weight
    vectors = []
    for (user, *_), taken in zip(IDS.tolist(), HISTORIES, strict=True):
        pooled = model.project(pool(model, weight[user], weight[taken])) if taken else torch.zeros(4)
        vectors.append(0.3 * weight[user] + 0.7 * pooled)
    own = torch.stack([cosine(v, weight[item]) for v, item in zip(vectors, IDS[:, 1], strict=True)])
    torch.testing.assert_close(model(IDS), own)
    negatives = IDS[:, 2:4].flatten().tolist()  # of all three
    want = torch.stack([torch.stack([cosine(v, weight[item]) for item in negatives]) for v in vectors])
    want[0, 3] = -torch.inf  # item 10 is the first user's own
    scores = model(IDS, None, True)
    found = model.split_lists(scores, IDS)
    torch.testing.assert_close(found[0], own)
    torch.testing.assert_close(found[1], want)
    ranked = model.user_vectors(IDS[:, [0, 4, 5, 6]]) @ model.item_vectors(IDS[:, 1]).T
    torch.testing.assert_close(ranked.diagonal(), own)
    assert torch.equal(model.embedding_inputs(IDS)["embedding"], torch.tensor([*IDS[:, :4].flatten(), 11, 12, 13]))


def test_large_scores_of_attention_are_finite_and_choose_the_item_that_fits():
    torch.manual_seed(1)
    model = SimpleX(30, 4, 3, gamma=0.0, pooling="user_attention")
    with torch.no_grad():
        model.embedding.weight.mul_(1e4)
        keys = model.key(model.embedding.weight[11:13]).tanh() @ model.embedding.weight[0]
    found = model.user_vectors(IDS[:, [0, 4, 5, 6]])
    want = model.project(model.embedding.weight[11 + keys.argmax()])
    assert cosine(found[0], want).item() == pytest.approx(1, abs=1e-5)
    found.sum().backward()
    assert bool(model.embedding.weight.grad.isfinite().all())


@pytest.mark.parametrize(
    "make",
    [lambda: SimpleX(30, 4, 3, dropout=0.5), lambda: TwoTower(30, 4, temperature=1.0, dropout=0.5)],
    ids=["simplex", "two_tower"],
)
def test_dropout_zeroes_a_part_of_a_users_unit_vector_in_training_alone(make):
    torch.manual_seed(1)
    model = make()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(30, 4) + 1)  # what a cosine has of each dimension differs
    ids = IDS if isinstance(model, SimpleX) else IDS[:, :4]
    exact = model.eval()(ids)
    assert torch.equal(model(ids), exact)
    model.train()
    found = torch.stack([model(ids) for _ in range(2000)])
    torch.testing.assert_close(found.mean(0), exact, rtol=0, atol=0.05)
    assert bool((found.amax(0) > 1.2).any())  # a vector that was normalised again has no cosine above 1


def test_a_history_has_other_items_of_the_user_spread_over_all_of_them():
    items = np.arange(100, 120)
    data = Interactions.of(np.r_[np.zeros(20, np.int64), 1, 1], np.r_[items, 5, 7], 3, 200)
    users = np.array([0, 0, 1, 2])
    found = data.histories(users, 5, np.array([0, 3, 0, 0]), np.array([104, 111, 7, 1]))
    assert found.tolist() == [[100, 108, 112, 116, -1], [103, 107, 115, 119, -1], [5] + [-1] * 4, [-1] * 5]
    assert data.histories(users[2:], 2, np.zeros(2, np.int64)).tolist() == [[5, 7], [-1, -1]]


def test_lists_come_with_histories_and_users_are_ranked_with_theirs(tmp_path):
    (tmp_path / "train").write_text("0 0 1 2\n1 3\n2 1 4\n")
    (tmp_path / "test").write_text("0 4\n1 1\n")
    data = InteractionLists.read(tmp_path / "train", tmp_path / "test", negatives=2, history=3)
    (batch,) = data.train(0, 0, 1, 100)
    taken = {0: {3, 4, 5}, 1: {6}, 2: {4, 7}}  # items come behind the three users
    for user, item, first, second, *history in batch.ids.tolist():
        assert not {first, second} & taken[user]
        assert {i for i in history if i >= 0} == taken[user] - {item}
    assert data.schema.fields[-1].width == 3
    assert data.schema.num_id_columns == batch.ids.shape[1]
    (users,) = data.users("test", 0, 1, 100)
    assert users.ids.tolist() == [[0, 3, 4, 5], [1, 6, -1, -1]]
