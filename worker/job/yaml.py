"""Job files as YAML that remembers its lines, with `--set` overrides on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

Scalar = str | int | float | bool | None
Value = Scalar | list["Value"] | dict[str, "Value"]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong with a job: where (a line or an override), which field, and why."""

    where: str
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.field}: {self.reason}" if self.field else f"{self.where}: {self.reason}"


@dataclass
class JobSource:
    """The values of a job file and where each one stands."""

    name: str
    values: dict[str, Value] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, name: str) -> JobSource:
        """The YAML text of the file `name`; what is not YAML, or says a key twice, is among the mistakes."""
        source = cls(name)
        try:
            # aliases can nest without bound, and no job needs them
            aliases = [event for event in yaml.parse(text, yaml.SafeLoader) if isinstance(event, yaml.AliasEvent)]
            node = None if aliases else yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            said = [part for name in ("context", "problem") if (part := getattr(error, name, None))]
            reason = " ".join(map(str, said or str(error).split()))
            source._add(mark.line + 1 if mark else 1, (), f"not YAML: {reason}")
            return source
        for alias in aliases:
            source._add(
                alias.start_mark.line + 1 if alias.start_mark else 1,
                (),
                f"the alias *{alias.anchor}: write its value out",
            )
        if aliases:
            return source
        if not isinstance(node, yaml.MappingNode):
            source._add(1, (), "a job is a mapping of sections (model, data, train, ...)")
        else:
            source.values = source._mapping(node, ())
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
                value: Value = yaml.safe_load(text)
            except yaml.YAMLError:
                self.mistakes.append(Mistake(where, key, f"{text!r} is not YAML"))
                continue
            self.put(parts, value, where)

    def drop(self, key: str) -> None:
        """Take a field (section.field) as not given."""
        parts = key.split(".")
        section: Value = self.values
        for part in parts[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(parts[-1], None)

    def where(self, path: Path) -> str:
        """file:line (or the override) of a field, or of the section that it is missing from."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, f"{self.name}:1")

    def put(self, parts: Sequence[str], value: Value, where: str) -> None:
        """Give a field, behind its sections, a value; `where` is what a mistake with it is said of."""
        section: Value = self.values
        for depth, part in enumerate(parts[:-1]):
            assert isinstance(section, dict)
            below = section.setdefault(part, {})
            self.places.setdefault(tuple(parts[: depth + 1]), where)
            if not isinstance(below, dict):
                reason = f"{'.'.join(parts[: depth + 1])} holds no fields, but {below!r}"
                self.mistakes.append(Mistake(where, ".".join(parts), reason))
                return
            section = below
        assert isinstance(section, dict)
        section[parts[-1]] = value
        self.places = {path: at for path, at in self.places.items() if path[: len(parts)] != tuple(parts)}
        self.places[tuple(parts)] = where

    def _value(self, node: yaml.Node, path: Path) -> Value:
        self.places.setdefault(path, f"{self.name}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        scalar: Scalar = _scalar(node)
        return scalar

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self._add(line, path, "a key must be a word")
            elif key in values:
                self._add(line, (*path, key), "given twice")
            else:
                self.places[(*path, key)] = f"{self.name}:{line}"
                values[key] = self._value(value_node, (*path, key))
        return values

    def _add(self, line: int, path: Path, reason: str) -> None:
        self.mistakes.append(Mistake(f"{self.name}:{line}", ".".join(map(str, path)), reason))


def _scalar(node: yaml.Node) -> Scalar:
    constructor = yaml.constructor.SafeConstructor()
    try:
        value = constructor.construct_object(node)
    except yaml.YAMLError:
        return str(node.value)
    return value if isinstance(value, str | int | float | bool | None) else str(node.value)  # a date, say: as written


def as_mapping(value: Value) -> Mapping[str, Value]:
    """A value's fields, none where it is no section."""
    return value if isinstance(value, dict) else {}
