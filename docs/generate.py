"""Generate the references from the code: jobs from pydantic's models, commands from typer, the API from the stub.

`python docs/generate.py` writes docs/job.schema.json and the tables of docs/monitoring.md, which are kept; `make docs`
writes the pages of docs/reference.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
SCHEMA = _DOCS / "job.schema.json"
MONITORING = _DOCS / "monitoring.md"
_Schema = dict[str, Any]


def job_schema() -> _Schema:
    """Return the JSON schema of a job file."""
    from embershard.worker.job.job import Job

    schema: _Schema = Job.model_json_schema()
    described = _described(_with_comments(schema, _sections()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": "embershard job"}


def write_pages(folder: Path) -> None:
    """Write job.md, commands.md, api.md, and README.md and CONTRIBUTING.md with links from this folder."""
    folder.mkdir(exist_ok=True)
    pages = {"job.md": job_page(), "commands.md": command_page(), "api.md": api_page()}
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (_DOCS.parent / name).read_text()
        pages[name.lower()] = text.replace("](docs/", "](../").replace("](CONTRIBUTING.md", "](contributing.md")
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # a page that did not change is not built again
            path.write_text(text)


def _sections() -> dict[str, type]:
    """The models of the schema's sections by their names."""
    from embershard.worker.job.job import Job
    from embershard.worker.job.sections import Section

    found: dict[str, type] = {}
    waiting: list[type] = [Section]
    while waiting:
        section = waiting.pop()
        found[section.__name__] = section
        waiting += section.__subclasses__()
    return {**found, "Job": Job}


def _with_comments(schema: _Schema, sections: dict[str, type]) -> _Schema:
    """The schema with what the source says beside each field."""
    for name, definition in {**schema["$defs"], "Job": schema}.items():
        for field, comment in _comments(sections[name]).items() if name in sections else ():
            shown = getattr(getattr(sections[name], "model_fields", {}).get(field), "alias", None) or field
            if shown in definition.get("properties", {}):
                definition["properties"][shown].setdefault("description", comment)
    return schema


