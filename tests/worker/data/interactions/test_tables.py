"""Interactions of tables: numbers for users and items, the order of time, what is held out, and what is refused."""

import datetime as dt
import gzip
import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from embershard.proto.errors import BadRows, JobError
from embershard.worker.data.inputs.rows import CategoricalInput, NumericInput, RowInputs
from embershard.worker.data.interactions.gowalla import InteractionLists
from embershard.worker.data.interactions.sequences import ActionSequences
from embershard.worker.data.interactions.tables import InteractionTables, Names, hold_out_latest
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.training.saver import Numbering

ROWS = [
    ("bob", "x", 5),
    ("Ann", "x", 4),
    ("bob", "z", 1),
    ("Ann", "y", 9),
    ("Ann", "y", 2),
    ("bob", "y", 3),
    ("é", "z", 1),
]
COLUMNS = {"user": "who", "item": "what", "time": "at"}


@contextmanager
def refused(errors, *texts):
    with pytest.raises(errors) as caught:
        yield
    for text in texts:
        assert text in str(caught.value)


def table_of(rows=ROWS):
    return pa.table({name: [row[k] for row in rows] for k, name in enumerate(("who", "what", "at"))})


@pytest.fixture
def plays(tmp_path):
    pyarrow.csv.write_csv(table_of(), tmp_path / "plays.csv")
    return tmp_path / "plays.csv"


def tables(*files, **columns):
    return InteractionTables(files={"train": files}, **{**COLUMNS, **columns})


def named(pairs, names):
    return [(names.users[user], names.items[item]) for user, item in zip(*pairs, strict=True)]


def test_users_and_items_are_numbered_by_their_texts_and_rows_are_in_the_order_of_time(plays):
    pairs, names = tables(plays).read()
    assert (names.users, names.items) == (("Ann", "bob", "é"), ("x", "y", "z"))
    assert named(pairs["train"], names) == [
        ("bob", "z"), ("é", "z"), ("Ann", "y"), ("bob", "y"), ("Ann", "x"), ("bob", "x"), ("Ann", "y")
    ]  # fmt: skip
    pairs, names = tables(plays, time=None).read()
    assert named(pairs["train"], names) == [row[:2] for row in ROWS]


def test_without_times_rows_are_in_the_order_of_the_files_compressed_ones_among_them(tmp_path):
    for name, opened, row in (("a.csv.gz", gzip.open, "first,x"), ("b.csv", open, "second,x"), ("c.csv", open, "3,y")):
        with opened(tmp_path / name, "wt") as file:
            file.write(f"who,what\n{row}\n")
    pairs, names = tables(tmp_path, time=None).read()
    assert named(pairs["train"], names) == [("first", "x"), ("second", "x"), ("3", "y")]


def test_the_latest_items_of_users_who_have_more_are_held_out(plays):
    pairs, names = tables(plays).read()

    def held_out(*parts):
        return {part: sorted(named(own, names)) for part, own in hold_out_latest(pairs["train"], 1, parts).items()}

    # Ann took y first and again last: it is in train; é has one item
    train = [("Ann", "y"), ("bob", "y"), ("bob", "z"), ("é", "z")]
    assert held_out("test") == {"train": train, "test": [("Ann", "x"), ("bob", "x")]}
    train = [("Ann", "x"), ("Ann", "y"), ("bob", "z"), ("é", "z")]  # Ann has no more than two items
    assert held_out("valid", "test") == {"train": train, "valid": [("bob", "y")], "test": [("bob", "x")]}
    assert not len(hold_out_latest(pairs["train"], 3, ["test"])["test"][0])


