"""`embershard status`: what every shard holds and does."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby, islice, pairwise, zip_longest
from typing import Annotated

import typer
from google.protobuf.message import Message as Protobuf
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from embershard.cli.security import TokenFileOption
from embershard.cli.shards import RunningShards, first_of_up, shards_of_up
from embershard.cli.tables import table_of
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.dash.shards import health_of, problem_of
from embershard.doctor.check import size
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import GetStatus, Request, ShardStatus, TableStatus
from embershard.proto.transport.addresses import shard_addresses, transport_for
from embershard.proto.transport.transport import Transport, Unreachable
from embershard.worker.client.lineage import shards_without_rows

_TIMEOUT = timedelta(seconds=2)  # a shard answers at once, even while its queue is long
_SAMPLE_SECONDS = 0.5
_WATCH_SECONDS = 1.0
_COLORS = {"serving": "green", "loading": "yellow", "recovering": "yellow", "ending": "yellow"}  # of health; else red


@dataclass(frozen=True)
class Seen:
    """One shard as it answered, or why it did not."""

    address: str
    status: ShardStatus | None = None
    requests_per_second: float = 0.0
    problem: str = ""
    answers: bool = False  # though with an error, as to a token that it does not know

    @property
    def is_serving(self) -> bool:
        """Whether it answers all requests, changes too."""
        now = self.status
        return now is not None and not (now.recovering or now.draining or problem_of(now))

    def as_json(self) -> dict[str, object]:
        """For --json; the keys of `status` are those of the ShardStatus message."""
        return {
            "address": self.address,
            "serving": self.is_serving,
            "requests_per_second": round(self.requests_per_second, 1),
            "problem": self.problem,
            "status": None if self.status is None else _as_json(self.status),
        }


def status(
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --watch, one per line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the state again every second, until Ctrl-C.")] = False,
) -> None:
    """Show every shard, its tables, and the members of the job; exit code 1 if a shard does not serve."""
    named = shard_addresses(ps) if ps is not None else shards_of_up() or [first_of_up()]
    certificates = tls_of(tls, tls_server_name)
    transports = [transport_for(address, tls=certificates) for address in named]
    try:
        rounds, console = _rounds(transports) if watch else islice(_rounds(transports), 1), Console()
        if as_json:
            for seen in rounds:
                typer.echo(json.dumps({"shards": [one.as_json() for one in seen]}))
        elif watch and console.is_terminal:
            with Live(console=console, screen=False, auto_refresh=False) as live:
                for seen in rounds:
                    live.update(_view(seen), refresh=True)
        else:
            for seen in rounds:
                console.print(_view(seen))
    finally:
        for transport in transports:
            transport.close()
    raise typer.Exit(0 if all(one.is_serving for one in seen) else 1)


def _as_json(message: Protobuf) -> dict[str, object]:
    # json_format.MessageToDict would write every 64-bit number as a string
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: object) -> object:
    if isinstance(value, Protobuf):
        return _as_json(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(part) for part in value]
    return value


def _rounds(transports: Sequence[Transport]) -> Iterator[list[Seen]]:
    """What the shards say, again and again; rates are over the time since the round before."""
    before, then = _ask(transports), time.monotonic()
    time.sleep(_SAMPLE_SECONDS if any(one.status for one in before) else 0)
    while True:
        after, now = _ask(transports), time.monotonic()
        yield [_with_rate(old, new, now - then) for old, new in zip(before, after, strict=True)]
        before, then = after, now
        time.sleep(_WATCH_SECONDS)


def _with_rate(old: Seen, new: Seen, seconds: float) -> Seen:
    if old.status is None or new.status is None or old.status.instance != new.status.instance:
        return new
    own = 1  # this question itself
    return dataclasses.replace(
        new, requests_per_second=max(0.0, (new.status.requests - old.status.requests - own) / max(seconds, 1e-9))
    )


def _ask(transports: Sequence[Transport]) -> list[Seen]:
    request: Request = GetStatus()
    pending = [(transport, transport.submit(request, _TIMEOUT)) for transport in transports]
    seen = []
    for transport, answer in pending:
        try:
            reply = answer.result()
        except Unreachable as error:
            why = f"within {_TIMEOUT.seconds} s" if error.reason == "no answer" else f"({error.reason})"
            remedy = "check that it runs and is not stopped, its port, and that this machine reaches it"
            problem = f"no answer {why}; {remedy}"
            seen.append(Seen(transport.address, problem=problem))
        except EmbershardError as error:
            seen.append(Seen(transport.address, problem=str(error), answers=True))
        else:
            assert isinstance(reply, ShardStatus)
            seen.append(Seen(transport.address, status=reply))
    return seen


def _view(seen: Sequence[Seen]) -> Group:
    problems = [f"[red]{escape(one.address)}[/]: {escape(one.problem)}" for one in seen if one.problem]
    problems += [
        f"[red]{escape(one.address)}[/]: {escape(problem)}"
        for one in seen
        if one.status is not None and (problem := problem_of(one.status))
    ]
    statuses = [one.status for one in seen if one.status is not None]
    lost = shards_without_rows(statuses)
    problems += [
        f"[red]{escape(one.address)}[/]: {_loss(one.status)}"
        for one in seen
        if one.status is not None and one.status in lost
    ]
    if len(counts := sorted({status.num_shards for status in statuses})) > 1:
        problems.append(
            f"these shards were started for {' and '.join(map(str, counts))} shards; name the shards of one job only, "
            "and start all of them with the same --of"
        )
    serving = [status for status in statuses if not status.recovering]
    views = [*_tables(seen), *_workers(serving), *_staleness(serving), *_logs(serving), *_recoveries(statuses)]
    return Group(_shards(seen, lost), *views, *problems)


def _shards(seen: Sequence[Seen], lost: Sequence[ShardStatus]) -> Table:
    view = table_of(("shard", "address", "health"), ("rows", "tables", "used", "left", "req/s", "memory", "up"))
    for one in seen:
        now = one.status
        if now is None:
            view.add_row("?", escape(one.address), f"[red]{'error' if one.answers else 'down'}[/]")
            continue
        view.add_row(
            f"{now.shard}/{now.num_shards}",
            escape(one.address),
            _health(now, has_lost_rows=now in lost),
            f"{sum(table.rows for table in now.tables):,}",
            str(len(now.tables)),
            size(now.used_bytes),
            size(max(0, now.budget_bytes - now.used_bytes)),
            f"{one.requests_per_second:,.0f}",
            size(now.resident_bytes),
            str(timedelta(seconds=int(now.uptime_seconds))),
        )
    return view


def _logs(statuses: Sequence[ShardStatus]) -> list[Table]:
    """The shards' logs; nothing where none writes one."""
    logged = [status for status in statuses if status.log_bytes or status.base_lsn]
    if not logged:
        return []
    figures = ("\nterm", "base\nLSN", "log\nbytes", "not\nwritten", "recovery\nwould take")
    view = table_of(("\nshard", "\ndurability"), figures)
    for one in logged:
        base = f"{one.base_lsn:,}" if one.base_lsn else "none"
        sizes = size(one.log_bytes), size(one.log_waiting_bytes)
        view.add_row(str(one.shard), one.durability, str(one.term), base, *sizes, _duration(one.recovery_seconds))
    return [view]


