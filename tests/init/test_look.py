"""The first rows of files of any kind: what their columns have, and how their text is to be read."""

import json
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from embershard.init.look import CannotInit, look_at
from embershard.proto.errors import EmbershardError
from embershard.worker.job.load import load_job
from harness.init_tables import as_text, job_of, run, write_excel


def test_what_a_file_needs_to_be_read_is_found():
    write_excel(Path("excel.csv"))
    assert look_at(Path("excel.csv")).settings == {"encoding": "cp1252", "delimiter": ";", "decimal": ","}
    assert {type(value) for value in look_at(Path("excel.csv")).columns["price"]} == {float}


def test_what_pandas_and_databases_add_to_parquet_is_known():
    rows = range(300)
    columns = {
        "__index_level_0__": pa.array(rows),
        "label": [n % 2 for n in rows],
        "user_id": pa.array([1000 + n % 70 for n in rows]).cast(pa.decimal128(38, 0)),
        "price": [float("nan") if n % 3 else -float(n) for n in rows],
        "none\nof it": [float("nan")] * 300,
    }
    job_of(columns)
    features = YAML(typ="safe").load(Path("job.yaml"))["features"]
    assert features == {"user_id": {}, "price": {"type": "number", "transform": "standardise"}}
    assert look_at(Path("a.parquet")).columns["price"][:4] == [0.0, None, None, -3.0]


def test_text_of_a_second_file_is_seen():
    Path("parts").mkdir()
    Path("parts/1.csv").write_text("label;user;price\n" + "".join(f"{n % 2};u{n % 7};{n}\n" for n in range(200)))
    lines = "".join(f"{n % 2};ü{n % 7};{n / 4 if n % 5 else 'NA'}\n".replace(".", ",") for n in range(200))
    Path("parts/2.csv").write_bytes(("label;user;price\n" + lines).encode("cp1252"))
    Path("parts/3.csv").write_text("label;user;price\n")
    look = look_at(Path("parts"))
    assert look.settings == {"delimiter": ";", "encoding": "cp1252", "decimal": ",", "missing": ["", "NA"]}
    assert (len(look.columns["price"]), look.starts) == (400, (0, 200))


def test_a_folder_without_a_file_of_a_known_format_is_refused():
    Path("parts").mkdir()
    Path("parts/notes.txt").write_text("no data")
    with pytest.raises(EmbershardError, match=r"no file in this folder ends with \.parquet"):
        run("parts")


def test_times_that_python_cannot_hold_and_empty_lists_are_left_out():
    times = [f"{1800 + n % 400}-01-01" for n in range(300)]
    columns = {
        "label": [n % 2 for n in range(300)],
        "user": [f"u{n % 7}" for n in range(300)],
        "until": pa.array([2**62, *range(299)], pa.timestamp("us")),  # of a database: infinity
        "never": pa.array([2**60] * 300, pa.timestamp("ms", "UTC")),
        "far": pa.array([2**31 - 1] * 300, pa.int32()).cast(pa.date32()),
        "old": pa.array(times).cast(pa.date32()),
        "empty": pa.array([[]] * 300, pa.list_(pa.string())),
    }
    pq.write_table(pa.table(columns), "a.parquet")
    columns = look_at(Path("a.parquet")).columns
    assert columns["until"][:2] == [None, datetime(1970, 1, 1)]
    assert set(columns["never"]) == set(columns["far"]) == {None}
    assert columns["old"][0] == date(1800, 1, 1)
    run("a.parquet")
    job = load_job(Path("job.yaml"))
    assert (job.data.split.column, list(job.features)) == ("old", ["user"])


def test_numbers_that_are_missing_in_words_stay_numbers_and_thousands_separators_are_remarked():
    lines = [
        f'{n % 2},{"NaN" if n % 5 == 0 else n / 7},{"-inf" if n == 3 else n},u{n % 9},"{n + 1},234.5"'
        for n in range(300)
    ]
    Path("a.csv").write_text("label,price,count,user,sales\n" + "\n".join(lines) + "\n")
    run("a.csv")
    job = load_job(Path("job.yaml"))
    assert job.data.missing == ("", "-inf", "NaN")
    assert {name: feature.type for name, feature in job.features.items()} == {
        "price": "number", "count": "number", "user": None,
    }  # fmt: skip
    assert "# sales: left out" in Path("job.yaml").read_text()
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert bool(batch.dense.isfinite().all())


def test_ids_with_one_letter_that_look_like_numbers_stay_texts():
    codes = ["12e3", "450", "7E1"]
    rows = [{"label": n % 2, "code": codes[n % 3], "price": f"{n}e-05", "size": f"{n}.5e3"} for n in range(200)]
    Path("a.csv").write_text(as_text(rows))
    run("a.csv")
    job = load_job(Path("job.yaml"))
    assert {name: feature.type for name, feature in job.features.items()} == {
        "code": None, "price": "number", "size": "number",
    }  # fmt: skip
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert len(set(batch.ids[:, 0].tolist())) == 3


def test_empty_lines_of_json_are_skipped_and_a_bad_one_is_named_with_its_line():
    lines = [json.dumps({"label": n % 2, "user": f"u{n % 7}"}) for n in range(60)]
    Path("a.jsonl").write_text("\n".join([lines[0], "", " ", *lines[1:], "", ""]))
    look = look_at(Path("a.jsonl"))
    assert [len(values) for values in look.columns.values()] == [60, 60]
    Path("b.jsonl").write_text(lines[0] + "\n\n{\n")
    with pytest.raises(EmbershardError) as found:
        run("b.jsonl")
    assert found.value.fields["where"] == "b.jsonl:3"


