"""Two jobs with one folder of checkpoints: the later one has it, and the earlier one stops without a trace in it."""

import json
import re
import threading
from types import SimpleNamespace

import pytest

from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.checkpoint import checkpoint_names
from embershard.worker.checkpoint.folder import CheckpointFolder, CheckpointNotWritten
from embershard.worker.checkpoint.names import MANIFEST
from embershard.worker.checkpoint.owner import CheckpointFolderTaken, FolderOwner
from embershard.worker.checkpoint.tensors import pack
from harness.job import make_job
from harness.raises import raises


@pytest.fixture(params=["folder", "URL"])
def place(request, tmp_path):
    return f"memory://{tmp_path.name}" if request.param == "URL" else str(tmp_path / "checkpoints")


def begin(folder, step, shards=None):
    states = {"shared": pack({}), "worker-0": pack({"step": {"of": step}})}
    job = make_job(strategy="local", checkpoint={"folder": folder.url})
    return folder.begin(
        states, url=folder.new_url(step), best=None, job=job, step=step, world_size=1, output=None, shards=shards
    )


def steps(place):
    return sorted(name for name in Storage(place).sizes("") if name.startswith("step-"))


def test_the_job_that_came_later_has_the_folder(place):
    earlier, later = CheckpointFolder(place, keep=9), CheckpointFolder(place, keep=9)
    begin(earlier, 3).wait()
    begin(later, 5).wait()
    with raises(CheckpointFolderTaken, path=Storage(place).url):
        begin(earlier, 7).wait()
    begin(later, 9).wait()
    assert steps(place) == checkpoint_names(Storage(place)) == [f"step-00000000{step}" for step in (3, 5, 9)]


def test_a_checkpoint_that_was_begun_before_another_job_came_is_not_finished(place, monkeypatch):
    earlier, later = CheckpointFolder(place), CheckpointFolder(place)
    reached, go_on, replace = threading.Event(), threading.Event(), Storage.replace

    def wait(storage, path, data):
        replace(storage, path, data)
        if storage is earlier._storage and path.endswith("worker-0.safetensors"):
            reached.set()
            assert go_on.wait(30)

    monkeypatch.setattr(Storage, "replace", wait)
    writing = begin(earlier, 3)
    assert reached.wait(30)
    begin(later, 2).wait()
    go_on.set()
    with raises(CheckpointFolderTaken):
        writing.wait()
    assert steps(place) == ["step-000000002"]


def test_what_a_killed_job_left_half_written_is_removed_by_the_next(place):
    storage = Storage(place)
    begin(CheckpointFolder(place), 1).wait()
    storage.make_folder("step-000000008")
    storage.replace("step-000000008/shared.safetensors", b"half")
    storage.make_folder("step-by-step")
    storage.replace("step-by-step/mine", b"not a checkpoint")
    begin(CheckpointFolder(place), 2).wait()
    assert steps(place) == ["step-000000001", "step-000000002", "step-by-step"]


def test_workers_of_one_job_write_in_turn(place):
    owners = [FolderOwner(Storage(place)) for _ in range(2)]
    Storage(place).make_folder("")
    assert [owner.claim("a job") for owner in (*owners, *owners)] == [False] * 4
    assert owners[0].claim("another")
    for owner in owners:
        owner.check("another")
        with raises(CheckpointFolderTaken):
            owner.check("a job")


def test_jobs_on_shards_are_told_apart_by_lineage_and_prefix(tmp_path):
    folder = CheckpointFolder(str(tmp_path))

    def name(lineage, prefix):
        job = make_job(prefix=prefix)
        return folder._owner_of(job, SimpleNamespace(lineage=SimpleNamespace(number=lineage)))

    assert len({name(1, "a"), name(1, "b"), name(2, "a"), name(1, "a")}) == 3


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"owner": 3})])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "OWNER").write_text(text)
    with raises(CheckpointNotWritten, reason=re.compile("OWNER: it is damaged")):
        begin(CheckpointFolder(str(tmp_path)), 1).wait()
    assert not list(tmp_path.glob(f"step-*/{MANIFEST}"))