CODED = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.int16(), pa.uint64(), pa.decimal128(38, 0), pa.string(), pa.large_string(), CODED]
)
def test_ids_of_any_type_stand_for_the_same_users(tmp_path, kind):
    ids = pa.array([30, 4, 30, 100]).cast(pa.string() if pa.types.is_dictionary(kind) else kind)
    table = pa.table({"who": ids.cast(kind), "what": ["a", "b", "b", " b "], "at": [1, 2, 3, 4]})
    for group in range(2):  # two files, whose dictionaries are their own
        pq.write_table(table.slice(2 * group, 2), tmp_path / f"{group}.parquet")
    pairs, names = tables(tmp_path).read()
    assert (names.users, names.items) == (("100", "30", "4"), ("a", "b"))
    assert named(pairs["train"], names) == [("30", "a"), ("4", "b"), ("30", "b"), ("100", "b")]


def test_a_parquet_file_without_rows_is_a_part_of_a_table_as_any_other(tmp_path):
    for name, rows in (("a", 0), ("b", 2), ("c", 0)):
        pq.write_table(table_of().slice(0, rows), tmp_path / f"{name}.parquet")
    pairs, names = tables(tmp_path).read()
    assert named(pairs["train"], names) == [("Ann", "x"), ("bob", "x")]


def test_a_request_has_the_ids_of_training_and_unknown_names_share_one_that_nothing_trains(plays):
    pyarrow.csv.write_csv(table_of([*ROWS, ("é", "v", 0)]), plays)
    pairs, names = tables(plays).read()
    held_out = hold_out_latest(pairs["train"], 1)
    data = InteractionLists(held_out, names=names, negatives=2, history=2, by_popularity=True)
    assert data.schema.num_ids == 3 + 1 + 4 + 1
    assert len(data.log_q) == data.schema.num_ids
    rows = {"who": ["bob", "nobody"], "what": ["z", "w"], "at": [0, 0], "history": [["y", "new"], []]}
    ids, _ = data.inputs(rows)
    assert ids.tolist() == [[1, 4 + 3, 4 + 2, -1], [3, 4 + 4, -1, -1]]
    trained = np.concatenate([batch.ids.numpy() for batch in data.train(0, 0, 1, 8)])
    assert not {3, 8} & set(trained.reshape(-1).tolist())
    assert data.item_ids.tolist() == [4, 5, 6, 7]
    with refused(BadRows, "who", "neither a text nor an integer"):
        data.inputs({**rows, "who": [1.5, 2.5]})


def test_a_table_of_its_own_may_have_users_and_items_that_train_has_not(tmp_path, plays):
    pyarrow.csv.write_csv(table_of([("new", "x", 1), ("bob", "w", 2)]), tmp_path / "test.csv")
    pairs, names = InteractionTables(files={"train": [plays], "test": [tmp_path / "test.csv"]}, **COLUMNS).read()
    assert (names.users, names.items) == (("Ann", "bob", "new", "é"), ("w", "x", "y", "z"))
    assert named(pairs["test"], names) == [("new", "x"), ("bob", "w")]
    assert len(pairs["train"][0]) == len(ROWS)


def test_a_table_to_be_found_may_have_another_format(tmp_path, plays):
    pq.write_table(table_of([("bob", "w", 2)]), tmp_path / "test.parquet")
    both = InteractionTables(files={"train": [plays], "test": [tmp_path / "test.parquet"]}, **COLUMNS)
    both.look()
    pairs, names = both.read()
    assert named(pairs["test"], names) == [("bob", "w")]


def test_sequences_of_a_table_are_those_of_the_file_with_numbers(tmp_path):
    rows = [(f"u{i * 7 % 5}", f"i{i * 5 % 9}", f"2026-01-01 00:00:{i:02}") for i in range(40)]
    pq.write_table(table_of(rows[::-1]), tmp_path / "plays.parquet")
    (tmp_path / "actions.txt").write_text("".join(f"{user[1:]} {item[1:]}\n" for user, item, _ in rows))
    settings = {"max_length": 4, "candidates": 3, "users": 0, "seed": 3}
    pairs, names = tables(tmp_path / "plays.parquet").read()
    ours = ActionSequences(pairs["train"], names=names, **settings)
    theirs = ActionSequences.read(tmp_path / "actions.txt", **settings)
    for part in ("valid", "test"):
        pair = [list(data.evaluate(part, 0, 1, 99)) for data in (ours, theirs)]
        assert [batch.ids.tolist() for batch in pair[0]] == [batch.ids.tolist() for batch in pair[1]]
    assert (ours.schema.num_ids, theirs.schema.num_ids) == (10, 9)
    ids, _ = ours.inputs({"history": [["i2", "new", "i1"]], "items": [["i7", "new"]]})
    assert ids.tolist() == [[2, 1, -1, -1, 7, 9]]


