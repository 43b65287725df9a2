"""`embershard doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embershard.cli.app import printable
from embershard.cli.job_file import DataOption
from embershard.cli.security import TokenFileOption
from embershard.cli.shards import RunningShards, shards_of_up
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.doctor.case import Case, open_case
from embershard.doctor.check import Check, Finding, Level
from embershard.doctor.checks import SUBJECTS

_COLORS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One check and what it found."""

    subject: str
    check: Check
    finding: Finding

    @property
    def remedy(self) -> str:
        """Return the remedy: empty where all is well, unless the finding itself has one."""
        general = "" if self.finding.level is Level.OK else self.check.remedy
        return self.finding.remedy or general

    def as_json(self) -> dict[str, str]:
        """Return the answer as a dict for --json."""
        return {
            "subject": self.subject,
            "check": self.check.name,
            "level": self.finding.level,
            "found": self.finding.text,
            "remedy": self.remedy,
        }


def doctor(
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    job: Annotated[Path | None, typer.Option(help="Check whether the job of this file can run here.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of a run: show which parts of its time to reduce.")] = None,
    data: DataOption = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Check whether shards can keep their event logs in this folder.")
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...", help="host:port of the metrics of shards and workers, separated by commas."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine, and the named shards, job and run; exit code 1 if a check fails."""
    named = shards_of_up() if ps is None else [ps]
    pages = [address.strip() for address in metrics.split(",") if address.strip()]
    case = open_case(",".join(named), job, data, run, log_dir, tls_of(tls, tls_server_name), pages)
    answers = list(_answers(case))
    failed = any(answer.finding.level is Level.FAIL for answer in answers)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [answer.as_json() for answer in answers]}))
    else:
        _show(Console(highlight=False), answers)
    raise typer.Exit(int(failed))


def _answers(case: Case) -> Iterator[Answer]:
    for subject, checks in SUBJECTS.items():
        for check in checks:
            if (finding := check.run(case)) is not None:
                yield Answer(subject, check, finding)


def _show(console: Console, answers: Sequence[Answer]) -> None:
    view = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    view.add_column(no_wrap=True)
    view.add_column(no_wrap=True)
    view.add_column(overflow="fold")
    subject = ""
    for answer in answers:
        if answer.subject != subject:
            subject = answer.subject
            view.add_row("", f"[bold]{subject}[/]", "")
        level = answer.finding.level
        remedy = f"\n[bold]->[/] {escape(printable(answer.remedy))}" if answer.remedy else ""
        text = escape(printable(answer.finding.text)) + remedy
        view.add_row(f"[{_COLORS[level]}]{level}[/]", answer.check.name, text)
    counts = Counter(answer.finding.level for answer in answers)
    console.print(view)
    console.print(", ".join(f"{counts[level]} {level}" for level in reversed(Level) if counts[level]))
