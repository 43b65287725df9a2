"""From a command to work: until a shard answers, until a worker is imported, until a job has taken its first step.

shard       `embershard ps` until it serves, with kernels that were compiled before, against the interpreter with grpc
            and numpy alone, the least that a shard over gRPC could take
worker      `embershard worker` until it has imported everything and finds no job file, against the imports of torch
first step  `embershard train` with two shards and two workers until both workers have taken one step

Everything is warm; what is compiled is bar_cold.py's.
Bytecode is kept, as an installation keeps it: else a tree's own files are compiled at each start, and torch's are not.
Each is wall seconds, and beside it CPU seconds of the process, which other programs on the machine disturb less.
`--tree DIR` measures the checkout in DIR instead of this one; given twice, both take turns in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from timing import cpu_seconds, finish, load, machine, median, print_table

BAR_SECONDS = 0.9  # of a warm shard
BAR_WORKER = 1.3  # times torch's own imports
SHARD = ["-m", "embershard.cli", "ps", "--listen", "127.0.0.1:0"]
READY = "; print('ready', flush=True)"
# numba imports these where it finds them: tools of this project need them, an installation has none
HIDDEN = "import sys; sys.modules.update(dict.fromkeys(['coverage', 'yaml'])); "
JOB = """
model: {name: dlrm, bottom: [64, 32], hidden: [128, 64]}
data: {reader: clicks, eval_samples: 2_000}
embedding: {dim: 16, optimizer: {name: adagrad, lr: 0.05}}
dense: {optimizer: {name: adam, lr: 0.001}}
train: {batch_size: 1024, samples: 2_048, seed: 1}  # a step of each worker
workers: 2
shards: 2
"""
FIRST_LINES = {
    "shard": [*SHARD, "--shard", "0", "--of", "1"],
    "grpc": ["-c", "import grpc.aio, numpy" + READY],
    # as users start it: the garbage collector rests while modules are imported
    "worker": ["-c", HIDDEN + "from embershard.cli import main; main()", "worker", "no-such-job.yaml"],
    "torch": ["-c", "import torch" + READY],
}
RATIOS = {"shard": "grpc", "worker": "torch"}


@dataclass
class Start:
    """One process from its start to the line that says that it is ready."""

    wall_s: float
    cpu_s: float


@dataclass
class FirstStep:
    """A job of a step of each worker."""

    wall_s: float  # to the first `train` line of its log
    cpu_s: float  # of all processes, to its end


@dataclass
class Tree:
    """A checkout, and what was measured of it."""

    root: Path
    starts: dict[str, list[Start]] = field(default_factory=lambda: {name: [] for name in FIRST_LINES})
    first_steps: list[FirstStep] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "PYTHONPATH": str(self.root / "src")}

    def measure(self) -> None:
        """Everything, once."""
        for name, words in FIRST_LINES.items():
            self.starts[name].append(start(words, self.environment()))
        self.first_steps.append(first_step(self.environment()))

    def worker_to_torch(self) -> float:
        """The median over rounds of a worker's imports against torch's own, whichever clock favours the worker less."""
        pairs = list(zip(self.starts["worker"], self.starts["torch"], strict=True))
        return max(
            median([worker.wall_s / torch.wall_s for worker, torch in pairs]),
            median([worker.cpu_s / torch.cpu_s for worker, torch in pairs]),
        )

    def figures(self) -> dict[str, object]:
        wall = {name: median([s.wall_s for s in starts]) for name, starts in self.starts.items()}
        cpu = {name: median([s.cpu_s for s in starts]) for name, starts in self.starts.items()}
        result: dict[str, object] = {f"{name}_s": round(value, 3) for name, value in wall.items()}
        result |= {f"{name}_cpu_s": round(value, 3) for name, value in cpu.items()}
        for ours, least in RATIOS.items():
            result |= {
                f"{ours}_to_{least}": round(wall[ours] / wall[least], 2),
                f"{ours}_to_{least}_cpu": round(cpu[ours] / cpu[least], 2),
            }
        result["first_step_s"] = round(median([step.wall_s for step in self.first_steps]), 2)
        result["first_job_cpu_s"] = round(median([step.cpu_s for step in self.first_steps]), 2)
        return result


def start(words: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Run Python with these words until it says that it is ready, and end it."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(("ready", "error: ")) or '"serving"' in line:
                return Start(time.perf_counter() - begun, cpu_seconds([process.pid]))
    finally:
        process.kill()
        process.wait()
    raise SystemExit(f"python {' '.join(words)} ended before it was ready, exit code {process.returncode}")


def first_step(environment: Mapping[str, str], python: str = sys.executable, job: str = JOB) -> FirstStep:
    """Train a job of one step, and read when its log.jsonl got the first `train` line, which is written after that."""
    with tempfile.TemporaryDirectory() as folder:
        path, output, said = Path(folder, "job.yaml"), Path(folder, "run"), Path(folder, "said")
        path.write_text(job)
        begun = time.time()  # as in the log
        command = [python, "-m", "embershard.cli", "train", str(path), "--output", str(output)]
        with said.open("w") as file:
            pid = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=folder).pid
        _, status, usage = os.wait4(pid, 0)  # what it used, with all processes that it waited for
        if status:
            raise SystemExit(f"{' '.join(command)}: exit code {status >> 8}\n{said.read_text()}")
        for line in (output / "log.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["record"] == "train":
                return FirstStep(float(record["time"]) - begun, usage.ru_utime + usage.ru_stime)
    raise SystemExit("the job's log has no `train` line")


def show(trees: Sequence[Tree]) -> None:
    """A row for each figure, a column for each tree."""
    all_figures = [tree.figures() for tree in trees]
    rows = []
    for name in all_figures[0]:
        values = [figures[name] for figures in all_figures]
        first, last = values[0], values[-1]
        ratio = f"{last / first:.2f}x" if len(values) > 1 and isinstance(first, float) and first else ""
        rows.append([name, *map(str, values), ratio])
    print_table(["", *(str(tree.root) for tree in trees), "last of first" if len(trees) > 1 else ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--tree", action="append", type=Path, help="a checkout to measure; may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trees = [Tree(root.resolve()) for root in options.tree or [here]]
    print(f"{machine()}; {load()}", flush=True)
    for tree in trees:
        if not (tree.root / "src/embershard").is_dir():
            raise SystemExit(f"{tree.root} has no src/embershard: give the root of a checkout")
        start(FIRST_LINES["shard"], tree.environment())  # compiles where the user's own cache is cold
        first_step(tree.environment())
    for number in range(options.rounds):
        print(f"round {number + 1}: {load()}", flush=True)
        for tree in trees[:: -1 if number % 2 else 1]:
            tree.measure()
    show(trees)
    print(load())
    result = {str(tree.root): tree.figures() for tree in trees}
    slow = [
        f"{tree.root}: a warm shard serves after {shard:.2f} s, at most {BAR_SECONDS}"
        for tree in trees
        if (shard := median([s.wall_s for s in tree.starts["shard"]])) > BAR_SECONDS
    ]
    slow += [
        f"{tree.root}: a worker's imports take {ratio:.2f}x torch's own, at most {BAR_WORKER}"
        for tree in trees
        if (ratio := tree.worker_to_torch()) > BAR_WORKER
    ]
    finish({"bench": "startup", "rounds": options.rounds, "load": load(), "trees": result}, slow)


if __name__ == "__main__":
    main()
