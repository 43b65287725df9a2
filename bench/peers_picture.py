"""The result of bench/peers.py as a picture: `python bench/peers_picture.py peers.json peers.svg`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "embershard"
TITLES = {
    "ps": "pull and push, 2 shards, 1 worker: ms per step (less is better)",
    "dlrm1-512": "DLRM, 2 shards, 1 worker, batch 512: thousand samples per second",
    "dlrm1": "DLRM, 2 shards, 1 worker, batch 2,048: thousand samples per second",
    "dlrm1-8192": "DLRM, 2 shards, 1 worker, batch 8,192: thousand samples per second",
    "dlrm2": "DLRM, 2 shards, 2 workers: thousand samples per second",
}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A panel for every workload, a bar for every program, as SVG. Needs matplotlib."""
    from matplotlib.figure import Figure

    workloads = [key for key in TITLES if key in result]
    counts = [len(result[key]["programs"]) for key in workloads]
    figure = Figure(figsize=(9, 1 + sum(0.6 + 0.3 * count for count in counts)), layout="constrained")
    panels = figure.subplots(len(workloads), 1, squeeze=False, height_ratios=counts).flat
    for axes, key in zip(panels, workloads, strict=True):
        programs = result[key]["programs"]
        if key == "ps":
            values = {label: its["median_ms"] for label, its in programs.items()}
        else:
            values = {label: its["samples_per_s"] / 1000 for label, its in programs.items()}
        labels = sorted(values, key=values.__getitem__, reverse=key != "ps")
        colors = ["#dd6b20" if label.startswith(OURS) else "#2b6cb0" for label in labels]
        bars = axes.barh(range(len(labels)), [values[label] for label in labels], color=colors)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_title(TITLES[key], loc="left", fontsize=10)
    figure.text(0.01, -0.02, f"{result['machine']}; medians of {result['rounds']} rounds", fontsize=8)
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
