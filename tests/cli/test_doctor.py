"""`embershard doctor`: each check finds what it looks for, and none of them hangs or breaks."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import embershard as es
from embershard.cli import app as cli
from embershard.cli import doctor as command
from embershard.deploy.supervisor import LocalShards
from embershard.doctor import cgroup, clocks, compute, folders, installation, machine, runs, shards
from embershard.doctor.case import Case, open_case
from embershard.doctor.check import Check, Finding, Level, check, ok
from embershard.doctor.checks import SUBJECTS
from embershard.doctor.probe import Probe
from embershard.doctor.run_record import read_run
from embershard.proto.messages import Greeting, MemberStatus, ShardStatus, TableStatus
from embershard.proto.spec import SGD, TableSpec
from embershard.worker import onednn
from embershard.worker.job import load_job

ROOT = Path(__file__).resolve().parents[2]
NOBODY = Case()
JOB = """
model: {name: lr}
data: {reader: clicks, samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
workers: 2
"""
GREETING = Greeting(0, 1, 1, metadata.version("embershard"), "an instance")
TABLE = TableStatus(name="items", dim=4, rows=10, bytes=1000, optimizer="sgd", loading=False)
STATUS = ShardStatus(
    shard=0,
    num_shards=1,
    placement_epoch=1,
    version="1",
    instance="an instance",
    uptime_seconds=1.0,
    resident_bytes=1,
    requests=1,
    pulled_rows=1,
    pushed_rows=1,
    duplicate_pushes=0,
    skipped_rows=0,
    queued_bytes=0,
    tables=(TABLE,),
)


def probe(status: ShardStatus | None = STATUS, before: ShardStatus | None = None, **fields: object) -> Probe:
    """A shard that answers well, but for what is given."""
    well = {f"{name}_problem": "" for name in ("resolve", "port", "stream", "grpc")}
    greetings = {"stream_greeting": GREETING, "grpc_greeting": GREETING}
    return Probe(
        "h:1",
        **{**well, **greetings, "here": True, "beside": True, "status": status, "before": before or status, **fields},
    )


def case(*statuses: ShardStatus, **fields: object) -> Case:
    return Case(probes=[probe(status) for status in statuses], **fields)


def job(tmp_path: Path, *overrides: str) -> Case:
    (tmp_path / "job.yaml").write_text(JOB)
    return Case(job=load_job(tmp_path / "job.yaml", overrides))


def found(one: Check, about: Case = NOBODY) -> tuple[Level, str]:
    finding = one.run(about)
    assert finding is not None, "the check did not apply"
    return finding.level, finding.text


def finds(one: Check, about: Case, level: Level, words: str) -> None:
    got, text = found(one, about)
    assert (got, words in text) == (level, True), (got, text)


OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


# ---- the checks as such


def test_the_page_lists_every_check_and_its_remedy():
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    listed = [f"| `{one.name}` | {one.asks} | {one.remedy} |" for checks in SUBJECTS.values() for one in checks]
    parts = [f"| `{name}` | {remedy} |" for name, remedy in runs.PARTS.items()]
    assert rows == [*listed, *parts]
    assert [line[3:].split()[0].lower() for line in page.splitlines() if line.startswith("## ")] == list(SUBJECTS)


def test_no_two_checks_have_one_name():
    names = [one.name for checks in SUBJECTS.values() for one in checks]
    assert len(names) == len(set(names))


def test_a_check_that_hangs_fails_at_its_deadline():
    release = threading.Event()
    one = check("slow", asks="", remedy="", seconds=0.05)(lambda _: ok("at last") if release.wait(60) else None)
    finds(one, NOBODY, FAIL, "hangs")
    release.set()


def test_a_check_that_breaks_says_so():
    def broken(_: Case) -> Finding:
        raise ZeroDivisionError("by zero")

    finds(check("broken", asks="", remedy="")(broken), NOBODY, WARN, "could not be checked: ZeroDivisionError: by zero")


# ---- installation


@pytest.mark.parametrize(("version", "level"), [("3.10.14", FAIL), ("3.11.0", OK), ("3.99.0", WARN)])
def test_python_is_held_against_what_the_package_says(version: str, level: Level, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation.platform, "python_version", lambda: version)
    assert found(installation.python)[0] is level


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    assert found(installation.packages)[0] is OK
    true = metadata.version

    def version(name: str) -> str:
        if name == "uvloop":
            raise metadata.PackageNotFoundError
        return "1.99.1rc1" if name == "numpy" else true(name)

    monkeypatch.setattr(installation.metadata, "version", version)
    level, text = found(installation.packages)
    assert (level, text) == (FAIL, "numpy 1.99.1rc1 is older than 2.0; uvloop is missing")


@pytest.mark.parametrize(("one", "name"), [(installation.torch, "torch"), (installation.uvloop, "uvloop")])
def test_what_cannot_be_imported_fails(one: Check, name: str, monkeypatch: pytest.MonkeyPatch):
    assert found(one)[0] is OK
    monkeypatch.setitem(sys.modules, name, None)
    assert found(one)[0] is FAIL


def test_kernels_that_are_kept_nowhere_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    assert found(installation.kernels)[0] is OK
    gather = SimpleNamespace(stats=SimpleNamespace(cache_path=None))
    monkeypatch.setattr(importlib.import_module("embershard.ps.kernels"), "gather", gather)
    finds(installation.kernels, NOBODY, WARN, "compiles")


def test_a_compiler_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    finds(installation.compiler, NOBODY, OK, "g++")
    (tmp_path / "g++").unlink()
    finds(installation.compiler, NOBODY, OK, "none")
    finds(installation.compiler, job(tmp_path, "train.compile=true", "train.device=cpu"), FAIL, "train.compile is true")


# ---- the machine


def test_a_clock_before_the_installation_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert found(machine.system_time)[0] is OK
    later = tmp_path / "later.py"
    later.touch()
    os.utime(later, (time.time() + 10 * 86_400,) * 2)
    monkeypatch.setattr(machine, "__file__", str(later))
    finds(machine.system_time, NOBODY, FAIL, "before embershard was installed")


def test_a_clock_far_in_the_future_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_LAST_SANE_YEAR", 2020)
    finds(machine.system_time, NOBODY, FAIL, "the year")


def test_open_files_must_do_for_all_peers(monkeypatch: pytest.MonkeyPatch):
    many = Case(probes=[probe(stream_greeting=replace(GREETING, num_shards=64))])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert found(machine.open_files, many)[0] is OK
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finds(machine.open_files, many, FAIL, "256 (at most 4096); about 512 are needed for 64 shards")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc, /sys and cgroup file system without any file."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYS", tmp_path / "sys")
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "proc" / "self" / "cgroup")
    return tmp_path


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("free_kib", "level"), [(64 * 2**20, OK), (3 * 2**20, WARN), (2**19, WARN), (2**16, FAIL)], ids=str
)
def test_free_memory_is_held_against_the_tables_here(system: Path, free_kib: int, level: Level):
    write(system, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {free_kib} kB"})
    big = replace(STATUS, tables=(replace(TABLE, bytes=100 * 2**30),))
    assert found(machine.memory, case(big))[0] is (level if free_kib < 2**26 else OK)


def test_memory_of_a_system_that_does_not_tell_is_left_out(system: Path):
    assert machine.memory.run(NOBODY) is None
    assert machine.swap.run(NOBODY) is None
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
def test_the_limits_of_a_container_are_seen(system: Path, files: Mapping[str, str]):
    finds(machine.container, NOBODY, OK, "no limit")
    write(system, {**files, "proc/meminfo": f"MemAvailable: {2**30} kB"})
    finds(machine.container, NOBODY, WARN, f"0.5 of {os.cpu_count()} cores, 1.0 GiB of memory, 768 MiB left")
    finds(machine.memory, NOBODY, WARN, "768 MiB free")
    assert cgroup.usable_cores() == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "garbage\n::\n0::/../..", "cgroup/cpu.max": "a b c", "cgroup/memory.max": "-1"},
        {"proc/self/cgroup": "0::/", "cgroup/cpu.max": "100 0", "cgroup/memory.max": "5"},
        {"proc/self/cgroup": "1:cpu:/", "cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"},
    ],
)
def test_what_is_no_limit_is_none(system: Path, files: Mapping[str, str]):
    write(system, files)
    assert (cgroup.cpu_quota(), cgroup.memory_limit()) == (None, None)


def test_room_for_tables_to_grow_is_looked_at(system: Path, monkeypatch: pytest.MonkeyPatch):
    write(system, {"proc/sys/vm/overcommit_memory": "0"})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert found(machine.address_space)[0] is OK
    write(system, {"proc/sys/vm/overcommit_memory": "2"})
    finds(machine.address_space, NOBODY, WARN, "vm.overcommit_memory is 2")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, 2**30))
    finds(machine.address_space, NOBODY, WARN, "ulimit -v is 1.0 GiB")


@pytest.mark.parametrize(("mode", "level"), [("always [madvise] never", OK), ("always madvise [never]", WARN)])
def test_huge_pages_that_are_off_are_a_warning(system: Path, mode: str, level: Level):
    write(system, {"sys/kernel/mm/transparent_hugepage/enabled": mode})
    assert found(machine.huge_pages)[0] is level


@pytest.mark.parametrize(("free", "level"), [(900, OK), (100, WARN)])
def test_swap_in_use_is_a_warning(system: Path, free: int, level: Level):
    write(system, {"proc/meminfo": f"MemTotal: 8000 kB\nSwapTotal: 1000 kB\nSwapFree: {free} kB"})
    assert found(machine.swap)[0] is level


def test_a_containers_shared_memory_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    finds(machine.shared_memory, NOBODY, WARN, "64.0 MiB free")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert machine.shared_memory.run(NOBODY) is None


# ---- what computes


def test_threads_beyond_the_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(compute, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    finds(compute.threads, NOBODY, OK, "4 (OMP_NUM_THREADS=4) x 1 workers on 4 cores")
    members = tuple(MemberStatus(worker, 1, False, 5.0) for worker in range(2))
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


def test_no_gpu_is_fine_unless_the_job_wants_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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
def test_a_gpu_that_torch_does_not_see_is_a_warning(
    script: str, cuda: str | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(compute, "_NVIDIA_SMI_SECONDS", 0.2 if "sleep" in script else 2.5)
    nvidia_smi(tmp_path, monkeypatch, script)
    finds(compute.gpu, NOBODY, WARN, words)


@pytest.mark.parametrize(
    ("has", "words"), [({"avx2": True}, "only by conversion"), ({"amx_bf16": True}, "in hardware")]
)
def test_bf16_is_what_the_processor_has(
    has: dict[str, bool], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    finds(compute.bf16, NOBODY, OK, words)
    level = OK if words == "in hardware" else WARN
    finds(compute.bf16, job(tmp_path, "train.amp=bf16"), level, words)


def test_the_slower_library_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: False)
    finds(compute.matrix_products, NOBODY, OK, "MKL")
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: True)
    finds(compute.matrix_products, NOBODY, OK, "oneDNN is faster")
    finds(compute.matrix_products, job(tmp_path, "train.linear=torch"), WARN, "train.linear is torch")


# ---- files


def test_a_job_with_mistakes_fails(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB.replace("lr: 0.1", "lr: much"))
    finds(folders.job_file, open_case("", tmp_path / "job.yaml", None, None), FAIL, "job.yaml:4")
    finds(folders.job_file, job(tmp_path), OK, "lr on clicks")


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    finds(folders.run_folder, job(tmp_path, f"output={tmp_path}/new/run"), OK, f"to be made in {tmp_path}")
    finds(folders.run_folder, job(tmp_path, "output=/proc/run"), FAIL, "cannot be written")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc")
    finds(folders.temporary_folder, NOBODY, FAIL, "/proc cannot be written")


@pytest.mark.parametrize(("free", "level"), [(2**25, FAIL), (2**28, WARN), (2**34, OK)])
def test_a_disk_without_space_is_seen(free: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert found(folders.run_folder, job(tmp_path, f"output={tmp_path}"))[0] is level


def test_checkpoints_need_space_for_what_the_tables_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert folders.checkpoint_folder.run(job(tmp_path)) is None
    about = replace(job(tmp_path, f"checkpoint.folder={tmp_path}"), probes=[probe()])
    assert found(folders.checkpoint_folder, about)[0] is OK
    finds(folders.checkpoint_folder, job(tmp_path, "checkpoint.folder=memory://here"), OK, "remote storage")
    finds(folders.checkpoint_folder, job(tmp_path, "checkpoint.folder=nonsense://here"), FAIL, "nonsense")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**34))
    full = probe(replace(STATUS, tables=(replace(TABLE, bytes=2**33),)))
    finds(folders.checkpoint_folder, replace(about, probes=[full]), FAIL, "16.0 GiB free, 24.0 GiB wanted")


# ---- the shards


@contextmanager
def listener(answer: bytes = b"") -> Iterator[str]:
    """The address of a port that says `answer` to whatever connects; nothing at all if it is empty."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                if answer:
                    connection.sendall(answer)
                    connection.close()

        if answer:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_where_nothing_listens_fails():
    with listener() as address:
        pass
    about = open_case(address, None, None, None)
    finds(shards.addresses, about, OK, "1 named")
    finds(shards.names, about, OK, "1 resolved")
    finds(shards.ports, about, FAIL, f"{address}: connection refused")
    assert shards.stream.run(about) is None  # one failure is enough


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_another_service_on_the_port_fails(answer: bytes):
    with listener(answer) as address:
        about = open_case(address, None, None, None)
    finds(shards.ports, about, OK, "1 reachable")
    finds(shards.stream, about, FAIL, address)
    finds(shards.grpc, about, FAIL, address)
    assert shards.placement.run(about) is None


def test_a_silent_service_does_not_hold_the_doctor_up():
    with listener() as address:
        start = time.monotonic()
        about = open_case(f"{address},127.0.0.1:1", None, None, None)
        assert time.monotonic() - start < 30  # it is 3 s; a hang would last for ever
    finds(shards.stream, about, FAIL, f"{address}: no answer")
    finds(shards.grpc, about, FAIL, address)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h:70000", "port of 1..65535"),
        ("a:1,a:1", "named twice"),
        ("http://h:80", "write host:port"),
        (",", "name every"),
    ],
)
def test_what_is_no_address_fails(text: str, words: str):
    finds(shards.addresses, open_case(text, None, None, None), FAIL, words)


