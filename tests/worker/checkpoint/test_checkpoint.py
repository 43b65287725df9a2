"""Checkpoints: what a folder holds, what a resumed run does with it, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from embershard.local_shards import InProcessShards, local
from embershard.proto.errors import JobError, SnapshotNotWritten
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.checkpoint import (
    MANIFEST,
    SNAPSHOT,
    BadCheckpoint,
    Checkpoint,
    CheckpointFolder,
    CheckpointFolderInUse,
    CheckpointNotWritten,
    OtherJob,
    find_checkpoint,
)
from embershard.worker.checkpoint.snapshots import restore_snapshot
from embershard.worker.checkpoint.tensors import is_stateful, pack, unpack
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.client.worker_group import ShardGroup, WorkerGroup
from embershard.worker.data.batch import Batch, RowsDataset, Samples, Schema
from embershard.worker.job.job import Job
from embershard.worker.job.training import CheckpointSection
from embershard.worker.models.loss import InBatchSoftmax, loss_of
from embershard.worker.reporting.records import RunResult
from embershard.worker.session.session import Session
from embershard.worker.trained.reading import trained as put_together
from embershard.worker.training.saver import RandomNumbers, Saver
from embershard.worker.training.trainer import Trainer
from harness.raises import raises

F, PER_FIELD, D = 3, 20, 2
STOPPING = {"epochs": 9, "lr_schedule": {"name": "plateau"}, "early_stop": {"patience": 2}}
SWITCHED = {  # before and after step 28
    "push": {"at": {0: "none", 20: "topk:0.2+int8", 40: "int8"}},
    "dense": {"push": {"at": {0: "powersgd:1", 35: "dgc:0.1"}}, "pull": "delta"},
    "momentum": 0.9,
}
MakeSession = Callable[..., Session]


@pytest.fixture
def make_session():
    """Sessions with n fresh shards in this process, which may be called from several threads."""
    return lambda n: local(n)


def rows(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PER_FIELD, (count, F)) + np.arange(F) * PER_FIELD
    effects = np.random.default_rng(0).normal(0, 2, F * PER_FIELD)
    labels = (rng.random(count) < 1 / (1 + np.exp(-effects[ids].sum(1)))).astype(np.float32)
    return Samples(ids, rng.random((count, D), np.float32), labels)


def dataset(seed: int = 3) -> RowsDataset:
    parts = {"train": rows(700, 1), "valid": rows(200, 2)}
    return RowsDataset(Schema(tuple("abc"), D, F * PER_FIELD), parts, where="made up", seed=seed)


def job(folder: Path, **sections: object) -> Job:
    train = {"batch_size": 50, "seed": 5, "linear": "torch", **sections.pop("train", {"epochs": 4})}  # type: ignore[dict-item]
    return Job.model_validate(
        {
            "model": {"name": "deepfm", "hidden": [8], "batch_norm": True, "dropout": 0.3},
            "data": {"reader": "ctr_csv", "train": "t.csv"},
            "embedding": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.01}},
            "checkpoint": {"folder": str(folder), "keep": 100},
            "train": train,
            **sections,
        }
    )


@dataclasses.dataclass
class Weights:
    """What a run ends with."""

    rows: torch.Tensor
    dense: dict[str, torch.Tensor]
    result: RunResult

    def same(self, other: Weights) -> bool:
        assert self.dense.keys() == other.dense.keys()
        dense = all(torch.equal(value, other.dense[name]) for name, value in self.dense.items())
        return dense and torch.equal(self.rows, other.rows)


def train(
    job: Job, session: Session | None, resume: Checkpoint | None = None, data: RowsDataset | None = None
) -> Weights:
    if resume is not None and session is not None:
        restore_snapshot(session.client, resume.url, SNAPSHOT)
    trainer = Trainer(job, dataset(), session, WorkerGroup(), resume=resume)
    result = trainer.run()
    if session is not None:
        session.pull([], session.dense_weights)
        table = next(table for table in session.tables if table.spec.name == "embedding")
        found = table.pull(torch.arange(F * PER_FIELD))
    else:
        found = trainer.model.get_parameter("embedding.weight").detach().clone()
    return Weights(found, {name: value.clone() for name, value in trainer.model.state_dict().items()}, result)


def checkpoint(folder: Path, step: int) -> Checkpoint:
    return Checkpoint.open(str(folder / f"step-{step:09d}"))


@pytest.mark.parametrize(
    ("sections", "from_step"),
    [
        ({"train": {"epochs": 4}}, 28),
        ({"train": {"steps": 50}, "evaluate": {"every": 20}, "checkpoint": {"every": 15}}, 30),
        ({"train": STOPPING, "model": {"name": "fm"}, "embedding": {"optimizer": {"name": "sgd", "lr": 0.0}}}, 28),
        ({"train": {"epochs": 3, "average": {"decay": 0.9}, "clip_norm": 0.1, "prefetch": None}}, 14),
        ({"strategy": "hybrid"}, 28),
        ({"train": {"steps": 50, "staleness": "local(7)"}, "evaluate": {"every": 30}, "checkpoint": {"every": 20}}, 20),
        (
            {
                "train": {"steps": 50, "prefetch": None},
                "evaluate": {"every": 50},
                "checkpoint": {"every": 15},
                "embedding": {"optimizer": {"name": "adam", "lr": 0.01}, "cache": {"rows": 50, "staleness": 3}},
            },
            30,
        ),
        ({"compression": SWITCHED, "dense": {"optimizer": {"name": "sgd", "lr": 0.01}}}, 28),
    ],
    ids=[
        "epochs",
        "in the middle of an epoch",
        "early stop",
        "average",
        "dense weights in the worker",
        "local",
        "cache",
        "codecs by a schedule",
    ],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(make_session, tmp_path, sections, from_step):
    folder = {"folder": str(tmp_path), "keep": 100, **sections.get("checkpoint", {})}
    trained = job(tmp_path, **{**sections, "checkpoint": folder})
    sessions = [Session(make_session(2).client, local_steps=trained.train.local_steps) for _ in range(2)]
    whole = train(trained, sessions[0])
    found = checkpoint(tmp_path, from_step)
    torch.manual_seed(99)
    resumed = train(trained, sessions[1], found)
    assert resumed.same(whole)
    assert resumed.result.figures == whole.result.figures
    assert (resumed.result.steps, resumed.result.samples) == (whole.result.steps, whole.result.samples)
    assert resumed.result.best_step == whole.result.best_step


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [({"epochs": 2}, {"steps": 8}, [8, 6, 6]), ({"steps": 5}, {"epochs": 4}, [8, 5, 5])],
    ids=["epochs and steps", "steps and epochs"],
)
def test_workers_whose_epochs_differ_in_length_go_on_in_the_same_segments(tmp_path, before, after, steps):
    shards = InProcessShards()

    def work(rank, run, resume=None, **train):
        every = {"every": 3} if "steps" in train else {}
        batches = {"batch_size": 233}  # of shares of 234, 233 and 233 samples: 2, 1 and 1
        trained = job(tmp_path, model={"name": "fm"}, train={**batches, **train}, evaluate=every)
        client = Client(shards.transports(), worker=rank)
        lease = wait_timeout = timedelta(seconds=60)
        client.join(Terms(workers=3, staleness=None, lease=lease, wait_timeout=wait_timeout, run=run))
        group = ShardGroup(client, rank, 3)
        result = Trainer(trained, dataset(), Session(client), group, resume=resume).run()
        client.close()
        return result.steps

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: work(rank, 1, **before), range(3)))
        found = find_checkpoint(str(tmp_path), job(tmp_path, model={"name": "fm"}, train={"batch_size": 233, **after}))
        assert list(pool.map(lambda rank: work(rank, 2, found, **after), range(3))) == steps


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(name, marks=pytest.mark.long) for name in ("adagrad", "sgd"))]
)
def test_a_run_without_shards_resumes_to_the_same_bits(tmp_path, optimizer):
    trained = job(
        tmp_path,
        strategy="local",
        embedding={"dim": 4, "optimizer": {"name": optimizer, "lr": 0.05}},
        dense={"optimizer": {"name": "adam", "lr": 0.01}},
    )
    whole = train(trained, None)
    found = checkpoint(tmp_path, 28)
    assert not found.manifest.snapshot
    assert train(trained, None, found).same(whole)


def test_a_run_that_was_over_is_told_as_it_was(tmp_path):
    standing = {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.0}}
    schedule = {"epochs": 4, "lr_schedule": {"name": "plateau", "patience": 2}}
    trained = job(tmp_path, strategy="local", model={"name": "fm"}, embedding=standing, train=schedule)
    whole = train(trained, None).result
    trainer = Trainer(trained, dataset(), None, WorkerGroup(), resume=checkpoint(tmp_path, 56))
    found = trainer._rates.schedule
    assert (found.plateaus, found.worse_in_a_row, trainer._best.worse_in_a_row) == (1, 1, 3)
    again = trainer.run()
    for name in ("epochs", "steps", "samples", "figures", "best_epoch", "best_step"):
        assert getattr(again, name) == getattr(whole, name)


def test_another_number_of_shards_resumes_to_rounding_and_more_steps(make_session, tmp_path):
    whole = train(job(tmp_path / "whole", train={"epochs": 4}), make_session(1))
    train(job(tmp_path / "short", train={"epochs": 2}), make_session(1))
    longer = job(tmp_path / "short", train={"epochs": 4})
    resumed = train(longer, make_session(3), checkpoint(tmp_path / "short", 28))
    torch.testing.assert_close(resumed.rows, whole.rows, rtol=0, atol=1e-6)
    assert resumed.result.steps == 56


def test_what_an_objective_has_learnt_is_kept(tmp_path):
    batch = Batch(torch.tensor([[0, 30, 31], [1, 32, 33]]), None, torch.ones(2))
    model = job(tmp_path, model={"name": "two_tower"}).model.build(Schema(("user", "item"), 0, 60), 4, None)
    one, other = loss_of(model), loss_of(model)
    assert isinstance(one, InBatchSoftmax)
    assert isinstance(other, InBatchSoftmax)
    for _ in range(3):
        one(model, batch)
    other.load_state_dict(unpack(pack(one.state_dict())))
    assert torch.equal(one(model, batch), other(model, batch))


def test_the_newest_checkpoints_are_kept_and_latest_is_the_last_of_them(tmp_path):
    trained = job(tmp_path, strategy="local", checkpoint={"folder": str(tmp_path), "keep": 2})
    train(trained, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000042", "step-000000056"]
    assert find_checkpoint("latest", trained).manifest.step == 56
    assert find_checkpoint(str(tmp_path / "step-000000042"), trained).manifest.step == 42


def test_a_run_that_stops_early_ends_with_a_checkpoint(tmp_path):
    standing = {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.0}}
    kept = {"folder": str(tmp_path), "every": 9}
    trained = job(tmp_path, strategy="local", model={"name": "fm"}, embedding=standing, train=STOPPING, checkpoint=kept)
    assert train(trained, None).result.steps == 42
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000042"]


class Second(WorkerGroup):
    """The second of two workers; the first one says whether it failed."""

    def __init__(self, failed: bool) -> None:
        super().__init__(1, 2)
        self.failed = failed

    def gather(self, values: Any) -> list[Any]:
        return []

    def decide(self, *flags: bool) -> tuple[bool, ...]:
        return (self.failed,)


def test_a_worker_that_is_not_the_first_writes_nothing_and_hears_of_errors(tmp_path):
    parts: dict[str, Any] = {"shared": {}, "own": {"random": RandomNumbers(torch.device("cpu"))}, "client": None}
    Saver(job(tmp_path), Second(failed=False), **parts).save(14, wait=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointNotWritten, match="the first worker could not; see its log"):
        Saver(job(tmp_path), Second(failed=True), **parts).save(14, wait=True)


class Part:
    """A part of a run, and what it was given; a compressor, too."""

    def __init__(self) -> None:
        self.loaded: list[object] = []
        self.held: list[object] = []

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.loaded.append(state["of"])

    def hold(self, state: dict[str, object]) -> None:
        self.held.append(state["of"])


@pytest.mark.parametrize(
    ("rank", "world_size", "own", "random_numbers", "compression", "held"),
    [(0, 2, 0, [0], [0], [2, 4]), (1, 2, 1, [1], [1], [3]), (5, 6, 0, [], [], [])],
    ids=["first", "second", "new"],
)
def test_of_fewer_or_more_workers_each_has_its_own_state_and_what_others_held(
    tmp_path, rank, world_size, own, random_numbers, compression, held
):
    states = {
        f"worker-{worker}": pack({name: {"of": worker} for name in ("step", "random", "compression")})
        for worker in range(5)
    }
    folder = CheckpointFolder(CheckpointSection(folder=str(tmp_path)))
    states["shared"] = pack({})
    url = folder.begin(states, job=job(tmp_path), step=3, world_size=5, output=None, shards=None).wait()
    step, numbers, rounds, compressor = Part(), Part(), Part(), Part()
    saver = Saver(
        job(tmp_path),
        WorkerGroup(rank, world_size),
        shared={},
        own={"step": step, "random": numbers, "local_steps": rounds},
        client=SimpleNamespace(compressor=compressor),  # type: ignore[arg-type]
    )
    assert saver.restore(Checkpoint.open(url)) is (rank < 5)
    assert (step.loaded, numbers.loaded) == ([own], random_numbers)
    assert not rounds.loaded  # what the job has since, and had not then
    assert (compressor.loaded, compressor.held) == (compression, held)


@pytest.mark.parametrize(("rank", "skipped"), [(0, 3), (1, 0)])
def test_a_schedule_goes_on_at_the_same_sample_with_another_number_of_workers(tmp_path, rank, skipped):
    schedule = {"epochs": 4, "lr_schedule": {"name": "linear"}}
    trained = job(tmp_path, strategy="local", model={"name": "fm"}, train=schedule)
    first = Trainer(trained, dataset(), None, WorkerGroup())
    first._learn.skipped = 3
    first.run()
    found = Trainer(trained, dataset(), None, WorkerGroup(rank, 2), resume=checkpoint(tmp_path, 28))
    assert (found._learn.steps, found._budget.total_steps) == (14, 28)
    assert found._rates.schedule.scale(found._learn.steps) == 0.5
    assert found._learn.skipped == skipped  # of all workers together as many as before


def test_the_checkpoint_that_a_run_began_with_stays(tmp_path):
    trained = job(tmp_path, strategy="local", checkpoint={"folder": str(tmp_path), "keep": 1})
    train(job(tmp_path, strategy="local", train={"epochs": 1}), None)
    train(trained, None, checkpoint(tmp_path, 14))  # which a worker that is started again would read
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000014", "step-000000056"]
    longer = job(tmp_path, strategy="local", checkpoint={"folder": str(tmp_path), "keep": 1}, train={"epochs": 6})
    train(longer, None, checkpoint(tmp_path, 56))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000056", "step-000000084"]


def test_folders_of_other_people_stay(tmp_path):
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "probe").write_text("mine")
    train(job(tmp_path, strategy="local", checkpoint={"folder": str(tmp_path), "keep": 1}), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe", "step-000000056", "step-by-step"]
    assert (tmp_path / "probe").read_text() == "mine"


def test_a_run_that_goes_back_writes_beside_what_is_there(tmp_path):
    trained = job(tmp_path, strategy="local", train={"epochs": 2})
    train(trained, None)
    train(trained, None, checkpoint(tmp_path, 14))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000014", "step-000000028", "step-000000028-2"]
    assert find_checkpoint("latest", trained).url.endswith("step-000000028-2")


def test_the_first_worker_writes_and_every_worker_finds_its_own(tmp_path):
    folder = CheckpointFolder(CheckpointSection(folder=str(tmp_path)))
    states = {"shared": pack({}), "worker-0": pack({"n": 0}), "worker-12": pack({"n": 12})}
    url = folder.begin(states, job=job(tmp_path), step=3, world_size=13, output=None, shards=None).wait()
    found = Checkpoint.open(url)
    assert [found.worker(0), found.worker(1), found.worker(12)] == [{"n": 0}, None, {"n": 12}]
    assert found.first_worker() == {"n": 0}


def written(folder: Path) -> Path:
    """A small checkpoint."""
    states = {"shared": pack({"a": 1}), "worker-0": pack({"b": torch.ones(3)})}
    whole = CheckpointFolder(CheckpointSection(folder=str(folder)))
    return Path(whole.begin(states, job=job(folder), step=3, world_size=1, output=None, shards=None).wait())


def test_a_folder_without_its_manifest_is_no_checkpoint_and_makes_way(tmp_path):
    path = written(tmp_path)
    (path / MANIFEST).unlink()
    with pytest.raises(BadCheckpoint, match="there is no whole checkpoint in it"):
        find_checkpoint(str(tmp_path), job(tmp_path))
    with pytest.raises(BadCheckpoint, match=r"it has no checkpoint\.json: it was never finished, or is none"):
        Checkpoint.open(str(path))
    CheckpointFolder(CheckpointSection(folder=str(tmp_path))).check(resumed=False)
    assert written(tmp_path) == path


def test_a_file_that_was_changed_is_named(tmp_path):
    path = written(tmp_path)
    file = path / "worker-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"worker-0.safetensors is damaged: its sha256 is"):
        Checkpoint.open(str(path)).worker(0)
    file.unlink()
    with pytest.raises(BadCheckpoint, match=r"worker-0.safetensors is damaged: it is not there"):
        Checkpoint.open(str(path)).worker(0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is damaged, or not ours"),
        ("[1]", "is damaged, or not ours"),
        ('{"version": 1, "step": "many"}', "is damaged, or not ours .field"),
        ('{"version": 2}', "it has version 2, and this program reads 1; upgrade it"),
        ("[" * 100_000, "is damaged, or not ours"),
    ],
    ids=["empty", "list", "fields", "newer", "deep"],
)
def test_a_manifest_that_is_not_ours_is_refused(tmp_path, text, words):
    path = written(tmp_path)
    (path / MANIFEST).write_text(text)
    with pytest.raises(BadCheckpoint, match=words):
        Checkpoint.open(str(path))


def test_names_in_a_manifest_lead_nowhere_else(tmp_path):
    path = written(tmp_path)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["worker-../../../etc/passwd.safetensors"] = "0" * 64
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert Checkpoint.open(str(path)).first_worker().keys() == {"b"}


def test_another_job_is_refused_by_all_that_differs(tmp_path):
    path = written(tmp_path)
    other = job(
        tmp_path,
        train={"epochs": 4, "seed": 6, "batch_size": 60},
        embedding={"dim": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
        dense={"optimizer": {"name": "sgd", "lr": 0.2}, "mode": "ddp"},
        strategy="hybrid",
    )
    with pytest.raises(OtherJob) as raised:
        find_checkpoint(str(path), other)
    for words in (
        "train.seed is 6 here and 5 there",
        "train.batch_size is 60 here and 50 there",
        "strategy is 'hybrid' here and 'ps' there",
        "dense.optimizer.lr is 0.2 here",
        "embedding.dim is 8 here and 4 there",
        "'sgd' here and 'adam' there",
    ):
        assert words in str(raised.value)


def test_what_is_frozen_may_change_where_shards_hold_the_optimizers_state(tmp_path):
    path = written(tmp_path)
    find_checkpoint(str(path), job(tmp_path, freeze=["output"]))
    states = {"shared": pack({}), "worker-0": pack({})}
    hybrid = CheckpointFolder(CheckpointSection(folder=str(tmp_path / "hybrid")))
    url = hybrid.begin(states, job=job(tmp_path, strategy="hybrid"), step=3, world_size=1, output=None, shards=None)
    with raises(OtherJob, difference="freeze is ['output'] here and [] there"):
        find_checkpoint(url.wait(), job(tmp_path, strategy="hybrid", freeze=["output"]))


def test_a_model_of_which_a_group_is_frozen_is_put_together_again(tmp_path):
    groups = [{"match": "deep.0", "optimizer": {"name": "sgd", "lr": 0.1}}]
    dense = {"optimizer": {"name": "adam", "lr": 0.01}, "groups": groups}
    frozen = job(tmp_path, strategy="local", freeze=["deep.0"], dense=dense)
    whole = train(frozen, None)
    strategy = put_together(frozen, dataset().schema, None, checkpoint(tmp_path, 56))
    torch.testing.assert_close(dict(strategy.model.state_dict()), whole.dense, rtol=0, atol=0)


def test_what_may_change_is_not_asked_about(tmp_path):
    path = written(tmp_path)
    data = {"reader": "ctr_csv", "train": "t.csv", "root": "elsewhere", "loader_processes": 1}
    train = {"steps": 1000, "lr_schedule": {"name": "linear"}, "device": "cpu"}
    cached = {"dim": 4, "optimizer": {"name": "adam", "lr": 0.01}, "cache": {"rows": 50, "staleness": 3}}
    given = {"train": train, "evaluate": {"every": 10}, "data": data, "embedding": cached}
    other = job(tmp_path, workers=3, shards=5, output="x", **given)
    assert find_checkpoint(str(path), other).manifest.step == 3


def test_a_new_run_does_not_mix_with_an_earlier_one(tmp_path):
    written(tmp_path)
    with raises(CheckpointFolderInUse, step=3):
        CheckpointFolder(CheckpointSection(folder=str(tmp_path))).check(resumed=False)


def test_a_place_that_cannot_be_written_is_named_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointNotWritten, match=r"cannot write .*file/checkpoints/.embershard-probe: .*Not a directory"
    ):
        CheckpointFolder(CheckpointSection(folder=str(tmp_path / "file" / "checkpoints"))).check(resumed=False)


def test_a_full_disk_leaves_the_checkpoint_before_as_it_was(tmp_path, monkeypatch):
    trained = job(tmp_path, strategy="local", train={"epochs": 2})
    replace = Storage.replace

    def full(self, path, data):
        if path.startswith("step-000000028/worker"):
            raise SnapshotNotWritten(path=self.at(path), reason="OSError: No space left on device")
        replace(self, path, data)

    monkeypatch.setattr(Storage, "replace", full)
    with pytest.raises(CheckpointNotWritten, match=r"28: OSError: No space left .*the last whole checkpoint is .*14"):
        train(trained, None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000014"]


def test_a_state_of_other_weights_is_refused(tmp_path):
    trained = job(tmp_path, strategy="local", train={"epochs": 1})
    train(trained, None)
    wider = trained.model_copy(update={"model": trained.model.model_copy(update={"hidden": (9,)})})
    with pytest.raises(BadCheckpoint, match="its state of 'held' does not fit this job"):
        train(wider, None, checkpoint(tmp_path, 14))


def test_latest_needs_a_folder_to_look_in(tmp_path):
    with pytest.raises(JobError, match=r"--resume latest: the job has no checkpoint\.folder to look in"):
        find_checkpoint("latest", job(tmp_path, checkpoint=None))


def test_a_state_comes_back_as_it_was():
    shared = torch.arange(6.0)
    state = {"a": {"b": [1, 2.5, None, True, "x"], 3: shared[:3]}, "c": shared, "d": torch.ones(2).bfloat16(), "$e": {}}
    state |= {"f": [torch.zeros(1), torch.ones(1)], "g": {"$tensor": "c"}}
    back = unpack(pack(state))
    assert back["a"]["b"] == [1, 2.5, None, True, "x"]  # type: ignore[index]
    assert torch.equal(back["a"][3], shared[:3])  # type: ignore[index]
    assert back["d"].dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert (back["f"], back["g"]) == ([torch.zeros(1), torch.ones(1)], {"$tensor": "c"})
    with pytest.raises(TypeError, match="state/a is a set, which a state cannot hold"):
        pack({"a": {1}})


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", pack({"a": 1})[:-3], pack({})[:9] + b"x" * 20], ids=range(4))
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(ValueError, match="it holds no state of a worker"):
        unpack(data)


def test_random_numbers_go_on_where_they_were():
    def draw():
        """An odd number of normal ones: they are made in pairs, of which the second is kept."""
        return [
            torch.rand(3).tolist(),
            np.random.randn(3).tolist(),
            np.random.rand(3).tolist(),
            random.gauss(0, 1),
            random.random(),
        ]

    numbers = RandomNumbers(torch.device("cpu"))
    draw()
    state = unpack(pack(numbers.state_dict()))
    first = draw()
    numbers.load_state_dict(state)
    assert draw() == first


class Forwarding:
    """As a user wraps a part of a run, to log or to time it."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_a_part_that_forwards_its_state_has_one():
    assert is_stateful(torch.nn.Linear(1, 1))
    assert is_stateful(Forwarding(torch.nn.Linear(1, 1)))
    assert not is_stateful(Forwarding(object()))
    assert not is_stateful(SimpleNamespace(state_dict=dict))
