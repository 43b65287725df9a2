"""A shard that is killed under load comes back from its log: no acknowledged push is lost, none counts twice."""

import importlib
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy, ShardSettings
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import GetStatus, ShardStatus
from embershard.proto.routing import make_route
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from harness.eventually import PATIENCE, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

BENCH = Path(__file__).resolve().parents[2] / "bench"
IDS, DIM = 60, 4
AGAIN = RestartPolicy(first_pause=timedelta(0), quick=timedelta(0))
TIMEOUT = timedelta(seconds=PATIENCE)


@pytest.fixture
def chaos(monkeypatch):
    """The job of `make bar-kill`, and what it looks at."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("chaos")


def kill_under_load(chaos, folder, kills, mode, durability="log", seed=0, num_shards=1):
    """Kill shards at random moments while workers push; look at their logs, and compare with undisturbed shards."""
    chooser, terms = random.Random(seed), [1] * num_shards
    settings = ShardSettings(durability=durability, log_dir=folder)
    with (
        LocalShards(num_shards, settings, restart=AGAIN, report=lambda line: None) as shards,
        chaos.job_on(shards.addresses, mode) as job,
    ):
        for _ in range(kills):
            job.await_steps(3)
            time.sleep(chooser.uniform(0, 0.3))
            victim = chooser.randrange(num_shards)
            assert chaos.kill(shards, victim)
            terms[victim] += 1
        steps, rows = job.finish()
        status = job.pushers[0].client.connections.call_all(GetStatus())
    assert [one.term for one in status] == terms
    assert [one.expired_leases for one in status] == [0] * num_shards
    assert chaos.log_problems(folder, num_shards, steps, rows, Counter()) == []
    assert chaos.differing(rows, chaos.undisturbed(steps, mode, num_shards)) == []


SLOW_CODEC = """
import time
import numpy as np
import embershard as es

def read(payload, rows, dim):
    time.sleep(0.02)
    return payload.view(np.float16).reshape(rows, dim).astype(np.float32)

@es.values_codec(decode=read, nbytes=lambda rows, dim: 2 * rows * dim)
def slow(rows, key):
    return rows.astype(np.float16)