def test_a_column_name_that_occurs_twice_in_parquet_is_refused():
    column = pa.array([0, 1])
    pq.write_table(pa.table([column, column, column], names=["label", "x", "x"]), "a.parquet")
    with pytest.raises(CannotInit):
        run("a.parquet")


def test_parquet_files_with_texts_that_are_not_utf_8_are_refused():
    _, ends, data = pa.array([b"a", b"J\xfcrgen"]).buffers()
    pq.write_table(pa.table({"label": [0, 1], "user": pa.StringArray.from_buffers(2, ends, data)}), "a.parquet")
    with pytest.raises(CannotInit, match="column 'user' has texts that are not UTF-8"):
        run("a.parquet")


def test_lists_of_dictionaries_in_several_row_groups_are_lists():
    kind = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    tags = pa.array([[f"t{place % 7}", "x"] for place in range(300)]).cast(kind)
    pq.write_table(pa.table({"label": [0, 1] * 150, "tags": tags}), "a.parquet", row_group_size=100)
    run("a.parquet")
    assert load_job(Path("job.yaml")).data.features["tags"].type == "list"


def test_integers_of_decimals_may_be_larger_than_64_bits():
    ids = [Decimal(2**63 + 7 * n) for n in range(300)]
    pq.write_table(pa.table({"label": [0, 1] * 150, "buyer": pa.array(ids, pa.decimal128(38, 0))}), "a.parquet")
    assert look_at(Path("a.parquet")).columns["buyer"][:2] == [2**63, 2**63 + 7]


def test_words_for_a_missing_number_are_those_of_its_column():
    lines = ["label,age,price,code"]
    for n in range(90):
        age, price, code = n if n % 5 else "NA", f"{n}.5" if n % 7 else "-", f"{n}e3" if n % 3 else "null"
        lines.append(f"{n % 2},{age},{price},{code}")
    Path("a.csv").write_text("\n".join([*lines, ""]))
    look = look_at(Path("a.csv"))
    assert {name: set(words) for name, words in look.missing.items() if words} == {"age": {"NA"}, "price": {"-"}}
    assert look.settings == {"missing": ["", "-", "NA"]}
    assert look.columns["code"][:2] == ["null", "1e3"]


@pytest.mark.parametrize("text", ["\n \n\n", "\ufeff\n"])
def test_lines_of_json_that_are_all_blank_are_no_rows(text):
    Path("a.jsonl").write_text(text)
    with pytest.raises(CannotInit, match=r"a\.jsonl: it has no rows"):
        run("a.jsonl")


def test_an_encoding_that_was_guessed_is_remarked_on():
    write_excel(Path("excel.csv"))
    run("excel.csv")
    assert re.search(r'encoding: "cp1252" +# guessed.*check its texts', Path("job.yaml").read_text())


def test_signs_in_front_of_some_numbers_are_of_numbers_and_in_front_of_all_of_telephones():
    lines = [f"{n % 2},{n - 50:+},+49{n:07}" for n in range(120)]
    Path("a.csv").write_text("\n".join(["label,change,phone", *lines, ""]))
    columns = look_at(Path("a.csv")).columns
    assert (columns["change"][:2], columns["phone"][1]) == ([-50.0, -49.0], "+490000001")


@pytest.mark.parametrize("share", [2, 6])
def test_a_column_with_words_for_missing_numbers_is_what_the_cells_of_all_files_are(share):
    Path("parts").mkdir()
    for part in range(3):  # of which the last has hardly a number
        amounts = ["-" if (part == 2 and n) or n % 10 < share else 100 + n for n in range(100)]
        lines = [f"{n % 2},{amount},u{n}" for n, amount in enumerate(amounts)]
        Path(f"parts/{part}.csv").write_text("\n".join(["label,amount,user", *lines, ""]))
    run("parts")
    job = load_job(Path("job.yaml"))
    assert (job.features["amount"].type, job.data.missing) == ("number", ("", "-"))


def test_columns_whose_numbers_have_other_decimals_than_the_rest_are_left_out_and_remarked():
    lines = [f"{n % 2};u{n % 7};{n},5;{n}.25;{n}{',.'[n % 2]}75;{n}" for n in range(200)]
    Path("a.csv").write_text("\n".join(["label;user;price;lat;size;count", *lines, ""]))
    run("a.csv")
    job, text = load_job(Path("job.yaml")), Path("job.yaml").read_text()
    assert (job.data.decimal, list(job.features)) == (",", ["user", "price", "count"])
    assert (
        "# lat: left out, its numbers have a decimal point, as 0.25, and those of price a decimal comma, as 0,5" in text
    )
    assert "# size: left out, its numbers have a decimal point, as 1.75, and a decimal comma, as 0,75" in text
    with pytest.raises(CannotInit, match=r"label 'lat' have a decimal point, as 0\.25, .* price a decimal comma"):
        run("a.csv", "--label", "lat", "-o", "other.yaml")


def test_a_decimal_comma_behind_tabs_is_found():
    Path("a.tsv").write_text("label\tprice\tuser\n" + "".join(f"{n % 2}\t{n},5\tu{n}\n" for n in range(120)))
    assert look_at(Path("a.tsv")).settings == {"decimal": ","}
