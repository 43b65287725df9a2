import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.worker.metrics import (
    Candidates,
    FullRanking,
    Labels,
    Pointwise,
    Users,
    auc,
    calibration,
    candidate_ranks,
    gauc,
    hit_rate,
    logloss,
    map_one,
    ndcg_one,
    normalised_entropy,
    reliability,
)  # fmt: skip


def brute_auc(labels, scores):
    wins = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    return float(np.mean(wins)) if wins else math.nan


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), max_size=40))
def test_auc_counts_every_pair_and_half_of_the_ties(pairs):
    labels = np.array([p[0] for p in pairs], np.float32)
    scores = np.array([p[1] for p in pairs], np.float32)
    assert auc(labels, scores) == pytest.approx(brute_auc(labels, scores), abs=1e-12, nan_ok=True)


def test_auc_of_large_logits_does_not_saturate():
    assert auc(np.array([0, 1, 0, 1]), np.array([90.0, 91.0, 92.0, 93.0])) == 0.75


@pytest.mark.parametrize("labels", [[], [1.0], [0.0, 0.0]])
def test_figures_that_are_not_defined_are_nan(labels):
    labels = np.array(labels)
    logits = np.zeros(len(labels))
    assert math.isnan(auc(labels, logits))
    assert math.isnan(normalised_entropy(labels, logits))
    assert math.isnan(calibration(labels, logits)) == (labels.sum() == 0)
    assert math.isnan(logloss(labels, logits)) == (len(labels) == 0)


def test_logloss_is_the_cross_entropy_and_survives_huge_logits():
    labels, logits = np.array([1.0, 0.0, 1.0]), np.array([0.3, -1.2, 2.0])
    p = 1 / (1 + np.exp(-logits))
    assert logloss(labels, logits) == pytest.approx(-np.mean(np.log(np.where(labels == 1, p, 1 - p))), rel=1e-12)
    assert logloss(np.array([0.0, 1.0]), np.array([1000.0, 1000.0])) == 500.0


def test_predicting_the_mean_label_has_entropy_one_and_calibration_one():
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    logits = np.full(4, math.log(1 / 3))
    assert normalised_entropy(labels, logits) == pytest.approx(1.0, rel=1e-12)
    assert calibration(labels, logits) == pytest.approx(1.0, rel=1e-12)
    assert calibration(labels, np.zeros(4)) == pytest.approx(2.0, rel=1e-12)


def test_half_precision_is_taken_and_a_nan_prediction_of_any_batch_shows_in_every_figure():
    figures = Pointwise()
    figures.update(torch.tensor([0.5, -0.5], dtype=torch.bfloat16), torch.tensor([1.0, 0.0]))
    assert figures.compute()["auc"] == 1.0
    figures.update(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 0.0]))
    found = figures.compute()
    assert found["samples"] == 4
    assert all(math.isnan(found[name]) for name in ("auc", "logloss", "ne", "calibration"))


def test_rank_of_the_positive_counts_the_candidates_above_it_and_its_ties():
    scores = np.array([3.0, 1.0, 2.0, 5.0, 5.0, 0.0, 7.0])
    labels = np.array([0, 0, 1, 0, 1, 0, 1])
    groups = np.array([4, 4, 4, 2, 2, 2, 9])
    assert candidate_ranks(scores, labels, groups).tolist() == [1, 1, 0]


def test_constant_scores_rank_last_and_nan_never_ranks_first():
    labels, groups = np.array([0, 0, 1]), np.zeros(3, np.int64)
    assert candidate_ranks(np.zeros(3), labels, groups).tolist() == [2]
    assert candidate_ranks(np.array([0.0, 0.0, np.nan]), labels, groups).tolist() == [2]
    assert candidate_ranks(np.array([0.0, np.nan, 9.0]), labels, groups).tolist() == [1]


def test_hit_rate_and_ndcg_by_hand():
    ranks = np.array([0, 1, 3, 10])
    assert hit_rate(ranks, 3) == 0.5
    assert ndcg_one(ranks, 3) == pytest.approx((1 + 1 / math.log2(3)) / 4)
    assert math.isnan(hit_rate(ranks[:0], 3))
    assert math.isnan(ndcg_one(ranks[:0], 3))


