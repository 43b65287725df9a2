import gzip
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from embershard.proto.errors import JobError
from embershard.worker.data import text as delimited
from embershard.worker.data.columns import Columns
from embershard.worker.data.hashing import hash_texts
from embershard.worker.data.readers.adult import Adult
from embershard.worker.data.readers.clicks import ClickStream
from embershard.worker.data.readers.criteo import CriteoTsv, CriteoTsvStream
from embershard.worker.data.readers.ctr_csv import CtrCsv, CtrCsvStream

GLOBAL = Columns(ids="global")
TEXT = "label,user,item\n1,0,5\n0,1,6\n0,2,7\n"


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def only(data, split="train"):
    (batch,) = data.evaluate(split, 0, 1, 1 << 20)
    return batch


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("text", [TEXT, TEXT[:-1], TEXT.replace("\n", "\r\n"), "\ufeff" + TEXT, TEXT + "\n\n"])
def test_global_ids_are_read_as_they_stand(tmp_path, name, text):
    data = CtrCsv({"train": write(tmp_path / name, text)}, GLOBAL)
    assert data.schema.features == ("user", "item")
    assert data.schema.num_ids == 8
    assert data.num_samples("train") == 3
    batch = only(data)
    assert batch.ids.tolist() == [[0, 5], [1, 6], [2, 7]]
    assert batch.labels.tolist() == [1, 0, 0]
    assert batch.dense is None


@pytest.mark.parametrize("reader", [CtrCsv, CtrCsvStream])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, reader):
    with pytest.raises(JobError, match=rf"{tmp_path}: is a folder, and a file is needed"):
        reader({"train": tmp_path})


def test_hashed_ids_differ_between_columns_and_a_missing_value_has_its_own(tmp_path):
    path = write(tmp_path / "a.csv", 'label,a,b\n1,x,x\n0,,"y,z"\n')
    data = CtrCsv({"train": path})
    assert data.schema.num_ids is None
    assert data.schema.table_rows == 2**62
    batch = only(data)
    assert batch.ids[:, 0].tolist() == hash_texts("a", pa.array(["x", ""])).tolist()
    assert batch.ids[:, 1].tolist() == hash_texts("b", pa.array(["x", "y,z"])).tolist()
    assert batch.ids[0, 0] != batch.ids[0, 1]


def test_kinds_of_columns_can_be_chosen(tmp_path):
    path = write(tmp_path / "a.csv", "u|price|click|note|age\n7|1.5|1|hm|\n8|-2|0||3\n")
    columns = Columns(label="click", numeric=("age", "price"), skip=("note",), ids="global", log=True)
    data = CtrCsv({"train": path}, columns, delimiter="|")
    assert data.schema.features == ("u",)
    batch = only(data)
    assert batch.ids.tolist() == [[7], [8]]
    # in file order; log(1 + x), and 0 where missing or negative
    np.testing.assert_allclose(batch.dense.numpy(), [[np.log(2.5), 0], [0, np.log(4)]], rtol=1e-6)
    assert CtrCsv({"train": path}, Columns(label="click", categorical=("u",)), delimiter="|").schema.features == ("u",)


def test_halving_valid_separates_users(tmp_path):
    lines = "".join(f"{i % 2},{i % 50},{50 + i % 7}\n" for i in range(1000))
    path = write(tmp_path / "a.csv", "label,user,item\n" + lines)
    data = CtrCsv({"train": path, "valid": path}, GLOBAL, halve_valid_by="user")
    assert data.splits == ("valid", "test")
    halves = [set(only(data, split).ids[:, 0].tolist()) for split in data.splits]
    assert not halves[0] & halves[1]
    assert halves[0] | halves[1] == set(range(50))
    assert data.num_samples("valid") + data.num_samples("test") == 1000
    with pytest.raises(JobError, match="needs a valid file and no test file"):
        CtrCsv({"train": path}, GLOBAL, halve_valid_by="user")
    with pytest.raises(JobError, match="no categorical column 'who'"):
        CtrCsv({"train": path, "valid": path}, GLOBAL, halve_valid_by="who")


