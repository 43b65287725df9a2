"""`embershard doctor`: what it finds about this machine, its installation and folders."""

import importlib
import os
import resource
import sys
import time
from importlib import metadata
from types import SimpleNamespace

import numba
import pytest
from doctor_cases import FAIL, GREETING, JOB, NOBODY, OK, STATUS, TABLE, WARN, case, finds, job, member, probe
from numba.core import caching

from embershard.doctor import compute, folders, installation, logs, machine
from embershard.doctor.case import Case, open_case
from embershard.proto.compiled import jit
from embershard.proto.messages import replace
from embershard.proto.monitoring import memory as proto_memory

MIB, GIB = 2**20, 2**30
UNLIMITED = resource.RLIM_INFINITY
NO_GPU = {"torch.cuda.is_available": False}
BY_AVX2, BY_AMX = ({**NO_GPU, "embershard.worker.nn.onednn.cpu_flags": {name}} for name in ("avx2", "amx_bf16"))
MKL, ONEDNN = ({"embershard.worker.nn.onednn.onednn_is_faster": faster} for faster in (False, True))
BIG = case(replace(STATUS, tables=(replace(TABLE, bytes=100 * GIB),)))
OF_64_SHARDS = Case(probes=[probe(stream_greeting=replace(GREETING, num_shards=64))])
OF_2_WORKERS = case(replace(STATUS, members=(member(0, 1), member(1, 1))))
FULL = probe(replace(STATUS, tables=(replace(TABLE, bytes=8 * GIB),)))
COMPILES = ("train.compile=true", "train.device=cpu")
FOUR = {"embershard.doctor.compute.usable_cores": 4.0, "torch.get_num_threads": 4}


def memory(available):
    return {"psutil.virtual_memory": SimpleNamespace(total=8 * MIB, available=available)}


def swap(used):
    return {**memory(8 * MIB), "psutil.swap_memory": SimpleNamespace(total=8 * MIB, used=used)}


def disk(free):
    return {"shutil.disk_usage": SimpleNamespace(free=free)}


def on(file_system):
    return {"embershard.doctor.logs._file_system": file_system}


def measured(rate, seconds):
    return {"embershard.doctor.logs.measure_disk": (rate, seconds)}


