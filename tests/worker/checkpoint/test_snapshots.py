"""Snapshots as a client takes, finds and restores them."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import msgpack
import numpy as np
import pytest
import safetensors.numpy
from half_codec import HALF_CODEC
from torch import nn

from embershard.local_shards import InProcessShards, local
from embershard.proto import spec
from embershard.proto.errors import (
    BadSnapshotName,
    EmbershardError,
    MemoryLost,
    SnapshotDamaged,
    SnapshotExists,
    SnapshotNotFound,
    SnapshotNotWritten,
    SnapshotScattered,
    SnapshotTimeout,
    SnapshotTooLate,
    TablesInTheWay,
    UnknownTable,
)
from embershard.proto.messages import Request, Snapshot
from embershard.proto.routing import make_route
from embershard.proto.snapshot.manifest import MANIFEST, pack_part
from embershard.proto.snapshot.storage import Storage
from embershard.ps import snapshot as shard_side
from embershard.worker.checkpoint.snapshots import (
    begin_snapshot,
    list_snapshots,
    open_snapshot,
    read_manifest,
    read_table,
    restore_snapshot,
    take_snapshot,
)
from embershard.worker.client.client import Client
from embershard.worker.client.connections import Outcome, ShardConnections
from embershard.worker.client.membership import Terms
from embershard.worker.compression.settings import Compression
from embershard.worker.nn.wrap import wrap
from harness.raises import raises

TABLE = spec.TableSpec(name="items", dim=4, optimizer=spec.Adam(lr=0.1))
IDS = np.arange(2000)
SOON = timedelta(seconds=0.2)


def push(client: Client, seed: int = 0, clock: int = 0) -> None:
    route = make_route(IDS, TABLE.space_key, client.placement)
    gradients = np.random.default_rng(seed).standard_normal((len(IDS), 4)).astype(np.float32)
    order = np.empty(len(IDS), np.int64)
    order[route.index] = np.arange(len(IDS))
    client.push([("items", route, gradients[order])], clock=clock)


def rows(client: Client) -> np.ndarray:
    """(N, dim) in the order of IDS."""
    route = make_route(IDS, TABLE.space_key, client.placement)
    return client.pull([("items", route)])[0][route.index]


def trained(shards: int = 2, seed: int = 0) -> Client:
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


def test_a_snapshot_begun_is_of_that_moment_while_training_goes_on(tmp_path):
    client = trained()
    then = rows(client)
    running = begin_snapshot(client, str(tmp_path))
    push(client, 1)
    running.finish()
    other = local(2).client
    restore_snapshot(other, str(tmp_path))
    assert np.array_equal(rows(other), then)


@pytest.mark.parametrize(
    "compression",
    [{"dense": {"push": "powersgd:4"}}, {"dense": {"pull": "delta"}}, {"push": "mine:half", "pull": "mine:half"}],
)
def test_tables_that_travelled_by_a_codec_are_restored_without_it(tmp_path, monkeypatch, compression):
    (tmp_path / "mine.py").write_text(HALF_CODEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    session = local(1, imports=["mine"], compression=Compression(**compression))
    model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 2))
    wrap(model, session, optimizer=spec.SGD(lr=0.1))
    take_snapshot(session.client, str(tmp_path / "snaps"))
    other = local(2)
    restore_snapshot(other.client, str(tmp_path / "snaps"))
    for table in session.tables:
        known = other.client.spec(table.spec.name)
        assert not known.difference(table.spec)
        assert known.push_codec.is_plain
        assert known.pull_codec.is_plain
        dense = [weights.ids for weights in session.dense_weights if weights.spec is table.spec]
        ids = dense[0] if dense else np.arange(10)
        found = []
        for client in (session.client, other.client):
            route = make_route(ids, table.spec.space_key, client.placement)
            (rows,) = client.pull([(table.spec.name, route)], exact=True)
            found.append(rows[route.index])
        assert np.array_equal(*found)


def test_its_rows_are_read_without_shards(url):
    client = trained()
    take_snapshot(client, url)
    blocks = list(read_table(url, "items"))
    ids, weights, state = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    order = np.argsort(ids)
    assert np.array_equal(ids[order], IDS)
    assert np.array_equal(weights[order], rows(client))
    assert state.shape == (2000, 9)  # two moments of Adam, and its step
    with raises(UnknownTable, table="users", known="items"):
        list(read_table(url, "users"))


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
    with raises(SnapshotExists, path=f"{tmp_path}/one"):
        take_snapshot(client, str(tmp_path), "one")
    with pytest.raises(BadSnapshotName):
        take_snapshot(client, str(tmp_path), "../two")


def test_one_that_was_never_finished_is_none_and_the_one_before_loads(tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")
    begin_snapshot(client, str(tmp_path), "two")
    assert read_manifest(str(tmp_path)).name == "one"
    with pytest.raises(SnapshotNotFound, match=r"two holds no snapshot: .* never finished.* Snapshots there: one"):
        read_manifest(str(tmp_path), "two")


def test_a_folder_without_any_says_so(tmp_path):
    with pytest.raises(SnapshotNotFound, match="no LATEST"):
        restore_snapshot(local(1).client, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("latest", [b"../../etc", b"", b"\xff\xfe"])
def test_a_latest_that_names_no_snapshot_is_damage(latest, tmp_path):
    (tmp_path / "LATEST").write_bytes(latest)
    with pytest.raises(SnapshotDamaged, match="LATEST"):
        read_manifest(str(tmp_path))


def test_a_part_that_is_not_where_the_others_are_is_named(tmp_path):
    client = trained()
    running = begin_snapshot(client, str(tmp_path), "one")
    shard_1 = _finished_part(client, tmp_path, "shard-1")
    (shard_1 / "part.msgpack").rename(shard_1 / "elsewhere")
    with pytest.raises(SnapshotScattered, match=r"shard 1 says that it wrote .*part.msgpack.* share"):
        running.finish()
    assert not (tmp_path / "one" / MANIFEST).exists()


def test_a_file_that_is_shorter_than_the_shard_said_makes_no_snapshot(tmp_path):
    client = trained()
    running = begin_snapshot(client, str(tmp_path), "one")
    file = next(_finished_part(client, tmp_path, "shard-0").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SnapshotScattered, match=str(file)):
        running.finish()


def _finished_part(client: Client, folder: Path, shard: str) -> Path:
    """Wait for both parts; the folder of one."""
    done = threading.Event()
    while len(found := list(folder.glob("one/shard-*/part.msgpack"))) < 2:
        assert not done.wait(0.005)
    return next(path.parent for path in found if path.parent.name.startswith(shard))


def test_a_shard_that_cannot_write_fails_the_whole_and_the_others_stop(tmp_path, monkeypatch):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")

    def full(part):
        if part.shard == 1:
            raise OSError(28, "No space left on device")
        return pack_part(part)

    with monkeypatch.context() as patch:
        patch.setattr(shard_side, "pack_part", full)
        with pytest.raises(SnapshotNotWritten, match=r"local/1: .*No space left .*The snapshots before"):
            take_snapshot(client, str(tmp_path), "two")
    push(client, 1)
    assert read_manifest(str(tmp_path)).name == "one"
    assert not (tmp_path / "two").exists()  # what was written takes no room
    assert take_snapshot(client, str(tmp_path), "two").rows == 2000


class Deaf:
    """A client's connections, of which that to shard 1 loses every cancel."""

    def __init__(self, connections: ShardConnections) -> None:
        self._connections = connections

    def __getattr__(self, name: str) -> object:
        return getattr(self._connections, name)

    def call(self, requests: Mapping[int, Request], *, timeout: timedelta | None = None) -> dict[int, Outcome]:
        outcomes = self._connections.call(requests, timeout=timeout)
        if any(isinstance(request, Snapshot) and request.step == "cancel" for request in requests.values()):
            outcomes |= {1: EmbershardError(reason="not now")} if 1 in requests else {}
        return outcomes


