"""Checkpoints: what a folder holds, what a resumed run does with it, and what it refuses."""

import dataclasses
import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embershard.local_shards import local
from embershard.proto.errors import JobError, SnapshotNotWritten, SnapshotUnknown
from embershard.proto.snapshot.storage import Storage
from embershard.proto.snapshot.stored import read_manifest
from embershard.worker.checkpoint.checkpoint import (
    SNAPSHOT,
    BadCheckpoint,
    Checkpoint,
    OtherJob,
    find_checkpoint,
)
from embershard.worker.checkpoint.folder import (
    CheckpointFolder,
    CheckpointFolderInUse,
    CheckpointNotWritten,
    WritingCheckpoint,
)
from embershard.worker.checkpoint.owner import MANIFEST
from embershard.worker.checkpoint.snapshots import RunningSnapshot, restore_snapshot
from embershard.worker.checkpoint.tensors import is_stateful, pack, unpack
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.job.training import CheckpointSection
from embershard.worker.reporting.records import RunResult
from embershard.worker.session.session import Session
from embershard.worker.trained.reading import trained as put_together
from embershard.worker.training.evaluate import Best
from embershard.worker.training.saver import RandomNumbers, Saver, TrainingData
from embershard.worker.training.trainer import Trainer
from harness.clicks import NUM_IDS, Notes, click_data
from harness.eventually import PATIENCE
from harness.job import make_job
from harness.raises import raises

STOPPING = {"epochs": 9, "lr_schedule": {"name": "plateau"}, "early_stop": {"patience": 2}}
SWITCHED = {  # before and after step 14
    "push": {"at": {0: "none", 10: "topk:0.2+int8", 20: "int8"}},
    "dense": {"push": {"at": {0: "powersgd:1", 17: "dgc:0.1"}}, "pull": "delta"},
    "momentum": 0.9,
}


@pytest.fixture
def make_session():
    """Sessions with n fresh shards in this process, which may be called from several threads."""
    return lambda n: local(n)


def dataset():
    return click_data(train=700, valid=200)


def job(folder, **sections):
    deepfm = {"name": "deepfm", "hidden": [8], "batch_norm": True, "dropout": 0.3}
    plain = {"model": deepfm, "embedding": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.01}}}
    kept = {"folder": str(folder), "keep": 100, "best": False, **sections.pop("checkpoint", {})}
    train = {"seed": 5, "linear": "torch", **sections.pop("train", {"epochs": 4})}
    return make_job(**{**plain, **sections}, checkpoint=kept, train=train)


@dataclasses.dataclass
class Weights:
    """What a run ends with."""

    rows: torch.Tensor
    dense: dict[str, torch.Tensor]
    result: RunResult

    def same(self, other):
        assert self.dense.keys() == other.dense.keys()
        dense = all(torch.equal(value, other.dense[name]) for name, value in self.dense.items())
        return dense and torch.equal(self.rows, other.rows)


def train(job, session, resume=None):
    if resume is not None and session is not None:
        restore_snapshot(session.client, resume.url, SNAPSHOT)
    trainer = Trainer(job, dataset(), session, WorkerGroup(), resume=resume)
    result = trainer.run()
    if session is not None:
        session.pull([], session.dense_weights)
        table = next(table for table in session.tables if table.spec.name == "embedding")
        found = table.pull(torch.arange(NUM_IDS))
    else:
        found = trainer.model.get_parameter("embedding.weight").detach().clone()
    return Weights(found, {name: value.clone() for name, value in trainer.model.state_dict().items()}, result)


def checkpoint(folder, step):
    return Checkpoint.open(str(folder / f"step-{step:09d}"))


def names(folder):
    """Of the files in a folder of checkpoints, apart from that of its owner."""
    return sorted(path.name for path in folder.iterdir() if path.name != "OWNER")


ADAM = {"name": "adam", "lr": 0.01}
STANDING = {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.0}}
CACHED = {"optimizer": ADAM, "cache": {"rows": 50, "staleness": 3}}


