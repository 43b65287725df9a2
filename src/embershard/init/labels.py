"""The label of a table: its column, the texts that stand for 0 and 1, and the columns that would tell it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embershard.init.columns import FEW, words
from embershard.init.look import NUMBER, CannotInit, Look

_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "purchase")
_YES = {"yes", "true", "y", "t", "positive", "pos", "clicked", "bought", "won", "ja", "j", "oui", "si", "sí", "sim"}
_NO = {"no", "false", "n", "f", "negative", "neg", "nein", "nee", "nej", "non", "não"}  # of labels: stand for 0


def find_label(data: Path, look: Look, label: str | None) -> str:
    """Return the column of the label. CannotInit where the table has it not, or none or several that may be it."""
    known = ", ".join(look.columns)
    if label is not None:
        if label not in look.columns:
            raise CannotInit(path=str(data), reason=f"no column {label!r} (there are: {known})")
        if label in look.unlike and not label_values(look.columns[label], named=True):
            reason = f"the numbers of the label {label!r} have {look.unlike[label]}: write all alike"
            raise CannotInit(path=str(data), reason=reason)
        return label
    binary = [name for name, values in look.columns.items() if {*map(_as_label, values)} == {0.0, 1.0}]
    two = [name for name, values in look.columns.items() if label_values(values)]
    named = [name for name in (*binary, *two) if words(name).lower() in _LABELS]
    of_texts = [name for name in two if any(map(_is_word, look.columns[name]))]
    two = of_texts or two  # -1 and 1 may be something else
    for name, values in [] if named else look.columns.items():
        present = {_as_label(value) for value in values if value is not None}
        if words(name).lower() in _LABELS and present == {0.0, 1.0}:
            reason = f"column {name!r} has no value in {values.count(None):,} of {len(values):,} rows"
            remedy = "a label may not be missing: leave these rows out, or name another label by --label"
            raise CannotInit(path=str(data), reason=f"{reason}, and {remedy}")
    if len(binary) > 1 and not named:
        reason = f"{len(binary)} columns of zeros and ones: {', '.join(binary)}; name the label by --label"
        raise CannotInit(path=str(data), reason=reason)
    if not named and not binary and len(two) != 1:
        others = f", and {len(two)} of two texts, or of -1 and 1: {', '.join(two)}" if two else ""
        raise CannotInit(
            path=str(data),
            reason=f"no column of zeros and ones{others}; name the label by --label, or, of interactions, which "
            f"have none, their columns by --user and --item (there are: {known})",
        )
    return (named or binary or two)[0]


def leak(name: str, values: Sequence[object], labels: Sequence[object]) -> str:
    """A comment on a column that a model must not read to predict the label; the empty text of any other."""
    if words(name).lower() in _LABELS and ({*map(_as_label, values)} == {0.0, 1.0} or label_values(values)):
        return "# NAME: left out, it looks like a label, too: data.label takes a list of labels"
    if len(values) > FEW and not any(isinstance(value, list | dict) for value in (*values, *labels)):
        pairs = set(zip(values, labels, strict=True))
        if len(pairs) == len(set(values)) == len(set(labels)) == 2:
            return "# NAME: left out, it tells the label in each of these rows"
    return ""


def label_values(values: Sequence[object], *, named: bool = False) -> list[str]:
    """The texts of a label that stand for 0 and for 1, of two texts or of -1 and 1; none of other labels.

    Of a label that the user has `named`, they may be any two integers but 0 and 1. Integers may be floats, as 1.0.
    """
    texts = {value for value in values if isinstance(value, str)}
    if not texts:
        present = [value for value in values if value is not None]
        whole = [value for value in present if type(value) is int or (type(value) is float and value.is_integer())]
        numbers = sorted({int(value) for value in whole})
        found = len(whole) == len(present) and len(numbers) == 2 and (named or numbers == [-1, 1])
        return [str(number) for number in numbers] if found and numbers != [0, 1] else []
    if len(texts) != 2 or any(value is not None and not isinstance(value, str) for value in values):
        return []
    if all(NUMBER.fullmatch(text) for text in texts):
        first, second = sorted(texts, key=float)
        return [first, second] if named or [float(first), float(second)] in ([0, 1], [-1, 1]) else []
    first, second = sorted(texts)
    if first.strip().lower() in _YES or second.strip().lower() in _NO:
        first, second = second, first
    return [first, second]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and not NUMBER.fullmatch(value)


def _as_label(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
