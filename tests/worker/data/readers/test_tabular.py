"""Tables of any columns: the samples of each format, splits and fits, and what is said of bad input."""

import gzip
import json
import re
import struct

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import embershard as es
from embershard.proto.errors import JobError
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.checkpoint import Checkpoint, CheckpointManifest, with_preprocessing
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.preprocess import FeatureSpec, Fitting, Preprocessor
from embershard.worker.data.values import BadFeature, BadValue
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.training.trainer import Trainer

ROWS = 600
REST = "embedding: {optimizer: {name: sgd, lr: 0.1}}\ntrain: {epochs: 1, batch_size: 32}\n"
OWN = "{class: own:Model}"  # which may read sequences
FEATURES = """
  user: {}
  item: {dim: 4}
  history: {type: sequence, table: item, max_length: 3, too_long: truncate, separator: "|"}
  tags: {type: list, separator: "|", weight_separator: ":", max_length: 4}
  age: {type: number, transform: [log, standardise]}
  old: {type: number, column: age, bucketise: [30, 50]}
  user_item: {type: cross, of: [user, item], buckets: 50}
"""


def job_of(folder, features, *, model="{name: fm}", **data):
    """The job of a table with these features, as a job file gives it."""
    data = {"train": "train.csv", **data}
    text = f"model: {model}\ndata: {json.dumps({'reader': 'tabular', **data})}\nfeatures:{features}\n{REST}"
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml")


def table(rows=ROWS):
    draw = np.random.default_rng(0)
    lists = [[f"i{i}" for i in draw.integers(0, 20, n)] for n in draw.integers(0, 6, rows)]
    return pa.table(
        {
            "user": draw.integers(0, 40, rows),
            "item": [f"i{i}" for i in draw.integers(0, 20, rows)],
            "history": lists,
            "tags": ["|".join(f"t{t}:0.5" for t in draw.integers(0, 5, n)) for n in draw.integers(0, 4, rows)],
            "age": [None if a < 20 else float(a) for a in draw.integers(18, 80, rows)],
            "time": pa.array(np.arange(rows)[::-1] * 1_000_000).cast(pa.timestamp("us")),
            "label": draw.integers(0, 2, rows),
            "weight": draw.random(rows).round(3),
        }
    )


def write(folder, name):
    rows = table()
    if name.endswith(".parquet"):
        pq.write_table(rows, folder / name, row_group_size=100)
        return
    texts = rows.set_column(2, "history", [["|".join(h) for h in rows["history"].to_pylist()]])
    sink = pa.BufferOutputStream()
    if ".jsonl" in name:
        sink.write("".join(json.dumps(row, default=str) + "\n" for row in rows.to_pylist()).encode())
    else:
        pa_csv.write_csv(texts, sink, pa_csv.WriteOptions(delimiter="\t" if ".tsv" in name else ","))
    data = sink.getvalue().to_pybytes()
    packed = {".gz": gzip.compress, ".zst": pzstd if name.startswith("pzstd") else zstd}
    (folder / name).write_bytes(packed.get("." + name.rpartition(".")[2], bytes)(data))


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


def pzstd(data):
    """Frames of parts, the length of each in a frame before it, as pzstd writes them."""
    frames = [zstd(data[at : at + 10_000]) for at in range(0, len(data), 10_000)]
    return b"".join(struct.pack("<III", 0x184D2A50, 4, len(frame)) + frame for frame in frames)


def rows_of(dataset, split="train"):
    """Ids and dense features of a split as one array, in an order of their own."""
    batches = list(dataset.evaluate(split, 0, 1, 256))
    return np.unique(np.concatenate([np.concatenate([b.ids, b.dense], 1) for b in batches]), axis=0)


def test_each_format_gives_the_same_samples(tmp_path):
    found = []
    for name in ("a.parquet", "a.csv", "a.tsv.gz", "a.jsonl", "a.jsonl.zst", "a.csv.zst", "pzstd.csv.zst"):
        write(tmp_path, name)
        job = job_of(tmp_path, FEATURES, model=OWN, train=name, valid=(tmp_path / name).as_uri(), weight="weight")
        job.data.look(tmp_path)
        dataset = job.data.fit(tmp_path, 0).open(tmp_path, 0)
        found += [rows_of(dataset, split) for split in ("train", "valid")]
        assert sum(len(b.weights) for b in dataset.train(0, 0, 1, 64)) == ROWS
        assert dataset.num_samples("train") == ROWS
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    # user, item, 3 of the history, 4 tags, old, user_item; age, and 4 weights of tags
    assert found[0].shape[1] == 1 + 1 + 3 + 4 + 1 + 1 + 1 + 4


