"""Models of sequences, lists and several labels in jobs: whatever the shards, prefetch, codec or strategy."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import embershard as es
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.trained.export import export_weights
from embershard.worker.trained.folder import ExportFacts, write_facts
from embershard.worker.trained.onnx import _samples
from embershard.worker.trained.served_inputs import inputs_of, job_data
from embershard.worker.training.trainer import Trainer
from harness.clicks import Notes
from harness.processes import said

TRAIN = """
train: {batch_size: 16, epochs: 4, seed: 1}
checkpoint: {best: false}
workers: 1
"""
SASREC = """
model: {name: sasrec, dropout: 0.0}
data: {reader: sequences, actions: actions.txt, max_length: 8, candidates: 9, users: 0}
embedding: {dim: 8, optimizer: {name: adam, lr: 0.02}}
metrics: [ndcg@10, map@10]
"""
SIMPLEX = """
model: {name: simplex, pooling: user_attention}
loss: {name: ccl, margin: 0.2, negative_weight: 5}
data: {reader: lists, train: train.txt, test: test.txt, negatives: 2, history: 4}
embedding: {dim: 8, optimizer: {name: adagrad, lr: 0.2}}
metrics: [recall@20, coverage@20]
"""
DIN = """
model: {name: din, target: item, history: items, attention: [8], hidden: [8]}
features:
  user: {buckets: 50}
  item: {buckets: 80, table: items}
  items: {type: sequence, buckets: 80, table: items, max_length: 6, separator: "|"}
data: {reader: tabular, train: table.csv, test: table.csv, label: clicked}
embedding: {dim: 8, optimizer: {name: adam, lr: 0.02}}
metrics: [auc, gauc]
evaluate: {groups: user}
"""
MMOE = """
model: {name: mmoe, experts: 2, expert: [8], tower: [4]}
loss: {name: bce, label_weights: [1, 0.5]}
features:
  user: {buckets: 50}
  item: {buckets: 80}
data: {reader: tabular, train: table.csv, test: table.csv, label: [clicked, bought]}
embedding: {dim: 8, optimizer: {name: adam, lr: 0.02}}
metrics: [auc, "auc:bought"]
"""
PLE = MMOE.replace("name: mmoe", "name: ple")
XDEEPFM = DIN.replace("name: din, target: item, history: items, attention: [8]", "name: xdeepfm, cin: [6, 4]").replace(
    "type: sequence", "type: list"
)
JOBS = {"sasrec": SASREC, "simplex": SIMPLEX, "din": DIN, "mmoe": MMOE}
MORE_JOBS = {**JOBS, "ple": PLE, "xdeepfm": XDEEPFM}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Users who go through items one after the other, from one of them on."""
    monkeypatch.chdir(tmp_path)
    return write_data(tmp_path)


def write_data(tmp_path):
    rng = np.random.default_rng(1)
    firsts = rng.integers(0, 40, 60)
    taken = [[int((first + step) % 40) for step in range(10)] for first in firsts]
    (tmp_path / "actions.txt").write_text("".join(f"{u} {i}\n" for u, items in enumerate(taken) for i in items))
    for name, part in (("train", slice(0, 8)), ("test", slice(8, 10))):
        lines = [" ".join(map(str, [user, *items[part]])) for user, items in enumerate(taken)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    rows = ["user,item,items,clicked,bought"]
    for user, items in enumerate(taken):
        for item in (items[6], int(rng.integers(0, 40))):
            clicked = int(item in items)
            history = "|".join(map(str, items[: 1 + user % 6])) if user % 7 else ""
            rows.append(f"u{user % 9},{item},{history},{clicked},{clicked if user % 3 else ''}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def train(folder, name, session=None, *overrides):
    return trained(folder, name, session, WorkerGroup(), *overrides)[0]


def trained(folder, name, session, group, *overrides):
    """What a run told, its trainer and its data."""
    path = folder / f"{name}-{group.rank}.yaml"
    path.write_text(MORE_JOBS[name] + TRAIN)
    job, notes = load_job(path, overrides), Notes()
    data = job.data.open(folder, 1)
    trainer = Trainer(job, data, session, group, [notes])
    trainer.run()
    return notes, trainer, job, data


@pytest.mark.parametrize("name", JOBS)
def test_a_job_learns_the_same_on_any_shards_with_prefetch_and_in_plain_torch(make_session, folder, name):
    session = make_session(2)
    notes = train(folder, name, session)
    first, last = notes.evaluations[0].figures["test"], notes.evaluations[-1].figures["test"]
    assert session.missed_reads == 0  # embedding_inputs named what the forward read
    metric, other, *_ = last
    assert last[metric] > max(first[metric], 0.3)
    assert 0 < last[other] <= 1
    again = train(folder, name, make_session(3), "train.prefetch=off", "train.epochs=2").evaluations[-1].figures
    assert again == notes.evaluations[1].figures
    local = train(folder, name, None, "strategy=local").evaluations[-1].figures["test"]
    assert local[metric] > max(first[metric], 0.3)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_trains_with_codecs_and_bounded_staleness(make_session, folder, name):
    words = ("compression={push: int8, pull: fp16s}", "train.staleness=0", "train.epochs=1")
    last = train(folder, name, make_session(2), *words).evaluations[-1].figures["test"]
    assert all(value > 0 for value in last.values())


@pytest.mark.parametrize("name", MORE_JOBS)
def test_a_job_in_hybrid_learns_and_its_export_scores_alike(make_session, folder, name):
    notes, trainer, job, data = trained(folder, name, make_session(2), WorkerGroup(), "strategy=hybrid")
    first, last = (notes.evaluations[place].figures["test"] for place in (0, -1))
    metric = next(iter(last))
    assert last[metric] > max(first[metric], 0.3)
    model, out = trainer.strategy.model.eval(), folder / "out"
    facts = export_weights(model, out, None, {})
    told = {"job": job_data(job), "schema": data.schema, "inputs": inputs_of(job, data)}
    write_facts(out, ExportFacts(**told, tables=facts))
    batch = _samples(model, data)
    with torch.no_grad():
        want = model(batch.ids, batch.dense).numpy()
    served = es.load_exported(out)
    np.testing.assert_allclose(served.score_ids(batch.ids, batch.dense), want, rtol=1e-6, atol=1e-6)
    assert served.features


@pytest.mark.integration
def test_two_workers_of_ddp_train_each_of_them():
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # nobody else is given the port
        reserved.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1]), "WORLD_SIZE": "2"}
        meeting |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers = [
            subprocess.Popen([sys.executable, __file__], env={**os.environ, **meeting, "RANK": str(rank)}, **pipes)
            for rank in range(2)
        ]
        try:
            figures = [json.loads(said(worker).splitlines()[-1]) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert figures[0] == figures[1]
    assert figures[0].keys() == MORE_JOBS.keys()
    assert all(best > 0.3 for best in figures[0].values())


def main():
    """One of two workers, which trains every job."""
    torch.set_num_threads(1)
    found = {}
    with WorkerGroup.join(int(os.environ["RANK"]), 2, timedelta(seconds=60)) as group:
        for name in MORE_JOBS:
            _, trainer, _, _ = trained(Path.cwd(), name, None, group, "strategy=ddp", "workers=2")
            found[name] = trainer._best.value
        group.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads outlive their group


if __name__ == "__main__":
    main()
