"""Turn the runs of a folder into the results of the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from embershard.benchmark.conditions import MachineConditions
from embershard.compare.analysis.conclusions import conclude, is_judged
from embershard.compare.results import ArmRun, Results, RunConditions
from embershard.compare.run.plan import SKIPPED_SHARE, ComparisonPlan, can_be_limited, tries_codecs
from embershard.compare.run.progress import name_of
from embershard.compare.run.runs import SAID
from embershard.compare.units import is_or_are
from embershard.worker.job.job import Job


def gather(
    plan: ComparisonPlan,
    runs: Mapping[str, ArmRun],
    *,
    job_file: Path,
    command: Sequence[str],
    chosen: Mapping[str, float],
    complete: bool,
    margin: float | None,
) -> Results:
    """Judge the runs that the plan names among all runs of the folder; `margin` as of conclude."""
    experiment, base = plan.experiment, Job.model_validate(plan.experiment.job)
    arms = [arm for arm, _ in plan.arms.values()]
    asked = {task.key for task in plan.tasks(chosen)}
    made = [run for run in runs.values() if run.key in asked]
    judged, deciding = next((run.splits for run in made if run.ok), ("", ""))
    metrics = sorted({base.metric, *(metric for run in made for metric in run.metrics)})
    jobs = [job for _, job in plan.arms.values()]  # an arm may have a metric of its own
    results = Results(
        name=f"{base.model.name} on {base.data.reader}",
        job_file=str(job_file),
        job=experiment.job,
        command=tuple(command),
        metric=base.metric,
        split=judged,
        deciding_split=deciding,
        lower_is_better=tuple(metric for metric in metrics if any(job.is_best_lowest(metric) for job in jobs)),
        reachable=_reachable(made),
        workers=base.workers,
        shards=base.shards if base.has_shards else 0,
        link=experiment.link,
        baseline=arms[0].label,
        arms=tuple(arms),
        bandwidths=tuple(plan.bandwidths),
        seeds=experiment.seeds,
        full=plan.full,
        speed_steps=experiment.speed_steps,
        skipped_share=SKIPPED_SHARE,
        multiples=experiment.multiples,
        tuned=chosen if len(experiment.multiples) > 1 else {},
        complete=complete,
        seconds=sum(run.total_seconds for run in made),
        runs=tuple(made),
        quality=(),
        speeds=(),
        volumes=(),
        break_even=(),
        verdicts=(),
        notes=(*_notes(plan, made, judged, deciding), *_left_out(len(runs) - len(made))),
        conditions=_conditions(made),
    )
    return conclude(results, margin)


def _reachable(runs: Sequence[ArmRun]) -> dict[str, float]:
    """The best value that any model can reach, as a mean over runs: generated data differs with every seed."""
    known = [run.reachable for run in runs if run.ok and run.kind == "quality"]
    metrics = [metric for metric in known[0] if is_judged(metric)] if known else []
    return {
        metric: statistics.fmean(one[metric] or 0.0 for one in known)
        for metric in metrics
        if all(one.get(metric) is not None for one in known)
    }


def _notes(plan: ComparisonPlan, runs: Sequence[ArmRun], judged: str, deciding: str) -> Iterator[str]:
    for arm, _ in plan.arms.values():
        if arm.added:
            yield f"The arm {arm.label} was added: to beat float32 alone proves little."
    if len(plan.experiment.seeds) == 1:
        yield "One seed gives no intervals: any difference may be chance."
    limited = [bandwidth.label for bandwidth in plan.bandwidths if bandwidth.bits_per_second is not None]
    if limited and not plan.full:
        yield (
            f"Quality comes from whole runs without limit. Speeds at {', '.join(limited)} come from runs of "
            f"{plan.experiment.speed_steps} steps, at a constant learning rate and with dgc at its last density."
        )
    for label, (_, job) in plan.arms.items() if limited else ():
        if tries_codecs(job):
            yield (
                f"{label}: it chooses by the link, so its quality and its bytes, which are those without limit, may be "
                "of other codecs than its speed on a limited link. The quality of a codec is that of an arm that names "
                "it."
            )
    yield f"Speeds leave out the first {SKIPPED_SHARE:.0%} of a run's steps."
    apart = [label for label, (_, job) in plan.arms.items() if not can_be_limited(job)]
    if apart and limited:
        yield (
            f"{', '.join(apart)}: torch all-reduces the dense weights past the links to the shards, so this was "
            f"measured without limit only."
        )
    if limited and plan.experiment.link == "network namespace":
        yield "All workers share one link, which has the bandwidth times the number of workers."
    if len(plan.experiment.multiples) > 1:
        tried = ", ".join(f"{multiple:g}" for multiple in plan.experiment.multiples)
        yield (
            f"Each arm's own learning rate is the best of {tried} times the job's on the split {deciding}, with "
            f"the seed {plan.tuning_seed}, which is in no other figure."
        )
    if judged and judged == deciding:
        yield f"The data has no split but {judged}, so a run's best evaluation is chosen on the split that is judged."
    for label in plan.arms:
        skipped = sum(run.skipped_rows for run in runs if run.arm == label)
        if skipped:
            yield f"{label}: {skipped:,} gradient rows held NaN or Inf and were not applied."
    failed = [run for run in runs if not run.ok]
    if failed:
        are = is_or_are(len(failed))
        yield (
            f"{len(failed)} of {len(runs)} runs failed twice and {are} in no figure. The first of them: "
            f"{name_of(failed[0])}; its output: `{failed[0].folder}/{SAID}`."
        )


def _left_out(count: int) -> Iterator[str]:
    if count:
        yield (
            f"The folder also holds runs of arms, seeds, links or rates that this report was not asked for ({count}); "
            "they are in no figure."
        )


def _conditions(runs: Sequence[ArmRun]) -> RunConditions:
    """Describe this machine and the versions that the runs had, which may be older than the installed ones."""
    now = MachineConditions.now()
    seen: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run.versions.items():
            if version not in seen.setdefault(name, []):
                seen[name].append(version)
    return RunConditions(
        machine=now.machine,
        cores=now.cores,
        memory_gib=now.memory_gib,
        system=now.system,
        python=seen.get("python", [now.python])[-1],
        versions={**now.versions, **{name: found[-1] for name, found in seen.items() if name != "python"}},
        mixed=tuple(f"{name} {' and '.join(found)}" for name, found in seen.items() if len(found) > 1),
    )
