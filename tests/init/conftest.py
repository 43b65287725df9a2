"""Tables and job files of `embershard init` lie in a folder of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