INCREMENTS = {"every": 1, "incremental": True}


def every(evaluate, checkpoint):
    return {"evaluate": {"every": evaluate}, "checkpoint": {"every": checkpoint}}


TWO = {"epochs": 2}
RESUMED = {
    "epochs": (14, {"train": TWO}),
    "in the middle of an epoch": (18, {"train": {"steps": 30}, **every(20, 9)}),
    "early stop": (28, {"train": STOPPING, "model": {"name": "fm"}, "embedding": STANDING}),
    "average": (14, {"train": {**TWO, "average": {"decay": 0.9}, "clip_norm": 0.1, "prefetch": None}}),
    "dense weights in the worker": (14, {"train": TWO, "strategy": "hybrid"}),
    "no shards": (14, {"train": TWO, "strategy": "local", "dense": {"optimizer": ADAM}}),
    "local steps": (10, {"train": {"steps": 30, "staleness": "local(7)"}, **every(20, 10)}),
    "cache": (15, {"train": {"steps": 30, "prefetch": None}, **every(30, 15), "embedding": CACHED}),
    "increments": (
        13,
        {
            "strategy": "hybrid",
            "model": {"name": "fm"},
            "train": {"steps": 16, "batch_size": 2},
            "checkpoint": INCREMENTS,
        },
    ),
    "codecs by a schedule": (
        14,
        {"train": TWO, "compression": SWITCHED, "dense": {"optimizer": {"name": "sgd", "lr": 0.01}}},
    ),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(make_session, tmp_path, case):
    from_step, sections = RESUMED[case]
    trained = job(tmp_path, **sections)

    def session():
        return Session(make_session(2).client, local_steps=trained.train.local_steps) if trained.has_shards else None

    whole = train(trained, session())
    found = checkpoint(tmp_path, from_step)
    assert bool(found.manifest.snapshot) == trained.has_shards
    if trained.checkpoint.incremental:
        assert read_manifest(found.url, SNAPSHOT).parent is not None
    torch.manual_seed(99)
    resumed = train(trained, session(), found)
    assert resumed.same(whole)
    for name in ("figures", "steps", "samples", "best_step"):
        assert getattr(resumed.result, name) == getattr(whole.result, name)


def test_a_run_that_was_over_is_told_as_it_was(tmp_path):
    schedule = {"epochs": 4, "lr_schedule": {"name": "plateau", "patience": 2}}
    trained = job(tmp_path, strategy="local", model={"name": "fm"}, embedding=STANDING, train=schedule)
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


def test_the_newest_checkpoints_are_kept_and_latest_is_the_last_of_them(tmp_path):
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "probe").write_text("mine")
    trained = job(tmp_path, strategy="local", checkpoint={"keep": 2})
    train(trained, None)
    assert names(tmp_path) == ["probe", "step-000000042", "step-000000056", "step-by-step"]  # not those of others
    assert find_checkpoint("latest", trained).manifest.step == 56
    assert find_checkpoint(str(tmp_path / "step-000000042"), trained).manifest.step == 42


def test_a_run_that_stops_early_ends_with_a_checkpoint(tmp_path):
    kept = {"keep": 1, "every": 9}
    trained = job(tmp_path, strategy="local", model={"name": "fm"}, embedding=STANDING, train=STOPPING, checkpoint=kept)
    assert train(trained, None).result.steps == 42
    assert names(tmp_path) == ["step-000000042"]


class Second(WorkerGroup):
    """The second of two workers; the first one says whether it failed."""

    def __init__(self, failed):
        super().__init__(1, 2)
        self.failed = failed

    def gather(self, values):
        return []

    def broadcast_json(self, value):
        return [self.failed, False] if isinstance(value, list) else "of the first"


