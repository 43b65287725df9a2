"""`embershard bench`: pull and push, training, and how their cost grows, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from embershard.benchmark.conditions import MachineConditions
from embershard.benchmark.measure import measure_pull_push, measure_train
from embershard.benchmark.picture import can_draw, draw_curves, draw_parts
from embershard.benchmark.report import curve_row, figures, parts_table, points_json, result_json, write_json
from embershard.benchmark.settings import PullPush, Train, TransportName
from embershard.benchmark.sweep import AnyResult, Axis, Sweep, plan, run_sweep
from embershard.cli.security import TokenFileOption
from embershard.cli.signals import ended_by_signals
from embershard.cli.tls import TLSOption
from embershard.proto.spec import OPTIMIZERS
from embershard.proto.transport.addresses import shard_addresses
from embershard.worker.reporting.log import make_folder

M = TypeVar("M", bound=BaseModel)

bench = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure pull and push, training, and how their cost scales."
)

Transport = Annotated[
    TransportName | None,
    typer.Option(
        help="Transport to the shards started here. stream, the default, uses a Unix socket; local runs the shards in "
        "the worker's process."
    ),
]
Ps = Annotated[
    str,
    typer.Option(
        help="Measure these shards (host:port of each, of any transport, separated by commas, or file:DIR) instead of "
        "starting some; the rows stay there."
    ),
]
Shards = Annotated[int | None, typer.Option(help="Shards to start.  [default: 2]", min=1, max=4096)]
Workers = Annotated[int, typer.Option(help="Worker processes.", min=1, max=1024)]
Skew = Annotated[float, typer.Option(help="Exponent of the Zipf distribution of the ids; 0: uniform.", min=0, max=10)]
Warmup = Annotated[
    int,
    typer.Option(help="Steps before the measurement begins; after fewer than 32, new rows are still created.", min=0),
]
Steps = Annotated[int, typer.Option(help="Steps per round and worker.", min=1)]
Rounds = Annotated[int, typer.Option(help="Number of rounds; the printed speeds are their medians.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of ids, gradients and first weights.", min=0)]
Output = Annotated[Path | None, typer.Option(help="Folder for the result, as JSON and as a chart (SVG).")]


@bench.command()
def ps(
    transport: Transport = None,
    ps: Ps = "",
    tls: TLSOption = None,
    token_file: TokenFileOption = None,
    shards: Shards = None,
    workers: Workers = 1,
    rows: Annotated[int, typer.Option(help="Ids are 0..ROWS-1.", min=1)] = 1_000_000,
    ids: Annotated[int, typer.Option(help="Ids per step and worker, duplicates included.", min=1)] = 65_536,
    skew: Skew = 1.2,
    dim: Annotated[int, typer.Option(help="Floats per row.", min=1)] = 64,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "adagrad",
    fill: Annotated[bool, typer.Option("--fill", help="Create every row before the measurement begins.")] = False,
    warmup: Warmup = 32,
    steps: Steps = 50,
    rounds: Rounds = 3,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Measure pulls and pushes: each step pulls the rows of some ids and pushes a gradient for each of them.

    A step makes its ids unique and groups them by shard, pulls the rows, and pushes as many gradients.
    """
    settings = _checked(
        PullPush, **_shards(transport, ps, shards), tls=str(tls or ""), workers=workers, rows=rows, ids=ids,
        skew=skew, dim=dim, optimizer=optimizer, fill=fill, warmup=warmup, steps=steps, rounds=rounds, seed=seed,
    )  # fmt: skip
    _measure(lambda: measure_pull_push(settings), output, "ps")


