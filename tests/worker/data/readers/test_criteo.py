import gzip

import numpy as np
import pyarrow as pa
import pytest

from embershard.proto.errors import JobError
from embershard.worker.data.columns import hash_texts
from embershard.worker.data.readers.criteo import CriteoTsv, CriteoTsvStream

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
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (line("1", NUMBERS, ["x"] * 25), r"b\.tsv:3: expected 40 fields, got 39"),
        (line("1", ["1e", *NUMBERS[1:]], ["x"] * 26), r"b\.tsv:3: column 'I1': '1e' is not a finite number"),
    ],
)
def test_a_bad_line_of_any_file_is_named(tmp_path, reader, text, error):
    (tmp_path / "a.tsv").write_text(GOOD)
    (tmp_path / "b.tsv").write_text(GOOD + text)
    with pytest.raises(JobError, match=error):
        reader({"train": [tmp_path / "a.tsv"], "valid": [tmp_path / "a.tsv", tmp_path / "b.tsv"]})


def test_real_rows_have_the_measured_ids(real_data):
    path = real_data("criteo/train_10k.tsv")
    (batch,) = CriteoTsv({"train": [path]}).evaluate("train", 0, 1, 10_000)
    assert [len(batch.ids[:, c].unique()) for c in (0, 2, 25)] == [175, 5521, 1939]  # of kaggle_skew.json
    assert batch.labels.mean() == pytest.approx(0.2182)
    streamed = [batch for rank in range(2) for batch in CriteoTsvStream({"train": [path]}).train(0, rank, 2, 512)]
    assert sorted(ids.tolist() for part in streamed for ids in part.ids) == sorted(ids.tolist() for ids in batch.ids)
