"""Where the real data lies, and shares of a dataset."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def real_data():
    """The path of a real data file or folder; skips the test where it is absent."""
    folder = Path(os.environ.get("EMBERSHARD_DATA", ROOT.parent / "shared" / "data"))

    def find(name):
        path = folder / name
        if not path.exists():
            pytest.skip(f"no real data at {path}; set EMBERSHARD_DATA")
        return path

    return find
