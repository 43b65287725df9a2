"""The sentences of a report: the headline, the summary below it, and what is said of each arm.

They quote the verdicts of analysis/conclusions.py and decide nothing themselves. Names of arms stand in backticks, as
code does: `none` is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embershard.compare.analysis.conclusions import FEW_SEEDS, KEPT, NO_MARGIN, lost_runs, outcome_of
from embershard.compare.report.page import ArmFinding
from embershard.compare.report.tables import even_bounds, even_text, fp16_baseline
from embershard.compare.results import FP16_BASELINE, Results, Speed, Verdict
from embershard.compare.units import (
    bits_text,
    digits,
    link_text,
    listed,
    metric_name,
    seconds_text,
    signed,
    speed_up_text,
)

_USUAL = "That is common: of 200 published set-ups only 6 sped up (Agarwal et al. 2022, in data centres)."


def headline(results: Results) -> str:
    """Answer in a few words; with few seeds a caution stands beside the answer."""
    words, seeds = _headline(results), _fewest_seeds(results)
    if seeds >= FEW_SEEDS:
        return words
    return f"{words} (caution: {f'only {seeds} seeds' if seeds > 1 else 'one seed'})"


def _headline(results: Results) -> str:
    paid, undecided = _arms(results, "paid"), _arms(results, "undecided")
    if paid == [fp16_baseline(results)]:
        return f"Only {_arm(paid[0])}, the fp16 baseline, paid"
    if paid:
        names = _arms_listed(paid) if len(paid) < 4 else f"{len(paid)} of {len(results.verdicts)} arms"
        return f"{names} paid"
    if undecided:
        return "Undecided" if len(undecided) == len(results.verdicts) else "Nothing is shown to have paid"
    return "Compression did not pay" if _only_codecs(results) else "Nothing paid"


def summary(results: Results) -> list[str]:
    """Say which arms paid, on which links, at what cost, and which beat the fp16 baseline: the first paragraph."""
    sentences = [_answer(results), *_caution(results)]
    paid = sorted(_of(results, "paid"), key=lambda verdict: -(verdict.best_speed_up or 0))
    for verdict in paid[:1]:
        sentences += _gain(results, verdict)
    sentences += [f"{_arm(verdict.arm)} is {_speeds(results, verdict.arm, results.baseline)}." for verdict in paid[1:2]]
    sentences += _not_paid(results)
    sentences += _beside_fp16(results)
    if all(link.bits_per_second is None for link in results.bandwidths):
        sentences.append(_unlimited(results))
    return sentences


def warnings(results: Results) -> list[str]:
    """Say what must be known before anything is believed."""
    first = [] if results.complete else ["The comparison is not finished. These results are preliminary."]
    return first + list(results.notes)


def findings(results: Results) -> list[ArmFinding]:
    """Say of each arm whether it paid, and why."""
    meanings = {arm.label: arm.meaning for arm in results.arms}
    found = []
    for verdict in results.verdicts:
        sentences = list(verdict.reasons)
        sentences += _even_sentence(results, verdict.arm, results.baseline)
        sentences += _fp16_sentence(results, verdict)
        found.append(
            ArmFinding(arm=verdict.arm, outcome=verdict.outcome, meaning=meanings[verdict.arm], sentences=sentences)
        )
    return found


def about(results: Results) -> str:
    """Describe the comparison in a line: the job, its size, the machine."""
    links = _at(results, [link.label for link in results.bandwidths])
    seeds = f"{len(results.seeds)} paired seeds" if len(results.seeds) > 1 else "1 seed"
    sizes = f"{_many(results.workers, 'worker')}, {_many(results.shards, 'shard')}"
    return (
        f"{results.name}: {_many(len(results.arms), 'arm')}, {seeds}, links {links}; {sizes}; "
        f"{len(results.runs)} runs in {seconds_text(results.seconds)} on {results.conditions.machine}"
    )


def _answer(results: Results) -> str:
    paid, undecided = _arms(results, "paid"), _arms(results, "undecided")
    base = _arm(results.baseline)
    if paid:
        answer = "Only the fp16 baseline paid" if paid == [fp16_baseline(results)] else "It paid"
        return f"{answer}: with {_arms_listed(paid)} the job trained faster than with {base}, and the model is as good."
    if undecided:
        words = f"Undecided: no arm is shown to train faster than {base} with a model as good."
        return f"{words} {_arms_listed(undecided)} may." if len(undecided) < len(results.verdicts) else words
    if not results.verdicts:
        return "Nothing can be said: no arm has runs beside the baseline."
    arms = [verdict.arm for verdict in results.verdicts]
    subject = f"none of the {len(arms)} arms was" if len(arms) > 1 else f"{_arm(arms[0])} was not"
    words = f"It did not pay: {subject} at least 5 % faster than {base} on any measured link with a model as good."
    return f"{words} {_USUAL}" if _only_codecs(results) else words


def _fewest_seeds(results: Results) -> int:
    """The pairs of runs behind the verdict that has the fewest; arms without any pair do not count."""
    return min((verdict.seeds for verdict in results.verdicts if verdict.seeds), default=len(results.seeds))


def _caution(results: Results) -> Iterator[str]:
    seeds = _fewest_seeds(results)
    if seeds == 1:
        yield "One seed gives no intervals, so nothing is decided; --seeds 5 gives them."
    elif seeds < FEW_SEEDS:
        yield f"Caution: only {seeds} pairs of runs were made, too few to trust an interval; use --seeds 5."


def _gain(results: Results, verdict: Verdict) -> Iterator[str]:
    """Say what the best arm gained, and at what cost."""
    slower = f", and slower {_at(results, verdict.slower_at)}" if verdict.slower_at else ""
    yield f"{_arm(verdict.arm)} is {_speeds(results, verdict.arm, results.baseline)}{slower}."
    if verdict.bytes_ratio is not None and verdict.bytes_ratio > 1.005:
        yield f"It moves {100 / verdict.bytes_ratio:.2g} % of the bytes."
    even = results.break_even_of(verdict.arm, results.baseline)
    if len(verdict.pays_on) == len(results.bandwidths) > 1:
        yield "It is faster on every measured link."
    elif even is not None and even.measured is not None:
        bounds = even_bounds(even, 2)
        interval = f" (95 % interval {bounds[0]} to {bounds[1]})" if bounds else ""
        yield f"By the means it breaks even at {bits_text(even.measured, 2)} per worker{interval}."
    yield f"The cost: {_cost(results, verdict)}."


def _speeds(results: Results, arm: str, other: str) -> str:
    """Say on which links an arm is faster than another, and how much."""
    found = [(_times(speed.speed_up.mean), _at(results, [speed.bandwidth])) for speed in _faster(results, arm, other)]
    if not found:
        return "not faster"
    (times, where), *others = found
    return listed([f"{times} as fast {where}", *(f"{times} {where}" for times, where in others)])


def _times(ratio: float) -> str:
    return f"{digits(ratio, 2 if ratio >= 2 or ratio < 1 else 3)}x"


def _cost(results: Results, verdict: Verdict) -> str:
    judged = results.quality_of(verdict.arm, results.baseline)
    if judged is None:
        return "not known"
    moved = f"{metric_name(results.metric)} {signed(judged.difference.mean, 4)}"
    margin = "" if judged.margin is None else f" of {judged.margin:g}"
    said = {
        "equivalent": f"equivalent within the margin{margin}",
        "not worse": f"not worse by more than the margin{margin}",
        "better": "better",
        "worse": "worse",
        "undecided": "undecided",
    }
    rate = ", each arm at its own best learning rate" if verdict.rate == "tuned" else ""
    return f"{moved}, {said[judged.verdict]}{rate}"


def _not_paid(results: Results) -> Iterator[str]:
    """Say of each arm that did not pay why, or what is open."""
    paid = bool(_of(results, "paid"))
    if paid and _of(results, "did not pay"):
        yield f"Did not pay: {_against(results, _of(results, 'did not pay'))}."
    if not paid:
        for verdict in results.verdicts:
            if verdict.quality == "worse" and verdict.faster_at:
                fast = _speeds(results, verdict.arm, results.baseline)
                yield f"{_arm(verdict.arm)} is {fast}, but at a price: {_cost(results, verdict)}."
    undecided = _of(results, "undecided")
    if undecided and _fewest_seeds(results) > 1:
        found = "; ".join(f"{_arm(verdict.arm)} {_open(results, verdict)}" for verdict in undecided)
        yield f"{'Undecided: ' if paid else ''}{found}. More seeds narrow the intervals."


def _open(results: Results, verdict: Verdict) -> str:
    """Say what is known of an undecided arm, and what is not."""
    judged = results.quality_of(verdict.arm, results.baseline)
    name = metric_name(results.metric)
    if judged is None:
        lacks = f"with {name}" if verdict.seeds else "that ended well"
        return f"has no run {lacks} beside one of the baseline"
    fast = _speeds(results, verdict.arm, results.baseline)
    if verdict.quality in KEPT and verdict.faster_at:  # it had paid
        lost = lost_runs(results, verdict.arm, judged)
        have = "has" if lost == 1 else "have"
        return f"is {fast} and as good where it ended well, but {lost} of its runs failed or {have} no {name}"
    if verdict.quality in KEPT:
        return "trained as good a model, but is not shown to be faster or not"
    moved = f"{name} {signed(judged.difference.mean, 4)} is too uncertain for the margin of {judged.margin or 0:g}"
    if judged.margin is None:
        moved = f"no difference of {name} is shown, and {NO_MARGIN}"
    return f"is {fast}, but {moved}" if verdict.faster_at else f"is not shown to be faster, and {moved}"


def _against(results: Results, verdicts: Sequence[Verdict]) -> str:
    """Say why arms did not pay, grouped by reason."""
    worse = [verdict for verdict in verdicts if verdict.quality == "worse"]
    slow = [verdict.arm for verdict in verdicts if verdict.quality != "worse"]
    name = metric_name(results.metric)
    moved = [f"{_arm(one.arm)} ({name} {signed(one.difference.mean, 4)})" for one in worse if one.difference]
    said = [f"{listed(moved)}, worse"] if moved else []
    said += [f"{_arms_listed(slow)}, not faster by 5 % on any link"] if slow else []
    return "; ".join(said)


def _beside_fp16(results: Results) -> Iterator[str]:
    """Say which codecs beat 16-bit floats."""
    codecs = [arm.label for arm in results.arms if arm.is_codec and arm.label != results.baseline]
    fp16 = fp16_baseline(results)
    if not codecs:
        return
    if fp16 is None:
        if results.baseline != FP16_BASELINE:
            yield "No arm of fp16s ran. To beat 32-bit floats alone proves little."
        return
    others = [label for label in codecs if label != fp16]
    if not others:
        return
    beating = [label for label in others if outcome_of(results, label, fp16) == "paid"]
    beside = f"Beside {_arm(fp16)}, the fp16 baseline (it halves the bytes at little cost),"
    if not beating:
        none = "no other arm is" if len(others) > 1 else f"{_arm(others[0])} is not"
        yield f"{beside} {none} shown to be as good and faster."
        return
    beating.sort(key=lambda label: -max(speed.speed_up.mean for speed in _faster(results, label, fp16)))
    said = [f"{_arm(label)} is {_speeds(results, label, fp16)}" for label in beating[:2]]
    said += [f"{_arms_listed(beating[2:])} are faster too"] if beating[2:] else []
    yield f"{beside} {'; '.join(said)}."
    left = [label for label in _arms(results, "paid") if label in others and label not in beating]
    if left:
        yield f"Not shown to beat it: {_arms_listed(left)}."


def _faster(results: Results, arm: str, other: str) -> list[Speed]:
    return [speed for speed in results.speeds_of(arm, other) if speed.verdict == "faster"]


def _fp16_sentence(results: Results, verdict: Verdict) -> Iterator[str]:
    fp16 = fp16_baseline(results)
    if fp16 is None or verdict.arm == fp16:
        return
    speeds = results.speeds_of(verdict.arm, fp16)
    if speeds:
        said = [f"{speed_up_text(speed.speed_up)} {_at(results, [speed.bandwidth])}" for speed in speeds]
        yield f"Its speed beside {_arm(fp16)}, the fp16 baseline, is {listed(said)}."


def _even_sentence(results: Results, arm: str, other: str) -> Iterator[str]:
    even = results.break_even_of(arm, other)
    if even is None:
        return
    formula = bits_text(even.formula, 2) if even.formula is not None else ""
    if even.measured is not None:
        by = f", {formula} by formula" if formula else ""
        yield f"It breaks even with {_arm(other)} at {even_text(even, 2)}{by}."
    elif formula:
        yield f"By formula it breaks even with {_arm(other)} at {formula}; no such point was measured."


def _unlimited(results: Results) -> str:
    points = [
        f"{_arm(even.arm)} {bits_text(even.formula, 2)}"
        for even in results.break_even
        if even.against == results.baseline and even.formula is not None
    ]
    words = "Only a link without limit was measured, so nothing is shown about slower ones"
    return f"{words}; by formula the break-even points are: {', '.join(points)}." if points else f"{words}."


def _at(results: Results, labels: Sequence[str]) -> str:
    named = {link.label: link for link in results.bandwidths}
    limited = [link_text(named[label]) for label in labels if named[label].bits_per_second is not None]
    free = len(limited) < len(labels)
    return listed([*([f"at {listed(limited)}"] if limited else []), *(["without limit"] if free else [])])


def _only_codecs(results: Results) -> bool:
    return all(arm.is_codec for arm in results.arms if arm.label != results.baseline)


def _of(results: Results, outcome: str) -> list[Verdict]:
    return [verdict for verdict in results.verdicts if verdict.outcome == outcome]


def _arms(results: Results, outcome: str) -> list[str]:
    return [verdict.arm for verdict in _of(results, outcome)]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _arm(label: str) -> str:
    return f"`{label.replace('`', chr(39))}`"


def _arms_listed(labels: Sequence[str]) -> str:
    return listed([_arm(label) for label in labels])