def test_a_name_without_address_fails():
    about = open_case("no-such-host.invalid:7700", None, None, None)
    finds(shards.names, about, FAIL, "'no-such-host.invalid' is unknown")
    assert shards.ports.run(about) is None


def test_a_socket_that_is_none_fails(tmp_path: Path):
    finds(shards.names, open_case(f"unix:{tmp_path}/s", None, None, None), FAIL, "is no socket")


def test_a_name_server_that_hangs_does_not_hold_the_doctor_up(monkeypatch: pytest.MonkeyPatch):
    release = threading.Event()

    def hang(*_: object, **__: object) -> None:
        release.wait(60)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    about = open_case("slow:7700", None, None, None)
    release.set()
    finds(shards.names, about, FAIL, "not looked up in time")


def test_rpc_is_not_asked_anything():
    with listener() as address:
        about = open_case(f"rpc://{address}", None, None, None)
    finds(shards.stream, about, OK, "executes pickles")


def test_slow_calls_and_tcp_on_one_machine_are_warnings():
    finds(shards.latency, Case(probes=[probe(call_seconds=1e-4)]), OK, "0.10 ms")
    finds(
        shards.latency, Case(probes=[probe(call_seconds=1e-4), probe(call_seconds=0.02)]), WARN, "20.00 ms, the slowest"
    )
    finds(shards.unix_sockets, Case(probes=[probe()]), OK, "by Unix sockets")
    finds(shards.unix_sockets, Case(probes=[probe(beside=False)]), WARN, "over TCP: shard 0 at h:1")
    finds(shards.unix_sockets, Case(probes=[probe(here=False, beside=False)]), OK, "no shard runs on this machine")


