"""Folders that an earlier version wrote: a shard recovers from the logs, and has the snapshots' rows restored onto it.

`write_logs` and `write_snapshots` wrote them. A change of a format keeps them, and adds folders of its own.
"""

import hashlib
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest

from embershard.proto.codec.payload import encode_elements, encode_rows
from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import ClockAhead, UnknownTable
from embershard.proto.messages import (
    KIND_OF,
    PACKED,
    Compress,
    Declare,
    Heartbeat,
    Leave,
    Load,
    Push,
    PushToken,
    Rendezvous,
    Restore,
    Snapshot,
    TableCodecs,
    TakeSplit,
)
from embershard.proto.routing import Placement
from embershard.proto.snapshot.manifest import MANIFEST, Manifest, Parent, pack_manifest, unpack_manifest, unpack_part
from embershard.proto.spec import SGD, Adagrad
from embershard.ps.bases.base import read_bases
from embershard.ps.events import _REQUESTS, EXPIRED, RESTORED, RESTORED_ROWS, SETTLED, TERM
from embershard.ps.journal.summary import summarize
from embershard.ps.restore import Contents
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from harness.eventually import eventually
from harness.logged_shard import LoggedShard, bases_of, install
from harness.logs import FOLDER, disk_of, ids, open_log
from harness.shards import gradients, ids_of, join, make_shard, push, rows, table
from harness.simulated_disk import SimulatedDisk

GOLDEN = Path(__file__).parents[1] / "golden"
INCREMENT, EVENTS = GOLDEN / "log-2-increment", GOLDEN / "log-1-events"
SNAPSHOTS = GOLDEN / "snapshots"
ADAGRAD = Adagrad(lr=0.5)
DIMS = {"plain": 1, "adagrad": 2}


def write_logs():
    """Write `log-2-increment` and `log-1-events`."""
    for stored, write in ((INCREMENT, with_an_increment), (EVENTS, with_all_events)):
        disk = SimulatedDisk()
        log = open_log(disk, lineage=0xE5BE, package="0.2.0", new_id=ids())
        one = LoggedShard(disk, "fsync", folder=log, segment_bytes=2048)
        write(one, one.shard.system.now())
        one.write()
        one.log.journal.segments.close()
        for folder in (FOLDER, *(FOLDER / name for name in bases_of(disk))):
            (stored / folder.relative_to(FOLDER)).mkdir(parents=True, exist_ok=True)
            for name in disk.list(folder):
                if not name.startswith(("LOCK", "spare-", "base-")):
                    (stored / (folder / name).relative_to(FOLDER)).write_bytes(disk.content(folder / name))


def with_an_increment(one, now):
    """A base, an increment of it with a push that waits for its clock, and a push that closes this clock."""
    handle = partial(one.shard.handle, now=now)
    for name, optimizer in (("plain", SGD(lr=1.0)), ("adagrad", ADAGRAD)):
        handle(Declare(table(name, 2, optimizer=optimizer), lineage=7, begins_lineage=True))
    handle(push(*(gradients([*range(20)], name=name, dim=2) for name in ("plain", "adagrad")), worker=5))
    one.take_base()
    handle(push(gradients([3, 30], name="adagrad", dim=2), worker=5, seq=2, first=2))
    for worker in (0, 1):
        handle(join(worker, workers=2))
    handle(push(gradients([3], 4.0, name="plain", dim=2), worker=0))
    handle(Declare(table("empty", 1), lineage=7))
    one.take_base()
    handle(push(gradients([4], 2.0, name="plain", dim=2), worker=1))


def test_a_log_with_an_incremental_base_is_recovered():
    disk = disk_of(INCREMENT)
    one = LoggedShard(disk, "fsync")
    chain = read_bases(disk, FOLDER, one.folder.manifest)
    assert [bool(base.parent) for base in chain] == [False, True]
    assert [(base.lsn, base.redo_lsn) for base in one.folder.manifest.bases] == [(4, 4), (9, 8)]
    assert one.shard.core.lsn == 11  # the base's, a push, and the new term
    plain = [-1.0] * 20
    plain[3], plain[4] = -3.0, -2.0  # two workers' gradients, of 4 and 2, by their mean
    np.testing.assert_array_equal(rows(one.shard, *range(20), name="plain"), np.repeat(plain, 2).reshape(-1, 2))
    adagrad, states = records(one.shard, "adagrad", 3, 19, 30)
    np.testing.assert_allclose(adagrad[:, 0], [-0.85355339, -0.5, -0.5], rtol=1e-6)
    np.testing.assert_array_equal(states, np.float32([[2, 2], [1, 1], [1, 1]]))
    assert (one.shard.core.clock.open, one.shard.core.tables.names()) == (1, ["plain", "adagrad", "empty"])
    assert [row[:3] for row in one.shard.core.pushes.control()["windows"]] == [[5, 1, 2], [0, 1, 1], [1, 1, 1]]


