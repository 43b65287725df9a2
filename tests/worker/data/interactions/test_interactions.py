import codecs
from pathlib import Path

import numpy as np
import pytest
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.interactions.files import look_at_lists, look_at_ncf
from embershard.worker.data.interactions.gowalla import InteractionLists
from embershard.worker.data.interactions.movielens import NcfData
from embershard.worker.data.readers.interactions import Interactions
from embershard.worker.metrics import Candidates

FILES = {
    "train.pairs": "0\t0\n0\t1\n1\t2\n2\t0\n2\t3\n2\t4\n",
    "test.rating": "0\t2\t5\t978824351\n1\t0\t3\t978300174\n2\t1\t4\t978298504\n",
    # user 1 has its own test item among the negatives, and item 3 twice
    "test.negative": "(0,2)\t3\t4\t5\n(1,0)\t3\t0\t3\n(2,1)\t2\t5\t6\n",
}


@pytest.fixture
def prefix(tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"tiny.{name}").write_text(text)
    return tmp_path / "tiny"


def test_an_epoch_has_each_positive_once_and_four_negatives_that_its_user_did_not_take(prefix):
    data = NcfData(prefix, negatives=4)
    assert (data.schema.features, data.schema.num_ids) == (("user", "item"), 3 + 7)
    taken = {(0, 0), (0, 1), (1, 2), (2, 0), (2, 3), (2, 4)}
    assert data.num_samples("train") == 30
    for epoch in range(5):
        batch = next(data.train(epoch, 0, 1, 100))
        pairs = [(int(u), int(i) - 3) for u, i in batch.ids]
        assert sorted(p for p, label in zip(pairs, batch.labels, strict=True) if label == 1) == sorted(taken)
        negative = [p for p, label in zip(pairs, batch.labels, strict=True) if label == 0]
        assert not set(negative) & taken
        assert {item for _, item in negative} <= set(range(7))
        assert np.bincount([user for user, _ in negative]).tolist() == [8, 4, 12]


def test_negatives_are_fresh_each_epoch_and_the_same_for_any_batch_size_and_worker_count(prefix):
    data = NcfData(prefix)

    def sampled(epoch, world_size, batch_size):
        return sorted(
            (*map(int, pair), float(label))
            for rank in range(world_size)
            for batch in data.train(epoch, rank, world_size, batch_size)
            for pair, label in zip(batch.ids, batch.labels, strict=True)
        )

    assert sampled(3, 1, 30) == sampled(3, 4, 2) != sampled(4, 1, 30)


def test_negatives_are_uniform_over_the_items_not_taken():
    data = Interactions.of(np.array([0, 0, 1]), np.array([1, 3, 0]), 3, 5)
    draws = np.arange(60_000)
    for user, free in ((0, [0, 2, 4]), (1, [1, 2, 3, 4]), (2, [0, 1, 2, 3, 4])):
        counts = np.bincount(data.sample_negatives(np.full(60_000, user), draws, 7), minlength=5)
        assert np.flatnonzero(counts).tolist() == free
        # five standard deviations of a binomial count
        assert (np.abs(counts[free] - 60_000 / len(free)) < 5 * np.sqrt(60_000 / len(free))).all()


def test_negatives_by_popularity_are_drawn_as_often_as_items_were_taken():
    users, items = np.array([0, 1, 2, 3, 1, 2, 3, 2, 3]), np.array([0, 1, 1, 1, 2, 2, 2, 3, 3])
    data = Interactions.of(users, items, 5, 6, by_popularity=True)
    counts = np.bincount(data.sample_negatives(np.full(60_000, 0), np.arange(60_000), 7), minlength=6)
    assert counts == pytest.approx([0, 60_000 * 3 / 8, 60_000 * 3 / 8, 60_000 * 2 / 8, 0, 0], abs=600)
    assert data.log_q().exp()[1:4].tolist() == pytest.approx([3 / 9, 3 / 9, 2 / 9])
    assert Interactions.of(users, items, 5, 6).log_q() is None
    full = Interactions.of(np.array([0, 0, 1]), np.array([0, 1, 0]), 2, 9, by_popularity=True)
    with pytest.raises(JobError, match="user 0 took all 2 items"):
        full.check_negatives("here")