def test_another_version_fails():
    finds(shards.versions, Case(probes=[probe()]), OK, "everywhere")
    old = replace(GREETING, version="0.0.1")
    finds(shards.versions, Case(probes=[probe(stream_greeting=old)]), FAIL, "shard 0 at h:1 has 0.0.1")


def test_two_processes_behind_one_address_fail():
    other = replace(GREETING, instance="another")
    finds(shards.instances, Case(probes=[probe(grpc_greeting=other)]), FAIL, "two processes")


def test_tables_are_the_same_everywhere_and_loaded():
    finds(shards.tables, case(STATUS, STATUS), OK, "1 tables, 20 rows")
    finds(shards.tables, case(STATUS, replace(STATUS, tables=())), FAIL, "items")
    finds(shards.tables, case(replace(STATUS, tables=(replace(TABLE, loading=True),))), WARN, "being loaded: items")


def test_waiting_requests_and_skipped_gradients_are_warnings():
    full = replace(STATUS, queued_bytes=2**20)
    finds(shards.load, case(full), WARN, "1.0 MiB waiting")
    finds(shards.load, Case(probes=[probe(full, before=STATUS)]), OK, "no requests wait")  # a moment is no load
    held_back = replace(full, staleness=0, members=(member(0, 1),))
    finds(shards.load, case(held_back), OK, "no requests wait")  # pulls that wait for other workers
    finds(shards.gradients, case(STATUS), OK, "all finite")
    finds(shards.gradients, case(replace(STATUS, skipped_rows=7)), WARN, "7 gradient rows held NaN or Inf")


