"""Tables of other programs, each trained at the first try by `embershard train`, or refused with the right line.

bench/data/write_files.py writes them by pandas, polars, DuckDB, Arrow, SQLite and by hand, as Spark, Excel and R do, in
an environment of these programs (.venv-data); none is changed afterwards. Each job is a job file that names the table's
features; training runs in processes of its own, with one shard and one worker, and must end with all samples of an
epoch. Then the readers' samples per second of CPU against those of pyarrow, which reads the same file alone, of one
thread each: the median ratio of interleaved turns is at least 0.8, and 0.6 of a Parquet file without a text twice, of
which each has to be hashed.

Prints a line for each file and format, and one JSON line; exits 1 with what failed. ARGS=--look only looks at the
tables, as training does before it starts.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from embershard.proto.errors import EmbershardError
from embershard.worker.job.load import load_job
from timing import finish, machine, median, print_table

WRITER = Path(__file__).parent / "data" / "write_files.py"
ROWS = 400  # of each table
REST = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
embedding: {dim: 8, optimizer: {name: adagrad, lr: 0.05}}
train: {epochs: 1, batch_size: 64, threads: 1}
shards: 1
"""
SINGLE = {"user": {}, "item": {}}
NUMBERS = {"price": {"type": "number", "transform": ["log", "standardise"]}, "age": {"type": "number"}}
LISTS = {
    "tags": {"type": "list", "max_length": 4},
    "history": {"type": "list", "table": "item", "max_length": 5, "too_long": "truncate"},
}
PARTED = {name: {**fields, "separator": "|"} for name, fields in LISTS.items()}
ALL = SINGLE | {"city": {}} | NUMBERS
BY_TIME = {"by": "time", "column": "time", "valid": 0.1, "test": 0.1}
EXCEL = {"delimiter": ";", "decimal": ",", "encoding": "cp1252"}
PRICE = SINGLE | {"city": {}, "price": {"type": "number", "transform": "min_max"}}


@dataclass(frozen=True)
class Case:
    """A table, its job, and the line of an error where it is to be refused."""

    file: str
    features: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    refused: str = ""  # pattern of the error: where, and what


CASES = (
    Case("pandas.parquet", ALL | LISTS, {"split": BY_TIME}),
    Case("pandas.csv", ALL, {"split": {"by": "random", "valid": 0.2}}),
    Case("pandas.csv.gz", ALL | PARTED, {"split": {"by": "user", "column": "user", "test": 0.2}}),
    Case("pandas_german.csv", ALL | PARTED, EXCEL),
    Case("pandas.jsonl", ALL | LISTS, {"split": BY_TIME}),
    Case("pandas_array.json", ALL, refused=r"pandas_array\.json:1: .*array.*lines"),
    Case("pandas_lists.csv", ALL | {"tags": {}}, refused=r"pandas_lists\.csv:2: .*'tags'.*list"),
    Case("pandas_floats.parquet", ALL, refused=r"pandas_floats\.parquet: row 1: .*'user'.*type: number"),
    Case("polars.parquet", ALL | LISTS, {"split": BY_TIME}),
    Case("polars.ndjson", ALL | LISTS, {"split": BY_TIME}),
    Case("polars.tsv", ALL, {"missing": ["NA", ""]}),
    Case("polars_breaks.csv", ALL, refused=r"polars_breaks\.csv:2: .*quote"),
    Case("polars_stream.csv.zst", ALL | {"user": {"min_count": 5}}, {"split": BY_TIME}),
    Case("duckdb.parquet", ALL | LISTS, {"split": BY_TIME}),
    Case("duckdb.csv", ALL, {"delimiter": "|"}),
    Case("duckdb.json", ALL | LISTS),
    Case("duckdb_parts", SINGLE | LISTS, {"train": "duckdb_parts/*/*.parquet"}),
    Case("spark", ALL | LISTS, {"split": BY_TIME}),
    Case("spark_structs", SINGLE | {"pairs": {"type": "list"}}, refused=r"parquet: row 1: .*'pairs'.*struct"),
    Case("excel.csv", PRICE, EXCEL),
    Case(
        "excel_again.csv", PRICE, {"delimiter": ";", "decimal": ","}, refused=r"excel_again\.csv:\d+: .*UTF-8.*cp1252"
    ),
    Case("excel_utf8.csv", PRICE, {"delimiter": ";", "decimal": ","}),
    Case("excel_thousands.csv", PRICE, EXCEL, refused=r"excel_thousands\.csv:2: .*'price'.*'\d+\.\d+,\d+'"),
    Case("excel_unicode.csv", PRICE, EXCEL, refused=r"excel_unicode\.csv: .*UTF-16"),
    Case("r.txt", SINGLE, {"format": "csv", "delimiter": " "}, refused=r"r\.txt:2: .*3 fields, got 4"),
    Case("sqlite.csv", SINGLE | {"price": {"column": "price", "type": "number", "bucketise": 10}}),
    Case("arrow_types.parquet", SINGLE | {"day": {}} | NUMBERS, {"split": {**BY_TIME, "column": "day"}}),
    Case("arrow.csv", ALL | PARTED, {"split": BY_TIME}),
    Case("json_labels.jsonl.zst", SINGLE, {"label": "click", "weight": "weight"}),
    Case(
        "criteo.tsv.gz",
        {"c1": {"buckets": 1000}, "c2": {}, "i1": {"type": "number", "transform": "log"}, "i2": {"type": "number"}},
        {"columns": ["click", "i1", "i2", "c1", "c2"]},
    ),
    Case("movielens.csv", {"user": {}, "film": {}, "genres": {}}, refused=r"movielens\.csv:2: .*'genres'.*separator"),
    Case("movielens.csv", {"user": {}, "film": {}, "genres": {"type": "list", "separator": "|"}}),
    Case("pandas.jsonl", ALL | {"tags": {}}, refused=r"pandas\.jsonl:1: .*'tags' is a list"),
    Case("spark", SINGLE | {"history": {"type": "list", "max_length": 2}}, refused=r"row \d+: .*'history'.*max_length"),
    Case(
        "duckdb.json", SINGLE, {"label": "rating"}, refused=r"duckdb\.json:\d+: .*'rating'.*label \d is not in 0 to 1"
    ),
)


