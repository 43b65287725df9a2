"""Rankers trained on Criteo's rows, served over HTTP by examples/serve/app.py: the trainer's scores, and how fast.

Two jobs: `criteo` is examples/criteo.yaml (DCN-V2, hashed ids); `features` is the same model with a features section on
the same rows as Parquet: hashed ids, vocabularies by min_count, a list, and quantiles of numbers of which some are
missing. Each is trained with two shard processes and exported. Compares the export's scores with the logits of the
trainer's last evaluation, and its rows with those of the shards, ids included that were never trained. Then the app
serves 100 candidates a request, 50 requests a second over 4 connections. The client is a process of its own with a
fixed schedule: a request's time counts from when it was due, so that waiting behind others counts.
Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from ruamel.yaml import YAML

import embershard as es
from embershard.cli.source import open_source
from embershard.worker.data.readers.criteo import CATEGORICAL, LAYOUT, NUMERIC
from embershard.worker.data.text import read_tables
from embershard.worker.job.load import load_job
from embershard.worker.trained.reading import is_hashed, remote_tables, trained
from timing import finish, load, print_table

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DATA = EXAMPLES / "../../shared/data"
SCORES_WITHIN, P99_MS = 1e-6, 25.0
CANDIDATES, RATE, CONNECTIONS, SECONDS, WARM_UP = 100, 50, 4, 20.0, 3.0
BODIES = 64
FEATURES: dict[str, object] = {
    **{name: {"type": "number", "transform": ["log", "quantile"], "missing": 0.5} for name in NUMERIC},
    **{name: {} for name in CATEGORICAL[:13]},
    **{name: {"min_count": 2} for name in CATEGORICAL[13:]},
    "some": {"type": "list"},
}
KEEP = """\
import numpy as np
def keep(labels, logits):
    np.save("logits.npy", logits)
    return float(np.mean(logits))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with criteo/train_10k.tsv")
    parser.add_argument("--jobs", nargs="+", default=["criteo", "features"], choices=["criteo", "features"])
    parser.add_argument("--dense", nargs="+", default=["torch", "int8", "onnx"], help="the first is judged")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(json.loads(given.client))
        return
    failures: list[str] = []
    results = {name: measured(name, given.data.resolve(), given.dense, failures) for name in given.jobs}
    finish({"bench": "serve", "load": load(), **results}, failures)


def measured(name: str, data: Path, dense: list[str], failures: list[str]) -> dict[str, object]:
    """The figures of one job; what is below the bar is added to `failures`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table = pa.concat_tables(read_tables(data / "criteo/train_10k.tsv", LAYOUT))
        job = YAML(typ="safe").load(EXAMPLES / "criteo.yaml")
        if name == "features":
            columns = table.select(CATEGORICAL[:5]).to_pydict().values()
            lists = [[value for value in row if value] for row in zip(*columns, strict=True)]
            table = table.append_column("some", pa.array(lists))
            pq.write_table(table, folder / "rows.parquet")
            job["data"] = {"reader": "tabular", "train": "rows.parquet", "valid": "rows.parquet", "label": "label"}
            job["features"], data = FEATURES, folder
        (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
        make_export(folder, data, dense)
        result = same_scores(folder, table) | same_rows(folder, data)
        bodies = [json.dumps({"rows": table.slice(i * CANDIDATES, CANDIDATES).to_pydict()}) for i in range(BODIES)]
        (folder / "bodies.json").write_text(json.dumps(bodies))
        timings = {part: timed(folder, part) for part in dense}
    header = [f"dense part ({name})", "p50 ms", "p99 ms", "worst ms", "requests/s at most"]
    print_table(
        header, [[d, t["p50_ms"], t["p99_ms"], t["worst_ms"], t["most_per_second"]] for d, t in timings.items()]
    )
    p99 = timings[dense[0]]["p99_ms"]
    for what in ("logits", "probabilities"):
        if result[f"{what}_differ_by"] > SCORES_WITHIN:
            failures.append(f"{name}: {what} differ by {result[f'{what}_differ_by']:.1e} from the trainer's")
    if result["rows_that_differ"]:
        failures.append(f"{name}: {result['rows_that_differ']} rows are not the shards'")
    if p99 > P99_MS:
        failures.append(f"{name}: p99 {p99:.1f} ms is above {P99_MS:.0f} ms")
    return {**result, **timings}


def make_export(folder: Path, data: Path, dense: list[str]) -> None:
    """Train the job with shards, keeping the logits of its evaluation, and export its checkpoint."""
    (folder / "keep_logits.py").write_text(KEEP)
    # constant: on samples of a job with code of its own, cosine is not told how many steps there are
    sets = [
        "workers=1",
        "train.lr_schedule.name=constant",
        'metrics=["keep_logits:keep"]',
        "checkpoint.folder=checkpoints",
    ]
    common = ["--data", str(data), *(word for one in sets for word in ("--set", one))]
    parts = [f"--{part}" for part in dense if part != "torch"]
    export = ["export", "job.yaml", "checkpoints", "out", "--latest", *parts]
    for words in (["train", "job.yaml", "--output", "run"], export):
        print(f"== embershard {words[0]}", flush=True)
        subprocess.run([sys.executable, "-m", "embershard.cli", *words, *common], cwd=folder, check=True)
        if words[0] == "train":  # export --int8 evaluates again
            (folder / "logits.npy").rename(folder / "trainer.npy")


def same_scores(folder: Path, table: pa.Table) -> dict[str, float]:
    """How far the export's logits of the file's rows are from the trainer's, at most, and the probabilities of them."""
    served = es.load_exported(folder / "out", verify=True)
    logits = np.memmap(folder / "trainer.npy", np.float32, "r")[-table.num_rows :]  # behind the header
    found = np.concatenate(
        [served.score(table.slice(i, CANDIDATES)) for i in range(0, table.num_rows, CANDIDATES)]
    ).astype(np.float64)
    logit = float(np.abs(found - logits).max())
    probability = float(np.abs(1 / (1 + np.exp(-found)) - 1 / (1 + np.exp(-logits.astype(np.float64)))).max())
    return {"rows": table.num_rows, "logits_differ_by": logit, "probabilities_differ_by": probability}


