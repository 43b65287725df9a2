"""`embershard doctor`: what it finds about this machine, its installation and folders."""

import importlib
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numba
import psutil
import pytest
import torch
from doctor_cases import FAIL, GREETING, JOB, NOBODY, OK, STATUS, TABLE, WARN, case, finds, found, job, probe
from numba.core import caching

from embershard.doctor import compute, folders, installation, machine
from embershard.doctor.case import Case, open_case
from embershard.proto.compiled import jit
from embershard.proto.messages import MemberStatus, replace
from embershard.worker.nn import onednn

# ---- installation


@pytest.mark.parametrize(("version", "level"), [("3.10.14", FAIL), ("3.11.0", OK), ("3.99.0", WARN)])
def test_python_is_held_against_what_the_package_says(version, level, monkeypatch):
    monkeypatch.setattr(installation.platform, "python_version", lambda: version)
    assert found(installation.python)[0] is level


def test_missing_and_old_packages_are_named(monkeypatch):
    assert found(installation.packages)[0] is OK
    true = metadata.version

    def version(name):
        if name == "uvloop":
            raise metadata.PackageNotFoundError
        return "1.99.1rc1" if name == "numpy" else true(name)

    monkeypatch.setattr(installation.metadata, "version", version)
    level, text = found(installation.packages)
    assert (level, text) == (FAIL, "numpy 1.99.1rc1 is older than 2.0; uvloop is missing")


@pytest.mark.parametrize(("one", "name"), [(installation.torch, "torch"), (installation.uvloop, "uvloop")])
def test_what_cannot_be_imported_fails(one, name, monkeypatch):
    assert found(one)[0] is OK
    monkeypatch.setitem(sys.modules, name, None)
    assert found(one)[0] is FAIL


def test_kernels_that_are_kept_nowhere_are_a_warning(monkeypatch):
    assert found(installation.kernels)[0] is OK
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    nowhere = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
    monkeypatch.setattr(importlib.import_module("embershard.ps.table.kernels"), "gather", nowhere)
    finds(installation.kernels, NOBODY, WARN, "compiles")


def test_a_compiler_is_optional(monkeypatch, tmp_path):
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    finds(installation.compiler, NOBODY, OK, "g++")
    (tmp_path / "g++").unlink()
    finds(installation.compiler, NOBODY, OK, "none")
    finds(installation.compiler, job(tmp_path, "train.compile=true", "train.device=cpu"), FAIL, "train.compile is true")


# ---- the machine


def test_a_clock_before_the_installation_is_wrong(monkeypatch, tmp_path):
    assert found(machine.system_time)[0] is OK
    later = tmp_path / "later.py"
    later.touch()
    os.utime(later, (time.time() + 10 * 86_400,) * 2)
    monkeypatch.setattr(machine, "__file__", str(later))
    finds(machine.system_time, NOBODY, FAIL, "before embershard was installed")


def test_a_clock_far_in_the_future_is_wrong(monkeypatch):
    monkeypatch.setattr(machine, "_LAST_SANE_YEAR", 2020)
    finds(machine.system_time, NOBODY, FAIL, "the year")


def test_open_files_must_do_for_all_peers(monkeypatch):
    many = Case(probes=[probe(stream_greeting=replace(GREETING, num_shards=64))])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert found(machine.open_files, many)[0] is OK
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finds(machine.open_files, many, FAIL, "256 (at most 4096); about 512 are needed for 64 shards")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A /proc, /sys and cgroup file system without any file."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYS", tmp_path / "sys")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "proc" / "self" / "cgroup")
    return tmp_path


