"""Load a job file: YAML, checked whole before anything starts; every mistake is named with its line and field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from embershard.proto.errors import JobError
from embershard.proto.user_modules import search_from
from embershard.worker.job.checks import IGNORED_BY_STRATEGY, check_job
from embershard.worker.job.job import Job
from embershard.worker.job.readers.user_defined import UserReaderSection
from embershard.worker.job.sections import CUSTOM, CodeSection
from embershard.worker.job.training import BUDGETS
from embershard.worker.job.yaml import JobSource, Location, Mistake


class JobFileError(JobError):
    """A job with mistakes: all of them, a line each."""

    template = "{text}"

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__(text="\n".join(map(str, mistakes)), count=len(mistakes))
        self.mistakes = tuple(mistakes)


def load_job(path: Path, overrides: Sequence[str] = (), data_root: Path | None = None) -> Job:
    """The job of a file, with "section.field=value" overrides on top; `data_root` replaces data.root.

    An override of the strategy takes away what the file says of shards, where the strategy has none. Where the job
    names code of its own (`module:name`), this process finds modules in the job's folder from here on: last, so that a
    module there hides no installed one.

    JobFileError names every mistake: what is no YAML, unknown or missing or of the wrong type or out of range; if there
    is none of these, every contradiction between fields, and every data file that is not there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text; save it as UTF-8"
        if isinstance(error, OSError):
            reason = f"{error.strerror}; check the path"
        raise JobFileError([Mistake(str(path), "", f"cannot be read: {reason}")]) from None
    source = JobSource.parse(text, str(path))
    if source.mistakes:
        raise JobFileError(source.mistakes)
    for assignment in overrides:  # before they are applied: what they give themselves stays
        for field in IGNORED_BY_STRATEGY.get(assignment.removeprefix("strategy="), ()):
            source.drop(field)
    source.override(overrides, choices=[BUDGETS])
    if data_root is not None:
        source.put(("data", "root"), str(data_root.absolute()), f"--data {data_root}")
    try:
        job = Job.model_validate(source.values)
    except ValidationError as error:
        found = [_mistake(details, source) for details in _one_per_value(error.errors(include_url=False))]
        raise JobFileError(_in_order([*source.mistakes, *found])) from None
    found = [Mistake(source.where(at), ".".join(map(str, at)), why) for at, why in check_job(job, path.parent)]
    if source.mistakes or found:
        raise JobFileError(_in_order([*source.mistakes, *found]))
    if job.has_user_code:
        search_from(path.parent)
    if job.own_loss is not None and isinstance(job.data, UserReaderSection) and job.data.labels is None:
        job = job.model_copy(update={"data": job.data.model_copy(update={"labels": "any"})})
    return job


def _in_order(mistakes: Sequence[Mistake]) -> list[Mistake]:
    def line(mistake: Mistake) -> int:
        number = mistake.where.rpartition(":")[2]
        return int(number) if number.isdigit() else 1 << 30  # overrides last

    return sorted(mistakes, key=line)


_KIND = re.compile(r"constrained-\w+|(tuple|dict|list|literal)\[.*\]")  # pydantic's names of what a value may be


