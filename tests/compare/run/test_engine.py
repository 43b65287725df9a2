"""Which runs are made, made again, and left out; with a trainer that only writes a log."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from embershard.compare.results import UNLIMITED, Bandwidth
from embershard.compare.run import runs
from embershard.compare.run.arms import find_arms
from embershard.compare.run.engine import Engine
from embershard.compare.run.folder import Folder
from embershard.compare.run.netns import Namespaces
from embershard.compare.run.plan import ComparisonPlan, Experiment, Task
from embershard.compare.run.progress import Show
from embershard.compare.run.run_log import RunProgress
from embershard.compare.run.runs import RunSetup
from embershard.worker.job.load import load_job

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
"""
TRAINER = """\
import json, os, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output") + 1])
tries = folder.parent.parent / "tries.txt"
with tries.open("a") as file:
    file.write(folder.name + "\\n")
times = tries.read_text().split().count(folder.name)
fails = int(os.environ.get("FAILS", "0"))
if "--ps" in words:
    with (folder.parent.parent / "shards.txt").open("a") as file:
        file.write(words[words.index("--ps") + 1] + "\\n")
if "compression=null" not in words and times <= fails:
    sys.exit("out of luck")
auc = 0.8 + 0.01 * ("embedding.optimizer.lr=0.1" in words)
base = {"time": 0.0}
lines = [
    {"record": "config", "metric": "auc", "split": "valid", "total_samples": 100, "python": "3", "versions": {}},
    {"record": "train", "step": 50, "epoch": 1, "samples": 100, "samples_per_second": 7.0, "wait_share": 0.1},
    {"record": "eval", "samples": 100, "seconds": 2.0, "evaluation_seconds": 1.0, "improved": True,
     "figures": {"valid": {"auc": auc}, "test": {"auc": auc}}},
    {"record": "result", "metric": "auc", "split": "valid", "figures": {"valid": {"auc": auc}, "test": {"auc": auc}},
     "reachable": {}, "steps": 50, "samples": 100, "train_seconds": 1.0, "samples_per_second": 6.0,
     "wait_share": 0.1, "stopped_early": False},
]
with (folder / "log.jsonl").open("a") as file:
    for line in lines:
        file.write(json.dumps(line) + "\\n")
"""


class Bench:
    """A comparison of two arms and two seeds in a folder."""

    def __init__(self, path: Path, multiples: tuple[float, ...] = (1.0,), namespaces: Namespaces | None = None) -> None:
        self.path, self._multiples, self._namespaces = path, multiples, namespaces
        self._job = path / "job.yaml"
        self._job.write_text(JOB)
        self.console = Console(record=True, width=200)

    def run(self, words: str = "none,fp16s", seeds: tuple[int, ...] = (0, 1)) -> Engine:
        arms = find_arms([words], self._job, (), None)
        experiment = Experiment(
            job=load_job(self._job).model_dump(mode="json"),
            overrides=(),
            imports=(),
            arms=tuple((arm.label, arm.settings) for arm, _ in arms.values()),
            bandwidths=(UNLIMITED,),
            seeds=seeds,
            multiples=self._multiples,
            speed_steps=50,
            link="token bucket" if self._namespaces is None else "network namespace",
        )
        plan = ComparisonPlan(experiment, arms, (Bandwidth(label=UNLIMITED, bits_per_second=None),))
        with Folder(self.path / "out", experiment) as folder:
            place = RunSetup(job=self._job, data=None, folder=folder.path)
            engine = Engine(plan, folder, place, Show(self.console), self._namespaces)
            engine.run()
            self.runs = folder.runs
        return engine

    @property
    def tries(self) -> Sequence[str]:
        return (self.path / "out" / "tries.txt").read_text().split()


class NumberedShards(Namespaces):
    """Namespaces without a network; the shards of each call have an address of their own while they live."""

    worker_prefix = ()

    def __init__(self) -> None:
        self.started, self.alive = 0, 0

    def shape(self, bits: float | None) -> None:
        assert not self.alive

    @contextmanager
    def shards(self, number: int, imports: Sequence[str]) -> Iterator[tuple[str, ...]]:
        self.started, self.alive = self.started + 1, self.alive + 1
        yield tuple(f"set{self.started}:{index}" for index in range(number))
        self.alive -= 1


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, str(tmp_path / "trainer.py")))