def has_memory(monkeypatch: pytest.MonkeyPatch, *, available: int = 2**23, swap_used: int = 0) -> None:
    """Have psutil report this memory, of 8,000 KiB, and this use of 1,000 KiB of swap; in bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8000 * 1024, available=available))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=1000 * 1024, used=swap_used))


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("free_kib", "level"), [(64 * 2**20, OK), (3 * 2**20, WARN), (2**19, WARN), (2**16, FAIL)], ids=str
)
@pytest.mark.usefixtures("system")
def test_free_memory_is_held_against_the_tables_here(monkeypatch, free_kib, level):
    has_memory(monkeypatch, available=free_kib * 1024)
    big = replace(STATUS, tables=(replace(TABLE, bytes=100 * 2**30),))
    assert found(machine.memory, case(big))[0] is (level if free_kib < 2**26 else OK)


@pytest.mark.usefixtures("system")
def test_huge_pages_of_a_system_that_does_not_tell_are_left_out():
    assert machine.huge_pages.run(NOBODY) is None


VERSION_2 = {
    "proc/self/cgroup": "0::/kubepods/pod",
    "cgroup/kubepods/cpu.max": "50000 100000",
    "cgroup/kubepods/pod/cpu.max": "max 100000",
    "cgroup/kubepods/pod/memory.max": "max",
    "cgroup/kubepods/memory.max": str(2**30),
    "cgroup/kubepods/memory.current": str(2**29),
    "cgroup/kubepods/memory.stat": f"anon 5\ninactive_file {2**28}",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc",
    "cgroup/cpu/cpu.cfs_quota_us": "50000",
    "cgroup/cpu/cpu.cfs_period_us": "100000",
    "cgroup/memory/memory.limit_in_bytes": str(2**30),
    "cgroup/memory/memory.usage_in_bytes": str(2**29),
    "cgroup/memory/memory.stat": f"total_inactive_file {2**28}",
}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1], ids=["cgroup 2", "cgroup 1"])
def test_the_limits_of_a_container_are_seen(system, monkeypatch, files):
    has_memory(monkeypatch, available=2**40)
    finds(machine.container, NOBODY, OK, "no limit")
    write(system, files)
    finds(machine.container, NOBODY, WARN, f"0.5 of {os.cpu_count()} cores, 1.0 GiB of memory, 768 MiB left")
    finds(machine.memory, NOBODY, WARN, "768 MiB free")
    assert machine.usable_cores() == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "garbage\n::\n0::/../..", "cgroup/cpu.max": "a b c", "cgroup/memory.max": "-1"},
        {"proc/self/cgroup": "0::/", "cgroup/cpu.max": "100 0", "cgroup/memory.max": "5"},
        {"proc/self/cgroup": "1:cpu:/", "cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"},
    ],
)
def test_what_is_no_limit_is_none(system, files):
    write(system, files)
    assert (machine.cpu_quota(), machine.memory_limit()) == (None, None)


def test_room_for_tables_to_grow_is_looked_at(system, monkeypatch):
    write(system, {"proc/sys/vm/overcommit_memory": "0"})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert found(machine.address_space)[0] is OK
    write(system, {"proc/sys/vm/overcommit_memory": "2"})
    finds(machine.address_space, NOBODY, WARN, "vm.overcommit_memory is 2")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, 2**30))
    finds(machine.address_space, NOBODY, WARN, "ulimit -v is 1.0 GiB")


@pytest.mark.parametrize(("mode", "level"), [("always [madvise] never", OK), ("always madvise [never]", WARN)])
def test_huge_pages_that_are_off_are_a_warning(system, mode, level):
    write(system, {"sys/kernel/mm/transparent_hugepage/enabled": mode})
    assert found(machine.huge_pages)[0] is level


@pytest.mark.parametrize(("used_kib", "level"), [(100, OK), (900, WARN)])
def test_swap_in_use_is_a_warning(monkeypatch, used_kib, level):
    has_memory(monkeypatch, swap_used=used_kib * 1024)
    assert found(machine.swap)[0] is level


def test_a_containers_shared_memory_is_too_small(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    finds(machine.shared_memory, NOBODY, WARN, "64.0 MiB free")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert machine.shared_memory.run(NOBODY) is None


# ---- what computes


def test_threads_beyond_the_cores_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(compute, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    finds(compute.threads, NOBODY, OK, "4 (OMP_NUM_THREADS=4) x 1 workers on 4 cores")
    members = tuple(MemberStatus(worker=worker, clock=1, paused=False, lease_seconds=5.0) for worker in range(2))
    finds(compute.threads, case(replace(STATUS, members=members)), WARN, "x 2 workers on 4 cores")
    finds(compute.threads, job(tmp_path, "train.threads=3"), WARN, "3 (train.threads) x 2 workers")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    finds(compute.threads, job(tmp_path), OK, "1 (half of the machine's cores, shared) x 2 workers on 4 cores")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of which a container lends four
    finds(compute.threads, job(tmp_path), WARN, "16 (half of the machine's cores, shared) x 2 workers on 4 cores")


def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_no_gpu_is_fine_unless_the_job_wants_one(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finds(compute.gpu, NOBODY, OK, "training runs on the CPU")
    finds(compute.gpu, job(tmp_path, "train.device=cuda"), FAIL, "train.device is cuda")


@pytest.mark.parametrize(
    ("script", "cuda", "words"),
    [
        ("echo '550.54, NVIDIA H100'", None, "driver 550.54, NVIDIA H100, but this torch"),
        ("echo '550.54, NVIDIA H100'", "12.4", "built for CUDA 12.4 and sees no GPU; driver 550.54"),
        (
            "echo 'Driver/library version mismatch'; exit 18",
            "12.4",
            "nvidia-smi fails: Driver/library version mismatch",
        ),
        ("exec sleep 60", "12.4", "nvidia-smi does not answer"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_warning(script, cuda, words, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(compute, "_NVIDIA_SMI_SECONDS", 0.2 if "sleep" in script else 2.5)
    nvidia_smi(tmp_path, monkeypatch, script)
    finds(compute.gpu, NOBODY, WARN, words)


@pytest.mark.parametrize(("hardware", "level"), [(True, OK), (False, WARN)])
def test_bf16_of_a_gpu_is_not_what_torch_emulates(hardware, level, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: hardware or including_emulation
    )
    finds(compute.bf16, job(tmp_path, "train.amp=bf16"), level, "bfloat16")


@pytest.mark.parametrize(
    ("has", "words"), [({"avx2": True}, "only by conversion"), ({"amx_bf16": True}, "in hardware")]
)
def test_bf16_is_what_the_processor_has(has, words, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    finds(compute.bf16, NOBODY, OK, words)
    level = OK if words == "in hardware" else WARN
    finds(compute.bf16, job(tmp_path, "train.amp=bf16"), level, words)


def test_the_slower_library_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: False)
    finds(compute.matrix_products, NOBODY, OK, "MKL")
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: True)
    finds(compute.matrix_products, NOBODY, OK, "oneDNN is faster")
    finds(compute.matrix_products, job(tmp_path, "train.linear=torch"), WARN, "train.linear is torch")


# ---- files


def test_a_job_with_mistakes_fails(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB.replace("lr: 0.1", "lr: much"))
    finds(folders.job_file, open_case("", tmp_path / "job.yaml", None, None), FAIL, "job.yaml:4")
    finds(folders.job_file, job(tmp_path), OK, "lr on clicks")


def test_a_folder_that_cannot_be_written_fails(tmp_path, monkeypatch):
    finds(folders.run_folder, job(tmp_path, f"output={tmp_path}/new/run"), OK, f"to be made in {tmp_path}")
    finds(folders.run_folder, job(tmp_path, "output=/proc/run"), FAIL, "cannot be written")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc")
    finds(folders.temporary_folder, NOBODY, FAIL, "/proc cannot be written")


@pytest.mark.parametrize(("free", "level"), [(2**25, FAIL), (2**28, WARN), (2**34, OK)])
def test_a_disk_without_space_is_seen(free, level, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert found(folders.run_folder, job(tmp_path, f"output={tmp_path}"))[0] is level


def test_checkpoints_need_space_for_what_the_tables_hold(tmp_path, monkeypatch):
    assert folders.checkpoint_folder.run(job(tmp_path)) is None
    about = replace(job(tmp_path, f"checkpoint.folder={tmp_path}"), probes=[probe()])
    assert found(folders.checkpoint_folder, about)[0] is OK
    finds(folders.checkpoint_folder, job(tmp_path, "checkpoint.folder=memory://here"), OK, "remote storage")
    finds(folders.checkpoint_folder, job(tmp_path, "checkpoint.folder=nonsense://here"), FAIL, "nonsense")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**34))
    full = probe(replace(STATUS, tables=(replace(TABLE, bytes=2**33),)))
    finds(folders.checkpoint_folder, replace(about, probes=[full]), FAIL, "16.0 GiB free, 24.0 GiB wanted")
