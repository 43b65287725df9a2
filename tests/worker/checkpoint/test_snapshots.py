"""Snapshots as a client takes, finds and restores them."""

import copy
import hashlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgpack
import numpy as np
import pytest
import safetensors.numpy
import torch
from half_codec import HALF_CODEC

from embershard.local_shards import InProcessShards, local
from embershard.proto import errors, spec
from embershard.proto.messages import GetStatus, Restore, Snapshot, Snapshotted, replace
from embershard.proto.routing import make_route
from embershard.proto.snapshot.manifest import MANIFEST, pack_part
from embershard.proto.snapshot.storage import Storage
from embershard.proto.snapshot.stored import list_snapshots, open_snapshot, read_manifest
from embershard.ps import snapshot as shard_side
from embershard.ps.restore import SnapshotReader
from embershard.worker.checkpoint import snapshots as client_side
from embershard.worker.checkpoint.snapshots import RunningSnapshot, begin_snapshot, restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.compression.settings import Compression
from embershard.worker.nn.wrap import wrap
from embershard.worker.session.session import Session
from harness.eventually import eventually
from harness.raises import raises

TABLE = spec.TableSpec(name="items", dim=4, optimizer=spec.Adam(lr=0.1))
IDS = np.arange(2000)
SOON = timedelta(seconds=0.2)


def push(client, seed=0, clock=0):
    route = make_route(IDS, TABLE.space_key, client.placement)
    gradients = np.random.default_rng(seed).standard_normal((len(IDS), 4)).astype(np.float32)
    order = np.empty(len(IDS), np.int64)
    order[route.index] = np.arange(len(IDS))
    client.push([("items", route, gradients[order])], clock=clock)


def rows(client, clock=0):
    """(N, dim) in the order of IDS."""
    route = make_route(IDS, TABLE.space_key, client.placement)
    return client.pull([("items", route)], clock=clock)[0][route.index]


def trained(shards=2, seed=0):
    client = local(shards).client
    client.declare(TABLE)
    push(client, seed)
    return client


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else f"memory://{secrets.token_hex(8)}/snaps"


def test_what_was_taken_is_restored_and_trains_on_alike(url):
    client = trained()
    then = rows(client)
    info = take_snapshot(client, url, "monday", extra={"step": 7})
    assert (info.rows, info.name, info.clock) == (2000, "monday", 0)
    push(client, 1)
    for shards in (1, 2, 3):
        other = local(shards).client
        manifest = restore_snapshot(other, url)
        assert manifest.extra == {"step": 7}
        assert np.array_equal(rows(other), then)
        push(other, 1)
        assert np.array_equal(rows(other), rows(client))


@pytest.mark.parametrize("local_steps", [None, 3])
def test_the_session_that_restores_reads_what_was_restored(local_steps, tmp_path):
    session, ids = Session(local(2).client, local_steps=local_steps), torch.arange(9)
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1))
    model = wrap(net, session, optimizer=spec.SGD(lr=0.1))
    take_snapshot(session.client, str(tmp_path))
    then = model(ids).detach()
    for _ in range(2):
        model(ids).sum().backward()
        session.step()
    assert not torch.equal(model(ids), then)
    restore_snapshot(session.client, str(tmp_path), replace_tables=True)
    assert torch.equal(model(ids), then)
    session.flush()  # nor does the round that was under way change it
    session.refresh()
    assert torch.equal(model(ids), then)


def test_no_residual_of_before_is_sent_to_what_was_restored(tmp_path):
    session, ids = local(2, compression=Compression(push="topk:0.25")), torch.arange(9)
    model = wrap(torch.nn.Embedding(9, 4), session, optimizer=spec.SGD(lr=0.1))
    take_snapshot(session.client, str(tmp_path))
    model(ids).sum().backward()
    session.step()
    assert session.client.compressor.residual_rows()
    restore_snapshot(session.client, str(tmp_path), replace_tables=True)
    assert not session.client.compressor.residual_rows()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_new_session_restores_before_it_wraps_a_model(tmp_path, shards):
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1))

    def train(session, model):
        model(torch.arange(9)).sum().backward()
        session.step()

    before = local(2)
    model = wrap(copy.deepcopy(net), before, optimizer=spec.SGD(lr=0.1))
    train(before, model)
    take_snapshot(before.client, str(tmp_path))
    train(before, model)

    session = local(shards)
    restore_snapshot(session.client, str(tmp_path))
    resumed = wrap(copy.deepcopy(net), session, optimizer=spec.SGD(lr=0.1))
    train(session, resumed)
    assert torch.equal(resumed(torch.arange(9)), model(torch.arange(9)))

    late = local(shards)
    wrapped = wrap(copy.deepcopy(net), late, optimizer=spec.SGD(lr=0.1))
    restore_snapshot(late.client, str(tmp_path), replace_tables=True)
    with pytest.raises(errors.MemoryLost):  # as docs/snapshots.md says
        train(late, wrapped)