@pytest.mark.parametrize("labels", [[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
def test_a_group_without_exactly_one_positive_is_refused(labels):
    with pytest.raises(ValueError, match="positive"):
        candidate_ranks(np.zeros(4), np.array(labels), np.array([0, 0, 1, 1]))


def test_candidates_over_batches_equal_the_whole():
    rng = np.random.default_rng(2)
    scores, groups = rng.normal(size=(50, 20)).astype(np.float32), np.repeat(np.arange(50), 20).reshape(50, 20)
    labels = np.zeros((50, 20), np.float32)
    labels[:, 7] = 1
    figures = Candidates(k=5)
    for i in range(50):
        figures.update(*(torch.from_numpy(x[i]) for x in (scores, labels, groups)))
    ranks = (scores > scores[:, 7:8]).sum(axis=1)
    want = {"hr@5": hit_rate(ranks, 5), "ndcg@5": ndcg_one(ranks, 5), "map@5": map_one(ranks, 5), "users": 50.0}
    assert figures.compute() == want
    assert math.isnan(Candidates().compute()["hr@10"])
    with pytest.raises(ValueError, match="groups"):
        Candidates().update(scores[0], labels[0])


@pytest.mark.long
def test_full_ranking_equals_torchmetrics():
    from torchmetrics.functional import retrieval as theirs  # whose import takes two seconds

    rng = np.random.default_rng(3)
    num_users, num_items, k = 17, 40, 6
    scores = torch.from_numpy(rng.normal(-10, size=(num_users, num_items)).astype(np.float32))
    kind = rng.choice(3, size=scores.shape, p=[0.7, 0.2, 0.1])  # 1: seen, 2: relevant
    kind[5][kind[5] == 2] = 0  # a user without anything to find does not count
    figures = FullRanking(k=k)
    figures.update(scores.clone(), Users(torch.arange(num_users), *np.nonzero(kind == 1), *np.nonzero(kind == 2)))
    want = {"users": num_users - 1}
    # torchmetrics leaves out what is not above 0
    unseen = [
        (row[what != 1].exp(), torch.from_numpy(what[what != 1] == 2)) for row, what in zip(scores, kind, strict=True)
    ]
    for name, function in ((f"recall@{k}", theirs.retrieval_recall), (f"ndcg@{k}", theirs.retrieval_normalized_dcg)):
        want[name] = np.mean([float(function(*each, top_k=k)) for each in unseen if each[1].any()])
    found = figures.compute()
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-6)


def test_full_ranking_with_fewer_items_than_k():
    figures = FullRanking(k=20)
    users = Users(torch.arange(1), np.array([0]), np.array([0]), np.array([0, 0]), np.array([1, 2]))
    figures.update(torch.tensor([[9.0, 2.0, 1.0]], dtype=torch.bfloat16), users)
    perfect = dict.fromkeys(("recall@20", "ndcg@20", "map@20", "users"), 1.0)
    assert figures.compute() == {**perfect, "coverage@20": 2 / 3}  # the seen item is shown to nobody
    assert math.isnan(FullRanking().compute()["recall@20"])
    again = Users(torch.arange(1), np.array([0]), np.array([0]), np.array([0, 0]), np.array([0, 1]))
    figures = FullRanking(k=20)
    figures.update(torch.tensor([[9.0, 2.0, 1.0]]), again)
    assert figures.compute()["recall@20"] == 0.5  # the seen item is no hit, though there is nothing better to show


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(-2, 2)), max_size=40))
def test_gauc_is_the_mean_auc_of_users_weighed_by_their_samples(samples):
    groups, labels, scores = (
        np.array(part, np.float64) for part in (zip(*samples, strict=True) if samples else [()] * 3)
    )
    found = [(int((groups == g).sum()), brute_auc(labels[groups == g], scores[groups == g])) for g in set(groups)]
    both = [(count, value) for count, value in found if not math.isnan(value)]
    want = sum(c * v for c, v in both) / sum(c for c, _ in both) if both else math.nan
    assert gauc(labels, scores, groups.astype(np.int64)) == pytest.approx(want, abs=1e-12, nan_ok=True)


