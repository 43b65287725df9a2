"""Where a shard lets a peer have snapshots: many ways to name another place, and the ways to name the right one."""

import os
from datetime import timedelta

import pytest

from embershard.proto.errors import PlaceNotAllowed
from embershard.proto.messages import Restore, Snapshot
from embershard.proto.routing import Placement
from embershard.proto.transport.local import LocalTransport
from embershard.ps.security.places import SnapshotPlaces
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.checkpoint.snapshots import begin_snapshot, restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from harness.raises import raises
from harness.shards import table

NEVER = ["http", "https", "ftp", "sftp", "ssh", "github", "git", "gitlab", "jupyter", "smb", "webhdfs", "hdfs",
         "dask", "zip", "tar", "libarchive", "blockcache", "filecache", "simplecache", "cached", "data", "reference",
         "dir", "memory", "local", "oci", "oss", "hf", "box", "gdrive", "dbfs", "generic", "asynclocal",
         "FILE", "S3"]  # fmt: skip


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "rootless").mkdir()
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    return tmp_path / "root"


def elsewhere(root):
    """Places that are not below the root, however they are written."""
    above = root.parent
    return [
        *(f"{scheme}://127.0.0.1:9/x" for scheme in NEVER),
        *(f"{scheme}:{root}" for scheme in NEVER),
        *(f"{outer}::{root}" for outer in ("simplecache", "zip", "filecache", "file", "")),
        *(f"{scheme}://{bucket}" for scheme in ("s3", "gs", "abfs") for bucket in ("", "bucket", "/bucket", "b/../c")),
        "s3a://bucket/x", "s3:bucket/x", "s3:/bucket/x", "gcs://bucket/x", "abfss://bucket/x", "az://bucket/x",
        "/", "//", "/etc", "/tmp", "~", "~root", "~/x", ".", "..", "root", "root/inner", "./root", "", " ",
        *(f"{root}{tail}" for tail in ("less", "/..", "/../", "/../rootless", "/inner/../..", "/out", "/out/rootless")),
        *(f"{root}{tail}" for tail in ("/inner/../../root/out", "/out/root/out", "\0", "/x\0y", "/a\nb", "\\..\\..")),
        *(f"file:{root}{tail}" for tail in ("/..", "/../rootless", "/out", "less")),
        *(f"file://{root}{tail}" for tail in ("/..", "/../rootless", "/out", "less")),
        f"file://localhost{root}", f"file://host/{root}", "file:root", "file:", "file://", "file:///", "file:~",
        f"{above}", f"{above}/", f"{above}/rootless", f"{above}/link/..", f"{above}/link/out", f"{above}/Root",
        f"{above}/root2", f"{above}/./rootless", f"{above}/root/./../rootless",
    ]  # fmt: skip


def test_no_way_to_write_another_place_leads_out_of_the_root(root):
    places = SnapshotPlaces([str(root)])
    taken = []
    for url in elsewhere(root):
        try:
            taken.append((url, places.open(url, "x").url))
        except PlaceNotAllowed:
            pass
    assert taken == []
    assert len(set(elsewhere(root))) > 100


@pytest.mark.parametrize(
    "written", ["{}", "{}/", "file://{}", "file:{}", "{}/inner", "{}/inner/..", "{}/new", "{}/./a", "{}/../link/inner"]
)
def test_places_at_and_below_the_root_are_taken_whole(root, written):
    url = written.format(root)
    opened = SnapshotPlaces([str(root.parent / "link")]).open(url, "x")
    assert opened.url == os.path.realpath(url.removeprefix("file://").removeprefix("file:"))


def test_a_snapshot_whose_folder_is_a_link_out_of_the_root_is_refused(root):
    with pytest.raises(PlaceNotAllowed):
        SnapshotPlaces([str(root)]).open(str(root), "out")


@pytest.mark.parametrize(
    ("url", "taken"),
    [
        ("s3://bucket/snaps", True), ("s3://bucket/snaps/", True), ("s3://bucket/snaps/a/b", True),
        ("s3://bucket/snaps2", False), ("s3://bucket", False), ("s3://bucket2/snaps", False),
        ("gs://bucket/snaps", False),
        ("s3://bucket/snaps/../x", False), ("s3://bucket/./snaps", False), ("s3://bucket/snaps/%2e%2e/x", False),
        ("s3://bucket/snaps?x", False), ("s3://bucket/snaps/*", False), ("s3://u:p@bucket/snaps", False),
        ("/bucket/snaps", False), ("file:///bucket/snaps", False), ("s3://bucket//snaps/x", True),
    ],
)  # fmt: skip
def test_urls_are_compared_by_their_parts(url, taken):
    places = SnapshotPlaces(["s3://bucket/snaps"])
    if taken:
        places.check(url)
    else:
        with pytest.raises(PlaceNotAllowed):
            places.check(url)


def test_without_roots_there_is_no_place_and_without_a_limit_any_folder(tmp_path):
    with raises(PlaceNotAllowed, url=str(tmp_path)):
        SnapshotPlaces([]).check(str(tmp_path))
    assert SnapshotPlaces(None).open(str(tmp_path)).url == str(tmp_path)
    for url in ("ftp://127.0.0.1:9/x", "http://127.0.0.1:9/x", "relative"):
        with pytest.raises(PlaceNotAllowed):
            SnapshotPlaces(None).check(url)


@pytest.mark.parametrize("bad", ["ftp://x/y", "relative", "s3://", "s3://a/../b", "a::b"])
def test_a_root_that_cannot_be_one_is_refused(bad):
    with pytest.raises(PlaceNotAllowed):
        SnapshotPlaces([bad])


@pytest.fixture
def client(root):
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), places=SnapshotPlaces([str(root)]))
    client = Client([LocalTransport(shard.handle, "local")])
    client.declare(table())
    return client


def test_a_shard_takes_and_restores_snapshots_below_its_root(client, root):
    take_snapshot(client, str(root), "full", incremental=True)
    take_snapshot(client, str(root / "inner"), "more")
    assert restore_snapshot(client, str(root), "full", replace_tables=True).name == "full"


def test_a_request_for_another_place_is_refused_as_it_comes(client, root):
    for url in ("ftp://127.0.0.1:9/x", "relative"):
        for request in (Snapshot(url=url, name="a", id=1, step="begin"), Restore(url=url, id=1, step="begin")):
            with pytest.raises(PlaceNotAllowed):
                ask(client, request)
    with pytest.raises(PlaceNotAllowed):
        take_snapshot(client, str(root.parent), "a")
    assert not os.path.exists(root.parent / "a" / "MANIFEST")


def test_a_restore_reads_no_parent_outside_of_the_root(client, root, tmp_path):
    """A manifest below the root names one two folders up, which is there and whole."""
    outside = Client([LocalTransport(Shard(0, Placement.even(1), OptimizerRegistry()).handle, "local")])
    outside.declare(table())
    take_snapshot(outside, str(tmp_path / "secret"), "parent", incremental=True)
    parent = str(tmp_path / "secret" / "parent")
    begin_snapshot(outside, str(root), "child", incremental=True, parent_url=parent).finish()
    with pytest.raises(PlaceNotAllowed):
        restore_snapshot(client, str(root), "child", replace_tables=True)


def ask(client, request):
    (connection,) = client.connections
    return connection.transport.submit(request, timedelta(seconds=60)).result()