def test_candidates_are_collapsed_and_come_in_whole_users(prefix):
    data = NcfData(prefix)
    assert data.evaluation == "candidates"
    assert data.num_samples("test") == 4 + 2 + 4
    batches = list(data.evaluate("test", 0, 1, 5))
    assert [batch.groups.tolist() for batch in batches] == [[0] * 4, [1] * 2, [2] * 4]
    assert batches[1].ids.tolist() == [[1, 3 + 3], [1, 3 + 0]]
    assert [batch.labels.tolist() for batch in batches] == [[0, 0, 0, 1], [0, 1], [0, 0, 0, 1]]
    whole = next(data.evaluate("test", 0, 1, 100))
    assert torch.equal(whole.ids, torch.cat([batch.ids for batch in batches]))
    shares = [[int(g) for b in data.evaluate("test", rank, 4, 100) for g in b.groups.unique()] for rank in range(4)]
    assert shares == [[0], [1], [2], []]


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("train.pairs", "0\tx", r"tiny\.train\.pairs:7: column 'item': 'x' is not an integer id"),
        ("train.pairs", "0", r"tiny\.train\.pairs:7: expected 2 fields, got 1 \(cut short\?\)"),
        ("test.rating", "3\t1", r"tiny\.test\.rating:4: expected 4 fields, got 2"),
        ("test.rating", "3\t1\t5\t0", r"tiny\.test\.negative: no line for user 3 of tiny\.test\.rating"),
        ("test.negative", "(2,1\t5", r"tiny\.test\.negative:4: expected \(user,item\)"),
        ("test.negative", "(2,3)\t5", r"tiny\.test\.negative:4: user 2 has item 3 here, but 1 in tiny\.test\.rating"),
        ("test.negative", "(2,1)\t5\t6", r"tiny\.test\.negative:4: 2 negative items, but 3 in the lines before"),
        ("test.negative", "(2,1)\tfive\t5\t5", r"tiny\.test\.negative:4: expected \(user,item\)"),
    ],
)
def test_a_bad_line_is_named(prefix, name, line, error):
    with open(f"{prefix}.{name}", "a") as file:
        file.write(line + "\n")
    with pytest.raises(JobError, match=error):
        NcfData(prefix)


def test_a_user_who_took_everything_has_no_negatives_and_a_worker_needs_a_sample(prefix):
    with pytest.raises(JobError, match="30 samples"):
        next(NcfData(prefix).train(0, 0, 31, 1))
    with open(f"{prefix}.train.pairs", "a") as file:
        file.writelines(f"1\t{i}\n" for i in range(7))
    with pytest.raises(JobError, match="user 1 took all 7 items"):
        NcfData(prefix)
    assert NcfData(prefix, negatives=0).num_samples("train") == 12


@pytest.mark.long
def test_movielens(real_data):
    data = NcfData(real_data("ncf-ml-1m") / "ml-1m")
    popularity = torch.from_numpy(np.bincount(data.train_set.items, minlength=3706))
    figures = Candidates(10)
    for batch in data.evaluate("test", 0, 1, 10_000):
        figures.update(popularity[batch.ids[:, 1] - 6040], batch.labels, batch.groups)
    # the paper's own baseline, as published
    found, want = figures.compute(), {"hr@10": 0.4531, "ndcg@10": 0.2541, "users": 6040}
    assert {name: found[name] for name in want} == pytest.approx(want, abs=5e-5)
    counts = data.schema.num_ids, data.num_samples("train"), data.num_samples("test")
    assert counts == (6040 + 3706, 994_169 * 5, 604_000 - 156)


TRAIN = "0 1 3\n1 0\n2\n4 5 5 0\n"  # user 2 has no item, user 3 no line
TEST = "0 2 5\n1 1\n2\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.txt").write_text(TRAIN)
    (tmp_path / "test.txt").write_text(TEST)
    return tmp_path / "train.txt", tmp_path / "test.txt"


def test_pairs_lists_and_ids(files):
    data = InteractionLists.read(*files, negatives=3, layout="lists")
    assert data.schema.num_ids == 5 + 6
    assert data.schema.features == ("user", "item", "negative1", "negative2", "negative3")
    assert data.num_samples("train") == 5  # item 5 of user 4 counts once
    (batch,) = data.train(0, 0, 1, 10)
    taken = {(0, 1), (0, 3), (1, 0), (4, 5), (4, 0)}
    assert {(int(u), int(i) - 5) for u, i in batch.ids[:, :2]} == taken
    assert not {(int(row[0]), int(i) - 5) for row in batch.ids for i in row[2:]} & taken
    (pairs,) = InteractionLists.read(*files, negatives=3, layout="pairs").train(0, 0, 1, 100)
    assert pairs.ids.shape == (20, 2)
    assert pairs.labels.sum() == 5
    (bare,) = InteractionLists.read(*files).train(0, 0, 1, 100)
    assert bare.ids.shape == (5, 2)