def test_a_number_that_stands_for_a_missing_one_does_so_in_files_and_requests(tmp_path):
    rows = 'user,age,price,label\nu,-999,NA,0\nu,20,"-1,5",1\nu,40,"2,5",0\n'
    (tmp_path / "train.csv").write_text(rows)
    features = """
  user: {}
  age: {type: number, transform: standardise, missing: 7}
  price: {type: number, bucketise: [0]}
  age_text: {column: age}
"""
    section = job_of(tmp_path, features, decimal=",", missing=["", "NA", "-999", "-1,5"]).data.fit(tmp_path, 0)
    batch = next(section.open(tmp_path, 0).evaluate("train", 0, 1, 3))
    assert batch.dense.tolist() == [[7], [-1], [1]]
    assert batch.ids[:, 1].tolist() == [0, 0, 2]
    served = Preprocessor.from_dict(json.loads(json.dumps(section.preprocessor().to_dict())))
    for columns in (
        {"user": ["u"] * 3, "age": [-999, 20, 40], "price": [None, -1.5, 2.5]},
        {"user": ["u"] * 3, "age": ["-999", "20", "40"], "price": ["NA", "-1.5", "2.5"]},
    ):
        ids, dense = served(columns)
        assert (ids.tolist(), dense.tolist()) == (batch.ids.tolist(), batch.dense.tolist())


def test_integer_ids_of_a_list_may_have_weights(tmp_path):
    (tmp_path / "train.csv").write_text("label,tags\n1,3:0.5|7\n0,\n")
    own = "{type: list, separator: '|', weight_separator: ':', max_length: 2, ids: exact, num_ids: 9}"
    section = job_of(tmp_path, f" {{tags: {own}}}").data.fit(tmp_path, 0)
    batch = next(section.open(tmp_path, 0).evaluate("train", 0, 1, 2))
    assert (batch.ids.tolist(), batch.dense.tolist()) == ([[3, 7], [-1, -1]], [[0.5, 1.0], [0.0, 0.0]])
    with pytest.raises(BadValue, match="id 9 is not in 0 to below num_ids 9"):
        section.preprocessor()({"tags": ["9:2"]})


def test_a_weight_that_is_missing_is_0(tmp_path):
    (tmp_path / "train.csv").write_text("label,tags\n1,a:0.5|b:\n0,c:nan|d\n")
    own = "{type: list, separator: '|', weight_separator: ':', max_length: 2}"
    batch = next(job_of(tmp_path, f" {{tags: {own}}}").data.open(tmp_path, 0).evaluate("train", 0, 1, 2))
    assert batch.dense.tolist() == [[0.5, 0.0], [0.0, 1.0]]


def test_samples_are_those_of_loops_over_rows(tmp_path):
    write(tmp_path, "a.parquet")
    section = job_of(tmp_path, FEATURES, model=OWN, train="a.parquet").data.fit(tmp_path, 0)
    rows = table().to_pylist()
    ids, dense = section.preprocessor()({name: table()[name] for name in ("user", "item", "history", "tags", "age")})
    logs = [np.log1p(row["age"]) for row in rows if row["age"] is not None]
    for row, own, numbers in zip(rows[:99], ids, dense, strict=False):
        one = lambda feature, value: es.hash_ids(feature, [value])[0]  # noqa: E731
        history = [one("item", item) for item in row["history"][-3:]]
        tags = [tag.split(":") for tag in row["tags"].split("|") if tag]
        bucket = 0 if row["age"] is None else 1 + (row["age"] >= 30) + (row["age"] >= 50)
        cross = one("user_item", f"{row['user']}\x1f{row['item']}") % 50
        want = [one("user", row["user"]), one("item", row["item"]), *history, *[es.PADDING] * (3 - len(history))]
        want += [*(one("tags", tag) for tag, _ in tags), *[es.PADDING] * (4 - len(tags)), bucket, cross]
        assert own.tolist() == want
        age = 0.0 if row["age"] is None else (np.log1p(row["age"]) - np.mean(logs)) / np.std(logs)
        np.testing.assert_allclose(numbers, [age, *[0.5] * len(tags), *[0.0] * (4 - len(tags))], rtol=1e-5)