def test_a_worker_that_is_not_the_first_writes_nothing_and_hears_of_errors(tmp_path):
    parts = {
        "shared": {},
        "own": {"random": RandomNumbers(torch.device("cpu"))},
        "client": None,
        "best": Best(),
    }
    now = {"best": False, "due": True, "wait": True}
    Saver(job(tmp_path), Second(failed=False), **parts).save(14, **now)
    assert not names(tmp_path)
    with pytest.raises(CheckpointNotWritten):
        Saver(job(tmp_path), Second(failed=True), **parts).save(14, **now)


class Part:
    """A part of a run, and what it was given; a compressor, too."""

    def __init__(self):
        self.loaded, self.held = [], []

    def load_state_dict(self, state):
        self.loaded.append(state["of"])

    def hold(self, state):
        self.held.append(state["of"])


def write(folder, states, world_size=1, **settings):
    """A checkpoint of step 3; its address."""
    whole = CheckpointFolder(str(folder))
    packed = {name: pack(state) for name, state in {"shared": {}, **states}.items()}
    of = {"job": job(folder, **settings), "step": 3, "world_size": world_size}
    return whole.begin(packed, url=whole.new_url(3), best=None, **of, output=None, shards=None).wait()


@pytest.mark.parametrize(
    ("rank", "world_size", "own", "random_numbers", "compression", "held"),
    [(0, 2, 0, [0], [0], [2, 4]), (1, 2, 1, [1], [1], [3]), (5, 6, 0, [], [], [])],
    ids=["first", "second", "new"],
)
def test_of_fewer_or_more_workers_each_has_its_own_state_and_what_others_held(
    tmp_path, rank, world_size, own, random_numbers, compression, held
):
    saved = ("step", "random", "compression")
    url = write(tmp_path, {f"worker-{n}": {name: {"of": n} for name in saved} for n in range(5)}, world_size=5)
    step, numbers, rounds, compressor = Part(), Part(), Part(), Part()
    saver = Saver(
        job(tmp_path),
        WorkerGroup(rank, world_size),
        shared={},
        own={"step": step, "random": numbers, "local_steps": rounds},
        client=SimpleNamespace(compressor=compressor),
        best=Best(),
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
    kept = {"strategy": "local", "checkpoint": {"keep": 1}}
    train(job(tmp_path, strategy="local", train={"epochs": 1}), None)
    train(job(tmp_path, **kept), None, checkpoint(tmp_path, 14))  # which a worker that is started again would read
    assert names(tmp_path) == ["step-000000014", "step-000000056"]
    train(job(tmp_path, **kept, train={"epochs": 6}), None, checkpoint(tmp_path, 56))
    assert names(tmp_path) == ["step-000000056", "step-000000084"]


def test_a_run_that_goes_back_writes_beside_what_is_there(tmp_path):
    trained = job(tmp_path, strategy="local", train={"epochs": 2})
    train(trained, None)
    train(trained, None, checkpoint(tmp_path, 14))
    assert names(tmp_path) == ["step-000000014", "step-000000028", "step-000000028-2"]
    assert find_checkpoint("latest", trained).url.endswith("step-000000028-2")


def test_the_first_worker_writes_and_every_worker_finds_its_own(tmp_path):
    found = Checkpoint.open(write(tmp_path, {"worker-0": {"n": 0}, "worker-12": {"n": 12}}, world_size=13))
    assert [found.worker(0), found.worker(1), found.worker(12)] == [{"n": 0}, None, {"n": 12}]
    assert found.first_worker() == {"n": 0}


@pytest.fixture
def path(tmp_path):
    """A small checkpoint."""
    return Path(write(tmp_path, {"shared": {"a": 1}, "worker-0": {"b": torch.ones(3)}}))


def test_a_folder_without_its_manifest_is_no_checkpoint(path, tmp_path):
    with raises(CheckpointFolderInUse, step=3):
        CheckpointFolder(str(tmp_path)).check(resumed=False)
    (path / MANIFEST).unlink()
    for find in (lambda: find_checkpoint(str(tmp_path), job(tmp_path)), lambda: Checkpoint.open(str(path))):
        with pytest.raises(BadCheckpoint):
            find()
    CheckpointFolder(str(tmp_path)).check(resumed=False)
    assert write(tmp_path, {}) == f"{path}-2"  # another writer may not have finished the first one
    with pytest.raises(CheckpointNotWritten):  # in a file there is no folder
        CheckpointFolder(f"{path}-2/{MANIFEST}").check(resumed=False)


def test_the_error_of_a_place_without_a_checkpoint_has_its_path_and_what_is_there(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "other/step-000000004", "other/shards"):
        Path(name).mkdir(parents=True)
    ours = job(tmp_path)
    here = f"checkpoint.folder {tmp_path} has {path.name}: name one of these, or use --resume latest"
    for where, reason in {
        "nope": f"there is no whole checkpoint in it, as there is no such folder. {here}",
        "empty": f"there is no whole checkpoint in it; it is empty. {here}",
        "other": "there is no whole checkpoint in it; it has shards, step-000000004 (step-000000004 has no "
        f"checkpoint.json: it was never finished). {here}",
    }.items():
        with raises(BadCheckpoint, path=str(tmp_path / where), reason=reason):
            find_checkpoint(where, ours)
    with raises(BadCheckpoint, reason="there is no checkpoint that is marked as the best in it; it has OWNER, "
                f"empty, other, {path.name}"):  # fmt: skip
        find_checkpoint("best", ours)


def test_a_file_that_was_changed_is_named(path):
    file = path / "worker-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    for damage in (lambda: file.write_bytes(data), file.unlink):
        damage()
        with pytest.raises(BadCheckpoint, match=r"worker-0.safetensors is damaged"):
            Checkpoint.open(str(path)).worker(0)


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"version": 1, "step": "many"}', '{"version": 2}', "[" * 100_000], ids=range(5)
)
def test_a_manifest_that_is_not_ours_is_refused(path, text):
    (path / MANIFEST).write_text(text)
    with pytest.raises(BadCheckpoint, match="upgrade" if "2" in text else "damaged"):
        Checkpoint.open(str(path))