def _comments(section: type) -> dict[str, str]:
    """Field -> the text below it, or the comment behind it, of a section and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if cls.__module__.startswith("embershard."):
            found |= _own_comments(cls)
    return found


@cache  # inspect parses the whole file for each class that it finds there
def _own_comments(cls: type) -> dict[str, str]:
    """The same of a section without its bases."""
    found: dict[str, str] = {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # made at run time from proto/spec.py
        return found
    lines, (body,) = source.splitlines(), ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comment = lines[(node.end_lineno or 0) - 1].partition("  # ")[2].removeprefix("type: ignore[assignment]")
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            comment = inspect.cleandoc(str(after.value.value))
        if comment:
            found[node.target.id] = comment
    return found


def _described(part: Any) -> Any:
    """A part of the schema as editors want it: one of several sections is any of them, each once, without titles."""
    if isinstance(part, list):
        return [_described(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {key: _described(value) for key, value in part.items() if key != "title" or not isinstance(value, str)}
    choices = found.pop("oneOf", None)
    found.pop("discriminator", None)
    if choices is not None:
        found["anyOf"] = [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
    return found


def job_page() -> str:
    """Return the reference of job files: a table for each section."""
    schema = job_schema()
    lines = [
        "# The job file",
        "",
        "Every field of a job file, with its default. It is generated from the models that check a job. Editors",
        "complete and check a job with [job.schema.json](../job.schema.json): put",
        "`# yaml-language-server: $schema=PATH/job.schema.json` into its first line.",
        "",
        *_section(schema, "Job", "A job"),
    ]
    done, waiting = {"Job"}, [*_references(schema, "Job", schema)]
    while waiting:
        name, title = waiting.pop(0)
        if name not in done:
            done.add(name)
            lines += _section(schema, name, title)
            waiting = [*_references(schema["$defs"][name], title, schema), *waiting]
    return "\n".join(lines)


def _references(definition: _Schema, path: str, schema: _Schema) -> Iterator[tuple[str, str]]:
    """(Name, title) of the sections that the fields of a section may be."""
    for field, part in definition.get("properties", {}).items():
        here = field if path == "Job" else f"{path.partition(': ')[0]}.{field}"
        names = list(dict.fromkeys(re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(part))))
        for name in names:
            properties = schema["$defs"][name].get("properties", {})
            kind = properties.get("name") or properties.get("reader") or {}
            words = [kind["const"]] if "const" in kind else kind.get("enum", [])
            choice = ", ".join(map(str, words)) or "module:name"
            yield name, f"{here}: {choice}" if len(names) > 1 else here


def _section(schema: _Schema, name: str, title: str) -> list[str]:
    definition = schema if name == "Job" else schema["$defs"][name]
    rows = [
        f"| `{field}` | {_kind(part, schema)} | {_default(field, part, definition)} | "
        f"{' '.join(part.get('description', '').split())} |"
        for field, part in definition.get("properties", {}).items()
    ]
    table = ["| field | value | default | |", "|---|---|---|---|", *rows, ""] if rows else []
    return [f"({_anchor(name)})=", f"## {title}", "", definition.get("description", ""), "", *table]


def _anchor(name: str) -> str:
    return f"job-{name.lower()}"


def _default(field: str, part: _Schema, definition: _Schema) -> str:
    if field in definition.get("required", ()):
        return "required"
    value = part.get("default")
    return "" if value is None or value in ({}, []) or isinstance(value, dict) else f"`{json.dumps(value)}`"


def _kind(part: _Schema, schema: _Schema) -> str:
    """What a field may be, in words."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f"[section](#{_anchor(name)})"
    if "anyOf" in part:
        kinds = list(dict.fromkeys(_kind(one, schema) for one in part["anyOf"]))
        names = [re.findall(r"\(#(.*)\)", kind) for kind in kinds]
        if sum(map(bool, names)) > 1:  # a choice of sections
            return ", ".join(f"[{_choice(name[0], schema)}](#{name[0]})" for name in names if name)
        return " or ".join(kind for kind in kinds if kind not in ("null", ""))
    if "const" in part or "enum" in part:  # False is how YAML 1.1 reads `off`
        return ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]) if value is not False)
    match part.get("type"):
        case "array":
            return f"list of {_kind(part.get('items', {}), schema)}"
        case "integer" | "number" as kind:
            return kind + _range(part)
        case "string":
            return "text"
        case "boolean":
            return "true, false"
        case "object":
            return "fields"
        case None:
            return "text or number"
        case kind:
            return str(kind)


def _choice(anchor: str, schema: _Schema) -> str:
    definition = next(value for name, value in schema["$defs"].items() if _anchor(name) == anchor)
    properties = definition.get("properties", {})
    kind = properties.get("name") or properties.get("reader") or {}
    return str(kind["const"]) if "const" in kind else ", ".join(kind.get("enum", ["module:name"]))


def _range(part: _Schema) -> str:
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {part[word]:.15g}" for word, sign in words.items() if word in part]
    return f" {', '.join(bounds)}" if bounds else ""


def command_page() -> str:
    """Return the reference of the command line."""
    from embershard.cli.app import COMMANDS, _load

    lines = [
        "# Commands",
        "",
        "Every command with its arguments and options, as `--help` shows them. `--ps` names the shards of a command.",
        "Without it, the environment variable EMBERSHARD_PS names them, unless an option contradicts it (`--shards`).",
        "",
    ]
    for name in COMMANDS:
        command: Any = _load(name)
        lines += _command(f"embershard {name}", command)
        for sub, one in getattr(command, "commands", {}).items():
            lines += _command(f"embershard {name} {sub}", one, "###")
    return "\n".join(lines)