def test_pairs_to_be_found_have_the_history_with_which_the_model_is_evaluated(plays):
    pairs, names = tables(plays).read()
    data = InteractionLists(hold_out_latest(pairs["train"], 1), names=names, history=2)
    (batch,), (users,) = data.evaluate("test", 0, 1, 9), data.users("test", 0, 1, 9)
    assert batch.ids[:, [0, 2, 3]].tolist() == users.ids.tolist()


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("a,x,1\n,x,2\n", "plays.csv:3", "the user is missing: leave the row out"),
        ("a,x,1\na, ,2\n", "plays.csv:3", "the item is missing"),
        ("a,x,1\na,y,\n", "plays.csv:3", "the time is missing: leave the row out"),
        ("a,x,2026-01-01\na,y,soon\n", "plays.csv:3", "'soon' is no time"),
    ],
)
def test_a_value_that_is_missing_is_refused_with_its_line(tmp_path, text, where, reason):
    (tmp_path / "plays.csv").write_text("who,what,at\n" + text)
    for call in (tables(tmp_path / "plays.csv").look, tables(tmp_path / "plays.csv").read):
        with refused(JobError, where, reason):
            call()


NS = 1_767_225_600_000_000_000  # 2026-01-01
TIMES = {  # name: times of a nanosecond apart
    "integers": lambda n: NS + n,
    "texts of integers": lambda n: str(NS + n),
    "timestamps": lambda n: pa.scalar(NS + n, pa.timestamp("ns", "UTC")),
    "texts of dates": lambda n: f"2026-01-01T00:00:00.{n:09}Z",
}


@pytest.mark.parametrize("kind", TIMES)
def test_times_a_nanosecond_apart_are_in_their_order(tmp_path, kind):
    for part, numbers in enumerate(([3, 0], [2, 1])):
        times = pa.array([TIMES[kind](n) for n in numbers])
        table = pa.table({"who": [f"u{n}" for n in numbers], "what": ["x", "y"], "at": times})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    pairs, names = tables(tmp_path).read()
    assert [user for user, _ in named(pairs["train"], names)] == ["u0", "u1", "u2", "u3"]


FAR = {  # of which nanoseconds cannot tell, beside times of today
    "texts": ["9999-12-31 00:00:00", "0001-01-01 00:00:00"],
    "timestamps": pa.array([253_402_214_400, -62_135_596_800], pa.timestamp("s")),
    "floats": [3e18, -3e18],
}


@pytest.mark.parametrize("kind", FAR)
def test_times_far_from_today_are_in_their_order(tmp_path, kind):
    now = {"texts": ["2026-01-01 00:00:00"], "timestamps": pa.array([NS], pa.timestamp("ns")), "floats": [NS]}[kind]
    pq.write_table(pa.table({"who": ["now"], "what": ["x"], "at": now}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"who": ["last", "first"], "what": ["x", "x"], "at": FAR[kind]}), tmp_path / "b.parquet")
    pairs, names = tables(tmp_path).read()
    assert [user for user, _ in named(pairs["train"], names)] == ["first", "now", "last"]


def test_text_of_another_encoding_is_refused_with_the_field_to_give(tmp_path):
    (tmp_path / "plays.csv").write_bytes("who,what,at\nJürgen,x,1\n".encode("cp1252"))
    with refused(JobError, "plays.csv:2", "give encoding: cp1252 (with data.reader tabular, lists or sequences)"):
        tables(tmp_path / "plays.csv").read()


