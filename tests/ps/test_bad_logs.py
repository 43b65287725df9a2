"""A shard that is started on a log that cannot be its own says so by an error with a type, a file and a remedy."""

import errno
import os
import sys
from contextlib import ExitStack
from itertools import chain, repeat

import pytest

import embershard as es
from embershard.proto import errors
from embershard.proto.clock import SystemClock
from embershard.proto.messages import Declare
from embershard.proto.routing import Placement
from embershard.proto.user_modules import sha256_of_modules
from embershard.ps import server
from embershard.ps.journal import disk as disks
from embershard.ps.journal.disk import LocalDisk
from embershard.ps.journal.folder import LogFolder
from embershard.ps.journal.manifest import MANIFEST
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.journal.record import encode_segment_header, read_segment_header
from embershard.ps.journal.segments import is_spare
from embershard.ps.options import ServerOptions
from embershard.ps.recovery import recover
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from harness.logged_shard import LoggedShard
from harness.logs import FOLDER
from harness.raises import raises
from harness.random_job import state_of
from harness.shards import gradients, push, table
from harness.simulated_disk import SimulatedDisk

ROW_FUNCTION = """
import embershard as es

@es.row_optimizer(state_per_dim=0, settings={{}})
def mine(weights, state, gradients, hyper):
    for i in range(len(weights)):
        weights[i] -= {factor} * hyper[0] * gradients[i]
"""


def log_of(folder, shard=0, of=1, pushes=40, imports=()):
    """The log of a shard, of several segments."""
    made = Shard(shard, Placement.even(of), OptimizerRegistry(imports))
    opened = LogFolder.open(folder, shard=shard, num_shards=of, modules=sha256_of_modules(imports))
    log = recover(made, opened, "log", segment_bytes=2048)
    made.handle(Declare(table()))
    for seq in range(1, pushes + 1):
        if not shard:
            made.handle(push(gradients([seq]), seq=seq, first=seq))
        while log.journal.write_group():
            pass
    log.journal.segments.close()
    opened.close()


def start(log_dir, shard=0, of=1, imports=()):
    """Start a shard's process, as far as its log; what it did to the files of its folder is an error of the test."""
    options = ServerOptions(shard=shard, of=of, log_dir=log_dir, imports=imports)
    made = Shard(shard, Placement.even(of), OptimizerRegistry(imports))
    return server._recover(made, options, RecoveryProgress())


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "LOCK"}


def segments(folder):
    return sorted(folder.glob("log-*"))


def of_another_job(folder, stack, monkeypatch):
    log_of(folder.parent / "other")
    segments(folder)[1].unlink()
    stray = segments(folder.parent / "other")[1]
    stray.rename(folder / stray.name)
    return errors.LogMismatch, {"path": str(folder / stray.name), "what": "lineage"}


def of_a_later_version(folder, stack, monkeypatch):
    path = segments(folder)[0]
    data = path.read_bytes()
    header = read_segment_header(data[:64])._replace(version=9)
    path.write_bytes(encode_segment_header(header) + data[64:])
    return errors.LogTooNew, {"path": str(path), "got": 9}


def damaged_inside(folder, stack, monkeypatch):
    path = segments(folder)[1]
    data = bytearray(path.read_bytes())
    data[64 + 30] ^= 1
    path.write_bytes(data)
    return errors.LogDamaged, {"path": str(path), "offset": 64, "lsn": int(path.name.split("-")[1])}


def without_a_segment(folder, stack, monkeypatch):
    path = segments(folder)[1]
    path.unlink()
    return errors.LogDamaged, {"lsn": int(path.name.split("-")[1])}


def without_its_manifest(folder, stack, monkeypatch):
    (folder / MANIFEST).unlink()
    return errors.LogDamaged, {"path": str(folder / MANIFEST)}


def used_by_another(folder, stack, monkeypatch):
    lock = LocalDisk().lock(folder / "LOCK")
    stack.callback(lock.close)
    return errors.LogLocked, {"path": str(folder)}


