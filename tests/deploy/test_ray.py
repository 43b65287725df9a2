"""A job on a Ray cluster: what is asked of it, and what becomes of errors. Tests with a cluster need the extra ray."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

import embershard.ray
from embershard.cli.app import app
from embershard.cli.engines import EngineName, EngineSettings, parse_resources
from embershard.deploy.engine import Place
from embershard.deploy.ray import NoRay, NoRoom, RayEngine
from embershard.worker.job.load import load_job
from harness.eventually import PATIENCE, eventually
from harness.growing_job import SAMPLES, GrowingJob
from harness.processes import EMBERSHARD
from harness.raises import raises

JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, eval_samples: 100, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 200000}
evaluate: {every: 40000}
checkpoint: {folder: checkpoints, every: 40000}
workers: 1
"""


def test_amounts_of_resources_are_read_as_a_cluster_counts_them():
    assert parse_resources("CPU=4, GPU=0.5,memory=2GiB,tpu-v4=1", "") == {
        "CPU": 4.0, "GPU": 0.5, "memory": 2.0**31, "tpu-v4": 1.0,
    }  # fmt: skip
    assert parse_resources("", "") == {}


@pytest.mark.parametrize("text", ["CPU", "CPU=", "=1", "GPU=some", "CPU=0", "GPU=-1", "CPU=inf", "memory=16X", "a=1,,"])
def test_an_amount_that_is_none_is_refused(text):
    with pytest.raises(typer.BadParameter):
        parse_resources(text, "--worker-resources")


@pytest.mark.parametrize(
    "words",
    [
        ("--pack",),
        ("--engine", "slurm", "--worker-resources", "GPU=1"),
        ("--shard-resources", "CPU=1"),
        ("--engine", "ray", "--worker-resources", "GPU"),
        ("--engine", "ray", "--metrics", "127.0.0.1:7790"),
        ("--engine", "ray", "--output", "a,b"),
        ("--engine", "ray", "--set", "strategy=hybrid"),
    ],
)
def test_options_that_a_ray_cluster_cannot_follow_are_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    assert CliRunner().invoke(app, ["train", "job.yaml", *words]).exit_code == 2


