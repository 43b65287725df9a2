"""Two jobs with one folder of checkpoints: the later one has it, and the earlier one stops without a trace in it."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from embershard.proto.errors import SnapshotNotWritten, SnapshotUnreadable
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint import folder as folder_module
from embershard.worker.checkpoint.checkpoint import Checkpoint, checkpoint_names
from embershard.worker.checkpoint.folder import CheckpointFolder, CheckpointNotWritten
from embershard.worker.checkpoint.owner import MANIFEST, CheckpointFolderTaken, FolderOwner, remove_unfinished
from embershard.worker.checkpoint.tensors import pack
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.training.evaluate import Best
from embershard.worker.training.saver import Saver
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


class Gate:
    """Holds up a folder's write of the files of an ending, until `go_on` is set."""

    def __init__(self, folder, ending, monkeypatch):
        self.reached, self.go_on, replace = threading.Event(), threading.Event(), Storage.replace

        def wait(storage, path, data):
            if storage is folder._storage and path.endswith(ending):
                self.reached.set()
                assert self.go_on.wait(30)
            replace(storage, path, data)

        monkeypatch.setattr(Storage, "replace", wait)


def held_up(folder, step, ending, monkeypatch):
    """A checkpoint that is being written, and what holds it up."""
    gate = Gate(folder, ending, monkeypatch)
    writing = begin(folder, step)
    assert gate.reached.wait(30)
    return writing, gate.go_on


def whole(place):
    """The steps of the checkpoints of a folder, each of which is read."""
    for name in checkpoint_names(Storage(place)):
        assert Checkpoint.open(Storage(place).at(name)).worker(0)
    return steps(place)


def test_a_checkpoint_that_was_begun_before_another_job_came_is_not_finished(place, monkeypatch):
    earlier, later = CheckpointFolder(place, keep=9), CheckpointFolder(place, keep=9)
    writing, go_on = held_up(earlier, 3, "worker-0.safetensors", monkeypatch)
    for step in (2, 3):
        begin(later, step).wait()
    go_on.set()
    with raises(CheckpointFolderTaken):
        writing.wait()
    assert whole(place) == ["step-000000002", "step-000000003-2"]


def test_a_checkpoint_that_another_job_removed_while_it_was_written_says_whose_the_folder_is(place, monkeypatch):
    earlier, later = CheckpointFolder(place), CheckpointFolder(place)
    writing, go_on = held_up(earlier, 3, "worker-0.safetensors", monkeypatch)
    begin(later, 4).wait()
    go_on.set()
    with raises(CheckpointFolderTaken):
        writing.wait()
    assert whole(place) == ["step-000000004"]


def test_a_place_that_two_jobs_choose_at_once_stays_that_of_the_later(place, monkeypatch):
    earlier, later = CheckpointFolder(place), CheckpointFolder(place)
    chosen = threading.Event()
    make_folder = Storage.make_folder

    def wait(storage, path):
        if storage is earlier._storage and path and not chosen.is_set():
            chosen.set()
            begin(later, 3).wait()
        make_folder(storage, path)

    monkeypatch.setattr(Storage, "make_folder", wait)
    monkeypatch.setattr(folder_module, "_FIRST", "first")  # where a file of the later one is not replaced
    with raises(CheckpointFolderTaken):
        begin(earlier, 3).wait()
    assert whole(place) == ["step-000000003"]


def test_of_two_jobs_that_claim_a_folder_at_once_one_has_it(place, monkeypatch):
    one, another = CheckpointFolder(place), CheckpointFolder(place)
    gate = Gate(one, "OWNER", monkeypatch)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(begin, one, 3)
        assert gate.reached.wait(30)
        writing, go_on = held_up(another, 3, "worker-0.safetensors", monkeypatch)
        gate.go_on.set()
        first.result().wait()
    go_on.set()
    with raises(CheckpointFolderTaken):
        writing.wait()
    assert whole(place) == ["step-000000003-2"]