def test_map_of_one_positive_is_its_reciprocal_rank():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.3, 0.5, 0.2], [0.1, 0.5, 0.2]])
    target = torch.tensor([1, 0, 0]).bool()
    ranks = candidate_ranks(scores.flatten().numpy(), np.tile(target.numpy(), 3).astype(float), np.repeat(range(3), 3))
    assert map_one(ranks, 2) == pytest.approx((1 + 1 / 2 + 0) / 3)


def test_a_nan_score_is_above_all_others_and_no_hit():
    figures, none = FullRanking(k=2), np.empty(0, np.int64)
    items = np.array([0, 1])
    figures.update(torch.tensor([[math.nan, 0.5, 0.7]]), Users(torch.arange(1), none, none, items * 0, items))
    assert figures.compute()["recall@2"] == 0.0


def figures_of(scores, users, k=3):
    figures = FullRanking(k=k)
    figures.update(scores, users)
    return figures.compute()


@pytest.mark.parametrize("scores", [[1, 1, 1, 1, 1, 1], [3, 2, 2, 2, 2, 0], [2, 2, 1, 1, 1, 0], [1, 1, 2, 2, 0, 0]])
def test_equal_scores_rank_as_the_mean_of_all_their_orders(scores):
    seen, items = np.array([5]), np.array([1, 2, 4])
    ties = torch.tensor([scores], dtype=torch.float32)
    found = figures_of(ties.clone(), Users(torch.arange(1), seen * 0, seen, items * 0, items))
    orders = torch.tensor(list(itertools.permutations(range(6))))
    rows = np.arange(len(orders))
    each = np.repeat(rows, 3), np.tile(items, len(rows))
    want = figures_of(ties + orders / 10, Users(torch.arange(len(rows)), rows, rows * 0 + 5, *each))
    for name in ("recall@3", "ndcg@3", "map@3"):
        assert found[name] == pytest.approx(want[name], rel=1e-9), name


def test_one_score_for_all_items_is_worth_a_random_order_wherever_the_items_stand():
    none = np.empty(0, np.int64)
    for items in (np.array([0, 1]), np.array([98, 99])):
        found = figures_of(torch.zeros(1, 100), Users(torch.arange(1), none, none, items * 0, items), k=20)
        assert found["recall@20"] == pytest.approx(0.2)


def test_map_and_coverage_of_rankings_of_all_items():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1, 0.0], [0.1, 0.3, 0.9, 0.8, 0.2]])
    none = np.empty(0, np.int64)
    figures = FullRanking(k=3)
    for user, relevant in ((0, [0, 2]), (1, [3])):
        items = np.array(relevant)
        figures.update(scores[user : user + 1].clone(), Users(torch.tensor([user]), none, none, items * 0, items))
    found = figures.compute()
    assert found["map@3"] == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2) / 2)
    assert found["coverage@3"] == 4 / 5  # 0, 1, 2 and 2, 3, 1


def test_several_labels_have_figures_of_their_own_without_what_is_missing():
    logits = torch.tensor([[1.0, 0.5], [-1.0, 2.0], [0.0, -3.0]])
    labels = torch.tensor([[1.0, math.nan], [0.0, 1.0], [1.0, 0.0]])
    figures = Labels(("a", "b"))
    figures.update(logits[:2], labels[:2])
    figures.update(logits[2:], labels[2:])
    found = figures.compute()
    assert (found["samples"], found["samples:b"]) == (len(labels), 2)
    assert found["logloss:b"] == pytest.approx(logloss(np.array([1.0, 0.0]), np.array([2.0, -3.0])))
    assert found["auc:a"] == 1.0
    assert found["logloss"] == pytest.approx((found["logloss:a"] + found["logloss:b"]) / 2)


