"""embershard beside what a user would pick instead, in one run, on the workloads of the peers' common.py.

Every program runs once per round, in turn, and the medians over the rounds count. Torch's own programs are always part
of it; another one is where `make peers-env` made its environment, and skipped, with the reason, where it does not run.

What our client uses and torch does not by itself is given to torch's programs too, so that the bars compare parameter
servers: linear layers by oneDNN (each such program runs a second time, with them) and a malloc that keeps freed memory
(every program of theirs). Adagrad by hand is in its faster form (`tuned` in kernels.py). torch rpc runs over each of
its transports. W-DLRM runs with batches of 512, 2,048 and 8,192; torch in one process is shown on two threads, too.
Every bar is against the best of a system's programs, which it names: by step time where the bar is about time, by CPU
time where it is about that.

Prints a table per workload and one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers_picture import draw
from timing import finish, load, machine, median, print_table

ROOT = Path(__file__).resolve().parents[1]
# resolved here: programs run in folders of their own
PEERS = Path(os.environ.get("EMBERSHARD_PEERS") or ROOT.parent / "shared/peers").resolve()
# what keep_freed_memory of embershard.worker.device sets, for the other programs
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**29), "MALLOC_TOP_PAD_": str(2**26), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
ENVIRONMENTS = ROOT / ".venv-peers"
OURS = "embershard"
OUR_SCRIPT = "peer_embershard.py"
# programs with Adagrad by hand -> the learning rate in it
BY_HAND = {"inproc.py": "lr", "torch_rpc.py": "self.lr", "ray_ps.py": "self.lr"}
RUN_SECONDS = 400
QUIET = 0.15  # cores that others may use while a program is measured
LOSS_STEPS = 200
BATCH = 2048  # of W-DLRM, as the peers' programs have it

Figures = dict[str, float]


class Skipped(Exception):
    """Why a program has no figures."""


@dataclass(frozen=True)
class Program:
    """One way to do the work."""

    label: str
    script: str
    words: tuple[str, ...] = ()
    environment: str = ""  # folder of .venv-peers; empty: this Python
    onednn: bool = False  # linear layers by oneDNN
    threads: int = 1  # of torch

    @property
    def on_two_threads(self) -> Program:
        """The same with two compute threads."""
        return replace(self, label=f"{self.label}, 2 threads", threads=2)

    @property
    def with_onednn(self) -> Program:
        """The same with linear layers by oneDNN."""
        return replace(self, label=f"{self.label}, oneDNN", onednn=True)

    @property
    def must_run(self) -> bool:
        return not self.environment

    def run(self, words: Sequence[str], batch: int) -> dict[str, Any]:
        """The JSON line that it prints, with so many samples in a batch of W-DLRM. Skipped where there is none."""
        python = ENVIRONMENTS / self.environment / "bin/python" if self.environment else Path(sys.executable)
        if not python.exists():
            raise Skipped(f"no environment {python.parents[1]}: run make peers-env")
        ours = self.script == OUR_SCRIPT
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
            peers = _copied(Path(folder), batch, self)
            script = Path(__file__).with_name(self.script) if ours else peers / self.script
            process = subprocess.Popen(
                [python, script, *words, *self.words],
                cwd=folder,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    **({} if ours else MALLOC),
                    "EMBERSHARD_PEERS": str(peers),
                    "OMP_NUM_THREADS": str(self.threads),
                    "MKL_NUM_THREADS": str(self.threads),
                },
            )
            try:
                process.wait(RUN_SECONDS)
            except subprocess.TimeoutExpired:
                raise Skipped(f"no result within {RUN_SECONDS} s") from None
            finally:
                _end(process)
            said.seek(0)
            lines = said.read().strip().splitlines() or ["it said nothing"]
        for line in reversed(lines):
            if line.startswith('{"peer"'):
                return dict(json.loads(line))
        raise Skipped(lines[-1][:200])


def _copied(folder: Path, batch: int, program: Program) -> Path:
    """The peers' programs with this batch, these threads, and what makes them faster."""
    for path in PEERS.glob("*.py"):
        shutil.copy(path, folder)
    _change(folder / "common.py", f"BATCH, NDENSE, NCAT = 16, {BATCH},", f"BATCH, NDENSE, NCAT = 16, {batch},")
    _change(folder / "dlrm_torch.py", "torch.set_num_threads(1)", f"torch.set_num_threads({program.threads})")
    if lr := BY_HAND.get(program.script):  # with alpha, index_add_ scales every row by itself: up to twice the time
        step = "g / sr.sqrt_().add_(1e-10)"
        _change(folder / program.script, f"{step}, alpha=-{lr})", f"({step}).mul_(-{lr}))")
    if program.onednn:  # those that take their dense layers from dlrm_torch.py get ours
        (folder / "dlrm_torch.py").rename(folder / "dlrm_torch_plain.py")
        shutil.copy(Path(__file__).with_name("peer_dlrm_onednn.py"), folder / "dlrm_torch.py")
        shutil.copy(ROOT / "worker/nn/onednn.py", folder)  # other environments have torch, but not embershard
    return folder


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} has changed: no {old!r} in it"
    path.write_text(text.replace(old, new))


