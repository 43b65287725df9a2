"""What `embershard manifests` prints, held against the validators of the engines: each that is missing is a failure.

kubernetes   kubernetes-validate --strict, for three versions, with and without certificates
systemd      systemd-analyze verify, which prints nothing on stderr; security, an exposure of at most 2.5
slurm        sbatch reads the script (bash -n; the cluster of bar-slurm runs it)

Prints a table and one JSON line; exits 1 where one does not hold.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

from timing import finish, print_table

JOB = Path(__file__).resolve().parents[1] / "examples" / "demo.yaml"
VERSIONS = ("1.31", "1.33", "1.36")
MOST_EXPOSED = 2.5


def manifests(*words: str) -> str:
    command = [sys.executable, "-m", "embershard.cli", "manifests", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_kubernetes() -> list[str]:
    import kubernetes_validate

    wrong = []
    for words in ((), ("--issuer", "ca"), ("--pack", "--data-claim", "data")):
        text = manifests("kubernetes", "--name", "ads", "--job", str(JOB), "--image", "embershard:1", *words)
        for one in YAML(typ="safe").load_all(text):
            for version in VERSIONS if not one["apiVersion"].startswith("cert-manager.io") else ():
                try:
                    kubernetes_validate.validate(one, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    wrong.append(f"{version} {one['kind']}: {error.message}")
    return wrong


def check_systemd(folder: Path) -> list[str]:
    if shutil.which("systemd-analyze") is None:
        return ["systemd-analyze is not installed"]
    words = ["--name", "ads", "--shards", "2", "--tls", "/etc/keys", "--access", "/etc/access.yaml"]
    manifests("systemd", *words, "--executable", "/bin/true", "--output", str(folder))
    units = sorted(map(str, folder.iterdir()))
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    wrong = [f"verify: {verified.stderr}"] if verified.stderr or verified.returncode else []
    for unit in (unit for unit in units if unit.endswith(".service")):
        command = ["systemd-analyze", "security", "--offline=yes", unit]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        exposed = float(re.findall(r"exposure level for \S+: ([0-9.]+)", said)[-1])
        wrong += [f"security: {unit} has {exposed}, at most {MOST_EXPOSED}"] if exposed > MOST_EXPOSED else []
    return wrong


def check_slurm(folder: Path) -> list[str]:
    path = folder / "ads.sbatch"
    path.write_text(manifests("slurm", "--name", "ads", "--job", "my job.yaml"))
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    return [f"bash: {done.stderr}"] if done.returncode else []


def main() -> None:
    with tempfile.TemporaryDirectory() as units, tempfile.TemporaryDirectory() as scripts:
        found = {
            "kubernetes": check_kubernetes(),
            "systemd": check_systemd(Path(units)),
            "slurm": check_slurm(Path(scripts)),
        }
    print_table(["engine", "wrong"], [[engine, len(wrong)] for engine, wrong in found.items()])
    failures = [f"{engine}: {one}" for engine, wrong in found.items() for one in wrong]
    finish({"bar": "manifests", "kubernetes_versions": VERSIONS}, failures)


if __name__ == "__main__":
    main()
