import gzip

import numpy as np
import pyarrow as pa
import pytest

from embershard.proto.errors import JobError
from embershard.worker.data import text as delimited
from embershard.worker.data.columns import Columns, hash_texts
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


@pytest.mark.parametrize(
    ("files", "columns", "error"),
    [
        ({"train": TEXT}, Columns(label="click"), r"train\.csv:1: no column 'click' \(there are: label, user, item\)"),
        ({"train": TEXT, "valid": "label,item,user\n1,2,3\n"}, Columns(), r"valid\.csv:1: its columns differ"),
        ({"train": "label,u,u\n1,2,3\n"}, Columns(), r"train\.csv:1: column 'u' occurs twice"),
        ({"train": "label,u\n"}, Columns(), r"train\.csv: no line of data"),
        ({"valid": TEXT}, Columns(), "no train file"),
    ],
)
def test_mistakes_of_headers_and_files_are_named(tmp_path, files, columns, error):
    with pytest.raises(JobError, match=error):
        CtrCsv({split: write(tmp_path / f"{split}.csv", text) for split, text in files.items()}, columns)


def test_frappe(real_data):
    folder = real_data("frappe_x1")
    files = {"train": folder / "train_reconstructed_s2021.csv", "valid": folder / "valid.csv"}
    data = CtrCsv(files, GLOBAL, halve_valid_by="user")
    assert (data.schema.num_ids, len(data.schema.features), data.num_samples("train")) == (5382, 10, 202_027)
    halves = [data.num_samples(split) for split in ("valid", "test")]
    assert sum(halves) == 57_722
    assert min(halves) > 0.48 * 57_722
