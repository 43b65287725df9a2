"""`embershard compare`: the same job in several arms, paired by seed, and whether they paid."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from embershard.cli.folders import folder
from embershard.cli.job_file import DataOption
from embershard.cli.security import TokenFileOption, token_words
from embershard.cli.shards import is_from_environment, shards_option
from embershard.cli.signals import ended_by_signals
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of, tls_words
from embershard.cli.user_code import check_user_code, try_job
from embershard.compare.results import UNLIMITED, Arm, Bandwidth, write_results
from embershard.compare.run.arms import BadArm, find_arms
from embershard.compare.run.cluster import prepare_shards
from embershard.compare.run.engine import Engine
from embershard.compare.run.folder import REPEAT, Folder, NoRuns, read_runs
from embershard.compare.run.netns import Namespaces, check_namespaces
from embershard.compare.run.plan import MOST_SEEDS, ComparisonPlan, Experiment
from embershard.compare.run.progress import Show, name_of
from embershard.compare.run.runs import SAID, RunSetup
from embershard.proto.errors import CannotWrite, EmbershardError
from embershard.proto.transport.addresses import shard_addresses
from embershard.proto.transport.emulated_link import parse_bandwidth
from embershard.proto.user_modules import sha256_of_modules
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job

NEEDED = ("scipy", "jinja2", "matplotlib")


class NoReport(EmbershardError):
    """A package that a comparison needs is not installed."""

    template = "a comparison needs {package}: pip install 'embershard[compare]'"


class RunsFailed(EmbershardError):
    """The report lacks runs; it is written."""

    template = (
        "{failed} of {runs} runs failed twice; the first of them: {first}; its output: {log}; the same command runs "
        "them again"
    )


def compare(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file, YAML.")],
    arms: Annotated[
        list[str],
        typer.Option(
            help="Variants to compare, the baseline first: codecs (none,int8,topk:0.01), or a field of the job with "
            "its values (strategy=ddp,ps); may be repeated."
        ),
    ],
    ps: Annotated[
        str | None,
        shards_option(
            "The shards must be empty; each run drops its tables at its end.  [default: each run starts its own shards]"
        ),
    ] = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --ps: drop the tables that the shards hold, and start.")
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            help="Number of seeds, each a run of every arm; fewer than 2 give no interval.", min=1, max=MOST_SEEDS
        ),
    ] = 5,
    bandwidth: Annotated[
        str,
        typer.Option(
            help="Bandwidths of the link between each worker and the shards; quality is measured without limit."
        ),
    ] = UNLIMITED,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=folder, metavar="<path>", help="Folder of the runs and the report.  [default: runs/compare-JOB]"
        ),
    ] = None,
    tune: Annotated[
        str, typer.Option(help="Multiples of the job's learning rates to try for each arm, such as 0.5,1,2.")
    ] = "1",
    speed_steps: Annotated[int, typer.Option(help="Steps of a run on a limited link.", min=4)] = 100,
    full: Annotated[bool, typer.Option("--full", help="Make full runs on limited links as well.")] = False,
    netns: Annotated[
        bool,
        typer.Option(
            "--netns", help="Limit a real link between two network namespaces instead of emulating it; requires root."
        ),
    ] = False,
    margin: Annotated[
        float | None,
        typer.Option(
            help="Difference of the deciding metric that counts as equivalent.  [default: AUC 0.0005, HR 0.003]"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.field=value, overrides the job file in all arms; may be repeated."),
    ] = None,
    data: DataOption = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Module with codecs or row optimizers; may be repeated.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Report the existing runs, and make none.")
    ] = False,
) -> None:
    """Train several variants of a job (arms) with the same seeds, and report which of them pay.

    If it was stopped, the same command continues with the first missing run; with more arms, seeds or bandwidths it
    makes the missing runs. The exit code is 1 if runs failed.
    """
    links, multiples = _bandwidths(bandwidth), _multiples(tune)
    if netns and is_from_environment(context):
        ps = None
    _check(margin, netns, ps)
    certificates = None if ps is None else tls_of(tls, tls_server_name)  # shards started here are on Unix sockets
    shards = () if ps is None else tuple(shard_addresses(ps))
    sets = tuple(overrides or ())
    base, found = load_job(job, sets, data), _arms(arms, job, sets, data)
    if shards:
        base, found = _on_shards(len(shards), base, found)
    code: dict[str, str] = {}
    if not report_only:
        check_user_code([arm_job for _, arm_job in found.values()], imports or (), starts_shards=not shards)
        code = {**sha256_of_modules(imports or ()), **_try_arms(found, job, sets, data, imports or ())}
    experiment = Experiment(
        job=base.model_dump(mode="json"),
        overrides=sets,
        imports=tuple(imports or ()),
        arms=tuple((arm.label, arm.settings) for arm, _ in found.values()),
        bandwidths=tuple(link.label for link in links),
        seeds=tuple(base.train.seed + i for i in range(seeds)),
        multiples=multiples,
        speed_steps=None if full else speed_steps,
        link="network namespace" if netns else "token bucket",
        ps=shards,
        code_sha256=code,
    )
    if shards and not report_only:
        prepare_shards(shards, replace=replace, tls=certificates)
    setup = RunSetup(
        job=job,
        data=data,
        folder=output or Path("runs") / f"compare-{job.stem}",
        tls=certificates,
        words=(*tls_words(certificates), *token_words(context, token_file)) if shards else (),
    )
    with ended_by_signals():
        _carry_out(ComparisonPlan(experiment, found, links), setup, margin, report_only=report_only)


def _check(margin: float | None, netns: bool, ps: str | None) -> None:
    """Check what would otherwise fail after hours: options, packages, and network namespaces."""
    if netns and ps is not None:
        raise typer.BadParameter("--netns starts shards behind a link of its own: --ps has no meaning with it")
    if margin is not None and not (0 < margin < math.inf):
        raise typer.BadParameter(f"--margin must be above 0, got {margin}")
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise NoReport(package=missing[0])
    if netns:
        check_namespaces()


def _arms(groups: list[str], job: Path, sets: tuple[str, ...], data: Path | None) -> dict[str, tuple[Arm, Job]]:
    try:
        return find_arms(groups, job, sets, data)
    except BadArm as error:
        raise typer.BadParameter(f"--arms: {error}") from None


def _on_shards(shards: int, base: Job, found: dict[str, tuple[Arm, Job]]) -> tuple[Job, dict[str, tuple[Arm, Job]]]:
    """The job and its arms with as many shards as run already, whatever the job says."""
    if any(job.shards != base.shards for _, job in found.values()):
        raise typer.BadParameter("--ps names shards that run already: an arm cannot have a number of its own")
    update = {"shards": shards}
    arms = {label: (arm, job.model_copy(update=update)) for label, (arm, job) in found.items()}
    return base.model_copy(update=update), arms


def _try_arms(
    found: dict[str, tuple[Arm, Job]], path: Path, sets: tuple[str, ...], data: Path | None, imports: Sequence[str]
) -> dict[str, str]:
    """Try the data and the model of every arm, those that several arms have in common once; as `try_job`."""
    code: dict[str, str] = {}
    tried: list[tuple[object, ...]] = []
    for arm, job in found.values():
        parts = (job.data, job.model, job.loss, job.metrics, job.callbacks, job.strategy, job.train.batch_size)
        if parts not in tried:
            tried.append(parts)
            code |= try_job(job, path, [*sets, *arm.settings], data, imports, typer.echo)
    return code


def _carry_out(plan: ComparisonPlan, setup: RunSetup, margin: float | None, *, report_only: bool) -> None:
    """Make the runs that the folder does not hold, and report. RunsFailed; NoRuns where none would be reported."""
    if report_only:
        found = read_runs(setup.folder)
        if not any(task.key in found for task in [*plan.tuning(), *plan.judged()]):
            raise NoRuns(folder=str(setup.folder))
    show = Show()
    with ExitStack() as stack:
        folder = stack.enter_context(Folder(setup.folder, plan.experiment))
        limited = plan.experiment.link == "network namespace" and not report_only
        engine = Engine(plan, folder, setup, show, stack.enter_context(Namespaces()) if limited else None)
        try:
            if not report_only:
                engine.run()
        except (KeyboardInterrupt, SystemExit):
            command = shlex.join(_command(plan.experiment))
            show.say(f"stopped; the same command continues with the first missing run: {command}")
            show.say("with --report-only it reports the existing runs")
            raise
        _report(engine, plan, folder, setup.job, margin, show)


def _report(engine: Engine, plan: ComparisonPlan, folder: Folder, job: Path, margin: float | None, show: Show) -> None:
    # here: scipy takes part of a second, which a mistake in the words need not wait for
    from embershard.compare.analysis.gather import gather
    from embershard.compare.report.report import write_report
    from embershard.compare.report.terminal import print_summary

    results = gather(
        plan,
        folder.runs,
        job_file=job,
        command=_command(plan.experiment),
        chosen=engine.chosen,
        complete=engine.complete,
        margin=margin,
    )
    try:
        write_results(results, folder.path)
        write_report(results, folder.path)
    except OSError as error:
        path = error.filename or folder.path
        raise CannotWrite(path=str(path), reason=error.strerror or str(error), remedy=REPEAT) from None
    print_summary(results, Console(highlight=False))
    show.say(f"written: {folder.path / 'report.html'}, report.md, results.json, runs.jsonl")
    failed = [run for run in results.runs if not run.ok]
    if failed:
        log = folder.path / failed[0].folder / SAID
        raise RunsFailed(failed=len(failed), runs=len(results.runs), first=name_of(failed[0]), log=str(log))


def _command(experiment: Experiment) -> tuple[str, ...]:
    """The command that made the runs: as it was called, without --report-only, and with shards of the environment."""
    words = [word for word in sys.argv[1:] if word != "--report-only"]
    if experiment.ps and not any(word.partition("=")[0] == "--ps" for word in words):
        words += ["--ps", ",".join(experiment.ps)]
    return ("embershard", *words)


def _bandwidths(text: str) -> tuple[Bandwidth, ...]:
    """The links, the slowest first; the one without limit is always among them."""
    found: dict[float, Bandwidth] = {math.inf: Bandwidth(label=UNLIMITED, bits_per_second=None)}
    for part in text.split(","):
        label = re.sub(r"\s", "", part).lower()
        try:
            bits = parse_bandwidth(label)
        except ValueError as error:
            raise typer.BadParameter(f"--bandwidth: {error}") from None
        if bits is None:
            continue
        if bits in found:
            raise typer.BadParameter(f"--bandwidth: {found[bits].label} and {label} are the same")
        found[bits] = Bandwidth(label=label, bits_per_second=bits)
    return tuple(found[bits] for bits in sorted(found))


def _multiples(text: str) -> tuple[float, ...]:
    """Multiples of the learning rates, 1 among them."""
    try:
        found = sorted({1.0, *(float(part) for part in text.split(","))})
    except ValueError:
        raise typer.BadParameter(f"--tune must be numbers separated by commas, such as 0.5,1,2; got {text!r}") from None
    if not all(0 < multiple < math.inf for multiple in found):
        raise typer.BadParameter(f"--tune must be multiples above 0, got {text!r}")
    return tuple(found)