"""


def test_a_recovery_that_takes_longer_than_a_call_is_waited_for_and_shown(tmp_path, monkeypatch):
    (tmp_path / "slow_codec.py").write_text(SLOW_CODEC)
    monkeypatch.syspath_prepend(tmp_path)
    imports = ["slow_codec"]
    spec = es.TableSpec(name="t", dim=DIM, optimizer=es.SGD(lr=1.0), push_codec=CodecName.parse("slow_codec:slow"))
    settings = ShardSettings(imports=imports, durability="log", log_dir=tmp_path / "log")
    with (
        LocalShards(1, settings, restart=AGAIN, report=lambda line: None) as shards,
        es.connect(shards.addresses, timeout=TIMEOUT, imports=imports) as session,
        closing(transport_for(shards.addresses[0])) as transport,
    ):
        client = session.client
        client.declare(spec)
        route = make_route(np.arange(IDS), spec.space_key, client.placement)
        for step in range(50):  # a second to decode
            client.push([("t", route, np.ones((IDS, DIM), np.float32))], clock=step)
        (want,), (before,) = client.pull([("t", route)]), client.status()
        client.timeout = timedelta(seconds=0.5)
        os.kill(shards.pids[0], signal.SIGKILL)

        def seen(recovering):
            with suppress(Unreachable, EmbershardError):
                reply = transport.submit(GetStatus(), TIMEOUT).result()
                assert isinstance(reply, ShardStatus)
                return reply if reply.recovering == recovering and reply.instance != before.instance else None

        assert eventually(lambda: (found := seen(True)) and 0 < found.recovered_bytes < found.log_bytes)
        (got,) = client.pull([("t", route)])
        np.testing.assert_array_equal(got, want)
        assert seen(False).recovery_seconds > 0.9  # its own took as long


@pytest.mark.parametrize(
    ("mode", "durability", "kills", "num_shards"),
    [("asynchronous", "log", 4, 1), ("bounded", "log", 2, 1), ("synchronous", "log", 4, 1), ("bounded", "fsync", 2, 2)],
)
def test_kills_lose_and_double_nothing_in_any_mode(chaos, tmp_path, mode, durability, kills, num_shards):
    kill_under_load(chaos, tmp_path / "log", kills, mode, durability, num_shards=num_shards)


@pytest.mark.long
@pytest.mark.parametrize("durability", ["log", "fsync"])
def test_fifty_kills_lose_and_double_nothing(chaos, tmp_path, durability):
    for seed, mode in enumerate(["asynchronous", "synchronous", "bounded", "asynchronous", "synchronous"]):
        kill_under_load(chaos, tmp_path / f"log-{seed}", 5, mode, durability, seed)


WAYS = {
    "asynchronous": {},
    "synchronous": {"staleness": 0},
    "bounded": {"staleness": 2},
    "local steps": {"local_steps": 4},
    "local steps of a synchronous job": {"staleness": 0, "local_steps": 4},
    "topk": {"compression": es.Compression(push="topk:0.1", dense={"push": "dgc:0.1+fp16s", "pull": "delta"})},
    "int8": {"staleness": 0, "compression": es.Compression(push="int8", pull="int8", dense={"push": "powersgd:1"})},
    "onebit": {"staleness": 2, "compression": es.Compression(push="rows:0.5+int8", dense={"push": "onebit"})},
}


def train(session, until):
    """Train a model batch after batch until `until`, which is given their number, says so; its weights."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(200, 4, mode="sum"), torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model, count = es.wrap(net, session, optimizer=es.SGD(lr=0.1)), 0

    def batches():  # some ahead of the steps
        nonlocal count
        while not until(count):
            count += 1
            yield torch.randint(0, 200, (16, 5), generator=generator)

    for ids in session.prefetch(batches(), staleness=0, inputs=lambda ids: {"0": ids}):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], (ids[:, 0] % 2).float())
        loss.backward()
        session.step()
    session.flush()
    session.refresh()
    with torch.no_grad():
        return count, [parameter.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("is_there", [True, False], ids=["log", "its folder is gone"])
def test_the_supervisor_says_whether_a_dead_shard_has_its_log(tmp_path, is_there):
    folder, lines = tmp_path / "logs", []
    settings = ShardSettings(durability="log", log_dir=folder)
    with LocalShards(1, settings, restart=AGAIN, report=lines.append) as shards:
        if not is_there:
            folder.rename(tmp_path / "elsewhere")  # at once, since the shard makes files in it
        os.kill(shards.pids[0], signal.SIGKILL)
        assert eventually(lambda: any("recovers its rows from its event log" in line for line in lines))
    told = next(line for line in lines if "recovers its rows from its event log" in line)
    assert f"in {folder}" in told
    assert ("which is gone: they are lost" in told) == (not is_there)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_whose_shards_are_killed_trains_to_the_bits_of_one_that_was_not_disturbed(tmp_path, way):
    chooser = random.Random(way)
    settings = ShardSettings(durability="log", log_dir=tmp_path)
    with LocalShards(2, settings, restart=AGAIN, report=lambda line: None) as shards:
        reached, done = [0], threading.Event()

        def kill():
            for _ in range(4):
                before = reached[0]
                eventually(lambda before=before: reached[0] > before + 3)
                time.sleep(chooser.uniform(0, 0.3))
                with suppress(ProcessLookupError):  # it was killed just before
                    os.kill(chooser.choice(shards.pids), signal.SIGKILL)
            done.set()

        def until(count):
            reached[0] = count
            return done.is_set() and count % 4 == 0

        killer = threading.Thread(target=kill)
        killer.start()
        with es.connect(shards.addresses, timeout=TIMEOUT, **WAYS[way]) as session:
            count, got = train(session, until)
            assert session.client.connections.recoveries
        killer.join()
    with LocalShards(2) as shards, es.connect(shards.addresses, timeout=TIMEOUT, **WAYS[way]) as session:
        _, want = train(session, lambda reached: reached >= count)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
