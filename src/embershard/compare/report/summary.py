"""The first paragraph of a report and its verdicts, in plain words.

Nothing is called faster, worse or equivalent here that the tests in results.json do not call so. Names of arms stand in
backticks, as code does: `none` is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embershard.compare.analysis.conclusions import KEPT, has_lost
from embershard.compare.report.page import Finding
from embershard.compare.report.tables import break_even_of, even_text, quality_of, speed_of, yardstick
from embershard.compare.results import YARDSTICK, BreakEven, Results, Speed, Verdict
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
    """The answer in a few words."""
    paid, undecided = _arms(results, "paid"), _arms(results, "undecided")
    if paid == [yardstick(results)]:
        return f"Only {_arm(paid[0])}, the yardstick, paid"
    if paid:
        names = _arms_listed(paid) if len(paid) < 4 else f"{len(paid)} of {len(results.verdicts)} arms"
        return f"{names} paid"
    if undecided:
        return "Undecided" if len(undecided) == len(results.verdicts) else "Nothing is shown to have paid"
    return "Compression did not pay" if _only_codecs(results) else "Nothing paid"


def lead(results: Results) -> list[str]:
    """The first paragraph: did it pay, where, at what cost, from which bandwidth on, and over the yardstick?"""
    sentences = [_answer(results)]
    paid = sorted(_of(results, "paid"), key=lambda verdict: -(verdict.best_speed_up or 0))
    sentences += [_gain(results, verdict) for verdict in paid[:1]]
    sentences += [_small_gain(results, verdict) for verdict in paid[1:2]]
    sentences += _not_paid(results)
    sentences += _beside_yardstick(results)
    if all(link.bits_per_second is None for link in results.bandwidths):
        sentences.append(_unlimited(results))
    return sentences


def warnings(results: Results) -> list[str]:
    """What must be known before anything is believed."""
    first = [] if results.complete else ["The comparison is not finished; what follows is preliminary."]
    return first + list(results.notes)


def findings(results: Results) -> list[Finding]:
    """A verdict per arm."""
    meanings = {arm.label: arm.meaning for arm in results.arms}
    found = []
    for verdict in results.verdicts:
        sentences = list(verdict.reasons)
        sentences += _even_sentence(results, verdict.arm, results.baseline)
        sentences += _yardstick_sentence(results, verdict)
        found.append(
            Finding(arm=verdict.arm, outcome=verdict.outcome, meaning=meanings[verdict.arm], sentences=sentences)
        )
    return found


def about(results: Results) -> str:
    """A line under the headline."""
    links = _at(results, [link.label for link in results.bandwidths])
    seeds = f"{len(results.seeds)} paired seeds" if len(results.seeds) > 1 else "1 seed"
    sizes = f"{_many(results.workers, 'worker')}, {_many(results.shards, 'shard')}"
    return (
        f"{results.name}: {_many(len(results.arms), 'arm')}, {seeds}, links {links}; {sizes}; "
        f"{len(results.runs)} runs in {seconds_text(results.seconds)} on {results.conditions.machine}"
    )


def _answer(results: Results) -> str:
    paid, undecided = _arms(results, "paid"), _arms(results, "undecided")
    base, codecs = _arm(results.baseline), _only_codecs(results)
    if paid == [yardstick(results)]:
        return f"Only the yardstick paid: with {_arm(paid[0])} the job trained a model as good as with {base}, faster."
    if paid:
        return f"It paid: with {_arms_listed(paid)} the job trained a model as good as with {base}, faster."
    if undecided:
        words = f"Undecided: no arm is shown to have trained a model as good as {base} did, faster"
        if len(undecided) < len(results.verdicts):
            return f"{words}, and of {_arms_listed(undecided)} it is not shown either that it did not."
        return f"{words}, and no arm is shown not to have."
    if not results.verdicts:
        return "Nothing can be said: no arm has runs beside the baseline."
    subject = (
        f"none of the {len(results.verdicts)} arms" if len(results.verdicts) > 1 else _arm(results.verdicts[0].arm)
    )
    verb = "trained" if len(results.verdicts) > 1 else "has not trained"
    words = f"It did not pay: {subject} {verb} a model as good as {base} did, faster, on any link that was measured."
    return f"{words} {_USUAL}" if codecs else words


def _gain(results: Results, verdict: Verdict) -> str:
    """What the best arm bought, and what it cost."""
    words = f"{_arm(verdict.arm)} is {_speeds(results, verdict.arm, results.baseline)}"
    if verdict.slower_at:
        words += f", slower {_at(results, verdict.slower_at)}"
    if verdict.bytes_ratio is not None and verdict.bytes_ratio > 1.005:
        words += f", and moves {100 / verdict.bytes_ratio:.2g} % of the bytes"
    even = break_even_of(results, verdict.arm, results.baseline)
    if even is not None and even.measured is not None:
        words += f"; it pays on links slower than {bits_text(even.measured, 2)} per worker{_sureness(even)}"
    elif len(verdict.faster_at) == len(results.bandwidths) > 1:
        words += "; it is faster on every link measured"
    return f"{words}. The cost: {_cost(results, verdict)}."


def _sureness(even: BreakEven) -> str:
    if even.low is None:
        return ""
    return f" (95 % interval {bits_text(even.low, 2)} to {bits_text(even.high, 2) if even.high else 'no limit'})"


def _small_gain(results: Results, verdict: Verdict) -> str:
    return f"{_arm(verdict.arm)} is {_speeds(results, verdict.arm, results.baseline)}."


def _speeds(results: Results, arm: str, other: str) -> str:
    """Where an arm is faster than another, and how much."""
    found = [
        (_times(speed.speed_up.mean), _at(results, [speed.bandwidth])) for speed in _faster_over(results, arm, other)
    ]
    if not found:
        return "not faster"
    (times, where), *others = found
    return ", ".join([f"{times} as fast {where}", *(f"{times} {where}" for times, where in others)])


def _times(ratio: float) -> str:
    return f"{digits(ratio, 2 if ratio >= 2 or ratio < 1 else 3)}x"


def _cost(results: Results, verdict: Verdict) -> str:
    judged = quality_of(results, verdict.arm, results.baseline, results.metric)
    if judged is None or verdict.difference is None:
        return "not known"
    moved = f"{metric_name(results.metric)} {signed(verdict.difference.mean, 4)}"
    margin = "" if judged.margin is None else f" of {judged.margin:g}"
    said = {
        "equivalent": f"equivalent within the margin{margin}",
        "not worse": f"not worse by more than the margin{margin}",
        "better": "better",
        "worse": "worse",
        "undecided": "undecided",
    }
    rate = ", each arm at its own best learning rate" if verdict.rate == "tuned" else ""
    return f"{moved}, {said[verdict.quality]}{rate}"


def _not_paid(results: Results) -> Iterator[str]:
    """The others, each with what speaks against it or what is open."""
    paid = bool(_of(results, "paid"))
    if paid and _of(results, "did not pay"):
        yield f"Did not pay: {_against(results, _of(results, 'did not pay'))}."
    if not paid:
        for verdict in results.verdicts:
            if verdict.quality == "worse" and verdict.faster_at:
                fast = _speeds(results, verdict.arm, results.baseline)
                yield f"{_arm(verdict.arm)} is {fast}, but at a price: {_cost(results, verdict)}."
    undecided = _of(results, "undecided")
    if len(results.seeds) < 2:
        yield "One seed per arm gives no intervals and no tests, so nothing is decided; --seeds 5 would give them."
    elif undecided:
        found = "; ".join(f"{_arm(verdict.arm)} {_open(results, verdict)}" for verdict in undecided)
        yield f"{'Undecided: ' if paid else ''}{found}. More seeds would narrow the intervals."


def _open(results: Results, verdict: Verdict) -> str:
    """What is known of an undecided arm, and what is not."""
    judged = quality_of(results, verdict.arm, results.baseline, results.metric)
    if judged is None:
        return "has no run that ended well beside one of the baseline"
    if verdict.quality in KEPT and verdict.faster_at:  # it had paid
        fast = _speeds(results, verdict.arm, results.baseline)
        return f"is {fast}, and as good, where it ended well, but {verdict.failed_runs} of its runs failed"
    if verdict.quality in KEPT:
        return "trained as good a model, but is not shown to be faster or not"
    margin = "" if judged.margin is None else f" for the margin of {judged.margin:g}"
    moved = f"{metric_name(results.metric)} {signed(judged.difference.mean, 4)} is too uncertain{margin}"
    fast = _speeds(results, verdict.arm, results.baseline)
    return f"is {fast}, but {moved}" if verdict.faster_at else f"is not shown to be faster, and {moved}"


def _against(results: Results, verdicts: Sequence[Verdict]) -> str:
    """What speaks against arms, those of one reason together."""
    worse = [verdict for verdict in verdicts if verdict.quality == "worse"]
    slow = [verdict.arm for verdict in verdicts if verdict.quality != "worse"]
    name = metric_name(results.metric)
    moved = [f"{_arm(one.arm)} ({name} {signed(one.difference.mean, 4)})" for one in worse if one.difference]
    said = [f"{listed(moved)}, worse"] if moved else []
    said += [f"{_arms_listed(slow)}, not faster by 5 % on any link"] if slow else []
    return "; ".join(said)


def _beside_yardstick(results: Results) -> Iterator[str]:
    """Whether anything beats halving the floats."""
    codecs = [arm.label for arm in results.arms if arm.is_codec and arm.label != results.baseline]
    beside = yardstick(results)
    if not codecs:
        return
    if beside is None:
        if results.baseline != YARDSTICK:
            yield "No arm of fp16s ran, so all this is beside 32-bit floats alone, which proves little."
        return
    others = [label for label in codecs if label != beside]
    if not others:
        return
    beating = [label for label in others if _beats(results, label, beside)]
    reason = "the yardstick (beating 32-bit floats alone proves little)"
    if not beating:
        none = "no other arm is" if len(others) > 1 else f"{_arm(others[0])} is not"
        yield f"Beside {_arm(beside)}, {reason}, {none} shown to be as good and faster."
        return
    beating.sort(key=lambda label: -max(speed.speed_up.mean for speed in _faster_over(results, label, beside)))
    said = [f"{_arm(label)} is {_speeds(results, label, beside)}" for label in beating[:2]]
    said += [f"{_arms_listed(beating[2:])} are faster too"] if beating[2:] else []
    yield f"Beside {_arm(beside)}, {reason}, {'; '.join(said)}."
    left = [label for label in _arms(results, "paid") if label in others and label not in beating]
    if left:
        yield f"Not shown to beat it: {_arms_listed(left)}."


def _beats(results: Results, arm: str, beside: str) -> bool:
    judged = quality_of(results, arm, beside, results.metric)
    if judged is None or judged.verdict not in KEPT or has_lost(results, arm, judged):
        return False
    return bool(_faster_over(results, arm, beside))


def _faster_over(results: Results, arm: str, other: str) -> list[Speed]:
    speeds = (speed_of(results, arm, link.label, other) for link in results.bandwidths)
    return [speed for speed in speeds if speed is not None and speed.verdict == "faster"]


def _yardstick_sentence(results: Results, verdict: Verdict) -> Iterator[str]:
    beside = yardstick(results)
    if beside is None or verdict.arm == beside:
        return
    speeds = [speed_of(results, verdict.arm, link.label, beside) for link in results.bandwidths]
    said = [
        f"{speed_up_text(speed.speed_up)} {_at(results, [speed.bandwidth])}" for speed in speeds if speed is not None
    ]
    if said:
        yield f"Beside {_arm(beside)}, the yardstick, its speed is {listed(said)}."


def _even_sentence(results: Results, arm: str, other: str) -> Iterator[str]:
    even = break_even_of(results, arm, other)
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
