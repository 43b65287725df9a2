"""Metrics: Prometheus scrapes a live job, every query of the dashboard has an answer, and training does not notice.

Four parts. `queries`: a job of two shards and a worker is scraped by Prometheus each second; every query of a panel
returns data, every query of an alert is evaluated, and promtool finds nothing wrong in the rules, their tests and what
is exported. `scrape`: CPU time of a scrape of a live shard with hundreds of tables, for 2,000 lines. `rate`: one job,
in windows of a second at whose begin each of its three processes is scraped, or none, in turn; samples per second of
one against the other, the median over the pairs of four windows each with its 95 % interval (order statistics), and the
CPU that a scrape takes of each process: that of the threads that answered it. Who scrapes is this process, on the same
cores; a user's Prometheus runs elsewhere, so that its CPU is printed apart. `before`: W-DLRM of bar-log on this tree
and on a commit without the counters, in blocks in turn. Prints one JSON line; exits 1 where a bar is missed or a tool
is missing: prometheus and promtool are of Debian's package prometheus.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from chaos import free_ports
from embershard.deploy.authority import Authority
from embershard.deploy.grafana.alerts import ALERTS
from embershard.deploy.grafana.build import RULES, TESTS
from embershard.deploy.grafana.panels import ROWS
from embershard.proto.security.tokens import write_private
from timing import cpu_seconds, finish, interval, load, machine, median

ROOT = Path(__file__).resolve().parents[1]
SCRAPE_MS, LINES, LEAST_RATE = 10.0, 2000, 0.98
WINDOWS = 4  # of a second, of each side of a pair
TIMEOUT = 120.0
JOB = ROOT / "examples/demo.yaml"


@contextmanager
def training(folder: Path, *sets: str, tls: Sequence[str] = ()) -> Iterator[list[str]]:
    """The addresses of the metrics of two shards and a worker that train, until the end of the block.

    tls: the words of the command line that name their certificates.
    """
    first = free_ports(3)
    words = [word for one in ("train.samples=1_000_000_000", *sets) for word in ("--set", one)]
    command = [sys.executable, "-m", "embershard.cli", "train", str(JOB), "--workers", "1", "--shards", "2"]
    command += [*words, *tls, "--output", str(folder), "--metrics", f":{first}"]
    with (folder.parent / f"{folder.name}.out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            addresses = [f"127.0.0.1:{first + i}" for i in range(3)]
            wait_for(lambda: all(get(f"http://{one}/readyz") for one in addresses), "training", process)
            yield addresses
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_for(condition: Any, what: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end or process.poll() is not None:
            raise SystemExit(f"no {what} after {TIMEOUT:.0f} s (exit code {process.poll()})")
        time.sleep(0.5)


def get(url: str) -> bytes:
    """The page; nothing where there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bytes(reply.read())
    except OSError:
        return b""


# Prometheus and its queries


