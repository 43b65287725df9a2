"""Which runs are made, made again, and left out; with a trainer that only writes a log."""

import io
import sys
from contextlib import contextmanager

import pytest
from report_cases import FP16S, JOB, NONE, fake_results, plan_of
from rich.console import Console
from rich.progress import Progress

from embershard.compare.results import UNLIMITED
from embershard.compare.run import runs
from embershard.compare.run.engine import Engine
from embershard.compare.run.folder import Folder
from embershard.compare.run.netns import Namespaces
from embershard.compare.run.plan import Task
from embershard.compare.run.progress import Show
from embershard.compare.run.run_log import RunProgress
from embershard.compare.run.runs import RunSetup

TRAINER = """\
import json, os, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output") + 1])
tries = folder.parent.parent / "tries.txt"
with tries.open("a") as file:
    file.write(folder.name + "\\n")
if "--ps" in words:
    with (folder.parent.parent / "shards.txt").open("a") as file:
        file.write(words[words.index("--ps") + 1] + "\\n")
if "compression=null" not in words and tries.read_text().split().count(folder.name) <= int(os.environ.get("FAILS", 0)):
    sys.exit("out of luck")
auc = 0.8 + 0.01 * ("embedding.optimizer.lr=0.1" in words)
figures = {"valid": {"auc": auc}, "test": {"auc": auc}}
lines = [
    {"record": "config", "metric": "auc", "split": "valid", "total_samples": 100, "python": "3", "versions": {}},
    {"record": "train", "step": 50, "epoch": 1, "samples": 100, "samples_per_second": 7.0, "wait_share": 0.1},
    {"record": "eval", "samples": 100, "seconds": 2.0, "evaluation_seconds": 1.0, "improved": True, "figures": figures},
    {"record": "result", "metric": "auc", "split": "valid", "figures": figures, "reachable": {}, "steps": 50,
     "samples": 100, "train_seconds": 1.0, "samples_per_second": 6.0, "wait_share": 0.1, "stopped_early": False},
]
with (folder / "log.jsonl").open("a") as file:
    for line in lines:
        file.write(json.dumps(line) + "\\n")
"""


class Bench:
    """A comparison of two arms and two seeds in a folder."""

    def __init__(self, path):
        self.path, self.namespaces, self.data, self.words = path, None, None, ()
        (path / "job.yaml").write_text(JOB)
        self.console = Console(record=True, width=200)

    def run(self, arms="none,fp16s", **fields):
        if self.namespaces is not None:
            fields["link"] = "network namespace"
        plan = plan_of(self.path / "job.yaml", arms, **fields)
        with Folder(self.path / "out", plan.experiment) as folder:
            place = RunSetup(job=self.path / "job.yaml", data=self.data, folder=folder.path, words=self.words)
            engine = Engine(plan, folder, place, Show(self.console), self.namespaces)
            engine.run()
            self.runs = folder.runs
        return engine

    @property
    def tries(self):
        return (self.path / "out" / "tries.txt").read_text().split()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, "-S", str(tmp_path / "trainer.py")))
    return Bench(tmp_path)


def test_every_run_is_made_once_and_what_is_added_makes_only_the_runs_that_are_missing(bench):
    assert bench.run().complete
    assert len(bench.tries) == len(set(bench.tries)) == len(bench.runs) == 4
    assert {run.metrics["auc"] for run in bench.runs.values()} == {0.8}
    assert bench.run().complete
    assert len(bench.tries) == 4
    assert "4 of 4 runs are there already" in bench.console.export_text()
    assert bench.run("fp16s,int8", seeds=(0, 1, 2)).complete
    assert len(bench.tries) == len(set(bench.tries)) == 4 + 4
    added = {(run.arm, run.seed) for run in list(bench.runs.values())[4:]}
    assert added == {("int8", 0), ("int8", 1), ("int8", 2), ("fp16s", 2)}
    assert "2 of 6 runs are there already" in bench.console.export_text()