def same_rows(folder: Path, data: Path) -> dict[str, int]:
    """Rows of the export that are not those of the shards, of trained ids and of others."""
    job = load_job(folder / "job.yaml", ["workers=1", "checkpoint.folder=checkpoints"], data)
    dataset = job.data.open(folder, job.train.seed)
    served = es.load_exported(folder / "out")
    with contextlib.ExitStack() as stack:
        found = open_source(str(folder / "checkpoints"), None, stack, latest=True)
        model = trained(job, dataset, found.session, None).model
        differ = unseen = 0
        for name, module in remote_tables(model).items():
            if is_hashed(module):
                known = served.tables[name].table.ids
                others = np.random.default_rng(0).integers(0, 1 << 62, 10_000)
                ids = np.concatenate([known[:: max(1, len(known) // 10_000)], others])
                unseen += len(others)
            else:
                ids = np.arange(module.num_embeddings)
            rows = module.table.pull(torch.from_numpy(ids)).numpy()
            differ += int((rows != served.embedding(name, ids)).any(1).sum())
    return {"rows_that_differ": differ, "ids_never_seen": unseen}


def timed(folder: Path, dense: str) -> dict[str, float]:
    """Latencies at RATE, then the most requests a second, of the app with this dense part."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "serve/app.py", folder / "out", "--port", str(port), "--dense", dense]
    start = time.monotonic()
    server = subprocess.Popen(command)
    try:
        while not healthy(port):
            if server.poll() is not None or time.monotonic() - start > 300:
                raise SystemExit(f"the app did not start with {dense}")
            time.sleep(0.1)
        ready = time.monotonic() - start
        asked = json.dumps({"port": port, "bodies": str(folder / "bodies.json")})
        done = subprocess.run([sys.executable, __file__, "--client", asked], check=True, capture_output=True, text=True)
    finally:
        server.terminate()
        server.wait()
    return {**json.loads(done.stdout), "ready_seconds": round(ready, 1)}


def healthy(port: int) -> bool:
    """Whether the app answers."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def client(given: dict[str, object]) -> None:
    """Ask by a fixed schedule, then as fast as answers come; print the figures as JSON."""
    bodies = [body.encode() for body in json.loads(Path(str(given["bodies"])).read_text())]
    port = int(str(given["port"]))
    for _ in scheduled(port, bodies, WARM_UP):
        pass
    latencies = np.sort([1000 * seconds for seconds in scheduled(port, bodies, SECONDS)])
    p50, p99 = np.percentile(latencies, [50, 99])
    figures = {"requests": len(latencies), "p50_ms": p50, "p99_ms": p99, "worst_ms": latencies[-1]}
    figures["most_per_second"] = len(list(scheduled(port, bodies, 5.0, rate=None))) / 5.0
    print(json.dumps({name: round(float(value), 2) for name, value in figures.items()}))


def scheduled(port: int, bodies: list[bytes], seconds: float, rate: float | None = RATE) -> Iterator[float]:
    """Seconds from when each request was due to its answer; without a rate it is due when its connection is free."""
    start = time.perf_counter() + 0.1
    found: list[list[float]] = [[] for _ in range(CONNECTIONS)]

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(number, 1 << 30, CONNECTIONS):
            due = time.perf_counter() if rate is None else start + i / rate
            if due - start >= seconds:
                return
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.request("POST", "/score", bodies[i % len(bodies)], {"content-type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            found[number].append(time.perf_counter() - due)
            if response.status != 200 or len(json.loads(answer)["scores"]) != CANDIDATES:
                raise SystemExit(answer.decode())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for latencies in found:
        yield from latencies


if __name__ == "__main__":
    main()
