"""A column with several values in one, or a list, that nobody declared is refused, and never one category."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.proto.errors import JobError
from embershard.worker.job.readers.columns import CtrCsvSection, ParquetSection


@pytest.mark.parametrize("declared", [{}, {"categorical": ("genres",)}, {"skip": ("genres",)}])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_separated_column_is_one_category_only_where_it_is_named(tmp_path, declared, ending):
    rows = pa.table({"label": [1, 0], "user": ["u", "v"], "genres": ["Drama", "Comedy|Drama"]})
    pq.write_table(rows, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("label,user,genres\n1,u,Drama\n0,v,Comedy|Drama\n")
    if ending == "csv":
        section = CtrCsvSection(reader="ctr_csv", train=f"a.{ending}", **declared)
    else:
        section = ParquetSection(reader="parquet", train=(f"a.{ending}",), **declared)
    if declared:
        section.look(tmp_path)
        return
    with pytest.raises(JobError) as found:
        section.look(tmp_path)
    assert found.value.fields["where"] == f"{tmp_path}/a.{'csv:2' if ending == 'csv' else 'parquet: row group 0'}"
    assert re.search(r"'genres'.*'Comedy\|Drama'.*type: list", found.value.fields["reason"])


def test_a_list_column_is_refused(tmp_path):
    pq.write_table(pa.table({"label": [1], "user": ["u"], "tags": [["a", "b"]]}), tmp_path / "a.parquet")
    with pytest.raises(JobError, match=r"'tags' is a list.*type: list"):
        ParquetSection(reader="parquet", train=("a.parquet",)).look(tmp_path)
