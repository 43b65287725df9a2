"""Job files as YAML that remembers its lines, with `--set` overrides on top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

Location = tuple[str | int, ...]  # the sections that a field is in, and its name
Problems = Iterator[tuple[Location, str]]  # which field contradicts others, and why
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")}


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong with a job: where (a line or an override), which field, and why."""

    where: str
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.field}: {self.reason}" if self.field else f"{self.where}: {self.reason}"


class _Constructor(RoundTripConstructor):
    """Sections that know the lines of their fields, which words name."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if not isinstance(key, str | int):  # a number: a step of a schedule
            raise ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        return bool(super().check_mapping_key(node, key_node, mapping, key, value))


for _tag in ("timestamp", "str", "value"):  # as written; value: the sign =
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", RoundTripConstructor.construct_scalar)


@dataclass
class JobSource:
    """The values of a job file and where each one stands."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)  # as ruamel.yaml gives them: `lc` has the lines
    overrides: dict[Location, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, name: str) -> JobSource:
        """The YAML text of the file `name`; what is not YAML is among the mistakes."""
        source = cls(name)
        try:
            # aliases can nest without bound, tags name types of a program, and no job needs either; to look for them
            # takes as long as to read the rest
            for event in _yaml().parse(text) if "*" in text or "!" in text else ():
                if isinstance(event, AliasEvent):
                    source._add(event.start_mark.line, f"the alias *{event.anchor}: write its value out")
                elif (tag := getattr(event, "tag", None)) and str(tag) not in _PLAIN_TAGS:
                    source._add(event.start_mark.line, f"the tag {tag}: leave it out")
            values = {} if source.mistakes else _yaml().load(text)
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            said = [part for name in ("context", "problem") if (part := getattr(error, name, None))]
            reason = " ".join(map(str, said or str(error).split()))
            remedy = "; indent with spaces, not with tabs" if r"'\t'" in reason else ""
            source._add(mark.line if mark else 0, f"not YAML: {reason}{remedy}")
            return source
        if isinstance(values, dict):
            source.values = values
        else:
            source._add(0, "a job is a mapping of sections (model, data, train, ...)")
        return source

    def override(self, assignments: Sequence[str], choices: Sequence[frozenset[str]] = ()) -> None:
        """Apply "train.epochs=3" and the like; the right side is YAML.

        An override of one of several `choices`, of which a job has one, takes the place of the file's.
        """
        given = {assignment.partition("=")[0] for assignment in assignments}
        for alternatives in choices:
            for key in alternatives - given if alternatives & given else ():
                self.drop(key)
        for assignment in assignments:
            where = f"--set {assignment}"
            key, equals, text = assignment.partition("=")
            parts = key.split(".")
            if not equals or not all(parts):
                self.mistakes.append(Mistake(where, "", "must read section.field=value"))
                continue
            if not text.strip():  # more often a variable of the shell that is empty than what is meant
                self.mistakes.append(Mistake(where, key, "has no value; null takes it as not given"))
                continue
            try:
                value = _yaml().load(text)
            except YAMLError:
                self.mistakes.append(Mistake(where, key, f"{text!r} is not YAML"))
                continue
            plain = value if isinstance(value, str) else ""
            if text.strip().removeprefix(plain).lstrip().startswith("#"):  # a path would silently be another one
                reason = f"YAML takes what follows # in {text!r} for a comment; put the value in quotes, as '\"a #b\"'"
                self.mistakes.append(Mistake(where, key, reason))
                continue
            self.put(parts, value, where)

    def drop(self, key: str) -> None:
        """Take a field (section.field) as not given."""
        parts = key.split(".")
        section: Any = self.values
        for part in parts[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(parts[-1], None)

    def where(self, path: Location) -> str:
        """file:line (or the override) of a field, or of the section that it is missing from."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.overrides:
                return self.overrides[path[:end]]
        line = 0
        value: Any = self.values
        for part in path:
            lines = value.lc.data if hasattr(value, "lc") else None  # {field: (line, ...)}
            if not lines or part not in lines:
                break
            line = lines[part][0]
            value = value.get(part) if isinstance(value, dict) else value[part]
        return f"{self.name}:{line + 1}"

    def put(self, parts: Sequence[str], value: object, where: str) -> None:
        """Give a field, behind its sections, a value; `where` is what a mistake with it is said of."""
        section = self.values
        for depth, part in enumerate(parts[:-1]):
            if part not in section:
                section[part] = {}
                self.overrides[tuple(parts[: depth + 1])] = where
            section = section[part]
            if not isinstance(section, dict):
                reason = f"{'.'.join(parts[: depth + 1])} holds no fields, but {section!r}"
                self.mistakes.append(Mistake(where, ".".join(parts), reason))
                return
        section[parts[-1]] = value
        self.overrides = {path: at for path, at in self.overrides.items() if path[: len(parts)] != tuple(parts)}
        self.overrides[tuple(parts)] = where

    def _add(self, line: int, reason: str) -> None:
        self.mistakes.append(Mistake(f"{self.name}:{line + 1}", "", reason))


def _yaml() -> YAML:
    yaml = YAML()
    yaml.Constructor = _Constructor
    return yaml
