"""`embershard doctor`: what it finds about this machine, its installation and folders."""

import importlib
import os
import resource
import shutil
import sys
import tempfile
import time
from importlib import metadata
from types import SimpleNamespace

import numba
import psutil
import pytest
import torch
from doctor_cases import FAIL, GREETING, JOB, NOBODY, OK, STATUS, TABLE, WARN, case, finds, job, member, probe
from numba.core import caching

from embershard.doctor import compute, folders, installation, machine
from embershard.doctor.case import Case, open_case
from embershard.proto.compiled import jit
from embershard.proto.messages import replace
from embershard.worker.nn import onednn

# ---- installation


@pytest.mark.parametrize(("version", "level"), [("3.10.14", FAIL), ("3.11.0", OK), ("3.99.0", WARN)])
def test_python_is_held_against_what_the_package_says(version, level, monkeypatch):
    monkeypatch.setattr(installation.platform, "python_version", lambda: version)
    finds(installation.python, NOBODY, level)


def test_missing_and_old_packages_are_named(monkeypatch):
    finds(installation.packages, NOBODY, OK)
    true = metadata.version

    def version(name):
        if name == "uvloop":
            raise metadata.PackageNotFoundError
        return "1.99.1rc1" if name == "numpy" else true(name)

    monkeypatch.setattr(installation.metadata, "version", version)
    finds(installation.packages, NOBODY, FAIL, "numpy 1.99.1rc1 is older than 2.0; uvloop is missing")


@pytest.mark.parametrize("name", ["torch", "uvloop"])
def test_what_cannot_be_imported_fails(name, monkeypatch):
    finds(getattr(installation, name), NOBODY, OK)
    monkeypatch.setitem(sys.modules, name, None)
    finds(getattr(installation, name), NOBODY, FAIL)


def test_kernels_that_are_kept_nowhere_are_a_warning(monkeypatch):
    finds(installation.kernels, NOBODY, OK)
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    nowhere = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
    monkeypatch.setattr(importlib.import_module("embershard.ps.table.kernels"), "gather", nowhere)
    finds(installation.kernels, NOBODY, WARN, "compiles")


def command(folder, monkeypatch, name, script=""):
    """Have a command of this name, and none of those that this machine has but for a shell's."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if script else str(folder))


def test_a_compiler_is_optional(monkeypatch, tmp_path):
    command(tmp_path, monkeypatch, "g++")
    finds(installation.compiler, NOBODY, OK, "g++")
    (tmp_path / "g++").unlink()
    finds(installation.compiler, NOBODY, OK, "none")
    finds(installation.compiler, job(tmp_path, "train.compile=true", "train.device=cpu"), FAIL, "train.compile is true")


# ---- the machine


def test_a_clock_before_the_installation_or_far_in_the_future_is_wrong(monkeypatch, tmp_path):
    finds(machine.system_time, NOBODY, OK)
    later = tmp_path / "later.py"
    later.touch()
    os.utime(later, (time.time() + 10 * 86_400,) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "__file__", str(later))
        finds(machine.system_time, NOBODY, FAIL, "before embershard was installed")
    monkeypatch.setattr(machine, "_LAST_SANE_YEAR", 2020)
    finds(machine.system_time, NOBODY, FAIL, "the year")


@pytest.mark.parametrize(
    ("limit", "level", "words"),
    [(1024, OK, ""), (256, FAIL, "256 (at most 4096); about 512 are needed for 64 shards")],
)
def test_open_files_must_do_for_all_peers(monkeypatch, limit, level, words):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 4096))
    many = Case(probes=[probe(stream_greeting=replace(GREETING, num_shards=64))])
    finds(machine.open_files, many, level, words)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files of a /proc, /sys and cgroup file system that has no others; 8 MiB of memory, 1 MiB of swap."""
    places = {"PROC": "proc", "SYS": "sys", "CGROUPS": "cgroup", "MEMBERSHIP": "proc/self/cgroup"}
    for name, place in places.items():
        monkeypatch.setattr(machine, name, tmp_path / place)

    def write(files=(), available=2**40, swap_used=0):
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**23, available=available))
        monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=2**20, used=swap_used))

    return write


@pytest.mark.parametrize(("free", "level"), [(2**36, OK), (3 * 2**30, WARN), (2**29, WARN), (2**26, FAIL)])
def test_free_memory_is_held_against_the_tables_here(system, free, level):
    system(available=free)
    finds(machine.memory, case(replace(STATUS, tables=(replace(TABLE, bytes=100 * 2**30),))), level)


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
def test_the_limits_of_a_container_are_seen(system, files):
    system()
    finds(machine.container, NOBODY, OK, "no limit")
    system(files)
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
    system(files)
    assert (machine.cpu_quota(), machine.memory_limit()) == (None, None)


@pytest.mark.parametrize(
    ("overcommit", "limit", "level", "words"),
    [
        ("0", resource.RLIM_INFINITY, OK, ""),
        ("2", resource.RLIM_INFINITY, WARN, "vm.overcommit_memory is 2"),
        ("0", 2**30, WARN, "ulimit -v is 1.0 GiB"),
    ],
)
def test_room_for_tables_to_grow_is_looked_at(system, monkeypatch, overcommit, limit, level, words):
    system({"proc/sys/vm/overcommit_memory": overcommit})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finds(machine.address_space, NOBODY, level, words)