def test_a_preprocessor_is_the_same_after_a_way_through_json(tmp_path):
    write(tmp_path, "a.parquet")
    features = FEATURES + "  age_q: {type: number, column: age, transform: quantile}\n"
    features += "  age_b: {type: number, column: age, bucketise: 4}\n  rare: {column: item, min_count: 30}\n"
    first = job_of(tmp_path, features, model=OWN, train="a.parquet").data.fit(tmp_path, 0).preprocessor()
    other = Preprocessor.from_dict(json.loads(json.dumps(first.to_dict())))
    columns = {name: table()[name] for name in first.columns}
    for one, two in zip(first(columns), other({k: v.to_pylist() for k, v in columns.items()}), strict=True):
        np.testing.assert_array_equal(one, two)
    assert first.schema == other.schema
    counts = np.unique(table()["item"], return_counts=True)[1]
    assert first.schema.id_limits["rare"] == (counts >= 30).sum() + 1
    unknown = first({**{k: v[:1] for k, v in columns.items()}, "item": ["never seen"]})[0]
    assert unknown[0, -1] == (counts >= 30).sum()
    quantiles = first(columns)[1][:, 1]
    assert quantiles.min() == 0
    assert quantiles.max() == 1


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ({"by": "random", "valid": 0.2, "test": 0.3}, {"train": 0.5, "valid": 0.2, "test": 0.3}),
        ({"by": "user", "column": "user", "test": 0.3}, {"train": 0.7, "test": 0.3}),
        ({"by": "time", "column": "time", "valid": 0.1, "test": 0.1}, {"train": 0.8, "valid": 0.1, "test": 0.1}),
        ({"by": "time", "column": "time", "at": ["1970-01-01 00:09:00"]}, {"train": 0.9, "test": 0.1}),
    ],
)
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_rows_of_one_table_are_split(tmp_path, name, split, parts):
    write(tmp_path, name)
    features = " {user: {}, at: {type: number, column: row}}"
    rows = table().append_column("row", pa.array(np.arange(ROWS))).select(["user", "row", "time", "label"])
    if name == "a.parquet":
        pq.write_table(rows, tmp_path / name)  # one row group, for two workers
    else:
        pa_csv.write_csv(rows, tmp_path / name)
    section = job_of(tmp_path, features, train=name, split=split).data.fit(tmp_path, 0)
    dataset = section.open(tmp_path, 0)
    assert ("train", *dataset.splits) == ("train", *section.judged_on) == tuple(parts)
    found = {part: np.concatenate([b.dense[:, 0] for b in dataset.evaluate(part, 0, 1, 64)]) for part in parts}
    assert sorted(np.concatenate(list(found.values()))) == list(range(ROWS))  # each row once
    exact = split["by"] == "time"
    for part, share in parts.items():
        assert len(found[part]) == dataset.num_samples(part)
        assert len(found[part]) / ROWS == pytest.approx(share, abs=0.002 if exact else 0.15)
    times = {part: -rows for part, rows in found.items()}  # the later a row is, the smaller its number
    assert not exact or max(times["train"]) < min(times["test"])
    users = {part: set(table()["user"].take(pa.array(rows.astype(int))).to_pylist()) for part, rows in found.items()}
    assert split["by"] != "user" or not users["train"] & users["test"]
    shares = [np.concatenate([b.dense for b in dataset.train(0, rank, 2, 64)]) for rank in (0, 1)]
    assert sorted(np.concatenate(shares)[:, 0]) == sorted(found["train"])


def test_counts_of_many_values_are_not_sorted_anew_for_each_block(monkeypatch):
    fitting, sorted_at_once, unique = Fitting(Preprocessor({"user": FeatureSpec(min_count=2)})), [], np.unique

    def spy(values, **options):
        sorted_at_once.append(len(values))
        return unique(values, **options)

    monkeypatch.setattr(np, "unique", spy)
    for block in range(64):
        fitting.observe({"user": pa.array(np.arange(99 * block, 99 * block + 100))})  # the last one comes again
    fitted = fitting.fitted()["vocabularies"]["user"]
    assert set(fitted) == set(es.hash_ids("user", np.arange(99, 99 * 64, 99)).tolist())
    assert sum(sorted_at_once) < 6 * 6400


def test_a_column_that_two_features_of_a_table_read_counts_once_for_min_count(tmp_path):
    (tmp_path / "train.csv").write_text("item,history,label\na,b|c,0\nb,b|c,1\n")
    history = "column: history, table: item, separator: '|'"
    features = f" {{item: {{min_count: 3}}, h: {{type: sequence, {history}}}, mean: {{type: list, {history}}}}}"
    fitted = job_of(tmp_path, features, model=OWN).data.fit(tmp_path, 0).fitted
    assert fitted["vocabularies"] == {"item": es.hash_ids("item", ["b"]).tolist()}  # c occurs twice