@pytest.mark.parametrize("deaf", [False, True])
def test_what_a_slow_shard_still_writes_goes_too(monkeypatch, deaf):
    client, url = trained(), f"memory://{secrets.token_hex(8)}/snaps"  # its folders come with their files
    told = threading.Event()
    cancel = shard_side.SnapshotWriter.cancel

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
        monkeypatch.setattr(client, "connections", Deaf(client.connections))
    with pytest.raises(SnapshotNotWritten, match="No space left"):
        take_snapshot(client, url, "two")
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(30)
    assert not Storage(url).sizes("two")


def test_a_clock_that_does_not_close_is_given_up(tmp_path):
    with pytest.raises(SnapshotTimeout, match=r"shard 0: waiting.* take it at once"):
        take_snapshot(trained(), str(tmp_path), "one", at_clock=5, wait_timeout=SOON)


def test_tables_are_in_the_way_unless_they_are_to_be_replaced(tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path))
    other = trained(3, seed=1)
    before = rows(other)
    with pytest.raises(TablesInTheWay, match="--replace"):
        restore_snapshot(other, str(tmp_path))
    assert np.array_equal(rows(other), before)
    restore_snapshot(other, str(tmp_path), replace_tables=True)
    assert np.array_equal(rows(other), rows(client))
    with pytest.raises(MemoryLost):  # its acknowledged pushes are gone
        push(other, 2)