# ---- the workers


def member(worker: int, clock: int, lease: float = 8.0, resting: bool = False) -> MemberStatus:
    return MemberStatus(worker, clock, resting, lease)


def serving(clock: int, *members: MemberStatus, **fields: object) -> ShardStatus:
    return replace(STATUS, **{"clock": clock, "staleness": 0, "members": members, **fields})


def test_shards_without_members_have_no_clock_to_check():
    finds(clocks.clock, case(STATUS), OK, "no worker is a member")
    assert clocks.members.run(case(STATUS)) is None
    assert clocks.clock.run(NOBODY) is None


def test_a_shard_whose_clock_is_behind_is_named():
    ahead, behind = serving(20, member(0, 20)), serving(3, member(0, 3))
    finds(clocks.clock, case(ahead, ahead), OK, "20 (synchronous), standing still")
    finds(clocks.clock, Case(probes=[probe(ahead, serving(18, member(0, 18)))]), OK, "moving")
    finds(clocks.clock, case(ahead, behind), WARN, "3 to 20")


def test_members_that_are_missing_are_named(tmp_path: Path):
    both, one = serving(1, member(0, 1), member(1, 1, resting=True)), serving(1, member(0, 1))
    finds(clocks.members, case(both, both), OK, "workers 0, 1; resting: 1")
    finds(clocks.members, case(both, one), WARN, "not members on every shard: workers 1")
    about = job(tmp_path)
    finds(clocks.members, replace(about, probes=[probe(one)]), WARN, "workers 0; the job has 2")


