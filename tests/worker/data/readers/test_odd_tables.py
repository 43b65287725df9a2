"""Tables as other programs write them: what their texts, ids and vocabularies become, and what is said of odd ones."""

import bz2
import gzip
import json
import lzma
import re
import shutil
from pathlib import PosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.proto.errors import BadRows, JobError
from embershard.worker.data import files
from embershard.worker.data.files import expand, read_blocks
from embershard.worker.data.hashing import hash_ids
from embershard.worker.data.readers import parquet
from embershard.worker.job.load import load_job
from embershard.worker.trained.served_inputs import FeatureInputs, inputs_of

REST = "embedding: {optimizer: {name: sgd, lr: 0.1}}\ntrain: {epochs: 1, batch_size: 32}\n"


def job_of(folder, columns, features, ending="parquet", model="{name: fm}", **data):
    """A job of these columns, in a file of this format."""
    rows = pa.table({"label": [row % 2 for row in range(len(next(iter(columns.values()))))], **columns})
    if ending == "parquet":
        pq.write_table(rows, folder / "a.parquet")
    else:
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    data = {"reader": "tabular", "train": f"a.{ending}", **data}
    (folder / "job.yaml").write_text(f"data: {json.dumps(data)}\nfeatures: {features}\nmodel: {model}\n{REST}")
    return load_job(folder / "job.yaml")


def section_of(*args, **kwargs):
    return job_of(*args, **kwargs).data


def samples(section, folder, size=9):
    section.look(folder)
    (batch,) = section.open(folder, 0).evaluate("train", 0, 1, size)
    return batch


def test_times_as_other_programs_write_them_split_rows(tmp_path):
    times = [f"2026-01-0{day} 12:00:00" for day in (1, 2, 3, 4)]  # as pandas and polars write texts
    large, coded = (pa.array(times).cast(kind) for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())))
    fine = pa.array([n * 86_400_000_000_001 for n in (20454, 20455, 20456, 20457)], pa.timestamp("ns"))
    zones = [f"{time}.123456789 UTC" for time in times]
    for found in (large, coded, fine, fine.cast(pa.timestamp("ns", "UTC")), pa.array(zones)):
        columns = {"user": ["u"] * 4, "time": found}
        split = {"by": "time", "column": "time", "at": ["2026-01-04"]}
        section = section_of(tmp_path, columns, "{user: {}}", split=split)
        assert section.fit(tmp_path, 0).fitted["samples"] == {"train": 3, "test": 1}


