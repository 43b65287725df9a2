"""Line and branch coverage of every folder of ours, from the data that `make coverage` collected.

A folder's figure is the share of its lines and branches together that the tests ran, in their own process and in those
that they started. Compiled functions are left out, because coverage does not see machine code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path, PurePath

from timing import print_table

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def folder_of(path: PurePath) -> str:
    """worker/session, and below src/embershard a level more."""
    depth = 3 if path.parts[0] == "src" else 2
    return "/".join(path.parts[:-1][:depth])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "coverage.json")
        subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", report], check=True)
        files = json.loads(report.read_text())["files"]
    totals: dict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for path, its in files.items():
        for folder in (folder_of(PurePath(path)), "all"):
            totals[folder] = [a + its["summary"][name] for a, name in zip(totals[folder], COUNTS, strict=True)]
    rows, result = [], {}
    for folder in sorted(totals, key=lambda name: (name == "all", name)):
        lines, of_lines, branches, of_branches = totals[folder]
        if not of_lines:
            continue
        both = 100 * (lines + branches) / (of_lines + of_branches)
        rows.append([folder, f"{lines}/{of_lines}", f"{branches}/{of_branches}", both])
        result[folder] = round(both, 2)
    print_table(["folder", "lines", "branches", "both, %"], rows)
    print(json.dumps({"bench": "coverage", "percent": result}))


if __name__ == "__main__":
    main()
