"""`--metrics`: how commands are watched while they run."""

from __future__ import annotations

from typing import Annotated

import typer

MetricsOption = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve /metrics for Prometheus, /livez, /readyz and /status.json there; :PORT is on loopback. Needs the "
        "extra `metrics`.",
        show_default=False,
    ),
]
