"""Imports go one way: worker -> proto <- ps, and within each from its floors to those below. Lazy imports count too."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "embershard"
FOLDERS = ("proto", "ps", "worker", "deploy")
# Which part imports which, bottom first: a part (a folder, or a file of a root) imports itself and parts of the rows
# above its own. Parts of one row do not import each other. An import-linter contract cannot say this: it wants packages
# with an __init__, which proto/ must not have.
FLOORS = (
    {"proto/arrays", "proto/errors"},
    {"proto/compiled"},
    {"proto/routing", "proto/timing", "proto/user_modules", "proto/wire"},
    {"proto/codec/values", "proto/reference", "proto/torch_rpc"},
    {"proto/codec"},
    {"proto/spec"},
    {"proto/messages", "proto/optim", "proto/snapshot"},
    {"proto/protobuf", "proto/lineage"},
    {"proto/transport"},
    {"deploy"},
)
FLOORS_OF_PS = (
    {"ps/memory", "ps/apply_thread"},
    {"ps/table"},
    {"ps/coordination"},
    {"ps/snapshot", "ps/restore", "ps/compression_settings"},
    {"ps/shard"},
    {"ps/dispatch"},
    {"ps/transport"},
    {"ps/server"},
)
FLOORS_OF_WORKER = (
    {"worker/device", "worker/kernels", "worker/metrics", "worker/patterns"},
    {"worker/compression"},
    {"worker/client"},
    {"worker/session"},
    {"worker/nn", "worker/data"},
    {"worker/data/readers"},
    {"worker/models"},
    {"worker/job"},
    {"worker/strategy", "worker/checkpoint"},
    {"worker/reporting"},
    {"worker/training"},
    {"worker/trained"},
)
MOST_FILES = 12  # of a folder of proto/, ps/ and worker/
MOST_FILES_OF_WORKER = 8  # of its root
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("numpy", "load"), ("np", "load")}
# what a shard's process must not load: it starts in about a second and fits a small container
HEAVY = {"torch", "pyarrow", "pydantic", "torchmetrics"}
# but for the transport over torch.distributed.rpc, which is loaded where it is asked for
ASKED_FOR = {"torch_rpc.py"}


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    """The part that a file belongs to."""
    path = path.relative_to(ROOT)
    is_root = len(path.parts) == 2 and path.parts[0] != "deploy"
    return (path.with_suffix("") if is_root else path.parent).as_posix()


def imported_parts(path: Path) -> Iterator[str]:
    """The parts of proto, ps, worker and deploy that a file imports from."""
    for name in imported(ast.parse(path.read_text())):
        words = name.split(".")
        assert words[0] not in FOLDERS, f"{path}: import {name} through embershard.{name}"
        if words[0] == "embershard" and len(words) > 2:
            file = ROOT.joinpath(*words[1:]).with_suffix(".py")
            if file.exists() and "_pb2" not in file.name:
                yield part_of(file)


@pytest.mark.parametrize("floors", [FLOORS, FLOORS_OF_PS, FLOORS_OF_WORKER], ids=["proto", "ps", "worker"])
def test_a_part_imports_only_those_below_it(floors):
    """`worker -> proto <- ps`, and within each no import goes up or round."""
    below = set().union(*FLOORS) - {"deploy"} if floors is not FLOORS else set()
    for floor in floors:
        for path in (path for folder in FOLDERS for path in sources(folder) if part_of(path) in floor):
            for part in imported_parts(path):
                assert part == part_of(path) or part in below, f"{path} imports {part}"
        below |= floor


def test_every_file_stands_on_a_floor_and_no_folder_is_crowded():
    parts = [part_of(path) for folder in FOLDERS for path in sources(folder)]
    assert set(parts) == set().union(*FLOORS, *FLOORS_OF_PS, *FLOORS_OF_WORKER)
    files = Counter(path.parent for folder in FOLDERS for path in sources(folder))
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}
    assert files[ROOT / "worker"] <= MOST_FILES_OF_WORKER


def test_only_the_command_line_imports_itself():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in ("cli", *FOLDERS):
            for name in imported(ast.parse(path.read_text())):
                assert not name.startswith("embershard.cli"), f"{path} imports {name}"


@pytest.mark.parametrize("folder", ["proto", "ps", "deploy"])
def test_a_shard_needs_no_trainer_library(folder):
    for path in sources(folder):
        if path.name in ASKED_FOR:
            continue
        for name in imported(ast.parse(path.read_text())):
            assert name.split(".")[0] not in HEAVY, f"{path} imports {name}"


@pytest.mark.parametrize("folder", [*FOLDERS, "src"])
def test_nothing_executes_what_it_receives(folder):
    for path in sources(folder):
        tree = ast.parse(path.read_text())
        assert not {"pickle", "marshal", "shelve"} & {name.split(".")[0] for name in imported(tree)}, path
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                assert (node.func.value.id, node.func.attr) not in FORBIDDEN_ATTRIBUTES, f"{path}:{node.lineno}"