@pytest.mark.parametrize("user", [1.5, True, [1]])
@pytest.mark.parametrize("column", ["who", "at"])
def test_a_value_of_a_wrong_type_in_json_is_refused_where_nobody_looked_before(tmp_path, column, user):
    row = {"who": 1, "what": "x", "at": 1, column: [1] if column == "at" else user}
    (tmp_path / "plays.jsonl").write_text(json.dumps(row) + "\n")
    with refused(JobError, "plays.jsonl:1", f"'{column}'", "is "):
        tables(tmp_path / "plays.jsonl").read()


@pytest.mark.parametrize("values", [[1.5, 2.0], [[1], [2]], [dt.date(2026, 1, 1)] * 2, [True, False], [b"a", b"b"]])
def test_users_are_texts_or_integers(tmp_path, values):
    table = pa.table({"who": values, "what": ["a", "b"], "at": [1, 2]})
    pq.write_table(table, tmp_path / "plays.parquet")
    with refused(JobError, "plays.parquet", "column 'who': is ", "users are texts or integers"):
        tables(tmp_path / "plays.parquet").look()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_true_and_false_are_no_times(tmp_path, ending):
    rows = [{"who": "a", "what": "x", "at": True}, {"who": "b", "what": "x", "at": False}]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plays.parquet")
    else:
        (tmp_path / "plays.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused(JobError, f"plays.{ending}", "column 'at': is true or false, and no time"):
        tables(tmp_path / f"plays.{ending}").look()


def test_floats_as_pandas_makes_of_integers_with_missing_cells_are_refused_with_the_cast(tmp_path):
    pq.write_table(pa.table({"who": [7.0, None], "what": ["a", "b"], "at": [1, 2]}), tmp_path / "plays.parquet")
    with refused(JobError, "plays.parquet", "column 'who': is double", "leave these rows out", "to Int64"):
        tables(tmp_path / "plays.parquet").look()


@pytest.mark.parametrize(("file", "line"), [("a.jsonl", 4001), ("b.jsonl", 1)])
def test_a_float_behind_integers_is_named_with_its_file_and_line(tmp_path, file, line):
    rows = "".join(f'{{"who": {n}, "what": {n}, "at": {n}}}\n' for n in range(4000))  # more than are looked at first
    (tmp_path / "a.jsonl").write_text(rows)
    with (tmp_path / file).open("a") as end:
        end.write('{"who": 7.0, "what": 1, "at": 1}\n')
    with refused(JobError, f"{file}:{line}: ", "column 'who'", "to Int64"):
        tables(tmp_path).read()


JOB = {
    "model": {"name": "two_tower"},
    "embedding": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.01}},
    "train": {"epochs": 1, "batch_size": 4},
}
LISTS = {"reader": "lists", "train": "plays.csv", "columns": COLUMNS}
NO_TIME = {"user": "who", "item": "what"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (LISTS | {"columns": NO_TIME}, "data.columns: has no time, by which each user's latest items are held out"),
        (LISTS | {"valid": "plays.csv", "hold_out": 1}, "data.hold_out: takes valid from train: remove it, or valid"),
        (
            LISTS | {"columns": NO_TIME, "test": "plays.csv", "hold_out": 1},
            "data.columns: has no time, by which each user's latest items are held out: name it, or remove hold_out",
        ),
        (LISTS | {"columns": {**COLUMNS, "item": "history"}, "history": 2}, "data.history: adds a list of this name"),
        (LISTS | {"columns": NO_TIME | {"time": "what"}}, "data.columns: names one column twice"),
        ({"reader": "lists", "train": "plays.csv"}, "data.test: is one file of lists"),
        ({"reader": "lists", "train": "plays.csv", "test": "plays.csv", "hold_out": 1}, "data.hold_out: has a meaning"),
        ({"reader": "lists", "train": ["a", "b"], "test": "c"}, "data.train: is one file of lists"),
        (LISTS | {"columns": NO_TIME | {"time": "wen"}}, "no column 'wen', which data.columns.time reads"),
        (LISTS | {"columns": {"item": "what"}}, "data.columns.user"),
    ],
)
def test_columns_that_contradict_the_rest_are_refused_before_training(tmp_path, plays, data, reason):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "data": data}))
    with refused((JobFileError, JobError), reason):
        job = load_job(tmp_path / "job.yaml")
        job.data.look(tmp_path)