@contextmanager
def prometheus(folder: Path, addresses: list[str]) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the shards and the worker each second."""
    jobs = {"embershard-shards": addresses[:2], "embershard-workers": addresses[2:]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": name, "static_configs": [{"targets": t}]} for name, t in jobs.items()],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    url = f"127.0.0.1:{free_ports(1)}"
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words, f"--web.listen-address={url}"], stdout=log, stderr=log)
        try:
            wait_for(lambda: get(f"http://{url}/-/ready"), "Prometheus", process)
            yield f"http://{url}"
        finally:
            process.terminate()
            process.wait(60)


def ask(url: str, query: str) -> list[Any]:
    """What a query of the dashboard returns."""
    text = query.replace("$run", ".*").replace("$instance", ".*").replace("$__rate_interval", "15s")
    body = get(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': text})}")
    found = json.loads(body or b"{}")
    return list(found["data"]["result"]) if found.get("status") == "success" else []


def promtool(*words: str, text: bytes = b"") -> str:
    """What promtool finds wrong; empty where all is well."""
    done = subprocess.run(["promtool", *words], input=text, capture_output=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).decode()


def queries(folder: Path) -> dict[str, Any]:
    """Every query against a Prometheus that scrapes a live job."""
    wrong = [promtool("check", "rules", str(RULES)), promtool("test", "rules", str(TESTS))]
    sets = "evaluate.every=100_000", "data.eval_samples=10_000"
    tls = certificates(folder / "keys")
    with training(folder / "queries", *sets, tls=tls) as addresses, prometheus(folder, addresses) as url:
        snapshot_and_bad_frame(folder / "queries", folder, tls)
        time.sleep(25)
        wrong += [promtool("check", "metrics", text=get(f"http://{one}/metrics")) for one in addresses]
        empty = {query for _, row in ROWS for panel in row for query, _ in panel.queries if not ask(url, query)}
        rules = json.loads(get(f"{url}/api/v1/rules"))["data"]["groups"]
        ill = {rule["name"]: rule.get("lastError", "") for group in rules for rule in group["rules"]
               if rule["health"] != "ok"}  # fmt: skip
        asked = sum(len(panel.queries) for _, row in ROWS for panel in row)
        lines = [get(f"http://{one}/metrics").count(b"\n") for one in addresses]
    found = [text for text in wrong if text]
    print(f"{asked} queries of panels, {len(empty)} without data; {len(ALERTS)} alerts, {len(ill)} ill; {lines} lines")
    for text in (*found, *empty, *ill.items()):
        print(f"  {text}")
    return {"queries": asked, "without_data": sorted(empty), "ill_alerts": ill, "promtool": found, "lines": lines}


def certificates(folder: Path) -> list[str]:
    """The words of the command line for certificates that shards on loopback and their clients show."""
    folder.mkdir()
    for name, data in Authority.create("bench").issue("bench", ["127.0.0.1", "localhost"], timedelta(days=30)).items():
        write_private(folder / name, data.decode())
    return ["--tls", str(folder)]


def snapshot_and_bad_frame(run: Path, folder: Path, tls: Sequence[str]) -> None:
    """Have happen what some panels show: a snapshot, and a connection that is dropped for what it sends."""
    from embershard.proto.wire import Feature, client_hello

    shards = shard_addresses(run)
    subprocess.run(
        [sys.executable, "-m", "embershard.cli", "snapshot", str(folder / "snapshots"), "--ps", ",".join(shards), *tls],
        check=True,
        stdout=subprocess.DEVNULL,
    )

    def send_for(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(OSError):
                host, port = shards[0].split(":")
                with socket.create_connection((host, int(port)), 5) as peer:
                    peer.sendall(client_hello(Feature(0)) + b"x" * 64)
                    while peer.recv(4096):
                        pass
            time.sleep(1)

    threading.Thread(target=send_for, args=(30.0,), daemon=True).start()


def shard_addresses(run: Path) -> list[str]:
    """Where the shards of a job that runs here serve, by the sockets of their processes."""
    import psutil

    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--shard" in words and any(str(run) in " ".join(parent.cmdline()) for parent in process.parents()):
            ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            own = int(words[words.index("--metrics") + 1].rsplit(":", 1)[1])
            found[int(words[words.index("--shard") + 1])] = f"127.0.0.1:{(ports - {own}).pop()}"
    return [found[index] for index in sorted(found)]


# What a scrape costs


def scrape() -> dict[str, Any]:
    """CPU of a scrape of a shard in this process, in milliseconds for 2,000 lines."""
    import numpy as np

    from embershard.proto.messages import Declare, GetStatus, Pull, TableIds
    from embershard.proto.monitoring.exporter import MetricsServer
    from embershard.proto.monitoring.metrics import SHARD_METRICS
    from embershard.proto.routing import Placement
    from embershard.proto.spec import SGD, TableSpec
    from embershard.ps.apply_thread import ApplyThread
    from embershard.ps.dispatch import Dispatch
    from embershard.ps.monitoring.export import MonitoredShard
    from embershard.ps.shard import Shard
    from embershard.ps.table.optimizers import OptimizerRegistry

    apply = ApplyThread()
    dispatch = Dispatch(Shard(0, Placement.even(1), OptimizerRegistry()), apply)
    requests: list[Any] = [Declare(TableSpec(name=f"t{i}", dim=4, optimizer=SGD(lr=0.1))) for i in range(300)]
    requests += [Pull(1, tuple(TableIds(f"t{i}", np.arange(4)) for i in range(300))), GetStatus()]
    for transport in ("stream", "grpc", "rpc"):
        counters = dispatch.counters.transports[transport]
        for request in requests:
            kind = type(request)
            dispatch.submit(
                kind, lambda r=request: r, lambda reply: reply, num_bytes=1, deadline=time.monotonic() + 60
            ).result()
            counters.answered(kind, 0.001, None)
    shown = MonitoredShard(dispatch.status, dispatch.counters, lambda: {})
    with closing(MetricsServer(":0", SHARD_METRICS, {"shard": "0"})) as server:
        server.monitored = shown
        lines, times = server.text().count(b"\n"), []
        for _ in range(30):
            began = time.thread_time()
            server.text()
            times.append(1000 * (time.thread_time() - began) * LINES / lines)
    apply.close()
    print(f"a scrape of {lines} lines: {median(times):.1f} ms of CPU for {LINES} lines, at most {SCRAPE_MS:.0f}")
    return {"lines": lines, "ms_of_2000_lines": round(median(times), 2)}


# Whether training notices


def rate(folder: Path, pairs: int) -> dict[str, Any]:
    """Samples per second while the job is scraped, against those while it is not; and CPU per sample."""
    ratios, cpu = list[float](), list[float]()
    with training(folder / "rate", "evaluate.every=1_000_000_000") as addresses:
        time.sleep(10)
        pids = pids_of(folder / "rate")
        scrapes, spent, asked = 0, 0.0, 0.0
        for _ in range(pairs):
            done, seconds, used = {True: 0, False: 0}, {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
            for number in range(2 * WINDOWS):
                scraped = number % 4 in (0, 3)  # there and back
                began, samples, before = time.perf_counter(), samples_of(addresses[2]), cpu_seconds(pids)
                ended, own = cpu_of_ended_threads(pids), time.process_time()
                for address in addresses if scraped else ():
                    assert get(f"http://{address}/metrics")
                asked += (time.process_time() - own) * scraped
                scrapes += scraped
                time.sleep(max(0.0, 1.0 - (time.perf_counter() - began)))
                spent += (cpu_of_ended_threads(pids) - ended) * scraped
                used[scraped] += cpu_seconds(pids) - before
                done[scraped] += samples_of(addresses[2]) - samples
                seconds[scraped] += time.perf_counter() - began
            ratios.append(done[True] / seconds[True] * seconds[False] / done[False])
            cpu.append(used[True] / done[True] * done[False] / used[False])
    found = judged("while scraped each second", ratios)
    low, high = interval(cpu)
    print(f"CPU of a sample, scraped against not: {median(cpu):.4f} ({low:.4f} to {high:.4f})")
    scrape_ms, client_ms = 1000 * spent / scrapes, 1000 * asked / scrapes
    print(f"CPU of a scrape of three processes: {scrape_ms:.1f} ms theirs, {client_ms:.1f} ms of who asks")
    return {
        **found,
        "cpu": {"ratio": round(median(cpu), 4), "low": round(low, 4), "high": round(high, 4)},
        "scrape_ms": round(scrape_ms, 2),
        "client_ms": round(client_ms, 2),
    }


def cpu_of_ended_threads(pids: list[int]) -> float:
    """CPU seconds of the threads of processes that have ended: while a job trains, those that answered scrapes."""
    living = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                living += int((thread / "schedstat").read_text().split()[0])  # nanoseconds
    return cpu_seconds(pids) - living / 1e9


def samples_of(worker: str) -> int:
    """Samples that a worker has trained on."""
    return int(json.loads(get(f"http://{worker}/status.json"))["samples"])


def pids_of(run: Path) -> list[int]:
    """The processes of a job that runs here: its shards and its worker."""
    import psutil

    (top,) = [one for one in psutil.Process().children() if str(run) in " ".join(one.cmdline())]
    return [one.pid for one in top.children(recursive=True)]


def before(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of W-DLRM per second, against a commit without the counters."""
    from bar_log import MEMORY, WORKLOADS, Side, tree_before

    commit = args.before
    if not commit:
        made = subprocess.check_output(["git", "rev-list", "HEAD", "--", "ps/monitoring"], cwd=ROOT, text=True)
        commit = f"{made.split()[-1]}^"
    workload, ratios = WORKLOADS["W-DLRM"], []
    sides = [Side(tree, workload, MEMORY, folder, args) for tree in (ROOT, tree_before(commit))]
    try:
        for number in range(args.pairs):
            blocks = {}
            for side in sides[:: -1 if number % 2 else 1]:
                blocks[side] = side.run(workload.steps)
            ratios.append(blocks[sides[1]].wall / blocks[sides[0]].wall)
    finally:
        for side in sides:
            side.close()
    return judged(f"against {commit}", ratios)