def test_the_worker_that_the_others_wait_for_is_named():
    level = serving(5, member(0, 5), member(1, 5))
    finds(clocks.waited_for, case(level), OK, "nobody")
    lagging = serving(5, member(0, 6), member(1, 5, lease=1.5), member(2, 4, resting=True))
    finds(clocks.waited_for, case(lagging), WARN, "worker 1 (its lease has 1.5 s left)")
    finds(clocks.waited_for, case(serving(0, member(0, 1))), WARN, "not all workers of the job have joined")
    moved = serving(4, member(0, 5), member(1, 4))
    finds(clocks.waited_for, Case(probes=[probe(lagging, before=moved)]), OK, "at this moment: workers 1")


def test_leases_that_end_are_a_warning(tmp_path: Path):
    finds(clocks.leases, case(serving(1, member(0, 1))), OK, "the shortest has 8.0 s left")
    finds(clocks.leases, case(serving(1, expired_leases=2)), WARN, "2 expired")
    about = replace(job(tmp_path, "train.lease=10"), probes=[probe(serving(1, member(0, 1, 2.0)))])
    finds(clocks.leases, about, WARN, "worker 0: 2.0 s left")


def test_rows_that_miss_many_updates_are_a_warning():
    assert clocks.staleness_seen.run(case(STATUS)) is None
    finds(clocks.staleness_seen, case(replace(STATUS, staleness_seen=(90, 10))), OK, "100 pushes: mean 0.1, p99 1")
    late = replace(STATUS, staleness_seen=(*[0] * 31, 50))
    finds(clocks.staleness_seen, case(late, late), OK, "at most 31 or more updates missed")  # of workers long gone
    late = replace(late, members=(member(0, 1), member(1, 1)))
    finds(clocks.staleness_seen, case(late, late), WARN, "at most 31 or more updates missed")
    finds(clocks.staleness_seen, case(replace(late, staleness=16)), OK, "mean 31.0")