def _command(name: str, command: Any, heading: str = "##") -> list[str]:
    parameters = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    words = [one.metavar or (one.name.upper() if one.required else f"[{one.name.upper()}]") for one in arguments]
    rows = [(f"`{word}`", one) for word, one in zip(words, arguments, strict=True)]
    rows += [(", ".join(f"`{word}`" for word in one.opts), one) for one in options]
    table = [f"| {shown} | {_about(one)} |" for shown, one in rows]
    usage = [f"`{' '.join([name, *words])}`", ""] if not hasattr(command, "commands") else []
    head = ["| | |", "|---|---|"] if table else []
    return [f"{heading} {name}", "", inspect.cleandoc(command.help or ""), "", *usage, *head, *table, ""]


def _about(parameter: Any) -> str:
    words = [" ".join((parameter.help or "").replace("|", "\\|").split())]
    words += [f"Environment: `{parameter.envvar}`."] if parameter.envvar else []
    default = parameter.default
    if default not in (None, "", False, ...) and not callable(default) and "default:" not in words[0]:
        words += [f"Default: {default}."]
    return " ".join(
        ["Required." if parameter.required and parameter.param_type_name == "option" else "", *words]
    ).strip()


# by the module that a public name comes from, the first that fits
_GROUPS = {
    "Shards and sessions": ("embershard.local_shards", "embershard.worker.session", "embershard.worker.client"),
    "Modules": ("embershard.worker.nn",),
    "Optimizers, first values and tables": ("embershard.proto.spec",),
    "Optimizers and codecs of your own": ("embershard.ps.table", "embershard.proto.codec"),
    "Data": ("embershard.worker.data",),
    "Compression": ("embershard.worker.compression",),
    "Snapshots": ("embershard.worker.checkpoint",),
    "Trained models": ("embershard.worker.trained",),
    "Errors": ("embershard.proto.errors", "embershard"),
    "More": ("",),
}


_KINDS = {"class": inspect.isclass, "module": inspect.ismodule, "function": callable}


def api_page() -> str:
    """Return the reference of the public names, which Sphinx fills from their docstrings."""
    import embershard

    groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for name, module in embershard._modules().items():
        group = next(group for group, roots in _GROUPS.items() if any(module.startswith(root) for root in roots))
        groups["Errors" if name == "errors" else group].append(name)
    lines = ["# Python API", "", "The public names of embershard, `import embershard as es`.", ""]
    for group, names in groups.items():
        lines += [f"## {group}", ""] if names else []
        for name in sorted(names, key=str.lower):
            value = getattr(embershard, name)
            kind = next((word for word, fits in _KINDS.items() if fits(value)), "data")
            options = ["   :members:", "   :exclude-members: __init__, __new__"] if kind == "class" else []
            lines += ["```{eval-rst}", f".. auto{kind}:: embershard.{name}", *options, "```", ""]
    return "\n".join(lines)


def monitoring_page() -> str:
    """docs/monitoring.md with its tables of metrics and alerts."""
    text = MONITORING.read_text()
    for name, table in (("metrics", _metrics()), ("alerts", _alerts())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(table) + "\n" + end + rest.partition(end)[2]
    return text


def _metrics() -> list[str]:
    from embershard.proto.monitoring.metrics import SHARD_METRICS, WORKER_METRICS

    lines = []
    for title, metrics in (("Shards", SHARD_METRICS), ("Workers", WORKER_METRICS)):
        header = "| metric | type | labels | what it is | where it comes from |"
        lines += ["", f"### {title}", "", header, "|---|---|---|---|---|"]
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} | {metric.source} |")
    return [*lines, ""]


def _alerts() -> list[str]:
    from embershard.deploy.grafana.alerts import ALERTS

    lines = ["", "| alert | fires when | for | what to do |", "|---|---|---|---|"]
    for alert in ALERTS:
        query = alert.query.replace("|", "\\|")
        lines.append(f"| {alert.name} ({alert.severity}) | `{query}` | {alert.wait} | {alert.remedy} |")
    return [*lines, ""]


if __name__ == "__main__":
    MONITORING.write_text(monitoring_page())
    SCHEMA.write_text(json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n")