def run_undisturbed(program: Program, words: Sequence[str], batch: int, patience: float) -> dict[str, Any]:
    """A run while nobody else uses the machine, as far as `patience` (seconds) goes; the least disturbed of three."""
    end = time.monotonic() + patience
    best: dict[str, Any] = {}
    for _ in range(3):
        while time.monotonic() < end and _busy_cores() > QUIET:
            pass
        result = program.run(words, batch)
        best = min(best or result, result, key=lambda it: float(it["other_cores"]))
        if best["other_cores"] <= QUIET or time.monotonic() >= end:
            break
    return best


def _busy_cores() -> float:
    """Cores in use during one second."""

    def busy() -> float:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")

    start, before = time.monotonic(), busy()
    time.sleep(1)
    return (busy() - before) / (time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started: first as Ctrl-C does, so that it can do that itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


IN_PROCESS = [
    Program("torch in one process, by hand", "inproc.py", ("--impl", "manual")),
    Program("torch in one process, torch.optim", "inproc.py", ("--impl", "optim")),
]
# beside, without a bar: a machine of two cores has none left for shards then
TWO_THREADS = [program.with_onednn.on_two_threads for program in IN_PROCESS]
EMBERSHARD = Program(OURS, OUR_SCRIPT)
# without oneDNN: what is left beside torch's programs is how weights get to the model and back
PLAIN = Program(f"{OURS}, torch's matrix kernels", EMBERSHARD.script, ("--linear", "torch"))
# pulls where a step needs them, as torch rpc does
NO_PREFETCH = Program(f"{OURS}, no prefetch", EMBERSHARD.script, ("--staleness", "-1"))
TCP = Program(f"{OURS}, TCP", EMBERSHARD.script, ("--transport", "tcp"))
OUR_PROGRAMS = {program.label for program in (EMBERSHARD, PLAIN, NO_PREFETCH, TCP)}
RPC = [
    Program(f"torch rpc, {name}, {optimizer}", "torch_rpc.py", ("--transport", transport, "--server-opt", optimizer))
    for transport, name in (("auto", "shared memory"), ("uv", "TCP"))
    for optimizer in ("manual", "optim")
]
RPC_DLRM = [program for program in RPC if "manual" in program.words]  # torch.optim was slower in every run
PS_LITE = Program("ps-lite (MXNet)", "mxnet_kv.py", environment="mxnet")
RAY = Program("Ray", "ray_ps.py", ("--server-opt", "manual"), environment="ray")
OTHERS = [
    RAY,
    Program("TensorFlow", "tf_ps.py", environment="tensorflow"),
    Program("PaddlePaddle", "paddle_ps.py", environment="paddle"),
    Program("OpenEmbedding", "openembedding_ps.py", environment="openembedding"),
    Program("Redis", "redis_ps.py", environment="redis"),
]
TORCHREC = Program("TorchRec", "torchrec_rw.py", environment="torchrec")
# it is no parameter server: two processes hold the rows, and the second one only serves
TORCHREC_PS = Program("TorchRec, 2 processes", "torchrec_rw.py", ("--workers", "2"), environment="torchrec")


@dataclass(frozen=True)
class Workload:
    """Programs on the same work."""

    name: str
    words: tuple[str, ...]
    steps: int
    programs: tuple[Program, ...]
    batch: int = BATCH

    def run(self, rounds: int, quick: bool, patience: float) -> tuple[dict[str, Figures], dict[str, str]]:
        """Median figures by program, and why others have none."""
        results: dict[str, list[dict[str, Any]]] = defaultdict(list)
        skipped: dict[str, str] = {}
        words = [*self.words, "--steps", str(self.steps)]
        for number in range(rounds):
            # there and back, so that none always follows the same other one
            for program in self.programs[:: -1 if number % 2 else 1]:
                if program.label in skipped or (quick and not program.must_run):
                    continue
                try:
                    result = run_undisturbed(program, words, self.batch, patience)
                except Skipped as reason:
                    if program.must_run:
                        raise SystemExit(f"{self.name}: {program.label} gave no result: {reason}") from None
                    skipped[program.label] = str(reason)
                    results.pop(program.label, None)
                    continue
                results[program.label].append(result)
                print(f"{self.name} {number + 1}/{rounds} {json.dumps(result)}", flush=True)
        return {label: _medians(runs) for label, runs in results.items()}, skipped


def _both(*programs: Program) -> Iterator[Program]:
    """Programs on torch, with its own linear layers and with oneDNN's."""
    for program in programs:
        yield from (program, program.with_onednn)


def _medians(runs: Sequence[Mapping[str, Any]]) -> Figures:
    names = ("median_ms", "p90_ms", "cpu_s_per_step", "samples_per_s")
    figures = {name: median([run[name] for run in runs]) for name in names if name in runs[0]}
    middle = sorted(runs, key=lambda run: float(run["median_ms"]))[len(runs) // 2]
    parts = {f"part{n}_ms": part for n, part in enumerate(middle.get("parts_ms", []))}
    return {**figures, **parts, "other_cores": max(run["other_cores"] for run in runs)}


WORKLOADS = {
    "ps": Workload(
        "W-PS, 2 shards, 1 worker",
        ("--workload", "ps", "--servers", "2"),
        100,
        (*IN_PROCESS, *RPC, PS_LITE, TORCHREC_PS, *OTHERS, EMBERSHARD, TCP),
    ),
    "dlrm1": Workload(
        "W-DLRM, 2 shards, 1 worker",
        ("--workload", "dlrm", "--servers", "2", "--workers", "1"),
        60,
        (*_both(*IN_PROCESS, *RPC_DLRM, TORCHREC, RAY), *OTHERS[1:], *TWO_THREADS, PLAIN, NO_PREFETCH, EMBERSHARD),
    ),
    **{
        f"dlrm1-{batch}": Workload(
            f"W-DLRM, 2 shards, 1 worker, batch {batch:,}",
            ("--workload", "dlrm", "--servers", "2", "--workers", "1"),
            steps,
            (*_both(*IN_PROCESS), *TWO_THREADS, PLAIN, EMBERSHARD),
            batch,
        )
        for batch, steps in ((512, 120), (8192, 20))
    },
    "dlrm2": Workload(
        "W-DLRM, 2 shards, 2 workers",
        ("--workload", "dlrm", "--servers", "2", "--workers", "2"),
        60,
        (*_both(*RPC_DLRM, TORCHREC, RAY), *OTHERS[1:], PLAIN, NO_PREFETCH, EMBERSHARD),
    ),
}  # fmt: skip
LOSS = Workload(
    "loss",
    ("--workload", "dlrm", "--servers", "2", "--workers", "1"),
    LOSS_STEPS,
    (IN_PROCESS[0], Program(OURS, EMBERSHARD.script, ("--staleness", "0"))),
)


ONE_WORKER_BARS = {"dlrm1": 1.08, "dlrm1-512": 1.0, "dlrm1-8192": 1.05}  # speed against the best in one process


@dataclass(frozen=True)
class Bar:
    """A figure of ours and what it must reach; at_most where less is better."""

    what: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.4g} (bar: {'at most' if self.at_most else 'at least'} {self.bound})"


def _best(programs: Sequence[Program], figures: Mapping[str, Figures], name: str) -> str:
    """Label of the program with the least of this figure."""
    return min((p.label for p in programs if p.label in figures), key=lambda label: figures[label][name])


def bars_of_ps(figures: Mapping[str, Figures]) -> list[Bar]:
    ours = figures[OURS]
    bounds = {_best(RPC, figures, "median_ms"): 5.0, PS_LITE.label: 3.0, _best(IN_PROCESS, figures, "median_ms"): 3.5}
    steps = [
        Bar(f"W-PS: step against {label}", figures[label]["median_ms"] / ours["median_ms"], bound)
        for label, bound in bounds.items()
        if label in figures
    ]
    thrifty = _best(RPC, figures, "cpu_s_per_step")
    cpu = ours["cpu_s_per_step"] / figures[thrifty]["cpu_s_per_step"]
    return [*steps, Bar(f"W-PS: CPU per step against {thrifty}", cpu, 0.4, at_most=True)]


def bars_of_dlrm(name: str, figures: Mapping[str, Figures], rivals: Sequence[str], factor: float) -> list[Bar]:
    """`factor` over the fastest of these rivals, and ahead of whatever else ran."""
    rates = {label: its["samples_per_s"] for label, its in figures.items()}
    others = rates.keys() - OUR_PROGRAMS - set(rivals) - {program.label for program in TWO_THREADS}
    bars = []
    for them, bound in ((set(rivals), factor), (others, 1.0)):
        if them:
            best = max(them, key=rates.__getitem__)
            bars.append(Bar(f"{name}: samples/s against {best}", rates[OURS] / rates[best], bound))
    return bars


def unheld_of(key: str, figures: Mapping[str, Figures]) -> dict[str, float | None]:
    """What the bars leave out: ours by torch's matrix kernels and without prefetch; peers without figures."""
    if key == "ps":
        return {} if PS_LITE.label in figures else {f"W-PS: step against {PS_LITE.label}": None}
    rates = {label: its["samples_per_s"] for label, its in figures.items()}
    theirs = [label for label in rates if label not in OUR_PROGRAMS]
    # like against like: torch's matrix kernels on both sides, or oneDNN's
    pairs = [(PLAIN.label, [label for label in theirs if f"{label}, oneDNN" in rates])]
    pairs += [(NO_PREFETCH.label, [label for label in theirs if f"{label}, oneDNN" not in rates])]
    return {
        f"{WORKLOADS[key].name}: samples/s of {ours} against {label}": round(rates[ours] / rates[label], 4)
        for ours, labels in pairs
        for label in labels
        if ours in rates
    }


def bars_of(key: str, figures: Mapping[str, Figures]) -> list[Bar]:
    if key == "ps":
        return bars_of_ps(figures)
    if key in ONE_WORKER_BARS:
        name = WORKLOADS[key].name.replace(", 2 shards", "")
        return bars_of_dlrm(name, figures, [p.label for p in _both(*IN_PROCESS)], ONE_WORKER_BARS[key])
    return bars_of_dlrm("W-DLRM, 2 workers", figures, [p.label for p in _both(*RPC_DLRM)], 1.2)


def show(name: str, figures: Mapping[str, Figures]) -> None:
    print(f"\n{name}")
    ours, rows = figures[OURS], []
    for label, its in sorted(figures.items(), key=lambda item: item[1]["median_ms"]):
        rate = its.get("samples_per_s")
        times = rate / ours["samples_per_s"] if rate else ours["median_ms"] / its["median_ms"]
        rows.append([label, its["median_ms"], 1000 * its["cpu_s_per_step"], round(rate) if rate else "-", times])
    print_table(["", "step, ms", "CPU, ms/step", "samples/s", "speed, of ours"], rows)


def loss_bar() -> tuple[Figures, Bar]:
    """The losses of 200 steps at staleness 0, from the same first weights, and of torch in one process."""
    last = {}
    for program in LOSS.programs:
        result = program.run([*LOSS.words, "--steps", str(LOSS_STEPS)], LOSS.batch)
        print(f"{LOSS.name} {json.dumps(result)}", flush=True)
        last[program.label] = float(result["loss_last"])
    ours, theirs = last[OURS], last[IN_PROCESS[0].label]
    figures = {"embershard": ours, "in_process": theirs}
    return figures, Bar(f"loss after {LOSS_STEPS} steps against one process", abs(ours - theirs), 0.002, at_most=True)


def save(result: Mapping[str, Any], folder: Path) -> None:
    """The figures as JSON, and as a picture where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps(result, indent=1))
    if find_spec("matplotlib") and any(key in result for key in WORKLOADS):
        draw(result, folder / "peers.svg")
    print(f"written to {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="with two workers, three are not enough")
    parser.add_argument("--quick", action="store_true", help="one round, and only programs that need torch alone")
    parser.add_argument("--only", action="append", choices=[*WORKLOADS, "loss"], help="may be given several times")
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait for a quiet machine, per program")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/peers", help="folder of peers.json and peers.svg")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what runs
    rounds = 1 if options.quick else options.rounds
    chosen = options.only or [*WORKLOADS, "loss"]
    print(f"{machine()}; {load()}")
    result: dict[str, object] = {"rounds": rounds, "load_before": load()}
    bars: list[Bar] = []
    unheld: dict[str, float | None] = {}
    busy = 0.0
    for key in chosen:
        if key == "loss":
            result[key], bar = loss_bar()
            bars.append(bar)
            continue
        workload = WORKLOADS[key]
        figures, skipped = workload.run(rounds, options.quick, options.patience)
        show(workload.name, figures)
        for label, reason in skipped.items():
            print(f"skipped: {label}: {reason}")
        busy = max(busy, *(its["other_cores"] for its in figures.values()))
        result[key] = {"steps": workload.steps, "programs": figures, "skipped": skipped}
        bars += bars_of(key, figures)
        unheld.update(unheld_of(key, figures))
    print()
    for bar in bars:
        print(f"{'ok  ' if bar.passed else 'FAIL'} {bar}")
    for what, value in unheld.items():
        print(f"no bar {what}: {'not checked, it did not run' if value is None else value}")
    if busy > QUIET:
        print(f"others used up to {busy:.2f} cores meanwhile: run it again on a quiet machine")
    result["bars"] = {
        bar.what: {"value": round(bar.value, 4), "bound": bar.bound, "passed": bar.passed} for bar in bars
    }
    result["without_bar"] = unheld
    result["load_after"] = load()
    save({"machine": machine(), **result}, options.output)
    finish({**result, "other_cores": busy}, [str(bar) for bar in bars if not bar.passed])


if __name__ == "__main__":
    main()