def test_a_reliability_curve_bins_samples_by_their_prediction():
    predicted = np.array([0.1, 0.1, 0.2, 0.3, 0.6, 0.7, 0.9, 0.9])
    labels = np.array([0, 1, 0, 0, 1, 0, 1, 1])
    logits = np.log(predicted / (1 - predicted))
    found = reliability(labels, logits, bins=2)
    assert np.allclose(found, [(0.175, 0.25, 4), (0.775, 0.75, 4)])
    assert sum(count for *_, count in reliability(labels, np.zeros(8))) == 8
    assert reliability(np.empty(0), np.empty(0)) == []
    lowest = np.r_[np.full(4, -3.0), np.arange(5.0)]  # four have the lowest prediction: a bin of their own
    assert [count for *_, count in reliability(np.ones(9), lowest, bins=8)] == [4, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["auc", "logloss", "ne", "calibration", "gauc"])
def test_a_sample_of_weight_three_counts_as_three_and_one_of_none_not_at_all(name):
    rng = np.random.default_rng(3)
    labels, logits = (rng.random(60) < 0.4).astype(np.float32), rng.integers(-3, 4, 60).astype(np.float32)
    groups, weights = rng.integers(0, 5, 60), rng.integers(0, 4, 60)
    collectors = Pointwise(), Pointwise()
    often = np.repeat(np.arange(60), weights)
    for part in np.split(np.arange(60), 3):
        collectors[0].update(logits[part], labels[part], groups[part], weights[part].astype(np.float32))
    collectors[1].update(logits[often], labels[often], groups[often])
    weighed, repeated = (one.compute() for one in collectors)
    assert weighed[name] == pytest.approx(repeated[name], rel=1e-12)
    plain = Pointwise()
    plain.update(logits, labels, groups)
    assert weighed[name] != pytest.approx(plain.compute()[name], rel=1e-6)
    assert weighed["samples"] == 60


def test_figures_of_a_label_are_weighed_and_leave_missing_ones_out():
    logits, labels = torch.tensor([[1.0, 2.0], [0.5, -1.0], [-1.0, 0.3]]), torch.tensor([[1, 0], [0, math.nan], [0, 1]])
    weights = torch.tensor([1.0, 5.0, 2.0])
    figures = Labels(("a", "b"))
    figures.update(logits, labels, None, weights)
    one = Pointwise()
    one.update(logits[[0, 2], 1], labels[[0, 2], 1], None, weights[[0, 2]])
    assert figures.compute()["logloss:b"] == one.compute()["logloss"]
    bins = reliability(np.array([0.0, 1.0]), np.zeros(2), np.array([3.0, 1.0]))
    assert bins == [(0.5, 0.25, 2)]
    bins = reliability(np.array([0.0, 1.0, 1.0]), np.array([-3.0, 0.0, 0.0]), np.array([0.0, 1.0, 1.0]), bins=3)
    assert bins == [(0.5, 1.0, 2)]  # samples that count nothing have no mean
    assert math.isnan(logloss(np.ones(2), np.zeros(2), np.zeros(2)))
    assert reliability(np.ones(2), np.array([0.0, math.nan])) == []


def test_a_mean_over_labels_leaves_out_those_of_one_class_and_without_samples():
    logits = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 0.5, 0.0], [0.5, 1.0, 0.0]])
    labels = torch.tensor([[1.0, 0.0, math.nan], [0.0, 0.0, math.nan], [0.0, 0.0, math.nan]])
    figures = Labels(("common", "rare", "missing"))
    figures.update(logits, labels)
    found = figures.compute()
    assert found["auc"] == found["auc:common"] == 1.0
    assert math.isnan(found["auc:rare"])
    assert found["logloss"] == np.mean([found["logloss:common"], found["logloss:rare"]])
    logits[0, 1] = math.nan  # a model that diverged must not look good
    broken = Labels(("common", "rare", "missing"))
    broken.update(logits, labels)
    assert math.isnan(broken.compute()["auc"])


def test_candidates_may_come_in_rows():
    rows, flat = Candidates(k=1), Candidates(k=1)
    logits, labels = torch.tensor([[0.5, 0.1, 0.4], [0.1, 0.9, 0.2]]), torch.tensor([[1.0, 0.0, 0.0]] * 2)
    rows.update(logits, labels)
    flat.update(logits.flatten(), labels.flatten(), torch.tensor([7, 7, 7, 8, 8, 8]))
    assert rows.compute() == flat.compute()
    assert rows.compute()["hr@1"] == 0.5