def test_a_digit_of_a_manifest_that_was_changed_is_found(path):
    text = (path / MANIFEST).read_text()
    for name in ("step", "time", "lr", "seed"):
        start = text.index(f'"{name}": ') + len(name) + 4
        (path / MANIFEST).write_text(f"{text[:start]}{'2' if text[start] == '1' else '1'}{text[start + 1 :]}")
        with pytest.raises(BadCheckpoint, match="its sha256 is not that of its other values"):
            Checkpoint.open(str(path))
    (path / MANIFEST).write_text(text)
    assert Checkpoint.open(str(path)).first_worker().keys() == {"b"}


def test_names_in_a_manifest_lead_nowhere_else(path):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["worker-../../../etc/passwd.safetensors"] = "0" * 64
    del manifest["sha256"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert Checkpoint.open(str(path)).first_worker().keys() == {"b"}


def test_another_job_is_refused_by_all_that_differs(path, tmp_path):
    train = {"epochs": 4, "seed": 6, "batch_size": 60, "accumulate": 2}
    dense = {"optimizer": {"name": "sgd", "lr": 0.2}, "mode": "ddp"}
    other = job(tmp_path, train=train, embedding={**STANDING, "dim": 8}, dense=dense, strategy="hybrid")
    with pytest.raises(OtherJob) as raised:
        find_checkpoint(str(path), other)
    fields = ("train.seed is 6 here and 5", "train.batch_size", "train.accumulate", "strategy", "dense.optimizer.lr")
    for field in (*fields, "embedding.dim"):
        assert field in str(raised.value)
    write(tmp_path / "hybrid", {"worker-0": {}}, strategy="hybrid")
    with raises(OtherJob, difference="freeze is ['output'] here and [] there"):
        find_checkpoint(str(tmp_path / "hybrid"), job(tmp_path, strategy="hybrid", freeze=["output"]))


def test_features_in_another_order_are_another_jobs(tmp_path):
    def of(**features):
        return {"reader": "tabular", "train": "a.csv", "features": features}

    write(tmp_path, {"worker-0": {}}, data=of(user={}, item={}))
    find_checkpoint(str(tmp_path), job(tmp_path, data=of(user={}, item={})))
    for other, shown in ({"item": {}, "user": {}}, "['item', 'user']"), ({"user": {}}, "['user']"):
        with raises(OtherJob, difference=f"data.features is {shown} here and ['user', 'item'] there"):
            find_checkpoint(str(tmp_path), job(tmp_path, data=of(**other)))


def test_a_model_of_which_a_group_is_frozen_is_put_together_again(tmp_path):
    groups = [{"match": "deep.0", "optimizer": {"name": "sgd", "lr": 0.1}}]
    dense = {"optimizer": {"name": "adam", "lr": 0.01}, "groups": groups}
    frozen = job(tmp_path, strategy="local", freeze=["deep.0"], dense=dense)
    whole = train(frozen, None)
    strategy = put_together(frozen, dataset(), None, checkpoint(tmp_path, 56))
    torch.testing.assert_close(dict(strategy.model.state_dict()), whole.dense, rtol=0, atol=0)


def test_what_may_change_is_not_asked_about(path, tmp_path):
    data = {"reader": "ctr_csv", "train": "t.csv", "root": "elsewhere", "loader_processes": 1}
    train = {"steps": 1000, "lr_schedule": {"name": "linear"}, "device": "cpu"}
    given = {"train": train, "evaluate": {"every": 10}, "data": data, "embedding": {"dim": 4, **CACHED}}
    other = job(tmp_path, workers=3, shards=5, output="x", freeze=["output"], **given)
    assert find_checkpoint(str(path), other).manifest.step == 3


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
    assert names(tmp_path) == ["step-000000014"]


@pytest.mark.parametrize("awaited", [True, False])
def test_the_reason_of_a_failed_checkpoint_is_logged_where_nobody_waits_for_its_error_yet(caplog, awaited):
    begun = threading.Event()

    def finish():
        begun.wait(PATIENCE)
        raise CheckpointNotWritten(path="kept/step-000000003", reason="no space left", previous="none")

    writing = WritingCheckpoint(finish)
    if awaited:
        threading.Timer(0.05, begun.set).start()
    else:
        begun.set()
        writing._thread.join()
    with raises(CheckpointNotWritten, reason="no space left"):
        writing.wait()
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if awaited else ["checkpoint kept/step-000000003 was not written: no space left"])


