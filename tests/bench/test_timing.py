"""bench/timing.py says on what a figure was measured."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import psutil

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_a_disk_is_named_by_its_file_system_and_device(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    timing = importlib.import_module("timing")
    monkeypatch.setattr(timing, "_DISK_SECONDS", 0.0)
    found = [("/dev/root", "/", "xfs"), ("/dev/log", str(tmp_path.resolve()), "ext4")]
    mounts = [SimpleNamespace(device=device, mountpoint=place, fstype=kind) for device, place, kind in found]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "logs").mkdir()
    assert timing.disk(tmp_path / "logs").startswith("ext4 on /dev/log: ")
    assert timing.disk(tmp_path.parent).startswith("xfs on /dev/root: ")