BAD_LINES = {
    "0,1": r"expected 3 fields, got 2 \(cut short\?\)",
    "0,1,2,3": "expected 3 fields, got 4",
    "2,1,2": "column 'label': label '2' is not 0 or 1",
    ",1,2": "column 'label': label '' is not 0 or 1",
    "0,x,2": "column 'user': 'x' is not an integer id >= 0",
    "0,-3,2": "column 'user': '-3' is not an integer id >= 0",
    "0,1.5,2": "column 'user': '1.5' is not an integer id >= 0",
    "0,,2": "column 'user': '' is not an integer id >= 0",
    "0,1,99999999999999999999": "column 'item': '99999999999999999999' is not an integer id >= 0",
}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_reported_with_its_number(tmp_path, monkeypatch, line, name):
    good = "".join(f"1,{i},2\n" for i in range(20))
    path = write(tmp_path / name, f"label,user,item\n{good}\n{line}\n{good}")
    with pytest.raises(JobError, match=rf"a\.csv(\.gz)?:23: {BAD_LINES[line]}"):
        CtrCsv({"train": path}, GLOBAL)
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 16)  # and also where it lies in a later block
    monkeypatch.setattr(delimited.read_tables, "__kwdefaults__", {"skip_lines": 0, "block_bytes": 16})
    with pytest.raises(JobError, match=rf":23: {BAD_LINES[line]}"):
        CtrCsv({"train": path}, GLOBAL)


@pytest.mark.parametrize("reader", [CtrCsv, CtrCsvStream])
@pytest.mark.parametrize(
    "lines",
    [
        '1,a,"b\n0,c,d\n1,e,f\n',  # Arrow would read the rest of the block as one text
        '1,"a,b\n0,c,d\n1,"e,f\n',  # and lose what is between two of them
        '1,a,"b\nc"\n0,d,e\n',
        '1,a,"b\r\n',
        '1,a,"b""\n\n',
    ],
)
def test_a_quote_that_its_line_does_not_close_is_reported(tmp_path, reader, lines):
    path = write(tmp_path / "a.csv", "label,u,v\n0,x,y\n" + lines)
    with pytest.raises(JobError, match=r'a\.csv:3: a field begins with a quote \("\) that its line does not close'):
        list(reader({"train": path}).train(0, 0, 1, 10))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n", "\r\n\r\n"])
def test_quotes_within_a_text_and_around_a_field_are_read(tmp_path, end):
    lines = ['1,"a","b ""c"""', '0,5" pipe,"d,e"', '1,f",""', '0,"g"h,i"']
    path = write(tmp_path / "a.csv", "label,u,v\n" + end.join(["", *lines, ""]))
    batch = only(CtrCsv({"train": path}))
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert batch.ids[:, 0].tolist() == hash_texts("u", pa.array(["a", '5" pipe', 'f"', "gh"])).tolist()
    assert batch.ids[:, 1].tolist() == hash_texts("v", pa.array(['b "c"', "d,e", "", 'i"'])).tolist()