@pytest.mark.parametrize("step", [14, 56], ids=["while training goes on", "at the end"])
def test_a_checkpoint_is_given_up_where_a_shard_was_started_anew_meanwhile_and_the_last_one_taken_again(
    make_session, tmp_path, monkeypatch, caplog, step
):
    finish, left, unknown = RunningSnapshot.finish, [step], SnapshotUnknown(what="snapshot", name="one")

    def restarted(self, *args, **settings):
        if left and f"{left[0]:09d}" in self._storage.url:
            left.clear()
            self.cancel()
            raise unknown
        return finish(self, *args, **settings)

    monkeypatch.setattr(RunningSnapshot, "finish", restarted)
    train(job(tmp_path), make_session(2))
    assert not left
    assert str(unknown) in caplog.text
    assert names(tmp_path) == [f"step-{one:09d}" for one in (14, 28, 42, 56) if one != step or step == 56]


def test_a_state_of_other_weights_is_refused(tmp_path):
    trained = job(tmp_path, strategy="local", train={"epochs": 1})
    train(trained, None)
    wider = trained.model_copy(update={"model": trained.model.model_copy(update={"hidden": (9,)})})
    with pytest.raises(BadCheckpoint, match="its state of 'local_weights' does not fit this job"):
        train(wider, None, checkpoint(tmp_path, 14))