def job_file(folder: Path, case: Case, number: int) -> Path:
    """The job of a case, in the folder of the tables."""
    data = {"reader": "tabular", "train": case.file, "label": "click", **case.data}
    path = folder / f"job-{number}.yaml"
    path.write_text(f"{REST}data: {json.dumps(data)}\nfeatures: {json.dumps(case.features)}\n")
    return path


def run(case: Case, folder: Path, number: int, *, look: bool) -> str:
    """What is wrong; the empty text where the table was trained or refused as it should be."""
    job = job_file(folder, case, number)
    if look:
        try:
            load_job(job).data.look(folder)
            code, said = 0, ""
        except EmbershardError as error:
            code, said = 1, str(error)
    else:
        out = folder / f"run-{number}"
        command = [sys.executable, "-m", "embershard.cli", "train", str(job), "--output", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        code, said = done.returncode, " ".join((done.stdout[-2000:] + done.stderr).split())
    if case.refused:
        return "" if code and re.search(case.refused, said) else f"was not refused so ({case.refused}): {said[-400:]}"
    if code:
        return f"was refused: {said[-400:]}"
    return "" if look else _wrong_count(case, out)


def _wrong_count(case: Case, out: Path) -> str:
    result = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()][-1]
    share = 1 - sum(v for k, v in case.data.get("split", {}).items() if k in ("valid", "test"))
    margin = 0 if share == 1 else 0.1
    samples = result["samples"]
    return "" if abs(samples / ROWS - share) <= margin else f"was trained on {samples} samples of {ROWS}"


