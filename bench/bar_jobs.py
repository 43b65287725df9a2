"""A job with code of a user's own, examples/own, through the whole command line, as a user runs it.

The example is copied into a fresh folder. Each check runs `embershard` commands there, in processes of their own:

equal     one worker, SGD: the figures of strategies local and ps against a plain torch loop of the same model, loss
          and data in this script; at most 1e-6 (local) and 1e-5 (ps) apart
modes     two workers with strategies ps, hybrid and ddp, and local with one: all figures there, AUC above 0.5
whole     a model that reads its table as a whole: ps and local at most 1e-5 apart; ddp with two workers
resume    a run is killed (-9) after a checkpoint, and one ends by Ctrl-C; `--resume latest` ends with all samples
shards    `--ps`: train on running shards, evaluate and export them, import the export into others: the same figures
export    of a checkpoint: model.safetensors in plain torch, and dense.onnx, give the same logits; --int8; figures of it
compare   two arms, two seeds: a report without failures
settings  doctor --job; --profile; bf16, the average of weights, activation checkpoints, a loader process, prefetch
compile   train.compile
outside   metrics of scikit-learn and torchmetrics by name, and models of deepctr-torch and torch-rechub behind a few
          lines of adapter, each where it is installed

Prints a line per check and one JSON line; exits 1 with what failed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embershard.deploy.supervisor import LocalShards
from embershard.proto.user_modules import find
from embershard.worker.job.load import load_job
from embershard.worker.trained.quantise import load_int8
from timing import finish
from train_job import EXAMPLES

SMALL = ("data.samples=6000", "data.eval_samples=1000", "train.epochs=2", "train.threads=1")
SGD = ("embedding.optimizer={name: sgd, lr: 0.5}", "dense.optimizer={name: sgd, lr: 0.1}", "train.linear=torch")
WHOLE = ("model={class: 'my_models:NextItem'}", "loss=null")
TIMEOUT = 600.0  # of a command; the slowest one takes half a minute on a machine of its own

ADAPTERS = """\
from torch import nn


class DeepCTR(nn.Module):
    def __init__(self, num_ids, num_dense, dim):
        super().__init__()
        from deepctr_torch.inputs import DenseFeat, SparseFeat
        from deepctr_torch.models import DeepFM

        fields = [SparseFeat(f"f{i}", num_ids, embedding_dim=dim) for i in range(5)]
        columns = [*fields, DenseFeat("dense", num_dense)]
        self.model = DeepFM(columns, columns, dnn_hidden_units=(16,), task="binary", device="cpu")
        self.model.out = nn.Identity()  # a logit, without its sigmoid

    def forward(self, ids, dense):
        from torch import cat

        return self.model(cat([ids.float(), dense], 1))


class Rechub(nn.Module):
    def __init__(self, num_ids, dim):
        super().__init__()
        from torch_rechub.basic.features import SparseFeature
        from torch_rechub.models.ranking import WideDeep

        fields = [SparseFeature(f"f{i}", vocab_size=num_ids, embed_dim=dim) for i in range(5)]
        self.model = WideDeep(fields, fields, {"dims": [16], "dropout": 0.0})

    def forward(self, ids, dense):
        from torch import logit

        return logit(self.model({f"f{i}": ids[:, i] for i in range(5)}), eps=1e-6)
