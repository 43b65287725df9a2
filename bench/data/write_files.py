"""Write the tables of bar-data, each by the program that its name begins with: python write_files.py FOLDER.

It runs in an environment of these programs alone, and knows nothing of embershard.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

ROWS = 400
Row = dict[str, Any]


def rows() -> list[Row]:
    """Clicks with single values, lists, numbers that may be missing, and times."""
    draw = random.Random(0)
    begin = datetime.datetime(2026, 1, 1)
    return [
        {
            "user": draw.randrange(60),
            "item": f"item-{draw.randrange(40)}",
            "city": draw.choice(["Köln", "Łódź", "Paris", "São Paulo", ""]),
            "price": round(draw.random() * 100, 2),
            "age": draw.choice([None, draw.randrange(18, 80)]),
            "tags": draw.sample(["red", "new", "sale", "big"], draw.randrange(4)),
            "history": [f"item-{draw.randrange(40)}" for _ in range(draw.randrange(9))],
            "time": begin + datetime.timedelta(minutes=i),
            "click": draw.randrange(2),
            "rating": draw.randrange(1, 6),
        }
        for i in range(ROWS)
    ]


FLAT = ("user", "item", "city", "price", "age", "time", "click", "rating")


def frame(lists: bool = True) -> pd.DataFrame:
    """The rows as a frame of pandas."""
    return pd.DataFrame(rows() if lists else [{name: row[name] for name in FLAT} for row in rows()])


def polars_frame(lists: bool = True) -> pl.DataFrame:
    """The rows as a frame of polars."""
    return pl.DataFrame(rows() if lists else [{name: row[name] for name in FLAT} for row in rows()])


def arrow() -> pa.Table:
    """The rows as a table of Arrow."""
    return pa.Table.from_pylist(rows())


def joined(separator: str = "|") -> pd.DataFrame:
    """The rows with lists as text."""
    data = frame()
    for name in ("tags", "history"):
        data[name] = data[name].map(separator.join)
    return data


def in_duckdb(command: str) -> None:
    """Run a COPY of the table `clicks`."""
    with duckdb.connect() as database:
        database.register("arrow_rows", arrow())
        database.execute("CREATE TABLE clicks AS SELECT * FROM arrow_rows")
        database.execute(command)


def excel(path: Path, encoding: str, number: Callable[[float], str] = lambda x: f"{x:.2f}".replace(".", ",")) -> None:
    """A sheet as Excel saves it in a country with a decimal comma: `;`, CRLF, dates by day, one code page."""
    with path.open("w", encoding=encoding, newline="", errors="replace") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\r\n")
        writer.writerow(["user", "item", "city", "price", "click"])
        for row in rows():
            city = "Köln" if row["city"] == "Łódź" else row["city"]
            writer.writerow([row["user"], row["item"], city, number(row["price"]), row["click"]])


def thousands(x: float) -> str:
    """A number as 1.234,50."""
    return f"{x * 1000 + 1000:,.2f}".translate(str.maketrans(",.", ".,"))


def spark(folder: Path, table: pa.Table) -> None:
    """A folder as Spark writes it: parts, snappy, lists of `element`, times of 96 bits, and files of its own."""
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    half = table.num_rows // 2
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        name = f"part-{number:05d}-5c1e0d0e-1f0b-c000.snappy.parquet"
        pq.write_table(
            part,
            folder / name,
            compression="snappy",
            use_deprecated_int96_timestamps=True,
            use_compliant_nested_type=False,
        )
        (folder / f".{name}.crc").write_bytes(b"crc\0")


def spark_lists() -> pa.Table:
    """Lists whose values may be null, as Spark declares them."""
    element = pa.list_(pa.field("element", pa.string()))
    table = arrow()
    for name in ("tags", "history"):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(element))
    return table


def spark_structs() -> pa.Table:
    """A list of structs, which is no list of categories."""
    pairs = [[{"id": tag, "weight": 1.0} for tag in row["tags"]] for row in rows()]
    return arrow().append_column("pairs", pa.array(pairs))


def r_table(path: Path) -> None:
    """A table as write.table of R saves it: row names without a name of their own in the header."""
    lines = ['"user" "item" "click"'] + [
        f'"{i}" {r["user"]} "{r["item"]}" {r["click"]}' for i, r in enumerate(rows(), 1)
    ]
    path.write_text("\n".join(lines) + "\n")


def sqlite(path: Path) -> None:
    """Rows of SQLite through Python's own csv module."""
    with sqlite3.connect(":memory:") as database, path.open("w", newline="") as file:
        database.execute("CREATE TABLE clicks (user INTEGER, item TEXT, price REAL, click INTEGER)")
        data = [(row["user"], row["item"], row["price"], row["click"]) for row in rows()]
        database.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?)", data)
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["user", "item", "price", "click"])
        writer.writerows(database.execute("SELECT * FROM clicks"))