def with_all_events(one, now):
    """Each kind of event, with payloads of several forms; the tables of a restore take the place of the first one."""
    shard, handle = one.shard, partial(one.shard.handle, now=now)
    handle(Declare(table("gone", 1), lineage=7, begins_lineage=True))
    restored = Table(table("adagrad", 2, optimizer=ADAGRAD), OptimizerRegistry().find(ADAGRAD))
    restored.restore(ids_of(1, 2), np.float32([[1, 2], [3, 4]]), np.float32([[4, 4], [9, 9]]))
    install(shard, one.log, Contents([restored], [], 8, {"adagrad": (True, ("", "int8"))}))
    handle(Declare(table("plain", 2), lineage=8))
    for worker in range(4):
        handle(join(worker, workers=4, staleness=-1))
    part = gradients([1, 3], name="plain", dim=2)
    nan = replace(part, gradients=np.float32([[1, 1], [np.nan, 1]]), lr_scale=0.5)
    handle(push(part, gradients([1], 3.0, name="adagrad", dim=2)))
    handle(push(nan, seq=2, clock=1, first=2))
    values = np.float32([[127, 0], [-127, 64]])
    int8 = encode_rows(values, find_values("int8"), 1)
    topk = encode_elements(np.int64([3]), np.float32([8]), (2, 2), find_values("none"), None)
    handle(push(replace(part, gradients=int8, codec=PACKED), worker=1))
    handle(push(replace(part, gradients=topk, codec=PACKED), worker=1, seq=2, first=2, clock=1))
    twice = gradients([5, 5], name="plain", dim=2, unique=False)
    handle(push(twice, worker=1, seq=3, first=3, clock=2, difference=True))
    with pytest.raises(UnknownTable):
        handle(push(gradients([1], name="other"), worker=2))
    loaded = np.float32([[5, 6], [7, 8]])
    handle(Load("adagrad", 1, ids_of(2, 7), loaded, keep_state=True, token=PushToken(0, 1, 3, 3)))
    handle(Compress(revision=1, tables=[TableCodecs(table="plain", push="int8", pull="none")]))
    handle(Leave(worker=2, epoch=1))
    for worker in (0, 1, 3):
        for request in (
            TakeSplit(worker=worker, epoch=1, data_epoch=0, num_splits=9, done=-1),
            Rendezvous(worker, 1, "met", np.frombuffer(b"abc", np.uint8), participants=(0, 1)),
            Rendezvous(worker, 1, "not yet", np.full(2, worker, np.uint8)),
        ):
            try:
                handle(request)
            except ClockAhead:
                break
    for worker in (0, 1):
        shard.handle(Heartbeat(worker=worker, epoch=1), now + 50)
    shard.advance(now + 70)  # the lease of worker 3 has ended


def test_a_log_with_each_kind_of_event_is_recovered():
    disk = disk_of(EVENTS)
    kinds = {EXPIRED, SETTLED, TERM, RESTORED_ROWS, RESTORED, KIND_OF[Push], *(KIND_OF[kind] for kind in _REQUESTS)}
    assert set(summarize(FOLDER, disk).kinds) == kinds, "a new kind of event needs a stored log that has it"
    shard = LoggedShard(disk, "fsync").shard
    adagrad, states = records(shard, "adagrad", 1, 2, 7)
    np.testing.assert_allclose(adagrad, [[0.5839748, 1.5839748], [5, 6], [7, 8]], rtol=1e-6)
    np.testing.assert_array_equal(states, np.float32([[13, 13], [9, 9], [0, 0]]))
    plain, _ = records(shard, "plain", 1, 3, 5)
    np.testing.assert_array_equal(plain, np.float32([[-128.5, -1.5], [126, -73], [2, 2]]))
    control = shard.core.control()
    assert (control["lineage"], control["lsn"], control["clock"]["plain"]["open"]) == (8, 29, 2)
    assert control["tables"] == [["adagrad", None, True, ["", "int8"]], ["plain", None, False, ["none", "none"]]]
    members = [[row[:3] for row in control["clock"][name]] for name in ("members", "left")]  # id, epoch, clock
    assert members == [[[0, 1, 2], [1, 1, 3]], [[2, 1, 0], [3, 1, 0]]]
    # of each worker: its epoch, the highest seq that is settled, the first incomplete, and replies
    assert control["pushes"]["windows"] == [[0, 1, 3, 3, [[3, 2, 0]]], [1, 1, 3, 3, [[3, 1, 0]]], [2, 1, 0, 1, []]]
    met = ["met", [[0, b"abc"], [1, b"abc"]], True, [1, 3]]
    open_ = ["not yet", [[1, b"\x01\x01"], [3, b"\x03\x03"]], False, []]
    assert control["rendezvous"] == {"last": "met", "over": [], "open": [met, open_]}
    assert control["splits"] == {"pass": [0, 9, 3, 0], "back": [], "assignments": [[0, 1, 0], [1, 2, 1], [3, 4, 2]]}
    assert control["compression"] == {"revision": 1, "tables": [["plain", "int8", "none"]]}