def judged(what: str, ratios: list[float]) -> dict[str, Any]:
    """Print a ratio of rates with its interval, and return it."""
    low, high = interval(ratios)
    print(f"rate {what}: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}), {len(ratios)} pairs", flush=True)
    return {"ratio": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}


def main() -> None:
    parts = ("queries", "scrape", "rate", "before")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=parts, help="may be given several times")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--before", default="", help="commit without counters; by default the one before the first")
    parser.set_defaults(rows=0, priority=False)
    args = parser.parse_args()
    missing = [tool for tool in ("prometheus", "promtool") if shutil.which(tool) is None]
    if missing:
        finish({"bar": "metrics"}, [f"{' and '.join(missing)} not found: apt-get install prometheus"])
    print(f"{machine()}; {load()}", flush=True)
    wanted, found, missed = args.only or parts, dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "queries" in wanted:
            found["queries"] = one = queries(folder)
            missed += [
                f"queries: {name}: {one[name]}" for name in ("without_data", "ill_alerts", "promtool") if one[name]
            ]
        if "scrape" in wanted:
            found["scrape"] = scrape()
            if found["scrape"]["ms_of_2000_lines"] > SCRAPE_MS:
                missed.append(f"a scrape of {LINES} lines takes {found['scrape']['ms_of_2000_lines']} ms of CPU")
        for name, measure in (("rate", lambda: rate(folder, args.pairs)), ("before", lambda: before(folder, args))):
            if name in wanted:
                found[name] = measure()
                if found[name]["low"] < LEAST_RATE:
                    missed.append(f"{name}: {found[name]}, at least {LEAST_RATE}")
    finish({"bar": "metrics", **found, "load_after": load()}, missed)


if __name__ == "__main__":
    main()
