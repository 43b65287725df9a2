"""A job of two to three workers, whose third one comes since it pays, and leaves since they come to wait."""

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.eventually import PATIENCE, eventually

SAMPLES = 40_000
JOB = f"""\
model: {{name: fm}}
data: {{reader: "my_logs:Logs", blocks: {SAMPLES // 100}, splits: 100, loader_processes: 0}}
embedding: {{dim: 4, optimizer: {{name: adagrad, lr: 0.1}}}}
train: {{batch_size: 100, epochs: 1}}
network: {{bandwidth: 2mbit}}
shards: 1
"""
# its samples cost time until there is a file `quick`: then it is the link to the shards that workers wait for
LOGS = """\
import time
from pathlib import Path
import numpy as np, embershard as es
class Logs(es.Reader):
    features, num_ids, splits, shuffle_rows = ("user", "item"), 100, ("valid",), 0
    def __init__(self, blocks): self.blocks = {"train": blocks, "valid": 20}
    def read(self, split): return self.read_share(split, 0, 1)
    def read_share(self, split, rank, world_size):
        for number in range(rank, self.blocks[split], world_size):
            if split == "train" and not Path("quick").exists():
                time.sleep(0.2)
            ids = np.random.default_rng(number).integers(0, 50, (100, 2)) + [0, 50]
            yield ids, None, ids[:, 0] < 25
"""
COMMAND = "import embershard.cli.scaling as s; s.WINDOW_SECONDS = 2; from embershard.cli import main; main()"


class GrowingJob:
    """What such a job has printed and written in its folder, once it has ended."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        (folder / "job.yaml").write_text(JOB)
        (folder / "my_logs.py").write_text(LOGS)
        said, third = folder / "said", folder / "out" / "workers" / "2.json"
        command = [sys.executable, "-c", COMMAND, "train", "job.yaml", "--output", "out", "--workers", "2-3", *words]
        with said.open("w") as file:
            process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env={**os.environ, **environment})
        try:
            assert eventually(lambda: process.poll() is not None or third.exists()), said.read_text()
            (folder / "quick").touch()
            assert process.wait(PATIENCE) == 0, said.read_text()
        finally:
            process.terminate()
            process.wait()
        self.said = said.read_text()
        records = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
        self.changes = [(one["before"], one["workers"]) for one in records if one["record"] == "workers"]
        self.result = records[-1]
