"""What each column of a table is to a model: a feature of some type, or nothing, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

from embershard.init.look import MISSING, NUMBER, TIME_TEXT

_TIME = re.compile(r"(^|_)(time|timestamp|date|datetime|ts|day)(?P<unit>_(s|ms|us|ns))?$", re.I)
_NOUNS = "user|item|product|ad|movie|book|song|store|brand|category|code|zip|hour|device"
_NO_ID = "([a-z]*(b|pa|val)|ac|andro|cov|flu|gr|hum|liqu|sol)id"  # of amounts: maxbid, prepaid, valid
_ID = re.compile(rf"(^|_)({_NOUNS}|id|(?!{_NO_ID}s?(_|$))[a-z]+id)s?(_|$)", re.I)
_WORD_ENDS = re.compile(r"[\W_]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNIT = re.compile(r"[-+]?[$€£¥₹]\s*-?\d[\d.,]*|[-+]?\d[\d.,]*\s*[$€£¥₹%]")
# 1,234.5 or 1.234,5 or 1 234 or 12,34,567; but 1.234 alone is a fraction
_GROUPED = re.compile(r"[-+]?(\d{1,3}([,.'\u2019 \u00a0\u202f])\d{3}(\2\d{3})*|\d{1,2}(,\d\d)+,\d{3})([.,]\d*)?")
_OTHER_TIME = re.compile(  # 31.01.2026 12:00, 01/31/26, 2026/01/31, 31-Jan-2026, Jan 31, 2026
    r"(\d{1,2}[.-]\d{1,2}[.-]\d{4}|\d{1,2}/\d{1,2}/(\d{4}|\d\d)|\d{4}/\d{1,2}/\d{1,2}|"
    r"([A-Z][a-z]{2}, )?\d{1,2}[ -][A-Z][a-z]{2}[a-z]*[ -]\d{4}|[A-Z][a-z]{2}[a-z]* \d{1,2},? \d{4})([T ,].*)?$"
)
_RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
_UNKNOWN = {"nan", "na", "n/a", "null", "?", "-", r"\n"}  # of a category: words for a missing value
FEW = 100  # distinct integers that are categories
_FIRST_TIME = 10_000_000  # a smaller number in a column such as watch_time is a duration
A_TIME = "# NAME: left out, a time"


def shared_tables(columns: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """List column -> the column of single values that most of its values are in, where there is one such alone.

    Numbers below 100 say nothing: those of all columns are alike.
    """
    single: dict[str, set[str]] = {}
    lists: dict[str, set[str]] = {}
    for name, values in columns.items():
        parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
        if not any(isinstance(value, list) for value in values):
            texts = [value for value in values if isinstance(value, str)]
            is_list = bool(texts) and sum("|" in text for text in texts) * 4 > len(texts)
            parts = [part for text in texts for part in text.split("|")] if is_list else parts
            if not is_list:
                single[name] = {str(value) for value in values if isinstance(value, str | int) and not _is_small(value)}
                continue
        if all(part is None or isinstance(part, str | int) for part in parts):
            lists[name] = {str(part) for part in parts if part is not None and not _is_small(part)}
    found = {}
    for name, own in lists.items():
        common = {other: len(own & values) for other, values in single.items()}
        like = [other for other, count in common.items() if count >= 5 and count * 2 > len(own)]
        if len(like) == 1:
            found[name] = like[0]
    return found


def _is_small(value: object) -> bool:
    text = str(value)
    return isinstance(value, bool) or (text.lstrip("-").isdecimal() and abs(int(text)) < FEW)


def describe_column(name: str, values: Sequence[object], rows: int, table: str | None = None) -> str:
    """The section of a column, or a comment that says why it is left out."""
    present = [value for value in values if value is not None]
    if not present:
        return "# NAME: left out, it is empty in these rows"
    if any(isinstance(value, list) for value in present):
        if any(isinstance(one, list | dict | tuple) for value in present if isinstance(value, list) for one in value):
            return "# NAME: left out, it has lists of lists or of objects"
        parts = [one for value in present if isinstance(value, list) for one in value]
        if any(isinstance(one, float) for one in parts):
            shown = next(value for value in present if isinstance(value, list) and value)[:2]
            reason = f"# NAME: left out, it has lists of floats, as {shown}: save ids as integers (of pandas Int64), "
            return reason + "or write each number into a column of its own, or name it as the weights of a list"
        if not parts:
            return "# NAME: left out, its lists are empty in these rows"
        if others := [one for one in parts if not _is_category(one)]:
            return f"# NAME: left out, it has lists of values of type {type(others[0]).__name__}, as {others[0]}"
        return _list(present, table)
    if isinstance(first := present[0], dict):
        return f"# NAME: left out, its values are objects: write their fields ({', '.join(first)}) as columns"
    if any(isinstance(value, dict | bytes | time | timedelta | UUID) for value in present):
        return f"# NAME: left out, its values are of type {type(present[0]).__name__}"
    distinct = set(present)
    fewest = 1 if isinstance(present[0], str) else FEW  # of numbers, fewer may be of days or hours
    if isinstance(present[0], date | datetime) or (_is_time(name, present) and len(distinct) > fewest):
        return A_TIME
    is_text_of_time = isinstance(present[0], str) and _TIME.search(words(name)) and len(distinct) > FEW
    if is_text_of_time or (len(distinct) > 1 and _are_times(present)):
        return "# NAME: left out, its times are not written as 2026-01-31 12:00:00"
    if len(distinct) == 1:
        return "# NAME: left out, it has one value in these rows"
    # texts of Parquet or JSON, which a feature reads as numbers; or two numbers of CSV, which a label would be read as
    if (len(distinct) > FEW or len(distinct) == 2) and _are_fractions(present):
        present = [float(str(value)) for value in present]
    if all(isinstance(value, bool | int) for value in present):
        if len(distinct) <= FEW or _ID.search(words(name)):
            return "{}"
        return _number([float(value) for value in present if isinstance(value, int)])
    if all(isinstance(value, int | float) for value in present):
        numbers = [float(value) for value in present if isinstance(value, int | float)]
        if _ID.search(words(name)) and all(map(float.is_integer, numbers)):
            one = next(value for value in present if isinstance(value, float))
            return f"# NAME: left out, its ids are floats, as {one}: save integers (of pandas Int64)"
        return _number(numbers)
    return _of_text([str(value).strip() for value in present], rows, table)


def _is_category(value: object) -> bool:
    """Whether a list may have this value: a text, an integer, a date or a missing one."""
    if isinstance(value, Decimal):
        return value.as_tuple().exponent == 0  # 7.00 would be another category than 7
    return value is None or (isinstance(value, str | int | date) and not isinstance(value, datetime))


def words(name: str) -> str:
    """A column's name as user_id, where it is written as userId or User ID."""
    return _WORD_ENDS.sub("_", name).strip("_")