def _one_per_value(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors of a value that may be of several kinds as one, where pydantic has one for each kind."""
    found: list[ErrorDetails] = []
    by_value: dict[Location, list[ErrorDetails]] = {}
    for details in errors:
        loc = details["loc"]  # such as ("features", "hour", "bucketise", "tuple[float, ...]", 1)
        at = next((i for i, part in enumerate(loc) if _KIND.fullmatch(str(part))), len(loc))
        if at == len(loc):
            found.append(details)
            continue
        details["loc"] = (*loc[:at], *loc[at + 1 :])
        by_value.setdefault(loc[:at], []).append(details)
    for value, group in by_value.items():
        inner = [details for details in group if len(details["loc"]) > len(value)]
        if len(group) > 1 and not inner:
            kinds = [_plain(one["msg"]).removeprefix("Input should be ").partition(", unable")[0] for one in group]
            group[0]["msg"] = f"Must be {' or '.join(kinds)}"
            group[0]["type"] = "kinds"
        found += inner or group[:1]
    return found


def _plain(message: str) -> str:
    """A message of pydantic with YAML's words in place of Python's."""
    message = message.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    return message.replace("Tuple should", "List should")


def _mistake(details: ErrorDetails, source: JobSource) -> Mistake:
    location, section = _without_tags(details["loc"])
    kind, context, message = details["type"], details.get("ctx", {}), _plain(details["msg"])
    if kind == "extra_forbidden":
        known = sorted(_fields(section))
        near = difflib.get_close_matches(str(location[-1]), known, 1)
        message = f"unknown field; did you mean {near[0]}?" if near else f"unknown field (known: {', '.join(known)})"
    elif kind == "missing":
        field = section.model_fields.get(str(location[-1])) if section is not None else None
        message = "is missing" if field is None else _missing(get_args(field.annotation))
    elif kind == "union_tag_not_found" and not isinstance(details["input"], dict):
        message = f"is a section of fields, got {details['input']!r}"
    elif kind == "union_tag_not_found":
        location = (*location, context["discriminator"].strip("'").replace("tag()", "name").removesuffix("()"))
        message = _missing(_tags_at(location[:-1]))
    elif kind == "union_tag_invalid":
        location = (*location, context["discriminator"].strip("'").replace("tag()", "name").removesuffix("()"))
        known = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        near = difflib.get_close_matches(context["tag"], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        message = f"unknown {context['tag']!r}; {hint}"
    elif kind in ("model_type", "model_attributes_type"):
        message = f"is a section of fields, got {details['input']!r}"
    elif kind == "value_error":
        message = message.removeprefix("Value error, ")
        named = re.match(r"\w+: (\w+) ", message)  # the specs say "Adam: lr must be ..."
        if named is not None and named[1] in _fields(section):
            location = (*location, named[1])
            message = message[named.end() :]
    else:
        message = f"{message[0].lower()}{message[1:]}, got {details['input']!r}"
    return Mistake(source.where(location), ".".join(map(str, location)), message)


def _missing(choices: Sequence[object]) -> str:
    known = dict.fromkeys(choice for choice in choices if isinstance(choice, str) and choice != CUSTOM)
    return f"is missing; give one of: {', '.join(known)}" if known else "is missing"


def _tags_at(location: Location) -> list[str]:
    """The names of the sections that may stand somewhere in a job."""
    choices: list[type[BaseModel]] = [Job]
    for part in location:
        fields = [choice.model_fields[str(part)] for choice in choices if str(part) in choice.model_fields]
        choices = [section for field in fields for section in _sections(field.annotation)]
    return [tag for choice in choices for tag in _tags(choice)]


def _fields(section: type[BaseModel] | None) -> list[str]:
    """The fields of a section as a file names them."""
    return [] if section is None else [field.alias or name for name, field in section.model_fields.items()]


def _without_tags(loc: Sequence[str | int]) -> tuple[Location, type[BaseModel] | None]:
    """A location without the names that pydantic puts in for a chosen section, and the section that it ends in."""
    section: type[BaseModel] | None = Job
    choices: list[type[BaseModel]] = []
    path: list[str | int] = []
    for part in loc:
        chosen = [choice for choice in choices if part in _tags(choice)]
        if chosen:
            section, choices = chosen[0], []
            continue
        path.append(part)
        field = section.model_fields.get(str(part)) if section is not None else None
        if field is not None:
            choices = list(_sections(field.annotation))
            section = choices[0] if len(choices) == 1 else section if not choices else None
    return tuple(path), section


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    for name in ("name", "reader"):
        if name in section.model_fields:
            return get_args(section.model_fields[name].annotation) or (CUSTOM,)
    return (CUSTOM,) if issubclass(section, CodeSection) else ()