def on_a_read_only_disk(folder, stack, monkeypatch):
    original = os.open

    def refuse(path, flags, *rest, **named):
        if flags & (os.O_RDWR | os.O_WRONLY) and str(folder) in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(disks.os, "open", refuse)
    return errors.LogUnusable, {"path": str(folder / "LOCK")}


def on_a_drive_whose_locks_do_not_hold(folder, stack, monkeypatch):
    monkeypatch.setattr(disks.fcntl, "flock", lambda *_: None)
    return errors.LogUnusable, {"path": str(folder)}


CASES = [
    of_another_job, of_a_later_version, damaged_inside, without_a_segment, without_its_manifest, used_by_another,
    on_a_read_only_disk, on_a_drive_whose_locks_do_not_hold,
]  # fmt: skip


@pytest.mark.parametrize("break_", CASES, ids=lambda case: case.__name__)
def test_a_log_that_cannot_be_used_is_refused_by_name_and_stays_as_it_is(break_, tmp_path, monkeypatch):
    folder = tmp_path / "shard-0"
    log_of(folder)
    with ExitStack() as stack:
        error, fields = break_(folder, stack, monkeypatch)
        before = content(folder)
        with pytest.raises(error) as raised:
            start(tmp_path)
        monkeypatch.undo()
    assert {name: raised.value.fields[name] for name in fields} == fields
    assert content(folder) == before


def test_a_new_log_is_refused_where_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalDisk, "free_bytes", lambda *_: 1000)
    with raises(errors.LogUnusable, path=str(tmp_path / "shard-0")):
        start(tmp_path)


def test_a_shard_that_starts_again_waits_until_the_full_disk_has_room(tmp_path, monkeypatch, caplog):
    log_of(tmp_path / "shard-0")
    free = chain([1000, 1000], repeat(2**40))
    monkeypatch.setattr(LocalDisk, "free_bytes", lambda *_: next(free))
    pauses = []
    monkeypatch.setattr(SystemClock, "sleep", pauses.append)
    start(tmp_path)
    assert len(pauses) == 2
    assert len([line for line in caplog.messages if "the shard waits for room" in line]) == 1


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_a_shard_that_starts_again_has_the_room_that_the_last_process_had_reserved(mode, monkeypatch):
    disk = SimulatedDisk()
    shard = LoggedShard(disk, mode, segment_bytes=2**16)
    shard.log.journal.segments.prepare_spare()
    shard.begun()
    while any(map(is_spare, disk.list(FOLDER))):  # until its room is that of a segment, most of it empty
        shard.push(20)
        shard.write()
    rows = state_of(shard.shard.core)["rows"]
    disk.kill()
    disk.capacity = 2**40
    disk.capacity = 2**40 - disk.free_bytes(FOLDER) + 2**14
    monkeypatch.setattr(SystemClock, "sleep", lambda *_: pytest.fail("it waits"))
    assert state_of(LoggedShard(disk, mode, segment_bytes=2**16).shard.core)["rows"] == rows


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_a_shard_that_starts_again_waits_wherever_a_quota_has_no_room(mode, error, monkeypatch):
    disk = SimulatedDisk()  # whose free bytes say nothing of it
    shard = LoggedShard(disk, mode).begun()
    shard.push(3)
    shard.write()
    rows, refused, pauses = state_of(shard.shard.core)["rows"], set(), []
    disk.kill()

    def refuse_once(operation, path):
        """The names of segments are new at each try."""
        if operation in ("pwritev", "rename") and (place := (operation, path.name[:4])) not in refused:
            refused.add(place)
            raise OSError(error, os.strerror(error), str(path))

    disk.before = refuse_once
    progress, seen = RecoveryProgress(), set()

    def sleep(_, seconds):
        pauses.append(seconds)
        seen.add((progress.waits_for_room, progress.done_bytes == progress.total_bytes))

    monkeypatch.setattr(SystemClock, "sleep", sleep)
    assert state_of(LoggedShard(disk, mode, progress=progress).shard.core)["rows"] == rows
    assert len(pauses) == len(refused) >= 3
    assert seen == {(os.strerror(error), True)}
    assert progress.waits_for_room == ""