def test_rates_are_tuned_first_and_once_and_only_better_ones_are_run_again(bench):
    engine = bench.run(multiples=(1.0, 2.0), seeds=(0,))
    assert engine.complete
    assert engine.chosen == {"none": 2.0, "fp16s": 2.0}
    assert [run.kind for run in bench.runs.values()] == ["tune"] * 4 + ["quality"] * 4
    assert [run.multiple for run in bench.runs.values()][4:] == [1.0, 1.0, 2.0, 2.0]
    bench.run(multiples=(1.0, 2.0), seeds=(0, 1))
    assert [run.kind for run in bench.runs.values()] == ["tune"] * 4 + ["quality"] * 8


def test_a_run_names_the_data_that_it_was_made_with(bench):
    """So that its command, which the report shows, makes the same run again."""
    bench.data = bench.path / "files"
    bench.run(seeds=(0,))
    assert [run.words[-2:] for run in bench.runs.values()] == [("--data", str(bench.data))] * 2


def test_a_run_names_the_shards_that_ran_already_and_how_it_reaches_them(bench, stream_shard):
    bench.words = ("--token-file", "a.token")
    bench.run("strategy=ps,local", seeds=(0,), ps=(stream_shard,))
    named = {run.arm: run.words[-4:] for run in bench.runs.values()}
    assert named["strategy=ps"] == ("--ps", stream_shard, *bench.words)
    assert not {"--ps", *bench.words} & {*named["strategy=local"]}
    assert (bench.path / "out" / "shards.txt").read_text().split() == [stream_shard]


class NumberedShards(Namespaces):
    """Namespaces without a network; the shards of each call have an address of their own while they live."""

    worker_prefix = ()

    def __init__(self):
        self.started, self.alive = 0, 0

    def shape(self, bits):
        assert not self.alive

    @contextmanager
    def shards(self, number, imports):
        self.started, self.alive = self.started + 1, self.alive + 1
        yield tuple(f"set{self.started}:{index}" for index in range(number))
        self.alive -= 1


def test_a_run_that_fails_is_made_again_once_with_nothing_of_its_failed_attempt_in_the_shards(bench, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    bench.namespaces = NumberedShards()
    assert bench.run(seeds=(0,)).complete
    assert {(run.arm, run.attempts, run.ok, run.error) for run in bench.runs.values()} == {
        ("none", 1, True, ""), ("fp16s", 2, True, ""),
    }  # fmt: skip
    # none, then fp16s twice
    assert (bench.path / "out" / "shards.txt").read_text().split() == [f"set{i}:0,set{i}:1" for i in (1, 2, 3)]
    assert not bench.namespaces.alive


def test_a_run_that_fails_twice_is_recorded_and_tried_at_the_next_start(bench, monkeypatch):
    monkeypatch.setenv("FAILS", "2")
    assert not bench.run(seeds=(0,)).complete
    (failed,) = (run for run in bench.runs.values() if not run.ok)
    assert (failed.arm, failed.attempts, failed.steps) == ("fp16s", 2, 0)
    assert failed.error == "it ended with exit code 1\nout of luck"
    assert "fp16s, seed 0, unlimited: FAILED twice: out of luck" in bench.console.export_text()
    assert len(bench.tries) == 3
    assert bench.run(seeds=(0,)).complete
    assert len(bench.tries) == 4


def test_a_terminal_sees_which_run_it_is_and_the_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    show = Show(Console(file=io.StringIO(), width=200, force_terminal=True))
    monkeypatch.setattr(Progress, "update", lambda self, row, **fields: seen.append(fields["description"]))
    made = fake_results((NONE, FP16S), links={UNLIMITED: None}, seeds=(0, 1)).runs
    runs = {run.key: run.model_copy(update={"total_seconds": 60.0}) for run in made}
    task = Task(kind="quality", arm="none", seed=7, bandwidth=UNLIMITED, multiple=1.0, words=())
    show.begin([task, task], {}, 3)
    show.begin([task, task], runs, 3)
    show.look(RunProgress(0.5, "epoch 2"))
    show.close()
    assert seen == [
        "4 of 5: none, seed 7, unlimited: starting",
        "4 of 5: none, seed 7, unlimited: starting; 0:02:00 left",
        "4 of 5: none, seed 7, unlimited: epoch 2; 0:01:30 left",
    ]