def test_a_checkpoint_gives_what_was_learnt_whatever_became_of_the_files(tmp_path):
    (tmp_path / "train.csv").write_text("user,age,label\na,1,0\na,3,1\nb,5,0\n")
    features = " {user: {min_count: 2}, age: {type: number, transform: standardise}}"
    job = with_preprocessing(job_of(tmp_path, features), tmp_path)
    assert job.data.fitted["numbers"]["age"]["mean"] == 3
    assert job.data.fitted["vocabularies"] == {"user": es.hash_ids("user", ["a"]).tolist()}
    manifest = CheckpointManifest(
        job=job.model_dump(mode="json"), step=1, world_size=1, files={}, snapshot=False, time=0
    )
    (tmp_path / "train.csv").write_text("user,age,label\nb,100,1\n")
    checkpoint = Checkpoint(Storage(str(tmp_path)), manifest)
    resumed = with_preprocessing(job_of(tmp_path, features), tmp_path, checkpoint)
    checkpoint.check_job(resumed)
    assert resumed.data.fitted == job.data.fitted
    batch = next(resumed.data.open(tmp_path, 0).evaluate("train", 0, 1, 8))
    assert batch.ids.tolist() == [[1]]
    assert batch.dense[0, 0] == pytest.approx((100 - 3) / np.std([1, 3, 5]))
    stored = tmp_path / "preprocessing.json"
    stored.write_text(json.dumps(job.data.preprocessor().to_dict()))
    given = load_job(tmp_path / "job.yaml", [f"data.fitted={json.dumps(str(stored))}"])
    assert given.data.fitted == job.data.fitted


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_each_interaction_is_followed_by_samples_of_other_items(tmp_path, by):
    prices = {f"i{i}": float(i) for i in range(10)}
    items = ["i0"] * 400 + list(prices) * 10  # i0 is 82 % of all
    lines = [f"u{n},{item},{prices[item]}" for n, item in enumerate(items)]
    (tmp_path / "train.csv").write_text("\n".join(["user,item,price", *lines]))
    section = job_of(
        tmp_path,
        " {user: {}, item: {}, price: {type: number}}",
        label=[],
        valid="train.csv",
        negatives={"count": 4, "by": by, "features": ["item", "price"]},
    ).data
    dataset = section.open(tmp_path, 0)
    batches = [list(dataset.train(epoch, 0, 1, 2500)) for epoch in (0, 1)] + [
        list(dataset.evaluate("valid", 0, 1, 2500))
    ]
    ids = {int(i): price for i, price in zip(es.hash_ids("item", list(prices)), prices.values(), strict=True)}
    for (batch,) in batches:
        assert len(batch) == 5 * len(items)
        drawn = batch.labels == 0
        assert int(drawn.sum()) == 4 * len(items)
        assert batch.dense[:, 0].tolist() == [ids[int(i)] for i in batch.ids[:, 1]]  # an item comes with its price
        users = np.unique(batch.ids[:, 0], return_counts=True)[1]
        assert (users == 5).all()
        share = float((batch.dense[drawn, 0] == 0).float().mean())
        assert share == pytest.approx(0.1 if by == "uniform" else 0.82, abs=0.03)
    first, second = (sorted(zip(*b[0].ids.T.tolist(), strict=True)) for b in batches[:2])
    assert first != second


@pytest.mark.parametrize("name", ["train.csv", "train.parquet"])
def test_any_number_of_workers_evaluates_the_same_samples_of_other_items(tmp_path, name):
    write(tmp_path, name)
    negatives = {"count": 3, "by": "popularity", "features": ["item"]}
    section = job_of(tmp_path, " {user: {}, item: {}}", train=name, valid=name, label=[], negatives=negatives).data
    dataset = section.open(tmp_path, 0)

    def samples(workers, batch_size):
        batches = [b for rank in range(workers) for b in dataset.evaluate("valid", rank, workers, batch_size)]
        return sorted(tuple(row) for b in batches for row in np.column_stack([b.ids, b.labels]).tolist())

    found = samples(1, 64)
    assert len(found) == 4 * ROWS
    assert samples(2, 64) == samples(3, 50) == found


def test_several_labels_may_be_missing_one_by_one(tmp_path):
    (tmp_path / "train.csv").write_text("user,a,b\nx,1,\ny,,0\n")
    dataset = job_of(tmp_path, " {user: {}}", label=["a", "b"], model="{name: mmoe}").data.open(tmp_path, 0)
    labels = next(dataset.evaluate("train", 0, 1, 8)).labels
    np.testing.assert_array_equal(labels, [[1, np.nan], [np.nan, 0]])
    assert dataset.schema.labels == ("a", "b")


def test_a_vocabulary_gives_each_line_an_id_and_all_other_values_one(tmp_path):
    (tmp_path / "items.txt").write_text("b\na\n")
    (tmp_path / "train.csv").write_text("item,label\na,1\nb,0\nz,0\n,0\n")
    section = job_of(tmp_path, " {item: {vocabulary: items.txt}}").data.fit(tmp_path, 0)
    batch = next(section.open(tmp_path, 0).evaluate("train", 0, 1, 8))
    assert batch.ids[:, 0].tolist() == [1, 0, 2, 2]
    assert section.preprocessor().schema.id_limits == {"item": 3}


