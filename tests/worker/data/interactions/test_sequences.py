"""Sequences of actions: who is trained on, what comes next, and what is never a candidate."""

import numpy as np
import pytest
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.interactions.sequences import ActionSequences

ACTIONS = {1: [5, 3, 5, 8, 2], 2: [4, 9], 4: [7], 5: [1, 2, 3], 6: list(range(20, 30))}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "actions.txt"
    turns = [(user, items[i]) for i in range(10) for user, items in ACTIONS.items() if i < len(items)]
    file.write_text("".join(f"{user} {item}\n" for user, item in turns))
    return file


def rows_of(batches):
    return torch.cat([batch.ids for batch in batches]).tolist()


def test_training_shows_every_step_but_those_held_out(path):
    data = ActionSequences.read(path, max_length=4, negatives=2)
    rows = rows_of(data.train(0, 0, 1, 2))
    assert data.num_samples("train") == len(rows) == 3
    found = {}
    for row in rows:
        history, lists = row[:4], np.reshape(row[4:], (4, 3))
        found[tuple(history)] = lists[:, 0].tolist()
        for place, (_, *negatives) in zip(history, lists.tolist(), strict=True):
            assert all((negative >= 0) == (place >= 0) for negative in negatives)
    assert found == {
        (5, 3, -1, -1): [3, 5, -1, -1],  # 8 is valid, 2 is test
        (4, -1, -1, -1): [9, -1, -1, -1],  # too short to be evaluated: all of it is trained on
        (23, 24, 25, 26): [24, 25, 26, 27],  # the last four
    }
    again = rows_of(data.train(0, 0, 2, 2)) + rows_of(data.train(0, 1, 2, 2))
    assert sorted(again) == sorted(rows)  # negatives too: whatever the workers
    assert sorted(rows_of(data.train(1, 0, 1, 2))) != sorted(rows)


def test_negatives_are_items_that_the_user_does_not_have(path):
    data = ActionSequences.read(path, max_length=10, candidates=50)
    for epoch in range(20):
        for row in rows_of(data.train(epoch, 0, 1, 8)):
            assert not {i for i in row[11::2] if i >= 0} & {i for i in row[:10] if i >= 0}
    for split in data.splits:
        for batch in data.evaluate(split, 0, 1, 1):
            assert not set(batch.ids[0, 11:].tolist()) & set(ACTIONS[int(batch.groups[0])])


def test_negatives_by_popularity_were_trained_on(path):
    data = ActionSequences.read(path, max_length=10, by_popularity=True)
    known = {1: [5, 3, 5], 2: [4, 9], 4: [7], 5: [1], 6: list(range(20, 28))}
    drawn = []
    for epoch in range(40):
        for row in rows_of(data.train(epoch, 0, 1, 8)):
            drawn += [i for i in row[11::2] if i >= 0]
            assert not {i for i in row[11::2] if i >= 0} & {i for i in row[:10] if i >= 0}
    assert set(drawn) == {item for items in known.values() for item in items}
    path.write_text("0 0\n0 1\n0 2\n0 3\n1 4\n1 5\n1 4\n")  # 0 and 1 are all that is trained on but for item 4
    ActionSequences.read(path, by_popularity=True)
    path.write_text("0 0\n0 1\n0 2\n0 3\n1 0\n1 5\n1 4\n")
    ActionSequences.read(path)
    with pytest.raises(JobError, match="no negatives"):
        ActionSequences.read(path, by_popularity=True)


def test_the_last_action_is_test_and_the_one_before_valid(path):
    data = ActionSequences.read(path, max_length=4, candidates=3)
    seen = {}
    for split in data.splits:
        (batch,) = data.evaluate(split, 0, 1, 100)
        assert batch.labels.tolist() == [[1, 0, 0, 0]] * 3
        for user, row in zip(batch.groups.tolist(), batch.ids.tolist(), strict=True):
            seen[user, split] = row[:5]
    assert seen == {
        (1, "valid"): [5, 3, 5, -1, 8],
        (1, "test"): [5, 3, 5, 8, 2],
        (5, "valid"): [1, -1, -1, -1, 2],
        (5, "test"): [1, 2, -1, -1, 3],
        (6, "valid"): [24, 25, 26, 27, 28],
        (6, "test"): [25, 26, 27, 28, 29],
    }
    assert data.num_samples("test") == 3
    assert ActionSequences.read(path, users=2).num_samples("test") == 2
    with pytest.raises(JobError, match="train, valid, test"):
        data.num_samples("other")


def test_the_schema_names_history_and_items_of_one_table(path):
    schema = ActionSequences.read(path, max_length=4, negatives=2).schema
    assert [(field.start, field.width) for field in schema.fields] == [(0, 4), (4, 12)]
    assert schema.num_ids == schema.tables[0].num_ids == 30


def test_a_line_that_is_no_action_is_named(path):
    path.write_text("1 2\n1 x\n")
    with pytest.raises(JobError, match=r"actions\.txt:2"):
        ActionSequences.read(path)


def test_files_without_users_to_learn_from_are_refused_and_without_any_to_evaluate_remarked_on(tmp_path, caplog):
    path = tmp_path / "actions.txt"
    path.write_text("0 0\n1 1\n2 2\n2 3\n2 4\n")
    with pytest.raises(JobError, match=r"actions.txt: no user has two actions to learn from"):
        ActionSequences.read(path)
    path.write_text("0 0\n0 1\n1 2\n1 3\n")
    assert ActionSequences.read(path).num_samples("train") == 2
    assert "no user has 3 actions, so that nobody is evaluated" in caplog.text
