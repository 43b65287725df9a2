"""`embershard` on jobs with a reader of their own: trained, or named with file and line; and nothing left behind."""

import json
import re

import pytest

from harness.processes import all_end, descendants, said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

JOB = """\
model: {name: fm}
data: {reader: "my_logs:Logs", blocks: 20}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 64, epochs: 2}
workers: 2
shards: 1
"""
LOGS = """\
import multiprocessing, os, subprocess, time
import numpy as np, embershard as es
BEGIN
class Logs(es.Reader):
    features, num_ids, splits = ("user", "item"), 100, ("valid",)
    begun = 0
    def __init__(self, blocks): self.blocks = blocks
    def read(self, split):
        self.begun += split == "train"
        for number in range(self.blocks):
            ids = np.random.default_rng(number).integers(0, 50, (100, 2)) + [0, 50]
            MIDDLE
            yield ids, None, ids[:, 0] < 25
"""
SLEEP = "subprocess.Popen(['sleep', '1000']); multiprocessing.Process(target=time.sleep, args=(999,)).start()"
STARTS = f"print('hello'); {SLEEP}"


@pytest.fixture
def train(start, tmp_path):
    """Train with this reader."""

    def train(*words, begin="", middle="", **options):
        (tmp_path / "my_logs.py").write_text(LOGS.replace("BEGIN", begin).replace("MIDDLE", middle))
        return start(JOB, *words, **options)

    return train


def test_a_reader_of_a_module_that_prints_and_starts_processes_trains_and_leaves_none(train, tmp_path):
    text = said(train("--set", "data.loader_processes=1", begin=STARTS))
    assert re.search(r"note: .*my_logs\.py:3 prints", text)
    assert re.search(r"note: .*my_logs\.py:3 starts processes .*here 2", text)
    result = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])
    assert (result["samples"], result["figures"]["valid"]["samples"]) == (4000, 2000)
    assert result["figures"]["valid"]["auc"] > 0.8


def test_nothing_that_a_module_started_outlives_a_killed_command(train):
    process = train("--set", "train.epochs=1000000", begin=STARTS)
    assert any("epoch 1 " in line for line in process.stdout)
    everyone = descendants(process.pid)
    assert len(everyone) == 7  # a shard, two workers, and of each worker two that sleep
    process.kill()
    assert all_end(everyone)


def test_a_reader_that_raises_in_the_middle_ends_the_run_with_its_line_and_epoch(train):
    text = said(train("--set", "train.epochs=3", middle="if self.begun == 3: raise OSError('gone')"), code=1)
    assert re.search(r"reader my_logs:Logs \(train, epoch 3, batch 1\) raised OSError: gone \(.*my_logs\.py:12\)", text)
    assert "epoch 2" in text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ({"begin": "1 / 0"}, r"error: module 'my_logs' .*ZeroDivisionError.*my_logs\.py:3"),
        ({"begin": "os._exit(3)"}, r"error: the job's code ended .*exit code 3.*importing my_logs"),
        ({"middle": "ids = ids + 80"}, r"error: reader my_logs:Logs .* gave id 1\d\d .*my_logs\.py:13"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_can_be_seen_is_named_before_any_shard_starts(train, tmp_path, command, code, expected):
    words = ("--arms", "train.prefetch=0,1") if command == "compare" else ()
    text = said(train(*words, command=command, **code), code=1)
    assert re.search(expected, text)
    assert [file for file in tmp_path.rglob("*") if file.name.startswith(("worker-", "said", "log.jsonl"))] == []