def test_a_job_of_another_mode_than_the_shards_fails(tmp_path: Path):
    probes = [probe(serving(1, member(0, 1)))]
    finds(clocks.job_and_workers, replace(job(tmp_path, "train.staleness=0"), probes=probes), OK, "staleness 0")
    finds(clocks.job_and_workers, replace(job(tmp_path), probes=probes), FAIL, "is off, the shards serve 0")


# ---- a run


def part(share: float) -> dict[str, float]:
    return {"p50_ms": 100 * share, "p99_ms": 100 * share, "share": share}


def a_run(
    folder: Path,
    parts: Mapping[str, float] | None = None,
    *,
    wait_share: float = 0.0,
    speeds: tuple[float, ...] = (100.0,) * 20,
    result: bool = True,
    p99: float = 110.0,
    train: Mapping[str, object] = {},
    overlapped: Mapping[str, float] = {},
    **interval: float,
) -> Case:
    """The case of a run that left this behind."""
    lines: list[dict[str, object]] = [{"record": "config", "workers": 2, "job": {"train": dict(train)}}]
    for at, speed in enumerate(speeds):
        lines.append(
            {
                "record": "train",
                "step": at,
                "samples_per_second": speed,
                "wait_share": wait_share,
                "loss": None,
                **interval,
            }
        )
    lines.append({"record": "eval", "seconds": 20.0, "evaluation_seconds": interval.get("evaluating", 1.0)})
    if result:
        lines.append(
            {
                "record": "result",
                "steps": 20,
                "samples_per_second": 100.0,
                "seconds": 21.0,
                "wait_share": wait_share,
                "expired_leases": interval.get("expired_leases", 0),
            }
        )
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if parts is not None:
        split: dict[str, object] = {"steps": 200, "step": {"p50_ms": 100.0, "p99_ms": p99, "share": 1.0}}
        for threads, shares in (("parts", parts), ("overlapped", overlapped)):
            split[threads] = {name: part(share) for name, share in shares.items()}
        (folder / "profile.json").write_text(json.dumps(split))
    return Case(run=read_run(folder))


@pytest.mark.parametrize("name", runs.PARTS)
def test_the_part_that_dominates_a_step_comes_with_what_to_try(name: str, tmp_path: Path):
    about = a_run(tmp_path, {"other": 0.1, "route": 0.1, name: 0.7})
    finding = runs.step.run(about)
    assert finding is not None
    assert finding.text.startswith(f"{name} takes 70% of 100.0 ms (")
    assert finding.remedy == runs.PARTS[name]
    assert finding.level is (OK if name in ("forward", "backward") else WARN)


def test_waiting_for_a_batch_is_told_from_waiting_for_shards(tmp_path: Path):
    about = a_run(tmp_path, {"wait": 0.7, "forward": 0.3}, overlapped={"wait": 0.1, "data": 0.8})
    finding = runs.step.run(about)
    assert finding is not None
    assert finding.text.endswith("meanwhile another thread spends 80% on data")
    assert finding.remedy == runs.PARTS["data"]


def test_every_part_that_a_step_has_is_known():
    text = (ROOT / "worker" / "spans.py").read_text().partition('"""')[2].partition('"""')[0]
    named = set(re.findall(r"`(\w+)`", text.partition("The parts:")[2].partition("Spans nest")[0]))
    assert named == set(runs.PARTS) - {"other"}


def test_a_run_without_profile_says_how_to_get_one(tmp_path: Path):
    finding = runs.step.run(a_run(tmp_path))
    assert finding == Finding(OK, "not known: there is no profile.json", "run it with --profile")


def test_steps_that_differ_much_are_a_warning(tmp_path: Path):
    finds(runs.even_steps, a_run(tmp_path, {"forward": 0.9}), OK, "p50 100.0 ms")
    finds(runs.even_steps, a_run(tmp_path, {"forward": 0.9}, p99=900.0), WARN, "p99 900.0 ms")