def test_a_damaged_snapshot_changes_no_shard(tmp_path):
    client = trained()
    take_snapshot(client, str(tmp_path), "one")
    file = next(tmp_path.glob("one/shard-1-*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    fresh = local(2).client
    with pytest.raises(SnapshotDamaged, match=str(file)):
        restore_snapshot(fresh, str(tmp_path))
    assert all(not status.tables for status in fresh.status())
    with pytest.raises(SnapshotDamaged):
        list(open_snapshot(str(tmp_path)).read_table("items"))


def test_rows_that_no_shard_finds_make_no_restore(tmp_path, monkeypatch):
    take_snapshot(trained(), str(tmp_path))
    monkeypatch.setattr("embershard.proto.snapshot.manifest.Manifest.rows", property(lambda self: 2001))
    fresh = local(2).client
    with pytest.raises(SnapshotDamaged, match="2000 rows in its files, it says 2001"):
        restore_snapshot(fresh, str(tmp_path))
    assert all(not status.tables for status in fresh.status())


class TestSynchronousWorkers:
    """Two workers that train at one clock, each in a thread."""

    def train(
        self,
        beside_them: Callable[[Client], object] = lambda client: None,
        by_worker_0: Callable[[Client], object] = lambda client: None,
        until: int = 60,
    ) -> list[np.ndarray]:
        """Rows after each clock. One call runs beside the workers, one as worker 0 has pushed clock 7."""
        shards = InProcessShards(2)
        seen: list[np.ndarray] = []
        workers = [Client(shards.transports(), worker=worker) for worker in (0, 1)]
        started, failed = threading.Event(), []

        def work(client):
            client.join(Terms(workers=2, staleness=0))
            client.declare(TABLE)
            for clock in range(until):
                push(client, 10 * clock + client.worker, clock)
                if clock == 7 and client.worker == 0:
                    by_worker_0(client)
                route = make_route(IDS, TABLE.space_key, client.placement)
                pulled = client.pull([("items", route)], clock=clock + 1)[0]
                if client.worker == 0:
                    seen.append(pulled[route.index])
                if clock == 5:
                    started.set()
            client.close()

        def beside():
            assert started.wait(100)
            try:
                beside_them(Client(shards.transports(), worker=9))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(client,)) for client in workers]
        threads.append(threading.Thread(target=beside))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(250)
        if failed:
            raise failed[0]
        return seen

    def test_all_shards_show_the_same_clock(self, tmp_path):
        seen = self.train(lambda client: take_snapshot(client, str(tmp_path), "one"))
        manifest = read_manifest(str(tmp_path))
        assert {part.clock for part in manifest.shards} == {manifest.clock}
        fresh = local(3).client
        restore_snapshot(fresh, str(tmp_path))
        assert np.array_equal(rows(fresh), seen[manifest.clock - 1])

    def test_a_worker_takes_it_as_its_last_push_is_applied(self, tmp_path):
        seen = self.train(by_worker_0=lambda client: take_snapshot(client, str(tmp_path)), until=12)
        assert read_manifest(str(tmp_path)).clock == 8
        fresh = local(1).client
        restore_snapshot(fresh, str(tmp_path))
        assert np.array_equal(rows(fresh), seen[7])

    def test_a_clock_of_the_past_is_refused(self, tmp_path):
        with pytest.raises(SnapshotTooLate):
            self.train(lambda client: take_snapshot(client, str(tmp_path), "one", at_clock=1), until=20)
        with pytest.raises(EmbershardError):
            read_manifest(str(tmp_path))


def test_the_format_is_what_the_page_says(tmp_path):
    """A reader made of docs/snapshots.md, msgpack and safetensors, without any of our code."""
    client = trained()
    take_snapshot(client, str(tmp_path), "one", extra={"a": 1})
    name = (tmp_path / "LATEST").read_text().rstrip("\n")
    envelope = msgpack.unpackb((tmp_path / name / "manifest.msgpack").read_bytes())
    assert (envelope["format"], envelope["version"]) == ("embershard snapshot", 1)
    assert hashlib.sha256(envelope["body"]).digest() == envelope["sha256"]
    body = msgpack.unpackb(envelope["body"])
    assert set(body) == {"name", "created", "package", "shards", "extra"}
    found: dict[int, np.ndarray] = {}
    for index, part in enumerate(body["shards"]):
        assert set(part) == {"shard", "num_shards", "placement_epoch", "clock", "workers", "tables"}
        assert part["shard"] == index
        for table in part["tables"]:
            for file in table["files"]:
                data = (tmp_path / name / file["path"]).read_bytes()
                assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
                arrays = safetensors.numpy.load(data)
                assert arrays["state"].shape == (file["rows"], table["num_state"])
                found.update(zip(arrays["ids"].tolist(), arrays["rows"], strict=True))
    assert np.array_equal(np.stack([found[i] for i in IDS.tolist()]), rows(client))
