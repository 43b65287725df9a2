"""Snapshots that have only what changed: what they hold, what they need, and when they are full ones."""

import hashlib
import os
import re
import secrets
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest

from embershard.local_shards import InProcessShards
from embershard.proto import errors, spec
from embershard.proto.arrays import mix64
from embershard.proto.routing import make_route
from embershard.proto.snapshot.blocks import read_block
from embershard.proto.snapshot.manifest import MANIFEST, Parent, pack_manifest, pack_part
from embershard.proto.snapshot.storage import Storage
from embershard.proto.snapshot.stored import list_snapshots, open_snapshot
from embershard.ps import snapshot as shard_side
from embershard.worker.checkpoint import folder as folder_module
from embershard.worker.checkpoint import snapshots as module
from embershard.worker.checkpoint.checkpoint import SNAPSHOT, checkpoint_at, checkpoint_names
from embershard.worker.checkpoint.folder import CheckpointFolder, CheckpointNotWritten
from embershard.worker.checkpoint.snapshots import MOST_INCREMENTS, begin_snapshot, restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from harness.job import make_job
from harness.raises import raises

NAMES = ("items", "users", "late")
NUM_IDS = 3000


class Job:
    """Shards in this process, and a client that trains and takes snapshots."""

    def __init__(self, num_shards=2, url="", tables=NAMES[:2]):
        self.shards = InProcessShards(num_shards)
        self.client = Client(self.shards.transports(), worker=0)
        self.url, self.number = url, 0
        for name in tables:
            self.declare(name)

    def declare(self, name, dim=4):
        self.client.declare(spec.TableSpec(name=name, dim=dim, optimizer=spec.Adagrad(lr=0.1)))

    def route(self, name, ids):
        return make_route(np.asarray(ids), self.client.spec(name).space_key, self.client.placement)

    def push(self, ids, name="items"):
        self.number += 1
        dim = self.client.spec(name).dim
        values = np.random.default_rng(self.number).standard_normal((len(ids), dim)).astype(np.float32)
        self.client.push([(name, self.route(name, ids), values)], clock=0)

    def tables(self, name):
        tables = (shard.core.tables.entry(name) for shard, _ in self.shards._shards)
        return [entry.table for entry in tables if entry is not None]

    def remove(self, ids, name="items"):  # no request does so yet
        route = self.route(name, ids)
        for table, own in zip(self.tables(name), np.split(route.ids, route.splits[1:-1]), strict=True):
            table.remove(own)

    def take(self, name, **rest):
        return take_snapshot(self.client, self.url, name, **{"incremental": True, **rest})

    def contents(self):
        """(table, id) -> the bytes of its row and state, of all tables."""
        names = self.client.status()[0].tables
        return {
            (name, id_): found
            for name in (one.name for one in names)
            for table in self.tables(name)
            for id_, found in rows_of(table.scan()).items()
        }

    def restored(self, num_shards=1, name=""):
        other = Job(num_shards, tables=())
        restore_snapshot(other.client, self.url, name)
        return other


def rows_of(blocks):
    found = {}
    for ids, *arrays in blocks:
        new = {id_: tuple(row.tobytes() for row in rows) for id_, *rows in zip(ids.tolist(), *arrays, strict=True)}
        assert not found.keys() & new.keys()
        found |= new
    return found


def read(stored):
    """What a snapshot holds, as one without shards reads it; as Job.contents."""
    tables = stored.manifest.tables
    return {(name, id_): row for name in tables for id_, row in rows_of(stored.read_table(name)).items()}


def is_full(url, name=""):
    """Of each shard, whether its part has all of its rows."""
    return [not any(table.increment for table in part.tables) for part in open_snapshot(url, name).manifest.shards]


def is_increment(url, name=""):
    return not any(is_full(url, name)) and open_snapshot(url, name).manifest.parent is not None


def in_memory():
    return f"memory://{secrets.token_hex(8)}/snaps"


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else in_memory()


def begun(url):
    """A job with a full snapshot, `full`, and rows that changed since."""
    made = Job(url=url)
    made.push(np.arange(NUM_IDS))
    made.push(np.arange(NUM_IDS), "users")
    made.take("full")
    made.push(np.arange(100))
    return made


@pytest.fixture
def job():
    return begun(in_memory())


@pytest.fixture
def disk_job(tmp_path):
    return begun(str(tmp_path))