def test_how_often_an_item_is_drawn_stands_at_its_id(files):
    log_q = InteractionLists.read(*files, by_popularity=True).log_q
    assert len(log_q) == 5 + 6
    assert log_q[[5, 6, 8, 10]].exp().tolist() == pytest.approx([2 / 5, 1 / 5, 1 / 5, 1 / 5])
    assert InteractionLists.read(*files).log_q is None


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_lines_may_end_as_on_other_systems_and_a_file_begin_with_a_byte_order_mark(files, prefix, end):
    def all_data():
        lists, ncf = InteractionLists.read(*files), NcfData(prefix)
        return [*lists.evaluate("test", 0, 1, 99), *ncf.evaluate("test", 0, 1, 99)], [lists.train_set, ncf.train_set]

    before, known = all_data()
    paths = [*files, *(Path(f"{prefix}.{part}") for part in ("train.pairs", "test.rating", "test.negative"))]
    for path in paths:
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", end))
    look_at_lists(files)
    look_at_ncf(prefix)
    after, found = all_data()
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(before, after, strict=True))
    assert [(one.starts.tolist(), one.items.tolist()) for one in known] == [
        (one.starts.tolist(), one.items.tolist()) for one in found
    ]


def test_users_with_their_seen_and_relevant_items(files):
    data = InteractionLists.read(*files)
    assert data.evaluation == "ranking"
    assert data.item_ids.tolist() == list(range(5, 11))
    (users,) = data.users("test", 0, 1, 10)
    assert users.ids.tolist() == [0, 1]  # user 2 has nothing to be found
    assert list(zip(users.seen_user, users.seen_item, strict=True)) == [(0, 1), (0, 3), (1, 0)]
    assert list(zip(users.relevant_user, users.relevant_item, strict=True)) == [(0, 2), (0, 5), (1, 1)]
    shares = [u.ids.tolist() for rank in range(3) for u in data.users("test", rank, 3, 10)]
    assert shares == [[0], [1]]
    (batch,) = data.evaluate("test", 0, 1, 10)
    assert batch.ids.tolist() == [[0, 7], [0, 10], [1, 6]]


def test_items_to_be_found_that_their_users_took_in_training_are_told_of(files, caplog):
    InteractionLists.read(*files)
    assert not caplog.records
    files[1].write_text("0 1 2\n1 0\n")
    InteractionLists.read(*files)
    assert "of test, 2 of 3 items are among those that their users took before" in caplog.text


@pytest.mark.parametrize(
    ("line", "error"),
    [
        *((f"5 {item}", r"train\.txt:5: expected a user") for item in ("x", "-1", "1.5", "9" * 20)),
        ("1 2", r"train\.txt:5: user 1 has a line already: 2"),
        ("5 9999999999", r"train\.txt: item 9999999999 is too large"),
        ("5 0 1 2 3 4 5", "user 5 took all 6 items"),
    ],
)
def test_bad_lines(files, line, error):
    with files[0].open("a") as file:
        file.write(line + "\n")
    with pytest.raises(JobError, match=error):
        InteractionLists.read(*files, negatives=1)


def test_no_items_and_too_many_workers(files):
    with pytest.raises(JobError, match="5 samples cannot be split over 6 workers"):
        InteractionLists.read(*files).train(0, 0, 6, 1)
    with pytest.raises(ValueError, match="layout must be"):
        InteractionLists.read(*files, layout="triples")
    files[0].write_text("0\n1\n")
    with pytest.raises(JobError, match="no user has an item"):
        InteractionLists.read(*files)


@pytest.mark.long
def test_gowalla(real_data):
    folder = real_data("gowalla")
    data = InteractionLists.read(folder / "train.txt", folder / "test.txt", negatives=4)
    assert (data.num_samples("train"), data.num_samples("test")) == (810_128, 217_242)
    assert data.schema.num_ids == 29_858 + 40_981
    parts = list(data.users("test", 0, 1, 1000))
    lists = zip(*((u.ids, u.relevant_item, u.seen_item) for u in parts), strict=True)
    found = [sum(map(len, each)) for each in lists]
    assert found == [29_858, 217_242, 810_128]