def _is_time(name: str, values: Sequence[object]) -> bool:
    """Whether a column has texts of times, or has the name of times and numbers that may be some."""
    if any(isinstance(value, str) for value in values):
        return all(isinstance(value, str) and TIME_TEXT.match(value) for value in values)
    named = _TIME.search(words(name))
    numbers = [value for value in values if isinstance(value, int | float)]
    if named is None:
        return False
    return (named.start() == 0 and not named["unit"]) or min(numbers, default=0) >= _FIRST_TIME


def _are_times(values: Sequence[object]) -> bool:
    """Whether texts are times as people write them, all in one way or in several."""
    texts = [value.strip() for value in values if isinstance(value, str)]
    return len(texts) == len(values) and all(_OTHER_TIME.match(text) or TIME_TEXT.match(text) for text in texts)


def _are_fractions(values: Sequence[object]) -> bool:
    """Whether values are texts of numbers, some of which have a decimal point, or some a sign + and others none."""
    texts = [value for value in values if isinstance(value, str) and NUMBER.fullmatch(value)]
    signs = {text.strip()[0] == "+" for text in texts}
    return len(texts) == len(values) and (any("." in text for text in texts) or len(signs) == 2)


def _number(values: Sequence[float]) -> str:
    ordered = sorted(values)
    middle, skewed = ordered[len(ordered) // 2], ordered[-1] > 20 * max(ordered[len(ordered) // 2], 1e-9)
    transform = "[log, standardise]" if ordered[0] >= 0 and (skewed or middle == 0) else "standardise"
    return f"{{type: number, transform: {transform}}}"


def _list(values: Sequence[object], table: str | None) -> str:
    longest = max(len(value) for value in values if isinstance(value, list))
    section = f"{{type: list, {_of_table(table)}max_length: {max(longest, 1)}, too_long: truncate}}"
    return f"{section}     # or type: sequence{_why(table)}"


def _of_table(table: str | None) -> str:
    return "" if table is None else f"table: {yaml_name(table)}, "


def _why(table: str | None) -> str:
    """What a reader of the job file must know of a shared table."""
    return "" if table is None else f"; most values are those of column {table}, hence its table"


def _of_text(values: Sequence[str], rows: int, table: str | None) -> str:
    if sum("|" in value for value in values) * 4 > len(values):
        longest = max(value.count("|") + 1 for value in values)
        section = f"{{type: list, separator: '|', {_of_table(table)}max_length: {longest}, too_long: truncate}}"
        return section + ("" if table is None else f"     #{_why(table).removeprefix(';')}")
    bracketed = [value for value in values if value.startswith("[") and value.endswith("]")]
    if len(bracketed) * 10 >= len(values):
        return f"# NAME: left out, its lists are in brackets, as {bracketed[0][:40]}: write them as a|b"
    grouped = [value for value in values if _GROUPED.fullmatch(value) and not NUMBER.fullmatch(value)]
    others = [value for value in values if not _GROUPED.fullmatch(value) and value.lower() not in MISSING]
    are_numbers = all(NUMBER.fullmatch(value.replace(",", ".")) for value in others)
    if len(grouped) * 2 > len(values) or (grouped and are_numbers):
        return f"# NAME: left out, its numbers have thousands separators, as {grouped[0]}: write them without"
    if are_numbers and (commas := [value for value in others if "," in value]):
        reason = f"# NAME: left out, its values are numbers with a decimal comma, or lists, as {commas[0]}"
        return f"{reason}: write them as {commas[0].replace(',', '.')}, or as {commas[0].replace(',', '|')}"
    with_unit = [value for value in values if _UNIT.fullmatch(value)]
    if len(with_unit) * 2 > len(values) and len(set(values)) > FEW:
        return f"# NAME: left out, its numbers have a unit, as {with_unit[0]}: write them without"
    if sum(map(len, values)) > 60 * len(values) and len(set(values)) * 2 > rows:
        return "# NAME: left out, it is free text"
    distinct = set(values)
    if unknown := sorted(value for value in distinct if value.lower() in _UNKNOWN):
        return f"{{}}     # {unknown[0]} is a value as others: leave the cells of missing ones empty"
    if distinct in ({"True", "False"}, {"TRUE", "FALSE"}):  # as which a request's true is not read
        return f"{{}}     # rows of a served model need these texts, too: {', '.join(sorted(distinct))}"
    return "{}"


def yaml_name(name: str) -> str:
    """A column's name in YAML."""
    is_plain = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and name.lower() not in _RESERVED
    return name if is_plain else json.dumps(name, ensure_ascii=False)