PARTS = {  # fields of the job beside train: what train, and each split, then has
    "none": ({}, {"train": "Ax Ay bz éz", "valid": "by", "test": "bx"}),
    "test": ({"test": "later.csv"}, {"train": "Ax Ay bx by bz éz", "test": "bw"}),
    "test, held out": ({"test": "later.csv", "hold_out": 1}, {"train": "Ay by bz éz", "valid": "Ax bx", "test": "bw"}),
    "both": ({"valid": "next.csv", "test": "later.csv"}, {"train": "Ax Ay bx by bz éz", "valid": "Av", "test": "bw"}),
    "valid": ({"valid": "next.csv"}, {"train": "Ax Ay bx by bz éz", "valid": "Av"}),
}


@pytest.mark.parametrize("given", PARTS)
def test_valid_and_test_are_files_or_the_latest_items_of_train(tmp_path, plays, given):
    pyarrow.csv.write_csv(table_of([("Ann", "v", 10)]), tmp_path / "next.csv")
    pyarrow.csv.write_csv(table_of([("bob", "w", 11)]), tmp_path / "later.csv")
    fields, wanted = PARTS[given]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "data": LISTS | fields}))
    section = load_job(tmp_path / "job.yaml").data
    section.look(tmp_path)
    data = section.open(tmp_path, 0)
    users, items = (column.values for column in data.inputs.categorical)

    def shown(batches):
        pairs = [pair for batch in batches for pair in batch.ids[:, :2].tolist()]
        return " ".join(sorted(users[user][0] + items[item - data.train_set.num_users] for user, item in pairs))

    found = {split: shown(data.evaluate(split, 0, 1, 9)) for split in data.splits}
    assert {"train": shown(data.train(0, 0, 1, 9)), **found} == wanted
    assert data.splits == section.judged_on


def test_on_test_a_ranking_leaves_out_what_a_user_took_in_valid_too(tmp_path):
    for name, text in (("train", "0 1 3\n1 0\n"), ("valid", "0 2\n"), ("test", "0 4\n1 2\n")):
        (tmp_path / name).write_text(text)
    data = InteractionLists.read(*(tmp_path / name for name in ("train", "test", "valid")))
    (valid,), (test,) = (data.users(split, 0, 1, 9) for split in ("valid", "test"))
    assert list(zip(valid.seen_user, valid.seen_item, strict=True)) == [(0, 1), (0, 3)]
    assert list(zip(test.seen_user, test.seen_item, strict=True)) == [(0, 1), (0, 2), (0, 3), (1, 0)]


def test_where_nobody_has_an_item_to_hold_out_the_job_is_refused(tmp_path, plays):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "data": LISTS | {"hold_out": 5}}))
    job = load_job(tmp_path / "job.yaml")
    with refused(JobError, "no user has more than 10 items"):
        job.data.open(tmp_path, 0)


def test_a_checkpoint_of_other_users_is_refused(plays):
    def numbering(rows):
        pyarrow.csv.write_csv(table_of(rows), plays)
        pairs, names = tables(plays).read()
        return Numbering(InteractionLists(hold_out_latest(pairs["train"], 1), names=names))

    before = numbering(ROWS)
    numbering(ROWS[::-1]).load_state_dict(before.state_dict())
    others = [(f"{who}s", *rest) for who, *rest in ROWS]
    with refused(JobError, "the values of 'who' are others than when the checkpoint was trained"):
        numbering(others).load_state_dict(before.state_dict())
    Numbering(SimpleNamespace()).load_state_dict(before.state_dict())