def test_latest_needs_a_folder_to_look_in(tmp_path):
    with pytest.raises(JobError):
        find_checkpoint("latest", job(tmp_path).model_copy(update={"checkpoint": CheckpointSection()}))


def test_a_state_comes_back_as_it_was():
    shared = torch.arange(6.0)
    state = {"a": {"b": [1, 2.5, None, True, "x"], 3: shared[:3]}, "c": shared, "d": torch.ones(2).bfloat16(), "$e": {}}
    state |= {"f": [torch.zeros(1), torch.ones(1)], "g": {"$tensor": "c"}}
    back = unpack(pack(state))
    assert back["a"]["b"] == [1, 2.5, None, True, "x"]
    assert torch.equal(back["a"][3], shared[:3])
    assert back["d"].dtype == torch.bfloat16
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
        arrays = torch.rand(3), np.random.randn(3), np.random.rand(3)
        return [array.tolist() for array in arrays], random.gauss(0, 1), random.random()

    numbers = RandomNumbers(torch.device("cpu"))
    draw()
    state = unpack(pack(numbers.state_dict()))
    first = draw()
    numbers.load_state_dict(state)
    assert draw() == first


def test_a_part_that_forwards_its_state_has_one():
    class Forwarding(SimpleNamespace):
        """As a user wraps a part of a run, to log or to time it."""

        def __getattr__(self, name):
            return getattr(self.__dict__["inner"], name)

    assert is_stateful(torch.nn.Linear(1, 1))
    assert is_stateful(Forwarding(inner=torch.nn.Linear(1, 1)))
    assert not is_stateful(Forwarding(inner=object()))
    assert not is_stateful(SimpleNamespace(state_dict=dict))


TABLES = """
data: {reader: tabular, train: TRAIN}
features: {user: {buckets: 50}}
model: {name: fm}
strategy: local
embedding: {dim: 4, optimizer: {name: sgd, lr: 0.1}}
train: {steps: 4, batch_size: 32}
checkpoint: {folder: FOLDER, every: 2}
"""
LINES = [f"{row % 2},u{row}" for row in range(1000)]
CHANGES = {
    "moved": LINES[::-1],
    "edited": [*LINES[:500], "1,u500", *LINES[501:]],  # of the same length
    "grown": [*LINES, "1,new"],
}


def write_lines(path, lines):
    rows = [{"label": int(line[0]), "user": line[2:]} for line in lines]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("label,user\n" + "".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    ("ending", "change"),
    [*(("csv", change) for change in CHANGES), ("jsonl", "edited"), ("parquet", "moved"), ("parquet", "grown")],
)
def test_a_resumed_run_says_that_the_files_of_train_have_changed(tmp_path, ending, change):
    job_file, data = tmp_path / "job.yaml", tmp_path / f"a.{ending}"
    job_file.write_text(TABLES.replace("TRAIN", data.name).replace("FOLDER", str(tmp_path / "kept")))

    def plan(steps):
        job, notes = load_job(job_file, [f"train.steps={steps}"]), Notes()
        resume = find_checkpoint("latest", job) if steps > 4 else None
        Trainer(job, job.data.open(tmp_path, 0), None, WorkerGroup(), [notes], resume=resume).run()
        return notes.plan

    write_lines(data, LINES)
    assert not plan(4).warnings
    os.utime(data, (1, 1))
    assert not plan(6).warnings
    write_lines(data, CHANGES[change])
    (warning,) = plan(8).warnings
    assert warning.startswith("data.train is not as it was at the checkpoint (")
    assert ("; then rows 1,000, files 1, bytes" in warning) == (ending == "parquet")


def test_the_number_of_samples_tells_of_changed_data_where_no_file_does():
    before = TrainingData(click_data(train=700, valid=200)).state_dict()
    for rows, said in ((700, ""), (710, "(samples 710; then samples 700)")):
        data = TrainingData(click_data(train=rows, valid=200))
        data.load_state_dict(before)
        assert said in data.warning
        assert bool(said) == bool(data.warning)
