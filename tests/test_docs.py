"""README.md and docs/: every block of code runs, or is checked as it says; what is generated is current."""

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from functools import cache, reduce
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from embershard.cli.app import COMMANDS, _load
from embershard.ps.security.access_file import parse_access
from embershard.worker.job.load import load_job
from embershard.worker.job.sections import InitializerSection, OptimizerSection
from harness.pages import LANGUAGES, PAGES, ROOT, blocks, run_page
from harness.served import ServedShard

ALL = [block for page in PAGES for block in blocks(page)]
BASE = {
    "model": {"name": "dlrm"},
    "data": {"reader": "clicks", "samples": 1000},
    "embedding": {"optimizer": {"name": "adagrad", "lr": 0.05}},
    "dense": {"optimizer": {"name": "adam", "lr": 0.001}},
    "train": {"batch_size": 100, "epochs": 1},
}


def of(*languages):
    return [block for block in ALL if block.language in languages]


@cache
def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_block_says_how_it_is_run():
    for block in ALL:
        known = LANGUAGES[block.language]
        assert known is None or set(block.words) <= known, block
    assert len(of("python")) > 10
    for page in PAGES:
        text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", page.read_text())
        assert not re.search(r"(?m)^\n {4}\w.*\n", text), f"{page}: indented code is not run; fence it"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_points_of_a_list_are_lines_of_their_own(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    assert not re.findall(r"[.:;)] [2-9]\. [A-Z`*].*", text)


@pytest.fixture
def served():
    shard = ServedShard()
    yield shard.address
    shard.stop()


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.page == p for b in of("python"))], ids=lambda p: p.stem)
def test_python_blocks_run(page, served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    run_page(page, {"addresses": served})
    for name in set(sys.modules) - before:  # modules that the page wrote
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def merged(base, part):
    return {**base, **{k: merged(base[k], v) if isinstance(base.get(k), dict) and isinstance(v, dict) else v
                       for k, v in part.items()}}  # fmt: skip


def is_replaced(key, value):
    """Whether a section is another choice than the base's, whose fields it must not keep."""
    return key in ("model", "data") or (isinstance(value, dict) and "name" in value)


@pytest.mark.parametrize("block", [block for block in of("yaml") if "access" in block.words], ids=str)
def test_files_of_who_may_do_what_are_valid(block):
    assert parse_access(block.text, str(block))


@pytest.mark.parametrize("block", [block for block in of("yaml") if "access" not in block.words], ids=str)
def test_parts_of_jobs_are_valid(block, tmp_path):
    part = YAML(typ="safe", pure=True).load(block.text)
    if "job" not in block.words:
        part = reduce(lambda inner, section: {section: inner}, block.words, part)
        base = {key: value for key, value in BASE.items() if not (key in part and is_replaced(key, part[key]))}
        part = merged(base, part)
    for split in ("train", "valid", "test", "actions", "catalogue"):
        for path in [part["data"][split]] if isinstance(part["data"].get(split), str) else part["data"].get(split, []):
            (tmp_path / part["data"].get("root", "") / path).touch()
    path = tmp_path / "job.yaml"
    with path.open("w") as file:
        YAML().dump(part, file)
    load_job(path)


TARGETS = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# other people's programs, and their words
OTHERS = ("kubectl", "podman", "podman-compose", "salloc", "sbatch", "systemctl")


def check_command(words):
    """That a command is one that there is, with arguments and options that it has."""
    program = words.pop(0)
    if program == "embershard":
        name = words.pop(0)
        assert name in COMMANDS, name
        command = _load(name)
        if hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        with command.make_context(name, words):  # parses, and runs nothing
            return
    if program == "torchrun":
        start = next(i for i, word in enumerate(words) if word in ("embershard", "embershard.cli"))
        return check_command(["embershard", *words[start + 1 :]])
    if program == "make":
        assert words[0] in TARGETS, words
    elif program == "pip":
        extras = re.findall(r"\[(.*)\]", words[-1])
        assert all(extra in EXTRAS for one in extras for extra in one.split(",")), words
    elif program == "python" and words[0] == "-c":
        compile(words[1], "python -c", "exec")
    elif program == "python" and words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words
    else:
        assert program in (*OTHERS, "(head", "cd", "curl", "export", "head", "python", "tail"), (
            f"{program}: say in this test what is right about it"
        )


@pytest.mark.parametrize("block", [block for block in of("bash") if block.is_shown], ids=str)
def test_commands_are_parsed(block, monkeypatch):
    monkeypatch.delenv("EMBERSHARD_PS", raising=False)
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if ">" in words:
            words = words[: words.index(">")]
        if words:
            check_command(words)


def test_the_schema_of_jobs_and_the_tables_of_metrics_are_those_of_the_code():
    """`python docs/generate.py` writes them."""
    assert (ROOT / "docs" / "monitoring.md").read_text() == generator().monitoring_page()
    assert json.loads((ROOT / "docs" / "job.schema.json").read_text()) == generator().job_schema()


def test_every_field_of_a_job_is_described():
    """A text beside the field or in its section; the numbers of optimizers and initializers are called as in torch."""
    as_in_torch = {
        section.__name__ for base in (OptimizerSection, InitializerSection) for section in base.__subclasses__()
    }
    schema = generator().job_schema()
    for name, section in {"Job": schema, **schema["$defs"]}.items():
        about = section["description"]
        for field, part in section.get("properties", {}).items() if name not in as_in_torch else ():
            assert field in ("name", "reader") or part.get("description") or f"`{field}" in about, f"{name}.{field}"


def test_the_references_name_every_command_field_and_public_name(tmp_path):
    import embershard

    generator().write_pages(tmp_path)
    commands, api, job = ((tmp_path / name).read_text() for name in ("commands.md", "api.md", "job.md"))
    assert {f"## embershard {name}" for name in COMMANDS} <= set(commands.splitlines())
    assert {f"embershard.{name}" for name in embershard.__all__} <= set(api.split())
    fields = {field for part in generator().job_schema()["$defs"].values() for field in part.get("properties", {})}
    assert {f"| `{field}`" for field in fields} <= set(re.findall(r"(?m)^\| `\w+`", job))


def links(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    return re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)|src(?:set)?=\"(?!https?:)([^\"]+)\"", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    for target, source in links(page):
        path = Path(target or source)
        assert (page.parent / path).exists() or path.parts[-2:-1] == ("reference",), f"{page}: {path}"


def headings(page):
    return re.findall(r"(?m)^#{1,3} (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_anchors_lead_to_headings(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text):
        other = page.parent / target if target else page
        if other.parent.name != "reference":
            assert anchor in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings(other)], other


def test_the_code_names_pages_and_headings_that_are_there():
    folders = ("deploy", "proto", "ps", "worker", "src/embershard")
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(code) > 200
    for path in code:
        for name, heading in re.findall(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?', path.read_text()):
            assert (ROOT / name).exists(), f"{path}: {name}"
            assert not heading or heading in headings(ROOT / name), f"{path}: {name}, {heading!r}"
