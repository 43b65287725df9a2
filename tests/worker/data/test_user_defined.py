"""Readers of users: what training gets from them, and what each mistake of theirs is called, with file and line."""

import json
import re
import sys
from functools import partial
from itertools import count, product

import numpy as np
import pyarrow as pa
import pytest
import torch

import embershard as es
from embershard.proto.errors import BadModule, JobError, UserCodeFailed
from embershard.worker.data.hashing import hash_texts
from embershard.worker.data.user_defined import open_reader
from harness.raises import raises

_names = count()
HEAD = """\
import numpy as np, torch, embershard as es
SCHEMA = es.Schema(("user", "item"), 1, 100)
def block(n=10, first=0, **other):
    number = np.arange(first, first + n)
    made = {"ids": np.stack([number % 50, 50 + number % 50], 1), "dense": number[:, None] / 8, "labels": number % 2}
    return tuple((made | other).values())
class Base(es.Reader):
    features, num_dense, num_ids, splits = ("user", "item"), 1, 100, ("valid",)
    epochs = 0
    def read(self, split):
        yield block(7); yield block(0); yield block(20, 7)
"""
HEAD_LINES = HEAD.count("\n")


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a reader of this code, in a module of its own; it is named `it`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def opened(code, name="it", arguments=None, **options):
        module = f"user_reader_{next(_names)}"
        (tmp_path / f"{module}.py").write_text(HEAD + code)
        return open_reader(f"{module}:{name}", arguments or {}, root=tmp_path, seed=5, **options)

    return opened


def samples(batches):
    """(number of the sample, label) of everything; a sample's dense feature is an eighth of its number."""
    return [(8 * float(d), float(y)) for b in batches for d, y in zip(b.dense, b.labels, strict=True)]


STREAMED = "it = Base"
IN_MEMORY = "def it(seed): return es.RowsDataset(SCHEMA, {n: es.Samples(*block(27)) for n in ('train', 'valid')})"
OWN = """
class it:
    schema, evaluation, splits = SCHEMA, "pointwise", ("valid",)
    def num_samples(self, split): return 27
    def train(self, epoch, rank, world_size, batch_size): return self.evaluate("train", rank, world_size, batch_size)
    def evaluate(self, split, rank, world_size, batch_size):
        ids, dense, labels = map(torch.as_tensor, block(27))
        for start in range(rank, 27, world_size * batch_size):
            part = slice(start, start + world_size * batch_size, world_size)
            yield es.Batch(ids[part], dense[part], labels[part])
"""


@pytest.mark.parametrize("code", [STREAMED, IN_MEMORY, OWN], ids=["streamed", "in memory", "own"])
def test_every_sample_comes_once_per_epoch_with_the_types_of_training(opened, code):
    data = opened(code)
    assert (data.schema, data.evaluation, data.splits) == (es.Schema(("user", "item"), 1, 100), "pointwise", ("valid",))
    for world_size, split in product((1, 2, 5), ("train", "valid")):
        read = partial(data.train, 1) if split == "train" else partial(data.evaluate, split)
        shares = [list(read(rank, world_size, 4)) for rank in range(world_size)]
        assert sorted(sample for share in shares for sample in samples(share)) == [(i, i % 2) for i in range(27)]
        assert {len(batch) for share in shares for batch in share[:-1]} <= {4}
        for batch in shares[0]:
            assert (batch.ids.dtype, batch.dense.dtype, batch.labels.dtype) == (torch.int64, *[torch.float32] * 2)


@pytest.mark.parametrize("code", [STREAMED, IN_MEMORY], ids=["streamed", "in memory"])
def test_seed_and_epoch_decide_the_order(opened, code):
    data, again = opened(code), opened(code)
    first = samples(data.train(0, 0, 1, 4))
    assert first == samples(again.train(0, 0, 1, 4)) != sorted(first)
    assert samples(data.train(1, 0, 1, 4)) != first
    assert samples(data.evaluate("valid", 0, 1, 4)) == sorted(first)


