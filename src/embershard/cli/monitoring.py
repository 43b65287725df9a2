"""`--metrics` and `--log-format`: how commands are watched while they run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from embershard.proto.errors import TracingNotInstalled
from embershard.proto.monitoring.exporter import MetricsServer
from embershard.proto.monitoring.logs import LogFormat, logs_json
from embershard.proto.monitoring.metrics import WORKER_METRICS
from embershard.proto.monitoring.tracing import is_collector_url, is_tracing_installed

MetricsOption = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve /metrics for Prometheus, /livez, /readyz and /status.json at this host:port; :PORT is on loopback.",
        show_default=False,
    ),
]

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", help="Format of log output: text, or json (one object per log message, for log collectors)."
    ),
]


def _collector(url: str) -> str:
    """The URL of --trace, if a collector can have it and the packages are there. TracingNotInstalled."""
    if url and not is_collector_url(url):
        raise typer.BadParameter(f"{url!r} is no URL of a collector; write http://host:port, as http://localhost:4318")
    if url and not is_tracing_installed():
        raise TracingNotInstalled()
    return url


TraceOption = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="URL",
        callback=_collector,
        help="Send traces to the OpenTelemetry collector at this URL (http://localhost:4318). Needs the extra "
        "`tracing`.",
        show_default=False,
    ),
]
TraceEveryOption = Annotated[int, typer.Option("--trace-every", help="Trace every N-th step.", min=1)]

_log = logging.getLogger("embershard.cli")


def say(line: str, *, err: bool = False) -> None:
    """Tell the user something: on stdout or stderr, or in the log where that is JSON."""
    if logs_json():
        _log.log(logging.WARNING if err else logging.INFO, line)
    else:
        typer.echo(line, err=err)


@contextmanager
def open_metrics(address: str, rank: int, output: Path | None) -> Iterator[MetricsServer | None]:
    """The server of a worker's --metrics, which shows nothing yet; None where none was asked for."""
    if not address:
        yield None
        return
    run = "" if output is None else output.name
    with MetricsServer(address, WORKER_METRICS, {"worker": str(rank), "run": run}) as server:
        yield server
