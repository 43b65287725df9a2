"""What the two installs are: `pip install embershard` serves shards without torch, `embershard[train]` trains as well.

A wheel is built, and installed with the pinned versions into an empty environment of each kind. For each: the seconds
of pip, the megabytes on the disk, and the packages. In the first one a shard is started, asked and stopped, an
administrator's commands run, a command that trains says what it needs, and no process loads torch, pyarrow or pandas.
In the second one the demo's job trains.

Bars: the install without torch takes at most 400 MB; its shard serves, and imports neither torch nor pyarrow; both
installs have the example jobs. Prints a table and one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from timing import finish, load, print_table

ROOT = Path(__file__).resolve().parents[1]
MOST_MB = 400
NOT_LOADED = ("torch", "pyarrow", "pandas")
ADMIN = (
    "--version",
    "keys token ops --role admin",
    "manifests systemd --name a --shards 1 --access access.yaml",
    "status --help",
    "log --help",
    "doctor",
)
IMPORTS = "import sys, embershard.cli.ps, embershard.ps.shard, embershard.ps.dispatch; print(*sys.modules)"


@dataclass
class Environment:
    """A virtual environment with one install."""

    folder: Path
    seconds: float = 0.0

    @classmethod
    def make(cls, folder: Path, requirement: str) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        began = time.monotonic()
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-cache-dir", "-c", str(ROOT / "constraints.txt"), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"pip install {requirement}: {done.stderr[-2000:]}")
        return cls(folder, time.monotonic() - began)

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    @property
    def megabytes(self) -> float:
        """On the disk, pip itself left out."""
        own = [path for path in self.site.iterdir() if not path.name.startswith("pip")]
        return sum(file.stat().st_size for path in own for file in ([path] if path.is_file() else path.rglob("*"))
                   if file.is_file() and not file.is_symlink()) / 1e6  # fmt: skip

    @property
    def packages(self) -> int:
        return len([path for path in self.site.glob("*.dist-info") if not path.name.startswith("pip-")])

    def run(self, *words: str, python: bool = False) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / ("python" if python else "embershard")), *words]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )


def check_shard(environment: Environment) -> list[str]:
    """What is wrong with the install without torch."""
    wrong = []
    loaded = environment.run("-c", IMPORTS, python=True)
    if loaded.returncode:
        return [f"a shard cannot be imported: {loaded.stderr[-500:]}"]
    wrong += [f"a shard imports {name}" for name in NOT_LOADED if name in loaded.stdout.split()]
    command = [str(environment.folder / "bin" / "embershard"), *"ps --shard 0 --of 1 --listen 127.0.0.1:0".split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=environment.folder) as shard:
        assert shard.stdout is not None
        address = json.loads(shard.stdout.readline())["address"]
        status = environment.run("status", "--ps", address)
        maps = Path(f"/proc/{shard.pid}/maps").read_text()
        shard.terminate()
    wrong += [f"status of a shard: {status.stderr}"] if status.returncode else []
    wrong += [f"a shard has loaded {name}" for name in NOT_LOADED if f"/{name}/" in maps]
    wrong += [f"a shard ended with exit code {shard.returncode}"] if shard.returncode else []
    for words in ADMIN:
        done = environment.run(*words.split())
        wrong += [f"embershard {words}: {done.stdout[-300:]}{done.stderr[-300:]}"] if done.returncode else []
    asked = environment.run("train", str(examples(environment) / "demo.yaml"))
    if asked.returncode != 1 or "embershard[train]" not in asked.stderr or "Traceback" in asked.stderr:
        wrong.append(f"train does not say what it needs: {asked.stderr[-500:]}")
    return wrong


def examples(environment: Environment) -> Path:
    return environment.site / "embershard" / "examples"


def check_training(environment: Environment) -> list[str]:
    """What is wrong with the whole install."""
    words = ["--set", "train.samples=20_000", "--set", "evaluate.every=20_000", "--output", "run"]
    done = environment.run("train", str(examples(environment) / "demo.yaml"), *words)
    return [f"the demo's job: {done.stdout[-500:]}{done.stderr[-500:]}"] if done.returncode else []


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    failures: list[str] = []
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        wheel = next(folder.glob("*.whl"))
        for name, requirement, look in (
            ("embershard", str(wheel), check_shard),
            ("embershard[train]", f"embershard[train] @ file://{wheel}", check_training),
        ):
            environment = Environment.make(folder / name.replace("[", "-").rstrip("]"), requirement)
            one = {"seconds": round(environment.seconds, 1), "mb": round(environment.megabytes),
                   "packages": environment.packages}  # fmt: skip
            found[name] = one
            rows.append([name, *one.values()])
            failures += [f"{name}: {wrong}" for wrong in look(environment)]
            if not (examples(environment) / "demo.yaml").exists():
                failures.append(f"{name}: the example jobs are not in it")
        found["wheel_kb"] = round(wheel.stat().st_size / 1e3)
    if found["embershard"]["mb"] > MOST_MB:
        failures.append(f"the install without torch takes {found['embershard']['mb']} MB, at most {MOST_MB}")
    print_table(["install", "seconds", "MB", "packages"], rows)
    finish({"bar": "install", **found, "load": load()}, failures)


if __name__ == "__main__":
    main()
