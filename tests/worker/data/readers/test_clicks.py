import numpy as np
import pytest
import torch

from embershard.proto.arrays import mix64
from embershard.worker.data.readers.clicks import PAIRS, ClickStream, spread_step, zipf_bins
from embershard.worker.data.readers.criteo_statistics import CATEGORICAL, NUMERIC

OFFSETS = np.cumsum([0, *(column.cardinality for column in CATEGORICAL)])


@pytest.fixture(scope="module")
def clicks():
    return ClickStream(samples=10_000, eval_samples=100_000)


@pytest.fixture(scope="module")
def sample(clicks):
    (batch,) = clicks.evaluate("test", 0, 1, 100_000)
    return batch


def exact_law(column):
    """(n,) probability of each rank, from the definition."""
    mass = (np.arange(1, column.cardinality + 1) + column.q) ** -column.s
    shares = mass / mass.sum()
    if column.missing:
        rank = np.argmin(np.abs(shares - column.missing))
        shares = shares * (1 - column.missing) / (1 - shares[rank])
        shares[rank] = column.missing
    return shares


def ranks(ids, c):
    """The ranks that were spread to these ids of column c."""
    n = CATEGORICAL[c].cardinality
    return (ids - OFFSETS[c]) * pow(spread_step(n), -1, n) % n


LAWS = (0, 1, 5, 8, 9, 23, 25)  # columns of any size and skew


@pytest.mark.parametrize("c", LAWS)
def test_bins_hold_the_exact_law(c):
    column = CATEGORICAL[c]
    bins, law = zipf_bins(*column), exact_law(column)
    assert bins.starts[0] == 0
    assert bins.starts[-1] + bins.widths[-1] == column.cardinality
    np.testing.assert_allclose(bins.probabilities, np.add.reduceat(law, bins.starts), rtol=1e-6)
    # evenly drawn inside a bin: no rank is off by more than half a bin's slope
    np.testing.assert_allclose(np.repeat(bins.probabilities / bins.widths, bins.widths), law, rtol=0.005)


def test_drawn_ids_follow_the_law(sample):
    for c, column in enumerate(CATEGORICAL):
        ids = sample.ids[:, c].numpy()
        assert ids.min() >= OFFSETS[c]
        assert ids.max() < OFFSETS[c + 1]
        if c not in LAWS:
            continue
        head = np.bincount(np.minimum(ranks(ids, c), 20), minlength=21)[:20][: column.cardinality]
        wanted = exact_law(column)[:20] * len(ids)
        # five standard deviations of a binomial count
        assert (np.abs(head - wanted) < 5 * np.sqrt(wanted) + 1).all(), f"C{c + 1}"


def test_dense_features_have_the_measured_mean_and_missing_share(sample):
    dense = sample.dense.numpy()
    assert dense.shape == (100_000, 13)
    assert (dense >= 0).all()
    for d, column in enumerate(NUMERIC):
        below_zero = np.mean(np.random.default_rng(0).normal(column.mean, column.std, 100_000) < 0)
        zeros = column.missing + (1 - column.missing) * below_zero
        assert np.mean(dense[:, d] == 0) == pytest.approx(zeros, abs=0.02)
    assert dense[:, 4][dense[:, 4] > 0].mean() == pytest.approx(7.24, abs=0.1)


def test_labels_come_from_a_logit_of_what_the_model_sees(clicks, sample):
    """The planted model in plain numpy, from ids and dense features alone."""
    plan, (bias, *strengths) = clicks._plan, clicks._weights
    ids, dense = sample.ids.numpy()[:2000], sample.dense.numpy()[:2000]
    effects, bins = np.zeros(len(ids)), np.empty(ids.shape, np.int64)
    for c, column in enumerate(plan.columns):
        rank = ranks(ids[:, c], c)
        table = plan.bins[column["first"] :][: len(zipf_bins(*CATEGORICAL[c]).starts)]
        bins[:, c] = np.searchsorted(table["rank"], rank, "right") - 1
        head = table["width"][bins[:, c]] == 1
        sign = np.where(head | (mix64(rank, int(column["offset"])) & np.uint64(1) == 1), 1, -1)
        effects += table["effect"][bins[:, c]] * sign
    crossed = sum(
        (plan.latent[p, 0, bins[:, a]] * plan.latent[p, 1, bins[:, b]]).sum(1) for p, (a, b) in enumerate(PAIRS)
    )
    mean, std, _, weight = plan.dense.T
    logits = bias + np.stack([effects, crossed, ((dense - mean) / std) @ weight]).T @ strengths
    np.testing.assert_allclose(clicks.planted("test")[1][:2000], logits, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_ctr_and_best_auc_are_near_criteos(seed):
    clicks = ClickStream(eval_samples=50_000, seed=seed)
    best, (labels, logits) = clicks.best("valid"), clicks.planted("valid")
    assert best["auc"] == pytest.approx(0.80, abs=0.02)
    assert best["calibration"] == pytest.approx(1.0, abs=0.03)
    assert labels.mean() == pytest.approx(0.25, abs=0.01)
    chances = 1 / (1 + np.exp(-logits))
    for part in np.array_split(np.argsort(logits), 10):
        assert labels[part].mean() == pytest.approx(chances[part].mean(), abs=5 * np.sqrt(0.25 / len(part)))


def whole(batches):
    return [torch.cat(part) for part in zip(*((b.ids, b.dense, b.labels) for b in batches), strict=True)]


def test_samples_do_not_depend_on_batch_size_or_worker_count(clicks):
    joint = whole(clicks.train(1, 0, 1, 4096))
    assert len(joint[0]) == 10_000
    for rank in range(3):
        for found, wanted in zip(whole(clicks.train(1, rank, 3, 100)), joint, strict=True):
            assert torch.equal(found, wanted[rank::3])


def test_splits_epochs_and_seeds_differ_and_repeat(clicks):
    def start(data, split, epoch=0):
        return next(data.train(epoch, 0, 1, 50) if split == "train" else data.evaluate(split, 0, 1, 50)).ids

    first = [start(clicks, "train"), start(clicks, "train", 1), start(clicks, "valid"), start(clicks, "test")]
    first.append(start(ClickStream(seed=1), "train"))
    assert len({tuple(ids.flatten().tolist()) for ids in first}) == 5
    assert torch.equal(start(clicks, "valid"), first[2])


# ids are a contract with whoever compares two runs; they use no floating-point sums but the bins' edges
GOLDEN = """
0 1734 1852452 10883934 12335878 12336183 12345671 12348873 12349357 12422716 12445187 16789368 20801872 20802975
20815713 21310441 26279303 26284646 26286484 26287138 33011897 33333686 33333704 33536396 33619900 33620005
"""


def test_first_ids_are_golden(sample):
    assert sample.ids[0].tolist() == [int(number) for number in GOLDEN.split()]