def numbering_of(column, *users, names=True):
    pairs = np.arange(len(users)), np.zeros(len(users), np.int64)
    named = Names(users, ("x",), column) if names else None
    return Numbering(InteractionLists({"train": pairs, "test": pairs}, names=named))


def test_a_checkpoint_of_other_users_is_refused_where_their_column_was_called_otherwise():
    before = numbering_of("user", "ann", "bob").state_dict()
    numbering_of("user_id", "ann", "bob").load_state_dict(before)
    with refused(JobError, "the values of 'user_id' (then called 'user') are others than when the checkpoint was"):
        numbering_of("user_id", "ann", "eve").load_state_dict(before)
    with refused(JobError, "the ids of 'item' begin at 4"):
        numbering_of("user_id", "ann", "bob", "eve").load_state_dict({"user": 0, "item": 3})  # of an older version


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_of_users_with_names_is_none_of_users_with_numbers(named):
    before = numbering_of("user", "ann", "bob", names=named).state_dict()
    with refused(JobError, "the values of 'user' are others"):
        numbering_of("user", "ann", "bob", names=not named).load_state_dict(before)


def test_a_column_of_hashed_ids_that_was_called_otherwise_or_stood_elsewhere_is_another_input():
    def numbering(*columns, numbers=()):
        categorical = tuple(CategoricalInput(name=column) for column in columns)
        inputs = RowInputs(categorical=categorical, numeric=tuple(NumericInput(name=name) for name in numbers))
        return Numbering(SimpleNamespace(inputs=inputs))

    before = numbering("user", "item").state_dict()
    with refused(JobError, "the columns are in another order (item, user; then user, item) than when the checkpoint"):
        numbering("item", "user").load_state_dict(before)
    with refused(JobError, "column 'user_id' was called 'user' when the checkpoint was trained, and the id of a value"):
        numbering("user_id", "item").load_state_dict(before)
    before = numbering("user", numbers=("age", "price")).state_dict()
    numbering("user", numbers=("years", "price")).load_state_dict(before)
    with refused(JobError, "another order (user, price, age; then user, age, price)"):
        numbering("user", numbers=("price", "age")).load_state_dict(before)


def test_a_column_of_numbers_that_was_one_of_ids_is_called_so():
    def numbering(ids, numbers):
        categorical = tuple(CategoricalInput(name=name, first=first) for first, name in enumerate(ids))
        numeric = tuple(NumericInput(name=name) for name in numbers)
        return Numbering(SimpleNamespace(inputs=RowInputs(categorical=categorical, numeric=numeric)))

    of_ids, of_numbers = numbering(("user", "age"), ()), numbering(("user",), ("years",))
    with refused(JobError, "column 'years' (then called 'age') is of numbers, and was of ids when the checkpoint was"):
        of_numbers.load_state_dict(of_ids.state_dict())
    with refused(JobError, "column 'age' (then called 'years') is of ids, and was of numbers when the checkpoint was"):
        of_ids.load_state_dict(of_numbers.state_dict())


@pytest.mark.parametrize("column", ["names", "first"])
def test_a_checkpoint_is_loaded_whatever_the_columns_are_called(column):
    names = Names(("a", "b"), ("x", "y"), column, "what")
    pairs = np.array([0, 1]), np.array([0, 1])
    numbering = Numbering(InteractionLists({"train": pairs, "test": pairs}, names=names))
    numbering.load_state_dict(numbering.state_dict())


def test_a_user_who_took_all_items_is_named_by_its_text():
    names = Names(("ann", "bob"), ("x", "y"))
    pairs = np.array([0, 1, 1]), np.array([0, 0, 1])
    with refused(JobError, "user 'bob' took all 2 items"):
        InteractionLists({"train": pairs, "test": pairs}, names=names, negatives=1)
    with refused(JobError, "user 'bob' took all 2 items"):
        ActionSequences(pairs, names=names)