@pytest.mark.parametrize(("shard", "of"), [(0, 2), (1, 1)])
def test_a_log_of_another_shard_or_number_of_shards_is_refused(shard, of, tmp_path):
    log_of(tmp_path / "shard-0", *((0, 1) if of == 2 else (1, 2)))
    before = content(tmp_path / "shard-0")
    with pytest.raises(errors.LogMismatch) as raised:
        start(tmp_path, of=of)
    assert (raised.value.fields["what"], raised.value.fields["path"]) == ("shard", str(tmp_path / "shard-0" / MANIFEST))
    assert content(tmp_path / "shard-0") == before


def test_a_shard_begins_no_log_beside_those_of_another_number_of_shards(tmp_path):
    log_of(tmp_path / "shard-0")
    with pytest.raises(errors.LogMismatch) as raised:
        start(tmp_path, shard=1, of=2)
    assert raised.value.fields["path"] == str(tmp_path / "shard-0" / MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0"]


def test_a_shard_begins_no_log_in_the_folder_of_one(tmp_path):
    log_of(tmp_path / "shard-0")
    before = content(tmp_path / "shard-0")
    with pytest.raises(errors.LogUnusable) as raised:
        start(tmp_path / "shard-0")
    assert raised.value.fields["path"] == str(tmp_path / "shard-0")
    assert content(tmp_path / "shard-0") == before


def test_a_row_function_that_has_changed_since_the_log_was_written_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "row_functions_of_mine.py"
    monkeypatch.syspath_prepend(tmp_path)
    source.write_text(ROW_FUNCTION.format(factor=1))
    log_of(tmp_path / "shard-0", imports=("row_functions_of_mine",))
    before = content(tmp_path / "shard-0")
    source.write_text(ROW_FUNCTION.format(factor=2))
    with pytest.raises(errors.LogMismatch) as raised:
        start(tmp_path, imports=("row_functions_of_mine",))
    assert raised.value.fields["what"] == "module row_functions_of_mine with sha256"
    assert content(tmp_path / "shard-0") == before
    monkeypatch.delitem(sys.modules, "row_functions_of_mine")


@pytest.mark.parametrize("package", ["", "package_without_init."])
def test_a_module_beside_it_that_has_changed_is_refused_too(package, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / package.strip(".")
    folder.mkdir(exist_ok=True)
    module, helper = f"{package}row_functions_with_help", f"{package}helper_of_mine"
    (folder / "row_functions_with_help.py").write_text(f"import {helper}\n" + ROW_FUNCTION.format(factor=1))
    (folder / "helper_of_mine.py").write_text("FACTOR = 1\n")
    log_of(tmp_path / "shard-0", imports=(module,))
    (folder / "helper_of_mine.py").write_text("FACTOR = 2\n")
    with raises(errors.LogMismatch, what=f"module {helper} with sha256"):
        start(tmp_path, imports=(module,))
    for name in (module, helper):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_segment_is_named_by_its_id(number, tmp_path):
    log_of(tmp_path / "shard-0")
    missing = segments(tmp_path / "shard-0")[number]
    missing.unlink()
    with pytest.raises(errors.LogDamaged) as raised:
        start(tmp_path)
    assert missing.name.split("-")[2] in raised.value.fields["reason"]


def test_a_damaged_manifest_is_at_no_lsn(tmp_path):
    log_of(tmp_path / "shard-0")
    path = tmp_path / "shard-0" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"lineage", b"limeage"))
    with pytest.raises(errors.LogDamaged) as raised:
        start(tmp_path)
    assert (raised.value.fields["path"], raised.value.fields["lsn"]) == (str(path), 0)
    assert "LSN" not in raised.value.message


def test_logs_of_two_jobs_do_not_make_one(make_wires):
    wires = make_wires(2)
    for wire, lineage in zip(wires.wires, (5, 6), strict=True):
        wire.shard.handle(Declare(table(), lineage=lineage, begins_lineage=True))
    wires.wires[0].shard.handle(push(gradients([1])))
    spec = es.TableSpec(name="items", dim=3, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
    with pytest.raises(errors.RowsLost):
        wires.client().declare(spec)