def test_a_streamed_share_is_every_nth_sample_and_may_be_read_in_another_way(opened):
    code = "class it(Base):\n  shuffle_rows = 0\n"
    assert samples(opened(code).train(0, 1, 3, 4)) == [(i, i % 2) for i in range(1, 27, 3)]
    code += "  def read_share(self, split, rank, world_size): yield block(5, 10 * rank)"
    assert samples(opened(code).train(0, 1, 3, 4)) == [(i, i % 2) for i in range(10, 15)]


def test_a_reader_gets_the_jobs_arguments_and_root_and_seed_where_it_takes_them(opened, tmp_path):
    code = "def it(root, seed, n=9, *, files):\n  GIVEN.append((root, seed, n, files))\n  return Base()\nGIVEN = []"
    opened(code, arguments={"files": ["a"]})
    assert sys.modules[f"user_reader_{next(_names) - 1}"].GIVEN == [(tmp_path, 5, 9, ["a"])]
    opened("def it(**given): assert given == {'a': 1}; return Base()", arguments={"a": 1})


@pytest.mark.parametrize(
    ("arguments", "field", "hint"),
    [
        ({"file": "x", "dais": 3}, "data.dais", "did you mean days"),
        ({"file": "x", "zzz": 3}, "data.zzz", "it takes file, days=7"),
        ({"file": "x", "loder_processes": 1}, "data.loder_processes", "did you mean loader_processes"),
        ({}, "data.file", "is missing: the reader takes file, days=7"),
    ],
)
def test_arguments_that_do_not_fit_are_named_by_field(opened, arguments, field, hint):
    with raises(JobError, where=field, reason=re.compile(rf"{hint}.*user_reader_\d+\.py:{HEAD_LINES + 1}")):
        opened("def it(file, root, days=7): return Base()", arguments=arguments)


# code of a reader, its line that is named (0: none of these), and words of the reason
BAD_TO_OPEN = [
    ("def it():\n  return {}['x']", 2, "KeyError"),
    ("def it(): return [1]", 1, "a list without schema, evaluation, splits, num_samples, train, evaluate; return es"),
    ("it = 3", 0, "is a int, no class or function"),
    ("class it(Base): features = ('a', 'a')", 1, "names a feature twice"),
    ("class it(Base): features = ()", 1, "has features"),
    ("class it(Base): num_ids = 0", 1, "num_ids 0"),
    ("class it(Base): schema = 3", 1, "a schema of type int"),
    ("class it(Base): schema = es.Schema(('a',), 0, None, (es.Field('b', 'b', 0),))", 1, "fields of other features: b"),
    ("class it(Base): schema = es.Schema(('a',), 0, None, (es.Field('a', 'b', 0),))", 1, "no table 'b'"),
    (
        "def it():\n  return es.RowsDataset(SCHEMA, {'train': es.Samples(*block(3, labels=np.ones(2)))})",
        2,
        "different l",
    ),
]


@pytest.mark.parametrize(("code", "line", "reason"), BAD_TO_OPEN)
def test_what_cannot_be_opened_is_named_with_its_line(opened, code, line, reason):
    where = re.compile(rf"user_reader_\d+\.py:{HEAD_LINES + line}$") if line else ""
    with raises(
        UserCodeFailed, what=re.compile(r"^reader user_reader_\d+:it$"), where=where, reason=re.compile(reason)
    ):
        opened(code)


