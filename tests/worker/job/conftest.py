"""A folder with the data that job files name."""

import pytest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train.csv", "valid.csv", "../train.csv", "p.train.pairs"):
        (tmp_path / "data" / name).write_text("label,a\n1,2\n")
    return tmp_path