def test_a_job_that_lost_the_folder_removes_nothing_of_the_job_that_has_it(place, monkeypatch):
    earlier, later = CheckpointFolder(place, keep=1), CheckpointFolder(place)
    writing, go_on = held_up(earlier, 3, MANIFEST, monkeypatch)
    written, finish = held_up(later, 2, MANIFEST, monkeypatch)
    go_on.set()
    with raises(CheckpointFolderTaken):  # its checkpoint is whole, and it drops no other
        writing.wait()
    with raises(CheckpointFolderTaken):
        begin(earlier, 4).wait()
    remove_unfinished(place, earlier._owner._name())  # as the end of its command does
    finish.set()
    written.wait()
    assert whole(place) == ["step-000000002", "step-000000003"]


def test_the_end_of_a_job_removes_what_was_never_finished(place):
    storage, folder = Storage(place), CheckpointFolder(place)
    begin(folder, 1).wait()
    for name in ("step-000000008", "step-by-step"):
        storage.make_folder(name)
        storage.replace(f"{name}/shared.safetensors", b"half")
    remove_unfinished(place, folder._owner._name())
    assert steps(place) == ["step-000000001", "step-by-step"]


def test_what_a_killed_job_left_half_written_is_removed_by_one_that_passed_it(place):
    storage = Storage(place)
    begin(CheckpointFolder(place), 1).wait()
    storage.make_folder("step-000000008")
    storage.replace("step-000000008/shared.safetensors", b"half")
    begin(CheckpointFolder(place), 9).wait()
    assert steps(place) == ["step-000000001", "step-000000009"]


def test_workers_of_one_job_write_in_turn(place):
    job, another = [FolderOwner(Storage(place), lambda: "a job") for _ in range(2)], FolderOwner(Storage(place), str)
    Storage(place).make_folder("")
    for owner in (*job, *job):
        owner.claim()
        owner.check()
    another.claim()
    another.check()
    for owner in job:
        for call in (owner.check, owner.claim):
            with raises(CheckpointFolderTaken):
                call()


def test_jobs_on_shards_are_told_apart_by_lineage_and_prefix(tmp_path):
    def name(lineage, prefix, owner=""):
        client = SimpleNamespace(lineage=SimpleNamespace(number=lineage), compressor=None)
        job = make_job(prefix=prefix, checkpoint={"folder": str(tmp_path)})
        saver = Saver(job, WorkerGroup(), shared={}, own={}, client=client, best=Best(), owner=owner)
        return saver._folder._owner._name()

    assert len({name(1, "a"), name(1, "b"), name(2, "a"), name(1, "a")}) == 3
    assert name(1, "a", "17") == name(2, "a", "17") == "17"  # whoever started it removes what it leaves


SINCE = {"owner": "a", "former": [], "host": "h", "since": 1e300}


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"owner": 3}), json.dumps(SINCE)])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "OWNER").write_text(text)
    with raises(CheckpointNotWritten, reason=re.compile("OWNER: it is damaged")):
        begin(CheckpointFolder(str(tmp_path)), 1).wait()
    assert not list(tmp_path.glob(f"step-*/{MANIFEST}"))


def test_a_storage_that_does_not_answer_is_asked_no_more_than_once_when_a_checkpoint_failed(tmp_path, monkeypatch):
    folder, asked = CheckpointFolder(str(tmp_path)), []

    def fail(error):
        def call(_, path, *__):
            asked.append(path.rpartition("/")[2])
            raise error(path=path, reason="TimeoutError: no answer")

        return call

    url = folder.new_url(3)
    monkeypatch.setattr(folder, "new_url", lambda step: url)
    for name, error in {
        "replace": SnapshotNotWritten,
        "read": SnapshotUnreadable,
        "remove": SnapshotNotWritten,
    }.items():
        monkeypatch.setattr(Storage, name, fail(error))
    with raises(CheckpointNotWritten, reason=re.compile("no answer")):
        begin(folder, 3).wait()
    assert asked == ["shared.safetensors", "OWNER"]