def test_huge_pages_that_are_off_are_a_warning(system):
    assert machine.huge_pages.run(NOBODY) is None
    for mode, level in (("always [madvise] never", OK), ("always madvise [never]", WARN)):
        system({"sys/kernel/mm/transparent_hugepage/enabled": mode})
        finds(machine.huge_pages, NOBODY, level)


@pytest.mark.parametrize(("used", "level"), [(100 * 2**10, OK), (900 * 2**10, WARN)])
def test_swap_in_use_is_a_warning(system, used, level):
    system(swap_used=used)
    finds(machine.swap, NOBODY, level)


def has_disk(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def test_a_containers_shared_memory_is_too_small(monkeypatch, tmp_path):
    has_disk(monkeypatch, 2**26)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    finds(machine.shared_memory, NOBODY, WARN, "64.0 MiB free")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert machine.shared_memory.run(NOBODY) is None


# ---- what computes


def test_threads_beyond_the_cores_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(compute, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    finds(compute.threads, NOBODY, OK, "4 (OMP_NUM_THREADS=4) x 1 workers on 4 cores")
    two = case(replace(STATUS, members=(member(0, 1), member(1, 1))))
    finds(compute.threads, two, WARN, "x 2 workers on 4 cores")
    finds(compute.threads, job(tmp_path, "train.threads=3"), WARN, "3 (train.threads) x 2 workers")
    for cores, threads, level in ((4, 1, OK), (64, 16, WARN)):  # of 64 a container lends four
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        said = f"{threads} (half of the machine's cores, shared) x 2 workers on 4 cores"
        finds(compute.threads, job(tmp_path), level, said)


@pytest.fixture
def has_gpu(monkeypatch):
    def has(there, cuda=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    has(False)
    return has


def test_no_gpu_is_fine_unless_the_job_wants_one(has_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    finds(compute.gpu, NOBODY, OK, "training runs on the CPU")
    finds(compute.gpu, job(tmp_path, "train.device=cuda"), FAIL, "train.device is cuda")


@pytest.mark.parametrize(
    ("script", "cuda", "words"),
    [
        ("echo '550.54, NVIDIA H100'", None, "driver 550.54, NVIDIA H100, but this torch"),
        ("echo '550.54, NVIDIA H100'", "12.4", "built for CUDA 12.4 and sees no GPU; driver 550.54"),
        ("echo 'a mismatch'; exit 18", "12.4", "nvidia-smi fails: a mismatch"),
        ("exec sleep 60", "12.4", "nvidia-smi does not answer"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_warning(script, cuda, words, has_gpu, monkeypatch, tmp_path):
    has_gpu(False, cuda)
    monkeypatch.setattr(compute, "_NVIDIA_SMI_SECONDS", 0.2 if "sleep" in script else 2.5)
    command(tmp_path, monkeypatch, "nvidia-smi", script)
    finds(compute.gpu, NOBODY, WARN, words)


@pytest.mark.parametrize(("hardware", "level"), [(True, OK), (False, WARN)])
def test_bf16_of_a_gpu_is_not_what_torch_emulates(hardware, level, has_gpu, tmp_path, monkeypatch):
    has_gpu(True)
    known = lambda including_emulation=True: hardware or including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", known)
    finds(compute.bf16, job(tmp_path, "train.amp=bf16"), level, "bfloat16")


@pytest.mark.parametrize(
    ("has", "words", "level"),
    [({"avx2": True}, "only by conversion", WARN), ({"amx_bf16": True}, "in hardware", OK)],
)
def test_bf16_is_what_the_processor_has(has, words, level, has_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    finds(compute.bf16, NOBODY, OK, words)
    finds(compute.bf16, job(tmp_path, "train.amp=bf16"), level, words)


def test_the_slower_library_is_a_warning(monkeypatch, tmp_path):
    for faster, words in ((False, "MKL"), (True, "oneDNN is faster")):
        monkeypatch.setattr(onednn, "onednn_is_faster", lambda faster=faster: faster)
        finds(compute.matrix_products, NOBODY, OK, words)
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
    has_disk(monkeypatch, free)
    finds(folders.run_folder, job(tmp_path, f"output={tmp_path}"), level)


def test_checkpoints_need_space_for_what_the_tables_hold(tmp_path, monkeypatch):
    assert folders.checkpoint_folder.run(job(tmp_path)) is None
    about = replace(job(tmp_path, f"checkpoint.folder={tmp_path}"), probes=[probe()])
    finds(folders.checkpoint_folder, about, OK)
    finds(folders.checkpoint_folder, job(tmp_path, "checkpoint.folder=memory://here"), OK, "remote storage")
    finds(folders.checkpoint_folder, job(tmp_path, "checkpoint.folder=nonsense://here"), FAIL, "nonsense")
    has_disk(monkeypatch, 2**34)
    full = probe(replace(STATUS, tables=(replace(TABLE, bytes=2**33),)))
    finds(folders.checkpoint_folder, replace(about, probes=[full]), FAIL, "16.0 GiB free, 24.0 GiB wanted")