LOGGED = ("durability=fsync", "output={}")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes files of a /proc, /sys and cgroup file system that has no others."""
    places = {(machine, "PROC"): "proc", (machine, "SYS"): "sys"}
    places |= {(proto_memory, "CGROUPS"): "cgroup", (proto_memory, "MEMBERSHIP"): "proc/self/cgroup"}
    for (module, name), place in places.items():
        monkeypatch.setattr(module, name, tmp_path / place)

    def write(texts):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")

    return write


@pytest.mark.parametrize(
    ("check", "returned", "about", "level", "words"),
    [
        (installation.python, {"platform.python_version": "3.10.14"}, NOBODY, FAIL, ""),
        (installation.python, {"platform.python_version": "3.11.0"}, NOBODY, OK, ""),
        (installation.python, {"platform.python_version": "3.99.0"}, NOBODY, WARN, ""),
        (installation.packages, {}, NOBODY, OK, ""),
        (installation.torch, {}, NOBODY, OK, ""),
        (installation.uvloop, {}, NOBODY, OK, ""),
        (installation.kernels, {}, NOBODY, OK, ""),
        (installation.compiler, {"shutil.which": "/usr/bin/g++"}, NOBODY, OK, "g++"),
        (installation.compiler, {"shutil.which": None}, NOBODY, OK, "none"),
        (installation.compiler, {"shutil.which": None}, COMPILES, FAIL, "train.compile is true"),
        (machine.system_time, {}, NOBODY, OK, ""),
        (machine.open_files, {"resource.getrlimit": (1024, 4096)}, OF_64_SHARDS, OK, ""),
        (machine.open_files, {"resource.getrlimit": (1024, 4096)}, NOBODY, OK, "1 shard and 1 worker"),
        (machine.open_files, {"resource.getrlimit": (256, 4096)}, OF_64_SHARDS, FAIL, "about 512 are needed for 64"),
        (machine.memory, memory(64 * GIB), BIG, OK, ""),
        (machine.memory, memory(3 * GIB), BIG, WARN, ""),
        (machine.memory, memory(512 * MIB), BIG, WARN, ""),
        (machine.memory, memory(64 * MIB), BIG, FAIL, ""),
        (machine.swap, swap(100 * 2**10), NOBODY, OK, ""),
        (machine.swap, swap(7 * MIB), NOBODY, WARN, ""),
        (compute.threads, FOUR, NOBODY, OK, "4 (OMP_NUM_THREADS=4) x 1 worker on 4 cores"),
        (compute.threads, FOUR, OF_2_WORKERS, WARN, "x 2 workers on 4 cores"),
        (compute.threads, FOUR, ("train.threads=3",), WARN, "3 (train.threads) x 2 workers"),
        (compute.threads, {**FOUR, "os.cpu_count": 4}, (), OK, "1 (half of the machine's cores, shared) x 2 workers"),
        # of which a container lends four
        (compute.threads, {**FOUR, "os.cpu_count": 64}, (), WARN, "16 (half of the machine's cores, shared) x 2"),
        (compute.gpu, {**NO_GPU, "shutil.which": None}, NOBODY, OK, "training runs on the CPU"),
        (compute.gpu, {**NO_GPU, "shutil.which": None}, ("train.device=cuda",), FAIL, "train.device is cuda"),
        (compute.bf16, BY_AVX2, NOBODY, OK, "only by conversion"),
        (compute.bf16, BY_AMX, NOBODY, OK, "in hardware"),
        (compute.bf16, BY_AVX2, ("train.amp=bf16",), WARN, "only by"),
        (compute.bf16, BY_AMX, ("train.amp=bf16",), OK, "in h"),
        (compute.matrix_products, MKL, NOBODY, OK, "MKL"),
        (compute.matrix_products, ONEDNN, NOBODY, OK, "oneDNN is f"),
        (compute.matrix_products, ONEDNN, ("train.linear=torch",), WARN, "train.linear is torch"),
        (folders.job_file, {}, (), OK, "lr on clicks"),
        (folders.run_folder, {}, ("output={}/new/run",), OK, "to be made in "),
        (folders.run_folder, {}, ("output=/proc/run",), FAIL, "cannot be written"),
        (folders.run_folder, disk(32 * MIB), ("output={}",), FAIL, ""),
        (folders.run_folder, disk(256 * MIB), ("output={}",), WARN, ""),
        (folders.run_folder, disk(16 * GIB), ("output={}",), OK, ""),
        (folders.temporary_folder, {"tempfile.gettempdir": "/proc"}, NOBODY, FAIL, "/proc cannot be written"),
        (folders.checkpoint_folder, {}, (), None, ""),
        (folders.checkpoint_folder, {}, ("checkpoint.folder={}",), OK, ""),
        (folders.checkpoint_folder, {}, ("checkpoint.folder=memory://here",), OK, "remote storage"),
        (folders.checkpoint_folder, {}, ("checkpoint.folder=nonsense://here",), FAIL, "nonsense"),
        (logs.log_folder, {}, ("output={}",), None, ""),
        (logs.log_folder, on("ext4"), LOGGED, OK, "ext4"),
        (logs.log_folder, on("tmpfs"), LOGGED, WARN, "is memory"),
        (logs.log_folder, on("nfs4"), LOGGED, WARN, "loses a lock"),
        (logs.log_folder, {}, ("durability=fsync", "output=/proc/run"), FAIL, "/proc/run"),
        (logs.log_space, {}, (), None, ""),
        (logs.log_space, disk(GIB), LOGGED, WARN, "1.0 GiB free, 1.5 GiB taken at once by 2 shards"),
        (logs.log_space, disk(200 * MIB), LOGGED, FAIL, ""),
        (logs.log_space, disk(16 * GIB), LOGGED, OK, ""),
        (logs.log_space, disk(5 * GIB), (*LOGGED, "shards=8"), WARN, "6.0 GiB taken at once by 8"),
        (logs.log_disk, {}, (), None, ""),
        (logs.log_disk, measured(2e9, 0.0002), LOGGED, OK, "2,000 MB/s in groups of 8.0 MiB, 0.20 ms"),
        (logs.log_disk, measured(2e7, 0.0002), LOGGED, WARN, "20 MB/s"),
        (logs.log_disk, measured(2e9, 0.05), LOGGED, WARN, "50.00 ms"),
        (logs.log_disk, {}, ("durability=log", "output=/proc/run"), FAIL, "/proc/run"),
    ],
)
@pytest.mark.usefixtures("files")
def test_what_a_machine_returns_is_judged(check, returned, about, level, words, tmp_path, monkeypatch):
    """`about` are a case, or overrides of a job, in which {} is an empty folder."""
    for name, value in returned.items():
        monkeypatch.setattr(name, lambda *_, value=value, **__: value)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    if isinstance(about, tuple):
        about = job(tmp_path, *(override.format(tmp_path) for override in about))
    finds(check, about, level, words)


def test_the_disk_of_a_named_folder_is_measured_and_left_as_it_was(tmp_path):
    rate, seconds = logs.measure_disk(tmp_path, 0.01)
    assert (rate > 1e4, 0 < seconds < 10, list(tmp_path.iterdir())) == (True, True, [])
    about = open_case("", None, None, None, tmp_path / "new")
    assert about.log_folder == tmp_path / "new"
    assert logs._file_system(tmp_path)


def test_missing_and_old_packages_are_named(monkeypatch):
    true = metadata.version

    def version(name):
        if name == "uvloop":
            raise metadata.PackageNotFoundError
        return "1.99.1rc1" if name == "numpy" else true(name)

    monkeypatch.setattr(installation.metadata, "version", version)
    finds(installation.packages, NOBODY, FAIL, "numpy 1.99.1rc1 is older than 2.0; uvloop is missing")


@pytest.mark.parametrize("name", ["torch", "uvloop"])
def test_what_cannot_be_imported_fails(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    finds(getattr(installation, name), NOBODY, FAIL)


def test_kernels_that_are_kept_nowhere_are_a_warning(monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    nowhere = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
    monkeypatch.setattr(importlib.import_module("embershard.ps.table.kernels"), "gather", nowhere)
    finds(installation.kernels, NOBODY, WARN, "compiles")


def test_a_clock_before_the_installation_or_far_in_the_future_is_wrong(monkeypatch, tmp_path):
    later = tmp_path / "later.py"
    later.touch()
    os.utime(later, (time.time() + 10 * 86_400,) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "__file__", str(later))
        finds(machine.system_time, NOBODY, FAIL, "before embershard was installed")
    monkeypatch.setattr(machine, "_LAST_SANE_YEAR", 2020)
    finds(machine.system_time, NOBODY, FAIL, "the year")


VERSION_2 = {
    "proc/self/cgroup": "0::/kubepods/pod",
    "cgroup/kubepods/cpu.max": "50000 100000",
    "cgroup/kubepods/pod/cpu.max": "max 100000",
    "cgroup/kubepods/pod/memory.max": str(2**31),
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


@pytest.mark.parametrize("texts", [VERSION_2, VERSION_1], ids=["cgroup 2", "cgroup 1"])
def test_the_limits_of_a_container_are_seen(files, texts):
    finds(machine.container, NOBODY, OK, "no limit")
    files(texts)
    finds(machine.container, NOBODY, WARN, f"0.5 of {os.cpu_count()} cores, 1.0 GiB of memory, 768 MiB left")
    finds(machine.memory, NOBODY, WARN, "768 MiB free")
    assert (machine.usable_cores(), proto_memory.smallest_memory_limit()) == (0.5, 2**30)


@pytest.mark.parametrize(
    "texts",
    [
        {"proc/self/cgroup": "garbage\n::\n0::/../..", "cgroup/cpu.max": "a b c", "cgroup/memory.max": "-1"},
        {"proc/self/cgroup": "0::/", "cgroup/cpu.max": "100 0", "cgroup/memory.max": "5"},
        {"proc/self/cgroup": "0::/", "cgroup/memory.max": "max"},
        {"proc/self/cgroup": "1:cpu:/", "cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"},
        {"proc/self/cgroup": "5:memory:/", "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)},
    ],
)
def test_what_is_no_limit_is_none(files, texts):
    files(texts)
    assert (machine.cpu_quota(), machine.memory_limit()) == (None, None)
    assert proto_memory.smallest_memory_limit() in (None, 5)  # which needs nobody's use of it


OVERCOMMIT, HUGE_PAGES = "proc/sys/vm/overcommit_memory", "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize(
    ("check", "texts", "limit", "level", "words"),
    [
        (machine.address_space, {OVERCOMMIT: "0"}, UNLIMITED, OK, ""),
        (machine.address_space, {OVERCOMMIT: "2"}, UNLIMITED, WARN, "vm.overcommit_memory is 2"),
        (machine.address_space, {OVERCOMMIT: "0"}, GIB, WARN, "ulimit -v is 1.0 GiB"),
        (machine.huge_pages, {}, UNLIMITED, None, ""),
        (machine.huge_pages, {HUGE_PAGES: "always [madvise] never"}, UNLIMITED, OK, ""),
        (machine.huge_pages, {HUGE_PAGES: "always madvise [never]"}, UNLIMITED, WARN, ""),
    ],
)
def test_what_the_kernel_says_is_judged(files, monkeypatch, check, texts, limit, level, words):
    files(texts)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finds(check, NOBODY, level, words)


def test_a_containers_dev_shm_is_too_small(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64 * MIB))
    for place, level in ((tmp_path, WARN), (tmp_path / "none", None)):
        monkeypatch.setattr(machine, "DEV_SHM", place)
        finds(machine.dev_shm, NOBODY, level, "64.0 MiB free")


def test_a_dev_shm_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DEV_SHM", tmp_path)
    monkeypatch.setattr(machine.os, "access", lambda place, mode: False)
    finds(machine.dev_shm, NOBODY, WARN, "cannot be written")


@pytest.mark.parametrize(
    ("script", "cuda", "words"),
    [
        ("echo '550.54, NVIDIA H100'", None, "driver 550.54, NVIDIA H100, but this torch"),
        ("echo '550.54, NVIDIA H100'", "12.4", "built for CUDA 12.4 and sees no GPU; driver 550.54"),
        ("echo 'a mismatch'; exit 18", "12.4", "nvidia-smi fails: a mismatch"),
        ("exec sleep 60", "12.4", "nvidia-smi does not answer"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_warning(script, cuda, words, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(compute, "_NVIDIA_SMI_SECONDS", 0.2 if "sleep" in script else 2.5)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    finds(compute.gpu, NOBODY, WARN, words)


@pytest.mark.parametrize(("hardware", "level"), [(True, OK), (False, WARN)])
def test_bf16_of_a_gpu_is_not_what_torch_emulates(hardware, level, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: hardware | including_emulation)
    finds(compute.bf16, job(tmp_path, "train.amp=bf16"), level, "bfloat16")


def test_a_job_with_mistakes_fails(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB.replace("lr: 0.1", "lr: much"))
    finds(folders.job_file, open_case("", tmp_path / "job.yaml", None, None), FAIL, "job.yaml:4")


@pytest.mark.integration
def test_the_first_samples_of_a_job_are_tried(tmp_path):
    job = "model: {name: fm}\ndata: {reader: READER}\nembedding: {optimizer: {name: adagrad, lr: 0.1}}\n"
    job += "train: {batch_size: 8, epochs: 1}\n"

    def found(reader, level, words):
        (tmp_path / "job.yaml").write_text(job.replace("READER", reader))
        finds(folders.job_data, open_case("", tmp_path / "job.yaml", None, None), level, words)

    (tmp_path / "t.csv").write_text("label,a\n1,2\n")
    found("ctr_csv, train: t.csv", OK, "first samples")
    (tmp_path / "t.csv").write_text("label,a\n1,2\n7,2\n")
    found("ctr_csv, train: t.csv", FAIL, "t.csv:3")
    (tmp_path / "doctors_data.py").write_text("def logs():\n    return 1 / 0\n")
    found('"doctors_data:logs"', FAIL, "doctors_data.py:2")


def test_checkpoints_need_space_for_what_the_tables_hold(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=16 * GIB))
    about = replace(job(tmp_path, f"checkpoint.folder={tmp_path}"), probes=[FULL])
    finds(folders.checkpoint_folder, about, FAIL, "16.0 GiB free, 32.0 GiB wanted")
    of_job = job(tmp_path, f"checkpoint.folder={tmp_path}", "checkpoint.incremental=true")
    finds(folders.checkpoint_folder, replace(of_job, probes=[FULL]), FAIL, "16.0 GiB free, 44.0 GiB wanted")
