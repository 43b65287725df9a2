"""What only a GPU shows of embershard, in one command of under nine minutes: `make gpu`.

The CUDA-marked tests; `wrap` on the GPU against the CPU, with fp16 and GradScaler and with bf16; other people's models
against plain torch; dense weights by DDP and FSDP2 over nccl; whole jobs; and DLRM with all weights on 2 shards, beside
the same model in the GPU's memory and a parameter server of torch.distributed.rpc. `--device cpu` runs the very same
lines with gloo in place of nccl and smaller sizes: `make gpu-rehearsal`. Each part has a time limit of its own; one
that fails is recorded, and the others still run. result.json is written after every figure. Prints tables and one JSON
line; exits 1 where a part failed.

It needs no network and no environment of its own: with `--wheels` it first installs the wheels of that folder, which
`make gpu-wheels` fetched, for its processes alone. This file and those it imports need the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from part import Figures, Part
from tables import tables

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TOTAL_SECONDS = 510.0
CELLS = ((16, 8192), (64, 65536), (64, 8192), (16, 65536))  # dim, batch; in the order of interest
REHEARSED = ((16, 128), (64, 1024), (64, 128), (16, 1024))


def parts(device: str) -> list[Part]:
    """What is run, in order."""
    rehearsal = device == "cpu"
    slower = 4 if rehearsal else 1  # two cores that others use too
    # no other files, which may import what the machine lacks, and of its plugins only the one that we name a setting of
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in file.read_text()]
    tests = ["-m", "pytest", *files, "-m", "cuda", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]

    def part(name: str, script: str, seconds: float, *words: str, needed: bool = False) -> Part:
        command = (str(HERE / script), "--device", device, *words)
        return Part(name=name, command=command, seconds=seconds * slower, needed=needed)

    small = ("--rows", "26000", "--seconds", "1") if rehearsal else ()
    few = ("--samples", "4000") if rehearsal else ()
    return [
        part("environment", "environment.py", 120, needed=True),  # the first import on a machine compiles the kernels
        Part(name="tests", command=(*tests, *["--gpu-rehearsal"][:rehearsal]), seconds=100 * slower),
        part("training", "training.py", 60),
        part("ddp", "collectives.py", 60, "--mode", "ddp"),
        part("fsdp", "collectives.py", 60, "--mode", "fsdp"),
        part("jobs", "jobs.py", 120, *few),
        part("models", "models.py", 100),
        *(
            part(f"dlrm-{dim}-{batch}", "dlrm.py", 85, "--dim", str(dim), "--batch", str(batch), *small)
            for dim, batch in (REHEARSED if rehearsal else CELLS)
        ),
    ]


def install(wheels: Path, site: Path) -> None:
    """Unpack wheels into a folder that only this run's processes look into."""
    files = sorted(map(str, wheels.rglob("*.whl")))
    if not files:
        raise SystemExit(f"{wheels} holds no wheels: fetch them with make gpu-wheels")
    words = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    words += ["--disable-pip-version-check", "--root-user-action", "ignore", "--target", str(site), *files]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    print(f"{len(files)} wheels installed into {site}")


def environment(site: Path) -> dict[str, str]:
    """That of the parts: embershard from this checkout, one thread unless a part says more, and loopback alone."""
    paths = [str(ROOT / "src"), str(site), os.environ.get("PYTHONPATH", "")]
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **loopback, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(chosen: list[Part], total: float, variables: dict[str, str], file: Path, result: Figures) -> None:
    """Run parts until time is up; `result` and its file hold what is known at any moment."""
    end = time.monotonic() + total
    figures: list[Figures] = result["figures"]

    def save() -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(file)  # whoever ends this process finds a whole file

    for part in chosen:
        left = end - time.monotonic()
        if left < 5:
            result["parts"][part.name] = {"passed": False, "seconds": 0.0, "error": "not begun: time was up"}
            save()
            continue
        print(f"{part.name} (at most {min(part.seconds, left):.0f} s)", flush=True)

        def keep(found: Figures, name: str = part.name) -> None:
            figures.append({"part": name, **found})
            save()

        ended = part.run(variables, min(part.seconds, left), keep)
        result["parts"][part.name] = ended
        save()
        print(f"  {'passed' if ended['passed'] else 'FAILED: ' + ended['error']}, {ended['seconds']} s", flush=True)
        if part.needed and not ended["passed"]:
            print("  nothing else can run without it")
            return


def main() -> None:
    """Read the command line, run the parts and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal with smaller sizes")
    parser.add_argument("--only", action="append", help="a part's name or its beginning; may be given several times")
    parser.add_argument(
        "--seconds", type=float, help=f"for all parts together  [default: {TOTAL_SECONDS:.0f} on a GPU]"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, for this run's processes")
    parser.add_argument("--site", type=Path, help="where to install them  [default: a folder of the temporary one]")
    parser.add_argument("--install-only", action="store_true", help="install the wheels and end")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/gpu", help="folder of result.json and tables.txt")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what runs
    name = f"embershard-gpu-{sys.version_info.major}.{sys.version_info.minor}"
    site = options.site or Path(tempfile.gettempdir()) / name
    if options.wheels is not None:
        install(options.wheels, site)
    if options.install_only:
        return
    chosen = [it for it in parts(options.device) if not options.only or it.name.startswith(tuple(options.only))]
    start = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    result: Figures = {"device": options.device, "python": platform.python_version(), "parts": {}, "figures": []}
    total = options.seconds or TOTAL_SECONDS * (4 if options.device == "cpu" else 1)
    run(chosen, total, environment(site), options.output / "result.json", result)
    result["seconds"] = round(time.monotonic() - start, 1)
    text = tables(result)
    print(f"\n{text}")
    (options.output / "tables.txt").write_text(text + "\n")
    passed = len(result["parts"]) == len(chosen) and all(it["passed"] for it in result["parts"].values())
    line = json.dumps({**result, "passed": passed})
    (options.output / "result.json").write_text(line + "\n")
    print(line, flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
