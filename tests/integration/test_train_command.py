"""`embershard train`, `worker` and `evaluate` as people run them: real shards, real workers, and every way to end."""

import json
import signal
import subprocess
import sys
from contextlib import closing

import psutil
import pytest
from half_codec import HALF_CODEC

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.worker.client.client import Client
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, all_end, descendants, run_command, said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16], batch_norm: true}
data: {reader: clicks, eval_samples: 3000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
evaluate: {every: 5000}
workers: 2
"""
FOREVER = JOB.replace("10_000", "10_000_000_000").replace("evaluate: {every: 5000}\n", "")
PLAIN = FOREVER.replace(", batch_norm: true", "")  # batch norm's statistics are not on the shards
ALONE = ("--workers", "1", "--shards", "1")  # where it makes no difference: starting costs seconds
LOADER = (*ALONE, "--set", "data.loader_processes=1")


def family_in_training(process, size=4):
    """Its shards, workers and loaders, once they train."""
    assert any("samples/s" in line for line in process.stdout)
    found = descendants(process.pid)
    assert len(found) == size
    return found


def records(folder):
    return [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]


def test_a_job_trains_through_two_shards_and_two_workers(start, tmp_path):
    text = said(start(JOB))
    for part in ("dlrm on clicks: 2 workers on cpu, 2 shards", "valid AUC", "best reachable", "waiting"):
        assert part in text
    log = records(tmp_path)
    assert [r["record"] for r in log if r["record"] != "train"] == ["config", "eval", "eval", "result"]
    result = log[-1]
    assert (result["samples"], result["figures"]["valid"]["samples"]) == (10_240, 3000)
    assert result["table_rows"]["embedding"] > 1000
    assert f"best weights: out/best/step-{result['best_step']:09d}" in text  # which batch norm's are a part of
    found = run_command("evaluate", "job.yaml", "out/best", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    for split, its in result["figures"].items():
        assert json.loads(found.stdout)[split] == pytest.approx(its, rel=1e-6)


TABULAR = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data:
  reader: tabular
  train: clicks.csv
  split: {by: user, column: user, valid: 0.2}
  weight: weight
  loader_processes: 1
features:
  user: {min_count: 2}
  item: {dim: 2}
  tags: {type: list, table: item, separator: "|", max_length: 3}
  age: {type: number, transform: [log, standardise]}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 64, epochs: 2}
workers: 2
shards: 1
"""


def test_what_is_learnt_from_the_data_goes_from_training_to_evaluation_and_export(start, tmp_path):
    rows = [
        f"u{i % 40},i{i % 30},{'|'.join(f'i{j}' for j in range(i % 4))},{i % 70},{i % 2},{i % 3}" for i in range(600)
    ]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,tags,age,label,weight", *rows]))
    said(start(TABULAR))
    fitted = json.loads((tmp_path / "out" / "preprocessing.json").read_text())["fitted"]
    result = records(tmp_path)[-1]
    assert result["samples"] == 2 * fitted["samples"]["train"]
    known = fitted["vocabularies"]["user"]
    user = next(f"u{i}" for i in range(40) if es.hash_ids("user", [f"u{i}"])[0] in known)  # who is in train
    rows += [f"{user},i1,,9999,1,1"] * 9
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,tags,age,label,weight", *rows]))
    found = run_command("evaluate", "job.yaml", "out/best", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["valid"] == pytest.approx(result["figures"]["valid"], rel=1e-6)
    assert run_command("export", "job.yaml", "out/best", "export", cwd=tmp_path).returncode == 0
    told = json.loads((tmp_path / "export" / "export.json").read_text())
    assert told["inputs"]["fitted"] == fitted
    assert told["tables"]["embedding.user"]["rows"] == len(known) + 1


@pytest.mark.parametrize(("number", "code", "words"), [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, LOADER)])
def test_an_interrupt_ends_everything(start, number, code, words):
    process = start(FOREVER, *words)
    everyone = family_in_training(process, 3 if words else 4)
    process.send_signal(number)
    assert "interrupted: the workers and shards have ended. No checkpoint was written" in said(process, code)
    assert all_end(everyone)


def test_nothing_outlives_a_killed_command(start):
    process = start(FOREVER, *LOADER)
    everyone = family_in_training(process, 3)
    process.kill()
    assert all_end(everyone)


@pytest.mark.parametrize(
    ("role", "words", "says"),
    [
        ("worker", ("--set", "dense.mode=ddp"), "error: worker {} ended (SIGKILL)"),  # which all-reduces
        ("ps", ALONE, "shard 0"),
    ],
)
def test_a_process_that_is_killed_ends_the_job_and_is_named(start, role, words, says):
    process = start(FOREVER, *words)
    everyone = family_in_training(process, 2 if words == ALONE else 4)
    victim = [child for child in psutil.Process(process.pid).children() if role in child.cmdline()][-1]
    number = victim.environ().get("RANK")
    victim.kill()
    assert says.format(number) in said(process, 1)
    assert all_end(everyone)


def test_half_a_checkpoint_is_gone_when_the_job_has_ended(start, tmp_path):
    halves = [tmp_path / folder / "step-000000007" for folder in ("checkpoints", "out/best")]
    for half in halves:
        (half / "shards").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-of-mine").mkdir()
    process = start(FOREVER, *ALONE, "--set", f"checkpoint.folder={tmp_path / 'checkpoints'}")
    everyone = family_in_training(process, 2)
    process.send_signal(signal.SIGINT)
    said(process, 130)
    assert all_end(everyone)
    assert not any(half.exists() for half in halves)
    assert (tmp_path / "checkpoints" / "step-of-mine").exists()


def test_a_profile_says_where_the_time_of_a_step_goes(start, tmp_path):
    text = said(start(JOB, *LOADER, "--profile", "--set", "train.samples=20000", "--set", "evaluate.every=20000"))
    assert "39 steps" in text  # 79 of the one worker, of which 40 warmed up or were traced
    split = json.loads((tmp_path / "out" / "profile.json").read_text())
    everything = {"data", "route", "encode", "send", "wait", "receive", "gather", "forward", "backward", "push"}
    assert everything <= split["parts"].keys() | split["overlapped"].keys()
    assert {"wait", "gather", "forward", "backward", "push", "other"} <= split["parts"].keys()
    assert sum(part["share"] for part in split["parts"].values()) == pytest.approx(1)
    assert "traceEvents" in json.loads((tmp_path / "out" / "trace.json").read_text())


def test_a_worker_with_an_error_is_heard(start):
    text = said(start(JOB, *ALONE, "--set", "embedding.optimizer={name: sgd, lr: 1e30}"), 1)
    assert "the loss of step" in text
    assert "lower the learning rate" in text


def test_running_shards_are_used_and_left_running(start, tmp_path):
    with LocalShards(2) as shards:
        ps = ("--ps", ",".join(shards.addresses))
        assert "1 worker on cpu, 2 shards" in said(start(JOB, *ps, "--workers", "1"))
        assert shards.failure is None
        # torchrun gives each worker its place; --no-python runs the command as it is
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        worker = ["--no-python", *EMBERSHARD, "worker", str(tmp_path / "job.yaml"), "--set", "prefix=second/", *ps]
        done = subprocess.run([*torchrun, *worker], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        assert "2 workers on cpu, 2 shards" in done.stdout
        assert "table second/embedding" in done.stdout


def test_a_codec_of_a_module_named_once_reaches_shards_and_workers(start, tmp_path):
    (tmp_path / "mine.py").write_text(HALF_CODEC)
    said(start(JOB, *ALONE, "--import", "mine", "--set", "compression={push: 'mine:half', pull: 'mine:half'}"))
    result = records(tmp_path)[-1]
    halved = {one["direction"] for one in result["bytes"] if one["part"] == "rows" and one["wire"] < 0.6 * one["raw"]}
    assert halved == {"push", "pull"}


def test_evaluate_scores_what_a_run_has_left_on_the_shards_and_creates_nothing(start, tmp_path):
    with LocalShards(2) as shards, closing(Client.connect(shards.addresses)) as client:
        (tmp_path / "job.yaml").write_text(PLAIN)
        words = ("evaluate", str(tmp_path / "job.yaml"), "--ps", ",".join(shards.addresses))
        early = run_command(*words)
        assert early.returncode == 1
        assert "no table 'embedding" in early.stderr
        assert not any(status.tables for status in client.status())
        first_is_best = (
            "train.early_stop={patience: 9, min_delta: 9}",
            "checkpoint.folder=kept",
            "evaluate.every=2_500",
        )
        sets = [word for one in ("train.samples=5_000", *first_is_best) for word in ("--set", one)]
        assert "best weights: kept/step-000000005, restored at the end" in said(start(PLAIN, *words[2:], *sets))
        found = run_command(*words)
        assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout)
    for split, its in records(tmp_path)[-1]["figures"].items():
        assert figures[split] == pytest.approx(its, rel=1e-6)


def test_workers_train_on_while_evaluate_scores(start, tmp_path):
    with LocalShards(1) as shards, closing(Client.connect(shards.addresses)) as client:
        ps = ("--ps", shards.addresses[0])
        trainer = start(PLAIN, *ps, "--set", "train.staleness=0")
        assert eventually(lambda: client.status()[0].clock >= 3), "nobody trains"
        line = [*EMBERSHARD, "evaluate", str(tmp_path / "job.yaml"), *ps, "--every", "0.1"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as evaluator:
            first = last = json.loads(evaluator.stdout.readline())
            while last["clock"] == first["clock"]:  # nothing says how far they come in between
                last = json.loads(evaluator.stdout.readline())
            assert last["clock"] > first["clock"] > 0
            assert first["valid"]["samples"] == 3000
            evaluator.send_signal(signal.SIGINT)
            assert evaluator.wait(PATIENCE) == 130
        assert trainer.poll() is None
        trainer.terminate()
        trainer.communicate(timeout=PATIENCE)
