"""What `embershard train` does with the training data before its workers start."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq

from embershard.cli.train import _preprocessing
from embershard.worker.job.load import load_job

JOB = """
data: {reader: tabular, train: a.parquet, split: {by: random, valid: 0.2}}
features: {user: {}}
model: {name: fm}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {epochs: 1, batch_size: 32}
"""


def test_a_resumed_run_is_warned_of_a_file_that_has_other_rows_than_before_its_checkpoint(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(JOB)

    def write(rows):
        pq.write_table(
            pa.table({"user": range(rows), "label": [row % 2 for row in range(rows)]}), tmp_path / "a.parquet"
        )

    write(1000)
    job = load_job(tmp_path / "job.yaml")
    data = {"fitted": job.data.tabular(tmp_path).fit(0)}
    checkpoint = SimpleNamespace(manifest=SimpleNamespace(job={"data": data}))
    _preprocessing(job, tmp_path, tmp_path, checkpoint)
    assert capsys.readouterr().err == ""
    write(1100)
    _preprocessing(job, tmp_path, tmp_path, checkpoint)
    assert "data.train has 1,100 rows, and had 1,000 before the checkpoint" in capsys.readouterr().err
