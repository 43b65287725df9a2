"""Snapshots of real processes: by the command line, with shards and coordinators killed, and disks that are full."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import numpy as np
import pytest

from embershard import local_shards as in_process
from embershard.deploy.supervisor import LocalShards
from embershard.proto import spec
from embershard.proto.errors import EmbershardError, ShardRestarted, ShardUnavailable, SnapshotNotWritten
from embershard.proto.routing import make_route
from embershard.worker.checkpoint.snapshots import list_snapshots, read_manifest, restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from harness.processes import EMBERSHARD, run_command

pytestmark = pytest.mark.integration

TABLE = spec.TableSpec(name="items", dim=16, optimizer=spec.Adagrad(lr=0.1))
IDS = np.arange(200_000)  # 27 MB
TIMEOUT = timedelta(seconds=100)


def run(*arguments: str) -> tuple[int, str]:
    """Exit code, and all output."""
    done = run_command(*arguments)
    return done.returncode, done.stdout + done.stderr


def push(client: Client, ids: np.ndarray = IDS, value: float = 1.0) -> None:
    client.declare(TABLE)
    route = make_route(ids, TABLE.space_key, client.placement)
    client.push([("items", route, np.full((len(route.ids), TABLE.dim), value, np.float32))], clock=0)


def rows(client: Client) -> np.ndarray:
    client.declare(TABLE)
    route = make_route(IDS, TABLE.space_key, client.placement)
    return client.pull([("items", route)])[0][route.index]


@contextmanager
def client_of(local: LocalShards, timeout: timedelta = TIMEOUT) -> Iterator[Client]:
    with closing(Client.connect(local.addresses, timeout=timeout)) as client:
        yield client


@contextmanager
def pushing(local: LocalShards) -> Iterator[None]:
    """A worker that pushes all the while."""
    stop, failed = threading.Event(), []

    def work():
        try:
            with closing(Client.connect(local.addresses, worker=1, timeout=TIMEOUT)) as client:
                while not stop.is_set():
                    push(client, IDS[::50], 0.5)
        except EmbershardError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(250)
    assert not failed


@pytest.fixture(scope="module")
def shards():
    with LocalShards(2) as local:
        yield local


@pytest.fixture
def client(shards):
    with client_of(shards) as client:
        push(client)
        yield client


def test_the_commands_take_show_and_restore_a_snapshot_while_a_worker_pushes(shards, client, tmp_path):
    addresses, folder = ",".join(shards.addresses), str(tmp_path / "snaps")
    with pushing(shards):
        code, said = run("snapshot", addresses, folder, "--name", "one")
        assert (code, said.startswith(f"{folder}/one: 200,000 rows")) == (0, True), said
        by_grpc = ",".join(f"grpc://{address}" for address in shards.addresses)
        code, said = run("snapshot", by_grpc, folder, "--name", "two", "--keep", "1")
        assert code == 0, said
    code, said = run("inspect", folder, "--verify")
    assert code == 0, said
    assert "snapshots: two\n" in said
    assert "items adagrad    16    16 200,000" in said
    with LocalShards(1) as others:
        where = ",".join(others.addresses)
        code, said = run("restore", folder, where)
        assert (code, "two: 200,000 rows of 1 tables, from 2 shards onto 1" in said) == (0, True), said
        with client_of(others) as other:
            assert np.array_equal(rows(other)[1::50], rows(client)[1::50])  # those that nobody pushed since
        code, said = run("restore", folder, where)
        assert code == 1
        assert "holds tables already (items)" in said


def test_the_killed_coordinator_leaves_the_snapshot_before_and_shards_that_take_the_next(shards, client, tmp_path):
    folder = str(tmp_path)
    take_snapshot(client, folder, "before")
    command = [*EMBERSHARD, "snapshot", ",".join(shards.addresses), folder, "--name", "x"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as coordinator:
        while not list(tmp_path.glob("x/shard-*/*")):  # it has begun
            time.sleep(0.001)
        coordinator.kill()
    assert list_snapshots(folder) in (["before"], ["before", "x"])  # it may have been quick
    assert take_snapshot(client, folder, "after", keep=5).rows == len(IDS)
    assert not [path for path in tmp_path.glob("x/shard-*") if "x" not in list_snapshots(folder)]


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_a_killed_shard_leaves_the_snapshot_before(delay, tmp_path):
    folder = str(tmp_path)
    soon = timedelta(seconds=5)
    with LocalShards(2) as local, client_of(local) as client, client_of(local, soon) as hasty:
        push(client)
        then = rows(client)
        take_snapshot(client, folder, "before")
        push(client)
        killer = threading.Timer(delay, os.kill, (local.pids[0], signal.SIGKILL))
        killer.start()
        with suppress(ShardUnavailable, ShardRestarted):
            take_snapshot(hasty, folder, "during")
        killer.join()
    name = read_manifest(folder).name
    assert name in ("before", "during")
    fresh = in_process.local(1).client
    restore_snapshot(fresh, folder)
    assert np.array_equal(rows(fresh), then) == (name == "before")
    restore_snapshot(fresh, folder, "before", replace_tables=True)
    assert np.array_equal(rows(fresh), then)


def test_a_full_disk_is_named_and_the_snapshot_before_stays(shards, client, tmp_path):
    folder = str(tmp_path)
    take_snapshot(client, folder, "before")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(shards.pids[1], resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
    try:
        with pytest.raises(SnapshotNotWritten, match=r"shard 1 at .*cannot write .*safetensors: .*too large"):
            take_snapshot(client, folder, "during")
    finally:
        resource.prlimit(shards.pids[1], resource.RLIMIT_FSIZE, unlimited)
    push(client)
    assert read_manifest(folder).name == "before"
    assert take_snapshot(client, folder, "after").rows == len(IDS)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root on Linux")
def test_a_full_file_system_is_named(client, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode()}")
    try:
        with pytest.raises(SnapshotNotWritten, match="No space left on device"):
            take_snapshot(client, str(tmp_path))
        assert list_snapshots(str(tmp_path)) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("folder", ["/proc/snapshots", "/dev/null/snapshots"])
def test_a_folder_that_cannot_be_written_is_named(folder, shards):
    code, said = run("snapshot", ",".join(shards.addresses), folder)
    assert code == 1
    assert f"cannot write {folder}" in said
    assert "Traceback" not in said