@pytest.mark.parametrize("seed", range(2))
def test_a_chain_holds_what_a_full_snapshot_of_that_moment_does(seed):
    """Pushes, loads, removed rows, new tables, failed snapshots, those of another folder, in any order."""
    rng = np.random.default_rng(seed)
    job, elsewhere = Job(int(rng.integers(1, 4)), in_memory()), in_memory()
    job.push(np.arange(NUM_IDS))
    kinds = set()
    steps = rng.choice(
        ["push", "load", "remove", "table", "fail", "elsewhere", "take"], 40, p=[0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    )
    for number, step in enumerate(steps):
        ids, name = rng.choice(NUM_IDS + 500, rng.integers(1, 60), replace=False), str(rng.choice(NAMES[:2]))
        match step:
            case "push":
                job.push(ids, name)
            case "load":
                route = job.route(name, ids)
                job.client.load(name, route, np.full((len(ids), 4), number, np.float32))
            case "remove":
                job.remove(ids, name)
            case "table":
                job.declare("late")
                job.push(ids, "late")
            case "fail":
                begin_snapshot(job.client, job.url, f"failed-{number}", incremental=True).cancel()
            case "elsewhere":
                take_snapshot(job.client, elsewhere, f"s{number}", incremental=bool(rng.integers(2)))
            case "take":
                want = job.contents()
                running = begin_snapshot(job.client, job.url, f"s{number}", incremental=True)
                job.push(ids, name)
                running.finish()
                kinds.add(is_increment(job.url))
                assert read(open_snapshot(job.url)) == want
                assert open_snapshot(job.url).manifest.rows == len(want)
    last = job.take("last")
    want = job.contents()
    assert (last.rows, kinds) == (len(want), {False, True})
    for num_shards in (1, 2, 3):
        assert job.restored(num_shards).contents() == want


def test_an_increment_has_the_rows_that_changed_and_says_whose_it_is(url):
    job = Job(url=url)
    job.push(np.arange(NUM_IDS))
    first = job.take("one")
    job.push(np.arange(100))
    second = job.take("two")
    assert (first.parent, second.parent, second.rows) == ("", Storage(url).at("one"), NUM_IDS)
    assert second.bytes < first.bytes / 10
    stored = open_snapshot(url)
    manifest = stored.manifest
    assert sum(table.rows for part in manifest.shards for table in part.tables) == 100
    for blocks in (blocks for part in manifest.shards for blocks in part.tables):
        for file in blocks.files:
            ids, _, _ = read_block(stored.storage, stored.folder, file, blocks)
            buckets = mix64(ids, blocks.spec.space_key) >> np.uint64(52)
            assert (file.first_bucket, file.last_bucket) == (buckets.min(), buckets.max())
    assert manifest.parent.sha256 == hashlib.sha256(Storage(url).read(f"one/{MANIFEST}")).hexdigest()
    assert job.restored(3).contents() == job.contents()
    assert len(job.restored(1, "one").contents()) == NUM_IDS


def test_nothing_is_watched_until_somebody_wants_an_increment():
    job = Job(url=in_memory())
    job.push(np.arange(NUM_IDS))
    job.take("one", incremental=False)
    assert all(table._dirty is None for table in job.tables("items"))
    job.take("two")
    assert is_full(job.url) == [True, True]  # of `one` no shard knows what changed since
    job.take("three")
    assert is_increment(job.url)


def test_after_eight_increments_or_half_of_the_rows_a_full_one_is_taken(job):
    kinds = []
    for number in range(10):
        job.push(np.arange(100))
        job.take(f"few-{number}")
        kinds.append(is_increment(job.url))
    assert kinds == [True] * MOST_INCREMENTS + [False, True]
    kinds = []
    for number in range(6):
        job.push(np.arange(1200))  # of 6,000 rows
        job.take(f"many-{number}")
        kinds.append(is_increment(job.url))
    assert kinds == [True, True, False, True, True, False]
    assert job.restored().contents() == job.contents()


def test_keep_counts_a_full_one_and_its_increments_once(job, monkeypatch):
    monkeypatch.setattr(module, "MOST_INCREMENTS", 2)
    held = []
    for number in range(7):
        job.push(np.arange(50))
        job.take(f"s{number}", keep=2)
        held.append(list_snapshots(job.url))
    assert held[4] == ["full", "s0", "s1", "s2", "s3", "s4"]  # s2 is a full one
    assert held[5] == ["s2", "s3", "s4", "s5"]  # and s5
    assert sorted(Storage(job.url).sizes("")) == ["LATEST", *held[6]]
    for name in held[6]:
        assert len(read(open_snapshot(job.url, name))) == 2 * NUM_IDS


def test_keep_removes_no_snapshot_while_it_cannot_be_read_what_others_need(job, monkeypatch):
    """The full one of a chain was removed where the storage did not give the increment behind it, without which nobody
    knew that the last of the chain needs it.
    """
    monkeypatch.setattr(module, "MOST_INCREMENTS", 2)
    job.take("s0")
    job.push(np.arange(50))
    job.take("s1")
    want, read_file = job.contents(), Storage.read

    def hang(self, path):
        if path == f"s0/{MANIFEST}" or self.at(path).endswith(f"/s0/{MANIFEST}"):
            raise errors.SnapshotUnreadable(path=path, reason="no answer")
        return read_file(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read", hang)
        job.take("s2", keep=2)
    assert list_snapshots(job.url) == ["full", "s0", "s1", "s2"]
    assert job.restored(2, "s1").contents() == want
    job.take("s3", keep=1, incremental=False)
    assert list_snapshots(job.url) == ["s3"]


def test_keep_counts_no_increments_of_a_damaged_one(job, monkeypatch):
    """They took the place of a whole snapshot, which was removed."""
    monkeypatch.setattr(module, "MOST_INCREMENTS", 2)
    for name in ("s0", "s1"):
        job.take(name)
    storage = Storage(job.url)
    storage.replace(f"s0/{MANIFEST}", storage.read(f"s0/{MANIFEST}")[:-1])
    job.take("s2", keep=2)
    assert all(is_full(job.url))
    assert "full" in list_snapshots(job.url)
    job.restored(2, "full")


def test_keep_removes_no_parent_of_the_newest_where_the_clock_was_set_back(job, monkeypatch):
    for name, now in (("a", 2000.0), ("b", 1000.0), ("c", 1001.0)):
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        job.push(range(NUM_IDS) if name == "b" else [5])
        job.take(name, keep=1)
    assert list_snapshots(job.url) == ["b", "c"]
    job.restored()


def test_an_increment_whose_parent_is_gone_or_another_one_is_refused_and_the_next_is_full(job):
    job.take("two")
    storage, fresh = Storage(job.url), Job(2, tables=())
    path = f"full/{MANIFEST}"
    data, other = storage.read(path), replace(open_snapshot(job.url, "full").manifest, created=1.0)
    for spoilt in (None, data[:-1], pack_manifest(other)):
        storage.remove(path)
        if spoilt is not None:
            storage.replace(path, spoilt)
        with raises(errors.SnapshotDamaged, path=storage.at(path)):
            restore_snapshot(fresh.client, job.url)
        with raises(errors.SnapshotDamaged, path=storage.at(path)):
            list(open_snapshot(job.url).read_table("items"))
        assert all(not status.tables for status in fresh.client.status())
    job.take("three")
    assert is_full(job.url) == [True, True]
    assert job.restored().contents() == job.contents()


def test_a_file_of_a_parent_that_is_damaged_or_gone_changes_no_shard(disk_job, tmp_path):
    job = disk_job
    job.take("two")
    file = next(tmp_path.glob("full/shard-1-*/*.safetensors"))
    data, fresh = bytearray(file.read_bytes()), Job(2, tables=())
    data[len(data) // 2] ^= 4
    for spoilt in (bytes(data), None):
        file.write_bytes(spoilt) if spoilt is not None else file.unlink()
        with raises(errors.SnapshotDamaged, path=str(file)):
            restore_snapshot(fresh.client, job.url)
        assert all(not status.tables for status in fresh.client.status())


def of_other_shards(manifest):
    part = replace(manifest.shards[0], num_shards=1)
    return replace(manifest, shards=(part,))


def without_table(manifest):
    return replace(manifest, shards=tuple(replace(part, tables=part.tables[1:]) for part in manifest.shards))


@pytest.mark.parametrize("spoil", [of_other_shards, without_table])
def test_an_increment_of_what_does_not_fit_is_damaged(job, spoil):
    job.take("two")
    storage = Storage(job.url)
    data = pack_manifest(spoil(open_snapshot(job.url, "full").manifest))
    storage.replace(f"full/{MANIFEST}", data)
    manifest = open_snapshot(job.url).manifest
    parent = replace(manifest.parent, sha256=hashlib.sha256(data).hexdigest())
    storage.replace(f"two/{MANIFEST}", pack_manifest(replace(manifest, parent=parent)))
    with pytest.raises(errors.SnapshotDamaged):
        job.restored()


def test_an_increment_of_a_table_of_another_dim_is_damaged(job):
    job.take("two")
    other = Job(url=job.url, tables=())
    for name in NAMES[:2]:
        other.declare(name, dim=5)
        other.push(np.arange(NUM_IDS), name)
    other.take("other")
    manifest = replace(open_snapshot(job.url, "two").manifest, parent=Parent("../other", open_snapshot(job.url).sha256))
    Storage(job.url).replace(f"two/{MANIFEST}", pack_manifest(manifest))
    with raises(errors.SnapshotDamaged, path=Storage(job.url).at("two")):
        job.restored(name="two")


def test_what_shards_know_of_is_a_snapshot_and_no_name_or_place(job):
    other = Job(url=job.url)
    other.push(np.arange(NUM_IDS))
    other.take("theirs")
    job.take("two")
    assert is_full(job.url) == [True, True]  # the latest was of other shards
    Storage(job.url).remove("two")
    other.take("two")
    job.push(np.arange(5))
    job.take("three")
    assert is_full(job.url) == [True, True]
    assert job.restored().contents() == job.contents()


def test_a_shard_that_knows_nothing_writes_its_whole_part_beside_the_others_increment(job):
    for name in NAMES[:2]:
        job.tables(name)[1]._marks.clear()  # as in another process
    job.take("two")
    assert is_full(job.url) == [False, True]
    job.push(np.arange(50, 150))
    job.take("three")
    assert is_increment(job.url)
    assert read(open_snapshot(job.url)) == job.restored(3).contents() == job.contents()


def test_shards_that_were_restored_take_a_full_one(job):
    restore_snapshot(job.client, job.url, replace_tables=True)
    job.push(np.arange(10))
    job.take("two")
    assert is_full(job.url) == [True, True]
    assert job.restored().contents() == job.contents()


def fail_to_pack(monkeypatch):
    def full(part):
        if part.shard == 1:
            raise OSError(28, "No space left on device")
        return pack_part(part)

    monkeypatch.setattr(shard_side, "pack_part", full)


def fail_to_sync(monkeypatch):
    def full(handle):
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("fail", [fail_to_pack, fail_to_sync])
@pytest.mark.parametrize("times", [1, 4])
def test_what_changed_before_a_snapshot_that_failed_is_in_the_next(disk_job, monkeypatch, fail, times):
    job = disk_job
    for number in range(times):
        with monkeypatch.context() as patch:
            fail(patch)
            # the shard that fails first may remove the empty folder while the other makes its own in it
            with raises(errors.SnapshotNotWritten, reason=re.compile("No space left|No such file")):
                job.take(f"failed-{number}")
        job.push(np.arange(200 + number, 300))
    assert list_snapshots(job.url) == ["full"]
    job.take("two")
    assert is_increment(job.url) == (times < 4)  # a shard remembers the last four
    assert job.restored().contents() == job.contents()


def test_one_whose_parent_is_removed_while_it_is_written_is_none(job):
    running = begin_snapshot(job.client, job.url, "two", incremental=True)
    Storage(job.url).remove(f"full/{MANIFEST}")
    with raises(errors.SnapshotDamaged, path=Storage(job.url).at(f"full/{MANIFEST}")):
        running.finish()
    assert list_snapshots(job.url) == []
    job.take("three")
    assert is_full(job.url) == [True, True]


def test_a_parent_that_is_no_neighbour_makes_a_full_one(job):
    place = in_memory()
    url = f"{place}/step-1"
    begin_snapshot(job.client, url, "one", incremental=True, parent_url=f"{job.url}/full").finish()
    assert is_full(url) == [True, True]
    begin_snapshot(job.client, f"{place}/step-2", "one", incremental=True, parent_url=f"{url}/one").finish()
    assert is_increment(f"{place}/step-2")
    assert read(open_snapshot(f"{place}/step-2")) == job.contents()


def test_a_chain_is_as_whole_in_another_folder(disk_job, tmp_path):
    job = disk_job
    job.take("two")
    shutil.copytree(job.url, tmp_path / "moved" / "here")
    want = job.contents()
    shutil.rmtree(tmp_path / "full")
    job.url = str(tmp_path / "moved" / "here")
    assert job.restored().contents() == want


class Run:
    """Checkpoints of a job, one after the other."""

    def __init__(self, url, keep=1):
        self.job, self.folder = begun(in_memory()), CheckpointFolder(url, keep)
        self.storage, self.step, self.best = Storage(url), 0, None
        section = {"folder": url, "incremental": True}
        self.of = {"job": make_job(checkpoint=section), "world_size": 1, "output": None}

    def save(self, num_ids=50, *, best=False):
        """Take one; whether it is an increment."""
        self.step += 1
        self.job.push(np.arange(num_ids))
        url = self.folder.new_url(self.step)
        self.best = url if best else self.best
        states = {"shared": b"", "worker-0": b""}
        self.folder.begin(states, url=url, best=self.best, step=self.step, shards=self.job.client, **self.of).wait()
        return is_increment(url, SNAPSHOT)

    def steps(self):
        return [int(name.removeprefix("step-")) for name in sorted(self.storage.sizes("")) if name.startswith("step-")]


def test_a_checkpoint_is_an_increment_of_the_one_before_and_what_one_needs_stays(monkeypatch):
    monkeypatch.setattr(module, "MOST_INCREMENTS", 3)
    run, kinds, left = Run(in_memory(), keep=1), [], []
    for number in range(10):
        kinds.append(run.save(best=number == 4))
        left.append(run.steps())
    assert kinds == [False, True, True, True, False, True, True, True, False, True]
    assert left[:5] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [5]]
    assert left[7:] == [[5, 6, 7, 8], [5, 9], [5, 9, 10]]  # 5 is the best
    for step in left[-1]:
        stored = open_snapshot(run.storage.at(f"step-{step:09d}"), SNAPSHOT)
        assert len(read(stored)) == 2 * NUM_IDS
    assert read(stored) == run.job.contents()


def test_a_best_checkpoint_keeps_what_it_is_an_increment_of(monkeypatch):
    monkeypatch.setattr(module, "MOST_INCREMENTS", 2)
    run = Run(in_memory(), keep=0)  # as of a run that keeps only the best
    seen = [(run.save(best=True), run.steps()) for _ in range(5)]
    assert seen == [(False, [1]), (True, [1, 2]), (True, [1, 2, 3]), (False, [4]), (True, [4, 5])]


def test_checkpoints_stay_while_it_cannot_be_read_what_they_need(monkeypatch):
    monkeypatch.setattr(module, "MOST_INCREMENTS", 1)
    run, read_file = Run(in_memory(), keep=2), Storage.read
    assert [run.save() for _ in range(3)] == [False, True, False]

    def hang(self, path):
        if self.at(path).endswith(f"step-000000003/{SNAPSHOT}/{MANIFEST}") and list_snapshots(newest):
            raise errors.SnapshotUnreadable(path=path, reason="no answer")
        return read_file(self, path)

    newest = run.storage.at("step-000000004")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read", hang)
        run.save()
    assert run.steps() == [1, 2, 3, 4]
    run.save()
    assert run.steps() == [3, 4, 5]


def test_a_checkpoint_that_failed_leaves_its_changes_to_the_next(monkeypatch):
    run = Run(in_memory())
    run.save()
    with monkeypatch.context() as patch:
        fail_to_pack(patch)
        with pytest.raises(CheckpointNotWritten):
            run.save(num_ids=200)
    assert run.save(num_ids=10)
    assert run.steps() == [1, 3]
    assert read(open_snapshot(run.storage.at("step-000000003"), SNAPSHOT)) == run.job.contents()


def test_the_latest_checkpoint_is_the_last_one_where_the_clock_was_set_back(monkeypatch):
    run = Run(in_memory(), keep=2)
    for now in (2000.0, 1000.0, 1001.0, 1002.0):
        monkeypatch.setattr(folder_module.time, "time", lambda now=now: now)
        run.save()
    assert run.storage.at("step-000000004") == checkpoint_at(run.storage.url).url
    assert checkpoint_names(run.storage)[-2:] == ["step-000000003", "step-000000004"]
