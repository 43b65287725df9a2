"""`embershard init`: a job for a data file, which trains as it is."""

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.init.look import CannotInit
from embershard.local_shards import local
from embershard.proto.errors import EmbershardError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.training.trainer import Trainer
from harness.init_tables import ROWS, as_text, run, write_excel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_csv(path):
    path.write_text(as_text(ROWS))


def write_gzip(path):
    path.write_bytes(gzip.compress(as_text(ROWS).encode()))


def write_tsv(path):
    path.write_text(as_text(ROWS, "\t"))


def write_lines(path):
    path.write_text("".join(json.dumps({**row, "time": str(row["time"])}) + "\n" for row in ROWS))


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


FILES = {
    "a.csv": write_csv,
    "a.csv.gz": write_gzip,
    "excel.csv": write_excel,
    "a.tsv": write_tsv,
    "a.jsonl": write_lines,
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_a_job_is_written_that_trains_as_it_is(name):
    FILES[name](Path(name))
    run(name)
    job = load_job(Path("job.yaml"), ["train.epochs=1"])
    data, features = job.data, job.features
    assert Job.model_validate(job.model_dump(mode="json")) == job  # as checkpoints and comparisons keep it
    assert (data.label, data.split.by, data.split.column) == (("label",), "time", "time")
    assert list(features) == ["user_id", "item", "price", "genres"]
    assert (features["price"].type, features["genres"].type) == ("number", "list")
    dataset = data.open(Path(), 0)
    assert [dataset.num_samples(part) for part in ("train", "valid", "test")] == [320, 40, 40]
    with local(1) as session:
        Trainer(job, dataset, session, WorkerGroup()).run()


WRONG = {
    "missing.csv": None,
    "a.doc": "label,x\n1,2\n",
    "empty.csv": "",
    "header.csv": "label,x\n",
    "numbers.csv": "1,2\n0,3\n",
    "twice.csv": "label,x,x\n1,2,3\n0,2,3\n",
    "no_label.csv": "a,b\n5,2\n6,3\n",
    "label_alone.csv": "label\n0\n1\n",
    "lines.jsonl": '{"label": 1}\n[2]\n',
    "no.parquet": "text",
    "old_mac.csv": "label,x\r1,2\r0,3\r",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_a_job_is_named_and_none_is_written(name):
    if WRONG[name] is not None:
        Path(name).write_text(WRONG[name])
    with pytest.raises(EmbershardError) as caught:
        run(name)
    assert name in str(caught.value)
    assert not Path("job.yaml").exists()


REMEDIES = {
    "rows.csv": ("0,u1,5\n1,u2,6\n0,u1,7\n", "rows.csv:1: it looks like a row: 'u1' is a value of its column, too"),
    "twice.csv": ("label,user\n1,a\n0,b\nlabel,user\n", "twice.csv:1: it looks like a row: 'label' is a value"),
    "array.json": ('[{"label": 1}]', "has to be written as lines of objects"),
    "indented.json": ('[\n {\n "label": 1}]', "indented.json:1: no JSON.*each line has to be one object"),
    "mixed.csv": (
        "label,x\n1,2\r3\n0,3\n",
        "mixed.csv: cannot be read as CSV: .*field; save it as text, with the line",
    ),
    "table.csv": ("PAR1\n", "table.csv: it is a Parquet file, no text: let its name end with .parquet"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_file_that_is_not_what_it_seems_is_refused_with_a_remedy(name):
    text, message = REMEDIES[name]
    Path(name).write_text(text)
    with pytest.raises(EmbershardError, match=re.escape(message).replace(r"\.\*", ".*")):
        run(name)


def test_a_job_file_that_is_there_stays_unless_it_may_be_replaced():
    write_csv(Path("a.csv"))
    Path("job.yaml").write_text("mine")
    with pytest.raises(CannotInit):
        run("a.csv")
    assert Path("job.yaml").read_text() == "mine"
    with pytest.raises(EmbershardError):
        run("missing.csv", "--replace")
    assert Path("job.yaml").read_text() == "mine"
    run("a.csv", "--replace", "--label", "label", "-o", "job.yaml")
    assert load_job(Path("job.yaml")).features


def test_a_place_that_takes_no_job_file_is_refused_with_a_remedy():
    write_csv(Path("a.csv"))
    Path("folder").mkdir()
    for words in (("folder", "--replace"), ("none/job.yaml",)):
        with pytest.raises(CannotInit, match=f"{words[0]}: cannot be written: .*; name another file with -o"):
            run("a.csv", "-o", *words)