@bench.command()
def train(
    transport: Transport = None,
    ps: Ps = "",
    tls: TLSOption = None,
    token_file: TokenFileOption = None,
    shards: Shards = None,
    workers: Workers = 1,
    batch: Annotated[int, typer.Option(help="Samples per step and worker.", min=1)] = 2048,
    prefetch: Annotated[str, typer.Option(help="Staleness of prefetch (0, 1, ...), or off.")] = "0",
    rows: Annotated[int, typer.Option(help="Number of ids of all 26 features together.", min=26)] = 2_600_000,
    skew: Skew = 1.15,
    dim: Annotated[int, typer.Option(help="Floats per row.", min=1)] = 16,
    warmup: Warmup = 32,
    steps: Steps = 20,
    rounds: Rounds = 3,
    seed: Seed = 0,
    torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Also measure torch in one process.")] = True,
    output: Output = None,
) -> None:
    """Train DLRM (26 categorical and 13 dense features) with every weight on the shards, one thread per worker.

    In alternate rounds the same model trains in one process: torch.optim.Adagrad, sparse gradients, one thread.
    """
    if not (prefetch == "off" or (prefetch.isascii() and prefetch.isdigit())):
        raise typer.BadParameter(f"--prefetch must be a staleness of 0 or more, or off; got {prefetch!r}")
    settings = _checked(
        Train, **_shards(transport, ps, shards), tls=str(tls or ""), workers=workers, batch=batch, rows=rows,
        skew=skew, dim=dim,
        prefetch=None if prefetch == "off" else int(prefetch), warmup=warmup, steps=steps, rounds=rounds, seed=seed,
        beside_torch=torch,
    )  # fmt: skip
    _measure(lambda: measure_train(settings), output, "train")


@bench.command()
def scale(
    over: Annotated[list[Axis] | None, typer.Option(help="Curve to measure; may be repeated.  [default: all]")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows in memory.")] = "100_000,1_000_000,10_000_000",
    shards: Annotated[str, typer.Option(help="Numbers of shards.")] = "1,2,4,8",
    ids: Annotated[
        str, typer.Option(help="Ids per step, for each number of shards, of the curve `messages`.")
    ] = "256,4096,65536",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2,4",
    batch: Annotated[str, typer.Option(help="Samples per step.")] = "512,2048,8192",
    dim: Annotated[int, typer.Option(help="Floats per row.", min=1)] = 16,
    prefetch: Annotated[int, typer.Option(help="Staleness of prefetch in training.", min=0)] = 2,
    steps: Steps = 20,
    rounds: Rounds = 3,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Repeat `bench ps` or `bench train` with growing numbers of rows, shards or workers, or a growing batch.

    The curves rows and messages (shards, and ids per step) use `bench ps`; shards, workers and batch use `bench train`.
    """
    lists = {"rows": rows, "shards": shards, "ids": ids, "workers": workers, "batch": batch}
    numbers = {name: _numbers(name, text) for name, text in lists.items()}
    axes = tuple(over or Axis)
    sweep = _checked(Sweep, axes=axes, **numbers, dim=dim, prefetch=prefetch, steps=steps, rounds=rounds, seed=seed)
    folder = output and make_folder(output)
    typer.echo(str(MachineConditions.now()))
    with ended_by_signals():
        points = run_sweep(plan(sweep), lambda curve, result: typer.echo(curve_row(curve, result)))
    if folder is not None:
        write_json(points_json(points), folder / "scale.json")
        _draw(folder / "scale.svg", lambda path: draw_curves(points, path))


def _shards(transport: TransportName | None, ps: str, shards: int | None) -> dict[str, object]:
    """Settings of the shards. BadParameter for what contradicts itself."""
    if not ps:
        return {"transport": transport or TransportName.STREAM, "shards": shards or 2}
    if transport is not None or shards is not None:
        raise typer.BadParameter(
            "--ps names shards that run already, and their addresses the transport: leave out --shards and --transport"
        )
    addresses = shard_addresses(ps)
    return {"ps": tuple(addresses), "shards": len(addresses)}


def _checked(kind: type[M], **values: object) -> M:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = next((str(part) for part in first["loc"] if isinstance(part, str)), "")
        text = first["msg"].removeprefix("Value error, ")
        raise typer.BadParameter(f"--{place}: {text}; got {first['input']!r}" if place else text) from None


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--{name} must be numbers separated by commas, got {text!r}") from None


def _measure(measure: Callable[[], AnyResult], output: Path | None, name: str) -> None:
    from rich.console import Console

    folder = output and make_folder(output)  # a bad folder is a mistake to hear of now
    with ended_by_signals():
        result = measure()
    typer.echo(str(result.conditions))
    Console().print(parts_table(result))
    for line in figures(result):
        typer.echo(line)
    if folder is not None:
        write_json(result_json(result), folder / f"{name}.json")
        _draw(folder / f"{name}.svg", lambda path: draw_parts(result, path))


def _draw(path: Path, draw: Callable[[Path], None]) -> None:
    if not can_draw():
        typer.echo("no chart: it needs matplotlib, pip install 'embershard[bench]'", err=True)
        return
    draw(path)
    typer.echo(f"written: {path} and {path.with_suffix('.json').name}")
