"""The first start: a job of one step on two shards and a worker, from the command to its end, in three ways.

cold-source  a clean checkout, in which nothing was ever compiled: what the step needs is compiled
cold-wheel   an environment that was made now, with the wheel of this checkout: its kernels are taken, none is compiled.
             The packages that embershard needs are those of this Python's environment
warm         cold-source's second start; beside it, one shard from the command until it serves

For each, the wall seconds until the worker has taken its step, and the CPU seconds of all processes to the job's end:
`embershard train`, two shards, a worker, an evaluation and a checkpoint. Then the wheel's kernels are of no use, as one
is damaged, or the processor is another one: the job must end well, and compile what it lacks and no more.

Bars: cold-source 12 s and 24 s of CPU, cold-wheel 6 s and 8 s of CPU, a warm shard 0.9 s. Medians of --rounds.
Prints a table and one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from startup import BAR_SECONDS, FIRST_LINES, JOB, FirstStep, first_step, start
from timing import finish, load, machine, median, print_table

ROOT = Path(__file__).resolve().parents[1]
JOB_OF_ONE = JOB.replace("samples: 2_048", "samples: 1_024").replace("workers: 2", "workers: 1")
BARS = {"cold-source": (12.0, 24.0), "cold-wheel": (6.0, 8.0)}  # seconds: wall, CPU
# what a wheel's kernels are not for
OTHER = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


@dataclass
class Way:
    """An installation, and what starts there took."""

    python: str
    environment: dict[str, str]
    steps: list[FirstStep] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)  # functions, by each start

    def measure(self, cache: Path, **more: str) -> str:
        """Start the job with kernels kept in `cache`; what that took."""
        self.environment = {**self.environment, "NUMBA_CACHE_DIR": str(cache)}
        before = count(cache)
        self.steps.append(first_step({**self.environment, **more}, self.python, JOB_OF_ONE))
        self.compiled.append(count(cache) - before)
        return f"{self.steps[-1]}, {self.compiled[-1]} functions compiled"

    def figures(self) -> dict[str, float]:
        """Medians, beside them the least wall time, to which other work on the machine adds, and the most functions."""
        wall, cpu = ([getattr(step, of) for step in self.steps] for of in ("wall_s", "cpu_s"))
        return {
            "wall_s": round(median(wall), 2),
            "least_wall_s": round(min(wall), 2),
            "cpu_s": round(median(cpu), 2),
            "compiled": max(self.compiled),
        }


def count(cache: Path) -> int:
    """Compiled functions in a folder."""
    return sum(1 for _ in cache.rglob("*.nbc"))


def checkout(folder: Path) -> Path:
    """The files of this checkout that git knows, in a folder of their own."""
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    copy = ["xargs", "-0", "cp", "--archive", "--parents", "--target-directory", str(folder)]
    folder.mkdir()
    subprocess.run(copy, input=files.stdout, cwd=ROOT, check=True)
    return folder


def wheel_of(tree: Path, environment: dict[str, str]) -> Path:
    """The wheel of a checkout with the kernels that this Python compiles, as `make build` makes it."""
    compiling = [sys.executable, "-m", "embershard.cli", "compile", "--for-wheel"]
    subprocess.run(compiling, env=environment, check=True, stdout=subprocess.DEVNULL)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tree / "dist"), str(tree)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return next((tree / "dist").glob("*.whl"))


def installed(folder: Path, wheel: Path) -> str:
    """The Python of a new environment with the wheel, and with the packages of this one behind it."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    return str(folder / "bin" / "python")


def useless(wheel: Way, folder: Path) -> dict[str, int]:
    """How many functions a start compiles where kernels of the wheel are of no use."""
    way = Way(wheel.python, wheel.environment)
    way.measure(folder / "other", **OTHER)
    kernels = Path(wheel.python).parents[1].glob("lib/python3*/site-packages/embershard/proto/compiled/kernels/*.nbc")
    for file in (kernel for kernel in kernels if ".kernels.gather-" in kernel.name):  # of every processor
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    way.measure(folder / "damaged")
    return dict(zip(("another processor", "a damaged file"), way.compiled, strict=True))


def below(figures: Mapping[str, Mapping[str, float]], shard: float, without: Mapping[str, int]) -> list[str]:
    """What is below a bar."""
    failures = [
        f"{name}: {figures[name][of]} s ({of}), at most {most}"
        for name, bars in BARS.items()
        for of, most in zip(("wall_s", "cpu_s"), bars, strict=True)
        if figures[name][of] > most
    ]
    failures += [f"{name}: functions are compiled" for name in ("cold-wheel", "warm") if figures[name]["compiled"]]
    if not figures["cold-source"]["compiled"]:
        failures.append("cold-source: nothing was compiled, so it was not cold")
    if shard > BAR_SECONDS:
        failures.append(f"a warm shard serves after {shard:.2f} s, at most {BAR_SECONDS}")
    if without["another processor"] < figures["cold-source"]["compiled"] or without["a damaged file"] != 1:
        failures.append(f"where the wheel's kernels are of no use, these numbers of functions are compiled: {without}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    rounds = parser.parse_args().rounds
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    before = load()
    print(f"{machine()}; {before}", flush=True)
    shards = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tree = checkout(folder / "wheel")
        wheel = wheel_of(tree, {**plain, "PYTHONPATH": str(tree / "src")})
        ways = {name: Way(sys.executable, plain) for name in ("cold-source", "cold-wheel", "warm")}
        for number in range(1, rounds + 1):
            source = checkout(folder / f"source-{number}")
            ways["cold-wheel"].python = installed(folder / f"environment-{number}", wheel)
            for name in ("cold-source", "warm"):
                ways[name].environment = {**plain, "PYTHONPATH": str(source / "src")}
            for name, way in ways.items():
                cache = folder / f"cache-{number}" / ("wheel" if name == "cold-wheel" else "source")
                print(f"round {number}, {name}: {way.measure(cache)}; {load()}", flush=True)
            shards.append(start(FIRST_LINES["shard"], ways["warm"].environment).wall_s)
        without = useless(ways["cold-wheel"], folder)
        size = wheel.stat().st_size // 1000
    figures = {name: way.figures() for name, way in ways.items()}
    header = ["way", "seconds to the step", "at least", "CPU seconds of all", "compiled"]
    print_table(header, [[name, *of.values()] for name, of in figures.items()])
    result = {"ways": figures, "warm_shard_s": round(median(shards), 2), "compiled_without": without, "wheel_kb": size}
    finish(
        {"bar": "cold", "rounds": rounds, **result, "load_before": before, "load_after": load()},
        below(figures, median(shards), without),
    )


if __name__ == "__main__":
    main()