LISTS = """
FIELDS = es.Field("user", "user", 0), es.Field("tags", "tag", 1, 2, "mean", weights=1)
TABLES = es.IdTable("user", 9), es.IdTable("tag", 4)
SCHEMA = es.Schema(("user", "tags"), 1, None, FIELDS, TABLES, ("click", "buy"))
def it():
    ids, dense, labels = {ids}, {dense}, {labels}
    return es.RowsDataset(SCHEMA, {{"train": es.Samples(*map(np.array, (ids, dense, labels)))}})
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"ids": "[[1, 2, 4]]"}, "id 4 of feature tags; .* -1 and below num_ids = 4"),
        ({"ids": "[[1, -2, 0]]"}, "id -2 of feature tags"),
        ({"ids": "[[1, 2]]"}, "2 columns of ids; its schema has 3, of features 2: user, tags"),
        ({"dense": "[[0.5]]"}, "1 dense features; its schema has num_dense = 3"),
        ({"labels": "[1.0]"}, "1 labels; its schema has 2: click, buy"),
        ({"labels": "[[1, 7.0]]"}, "label of 7"),
        ({"labels": "[[1, np.inf]]"}, "label that is not finite"),
    ],
)
def test_lists_and_several_labels_are_as_the_schema_says(opened, change, reason):
    good = {"ids": "[[8, 3, -1]]", "dense": "[[0.5, 1, 0]]", "labels": "[[1, np.nan]]"}
    dataset = opened(LISTS.format(**good | change))
    if reason:
        with raises(UserCodeFailed, reason=re.compile(reason)):
            list(dataset.train(0, 0, 1, 8))
        return
    (batch,) = dataset.train(0, 0, 1, 8)
    assert batch.ids.tolist() == [[8, 3, -1]]
    assert batch.labels.isnan().tolist() == [[False, True]]


def test_a_number_of_samples_may_be_one_of_numpy_and_must_be_whole(opened):
    data = opened("class it(Base):\n  def num_samples(self, split): return np.int64(27) if split == 'train' else 2.5")
    assert json.dumps(data.num_samples("train")) == "27"
    with raises(UserCodeFailed, what=re.compile("num_samples of valid"), reason=re.compile("float")):
        data.num_samples("valid")


def test_a_reader_that_is_not_there_is_named(opened):
    with raises(BadModule, reason=re.compile("did you mean Base")):
        opened("", "Bas")
    with raises(BadModule, reason=re.compile(rf"ZeroDivisionError.*\.py:{HEAD_LINES + 2}")):
        opened("\n1 / 0")


READ = "class it(Base):\n  shuffle_rows = 0\n  def read(self, split):\n    yield block(8)\n    "
OWN_TRAIN = "class it(Base):\n  def train(self, epoch, rank, world_size, batch_size):\n    "
# code of a reader that goes wrong in its second epoch, or in its first; the line that is named; the epoch and batch
BAD_TO_READ = [
    (READ + "raise KeyError('gone')", 5, "epoch 1, batch 3", "KeyError: 'gone'"),
    (READ + "yield block(8, ids=np.zeros((8, 3), int))", 5, "epoch 1, batch 3", "ids of 3 features; .* user, item"),
    (
        READ + "yield block(8, ids=np.full((8, 2), 100))",
        5,
        "epoch 1, batch 3",
        "id 100 of feature user; .* = 100",
    ),
    (READ + "yield block(8, ids=np.full((8, 2), -1))", 5, "epoch 1, batch 3", "id -1 of feature user"),
    (READ + "yield block(8, ids=np.ones((8, 2)))", 5, "epoch 1, batch 3", "ids are float64, not int64"),
    (READ + "yield block(8, dense=None)", 5, "epoch 1, batch 3", "0 dense features; .* num_dense = 1"),
    (
        READ + "yield block(8, dense=np.full((8, 1), np.inf))",
        5,
        "epoch 1, batch 3",
        "dense feature that is .*: inf",
    ),
    (READ + "yield block(8, labels=np.full(8, np.nan))", 5, "epoch 1, batch 3", "a label that is not finite: nan"),
    (READ + "yield block(8, labels=['a'] * 8)", 5, "epoch 1, batch 3", "labels are <U1, not float32"),
    (READ + "yield block(8, labels=np.ones(9))", 5, "epoch 1, batch 3", "arrays of different lengths: ids 8, labels 9"),
    (READ + "yield block(8)[0]", 5, "epoch 1, batch 3", "a ndarray in place of"),
    ("class it(Base):\n  def read(self, split): pass", 2, "epoch 1, batch 1", "returned a NoneType in place of blocks"),
    ("class it(Base):\n  def read(self, split): return []", 1, "epoch 1", "yielded no samples"),
    (
        "class it(Base):\n  def read(self, split):\n    self.epochs += 1\n    yield block(8 * (self.epochs == 1))",
        1,
        "epoch 2",
        "yielded no samples",
    ),
    (
        "class it(Base):\n  def read(self, split):\n    self.epochs += 1\n"
        "    if self.epochs == 2: self.features = ('user', 'other')\n    yield block(8)\n",
        1,
        "epoch 3",
        "has another schema",
    ),
    (
        "class it(Base):\n  def read(self, split):\n    self.epochs += 1\n"
        "    yield block(8) if self.epochs == 1 else block(8, ids=np.zeros((8, 1), int))",
        4,
        "epoch 2, batch 1",
        "ids of 1 features",
    ),
    (OWN_TRAIN + "yield 3", 3, "epoch 1, batch 1", "a int in place of"),
    (OWN_TRAIN + "return 3", 1, "epoch 1", "returned a int in place of batches"),
    (OWN_TRAIN + "raise SystemExit(3)", 3, "epoch 1", "SystemExit: 3"),
    ("class it(Base): pass\nit.read = es.Reader.read", 0, "epoch 1, batch 1", "needs a method .read"),
]


@pytest.mark.parametrize(("code", "line", "at", "reason"), BAD_TO_READ)
def test_what_goes_wrong_in_the_middle_is_named_with_its_line_epoch_and_batch(opened, code, line, at, reason):
    data = opened(code)
    where = re.compile(rf"user_reader_\d+\.py:{HEAD_LINES + line}$" if line else "")
    what = re.compile(rf"^reader user_reader_\d+:it \(train, {at}\)$")
    with raises(UserCodeFailed, what=what, where=where, reason=re.compile(reason)):
        for epoch in range(3):
            list(data.train(epoch, 0, 1, 4))


def test_labels_beyond_0_and_1_are_taken_where_the_loss_is_another_one(opened):
    code = READ + "yield block(8, labels=np.full(8, 2.5))"
    with raises(UserCodeFailed, reason=re.compile(r"label of 2\.5.*data\.labels")):
        list(opened(code).train(0, 0, 1, 4))
    assert len(samples(opened(code, any_labels=True).train(0, 0, 1, 4))) == 16


def test_candidates_have_groups_in_an_evaluation(opened):
    code = OWN.replace('"pointwise"', '"candidates"')
    with raises(UserCodeFailed, what=re.compile(r"\(valid, batch 1\)"), reason=re.compile("groups .* none")):
        list(opened(code).evaluate("valid", 0, 1, 4))
    batches = opened(code.replace("labels[part])", "labels[part], ids[part, 0])")).evaluate("valid", 0, 1, 4)
    assert all(torch.equal(batch.groups, batch.ids[:, 0]) for batch in batches)


def test_more_workers_than_samples_are_named(opened):
    with raises(UserCodeFailed, reason="yielded no samples for share 30 of 30"):
        list(opened(STREAMED).train(0, 29, 30, 4))
    with raises(JobError, where=re.compile(r"user_reader_\d+:it")):
        list(opened(IN_MEMORY).train(0, 29, 30, 4))


def test_hashed_ids_tell_features_apart_and_are_those_of_text_files():
    ids = es.hash_ids("user", ["7", None, "x"])
    assert ids.dtype == np.int64
    assert 0 <= ids.min()
    assert ids.max() < 2**62
    assert es.hash_ids("user", np.array([7]))[0] == ids[0] != es.hash_ids("item", ["7"])[0]
    assert ids.tolist() == hash_texts("user", pa.array(["7", "", "x"])).tolist()
