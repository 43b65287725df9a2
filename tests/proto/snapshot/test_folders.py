"""Folders whose names are on the disk once they are made."""

import errno
import os
from pathlib import Path

import pytest

from embershard.proto.snapshot.folders import make_folder, sync
from embershard.proto.snapshot.storage import Storage
from embershard.ps.journal.disk import LocalDisk

MAKERS = {
    "itself": make_folder,
    "of a snapshot": lambda path: Storage(str(path)).make_folder(""),
    "of a log": lambda path: LocalDisk().make_folder(path),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_all_folders_that_are_made_have_their_names_on_the_disk(make, tmp_path, monkeypatch):
    """A power cut took a new folder of a log, or of snapshots, if its file system kept no order."""
    synced, fsync = set(), os.fsync

    def noted(handle):
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "a" / "b" / "c"
    make(path)
    assert path.is_dir()
    assert synced == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}


def test_a_file_system_that_can_sync_no_folders_keeps_their_names_itself(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")