def types(path: Path) -> None:
    """Types that databases have: decimals, dictionaries, dates, unsigned and small integers, booleans."""
    data = rows()
    pq.write_table(
        pa.table(
            {
                "user": pa.array([row["user"] for row in data], pa.uint8()),
                "item": pa.array([row["item"] for row in data]).dictionary_encode(),
                "day": pa.array([row["time"].date() for row in data], pa.date32()),
                "price": pa.array([decimal.Decimal(str(row["price"])) for row in data], pa.decimal128(10, 2)),
                "age": pa.array([row["age"] for row in data], pa.int16()),
                "click": pa.array([bool(row["click"]) for row in data]),
            }
        ),
        path,
    )


def json_labels(path: Path) -> None:
    """Lines of JSON, zstd: two labels, of which one may be missing, and weights."""
    lines = []
    for row in rows():
        line = {"user": row["user"], "item": row["item"], "click": row["click"], "weight": 0.5 + row["price"] / 100}
        lines.append(line | ({"buy": int(row["rating"] > 3)} if row["click"] else {}))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(pa.compress(text.encode(), "zstd", asbytes=True))


def criteo(path: Path) -> None:
    """Tab-separated lines without a header, gzipped; an empty field is a missing value."""
    lines = []
    for row in rows():
        age = "" if row["age"] is None else row["age"]
        lines.append(f"{row['click']}\t{age}\t{row['price']}\t{hash_of(row['item'])}\t{hash_of(row['city'])}")
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


def hash_of(text: str) -> str:
    """Eight hexadecimal digits, or nothing."""
    return f"{sum(ord(c) * 31**i for i, c in enumerate(text)) & 0xFFFFFFFF:08x}" if text else ""


def movielens(path: Path) -> None:
    """Films whose genres are parted by |."""
    lines = ["user,film,genres,click"]
    genres = ["Action", "Comedy", "Drama", "Film-Noir"]
    lines += [f"{r['user']},{r['item']},{'|'.join(genres[: 1 + r['rating'] % 4])},{r['click']}" for r in rows()]
    path.write_text("\n".join(lines) + "\n")


FILES: dict[str, Callable[[Path], object]] = {
    "pandas.parquet": lambda p: frame().astype({"item": "category", "age": "Int64"}).to_parquet(p),
    "pandas.csv": lambda p: frame(lists=False).to_csv(p),
    "pandas.csv.gz": lambda p: joined().to_csv(p, index=False),
    "pandas_german.csv": lambda p: joined().to_csv(
        p, sep=";", decimal=",", index=False, encoding="cp1252", errors="replace"
    ),
    "pandas.jsonl": lambda p: frame().to_json(p, orient="records", lines=True),
    "pandas_array.json": lambda p: frame().to_json(p, orient="records"),
    "pandas_lists.csv": lambda p: frame().to_csv(p, index=False),
    "pandas_floats.parquet": lambda p: frame().astype({"user": "float64"}).to_parquet(p),
    "polars.parquet": lambda p: polars_frame().with_columns(pl.col("item").cast(pl.Categorical)).write_parquet(p),
    "polars.ndjson": lambda p: polars_frame().write_ndjson(p),
    "polars.tsv": lambda p: polars_frame(lists=False).write_csv(p, separator="\t", null_value="NA"),
    "polars_breaks.csv": lambda p: (
        polars_frame(lists=False).with_columns((pl.col("city") + "\n(city)").alias("city")).write_csv(p)
    ),
    "polars_stream.csv.zst": lambda p: p.write_bytes(
        pa.compress(polars_frame(lists=False).write_csv().encode(), "zstd", asbytes=True)
    ),
    "duckdb.parquet": lambda p: in_duckdb(
        f"COPY clicks TO '{p}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 100)"
    ),
    "duckdb.csv": lambda p: in_duckdb(f"COPY (SELECT * EXCLUDE (tags, history) FROM clicks) TO '{p}' (DELIMITER '|')"),
    "duckdb.json": lambda p: in_duckdb(f"COPY clicks TO '{p}' (FORMAT json)"),
    "duckdb_parts": lambda p: in_duckdb(f"COPY clicks TO '{p}' (FORMAT parquet, PARTITION_BY (rating))"),
    "spark": lambda p: spark(p, spark_lists()),
    "spark_structs": lambda p: spark(p, spark_structs()),
    "excel.csv": lambda p: excel(p, "cp1252"),
    "excel_again.csv": lambda p: excel(p, "cp1252"),
    "excel_utf8.csv": lambda p: excel(p, "utf-8-sig"),
    "excel_thousands.csv": lambda p: excel(p, "cp1252", thousands),
    "excel_unicode.csv": lambda p: excel(p, "utf-16"),
    "r.txt": r_table,
    "sqlite.csv": sqlite,
    "arrow_types.parquet": types,
    "arrow.csv": lambda p: pa_csv.write_csv(pa.Table.from_pandas(joined(), preserve_index=False), p),
    "json_labels.jsonl.zst": json_labels,
    "criteo.tsv.gz": criteo,
    "movielens.csv": movielens,
}

if __name__ == "__main__":
    for name, write in FILES.items():
        write(Path(sys.argv[1]) / name)