def test_a_worker_that_is_given_cores_has_as_many_threads():
    assert EngineSettings(name=EngineName.RAY, worker_resources={"CPU": 4.0, "GPU": 1.0}).worker_threads == 4
    assert EngineSettings(name=EngineName.RAY, worker_resources={"CPU": 0.5}).worker_threads == 1
    assert EngineSettings(name=EngineName.RAY, worker_resources={"GPU": 1.0}).worker_threads is None


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(NoRay, reason="Ray is not installed: pip install 'embershard[ray]'"):
        RayEngine(tmp_path)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A program in place of Python: it writes down its words and RAY_ADDRESS, and does what a line of shell says."""

    def command(line):
        program = tmp_path / "python"
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/words"\necho "$RAY_ADDRESS" > "{tmp_path}/address"\n{line}\n'
        )
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setenv("RAY_ADDRESS", "of-the-environment:1")

    return command


@pytest.mark.cold_start
def test_a_run_is_the_command_with_its_options_and_returns_the_last_record(command, tmp_path):
    command(f"""printf '{{"record": "config"}}\\n{{"record": "result", "auc": 0.8}}\\n' > "{tmp_path}/log.jsonl" """)
    result = embershard.ray.run(
        "job.yaml",
        shards=4,
        workers=8,
        output=tmp_path,
        settings=["train.epochs=2"],
        imports=["mine"],
        resume="auto",
        insecure=True,
        address="10.0.0.1:6379",
        pack=True,
        shard_resources={"memory": 2**31},
        worker_resources={"CPU": 4, "GPU": 0.5},
    )
    assert (result.folder, result.record) == (tmp_path, {"record": "result", "auc": 0.8})
    words = (tmp_path / "words").read_text().split("\n")[:-1]
    given = "train job.yaml --engine ray --shards 4 --workers 8 --set train.epochs=2 --import mine --resume auto"
    given += f" --output {tmp_path} --insecure --pack --parent-pid {os.getpid()}"
    given += " --shard-resources memory=2147483648 --worker-resources CPU=4,GPU=0.5"
    assert sorted(words) == sorted(["-m", "embershard.cli", *given.split(" ")])
    assert (tmp_path / "address").read_text() == "10.0.0.1:6379\n"
    assert parse_resources("memory=2147483648", "") == {"memory": 2.0**31}


@pytest.mark.cold_start
def test_a_run_that_fails_says_where_to_look_and_names_the_cluster_of_the_environment(command, tmp_path):
    command("exit 3")
    with raises(embershard.ray.RunFailed, code=3, folder=str(tmp_path)):
        embershard.ray.run("job.yaml", output=tmp_path)
    assert (tmp_path / "address").read_text() == "of-the-environment:1\n"
    with raises(embershard.ray.RunFailed, code=3):
        embershard.ray.run("job.yaml", output=tmp_path, workers=(2, 8))
    assert "--workers\n2-8\n" in (tmp_path / "words").read_text()


@pytest.mark.cold_start
def test_a_run_has_no_options_that_were_not_given(command, tmp_path):
    command("exit 3")
    with raises(embershard.ray.RunFailed):
        embershard.ray.run("job.yaml", output=tmp_path)
    assert not {"--shards", "--workers", "--resume", "--pack"} & set((tmp_path / "words").read_text().split())


@pytest.mark.cold_start
@pytest.mark.parametrize("when", ["while it starts", "while it runs"])
def test_an_interrupt_reaches_the_command_which_is_waited_for(command, tmp_path, monkeypatch, when):
    began, ended = tmp_path / "began", tmp_path / "ended"
    command(f'trap \'sleep 0.5; touch "{ended}"; exit 130\' INT\ntouch "{began}"\nwhile :; do sleep 0.1; done')

    def interrupt():
        if eventually(began.exists):
            os.kill(os.getpid(), signal.SIGINT)

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if when == "while it starts":
                interrupt()

    monkeypatch.setattr(subprocess, "Popen", Popen)
    thread = threading.Thread(target=interrupt if when == "while it runs" else lambda: None)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        embershard.ray.run("job.yaml", output=tmp_path)
    thread.join()
    assert ended.exists()


class Cluster:
    """A head of two cores and a GPU that it only says it has, and a node of two cores and its own resource."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self._small = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**self._small, "num_gpus": 1, "include_dashboard": False}
        )
        self._other = self._cluster.add_node(resources={"other": 2}, **self._small)
        self.address = str(self._cluster.address)

    def lose_a_node(self):
        self._cluster.remove_node(self._other, allow_graceful=False)

    def repair(self):
        self._other = self._cluster.add_node(resources={"other": 2}, **self._small)

    def free_cores(self):
        import ray

        if ray.is_initialized():
            return ray.available_resources().get("CPU", 0.0)
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        try:
            return ray.available_resources().get("CPU", 0.0)
        finally:
            ray.shutdown()

    def close(self):
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    with closing(Cluster()) as cluster:
        yield cluster