def test_a_snapshot_begun_is_of_that_moment_while_training_goes_on(tmp_path):
    client = trained()
    then = rows(client)
    running = begin_snapshot(client, str(tmp_path))
    push(client, 1)
    running.finish()
    other = local(2).client
    restore_snapshot(other, str(tmp_path))
    assert np.array_equal(rows(other), then)


def test_a_table_that_travelled_by_a_users_codec_is_restored_by_shards_without_it(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(HALF_CODEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    session = local(1, imports=["mine"], compression=Compression(push="mine:half", pull="mine:half"))
    session.table(TABLE)
    push(session.client)
    take_snapshot(session.client, str(tmp_path / "snaps"))
    other = local(2).client
    restore_snapshot(other, str(tmp_path / "snaps"))
    assert (other.spec("items").push_codec.is_plain, other.spec("items").pull_codec.is_plain) == (True, True)
    session.compress("items", pull="none")
    assert np.array_equal(rows(other), rows(session.client))


def test_its_rows_are_read_without_shards(url):
    client = trained()
    take_snapshot(client, url)
    blocks = list(open_snapshot(url).read_table("items"))
    ids, weights, state = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    order = np.argsort(ids)
    assert np.array_equal(ids[order], IDS)
    assert np.array_equal(weights[order], rows(client))
    assert state.shape == (2000, 9)  # two moments of Adam, and its step
    with raises(errors.UnknownTable, table="users", known="items"):
        list(open_snapshot(url).read_table("users"))


def test_the_latest_is_found_by_its_folder_and_any_by_its_name(url):
    client = trained()
    take_snapshot(client, url, "one", extra={"n": 1})
    take_snapshot(client, url, "two", extra={"n": 2})
    assert read_manifest(url).extra == {"n": 2}
    assert read_manifest(url, "one").extra == {"n": 1}
    assert read_manifest(f"{url}/one").extra == {"n": 1}
    assert list_snapshots(url) == ["one", "two"]


def test_old_ones_and_leftovers_go_and_nothing_else_does(url):
    client = trained()
    storage = Storage(url)
    for name in ("one", "two"):
        take_snapshot(client, url, name)
    storage.make_folder("unfinished/shard-0-00000000000000ff")
    storage.replace("unfinished/shard-0-00000000000000ff/0-0.safetensors", b"x")
    storage.make_folder("mine/shard-0")
    storage.replace("mine/notes", b"x")
    storage.replace("two/notes", b"x")
    take_snapshot(client, url, "three", keep=1)
    assert list_snapshots(url) == ["three"]
    assert storage.read("mine/notes") == storage.read("two/notes") == b"x"
    assert storage.sizes("two") == {"notes": 1}
    assert not storage.sizes("unfinished")
    restore_snapshot(local(1).client, url)


def test_a_name_is_given_once(tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")
    with raises(errors.SnapshotExists, path=f"{tmp_path}/one"):
        take_snapshot(client, str(tmp_path), "one")
    with pytest.raises(errors.BadSnapshotName):
        take_snapshot(client, str(tmp_path), "../two")


def test_one_that_was_never_finished_is_none_and_the_one_before_loads(tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")
    begin_snapshot(client, str(tmp_path), "two")
    assert read_manifest(str(tmp_path)).name == "one"
    with pytest.raises(errors.SnapshotNotFound, match=r"never finished.* Snapshots there: one"):
        read_manifest(str(tmp_path), "two")


@pytest.mark.parametrize("latest", [None, b"../../etc", b"", b"\xff\xfe"])
def test_a_folder_without_a_latest_snapshot_says_so_and_which_it_has(latest, tmp_path):
    take_snapshot(trained(), str(tmp_path), "one")
    (tmp_path / "LATEST").unlink()
    if latest is not None:
        (tmp_path / "LATEST").write_bytes(latest)
    error = errors.SnapshotNotFound if latest is None else errors.SnapshotDamaged
    with pytest.raises(error, match=r"LATEST.* Snapshots there: one"):
        restore_snapshot(local(1).client, str(tmp_path))


def test_a_folder_of_other_folders_names_them_for_a_look_into_one(tmp_path):
    take_snapshot(trained(), str(tmp_path / "step-000000008"), "shards")
    (tmp_path / "OWNER").touch()
    (tmp_path / "step-000000008" / "shards" / "empty").mkdir()
    with pytest.raises(errors.SnapshotNotFound, match=r"no snapshots in it, only the folders step-000000008$"):
        read_manifest(str(tmp_path))
    assert read_manifest(str(tmp_path / "step-000000008")).name == "shards"
    with pytest.raises(errors.SnapshotNotFound, match=r"no LATEST in it. There are no snapshots in it$"):
        read_manifest(str(tmp_path / "step-000000008" / "shards" / "empty"))
    for place in ("none", "OWNER"):
        with pytest.raises(errors.SnapshotNotFound, match=rf"{place} holds no snapshot: there is no such folder"):
            read_manifest(str(tmp_path / place))


def lose_part(folder):
    (folder / "part.msgpack").rename(folder / "elsewhere")
    return "part.msgpack"


def cut_file(folder):
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    return str(file)


@pytest.mark.parametrize("fault", [lose_part, cut_file])
def test_what_is_not_there_as_a_shard_said_makes_no_snapshot(tmp_path, fault):
    running = begin_snapshot(trained(), str(tmp_path), "one")
    assert eventually(lambda: len(list(tmp_path.glob("one/shard-*/part.msgpack"))) == 2)
    (folder,) = tmp_path.glob("one/shard-1*")
    with pytest.raises(errors.SnapshotScattered, match=fault(folder)):
        running.finish()
    assert not (tmp_path / "one" / MANIFEST).exists()


def test_a_shard_that_cannot_write_fails_the_whole_and_the_others_stop(tmp_path, monkeypatch):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")

    def full(part):
        if part.shard == 1:
            raise OSError(28, "No space left on device")
        return pack_part(part)

    with monkeypatch.context() as patch:
        patch.setattr(shard_side, "pack_part", full)
        with pytest.raises(errors.SnapshotNotWritten, match=r"local/1: .*No space left .*Earlier snapshots are"):
            take_snapshot(client, str(tmp_path), "two")
    push(client, 1)
    assert read_manifest(str(tmp_path)).name == "one"
    assert not (tmp_path / "two").exists()  # what was written takes no room
    assert take_snapshot(client, str(tmp_path), "two").rows == 2000


@pytest.mark.parametrize("deaf", [False, True])
def test_what_a_slow_shard_still_writes_goes_too(monkeypatch, deaf):
    client, url = trained(), f"memory://{secrets.token_hex(8)}/snaps"  # its folders come with their files
    told, cancel, call = threading.Event(), shard_side.SnapshotWriter.cancel, client.connections.call

    def lose_cancels(requests, **options):
        found = call(requests, **options)
        is_cancel = any(isinstance(request, Snapshot) and request.step == "cancel" for request in requests.values())
        return {**found, 1: errors.EmbershardError(reason="not now")} if is_cancel and 1 in requests else found

    def tell(writer):
        cancel(writer)
        told.set()

    def late(writer, storage, prefix, *_):
        if writer._moment.shard == 1:
            raise OSError(28, "No space left on device")
        assert told.wait(100)
        time.sleep(0.1)  # what was removed by now would be written again
        with storage.create(f"two/{prefix}.safetensors") as file:
            file.write(b"rows")
        writer._go_on()

    monkeypatch.setattr(shard_side.SnapshotWriter, "cancel", tell)
    monkeypatch.setattr(shard_side.SnapshotWriter, "_write_table", late)
    if deaf:
        monkeypatch.setattr(client.connections, "call", lose_cancels)
    with pytest.raises(errors.SnapshotNotWritten, match="No space left"):
        take_snapshot(client, url, "two")
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(30)
    assert not Storage(url).sizes("two")


def test_another_snapshot_is_waited_for_while_it_goes_on(tmp_path, monkeypatch):
    def start(running):
        if others:
            raise errors.SnapshotRunning(name="another", rows=others.pop(0), total_rows=9)
        begin(running)

    client, begin, others = trained(), RunningSnapshot.start, list(range(9))
    monkeypatch.setattr(RunningSnapshot, "start", start)
    assert take_snapshot(client, str(tmp_path), "one").rows == 2000
    others += [1, 2, 2]
    with pytest.raises(errors.SnapshotRunning, match="'another'"):
        take_snapshot(client, str(tmp_path), "two")


def test_two_clients_that_take_snapshots_at_once_wait_for_each_other(tmp_path, monkeypatch):
    shards, go, write = InProcessShards(2), threading.Event(), shard_side.SnapshotWriter._write

    def slow(writer):
        assert writer._moment.shard == 0 or go.wait(100)
        write(writer)

    monkeypatch.setattr(shard_side.SnapshotWriter, "_write", slow)
    first, second = (Client(shards.transports(), worker=worker) for worker in (0, 1))
    first.declare(TABLE)
    push(first)
    running = begin_snapshot(first, str(tmp_path / "a"), "one")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(take_snapshot, second, str(tmp_path / "b"), "two")
        # the first part of the other one is done, before the second part of this one
        assert eventually(lambda: list(tmp_path.glob("b/two/shard-0-*/part.msgpack")) or other.done())
        go.set()
        assert running.finish().rows == other.result(100).rows == len(IDS)
    assert [len(list(tmp_path.glob(f"{name}/shard-*"))) for name in ("a/one", "b/two")] == [2, 2]


def test_who_waits_for_another_snapshot_has_begun_on_no_shard(make_wires, tmp_path):
    wires = make_wires(2)
    client = wires.client(timeout=SOON / 4)
    client.declare(TABLE)

    def busy(request):
        if isinstance(request, Snapshot) and request.step == "begin":
            raise errors.SnapshotRunning(name="another", rows=2, total_rows=3)

    wires.wires[0].before = busy
    with raises(errors.SnapshotRunning, name="another"):
        take_snapshot(client, str(tmp_path), "one")
    assert all(request.step == "cancel" for request in wires.wires[1].seen if isinstance(request, Snapshot))


def test_others_that_take_snapshots_of_as_many_rows_one_after_the_other_are_waited_for(tmp_path, monkeypatch):
    def start(running):
        if names:
            raise errors.SnapshotRunning(name=names.pop(), rows=0, total_rows=9)
        begin(running)

    client, begin, names = trained(), RunningSnapshot.start, list("abcd")
    monkeypatch.setattr(RunningSnapshot, "start", start)
    assert take_snapshot(client, str(tmp_path), "one").rows == 2000


def test_a_clock_that_does_not_close_is_given_up(tmp_path):
    with pytest.raises(errors.SnapshotTimeout, match=r"shard 0: waiting.* take it at once"):
        take_snapshot(trained(), str(tmp_path), "one", at_clock=5, wait_timeout=SOON)


LOOKED_AT = Snapshot(url="", name="one", id=7, step="begin")


def answer_looks(wires, look, room=lambda: ""):
    """Have both shards answer looks at a snapshot by what `look` says, and say that they wait for room."""
    status = wires.wires[0].shard.status()

    def before(request):
        if isinstance(request, Snapshot):
            return Snapshotted(state=look())
        return replace(status, waits_for_room=room()) if isinstance(request, GetStatus) else None

    wires.hold(before)


def test_a_clock_that_cannot_close_for_want_of_room_is_waited_for_longer(make_wires):
    wires, end = make_wires(2), time.monotonic() + 3 * SOON.total_seconds()
    client = wires.client(recovery_timeout=timedelta(seconds=30))
    answer_looks(
        wires,
        lambda: "waiting" if time.monotonic() < end else "done",
        lambda: "No space left on device" if time.monotonic() < end else "",
    )
    assert [reply.state for reply in client_side._await(client, LOOKED_AT, Snapshotted, "done", SOON)] == ["done"] * 2
    end, client = time.monotonic() + 60, wires.client(recovery_timeout=SOON)
    with pytest.raises(errors.SnapshotTimeout):  # not for ever
        client_side._await(client, LOOKED_AT, Snapshotted, "done", SOON)


def test_a_clock_has_its_time_to_close_once_a_shard_answers_that_had_no_room(make_wires):
    wires, end, said = make_wires(2), time.monotonic() + 2 * SOON.total_seconds(), []

    def look():
        if len(said) >= 2 and time.monotonic() < end:
            raise errors.LogStalled(path="/logs", reason="No space left on device", retry_after_ms=5)
        said.append("waiting" if len(said) < 4 else "done")
        return said[-1]

    answer_looks(wires, look)
    client = wires.client(timeout=SOON / 2)
    assert [reply.state for reply in client_side._await(client, LOOKED_AT, Snapshotted, "done", SOON)] == ["done"] * 2
    assert said == ["waiting"] * 4 + ["done"] * 2


def test_a_damaged_snapshot_changes_no_shard(tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")
    file = next(tmp_path.glob("one/shard-1-*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    fresh = local(2).client
    with pytest.raises(errors.SnapshotDamaged, match=str(file)):
        restore_snapshot(fresh, str(tmp_path))
    assert all(not status.tables for status in fresh.status())
    with pytest.raises(errors.SnapshotDamaged):
        list(open_snapshot(str(tmp_path)).read_table("items"))


def test_rows_that_no_shard_finds_make_no_restore(tmp_path, monkeypatch):
    take_snapshot(trained(), str(tmp_path))
    monkeypatch.setattr("embershard.proto.snapshot.manifest.Manifest.rows", property(lambda self: 2001))
    fresh = local(2).client
    with pytest.raises(errors.SnapshotDamaged, match="2000 rows in its files, it says 2001"):
        restore_snapshot(fresh, str(tmp_path))
    assert all(not status.tables for status in fresh.status())


@pytest.mark.parametrize("by_worker", [False, True], ids=["beside the workers", "by a worker at its last push"])
def test_all_shards_show_one_clock_of_synchronous_workers(tmp_path, by_worker):
    shards, seen, started = InProcessShards(2), [], threading.Event()

    def work(worker):
        client = Client(shards.transports(), worker=worker)
        client.join(Terms(workers=2, staleness=0))
        client.declare(TABLE)
        for clock in range(12 if by_worker else 60):
            push(client, 10 * clock + worker, clock)
            if by_worker and (worker, clock) == (0, 7):
                take_snapshot(client, str(tmp_path))
            pulled = rows(client, clock + 1)
            if worker == 0:
                seen.append(pulled)
            if clock == 5:
                started.set()
        client.close()

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(work, worker) for worker in (0, 1)]
        assert started.wait(100)
        if not by_worker:
            watcher = Client(shards.transports(), worker=9)
            take_snapshot(watcher, str(tmp_path), "one")
            with pytest.raises(errors.SnapshotTooLate):
                take_snapshot(watcher, str(tmp_path), "two", at_clock=1)
        for each in done:
            each.result(250)
    manifest = read_manifest(str(tmp_path))
    assert {part.clock for part in manifest.shards} == {manifest.clock}
    assert not by_worker or manifest.clock == 8
    fresh = local(3).client
    restore_snapshot(fresh, str(tmp_path))
    assert np.array_equal(rows(fresh), seen[manifest.clock - 1])


def test_the_format_is_what_the_page_says(tmp_path):
    """A reader made of docs/snapshots.md, msgpack and safetensors, without any of our code."""
    client = trained()
    take_snapshot(client, str(tmp_path), "one", extra={"a": 1})
    name = (tmp_path / "LATEST").read_text().rstrip("\n")
    envelope = msgpack.unpackb((tmp_path / name / "manifest.msgpack").read_bytes())
    assert (envelope["format"], envelope["version"]) == ("embershard snapshot", 2)
    assert hashlib.sha256(envelope["body"]).digest() == envelope["sha256"]
    body = msgpack.unpackb(envelope["body"])
    assert set(body) == {"name", "created", "package", "shards", "extra"}
    found = {}
    for index, part in enumerate(body["shards"]):
        assert set(part) == {"shard", "num_shards", "placement_epoch", "clock", "workers", "tables", "control"}
        assert [flags[0] for flags in part["control"]["tables"]] == [table["spec"]["name"] for table in part["tables"]]
        assert part["shard"] == index
        for table in part["tables"]:
            for file in table["files"]:
                data = (tmp_path / name / file["path"]).read_bytes()
                assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
                arrays = safetensors.numpy.load(data)
                assert arrays["state"].shape == (file["rows"], table["num_state"])
                found.update(zip(arrays["ids"].tolist(), arrays["rows"], strict=True))
    assert np.array_equal(np.stack([found[i] for i in IDS.tolist()]), rows(client))


def forgets_once(wire, kind, step):
    """Have a shard be asked for a step as the process that has its rows from a log, and knows of nothing that runs."""
    forgotten = []

    def forget(request):
        if isinstance(request, kind) and request.step == step and not forgotten:
            forgotten.append(request)
            if (writer := wire.shard._snapshots._writer) is not None:
                writer._thread.join(30)  # a process that ended writes no more
            wire.shard._snapshots._writer = wire.shard._restores.reader = None

    wire.before = forget
    return forgotten


def test_a_snapshot_is_taken_again_where_a_shard_was_started_anew_meanwhile(make_wires, tmp_path):
    wires = make_wires(2)
    client = wires.client()
    client.declare(TABLE)
    push(client)
    forgotten = forgets_once(wires.wires[1], Snapshot, "watch")
    assert take_snapshot(client, str(tmp_path), "one").rows == len(IDS)
    assert forgotten
    assert sorted(path.name.split("-")[1] for path in (tmp_path / "one").glob("shard-*")) == ["0", "1"]


@pytest.mark.parametrize("step", ["watch", "install"])
def test_a_restore_begins_again_where_a_shard_was_started_anew_meanwhile(step, make_wires, tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path))
    wires = make_wires(2)
    forgotten = forgets_once(wires.wires[1], Restore, step)
    other = wires.client()
    assert restore_snapshot(other, str(tmp_path)).rows == len(IDS)
    assert forgotten
    assert np.array_equal(rows(other), rows(client))


def test_of_two_clients_that_restore_at_once_one_is_told_and_nothing_is_mixed(make_wires, tmp_path, monkeypatch):
    wires, go, read = make_wires(2), threading.Event(), SnapshotReader._read
    trained_ones = [trained(seed=seed) for seed in (0, 1)]
    for name, client in zip("ab", trained_ones, strict=True):
        take_snapshot(client, str(tmp_path / name))
    monkeypatch.setattr(SnapshotReader, "_read", lambda reader: go.wait(100) and read(reader))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(restore_snapshot, wires.client(), str(tmp_path / "a"), replace_tables=True)
        assert eventually(lambda: wires.wires[1].shard._restores.reader)
        with raises(errors.RestoreRunning):
            restore_snapshot(wires.client(1), str(tmp_path / "b"), replace_tables=True)
        go.set()
        first.result(100)
    found = wires.client(2)
    found.declare(TABLE)
    assert np.array_equal(rows(found), rows(trained_ones[0]))


def test_while_one_shard_has_no_room_the_others_see_that_its_restore_goes_on(make_wires, tmp_path):
    take_snapshot(trained(), str(tmp_path))
    wires = make_wires(2)

    def is_install(request):
        return isinstance(request, Restore) and request.step == "install"

    def full(request):
        if is_install(request) and sum(map(is_install, wires.wires[0].seen)) < 3:
            raise errors.LogStalled(path="/logs", reason="No space left on device", retry_after_ms=5)

    wires.wires[1].before = full
    assert restore_snapshot(wires.client(), str(tmp_path)).rows == len(IDS)


def test_a_ctrl_c_while_shards_put_restored_rows_in_place_does_not_cancel_that(make_wires, tmp_path, monkeypatch):
    take_snapshot(trained(), str(tmp_path))
    wires, await_all = make_wires(2), client_side._await

    def stop(client, watch, kind, state, wait_timeout):
        if state == "installed":
            raise KeyboardInterrupt
        return await_all(client, watch, kind, state, wait_timeout)

    monkeypatch.setattr(client_side, "_await", stop)
    with pytest.raises(KeyboardInterrupt):
        restore_snapshot(wires.client(), str(tmp_path))
    assert all(wire.shard._restores.reader.installed for wire in wires.wires)