@pytest.mark.parametrize("feature", ["{vocabulary: v.txt}", "{type: list, separator: '|', vocabulary: v.txt}"])
def test_a_vocabulary_that_has_no_value_of_the_training_rows_is_refused(tmp_path, feature):
    (tmp_path / "train.csv").write_text("item,label\na|b,1\nc,0\n")
    for text, is_known in (("x\nc\n", True), ("item,count\na,7\nc,1\n", False)):
        (tmp_path / "v.txt").write_text(text)
        section = job_of(tmp_path, f" {{item: {feature}}}").data
        if is_known:
            assert section.fit(tmp_path, 0).fitted["vocabularies"]["item"] == es.hash_ids("item", ["x", "c"]).tolist()
            continue
        with pytest.raises(JobError, match=r"v\.txt: has none of the values that table 'item' gets in .*train\.csv"):
            section.fit(tmp_path, 0)


def test_a_table_in_cp1252_with_a_decimal_comma(tmp_path):
    (tmp_path / "train.csv").write_bytes("stadt;preis;label\r\nKöln;3,5;1\r\n€;1,5;0\r\n".encode("cp1252"))
    features = " {stadt: {}, preis: {type: number}}"
    dataset = job_of(tmp_path, features, delimiter=";", encoding="cp1252", decimal=",").data.open(tmp_path, 0)
    batch = next(dataset.evaluate("train", 0, 1, 8))
    assert batch.ids[:, 0].tolist() == es.hash_ids("stadt", ["Köln", "€"]).tolist()
    assert batch.dense[:, 0].tolist() == [3.5, 1.5]


@pytest.mark.parametrize(("text", "line"), [(b"\x81,label\n\x81,1\n", 1), (b"user,label\nb,1\n\x81,0\n", 3)])
def test_bytes_that_are_not_of_the_named_encoding_are_refused_by_its_name(tmp_path, text, line):
    (tmp_path / "train.csv").write_bytes(text)
    with pytest.raises(JobError, match=rf"train\.csv:{line}: not cp1252 text"):
        job_of(tmp_path, " {user: {}}", encoding="cp1252").data.open(tmp_path, 0)