def records(shard, name, *row_ids):
    """The rows and the optimizer's states of these ids."""
    return shard.core.tables.entry(name).table.records(ids_of(*row_ids))


def write_snapshots(folder=SNAPSHOTS):
    """Write `version-2`, its increment `version-3`, and `version-1`, which is the first of them as that has it."""
    shard = make_shard(table("plain", 1), table("adagrad", 2, optimizer=ADAGRAD))
    parent = None
    for number, (name, row_ids) in enumerate({"version-2": range(6), "version-3": [4, 9]}.items(), start=1):
        parts = [gradients(row_ids, name=table_name, dim=dim) for table_name, dim in DIMS.items()]
        shard.handle(push(*parts, seq=number, first=number))
        request = partial(Snapshot, url=str(folder), name=name, id=number, incremental=True)
        shard.handle(request(step="begin", parent=number - 1, max_share=1))
        assert eventually(lambda request=request: shard.handle(request(step="watch")).state == "done")
        part = unpack_part((folder / name / shard.handle(request(step="watch")).path).read_bytes(), "part")
        manifest = pack_manifest(Manifest(name, 0.0, "0.2.0", (part,), id=number, parent=parent))
        (folder / name / MANIFEST).write_bytes(manifest)
        parent = Parent(f"../{name}", hashlib.sha256(manifest).hexdigest())
    second, first = folder / "version-2", folder / "version-1"
    shutil.copytree(second, first, ignore=shutil.ignore_patterns("part.msgpack"))
    manifest = unpack_manifest((second / MANIFEST).read_bytes(), "second")
    parts = tuple(replace(part, control=None) for part in manifest.shards)
    (first / MANIFEST).write_bytes(pack_manifest(replace(manifest, name="version-1", shards=parts)))


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_snapshot_of_each_version_is_restored_onto_shards(version, num_shards):
    name = f"version-{version}"
    data = (SNAPSHOTS / name / MANIFEST).read_bytes()
    assert msgpack.unpackb(data)["version"] == version
    found = {name: {} for name in DIMS}  # id -> its row and the optimizer's state
    for index in range(num_shards):
        shard = Shard(index, Placement.even(num_shards), OptimizerRegistry())
        request = partial(Restore, url=str(SNAPSHOTS), name=name, id=9, sha256=hashlib.sha256(data).hexdigest())
        shard.handle(request(step="begin"))
        assert eventually(lambda shard=shard, request=request: shard.handle(request(step="watch")).state == "ready")
        shard.handle(request(step="install"))
        for one in shard.core.tables.all():
            for row_ids, *parts in one.scan():
                found[one.spec.name] |= dict(zip(row_ids.tolist(), np.hstack(parts).tolist(), strict=True))
    once, twice = [-0.5] * 2 + [1.0] * 2, [np.float32(-0.5 - 0.5 / np.sqrt(2))] * 2 + [2.0] * 2
    changed = version == 3
    assert found["plain"] == {key: [-1.0] for key in range(6)} | ({4: [-2.0], 9: [-1.0]} if changed else {})
    adagrad = {key: once for key in range(6)} | ({4: twice, 9: once} if changed else {})
    assert found["adagrad"].keys() == adagrad.keys()
    for key, row in adagrad.items():
        np.testing.assert_allclose(found["adagrad"][key], row, rtol=1e-6)


if __name__ == "__main__":
    write_logs()
    write_snapshots()