def _recoveries(statuses: Sequence[ShardStatus]) -> list[Table]:
    """How far shards are that recover their rows; nothing where there are none."""
    recovering = [status for status in statuses if status.recovering]
    if not recovering:
        return []
    view = table_of(("\nshard",), ("log\nbytes", "\ndone", "about\nleft"))
    for one in recovering:
        done = f"{min(1.0, one.recovered_bytes / max(1, one.log_bytes)):.0%}"
        left = "waits" if one.waits_for_room else _duration(one.recovery_seconds)
        view.add_row(str(one.shard), size(one.log_bytes), done, left)
    return [view]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _loss(status: ShardStatus) -> str:
    minutes = int(status.uptime_seconds / 60)
    return (
        f"shard {status.shard} lost its rows {minutes} minute{'' if minutes == 1 else 's'} ago; restore a checkpoint "
        "onto all shards, or restart all of them"
    )


def _health(status: ShardStatus, *, has_lost_rows: bool) -> str:
    health = health_of(status, lost=has_lost_rows)
    return f"[{_COLORS.get(health, 'red')}]{health}[/]"


def _tables(seen: Sequence[Seen]) -> list[Table]:
    """Every table, summed over the shards; nothing where there are none."""
    parts: dict[str, list[TableStatus]] = {}
    for one in seen:
        for table in one.status.tables if one.status else ():
            parts.setdefault(table.name, []).append(table)
    if not parts:
        return []
    firsts = [mine[0] for mine in parts.values()]  # of which all shards say the same but for sizes
    coded = any(codec not in ("", "none") for first in firsts for codec in (first.push_codec, first.pull_codec))
    codecs = ("\npush", "\npull") if coded else ()
    view = table_of(("\ntable", "\noptimizer", *codecs), ("\ndim", "\nrows", "\nbytes"))
    for name, mine in parts.items():
        rows, held = sum(part.rows for part in mine), sum(part.bytes for part in mine)
        used = (mine[0].push_codec, mine[0].pull_codec) if coded else ()
        view.add_row(name, mine[0].optimizer, *used, str(mine[0].dim), f"{rows:,}", size(held))
    return [view]


def _workers(statuses: Sequence[ShardStatus]) -> list[Table]:
    """A table of the members by the shard with the oldest heartbeats; nothing where there is no member."""
    members = sorted((member for status in statuses for member in status.members), key=lambda m: m.worker)
    if not members:
        return []
    bound = max(status.staleness for status in statuses)
    view = table_of(("\nworker",), ("\nclock", "\nlease", f"staleness {'off' if bound < 0 else bound}\nstate"))
    closed = min(status.clock for status in statuses)
    furthest = max(member.clock for member in members)
    for worker, of_one in groupby(members, key=lambda member: member.worker):
        parts = list(of_one)
        clock = min(part.clock for part in parts)
        waited_for = bound >= 0 and clock <= closed < furthest
        state = "paused" if any(part.paused for part in parts) else "waited for" if waited_for else "trains"
        view.add_row(str(worker), f"{clock:,}", f"{min(part.lease_seconds for part in parts):.1f} s", state)
    return [view]


def _staleness(statuses: Sequence[ShardStatus]) -> list[Table]:
    """The histogram of the staleness really seen; nothing where nothing was."""
    counts = [sum(column) for column in zip_longest(*(status.staleness_seen for status in statuses), fillvalue=0)]
    if not any(counts):
        return []
    view = table_of(("\nstaleness",), ("\npushes", "\nshare"))
    ends = [1, 2, 3, 4, 8, 16, len(counts) - 1, len(counts)]
    for first, end in pairwise([0, *ends]):
        pushes = sum(counts[first:end])
        name = str(first) if end == first + 1 else f"{first} to {end - 1}"
        name = f"{name} or more" if end == len(counts) else name
        if pushes:
            view.add_row(name, f"{pushes:,}", f"{pushes / sum(counts):.1%}")
    return [view]
