"""Which rows of a dataset each worker has, with a stand-in for Ray Data; tests/deploy/test_ray.py has a cluster."""

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples
from embershard.worker.data.readers.ray import RayTables, open_datasets
from embershard.worker.data.readers.tabular_files import TableFormat
from embershard.worker.job.load import JobFileError, load_job

WANTED = {"label": ("number", "data.label")}


class Rows:
    """What RayTables asks of a ray.data.Dataset."""

    def __init__(self, labels):
        self._table = pa.table({"label": labels, "other": labels})

    def schema(self):
        return type("Schema", (), {"names": self._table.column_names})

    def count(self):
        return self._table.num_rows

    def iter_batches(self, batch_size, batch_format):
        assert batch_format == "pyarrow"
        return (self._table.slice(begin, batch_size) for begin in range(0, self.count(), batch_size))


def samples(table, part):
    labels = table.column("label").to_numpy().astype(np.float32)
    return Samples(np.empty((len(labels), 0), np.int64), None, labels)


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr("embershard.worker.data.readers.ray._made_by", lambda name: Rows(np.arange(1000)))
    return RayTables(names=("mine:rows",), kind="", part="train", wanted=WANTED, to_samples=samples)


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_shares_of_a_dataset_are_disjoint_cover_it_and_are_the_same_when_read_again(tables, world_size):
    def share(rank):
        return np.concatenate([block.labels for block in tables.blocks(rank, world_size, None)])

    shares = [share(rank) for rank in range(world_size)]
    assert sorted(np.concatenate(shares)) == list(range(1000))
    assert all((share(rank) == shares[rank]).all() for rank in range(world_size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1000 // (8 * world_size)


def test_a_column_that_is_missing_is_named_before_training(tables):
    tables.check()
    other = RayTables(names=("mine:rows",), kind="", part="train", wanted={"user": ("text", "x")}, to_samples=samples)
    with pytest.raises(JobError, match="no column 'user'"):
        other.check()


class FileRows(Rows):
    """What ray.data.read_csv gives of a file."""

    def __init__(self, names, **options):
        self._table = pa.csv.read_csv(names[0], **pickle.loads(pickle.dumps(options)))  # for a process of Ray's

    def select_columns(self, names):
        self._table = self._table.select(names)
        return self


def test_ids_of_csv_stay_texts_whatever_number_they_look_like(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("user,price\n007,1\n12e3,2\n")
    data = SimpleNamespace(read_csv=FileRows)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=data))
    monkeypatch.setitem(sys.modules, "ray.data", data)
    wanted, found = {"user": ("text", "x"), "price": ("number", "x")}, []

    def keep(table, part):
        found.append(table.to_pydict())
        return Samples(np.empty((2, 0), np.int64), None, np.zeros(2, np.float32))

    tables = RayTables(names=(str(tmp_path / "a.csv"),), kind="csv", part="train", wanted=wanted, to_samples=keep)
    list(tables.blocks(0, 1, None))
    assert found == [{"user": ["007", "12e3"], "price": [1, 2]}]


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"data.reader: .* pip install 'embershard\[ray\]'"):
        open_datasets({"train": ["mine:rows"]}, TableFormat(), WANTED, samples)


JOB = """\
model: {{name: fm}}
data:
  reader: ray
  train: {train}
  {data}
features: {{user: {{}}, item: {{}}}}
embedding: {{optimizer: {{name: sgd, lr: 0.1}}}}
train: {{epochs: 1, batch_size: 32}}
"""


@pytest.mark.parametrize(
    ("train", "data", "said"),
    [
        ("a.csv", "", "data.train: "),
        ("[mine:rows, mine:more]", "", "data.train: is files, or one function"),
        ("mine:rows", "delimiter: ;", "data.delimiter: has no meaning"),
        ("mine:rows", "loader_processes: 1", "data.loader_processes: must be 0"),
    ],
)
def test_what_ray_data_cannot_follow_is_refused(tmp_path, train, data, said):
    (tmp_path / "job.yaml").write_text(JOB.format(train=train, data=data))
    with pytest.raises(JobFileError) as found:
        load_job(tmp_path / "job.yaml")
    assert said in str(found.value)


def test_a_function_is_no_file_and_counts_as_code_of_the_user(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB.format(train="mine:rows", data=""))
    job = load_job(tmp_path / "job.yaml")
    assert job.has_user_code
    assert job.data.files() == {}
