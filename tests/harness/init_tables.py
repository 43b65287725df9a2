"""A small table of clicks, and what `embershard init` makes of tables."""

import csv
import random
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.init.job_text import job_text
from embershard.init.look import Look
from embershard.proto.errors import EmbershardError
from embershard.worker.job.load import load_job

DRAW = random.Random(0)
N = 400
ROWS = [
    {
        "label": DRAW.randrange(2),
        "user_id": DRAW.randrange(50),
        "item": f"i{DRAW.randrange(30)}",
        "price": round(DRAW.expovariate(0.1), 2),
        "genres": [f"g{DRAW.randrange(5)}" for _ in range(DRAW.randrange(1, 4))],
        "time": datetime(2026, 1, 1) + timedelta(minutes=row),
        "source": "web",
    }
    for row in range(N)
]


def run(*words):
    done = CliRunner().invoke(cli.app, ["init", *words])
    if isinstance(done.exception, EmbershardError):
        raise done.exception
    assert done.exit_code == 0, done.output


def as_text(rows, delimiter=",", comma=False):
    lines = [[str(v).replace(".", ",") if comma and isinstance(v, float) else
              "|".join(v) if isinstance(v, list) else v for v in row.values()] for row in rows]  # fmt: skip
    with open("text", "w", newline="") as file:
        out = csv.writer(file, delimiter=delimiter)
        out.writerows([list(rows[0]), *lines])
    return Path("text").read_text()


def write_excel(path):
    path.write_bytes(
        as_text([{**row, "item": f"Größe {row['item']}"} for row in ROWS], ";", comma=True).encode("cp1252")
    )


def text_of(columns, label=None):
    """The job file for a table of these columns."""
    Path("a.csv").touch()
    return job_text(Path("a.csv"), Look(columns, {}), label, Path.cwd())


def features_of(columns, label=None):
    return YAML(typ="safe").load(text_of(columns, label))


def job_of(columns):
    """The job that is written for a file of Parquet with these columns, or rows."""
    is_rows = isinstance(columns, list)
    pq.write_table(pa.Table.from_pylist(columns) if is_rows else pa.table(columns), "a.parquet")
    run("a.parquet")
    return load_job(Path("job.yaml"))