CSV = "user,tags,age,label\nu1,a|b,30,1\nu2,c,40,0\n"
BAD = {  # name: (the file's text, features, settings of data, where, the reason)
    "a missing column": (CSV, " {usr: {}}", {}, ":1", "'usr'.*feature 'usr'.*did you mean user"),
    "a missing label": (CSV, " {user: {}}", {"label": "click"}, ":1", "'click'.*data.label"),
    "a separated column": (CSV, " {tags: {}}", {}, ":2", r"'tags'.*'a\|b'.*separator"),
    "a number that is text": (CSV.replace("40", "old"), " {user: {}, age: {type: number}}", {}, ":3", "'age'.*'old'"),
    "thousands separators": (
        CSV.replace("40", '"1,234.5"'),
        " {user: {}, age: {type: number}}",
        {},
        ":3",
        "'1,234.5'.*thousands",
    ),
    "infinity": (CSV.replace("40", "-inf"), " {user: {}, age: {type: number}}", {}, ":3", "'-inf'.*data.missing"),
    "a label of text": (CSV.replace("c,40,0", "c,40,no"), " {user: {}}", {}, ":3", "'no'.*data.label_values"),
    "a label of another text": (
        CSV.replace("30,1", "30,yes").replace("40,0", "40,maybe"),
        " {user: {}}",
        {"label_values": ["no", "yes"]},
        ":3",
        "'maybe' is neither 'no' nor 'yes'",
    ),
    "lines of an old Mac": (CSV.replace("\n", "\r"), " {user: {}}", {}, ":1", "CR"),
    "a decimal comma": (CSV.replace("40", '"4,5"'), " {user: {}, age: {type: number}}", {}, ":3", "'4,5'.*decimal"),
    "a label outside": (CSV.replace("c,40,0", "c,40,7"), " {user: {}}", {}, ":3", "'label'.*7.*0 to 1"),
    "a label that is missing": (CSV.replace("c,40,0", "c,40,"), " {user: {}}", {}, ":3", "'label'.*missing"),
    "a long list": (
        CSV,
        " {tags: {type: list, separator: '|', max_length: 1}}",
        {},
        ":2",
        r"'tags': 'a\|b' has 2 .*max_length is 1.*the first ones",
    ),
    "a long sequence": (
        CSV.replace("c,40", "|".join(f"item{i}" for i in range(50)) + ",40"),
        " {user: {}, tags: {type: sequence, separator: '|', max_length: 20}}",
        {"model": "{name: din, target: [user], history: [tags]}"},
        ":3",
        r"'tags': 'item0\|item1\|item2\|item3\|item4\|item5\|\.\.\. has 50 .*max_length is 20.*the last ones",
    ),
    "a line break": (CSV.replace("u2", '"u\n2"'), " {user: {}}", {}, ":3", "quote"),
    "another encoding": (CSV.replace("u2", "ü"), " {user: {}}", {}, ":3", "UTF-8.*cp1252"),
    "another delimiter": (CSV.replace(",", ";"), " {user: {}}", {}, ":1", "';'.*data.delimiter"),
    "an id that is none": (CSV, " {user: {ids: exact}}", {}, ":2", "'user'.*'u1'"),
    "an id beyond": (CSV, " {age: {ids: exact, num_ids: 40}}", {}, ":3", "'age'.*40"),
    "a weight below 0": (CSV.replace("40", "-1"), " {user: {}}", {"weight": "age"}, ":3", "'age'.*-1"),
    "a time that is none": (CSV, " {user: {}}", {"split": {"by": "time", "column": "user", "test": 0.5}}, ":2", "'u1'"),
    "a number beyond float32": (
        CSV.replace("40", "1e39"),
        " {user: {}, age: {type: number}}",
        {},
        ":3",
        "'age'.*1e.39",
    ),
    "a number of Python alone": (
        CSV.replace("a|b", "1_000"),
        " {user: {}, tags: {type: number}}",
        {},
        ":2",
        "'tags': '1_000' is not",
    ),
    "a weight that is none": (
        CSV.replace("a|b", "a:x|b"),
        " {tags: {type: list, separator: '|', weight_separator: ':'}}",
        {},
        ":2",
        "'tags'.*'x' is not a number",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_named_with_file_line_column_and_value(tmp_path, case):
    text, features, settings, line, reason = BAD[case]
    (tmp_path / "train.csv").write_bytes(text.encode("latin-1"))
    section = job_of(tmp_path, features, **settings).data
    with pytest.raises(JobError) as found:
        section.look(tmp_path)
    assert found.value.fields["where"] == f"{tmp_path}/train.csv{line}"
    assert re.search(reason, found.value.fields["reason"])


def test_a_decimal_of_text_has_the_bucket_that_its_float64_has(tmp_path):
    numbers = [0.3, 0.7, 0.1, 1.1]
    (tmp_path / "train.csv").write_text("x,label\n" + "".join(f"{x},1\n" for x in numbers))
    section = job_of(tmp_path, " {x: {type: number, bucketise: [0.1, 0.3, 0.7, 1.1]}}").data
    batch = next(section.open(tmp_path, 0).evaluate("train", 0, 1, 8))
    assert batch.ids[:, 0].tolist() == [3, 4, 2, 5]
    assert section.preprocessor()({"x": numbers})[0][:, 0].tolist() == [3, 4, 2, 5]


@pytest.mark.parametrize("zone", ["Z", "+02:00", ""])
def test_times_with_a_zone_split_rows(tmp_path, zone):
    times = [f"2026-01-0{day}T12:00:00{zone}" for day in range(1, 9)]
    (tmp_path / "train.csv").write_text("user,time,label\n" + "".join(f"u,{time},1\n" for time in times))
    split = {"by": "time", "column": "time", "at": ["2026-01-07"]}
    section = job_of(tmp_path, " {user: {}}", split=split).data
    assert section.fit(tmp_path, 0).fitted["samples"] == {"train": 6, "test": 2}


def test_a_split_by_a_column_that_numbers_the_rows_does_not_depend_on_the_features(tmp_path):
    lines = [f"{row},u{row % 7},{row % 5},{row % 2}\n" for row in range(300)]
    (tmp_path / "train.csv").write_text("row,user,age,label\n" + "".join(lines))

    def rows_of_test(features):
        split = {"by": "user", "column": "row", "test": 0.3}
        section = job_of(tmp_path, f" {{row: {{ids: exact}}{features}}}", split=split).data
        (batch,) = section.open(tmp_path, 0).evaluate("test", 0, 1, 300)
        return batch.ids[:, 0].tolist()

    first = rows_of_test("")
    assert 60 < len(first) < 120
    assert rows_of_test(", user: {}, age: {type: number}") == first
    assert rows_of_test(", number: {type: number, column: row}") == first


LABELS = {  # of files: (values, label_values, what is on line 2 and 3)
    "texts": (["no", "yes"], ["no", "yes"], [0, 1]),
    "of excel": (["FALSE", "TRUE"], ["FALSE", "TRUE"], [0, 1]),
    "numbers": ([1, 2], [1, 2], [0, 1]),
    "booleans": ([False, True], [True, False], [1, 0]),
    "floats": ([-1.0, 1.0], [-1.0, 1.0], [0, 1]),
}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_texts_stand_for_labels_where_they_are_named(tmp_path, case, ending):
    values, texts, want = LABELS[case]
    rows = [{"user": "u", "bought": values[0], "seen": 1}, {"user": "v", "bought": values[1], "seen": 0}]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    elif ending == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = ["user,bought,seen", *(f"{r['user']},{json.dumps(r['bought'])},{r['seen']}" for r in rows)]
        (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    job = job_of(tmp_path, " {user: {}}", train=f"a.{ending}", label="bought", label_values=texts)
    (batch,) = job.data.open(tmp_path, 0).evaluate("train", 0, 1, 9)
    assert batch.labels.tolist() == want
    both = {"label": ["bought", "seen"], "label_values": {"bought": texts}}
    job = job_of(tmp_path, " {user: {}}", train=f"a.{ending}", model="{name: mmoe}", **both)
    job.data.look(tmp_path)
    assert type(job).model_validate(job.model_dump(mode="json")) == job
    (batch,) = job.data.open(tmp_path, 0).evaluate("train", 0, 1, 9)
    assert batch.labels.tolist() == [[want[0], 1], [want[1], 0]]


def test_labels_that_are_floats_are_the_integers_that_label_values_name(tmp_path):
    for labels, want in (([1.0, -1.0], [1, 0]), ([1.0, 0.5], None), ([1.0, None], None)):
        pq.write_table(pa.table({"user": ["u", "v"], "label": labels}), tmp_path / "a.parquet")
        job = job_of(tmp_path, " {user: {}}", train="a.parquet", label_values=["-1", "1"])
        if want:
            (batch,) = job.data.open(tmp_path, 0).evaluate("train", 0, 1, 9)
            assert batch.labels.tolist() == want
        else:
            with pytest.raises(
                JobError, match=r"row 2: column 'label': (label '0.5' is neither '-1' nor '1'|.*missing)"
            ):
                job.data.look(tmp_path)


def test_a_label_of_text_that_is_missing_is_refused_alone_and_left_out_among_others(tmp_path):
    (tmp_path / "train.csv").write_text("user,a,b\nu,no,\nv,yes,no\n")
    texts = {"label_values": ["no", "yes"]}
    with pytest.raises(JobError):
        job_of(tmp_path, " {user: {}}", label="b", **texts).data.look(tmp_path)
    job = job_of(tmp_path, " {user: {}}", label=["a", "b"], model="{name: mmoe}", **texts)
    (batch,) = job.data.open(tmp_path, 0).evaluate("train", 0, 1, 9)
    np.testing.assert_array_equal(batch.labels, [[0, np.nan], [1, 0]])


@pytest.mark.parametrize(
    "settings",
    [
        {"label_values": {"x": ["a", "b"]}},
        {"label_values": ["a", "a"]},
        {"label_values": ["a"]},
        {"label_values": ["a", "b"], "label_range": [0, 2]},
    ],
)
def test_texts_of_labels_that_contradict_the_job_are_refused(tmp_path, settings):
    with pytest.raises(JobFileError):
        job_of(tmp_path, " {user: {}}", **settings)


@pytest.mark.parametrize("section", [{}, {"buckets": 9}, {"type": "number", "bucketise": [3.0]}, {"min_count": 1}])
def test_a_feature_may_have_a_name_that_no_shard_takes(make_session, tmp_path, section):
    rows = {"User ID": [1, 2, 3, 4] * 8, "größe": ["s", "m"] * 16, "label": [0, 1] * 16}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    features = json.dumps({"User ID": section, "größe": {"type": "list", "separator": "|"}}, ensure_ascii=False)
    job = job_of(tmp_path, f" {features}", train="a.parquet")
    Trainer(job, job.data.open(tmp_path, 0), make_session(2), WorkerGroup()).run()


def test_two_numbers_have_no_table_of_buckets_together(tmp_path):
    features = {name: FeatureSpec(type="number", bucketise=(1.0,), table="t") for name in ("a", "b")}
    with pytest.raises(BadFeature) as found:
        Preprocessor(features)
    assert found.value.name == "b"


def test_lists_that_are_all_missing_are_empty():
    preprocessor = Preprocessor({"tags": FeatureSpec(type="list", max_length=2)})
    assert preprocessor({"tags": [None, None]})[0].tolist() == [[-1, -1], [-1, -1]]


def test_a_separated_column_of_a_dictionary_is_refused(tmp_path):
    tags = pa.array(["a|b", "c"]).dictionary_encode()
    pq.write_table(pa.table({"tags": tags, "label": [1, 0]}), tmp_path / "a.parquet")
    with pytest.raises(JobError, match=r"'tags'.*'a\|b'.*separator"):
        job_of(tmp_path, " {tags: {}}", train="a.parquet").data.look(tmp_path)


ROW = {"user": "u", "tags": ["a", "b"], "age": 3.0, "label": 1}
BAD_ROWS = {  # name: (the second row, features, the reason)
    "an undeclared list": ({}, " {tags: {}}", "'tags' is a list.*type: list"),
    "a float category": ({}, " {age: {}}", "'age'.*type: number"),
    "a line break": ({"user": "a\nb"}, " {user: {}}", r"'a\\nb' has a line break"),
    "a number that is text": ({"age": "many"}, " {user: {}, age: {type: number}}", "'age'.*'many'"),
    "infinity": ({"age": float("inf")}, " {user: {}, age: {type: number}}", "'age': inf .*missing value"),
    "a label of text": ({"label": "no"}, " {user: {}}", "'label': 'no' is not a number.*data.label_values: \\[.*no"),
    "a long list": (
        {"tags": ["a", "b", "c"]},
        " {tags: {type: list, max_length: 2}}",
        r"'tags': \['a', 'b', 'c'\] has 3 values, and max_length is 2",
    ),
    "weights for other values": (
        {"w": [1.0]},
        " {tags: {type: list, weights: w}}",
        "'w': 1 weights for 2 values of 'tags'",
    ),
}


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named_with_file_row_column_and_value(tmp_path, case, ending):
    change, features, reason = BAD_ROWS[case]
    rows = [{**ROW, "w": [1.0, 2.0]}, {**ROW, "w": [1.0, 2.0], **change}]
    for name in ("age", "label"):
        if isinstance(change.get(name), str) and (ending == "parquet" or name == "label"):
            rows[0][name] = "1"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = job_of(tmp_path, features, train=f"a.{ending}").data
    with pytest.raises(JobError) as found:
        section.look(tmp_path)
    number = 2 if change else 1
    assert found.value.fields["where"] == f"{tmp_path}/a.{ending}{': row ' if ending == 'parquet' else ':'}{number}"
    assert re.search(reason, found.value.fields["reason"])


def test_a_bad_row_behind_the_first_ones_is_named_in_training(tmp_path):
    lines = [f"u{i},1" for i in range(30_000)]
    lines[25_000] = "u,8"
    (tmp_path / "train.csv").write_text("user,label\n\n" + "\n".join(lines) + "\n")
    dataset = job_of(tmp_path, " {user: {}}").data.open(tmp_path, 0)
    with pytest.raises(JobError) as found:
        list(dataset.train(0, 0, 1, 64))
    assert found.value.fields["where"] == f"{tmp_path}/train.csv:{25_000 + 3}"


def test_a_split_that_leaves_one_part_empty_and_a_vocabulary_with_doubles_are_refused(tmp_path):
    (tmp_path / "train.csv").write_text(CSV)
    with pytest.raises(JobError) as found:
        job_of(tmp_path, " {user: {}}", split={"by": "random", "valid": 1e-9}).data.fit(tmp_path, 0)
    assert found.value.fields["where"] == "data.split"
    assert "valid without a row, of 2" in found.value.fields["reason"]
    (tmp_path / "v.txt").write_text("a\nb\na\n")
    with pytest.raises(JobError) as found:
        job_of(tmp_path, " {user: {vocabulary: v.txt}}").data.look(tmp_path)
    assert found.value.fields["where"] == f"{tmp_path}/v.txt:3"
    assert "'a' is on line 1" in found.value.fields["reason"]


@pytest.mark.parametrize(
    ("features", "want"),
    [
        (
            "\n  a: {dim: 4, table: t}\n  b: {dim: 8, table: t}",
            "job.yaml:5: features.b: table 't' has dim 8 here, and 4",
        ),
        ("\n  a: {max_length: 3}", "job.yaml:4: features.a.max_length: has no meaning for type category"),
        ("\n  a: {typ: list}", "job.yaml:4: features.a.typ: unknown field; did you mean type?"),
        ("\n  a: {type: sequence}", "job.yaml:4: features.a.type: fm reads no sequences"),
        ("\n  a: {type: number}", "job.yaml:4: features.a: is a number, and no feature has an embedding"),
        ("\n  a: {type: cross, of: [b]}", "job.yaml:4: features.a.of: names two columns"),
        ("\n  a: {buckets: 5, min_count: 2}", "job.yaml:4: features.a.min_count: contradicts buckets"),
        ("\n  a: {type: number, bucketise: [3, 1]}", "job.yaml:4: features.a.bucketise: must ascend"),
        ("\n  a: {type: number, missing: -1e39}", "job.yaml:4: features.a.missing: -1e+39 is infinite in float32"),
        (" {}", "job.yaml:2: data.reader: tabular needs the section features"),
    ],
)
def test_features_that_contradict_each_other_are_named_with_their_line(tmp_path, features, want):
    (tmp_path / "train.csv").write_text(CSV)
    with pytest.raises(JobFileError) as found:
        job_of(tmp_path, features)
    assert str(found.value).startswith(f"{tmp_path}/{want}")


@pytest.mark.parametrize("more", ["{type: cross, of: [user, item], buckets: 9}", "{type: number, column: item}"])
def test_negatives_of_a_column_that_another_feature_reads_are_refused(tmp_path, more):
    (tmp_path / "train.csv").write_text("user,item\n1,2\n3,4\n")
    features = f"\n  user: {{}}\n  item: {{}}\n  other: {more}"
    with pytest.raises(JobFileError, match=r"data.negatives: names 'item', and not 'other', which reads column 'item'"):
        job_of(tmp_path, features, label=[], negatives={"count": 1, "features": ["item"]})