def test_a_run_that_did_not_end_is_a_warning(tmp_path: Path):
    finds(runs.ended, a_run(tmp_path), OK, "20 steps, 100 samples/s")
    finds(runs.ended, a_run(tmp_path, result=False), WARN, "after step 19")
    finds(runs.ended, a_run(tmp_path, expired_leases=2), WARN, "2 times a worker was given up")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("", "no `config` line"), ('[]\n{"a"\n\x00\x1b[2J\n', "no `config` line")],
)
def test_a_folder_without_a_run_fails(text: str | None, words: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    finds(runs.ended, Case(run=read_run(tmp_path)), FAIL, words)


def test_damaged_lines_of_a_log_are_counted(tmp_path: Path):
    a_run(tmp_path)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"record":"train","samples_per')
    finds(runs.ended, Case(run=read_run(tmp_path)), WARN, "1 damaged lines")


@pytest.mark.parametrize("text", ["{", "[]", '{"parts": 1, "step": []}', '{"parts": {"wait": {"share": "much"}}}'])
def test_a_damaged_profile_breaks_nothing(text: str, tmp_path: Path):
    a_run(tmp_path)
    (tmp_path / "profile.json").write_text(text)
    about = Case(run=read_run(tmp_path))
    for one in SUBJECTS["run"]:
        finding = one.run(about)
        assert finding is None or "could not be checked" not in finding.text


def test_why_workers_wait_is_said(tmp_path: Path):
    finds(runs.waiting, a_run(tmp_path, wait_share=0.05), OK, "5% of the training time")
    asynchronous = {"prefetch": 2, "staleness": None}
    assert found(runs.waiting, a_run(tmp_path, wait_share=0.6, train=asynchronous)) == (
        WARN,
        "60% of the training time",
    )
    about = a_run(tmp_path, wait_share=0.6, train={"prefetch": 0, "staleness": 0})
    finds(runs.waiting, about, WARN, "synchronous workers wait for the slowest")
    alone = a_run(tmp_path, wait_share=0.6, train={"prefetch": 0, "staleness": None})
    finds(runs.waiting, alone, WARN, "no step is computed while pushes are on their way")
    busy = [probe(replace(STATUS, queued_bytes=2**20), call_seconds=0.03)]
    finds(runs.waiting, replace(about, probes=busy), WARN, "the network: a small call takes 30.0 ms")
    finds(runs.waiting, replace(about, probes=busy), WARN, "the shards are busy: shard 0 at h:1")


def test_a_run_that_slows_down_is_a_warning(tmp_path: Path):
    finds(runs.speed_over_time, a_run(tmp_path), OK, "100 samples/s at first")
    slow = a_run(tmp_path, speeds=(*[100.0] * 10, *[20.0] * 10))
    finds(runs.speed_over_time, slow, WARN, "100 samples/s at first, 20 at last")
    assert runs.speed_over_time.run(a_run(tmp_path, speeds=(100.0, 1.0))) is None  # too short to tell


def test_long_evaluations_and_a_cache_without_hits_are_warnings(tmp_path: Path):
    finds(runs.evaluation, a_run(tmp_path), OK, "1.0 of 21.0 s in 1 evaluations")
    finds(runs.evaluation, a_run(tmp_path, evaluating=15.0), WARN, "15.0 of 21.0 s")
    assert runs.cache.run(a_run(tmp_path)) is None
    finds(runs.cache, a_run(tmp_path, cached_share=0.5), OK, "50% of the rows")
    finds(runs.cache, a_run(tmp_path, cached_share=0.01), WARN, "1% of the rows")


# ---- the command


def run(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and what each check found by its name."""
    done = CliRunner().invoke(cli.app, ["doctor", *words, "--json"])
    answers = json.loads(done.stdout)
    assert answers["ok"] is (done.exit_code == 0)
    return done.exit_code, {answer["check"]: answer for answer in answers["checks"]}


@pytest.fixture(autouse=True)
def no_shards_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine at the default port is not asked."""
    monkeypatch.setattr(command, "shards_of_up", lambda: [])


def test_without_shards_and_run_the_machine_is_checked():
    _, answers = run()
    assert {answer["subject"] for answer in answers.values()} == {"installation", "machine", "computing", "files"}


def test_what_a_server_says_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch):
    rude = check("rude", asks="", remedy="")(lambda _: ok("\x1b[2J[red]\nline", "\x07do"))
    monkeypatch.setattr(command, "SUBJECTS", {"rudeness": [rude]})
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "[red]" in done.output
    assert "\x07" not in done.output


def test_a_failure_is_shown_with_its_remedy_and_ends_with_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "SUBJECTS", {"shards": [shards.addresses]})
    done = CliRunner().invoke(cli.app, ["doctor", "nonsense"])
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "fail addresses 'nonsense' is not the address of a shard" in text
    assert f"-> {shards.addresses.remedy}" in text
    assert text.endswith("1 fail")