@pytest.mark.parametrize("text", ["nan", "inf", "1e99", "1,5", "12x", "\udcff"])  # 1e99 is none in float32
def test_a_number_that_is_none_and_bytes_that_are_no_text_are_a_bad_line(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(f'label,u,n\n1,1,3.5\n1,1,"{text}"\n'.encode("utf8", "surrogateescape"))
    with pytest.raises(JobError, match=r"a\.csv:" if text == "1e99" else r"a\.csv:3: "):
        CtrCsv({"train": path}, Columns(numeric=("n",)))


def test_columns_of_each_file_are_found_by_their_names(tmp_path):
    train = write(tmp_path / "train.csv", TEXT)
    valid = write(tmp_path / "valid.csv", "note,item,label,user\nx,5,1,0\n,6,0,1\n,7,0,2\n")
    for reader in (CtrCsv, partial(CtrCsvStream, num_ids=8)):
        data = reader({"train": train, "valid": valid}, GLOBAL)
        one, other = only(data), only(data, "valid")
        assert one.ids.tolist() == other.ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()


@pytest.mark.parametrize(
    ("files", "columns", "error"),
    [
        ({"train": TEXT}, Columns(label="click"), r"train\.csv:1: no column 'click' \(there are: label, user, item\)"),
        ({"train": TEXT, "valid": "label,item\n1,2\n"}, Columns(), r"valid\.csv:1: no column 'user', which is read"),
        ({"train": "label,u,u\n1,2,3\n"}, Columns(), r"train\.csv:1: column 'u' occurs twice"),
        ({"train": "label,u\n"}, Columns(), r"train\.csv: no line of data"),
        ({"valid": TEXT}, Columns(), "no train file"),
    ],
)
def test_mistakes_of_headers_and_files_are_named(tmp_path, files, columns, error):
    with pytest.raises(JobError, match=error):
        CtrCsv({split: write(tmp_path / f"{split}.csv", text) for split, text in files.items()}, columns)


def test_arguments_without_sense_are_refused(tmp_path):
    path = write(tmp_path / "a.csv", TEXT)
    for make in (
        lambda: Columns(numeric=("u",), categorical=("u",)),
        lambda: ClickStream(samples=0),
        lambda: ClickStream().evaluate("all", 0, 1, 1),
        lambda: CriteoTsv({"train": [path], "test": []}),
        lambda: CtrCsvStream({"train": path}, shuffle_rows=0),
        lambda: CtrCsvStream({"train": path}).evaluate("test", 0, 1, 1),
    ):
        with pytest.raises((ValueError, JobError), match=r"twice|at least 1|no split|no test file"):
            make()


def test_frappe(real_data):
    folder = real_data("frappe_x1")
    files = {"train": folder / "train_reconstructed_s2021.csv", "valid": folder / "valid.csv"}
    data = CtrCsv(files, GLOBAL, halve_valid_by="user")
    assert (data.schema.num_ids, len(data.schema.features), data.num_samples("train")) == (5382, 10, 202_027)
    halves = [data.num_samples(split) for split in ("valid", "test")]
    assert sum(halves) == 57_722
    assert min(halves) > 0.48 * 57_722


NUMBERS = ["1", "-2", "", "65535", "0", "1", "1", "1", "1", "1", "1", "1", "9"]


def line(label, numbers, ids):
    return "\t".join([label, *numbers, *ids]) + "\n"


GOOD = line("0", NUMBERS, ["68fd1e64"] * 26) + line("1", NUMBERS, [""] * 26)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize("reader", [CriteoTsv, CriteoTsvStream])
def test_missing_values_logs_and_hashes(tmp_path, name, reader):
    path = tmp_path / name
    path.write_bytes(gzip.compress(GOOD.encode()) if name.endswith("gz") else GOOD.encode())
    data = reader({"train": [path], "test": [path, path]})
    (batch,) = data.evaluate("train", 0, 1, 10)
    assert batch.labels.tolist() == [0, 1]
    wanted = np.log1p([1, 0, 0, 65535, 0, 1, 1, 1, 1, 1, 1, 1, 9])  # -2 and missing count as 0
    np.testing.assert_allclose(batch.dense.numpy(), [wanted, wanted], rtol=1e-6)
    for c in range(26):
        assert batch.ids[:, c].tolist() == hash_texts(f"C{c + 1}", pa.array(["68fd1e64", ""])).tolist()
    assert len(batch.ids.unique()) == 52
    assert data.schema.num_ids is None
    assert sum(len(batch) for batch in data.evaluate("test", 0, 1, 3)) == 4


@pytest.mark.parametrize("reader", [CriteoTsv, CriteoTsvStream])
@pytest.mark.parametrize("text", [line("1", NUMBERS, ["x"] * 25), line("1", ["1e", *NUMBERS[1:]], ["x"] * 26)])
def test_a_bad_line_of_any_file_is_named(tmp_path, reader, text):
    (tmp_path / "a.tsv").write_text(GOOD)
    (tmp_path / "b.tsv").write_text(GOOD + text)
    with pytest.raises(JobError, match=r"b\.tsv:3: "):
        reader({"train": [tmp_path / "a.tsv"], "valid": [tmp_path / "a.tsv", tmp_path / "b.tsv"]})


def test_real_rows_have_the_measured_ids(real_data):
    path = real_data("criteo/train_10k.tsv")
    (batch,) = CriteoTsv({"train": [path]}).evaluate("train", 0, 1, 10_000)
    assert [len(batch.ids[:, c].unique()) for c in (0, 2, 25)] == [175, 5521, 1939]  # of kaggle_skew.json
    assert batch.labels.mean() == pytest.approx(0.2182)
    streamed = [batch for rank in range(2) for batch in CriteoTsvStream({"train": [path]}).train(0, rank, 2, 512)]
    assert sorted(ids.tolist() for part in streamed for ids in part.ids) == sorted(ids.tolist() for ids in batch.ids)


def person(country, label, age=39):
    middle = "State-gov, 77516, Bachelors, 13, Divorced, Sales, Wife, White, Male, 2174, 0, 40"
    return f"{age}, {middle}, {country}, {label}\n"


TRAIN = person("Cuba", "<=50K", 30) + person("?", ">50K", 50) + "\n"
TEST = "|1x3 Cross validator\n" + person("Chad", ">50K.", 60) + person("Cuba", "<=50K.", 30) + "\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "adult.data").write_text(TRAIN)
    (tmp_path / "adult.test").write_text(TEST)
    return tmp_path / "adult.data", tmp_path / "adult.test"


def test_values_are_numbered_by_the_train_file(files):
    data = Adult(*files)
    # seven features of one value and one spare id each, then the two countries and their spare
    assert data.schema.num_ids == 7 * 2 + 3
    assert only(data, "train").ids.tolist() == [[0, 2, 4, 6, 8, 10, 12, 15], [0, 2, 4, 6, 8, 10, 12, 14]]
    assert only(data, "test").ids[:, 7].tolist() == [16, 15]
    assert only(data, "train").labels.tolist() == [0, 1]
    assert only(data, "test").labels.tolist() == [1, 0]
    assert only(data, "train").dense.tolist() == [[30, 13, 2174, 0, 40], [50, 13, 2174, 0, 40]]


def test_numbers_are_standardised_by_the_train_file(files):
    data = Adult(*files, standardise=True)
    assert only(data, "train").dense[:, 0].tolist() == [-1, 1]
    assert only(data, "test").dense[:, 0].tolist() == [2, -1]
    assert (only(data, "train").dense[:, 1:] == 0).all()


def test_a_first_line_that_is_a_sample_is_kept(files):
    files[1].write_text(TEST.partition("\n")[2])
    assert only(Adult(*files), "test").labels.tolist() == [1, 0]
    two = Adult(*files, labels=("income", "never_married"), skip=("marital_status", "relationship"))
    assert two.schema.labels == ("income", "never_married")
    assert len(two.schema.features) == 6
    assert only(two, "test").labels[:, 0].tolist() == [1, 0]
    assert set(only(two).labels[:, 1].tolist()) <= {0.0, 1.0}


def test_a_bad_line_is_named(files):
    with files[0].open("a") as file:
        file.write(person("Cuba", "50K"))
    with pytest.raises(JobError, match=r"adult\.data:4: column 'income': label ' 50K' is not  <=50K or"):
        Adult(*files)


def test_the_real_files(real_data):
    folder = real_data("adult")
    data = Adult(folder / "adult.data", folder / "adult.test")
    assert (data.num_samples("train"), data.num_samples("test")) == (32_561, 16_281)
    assert data.schema.num_ids == 102 + 8
    assert next(data.train(0, 0, 1, 128)).dense[0].tolist() == [39, 13, 2174, 0, 40]  # in file order, as PERSIA reads
    assert only(data, "test").labels.mean() == pytest.approx(0.2362, abs=1e-4)


def test_a_file_that_grows_while_workers_share_it_is_refused(tmp_path):
    lines = "label,user\n" + "".join(f"{row % 2},{row}\n" for row in range(400))
    path = write(tmp_path / "a.csv", lines)
    data = CtrCsvStream({"train": path})
    assert sum(len(batch) for rank in range(4) for batch in data.evaluate("train", rank, 4, 64)) == 400
    next(data.train(0, 0, 4, 64))
    write(path, lines + "1,7\n" * 40)
    with pytest.raises(JobError, match=r"a\.csv: has 2"):
        next(data.train(0, 1, 4, 64))
    assert sum(len(batch) for batch in data.train(1, 0, 1, 64)) == 440  # one worker reads what is there
