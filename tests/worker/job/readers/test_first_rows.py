"""What is wrong with the first rows of a job's files, named before anything starts, without torch."""

import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.proto.errors import JobError
from embershard.worker.job.checks import check_opened
from embershard.worker.job.job import Job
from embershard.worker.job.readers.adult import AdultSection
from embershard.worker.job.readers.columns import CtrCsvSection, ParquetSection
from embershard.worker.job.readers.criteo import CriteoSection
from embershard.worker.job.readers.interactions import ListsSection
from embershard.worker.job.readers.ncf import NcfFilesSection
from harness.raises import raises

CRITEO = "\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26]) + "\n"
ADULT = "39, Private, 7, BA, 13, Never, Clerical, Unmarried, White, Male, 0, 0, 40, Cuba, <=50K\n"
FILES = {
    "t.csv": "label,a,b\n1,7,2\n0,8,3\n",
    "t.tsv": CRITEO,
    "t.adult": ADULT,
    "t.lists": "0 1 2\n1 3\n",
    "n.train.pairs": "0\t1\n",
    "n.test.rating": "0\t2\t1\t0\n",
    "n.test.negative": "(0,2)\t3\n",
}
SECTIONS = {
    "ctr_csv": CtrCsvSection(reader="ctr_csv", train="t.csv", valid="t2.csv", ids="global", num_ids=10),
    "parquet": ParquetSection(reader="parquet", train="t.parquet", valid="t2.parquet", ids="global", num_ids=10),
    "criteo": CriteoSection(reader="criteo", train="t.tsv", test="t2.tsv"),
    "adult": AdultSection(reader="adult", train="t.adult", test="t2.adult"),
    "lists": ListsSection(reader="lists", train="t.lists", test="t2.lists"),
    "ncf": NcfFilesSection(reader="ncf", prefix="n"),
}


@pytest.fixture
def files(tmp_path):
    """The files of every reader, all good, some twice."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        if name.startswith("t."):
            (tmp_path / name.replace("t.", "t2.")).write_text(text)
    for name in ("t.parquet", "t2.parquet"):
        pq.write_table(pa.table({"label": [1, 0], "a": [7, 8]}), tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_good_files_pass(files, section):
    section.look(files)


def test_a_schedule_over_all_steps_may_be_tried_on_the_first_rows_of_a_file(files):
    schedule = {"name": "cosine"}
    job = Job.model_validate(
        {
            "model": {"name": "fm"},
            "data": {"reader": "ctr_csv", "train": "t.csv", "valid": "t2.csv"},
            "embedding": {"optimizer": {"name": "sgd", "lr": 1}},
            "dense": {"optimizer": {"name": "sgd", "lr": 1}},
            "train": {"batch_size": 2, "epochs": 1, "lr_schedule": schedule},
        }
    )
    check_opened(job, job.data.first_rows().open(files, 1))


BAD = [
    ("ctr_csv", "t2.csv", "label,a,b\n1,7,2\n2,8,3\n", "t2.csv:3", "label '2' is not 0 or 1"),
    ("ctr_csv", "t2.csv", "label,a,b\n1,7,2\n1,10,3\n", "t2.csv:3", "id 10 is not below num_ids = 10"),
    ("ctr_csv", "t2.csv", "label,a,b\n1,7\n", "t2.csv:2", "expected 3 fields, got 2"),
    ("ctr_csv", "t2.csv", "label,a,c\n1,7,2\n", "t2.csv:1", "no column 'b', which is read of the train file"),
    ("ctr_csv", "t2.csv", "label,a,b\n", "t2.csv", "no line of data"),
    ("ctr_csv", "t.csv", "label\n1\n", "t.csv:1", "no categorical column"),
    ("parquet", "t2.parquet", {"label": [1, 3], "a": [7, 8]}, "t2.parquet: row group 0", "label"),
    ("parquet", "t2.parquet", {"label": [1, 0], "a": [7, 10]}, "t2.parquet: row group 0", "id 10 is not below"),
    ("parquet", "t2.parquet", {"label": [1, 0], "b": [7, 8]}, "t2.parquet", "no column 'a'"),
    ("parquet", "t2.parquet", {"label": [], "a": []}, "t2.parquet", "no rows"),
    ("criteo", "t2.tsv", CRITEO + CRITEO.replace("3", "x", 1), "t2.tsv:2", "'x' is not a finite number"),
    ("adult", "t2.adult", ADULT + ADULT.replace("<=50K", "50K"), "t2.adult:2", "label ' 50K'"),
    ("lists", "t2.lists", "0 1\n1 -3\n", "t2.lists:2", "integers >= 0"),
    ("ncf", "n.train.pairs", "0\t1\n0\tx\n", "n.train.pairs:2", "'x' is not an integer id"),
    ("ncf", "n.test.rating", "0\t2\t1\n", "n.test.rating:1", "expected 4 fields"),
    ("ncf", "n.test.negative", "(0,2)\t3\n0,2\t3\n", "n.test.negative:2", "expected (user,item)"),
]


@pytest.mark.parametrize(("reader", "name", "content", "where", "reason"), BAD)
def test_a_bad_row_of_any_file_is_named(files, reader, name, content, where, reason):
    if isinstance(content, dict):
        pq.write_table(pa.table({key: pa.array(column, pa.int64()) for key, column in content.items()}), files / name)
    else:
        (files / name).write_text(content)
    with raises(JobError, where=re.compile(re.escape(where) + "$"), reason=re.compile(re.escape(reason))):
        SECTIONS[reader].look(files)


def test_looking_needs_neither_torch_nor_compiled_kernels(files):
    code = "import sys; from pathlib import Path\n"
    for section in SECTIONS.values():
        code += f"from {type(section).__module__} import {type(section).__name__} as Section\n"
        given = f"Section.model_validate_json({section.model_dump_json()!r})"
        code += f"{given}.look(Path({str(files)!r}))\n"
    code += "print([name for name in ('torch', 'numba') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
