import pytest

from embershard.proto.errors import JobError
from embershard.worker.data.readers.gowalla import InteractionLists

TRAIN = "0 1 3\n1 0\n2\n4 5 5 0\n"  # user 2 has no item, user 3 no line
TEST = "0 2 5\n1 1\n2\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.txt").write_text(TRAIN)
    (tmp_path / "test.txt").write_text(TEST)
    return tmp_path / "train.txt", tmp_path / "test.txt"


def test_pairs_lists_and_ids(files):
    data = InteractionLists(*files, negatives=3, layout="lists")
    assert data.schema.num_ids == 5 + 6
    assert data.schema.features == ("user", "item", "negative1", "negative2", "negative3")
    assert data.num_samples("train") == 5  # item 5 of user 4 counts once
    (batch,) = data.train(0, 0, 1, 10)
    taken = {(0, 1), (0, 3), (1, 0), (4, 5), (4, 0)}
    assert {(int(u), int(i) - 5) for u, i in batch.ids[:, :2]} == taken
    assert not {(int(row[0]), int(i) - 5) for row in batch.ids for i in row[2:]} & taken
    (pairs,) = InteractionLists(*files, negatives=3, layout="pairs").train(0, 0, 1, 100)
    assert pairs.ids.shape == (20, 2)
    assert pairs.labels.sum() == 5
    (bare,) = InteractionLists(*files).train(0, 0, 1, 100)
    assert bare.ids.shape == (5, 2)


def test_users_with_their_seen_and_relevant_items(files):
    data = InteractionLists(*files)
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
        InteractionLists(*files, negatives=1)


def test_no_items_and_too_many_workers(files):
    with pytest.raises(JobError, match="5 samples cannot be split over 6 workers"):
        InteractionLists(*files).train(0, 0, 6, 1)
    with pytest.raises(ValueError, match="layout must be"):
        InteractionLists(*files, layout="triples")
    files[0].write_text("0\n1\n")
    with pytest.raises(JobError, match="no user has an item"):
        InteractionLists(*files)


def test_gowalla(real_data):
    folder = real_data("gowalla")
    data = InteractionLists(folder / "train.txt", folder / "test.txt", negatives=4)
    assert (data.num_samples("train"), data.num_samples("test")) == (810_128, 217_242)
    assert data.schema.num_ids == 29_858 + 40_981
    parts = list(data.users("test", 0, 1, 1000))
    lists = zip(*((u.ids, u.relevant_item, u.seen_item) for u in parts), strict=True)
    found = [sum(map(len, each)) for each in lists]
    assert found == [29_858, 217_242, 810_128]