@pytest.fixture
def make_engine(cluster, tmp_path):
    """Engines on the cluster, which has all of its cores again after the test."""
    made = []

    def make(**options):
        options = {"room_timeout": timedelta(seconds=60), **options}
        made.append(RayEngine(tmp_path / "shards", address=cluster.address, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert eventually(lambda: cluster.free_cores() == 4)


def run_at(place, code, **options):
    """A program of Python at a place, as its engine starts processes there."""
    words = [*place.prefix, sys.executable, "-c", code]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def finished(process, data=b""):
    said, errors = process.communicate(data, timeout=PATIENCE)
    return process.returncode, said.decode(), errors.decode()


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_a_process_at_a_place_has_its_streams_signals_and_exit_code_here(make_engine):
    engine = make_engine()
    shards, workers = engine.shards(2), engine.workers(2)
    assert [(place.number, place.of) for place in (*shards, *workers)] == [(0, 1)] * 4
    echo = run_at(shards[0], "import os, sys; print(input(), os.environ['EMBERSHARD_ADVERTISE']); sys.exit('no')")
    code, said, errors = finished(echo, b"hello\n")
    assert (code, said.split()[0], errors) == (1, "hello", "no\n")
    assert said.split()[1][0].isdigit()
    killed = finished(run_at(workers[0], "import os; os.kill(os.getpid(), 9)"))
    assert engine.exit_code(killed[0], workers[0]) == -signal.SIGKILL
    waits = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(3))\nprint(1, flush=True)\ntime.sleep(600)"
    told = run_at(workers[1], waits)
    assert told.stdout.readline() == b"1\n"
    told.terminate()
    assert finished(told)[0] == 3


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_what_is_asked_for_is_reserved_and_a_gpu_is_seen_by_its_worker(make_engine, cluster):
    engine = make_engine(worker_resources={"CPU": 1, "GPU": 1}, shard_resources={"other": 1}, pack=True)
    (worker,), shards = engine.workers(1), engine.shards(2)
    assert [place.number for place in shards] == [0, 1]  # on the node that has it
    code, said, _ = finished(run_at(worker, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"))
    assert (code, said) == (0, "0\n")
    assert cluster.free_cores() == 3


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_a_cluster_without_room_is_an_error_that_says_what_there_is(make_engine, cluster):
    soon = timedelta(seconds=2)
    with raises(NoRoom, count=3, what="shards", nodes=2, held="4 CPU (4 CPU free)"):
        make_engine(room_timeout=soon).shards(3)
    engine = make_engine(pack=True)
    assert len(engine.shards(3)) == 3
    engine.close()
    assert eventually(lambda: cluster.free_cores() == 4)
    with raises(NoRoom, what="workers", each="1 CPU and 2 GPU", spread=""):
        make_engine(room_timeout=soon, worker_resources={"CPU": 1, "GPU": 2}).workers(1)


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_the_wait_for_room_may_be_interrupted(make_engine):
    engine = make_engine(room_timeout=timedelta(hours=1))
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.shards(3)
    timer.join()


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_a_process_whose_place_has_lost_its_node_waits_for_another_not_for_ever(make_engine, cluster):
    engine = make_engine(room_timeout=timedelta(seconds=5), worker_resources={"other": 1})
    (place,) = engine.workers(1)
    cluster.lose_a_node()
    try:
        code, _, errors = finished(run_at(engine.again(place), "print(1)"))
        assert engine.exit_code(code, place) == -signal.SIGKILL
        assert "no node of the Ray cluster with 1 other free has started it within 5 s" in errors
        waits = run_at(Place((*place.prefix[:-2], "600", "--")), "print(1)")
        time.sleep(4)
        waits.terminate()
        assert finished(waits)[0]
    finally:
        cluster.repair()
    code, said, _ = finished(run_at(place, "print(1)"))
    assert (code, said.splitlines()[-1]) == (0, "1")  # the place is on the new node; Ray says that one was lost


def records(folder):
    log = folder / "out" / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def train(cluster, tmp_path):
    """A job's command on the cluster; none of its processes is left after the test."""
    (tmp_path / "job.yaml").write_text(JOB)
    started = []

    def train(*words, code=""):
        command = [sys.executable, "-c", code] if code else [*EMBERSHARD, "train", "job.yaml", "--engine", "ray"]
        command += [] if code else ["--output", "out", *words]
        environment = {**os.environ, "RAY_ADDRESS": cluster.address, "MARK": str(tmp_path)}
        with (tmp_path / "said").open("wb") as said:
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said))
        return started[-1]

    yield train
    for process in started:
        process.kill()
        process.wait()
    assert eventually(lambda: not of_the_job(tmp_path))
    assert eventually(lambda: cluster.free_cores() == 4)


def of_the_job(folder, role=""):
    """The processes of shards and workers, which the actors' nodes own, by their folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if {"embershard.cli", "--parent-pid"} <= set(words) and process.cwd() == str(folder):
                found += [process] if role in words or not role else []
    return found


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_a_job_whose_shard_loses_its_rows_goes_on_from_its_checkpoint_on_the_same_cluster(train, tmp_path):
    training = train("--shards", "2", "--worker-resources", "CPU=1")
    assert eventually(lambda: any(tmp_path.glob("checkpoints/step-*/checkpoint.json")) or training.poll() is not None)
    of_the_job(tmp_path, "ps")[0].kill()
    assert training.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
    (recovery,) = [one for one in records(tmp_path) if one["record"] == "recovery"]
    assert recovery["step"] > 0
    assert [one.get("resumed_step") for one in records(tmp_path) if one["record"] == "config"] == [
        None,
        recovery["step"],
    ]
    assert records(tmp_path)[-1]["record"] == "result"


JOB_OF_TABLES = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: READER, train: TRAIN}
features: {user: {}, item: {}, price: {type: number}}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, epochs: 1}
"""
DATASET = """
import ray.data
def clicks():
    return ray.data.read_parquet(["FOLDER/part-0.parquet", "FOLDER/part-1.parquet"])
"""


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_ray_data_gives_one_worker_the_bits_of_the_files_and_two_workers_each_row_once(cluster, tmp_path, monkeypatch):
    ray, random = pytest.importorskip("ray"), np.random.default_rng(0)
    for part in range(2):
        columns = {"label": random.integers(0, 2, 1000), "item": random.integers(0, 50, 1000)}
        users = [f"u{number}" for number in range(1000 * part, 1000 * part + 1000)]
        pq.write_table(
            pa.table({**columns, "user": users, "price": random.random(1000)}), tmp_path / f"part-{part}.parquet"
        )
    (tmp_path / "my_clicks.py").write_text(DATASET.replace("FOLDER", str(tmp_path)))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)

    def batches(reader, train, rank=0, world_size=1):
        (tmp_path / "job.yaml").write_text(JOB_OF_TABLES.replace("READER", reader).replace("TRAIN", train))
        dataset = load_job(tmp_path / "job.yaml").data.open(tmp_path, seed=7)
        found = list(dataset.train(0, rank, world_size, 256))
        return [[array.numpy() for array in (batch.ids, batch.dense, batch.labels)] for batch in found]

    try:
        from_files, from_ray = batches("tabular", "part-*.parquet"), batches("ray", "part-*.parquet")
        assert len(from_files) == len(from_ray) == 8
        for one, other in zip(from_files, from_ray, strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
        shares = [batches("ray", "my_clicks:clicks", rank, 2) for rank in range(2)]
        users = [set(np.concatenate([ids[:, 0] for ids, _, _ in share]).tolist()) for share in shares]
        assert len(users[0]) == len(users[1]) == 1000
        assert not users[0] & users[1]
    finally:
        ray.shutdown()


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_workers_come_and_leave_and_give_their_places_back(cluster, tmp_path):
    job = GrowingJob(tmp_path, "--engine", "ray", RAY_ADDRESS=cluster.address)
    assert job.changes == [(2, 3), (3, 2)]
    assert "worker 2 has left" in job.said
    assert (job.result["record"], job.result["samples"]) == ("result", SAMPLES)
    assert eventually(lambda: cluster.free_cores() == 4)


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_a_worker_for_which_the_cluster_has_no_room_leaves_nothing_behind(make_engine, cluster):
    engine = make_engine(room_timeout=timedelta(seconds=5), worker_resources={"other": 1})
    engine.workers(2, 3)
    place = engine.another_worker(2, 3)
    code, _, errors = finished(run_at(place, "print(1)"))
    assert engine.exit_code(code, place) == -signal.SIGKILL
    assert "no node of the Ray cluster with 1 other free has started it within 5 s" in errors
    engine.give_back(place)
    engine.workers(1, 3)
    place = engine.another_worker(1, 3)
    code, said, _ = finished(run_at(place, "print(1)"))
    assert (code, said) == (0, "1\n")


DRIVER = """
import signal, threading, ray, embershard.ray
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
ray.init(log_to_driver=False, logging_level="ERROR")
settings = ["train.samples=1000000000"]
run = threading.Thread(target=embershard.ray.run, args=("job.yaml",), kwargs=dict(output="out", settings=settings))
run.daemon = True
run.start()
signal.sigwait([signal.SIGUSR1])
ray.shutdown()
"""


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("how", ["interrupt", "shutdown"])
def test_where_the_driver_ends_in_the_middle_so_does_the_job(train, tmp_path, how):
    training = train("--set", "train.samples=1000000000") if how == "interrupt" else train(code=DRIVER)
    assert eventually(lambda: any(one["record"] == "train" for one in records(tmp_path)) or training.poll() is not None)
    assert of_the_job(tmp_path)
    training.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGUSR1)
    training.wait(PATIENCE)
    assert "Traceback" not in (tmp_path / "said").read_text()