@pytest.mark.usefixtures("trainer")
def test_every_run_is_made_once_and_a_second_start_makes_none(tmp_path):
    bench = Bench(tmp_path)
    assert bench.run().complete
    assert len(bench.tries) == len(set(bench.tries)) == len(bench.runs) == 4
    assert {run.metrics["auc"] for run in bench.runs.values()} == {0.8}
    assert bench.run().complete
    assert len(bench.tries) == 4
    assert "4 of 4 runs are there already" in bench.console.export_text()


@pytest.mark.usefixtures("trainer")
def test_seeds_and_arms_that_are_added_make_only_the_runs_that_are_missing(tmp_path):
    bench = Bench(tmp_path)
    bench.run()
    assert bench.run("fp16s,int8", (0, 1, 2)).complete
    assert len(bench.tries) == len(set(bench.tries)) == 4 + 4
    assert {(run.arm, run.seed) for run in list(bench.runs.values())[4:]} == {
        ("int8", 0), ("int8", 1), ("int8", 2), ("fp16s", 2)
    }  # fmt: skip
    assert "2 of 6 runs are there already" in bench.console.export_text()
    assert bench.run().complete
    assert len(bench.tries) == 8


@pytest.mark.usefixtures("trainer")
def test_rates_are_not_looked_for_again_when_seeds_are_added(tmp_path):
    bench = Bench(tmp_path, multiples=(1.0, 2.0))
    bench.run()
    bench.run(seeds=(0, 1, 2))
    assert [run.kind for run in bench.runs.values()] == ["tune"] * 4 + ["quality"] * 12


@pytest.mark.usefixtures("trainer")
def test_a_run_that_fails_is_made_again_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    bench = Bench(tmp_path)
    assert bench.run().complete
    assert {run.attempts for run in bench.runs.values() if run.arm == "fp16s"} == {2}
    assert all(run.ok and not run.error for run in bench.runs.values())


@pytest.mark.usefixtures("trainer")
def test_a_run_that_is_made_again_finds_nothing_of_its_failed_attempt_in_the_shards(tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    namespaces = NumberedShards()
    assert Bench(tmp_path, namespaces=namespaces).run(seeds=(0,)).complete
    # none, then fp16s twice
    assert (tmp_path / "out" / "shards.txt").read_text().split() == [f"set{i}:0,set{i}:1" for i in (1, 2, 3)]
    assert not namespaces.alive


@pytest.mark.usefixtures("trainer")
def test_a_run_that_fails_twice_is_recorded_and_tried_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "2")
    bench = Bench(tmp_path)
    assert not bench.run().complete
    failed = [run for run in bench.runs.values() if not run.ok]
    assert [(run.arm, run.attempts, run.steps) for run in failed] == [("fp16s", 2, 0)] * 2
    assert failed[0].error == "it ended with exit code 1\nout of luck"
    assert "fp16s, seed 0, unlimited: FAILED twice: out of luck" in bench.console.export_text()
    assert len(bench.tries) == 6
    assert bench.run().complete
    assert len(bench.tries) == 8


@pytest.mark.usefixtures("trainer")
def test_rates_are_tuned_first_and_only_better_ones_are_run_again(tmp_path):
    bench = Bench(tmp_path, multiples=(1.0, 2.0))
    engine = bench.run()
    assert engine.complete
    assert engine.chosen == {"none": 2.0, "fp16s": 2.0}
    kinds = [run.kind for run in bench.runs.values()]
    assert kinds == ["tune"] * 4 + ["quality"] * 8
    assert {run.multiple for run in list(bench.runs.values())[-4:]} == {2.0}


@pytest.mark.usefixtures("trainer")
def test_a_terminal_sees_which_run_it_is_and_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    bench = Bench(tmp_path)
    bench.console = Console(record=True, width=200, force_terminal=True)
    bench.run()
    seen: list[str] = []
    show = Show(bench.console)
    monkeypatch.setattr(Progress, "update", lambda self, row, **fields: seen.append(fields["description"]))
    runs = {key: run.model_copy(update={"total_seconds": 60.0}) for key, run in bench.runs.items()}
    task = Task(kind="quality", arm="none", seed=7, bandwidth=UNLIMITED, multiple=1.0, words=())
    show.begin([task, task], runs, 3)
    show.look(RunProgress(0.5, "epoch 2"))
    show.close()
    assert seen == [
        "4 of 5: none, seed 7, unlimited: starting; 0:02:00 left",
        "4 of 5: none, seed 7, unlimited: epoch 2; 0:01:30 left",
    ]