@pytest.mark.parametrize(
    ("times", "row", "reason"),
    [
        (["2026-01-01T00:00:00Z", "soon"], 2, "'soon' is no time"),
        (["2026-01-01T00:00:00Z", "2026-01-02 00:00:00"], 2, "'2026-01-02 00:00:00' has no time zone"),
        (["2026-01-01 00:00:00.123456789", "", "2026-01-02 00:00:00 UTC"], 3, "00 UTC' has a time zone, unlike"),
    ],
)
def test_the_first_time_that_is_none_or_of_another_zone_is_named(tmp_path, times, row, reason):
    columns = {"user": ["u"] * len(times), "time": times}
    section = section_of(tmp_path, columns, "{user: {}}", split={"by": "time", "column": "time", "valid": 0.5})
    with pytest.raises(JobError, match=rf"row {row}: column 'time': .*{reason}"):
        section.look(tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_row_with_lists_is_in_one_split_however_many_workers_read(tmp_path, ending):
    rows = 400
    columns = {"user": list(range(rows)), "tags": [[f"t{tag}" for tag in range(row % 6)] for row in range(rows)]}
    features, split = "{user: {}, tags: {type: list}}", {"by": "random", "valid": 0.3}
    dataset = section_of(tmp_path, columns, features, ending, split=split).open(tmp_path, 0)

    def users(part, workers):
        shares = [dataset.evaluate(part, rank, workers, 64) for rank in range(workers)]
        return {user for share in shares for batch in share for user in batch.ids[:, 0].tolist()}

    train, valid = users("train", 1), users("valid", 1)
    assert len(train) + len(valid) == rows
    assert [users("valid", workers) for workers in (2, 3)] == [valid] * 2


def test_equal_rows_are_in_one_split_whatever_the_order_and_types_of_a_files_columns(tmp_path):
    rows = pa.table(
        {"label": [row % 2 for row in range(400)], "user": range(400), "item": [str(n) for n in range(400)]}
    )
    other = rows.select(["item", "user", "label"]).cast(
        pa.schema([("item", pa.string()), ("user", pa.float64()), ("label", pa.int8())])  # as pandas writes integers
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    pq.write_table(other, tmp_path / "b.parquet")
    for split in ("by: random", "by: user, column: user"):
        (tmp_path / "job.yaml").write_text(
            f"data: {{reader: tabular, train: '*.parquet', split: {{{split}, valid: 0.3}}}}\n"
            f"features: {{item: {{}}, user: {{type: number}}}}\nmodel: {{name: fm}}\n{REST}"
        )
        dataset = load_job(tmp_path / "job.yaml").data.open(tmp_path, 0)
        train, valid = (
            {item for batch in dataset.evaluate(part, 0, 1, 64) for item in batch.ids[:, 0].tolist()}
            for part in ("train", "valid")
        )
        assert len(valid) + len(train) == 400
        assert not train & valid


def test_rows_that_differ_in_the_label_alone_are_in_one_random_split(tmp_path):
    users = [f"u{n // 2 % 60}" for n in range(240)]  # each with both labels
    dataset = section_of(tmp_path, {"user": users}, "{user: {}}", split={"by": "random", "valid": 0.3}).open(
        tmp_path, 0
    )
    parts = [
        {i for b in dataset.evaluate(part, 0, 1, 999) for i in b.ids[:, 0].tolist()} for part in ("train", "valid")
    ]
    assert len(parts[0] | parts[1]) == 60
    assert not parts[0] & parts[1]


def test_a_field_of_a_struct_is_not_read_with_a_column_of_its_path(tmp_path):
    columns = {"user.id": [str(n) for n in range(400)], "user": [{"id": 1}] * 400}
    job = job_of(tmp_path, columns, "{user.id: {}}", split={"by": "random", "valid": 0.3})
    assert sum(job.data.open(tmp_path, 0).num_samples(part) for part in ("train", "valid")) == 400


def test_a_vocabulary_of_a_windows_program_has_its_first_value(tmp_path):
    (tmp_path / "v.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    for name in ("v.txt", (tmp_path / "v.txt").as_uri()):
        section = section_of(tmp_path, {"item": ["b", "a", "c", "a"]}, f'{{item: {{vocabulary: "{name}"}}}}')
        assert samples(section, tmp_path).ids[:, 0].tolist() == [1, 0, 2, 0]


def test_ids_of_64_bits_are_alike_in_each_format(tmp_path):
    users = pa.array([2**64 - 1, 2**63, 7, 0], pa.uint64())
    found = [
        samples(section_of(tmp_path, {"user": users}, "{user: {}}", ending), tmp_path).ids.tolist()
        for ending in ("parquet", "jsonl")
    ]
    assert found[0] == found[1]
    assert len({row[0] for row in found[0]}) == 4


@pytest.mark.parametrize("first", [7, 2**63, 2**64])
def test_integers_of_json_beyond_64_bits_are_refused_with_a_remedy(tmp_path, first):
    section = section_of(tmp_path, {"user": [7]}, "{user: {}}", "jsonl")
    (tmp_path / "a.jsonl").write_text("".join(f'{{"label": 1, "user": {user}}}\n' for user in (first, 2**64)))
    with pytest.raises(JobError, match=r"'user': 18446744073709551616 is no .*; write integers of this size as texts"):
        section.look(tmp_path)


def test_spaces_around_numbers_in_texts_do_not_count(tmp_path):
    section = section_of(tmp_path, {"user": ["u"] * 4, "x": [" 2.5 ", "1", " ", "+5"]}, "{user: {}, x: {type: number}}")
    assert samples(section, tmp_path).dense[:, 0].tolist() == [2.5, 1, 0, 5]


def test_sequences_that_din_weighs_together_are_as_long_as_each_other(tmp_path):
    columns = {
        "item": ["i"] * 4,
        "shop": ["s"] * 4,
        "items": [["i", "j"], [], ["i"], None],
        "shops": [["s", "t"], [], ["s", "t"], None],
    }
    features = "{item: {}, shop: {}, items: {type: sequence, table: item}, shops: {type: sequence, table: shop}}"
    job = job_of(tmp_path, columns, features, model="{name: din, target: [item, shop], history: [items, shops]}")
    with pytest.raises(JobError) as found:
        job.data.look(tmp_path)
    assert found.value.fields["where"] == f"{tmp_path}/a.parquet: row 3"
    assert "'shops': 2 values for 1 values of 'items'" in found.value.fields["reason"]
    served = FeatureInputs(json.loads(json.dumps(inputs_of(type(job).model_validate(job.model_dump()), None))))
    served({name: values[:2] for name, values in columns.items()})
    with pytest.raises(BadRows) as bad:
        served(columns)
    assert bad.value.fields["feature"] == "shops"


TIMES = [pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.time64("us")]


@pytest.mark.parametrize("kind", [*TIMES, pa.float64(), pa.decimal128(21, 2)], ids=str)
@pytest.mark.parametrize("features", ["{user: {}, x: {}}", "{user: {}, c: {type: cross, of: [user, x]}}"])
def test_a_category_whose_text_depends_on_its_type_is_refused(tmp_path, features, kind):
    """The same moment is 12:00:00.000 in one file, and 12:00:00.000000 in the next or in a request."""
    for x in (plain := pa.array([1, 2, 1, 2]).cast(kind), plain.dictionary_encode()):
        with pytest.raises(JobError, match=rf"feature 'x': (is|has) {re.escape(str(kind))}.*(or save|: save)"):
            samples(section_of(tmp_path, {"user": ["a"] * 4, "x": x}, features), tmp_path)


def test_a_list_of_floats_is_refused_with_what_helps_a_list(tmp_path):
    """As pandas collects ids some of which are missing."""
    columns = {"user": ["a"] * 4, "x": [[1.0, 2.0], [], None, [3.0]]}
    section = section_of(tmp_path, columns, "{user: {}, x: {type: list, max_length: 2}}")
    with pytest.raises(JobError, match=r"row 1: feature 'x': has lists of double.*save lists of integers") as found:
        section.look(tmp_path)
    assert "declare it as type: number" not in found.value.fields["reason"]


def test_a_part_that_has_no_value_of_a_column_may_have_it_as_floats(tmp_path):
    """As pandas writes a column of which a chunk has no value."""
    columns = {"user": ["a", None] * 2, "tags": [["x"], None] * 2}
    section = section_of(tmp_path, columns, "{user: {}, tags: {type: list}}", train="*.parquet")
    none = pa.nulls(2, pa.float64())
    pq.write_table(pa.table({"label": [0, 1], "user": none, "tags": none}), tmp_path / "b.parquet")
    ids = samples(section, tmp_path).ids
    assert ids[4:].tolist() == [ids[1].tolist()] * 2


@pytest.mark.parametrize("time", ["2026-01-31 12:00:00", "2026-01-31", "31.01.2026 12:00", "1/31/2026"])
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_text_of_a_time_in_place_of_a_number_is_refused_with_what_helps_a_time(tmp_path, ending, time):
    (tmp_path / "a.csv").write_text(f"label,user,x\n1,a,{time}\n")
    columns = {"user": ["a"], "x": [time]}
    section = section_of(tmp_path, columns, "{user: {}, x: {type: number}}", "jsonl", train=f"a.{ending}")
    with pytest.raises(JobError, match=rf":{2 if ending == 'csv' else 1}: .*seconds since 1970") as found:
        section.look(tmp_path)
    assert "data.missing" not in found.value.fields["reason"]


@pytest.mark.parametrize(
    ("split", "reason"),
    [({"by": "random"}, "rows with the same features"), ({"by": "user", "column": "user"}, "with one value of 'user'")],
)
def test_a_split_without_a_row_says_which_rows_stay_together(tmp_path, split, reason):
    section = section_of(tmp_path, {"user": ["a"] * 2}, "{user: {}}", split={**split, "valid": 0.01})
    with pytest.raises(JobError, match=f"leaves valid without a row, of 2 .*{reason}"):
        section.fit(tmp_path, 0)


def test_decimals_without_a_fraction_are_categories(tmp_path):
    numbers = pa.array([7, 8, 7, 8])  # as databases write ids
    users = numbers.cast(pa.decimal128(38, 0)), numbers
    one, other = (samples(section_of(tmp_path, {"user": x}, "{user: {}}"), tmp_path) for x in users)
    assert one.ids.tolist() == other.ids.tolist()


def test_times_are_numbers_in_a_table_that_is_split_at_random(tmp_path):
    columns = {"user": ["u"] * 40, "x": pa.array(range(40), pa.timestamp("us"))}
    features = "{user: {}, x: {type: number}}"
    section = section_of(tmp_path, columns, features, split={"by": "random", "valid": 0.3})
    section.look(tmp_path)
    counts = section.fit(tmp_path, 0).fitted["samples"]
    assert sum(counts.values()) == 40
    assert min(counts.values()) > 0


@pytest.mark.parametrize("split", [{"by": "random"}, {"by": "user", "column": "x"}], ids=["random", "user"])
@pytest.mark.parametrize("is_coded", [False, True])
def test_decimals_that_are_no_category_split_rows(tmp_path, split, is_coded):
    """As databases write prices: 12.50."""
    x = pa.array(range(40)).cast(pa.decimal128(21, 2))
    columns = {"user": ["u"] * 40, "x": x.dictionary_encode() if is_coded else x}
    features = "{user: {}, x: {type: number}}"
    section = section_of(tmp_path, columns, features, split={**split, "valid": 0.3}, weight="x")
    section.look(tmp_path)
    counts = section.fit(tmp_path, 0).fitted["samples"]
    assert sum(counts.values()) == 40
    assert min(counts.values()) > 0


def test_a_number_that_training_saw_one_value_of_is_not_divided_by_its_rounding_errors(tmp_path):
    columns = {"user": ["u"] * 401, "x": [1234567.1] * 401, "y": [0.7e30] * 401}
    features = "{user: {}, x: {type: number, transform: standardise}, y: {type: number, transform: standardise}}"
    section = section_of(tmp_path, columns, features).fit(tmp_path, 0)
    _, dense = section.preprocessor()({"user": ["u"] * 2, "x": [1234567.1, 1234569.1], "y": [0.7e30] * 2})
    assert dense[:, 0].tolist() == pytest.approx([0, 2], abs=1e-6)
    assert dense[:, 1].tolist() == [0, 0]


def test_a_date_that_begins_a_split_of_times_that_are_numbers_is_refused_with_a_remedy(tmp_path):
    columns = {"user": ["u"] * 4, "t": [1_767_225_600 + n * 86_400 for n in range(4)]}  # seconds
    split = {"by": "time", "column": "t", "at": ["2026-01-03"]}
    with pytest.raises(JobError, match=r"without a row.*choose data\.split\.at within the times of column 't'"):
        section_of(tmp_path, columns, "{user: {}}", split=split).fit(tmp_path, 0)
    section = section_of(tmp_path, columns, "{user: {}}", split={**split, "at": [1_767_225_600 + 3 * 86_400]})
    assert section.fit(tmp_path, 0).fitted["samples"] == {"train": 3, "test": 1}


def test_more_buckets_than_percentiles_have_as_many_samples_each(tmp_path):
    x = np.random.default_rng(0).lognormal(0, 2, 3000)
    features = "{user: {}, x: {type: number, bucketise: 300}}"
    section = section_of(tmp_path, {"user": ["u"] * 3000, "x": x}, features).fit(tmp_path, 0)
    ids, _ = section.preprocessor()({"user": ["u"] * 3000, "x": x})
    assert np.bincount(ids[:, 1])[1:].tolist() == [10] * 300


def test_a_column_that_occurs_twice_in_parquet_is_refused(tmp_path):
    section = section_of(tmp_path, {"user": ["u"] * 4}, "{user: {}}")
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"])] * 2 + [pa.array([1])], ["user", "user", "label"]), tmp_path / "a.parquet"
    )
    with pytest.raises(JobError, match=r"a\.parquet: column 'user' occurs twice"):
        section.look(tmp_path)


def test_a_category_of_uuids_is_refused_whose_bytes_are_text_by_chance(tmp_path):
    section = section_of(tmp_path, {"user": pa.array([b"0123456789abcdef"] * 4, pa.uuid())}, "{user: {}}")
    with pytest.raises(JobError, match="save the texts of the UUIDs"):
        section.look(tmp_path)


def test_a_vocabulary_of_a_table_with_the_name_of_a_number_is_read(tmp_path):
    (tmp_path / "v.txt").write_text("a\nb\n")
    columns = {"price": [1.5] * 4, "shop": ["a", "b"] * 2}
    features = "{price: {type: number}, shop: {table: price, vocabulary: v.txt}}"
    assert len(samples(section_of(tmp_path, columns, features), tmp_path).ids) == 4


def test_dates_are_categories(tmp_path):
    days = pa.array([20454, 20455] * 2, pa.int32()).cast(pa.date32())
    texts = days.cast(pa.string())
    one, other = (samples(section_of(tmp_path, {"user": x}, "{user: {}}"), tmp_path) for x in (days, texts))
    assert one.ids.tolist() == other.ids.tolist()


def test_the_names_of_folders_are_columns_as_in_the_same_table_in_one_file(tmp_path):
    columns = {
        "user": [f"u{n}" for n in range(8)],
        "day": ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"] * 2,
        "shop": ["a b", "c/d", None, "é=1"] * 2,
        "price": ["1", "2", "3", "4"] * 2,
        "label": [0, 1] * 4,
    }
    features, split = (
        "{user: {}, shop: {}, price: {type: number}}",
        {"by": "time", "column": "day", "at": ["2026-01-04"]},
    )
    section = section_of(tmp_path, columns, features, split=split)
    keys = ["day", "shop", "price"]
    pq.write_to_dataset(pq.read_table(tmp_path / "a.parquet"), tmp_path / "parts", partition_cols=keys)
    parted = section.model_copy(update={"train": ("parts/**/*.parquet",)})

    def rows(own):
        assert own.fit(tmp_path, 0).fitted["samples"] == {"train": 6, "test": 2}
        batch = samples(own, tmp_path)
        return sorted(zip(batch.ids.tolist(), batch.dense.tolist(), batch.labels.tolist(), strict=True))

    assert rows(parted) == rows(section)
    at_url = section.model_copy(update={"train": (f"{(tmp_path / 'parts').as_uri()}/**/*.parquet",)})
    assert rows(at_url) == rows(section)
    other = section_of(tmp_path, columns, "{user: {}, country: {}}").model_copy(
        update={"train": ("parts/**/*.parquet",)}
    )
    with pytest.raises(JobError, match=r"no column 'country'.* label, user, day, shop, price"):
        other.look(tmp_path)


def test_a_folder_says_why_it_has_no_format(tmp_path):
    section = section_of(tmp_path, {"user": ["a"] * 4}, "{user: {}}").model_copy(update={"train": ("parts",)})
    (tmp_path / "parts" / "day=1").mkdir(parents=True)
    with pytest.raises(JobError, match=r"parts: no file in this folder ends with .*parts/\*\*/\*\.csv say"):
        section.look(tmp_path)
    for name in ("_log/0.json", "day=1/a.Parquet"):
        (tmp_path / "parts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "parts" / name).touch()
    with pytest.raises(JobError, match=r"in folders of it do: give the pattern .*/parts/\*\*/\*\.Parquet"):
        section.look(tmp_path)
    for name in ("a.csv", "b.parquet"):
        (tmp_path / "parts" / name).touch()
    with pytest.raises(JobError, match=r"parts: its files are of several formats \(csv, parquet\): give data\.format"):
        section.look(tmp_path)


def test_a_folder_has_the_files_of_a_format_in_letters_of_either_case(tmp_path):
    (tmp_path / "parts").mkdir()
    section = section_of(tmp_path, {"user": ["u"] * 4}, "{user: {}}", train="parts")
    for name in ("a.csv", "b.CSV", "c.Csv.GZ"):
        text = b"user,label\nu,1\n"
        (tmp_path / "parts" / name).write_bytes(gzip.compress(text) if name.endswith("GZ") else text)
    at_url = section.model_copy(update={"train": ((tmp_path / "parts").as_uri(),), "format": "csv"})
    for own in (section, at_url):
        assert len(samples(own, tmp_path).ids) == 3


@pytest.mark.parametrize("empty", [b"", b"user,label\n"])
def test_parts_without_rows_are_read_beside_others(tmp_path, empty):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "part-00000.csv").write_bytes(empty)  # as Spark writes a partition without rows
    (tmp_path / "parts" / "part-00001.csv").write_bytes(b"user,label\nu,1\nv,0\n")
    (tmp_path / "parts" / "part-00002.csv").write_bytes(empty)
    section = section_of(tmp_path, {"user": ["u"] * 4}, "{user: {}}", train="parts")
    for train in ("parts", "parts/*.csv", (tmp_path / "parts").as_uri(), f"{(tmp_path / 'parts').as_uri()}/*.csv"):
        own = section.model_copy(update={"train": (train,), "format": "csv"})
        assert len(samples(own, tmp_path).ids) == 2
    (tmp_path / "parts" / "part-00001.csv").write_bytes(empty)
    with pytest.raises(JobError, match=r"part-00000\.csv: (the file is empty|no line of data in the file)"):
        samples(section, tmp_path)


def test_compressed_parts_without_a_byte_are_left_out_beside_others(tmp_path):
    (tmp_path / "parts").mkdir()
    for part, text in enumerate((b"", b"user,label\nu,1\nv,0\n", b"")):
        (tmp_path / "parts" / f"part-0000{part}.csv.gz").write_bytes(gzip.compress(text))
    section = section_of(tmp_path, {"user": ["u"] * 4}, "{user: {}}", train="parts")
    for train in ("parts", (tmp_path / "parts").as_uri()):
        own = section.model_copy(update={"train": (train,), "format": "csv"})
        assert len(samples(own, tmp_path).ids) == 2


@pytest.mark.parametrize("split", [None, {"by": "random", "valid": 0.5}])
def test_columns_of_text_are_found_by_name_in_each_file(tmp_path, split):
    (tmp_path / "a.csv").write_text("user,x,label\n" + "".join(f"u{row},{row},{row % 2}\n" for row in range(20)))
    section = section_of(tmp_path, {"user": ["u"]}, "{user: {}, x: {type: number}}", train="*.csv", split=split)
    wanted = samples(section, tmp_path, 99)
    (tmp_path / "b.csv").write_text("more,label,x,user\n" + "".join(f",{n % 2},{n},u{n}\n" for n in range(20)))
    found = samples(section, tmp_path, 99)
    assert sorted(found.ids[:, 0]) == sorted(wanted.ids[:, 0].tolist() * 2)
    assert sorted(zip(found.ids[:, 0], found.dense[:, 0], found.labels, strict=True))[::2] == sorted(
        zip(wanted.ids[:, 0], wanted.dense[:, 0], wanted.labels, strict=True)
    )
    (tmp_path / "b.csv").write_text("more,label,x,user\n1,1,1,u\n1,1,?,u\n")
    with pytest.raises(JobError, match=r"b\.csv:3: column 'x': '\?' is not a finite number"):
        section.look(tmp_path)
    (tmp_path / "b.csv").write_text("label,user\n1,u\n")
    with pytest.raises(JobError, match=r"b\.csv:1: no column 'x', which feature 'x' reads"):
        section.look(tmp_path)


@pytest.mark.parametrize("is_url", [False, True])
def test_files_of_a_pattern_stand_in_the_order_of_their_names_whatever_their_folders(tmp_path, is_url):
    names = ["run-2/x.csv", "run.old/x.csv", "run/x.csv"]
    for name in names:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("user,label\n")
    start = tmp_path.as_uri() if is_url else str(tmp_path)
    assert [str(path) for path in expand(f"{start}/*/x.csv", (".csv",))] == [f"{start}/{name}" for name in names]


def test_a_folder_of_a_pattern_may_have_brackets_in_its_name(tmp_path):
    folder = tmp_path / "dims=[1]"
    folder.mkdir()
    (folder / "a.csv").write_text("user,label\n")
    assert expand(folder / "*.csv", (".csv",)) == [folder / "a.csv"]


def test_arrays_nested_too_deep_and_packed_files_of_other_kinds_are_named(tmp_path):
    deep = '{"user": "u", "label": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    section = section_of(tmp_path, {"user": ["u"]}, "{user: {}}", "jsonl")
    (tmp_path / "a.jsonl").write_text(deep)
    with pytest.raises(JobError, match=r"a.jsonl:1: no JSON: maximum recursion depth"):
        section.look(tmp_path)
    for pack, name in ((bz2.compress, "bzip2"), (lzma.compress, "xz")):
        (tmp_path / "a.jsonl").write_bytes(pack(b'{"user": "u", "label": 1}\n'))
        with pytest.raises(JobError, match=f"a.jsonl: it is packed by {name}, which is not read"):
            section.look(tmp_path)


def test_a_line_may_be_longer_than_a_read_and_not_than_the_longest_line(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_bytes(b"x" * (1 << 20))
    (block,) = read_blocks(path, 1 << 10)
    assert block.text == b"x" * (1 << 20)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 19)
    with pytest.raises(JobError, match="no line ends within 525312 bytes"):
        next(read_blocks(path, 1 << 10))


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz"])
def test_the_names_of_many_files_are_not_compared_with_each_other(tmp_path, monkeypatch, ending):
    section = section_of(tmp_path, {"user": ["a", "b"]}, "{user: {}}", ending.removesuffix(".gz"), train=f"*.{ending}")
    if ending == "jsonl.gz":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in "bcdefgh":
        shutil.copy(tmp_path / f"a.{ending}", tmp_path / f"{name}.{ending}")
    compared = []
    monkeypatch.setattr(PosixPath, "__eq__", lambda one, other: compared.append(1) or str(one) == str(other))
    section.look(tmp_path)
    dataset = section.open(tmp_path, 0)
    assert sum(len(batch.ids) for batch in dataset.evaluate("train", 0, 1, 9)) == 16
    assert len(compared) < 8 * 7 / 2


def test_the_footer_of_a_file_is_not_parsed_for_each_row_group(tmp_path, monkeypatch):
    section = section_of(tmp_path, {"user": [f"u{n}" for n in range(40)]}, "{user: {}}")
    rows = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    dataset, parsed, file = section.open(tmp_path, 0), [], pq.ParquetFile

    def spy(*given, metadata=None, **options):
        parsed.extend([1] if metadata is None else [])
        return file(*given, metadata=metadata, **options)

    monkeypatch.setattr(pq, "ParquetFile", spy)
    assert sum(len(batch.ids) for batch in dataset.train(0, 0, 1, 9)) == 40
    assert len(parsed) == 1


def test_a_file_of_a_pattern_to_train_on_is_none_to_evaluate_on(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("user,label\nu,1\n")
    section = section_of(tmp_path, {"user": ["u"] * 4}, "{user: {}}", train="*.csv", valid="b.csv")
    (tmp_path / "d").mkdir()
    (tmp_path / "c").symlink_to("b.csv")
    for name in ("b.csv", "d/../b.csv", "c"):
        with pytest.raises(JobError, match=r"data.valid: .*b\.csv is a file of train, too"):
            section.model_copy(update={"valid": (name,), "format": "csv"}).look(tmp_path)
    section.model_copy(update={"train": ("a.csv",)}).look(tmp_path)
    section.model_copy(update={"train": ("b.csv",)}).look(tmp_path)  # as in a first try with one file


SPLIT = {"by": "time", "column": "t", "at": ["March"]}
ODD = {  # name: (the second row's value of x, the feature, settings, where, what is said)
    "a text that is nearly a number": ("1_000", "{type: number}", {}, "a.parquet: row 2", "'1_000' is not a number"),
    "a time of a split": ("a", "{}", {"split": {**SPLIT, "column": "t"}}, "data.split.at", "'March' is no time"),
    "brackets": ("[a, b]", "{}", {}, "a.parquet: row 1", r"'\[a, b\]'.*write them as a\|b and declare"),
    "brackets and a separator": (
        "[a, b]",
        '{type: list, separator: ","}',
        {},
        "a.parquet: row 1",
        r"'\[a, b\]', which a separator leaves.*write them",
    ),
    "a large id": (str(2**63), "{ids: exact}", {}, "a.parquet: row 2", rf"id {2**63} is not in 0 to below 2\*\*62"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_values_are_named(tmp_path, case):
    value, feature, settings, where, reason = ODD[case]
    columns = {"user": ["u"] * 4, "x": ["1", value, "1", "1"], "t": pa.array(range(4))}
    with pytest.raises(JobError) as found:
        section_of(tmp_path, columns, f"{{user: {{}}, x: {feature}}}", **settings).look(tmp_path)
    assert found.value.fields["where"].endswith(where)
    assert re.search(reason, found.value.fields["reason"])


@pytest.mark.parametrize(("first", "second"), [(1, 2**70), ("a", "\ud800"), (1, {"id": 2})])
def test_a_value_that_arrow_cannot_hold_is_named(tmp_path, first, second):
    section = section_of(tmp_path, {"user": [1] * 4}, "{user: {}}", "jsonl")
    rows = [{"label": 1, "user": first}] * 400 + [{"label": 1, "user": second}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(JobError) as found:
        section.look(tmp_path)
    assert found.value.fields["where"] == f"{tmp_path}/a.jsonl:401"
    assert "'user'" in found.value.fields["reason"]
    (tmp_path / "a.jsonl").write_text('{"label": 1, "user": {"id": 7}}\n')
    with pytest.raises(JobError, match=r"a\.jsonl:1: column 'user': {'id': 7} is an object"):
        section.look(tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_true_and_false_are_no_times_to_split_rows_by(tmp_path, ending):
    split = {"by": "time", "column": "seen", "valid": 0.5}
    section = section_of(tmp_path, {"user": ["u", "v"], "seen": [True, False]}, "{user: {}}", ending, split=split)
    with pytest.raises(JobError, match="column 'seen': is true or false, and no time"):
        section.look(tmp_path)


@pytest.mark.parametrize("text", ["\n \n\n", "\ufeff\n"])
def test_lines_of_json_that_are_all_blank_are_no_data(tmp_path, text):
    (tmp_path / "b.jsonl").write_text(text)
    section = section_of(tmp_path, {"user": ["u"]}, "{user: {}}", "jsonl", valid="b.jsonl")
    with pytest.raises(JobError, match=r"b\.jsonl: no line of data in the file"):
        section.look(tmp_path)


def test_a_fraction_behind_the_first_lines_is_named_in_a_column_of_integers(tmp_path):
    section = section_of(tmp_path, {"user": [1] * 4000}, "{user: {}}", "jsonl")  # more lines than are looked at first
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"label": 1, "user": 1.5}\n')
    with pytest.raises(JobError, match=r"a\.jsonl:4001: column 'user': 1\.5 is no int64"):
        list(section.open(tmp_path, 0).evaluate("train", 0, 1, 4096))


def test_columns_that_the_first_lines_of_json_lack_have_the_type_of_later_ones(tmp_path):
    (tmp_path / "b.jsonl").touch()
    section = section_of(
        tmp_path, {"user": [1] * 4}, "{user: {}, shop: {}, tags: {type: list}}", "jsonl", valid="b.jsonl"
    )
    rows = [{"label": 1, "user": n, "tags": [], "pad": "x" * 99} for n in range(1000)]
    rows.append({"label": 0, "user": 7, "shop": 8, "tags": [9]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[-1]) + "\n")
    section.look(tmp_path)
    dataset = section.open(tmp_path, 0)
    (last,) = dataset.evaluate("valid", 0, 1, 9)
    assert [*dataset.evaluate("train", 0, 1, 2000)][-1].ids[-1].tolist() == last.ids[0].tolist()
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[0]) + "\n")  # it would be missing in all its rows
    with pytest.raises(JobError, match=r"b\.jsonl:1: no column 'shop'.*write it as null"):
        section.look(tmp_path)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (pa.array([{"shop": 1, "town": "x"}] * 4), r"its fields \(shop, town\) as columns"),
        (pa.array([[("k", 1.0)]] * 4, pa.map_(pa.string(), pa.float64())), "keys, and its values, as a list each"),
        (pa.array([[[1, 2], [3]]] * 4), "as one list"),
        (pa.array([b"\x00\xff"] * 4), "as a text"),
        (pa.array([b"\xff1"] * 4, pa.binary(2)), "as a text"),
    ],
    ids=["struct", "map", "lists in lists", "bytes", "bytes of one length"],
)
@pytest.mark.parametrize("kind", ["category", "list"])
def test_a_type_that_is_no_category_is_refused_with_what_to_write(tmp_path, values, remedy, kind):
    if kind == "list" and not pa.types.is_list(values.type):
        values = pa.array([[value] for value in values.to_pylist()], pa.list_(values.type))
    elif kind == "category" and pa.types.is_list(values.type):
        remedy = "declare it"
    section = section_of(tmp_path, {"odd": values}, f"{{odd: {{type: {kind}}}}}")
    with pytest.raises(JobError, match=remedy):
        samples(section, tmp_path)


@pytest.mark.parametrize("split", [None, {"by": "random", "valid": 0.5}])
def test_views_of_texts_are_texts(tmp_path, split):
    views, rows = pa.string_view(), 40
    texts, numbers = [f"u{row % 7}" for row in range(rows)], [f" {row}.5" if row % 3 else "" for row in range(rows)]
    columns = {"user": texts, "price": numbers, "tags": [[text] * (row % 3) for row, text in enumerate(texts)]}
    features = "{user: {}, price: {type: number}, tags: {type: list}}"
    found = []
    for kind in (pa.string(), views):
        typed = {name: pa.array(own, kind) for name, own in columns.items() if name != "tags"}
        typed["tags"] = pa.array(columns["tags"], pa.list_(kind))
        section = section_of(tmp_path, typed, features, **({} if split is None else {"split": split}))
        batches = list(section.open(tmp_path, 0).evaluate("train", 0, 1, 64))
        found.append([(batch.ids.tolist(), batch.dense.tolist()) for batch in batches])
    assert found[0] == found[1]
    served = FeatureInputs(inputs_of(load_job(tmp_path / "job.yaml"), None))
    assert served(pa.table(typed))[1].tolist() == served(columns)[1].tolist()


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_texts_of_parquet_that_are_encoded_as_differences_are_read(tmp_path, encoding):
    columns = {"user": ["u1", "u2", "u2", None], "tags": [["a"], ["b", "a"], [], None]}
    section = section_of(tmp_path, columns, "{user: {}, tags: {type: list, max_length: 2}}")
    wanted = samples(section, tmp_path).ids
    rows, paths = pq.read_table(tmp_path / "a.parquet"), ("user", "tags.list.element")
    of_texts = dict.fromkeys(paths, encoding)
    pq.write_table(rows, tmp_path / "a.parquet", use_dictionary=False, column_encoding=of_texts)
    assert samples(section, tmp_path).ids.tolist() == wanted.tolist()


def test_a_row_group_with_fewer_rows_than_its_footer_said_is_refused(tmp_path):
    dataset = section_of(tmp_path, {"user": list(range(40))}, "{user: {}}").open(tmp_path, 0)
    pq.write_table(pa.table({"label": [0, 1], "user": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(JobError, match=r"row group 0: cannot be read \(it has 2 rows, and by its footer 40\)"):
        list(dataset.evaluate("train", 0, 1, 64))


def test_a_text_that_begins_with_a_byte_order_mark_is_the_same_value_in_each_block(tmp_path):
    (tmp_path / "a.csv").write_text("user,label\n" + "".join(f"\ufeffu{row},{row % 2}\n" for row in range(40)))
    (tmp_path / "job.yaml").write_text(
        f"data: {{reader: tabular, train: a.csv}}\nfeatures: {{user: {{}}}}\nmodel: {{name: fm}}\n{REST}"
    )
    dataset = load_job(tmp_path / "job.yaml").data.open(tmp_path, 0)
    expected = hash_ids("user", [f"\ufeffu{row}" for row in range(40)])
    for workers in (1, 3):
        found = [batch.ids[:, 0] for rank in range(workers) for batch in dataset.evaluate("train", rank, workers, 64)]
        assert sorted(np.concatenate(found)) == sorted(expected)


def test_the_items_of_negatives_are_sorted_once_for_each_doubling(tmp_path, monkeypatch):
    rows, sorted_rows = 6000, []
    columns = {"user": list(range(rows)), "item": [row // 2 for row in range(rows)]}
    data = {"label": [], "negatives": {"count": 1, "features": ["item"]}}
    section = section_of(tmp_path, columns, "{user: {}, item: {}}", **data)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=10)
    unique = np.unique
    monkeypatch.setattr(np, "unique", lambda a, **kwargs: sorted_rows.append(len(a)) or unique(a, **kwargs))
    section.open(tmp_path, 0)
    assert sum(sorted_rows) < 4 * rows


def test_a_decimal_is_the_number_of_a_request(tmp_path):
    texts = [f"{cents / 100:.2f}" for cents in range(25, 60, 5)] * 40
    decimals = pa.array(texts).cast(pa.decimal128(9, 2))
    features = "{price: {type: number, bucketise: 10}, cost: {type: number, column: price}}"
    section = section_of(tmp_path, {"price": decimals}, features).fit(tmp_path, 0)
    (batch,) = section.open(tmp_path, 0).evaluate("train", 0, 1, 400)
    served = FeatureInputs({"kind": "features", **section.preprocessor().to_dict(), "ignored": []})
    ids, dense = served({"price": [float(text) for text in texts]})
    assert ids.tolist() == batch.ids.tolist()
    assert dense.tolist() == batch.dense.tolist()


def test_a_long_text_in_all_rows_is_hashed_once_and_refused_where_each_row_would_have_a_copy(tmp_path):
    rows, text = 1024, "a" * (3 << 20)
    coded = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [text])
    columns = {"user": coded, "other": coded}
    section = section_of(tmp_path, columns, "{user: {}}")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    section.look(tmp_path)
    ids = next(section.open(tmp_path, 0).evaluate("train", 0, 1, rows)).ids
    assert (ids == hash_ids("user", [text])[0]).all()
    for feature in ("{type: cross, of: [user, other]}", "{type: list, separator: '|'}", "{type: number, bucketise: 2}"):
        section = section_of(tmp_path, columns, f"{{user: {feature}}}")
        with pytest.raises(JobError, match=r"row 1: column .user.: a text of 3,145,728 bytes, and 1,024 rows"):
            section.look(tmp_path)


def test_fewer_rows_are_read_at_once_where_they_are_long(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "READ_BYTES", 50_000)
    users = [f"{row}" + "u" * 1000 for row in range(400)]
    source = section_of(tmp_path, {"user": users}, "{user: {}}").tabular(tmp_path).open()._sources["train"]
    blocks = list(source.blocks(0, 1, None))
    assert max(map(len, blocks)) < 60
    assert np.concatenate([block.ids[:, 0] for block in blocks]).tolist() == hash_ids("user", users).tolist()


@pytest.mark.parametrize("other", [[1767225600, 1767312000], ["1767225600", "1767312000"]], ids=["numbers", "texts"])
def test_dates_and_numbers_of_several_files_have_no_order_to_split_rows_by(tmp_path, other):
    split = {"by": "time", "column": "time", "valid": 0.5}
    dates = [f"2026-01-0{day} 12:00:00" for day in (1, 2)]
    section = section_of(tmp_path, {"user": ["u"] * 2, "time": dates}, "{user: {}}", split=split, train="*.parquet")
    times = pa.array(dates).cast(pa.timestamp("s"))
    pq.write_table(pa.table({"label": [0, 1], "user": ["u"] * 2, "time": times}), tmp_path / "b.parquet")
    assert section.fit(tmp_path, 0).fitted["samples"] == {"train": 2, "valid": 2}
    pq.write_table(pa.table({"label": [0, 1], "user": ["u"] * 2, "time": other}), tmp_path / "c.parquet")
    for read in (section.look, lambda folder: section.fit(folder, 0)):
        with pytest.raises(
            JobError, match=r"c.parquet: row 1: column 'time': has numbers, and dates in the rows before"
        ):
            read(tmp_path)


@pytest.mark.parametrize("values", [pa.nulls(4), [""] * 4], ids=["null", "empty"])
def test_a_vocabulary_of_a_column_without_values_is_refused_for_that(tmp_path, values):
    (tmp_path / "v.txt").write_text("a\nb\n")
    section = section_of(tmp_path, {"user": ["u"] * 4, "item": values}, "{user: {}, item: {vocabulary: v.txt}}")
    with pytest.raises(JobError, match=r"a.parquet: no row has a value of table 'item', of which .*v.txt has a list"):
        section.fit(tmp_path, 0)


BROKEN = {  # bytes of a file -> others, and what is said: Arrow says nothing of the first
    "index": (b"\x02\x03\x24\x49", b"\x02\x03\xff\x49", "a dictionary of 3 values has an index from 0 to 3"),
    "name": (b"user", b"us\xfer", "not a whole Parquet file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_bytes_of_parquet_are_named(tmp_path, case):
    whole, broken, said = BROKEN[case]
    section = section_of(tmp_path, {"user": list("abcabcab")}, "{user: {}}")
    pq.write_table(pq.read_table(tmp_path / "a.parquet"), tmp_path / "a.parquet", compression="none")
    section.look(tmp_path)
    data = (tmp_path / "a.parquet").read_bytes()
    assert whole in data
    (tmp_path / "a.parquet").write_bytes(data.replace(whole, broken))
    with pytest.raises(JobError, match=rf"a\.parquet.*{said}"):
        section.look(tmp_path)