def measure(folder: Path, rows: int, turns: int) -> dict[str, dict[str, float]]:
    """Samples per second of the readers and of pyarrow, by file."""
    features, table = _clicks(rows)
    pq.write_table(table, folder / "speed.parquet", row_group_size=1 << 16)
    pa_csv.write_csv(table.drop_columns(["history"]), folder / "speed.csv")
    with (folder / "speed.jsonl").open("w") as file:
        for batch in table.to_batches(20_000):
            file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
    draw = np.random.default_rng(1)
    once = {f"c{i}": pa.array([f"{x:016x}" for x in draw.integers(0, 1 << 62, rows).tolist()]) for i in range(8)}
    pq.write_table(pa.table({"click": table["click"], **once}), folder / "once.parquet", row_group_size=1 << 16)
    pa.set_cpu_count(1)
    one = {"use_threads": False}
    alone: dict[str, Callable[[Path], pa.Table]] = {
        "speed.parquet": lambda path: pq.read_table(path, **one),
        "once.parquet": lambda path: pq.read_table(path, **one),
        "speed.csv": lambda path: pa_csv.read_csv(path, pa_csv.ReadOptions(**one)),
        "speed.jsonl": lambda path: pa_json.read_json(path, pa_json.ReadOptions(**one)),
    }
    found = {}
    for name, read in alone.items():
        columns = read(folder / name).column_names
        own = {feature: fields for feature, fields in features.items() if feature in columns}
        dataset = load_job(job_file(folder, Case(name, own), 1000)).data.open(folder, 0)

        def ours(dataset: Any = dataset) -> int:
            return sum(len(batch) for batch in dataset.evaluate("train", 0, 1, 4096))

        def theirs(read: Callable[[Path], pa.Table] = read, name: str = name) -> int:
            return int(read(folder / name).num_rows)

        assert ours() == theirs() == rows
        seconds = [(_cpu_seconds(ours), _cpu_seconds(theirs)) for _ in range(turns)]
        found[name] = {
            "samples_per_second": rows / min(a for a, _ in seconds),
            "pyarrow": rows / min(b for _, b in seconds),
            "ratio": median([b / a for a, b in seconds]),
        }
    return found


def _cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process: pyarrow reads Parquet in threads of its own, however many it may use."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _clicks(rows: int) -> tuple[dict[str, Any], pa.Table]:
    """Eight text and two integer categories, five numbers and a list of ten ids."""
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {"click": draw.integers(0, 2, rows)}
    features: dict[str, Any] = {}
    for i in range(8):
        columns[f"c{i}"] = (draw.zipf(1.2, rows) % 100_000).astype(np.int64).astype(str)
        features[f"c{i}"] = {}
    for i in range(2):
        columns[f"id{i}"] = draw.integers(0, 1 << 40, rows)
        features[f"id{i}"] = {}
    for i in range(5):
        columns[f"n{i}"] = draw.normal(size=rows).round(4)
        features[f"n{i}"] = {"type": "number"}
    starts = np.concatenate([[0], np.cumsum(draw.integers(0, 20, rows))])
    items = pa.array((draw.zipf(1.2, starts[-1]) % 100_000).astype(np.int64).astype(str))
    columns["history"] = pa.ListArray.from_arrays(pa.array(starts, pa.int32()), items)
    features["history"] = {"type": "list", "max_length": 20, "table": "c0"}
    return features, pa.table(columns)


def main() -> None:
    """Run the bar."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--look", action="store_true", help="look at the tables, and train nothing")
    options.add_argument("--writer", default=sys.executable, help="Python of the environment that writes the tables")
    options.add_argument("--rows", type=int, default=200_000, help="of the tables that speed is measured on")
    given = options.parse_args()
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([given.writer, str(WRITER), str(folder)], check=True)
        for number, case in enumerate(CASES):
            wrong = run(case, folder, number, look=given.look)
            what = wrong or ("refused" if case.refused else "looked at" if given.look else "trained")
            print(f"{case.file}: {what}", flush=True)
            failures += [f"{case.file} {wrong}"] if wrong else []
        speed = measure(folder, given.rows, 9)
    print(f"samples per second of CPU, {given.rows} rows, {machine()}")
    print_table(
        ["file", "reader", "pyarrow alone", "ratio"],
        [[k, f"{v['samples_per_second']:,.0f}", f"{v['pyarrow']:,.0f}", v["ratio"]] for k, v in speed.items()],
    )
    slow = [name for name, v in speed.items() if v["ratio"] < (0.6 if name == "once.parquet" else 0.8)]
    failures += [f"{name}: {speed[name]['ratio']:.2f} of pyarrow's speed" for name in slow]
    finish({"files": len({case.file for case in CASES}), "cases": len(CASES), "speed": speed}, failures)


if __name__ == "__main__":
    main()