@pytest.mark.integration
def test_low_limits_are_found_where_they_are():
    program = "import sys; sys.argv = ['embershard', 'doctor', '--json']; from embershard.cli import main; main()"
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 128 && ulimit -v 20000000 && exec "$0" -c "$1"', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers = {answer["check"]: answer for answer in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert answers["open files"]["level"] == "fail"
    assert answers["open files"]["found"].startswith("128 ")
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 10 * 2**30:
        assert answers["address space"]["level"] == "warn"


@pytest.fixture(scope="module")
def two_placements() -> Iterator[tuple[LocalShards, LocalShards]]:
    with LocalShards(2) as one, LocalShards(1) as other:
        yield one, other


@pytest.mark.integration
def test_shards_that_serve_are_found_well(two_placements: tuple[LocalShards, LocalShards]):
    one, _ = two_placements
    _, answers = run(",".join(one.addresses))
    shown = {name: answer["level"] for name, answer in answers.items() if answer["subject"] == "shards"}
    assert shown.pop("latency") in ("ok", "warn")
    assert set(shown.values()) == {"ok"}, answers
    assert set(shown) >= {"ports", "stream", "gRPC", "versions", "placement", "instances", "Unix sockets"}


@pytest.mark.integration
@pytest.mark.parametrize("scheme", ["tcp://", "grpc://"])
def test_carriers_are_those_of_the_addresses(scheme: str, two_placements: tuple[LocalShards, LocalShards]):
    about = open_case(f"{scheme}{two_placements[1].addresses[0]}", None, None, None)
    finds(shards.stream, about, OK, "1 answered")
    finds(shards.placement, about, OK, "all of 1 shards")
    finds(shards.unix_sockets, about, WARN, "over TCP")


@pytest.mark.integration
def test_shards_of_two_jobs_are_not_one_placement(two_placements: tuple[LocalShards, LocalShards]):
    one, other = two_placements
    finds(
        shards.placement,
        open_case(f"{one.addresses[0]},{other.addresses[0]}", None, None, None),
        FAIL,
        "2 and 1 shards",
    )
    finds(shards.placement, open_case(one.addresses[0], None, None, None), FAIL, "of 2 shards, 1 is not among")
    twice = f"{other.addresses[0]},{other.addresses[0].replace('127.0.0.1', 'localhost')}"
    finds(shards.instances, open_case(twice, None, None, None), FAIL, "one shard under several addresses")


@pytest.mark.integration
def test_a_shard_that_is_stopped_is_found_silent(two_placements: tuple[LocalShards, LocalShards]):
    one, _ = two_placements
    os.kill(one.pids[1], signal.SIGSTOP)
    try:
        about = open_case(",".join(one.addresses), None, None, None)
    finally:
        os.kill(one.pids[1], signal.SIGCONT)
    finds(shards.stream, about, FAIL, f"{one.addresses[1]}: no answer")
    finds(shards.placement, about, FAIL, "of 2 shards, 1 did not answer")


@pytest.mark.integration
def test_the_workers_of_a_job_are_seen_from_outside(two_placements: tuple[LocalShards, LocalShards]):
    one, _ = two_placements
    everybody = ",".join(one.addresses)
    spec = TableSpec(name="seen", dim=2, optimizer=SGD(lr=1.0))
    with (
        es.connect(everybody, worker=0, workers=2, staleness=0) as quick,
        es.connect(everybody, worker=1, workers=2, staleness=0) as slow,
    ):
        for session in (quick, slow):
            session.table(spec)
        finds(clocks.members, open_case(everybody, None, None, None), OK, "workers 0, 1")
        quick.step()
        about = open_case(everybody, None, None, None)
        finds(clocks.waited_for, about, WARN, "worker 1 (its lease has")
        finds(clocks.clock, about, OK, "0 (synchronous), standing still")
        slow.step()
        finds(clocks.waited_for, open_case(everybody, None, None, None), OK, "nobody")
    finds(clocks.clock, open_case(everybody, None, None, None), OK, "no worker is a member")