"""


class Failed(Exception):
    """A check that does not hold."""


class Project:
    """A copy of the example, and the commands that are run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(EXAMPLES / "own", folder, dirs_exist_ok=True)
        (folder / "adapters.py").write_text(ADAPTERS)
        sys.path.append(str(folder))  # for this process; commands find modules beside the job

    def start(self, *words: str, sets: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "embershard.cli", *words, *(w for s in sets for w in ("--set", s))]
        log = (self.folder / "commands.txt").open("a+")
        # a group of its own: Ctrl-C reaches all processes of a terminal's command
        return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, text=True, start_new_session=True)

    def run(self, *words: str, sets: tuple[str, ...] = ()) -> str:
        """What a command prints. Failed where it does not end well."""
        command = [sys.executable, "-m", "embershard.cli", *words, *(w for s in sets for w in ("--set", s))]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr)[-800:]
            raise Failed(f"{' '.join(words)} {' '.join(sets)}: exit {done.returncode}: {said}")
        return done.stdout

    def train(self, name: str, *sets: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
        """The result of a run."""
        self.run("train", "job.yaml", "--output", name, *words, sets=(*SMALL, *sets))
        return self.result(name)

    def result(self, name: str) -> dict[str, Any]:
        log = self.folder / name / "log.jsonl"
        last: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        demand(last["record"] == "result", f"{name} has no result")
        return last

    def module(self, name: str) -> Any:
        """A class or function of the example, in this process."""
        return find(name)


def demand(holds: object, claim: str) -> None:
    if not holds:
        raise Failed(claim)


def near(found: dict[str, float], wanted: dict[str, float], tolerance: float, what: str) -> float:
    """The largest difference. Failed where it is above the tolerance."""
    worst = max(abs(found[name] - wanted[name]) for name in found.keys() & wanted.keys() - {"samples"})
    demand(worst <= tolerance, f"{what}: {worst:.2e} apart, more than {tolerance}: {found} and {wanted}")
    return worst


def plain(project: Project, *sets: str) -> dict[str, float]:
    """Figures on `valid` of a loop that anyone would write, without embershard."""
    job = load_job(project.folder / "job.yaml", [*SMALL, *sets])
    data = project.module("my_data:clicks")(samples=6000, eval_samples=1000, seed=job.train.seed)
    data.set_defaults("my_data:clicks", job.train.seed)
    torch.manual_seed(job.train.seed)
    model = project.module("my_models:Clicks")(num_ids=840, num_dense=2, dim=8, num_users=500, hidden=32)
    loss_of = project.module("my_losses:Focal")(gamma=1.0)
    tables = [m.weight for m in (model.users, model.items, model.tags)]
    dense = [p for p in model.parameters() if not any(p is table for table in tables)]
    optimizer = torch.optim.SGD([{"params": tables, "lr": 0.5}, {"params": dense, "lr": 0.1}])
    for epoch in range(2):
        for batch in data.train(epoch, 0, 1, job.train.batch_size):
            optimizer.zero_grad()
            loss_of(model(batch.ids, batch.dense), batch.labels).backward()
            optimizer.step()
    (batch,) = data.evaluate("valid", 0, 1, 1000)
    with torch.no_grad():
        logits, labels = model.eval()(batch.ids, batch.dense), batch.labels
    own = {name: project.module(f"my_metrics:{name}")(labels.numpy(), logits.numpy()) for name in ("brier", "accuracy")}
    logloss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    return {"logloss": float(logloss), **{name: float(value) for name, value in own.items()}}


def equal(project: Project) -> dict[str, float]:
    last = ("evaluate.every=2", "train.prefetch=0", "workers=1", "checkpoint={best: false}")
    wanted, worst = plain(project, *SGD), {}
    for strategy, tolerance in (("local", 1e-6), ("ps", 1e-5)):
        result = project.train(f"equal-{strategy}", *SGD, *last, f"strategy={strategy}")
        worst[strategy] = near(result["figures"]["valid"], wanted, tolerance, f"strategy {strategy} and plain torch")
    return worst


def modes(project: Project) -> dict[str, float]:
    found = {}
    for strategy, workers in (("ps", 2), ("hybrid", 2), ("ddp", 2), ("local", 1)):
        history = project.folder / "history.csv"
        history.unlink(missing_ok=True)
        figures = project.train(f"modes-{strategy}", f"strategy={strategy}", f"workers={workers}")["figures"]["test"]
        wanted = {"auc", "logloss", "accuracy", "brier", "samples"}
        demand(set(figures) == wanted, f"{strategy} has the figures {sorted(figures)}")
        demand(len(list(csv.reader(history.open()))) == 2, f"{strategy}: the callback was told of other evaluations")
        demand(figures["auc"] > 0.5, f"{strategy}: AUC {figures['auc']:.3f}")
        found[strategy] = round(figures["auc"], 4)
    return found


def whole(project: Project) -> dict[str, float]:
    last = (*WHOLE, *SGD, "evaluate.every=2", "metrics=[auc, logloss]", "embedding.optimizer={name: sgd, lr: 0.05}")
    figures = {
        strategy: project.train(f"whole-{strategy}", *last, f"strategy={strategy}", f"workers={workers}")["figures"]
        for strategy, workers in (("ps", 1), ("local", 1), ("ddp", 2))
    }
    wanted = {name: figures["local"]["valid"][name] for name in ("auc", "logloss")}
    return {"ps": near(figures["ps"]["valid"], wanted, 1e-5, "a table read as a whole, ps and local")}


def resume(project: Project) -> dict[str, float]:
    for how in (signal.SIGKILL, signal.SIGINT):
        folder = project.folder / f"checkpoints-{how.name}"
        sets = (*SMALL, "train.epochs=6", f"checkpoint.folder={folder.name}", "checkpoint.every=1")
        name = f"resume-{how.name}"
        running = project.start("train", "job.yaml", "--output", name, sets=sets)
        deadline = time.monotonic() + TIMEOUT
        while not list(folder.glob("step-*/checkpoint.json")):
            demand(running.poll() is None, f"a run with checkpoints ended by itself: {running.returncode}")
            demand(time.monotonic() < deadline, "no checkpoint")
            time.sleep(0.05)
        if how is signal.SIGKILL:
            running.kill()  # its shards and workers notice
        else:
            os.killpg(running.pid, how)
        running.wait(TIMEOUT)
        project.run("train", "job.yaml", "--output", name, "--resume", "latest", sets=sets)
        result = project.result(name)
        demand(result["samples"] == 6 * 6000, f"after {how.name} {result['samples']} samples of 36000")
    return {}


def shards(project: Project) -> dict[str, float]:
    sets = (*SMALL, *WHOLE, "metrics=[auc, logloss]", "train.average=null")  # no buffers: all of it is on the shards
    with LocalShards(2) as first, LocalShards(2) as second:
        ps = ",".join(first.addresses)
        project.run("train", "job.yaml", "--ps", ps, "--output", "shards", sets=sets)
        figures = _evaluated(project, ps, sets)
        project.run("export", "job.yaml", "exported", "--ps", ps, sets=sets)
        other = ",".join(second.addresses)
        project.run("import", "job.yaml", "exported", "--ps", other, sets=sets)
        again = _evaluated(project, other, sets)
    return {"imported": near(again["test"], figures["test"], 1e-6, "evaluate after export and import")}


def _evaluated(project: Project, ps: str, sets: tuple[str, ...]) -> dict[str, dict[str, float]]:
    told = json.loads(project.run("evaluate", "job.yaml", "--ps", ps, sets=sets).splitlines()[-1])
    return {split: told[split] for split in ("valid", "test")}


def export(project: Project) -> dict[str, float]:
    import onnxruntime
    from safetensors.torch import load_file

    result = project.train("exporting", "evaluate.every=2")
    (source,) = (project.folder / "exporting" / "best").glob("step-*")
    out = project.folder / "files"
    project.run("export", "job.yaml", str(source), str(out), "--onnx", "--int8", sets=SMALL)
    state = load_file(out / "model.safetensors")
    model = project.module("my_models:Clicks")(num_ids=840, num_dense=2, dim=8, num_users=500, hidden=32)
    model.load_state_dict(state)
    seed = load_job(project.folder / "job.yaml").train.seed
    data = project.module("my_data:clicks")(samples=6000, eval_samples=1000, seed=seed)
    (batch,) = data.evaluate("valid", 0, 1, 1000)
    with torch.no_grad():
        logits = model.eval()(batch.ids, batch.dense)
    brier = float(project.module("my_metrics:brier")(batch.labels.numpy(), logits.numpy()))
    worst = near({"brier": brier}, result["figures"]["valid"], 1e-6, "model.safetensors and the run")
    ids, index = np.unique(batch.ids.numpy(), return_inverse=True)
    tables = {name: state[f"{name}.weight"].numpy() for name in ("users", "items", "tags")}
    rows = {f"{name}.rows": table[ids.clip(max=len(table) - 1)] for name, table in tables.items()}
    session = onnxruntime.InferenceSession(str(out / "dense.onnx"))
    (found,) = session.run(["logits"], {"index": index.reshape(batch.ids.shape), "dense": batch.dense.numpy(), **rows})
    demand(np.allclose(found, logits.numpy(), rtol=1e-4, atol=1e-5), "dense.onnx gives other logits than the model")
    load_int8(model, load_file(out / "dense.int8.safetensors"))
    with torch.no_grad():
        rounded = float((model(batch.ids, batch.dense) - logits).abs().max())
    demand(0 < rounded < 0.5, f"int8 changes logits by {rounded}")
    return {"brier": worst, "onnx": float(np.abs(found - logits.numpy()).max()), "int8": rounded}


def compare(project: Project) -> dict[str, float]:
    words = ("compare", "job.yaml", "--arms", "strategy=ps,hybrid", "--seeds", "2", "--output", "compared")
    project.run(*words, sets=(*SMALL, "train.epochs=1"))
    report = project.folder / "compared"
    runs = [json.loads(line) for line in (report / "runs.jsonl").read_text().splitlines()]
    demand((report / "report.html").exists() and len(runs) >= 4, f"{len(runs)} runs in the comparison")
    return {"runs": len(runs)}


def settings(project: Project) -> dict[str, float]:
    project.run("doctor", "--job", "job.yaml", sets=())
    variants = ("train.amp=bf16", "train.checkpoint_activations=true", "train.average={decay: 0.9}", "train.prefetch=2")
    together = project.train(
        "together", *variants, "data.loader_processes=1", "evaluate.metric=brier", words=("--profile",)
    )
    demand((project.folder / "together" / "profile.json").exists(), "--profile left no profile.json")
    demand(together["metric"] == "brier" and together["figures"]["test"]["auc"] > 0.5, "bf16 and more: no figures")
    return {"auc": round(together["figures"]["test"]["auc"], 4)}


def compiled(project: Project) -> dict[str, float]:
    one = ("workers=1", "train.epochs=1", "train.prefetch=0", *SGD)
    eager, faster = (project.train(f"compile-{on}", *one, f"train.compile={on}") for on in ("false", "true"))
    wanted = {"brier": eager["figures"]["valid"]["brier"]}
    return {"brier": near(faster["figures"]["valid"], wanted, 1e-4, "train.compile and eager")}


def outside(project: Project) -> dict[str, float]:
    def there(package: str) -> bool:
        return importlib.util.find_spec(package) is not None

    found = {}
    metrics = ["auc"]
    if there("torchmetrics"):
        metrics.append("{class: 'torchmetrics:AUROC', args: {task: binary}}")
    if there("sklearn"):
        metrics.append("'sklearn.metrics:roc_auc_score'")
    models = [name for name, package in (("DeepCTR", "deepctr_torch"), ("Rechub", "torch_rechub")) if there(package)]
    for name in models or ["Clicks"]:
        model = [f"model={{class: 'adapters:{name}'}}"] if models else []
        figures = project.train(f"outside-{name}", *model, f"metrics=[{', '.join(metrics)}]")["figures"]["test"]
        for metric in figures.keys() & {"AUROC", "roc_auc_score"}:
            near({"auc": figures[metric]}, {"auc": figures["auc"]}, 1e-6, f"{metric} and auc")
        demand(figures["auc"] > 0.5, f"{name}: AUC {figures['auc']:.3f}")
        found[name] = round(figures["auc"], 4)
    return found


CHECKS: dict[str, Callable[[Project], dict[str, float]]] = {
    "equal": equal,
    "modes": modes,
    "whole": whole,
    "resume": resume,
    "shards": shards,
    "export": export,
    "compare": compare,
    "settings": settings,
    "compile": compiled,
    "outside": outside,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="these checks alone")
    names, failures, figures = parser.parse_args().only, [], {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bar-jobs-") as folder:
        project = Project(Path(folder))
        for name in names:
            start = time.monotonic()
            try:
                figures[name] = CHECKS[name](project)
            except (Failed, subprocess.TimeoutExpired) as error:
                failures.append(f"{name}: {error}")
            said = ", ".join(f"{key} {value:.3g}" for key, value in figures.get(name, {}).items())
            said = said or ("ok" if name in figures else "failed")
            print(f"{name:9} {time.monotonic() - start:6.1f} s  {said}", flush=True)
    finish({"bar": "jobs", "checks": figures}, failures)


if __name__ == "__main__":
    main()
