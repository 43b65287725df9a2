"""Files by path, on a disk and in a storage that only fsspec knows."""

import os
import secrets
from unittest.mock import Mock

import pytest

from embershard.proto.errors import BadSnapshotName, SnapshotNotWritten, SnapshotUnreadable
from embershard.proto.snapshot.storage import Storage


@pytest.fixture(params=["disk", "memory"])
def storage(request, tmp_path):
    return Storage(str(tmp_path / "a") if request.param == "disk" else f"memory://{secrets.token_hex(8)}/a")


def test_what_was_written_is_read_replaced_whole_and_not_found_elsewhere(storage):
    storage.make_folder("x/y")
    with storage.create("x/y/one") as file:
        file.write(b"123")
        file.write(memoryview(b"45"))
    assert storage.read("x/y/one") == b"12345"
    assert (storage.sizes("x/y"), storage.sizes("x")) == ({"one": 5}, {"y": None})
    storage.replace("x/y/one", b"new")
    assert storage.read("x/y/one") == b"new"
    assert storage.sizes("x/y") == {"one": 3}
    with pytest.raises(FileNotFoundError):
        storage.read("nowhere/f")
    assert storage.sizes("nowhere") == {}
    storage.remove("nowhere")


def test_a_folder_goes_with_all_that_is_in_it(storage):
    storage.make_folder("x/y")
    for path in ("x/y/f", "x/g"):
        storage.replace(path, b"1")
    storage.remove("x/y")
    storage.remove_if_empty("x")
    assert storage.sizes("x") == {"g": 1}


@pytest.mark.parametrize("name", ["dims=[1]", "run*", "run?"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_what_is_removed_is_never_that_of_a_folder_that_its_name_would_match_as_a_pattern(tmp_path, kind, name):
    above = str(tmp_path) if kind == "disk" else f"memory://{secrets.token_hex(8)}"
    own, *others = [Storage(f"{above}/{one}") for one in (name, "dims=1", "run1")]
    for storage in (own, *others):
        storage.make_folder("x/y")
        for path in ("f", "x/y/f", "x/g"):
            storage.replace(path, b"1")
    own.remove("f")
    own.remove("x")
    assert own.sizes("") == {}
    own.remove("x")
    assert [storage.sizes("x/y") for storage in others] == [{"f": 1}, {"f": 1}]
    assert [storage.sizes("") for storage in others] == [{"f": 1, "x": None}] * 2


def test_a_file_is_named_as_people_name_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Storage("snaps/").at("one/f") == str(tmp_path / "snaps/one/f")
    assert Storage(f"file://{tmp_path}").at("f") == str(tmp_path / "f")
    assert Storage("memory://snaps/").at("f") == "memory://snaps/f"


FULL = OSError(28, "No space left on device")


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path))
    storage.replace("f", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=FULL))
    with pytest.raises(SnapshotNotWritten, match=rf"{tmp_path}/f.*: OSError: No space left on device; free"):
        storage.replace("f", b"new")
    assert storage.read("f") == b"old"


def test_a_file_that_met_an_error_is_not_there(storage):
    storage.make_folder("x")

    def write():
        with storage.create("x/f") as file:
            file.write(b"123")
            raise FULL

    with pytest.raises(SnapshotNotWritten, match="No space left"):
        write()
    assert storage.sizes("x") == {}


def test_a_folder_that_cannot_be_made_and_a_file_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotNotWritten, match=f"cannot write {tmp_path}/file/x: NotADirectoryError"):
        Storage(str(tmp_path / "file")).make_folder("x")
    with pytest.raises(SnapshotUnreadable, match=f"cannot read {tmp_path}: IsADirectoryError"):
        Storage(str(tmp_path)).read("")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "it is empty"),
        ("simplecache::s3://b/x", "without '::'"),
        ("/tmp/caf\udce9", "it is no UTF-8"),
        ("nosuch://b/x", "no storage nosuch://; .* s3://"),
        ("dask://b", "distributed|Install"),
    ],
)
def test_a_url_that_makes_no_sense_here_is_refused(url, words):
    with pytest.raises(BadSnapshotName, match=words):
        Storage(url)
