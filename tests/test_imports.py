"""Imports go one way: worker -> proto <- ps, and within each from its floors to those below. Lazy imports count too.

And what else holds for every file: which calls it makes, which class a name stands for; and what the package shows.
"""

import ast
import functools
import gc
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import embershard

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("proto", "ps", "worker", "deploy")
# Which part imports which, bottom first: a part (a folder, or a file of a root) imports itself and parts of the rows
# above its own. Parts of one row do not import each other. An import-linter contract cannot say this: it wants packages
# with an __init__, which proto/ must not have.
FLOORS = (
    {"proto/arrays", "proto/clock", "proto/errors"},
    {"proto/compiled", "proto/monitoring", "proto/security", "proto/shared_memory"},
    {"proto/routing", "proto/timing", "proto/user_modules", "proto/wire"},
    {"proto/codec/values", "proto/torch_rpc"},
    {"proto/codec"},
    {"proto/spec"},
    {"proto/messages", "proto/optim", "proto/snapshot"},
    {"proto/protobuf"},
    {"proto/transport"},
    {"deploy"},
    {"deploy/grafana", "deploy/manifests"},
)
FLOORS_OF_PS = (
    {"ps/memory", "ps/monitoring", "ps/journal", "ps/options", "ps/security"},
    {"ps/apply_thread"},
    {"ps/table"},
    {"ps/coordination", "ps/bases"},
    {"ps/snapshot", "ps/restore", "ps/compression_settings"},
    {"ps/events"},
    {"ps/core"},
    {"ps/shard"},
    {"ps/recovery"},
    {"ps/dispatch"},
    {"ps/transport"},
    {"ps/server"},
)
FLOORS_OF_WORKER = (
    {"worker/device", "worker/kernels", "worker/metrics", "worker/patterns"},
    {"worker/compression"},
    {"worker/client"},
    {"worker/session"},
    {"worker/data/inputs"},
    {"worker/nn", "worker/data"},
    {"worker/data/readers", "worker/data/interactions"},
    {"worker/models"},
    {"worker/models/ctr", "worker/models/multitask", "worker/models/retrieval", "worker/models/sequence"},
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


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def sources(*folders):
    """The files of some folders, with their syntax trees; rglob does not follow the links in src/embershard."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    gc.disable()
    found = [(path, parsed(path)) for path in paths if "_pb2" not in path.name]
    gc.freeze()  # the trees stay, and a search of them for garbage takes as long as parsing them
    gc.enable()
    return found


@functools.cache
def nodes(tree):
    """The imports, calls and classes of a file."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call, ast.ClassDef))]


@functools.cache
def imported(tree):
    names = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def file_of(name):
    """The file of a module of ours; None of any other name, which may be a name inside a module."""
    words = name.split(".")
    file = ROOT.joinpath(*words[1:]).with_suffix(".py")
    is_ours = words[0] == "embershard" and len(words) > 2 and file.exists() and "_pb2" not in file.name
    return file if is_ours else None


@functools.cache
def part_of(path):
    """The part that a file belongs to."""
    path = path.relative_to(ROOT)
    is_root = len(path.parts) == 2 and path.parts[0] != "deploy"
    return (path.with_suffix("") if is_root else path.parent).as_posix()


@pytest.mark.parametrize("floors", [FLOORS, FLOORS_OF_PS, FLOORS_OF_WORKER], ids=["proto", "ps", "worker"])
def test_a_part_imports_only_those_below_it(floors):
    """`worker -> proto <- ps`, and within each no import goes up or round."""
    below = (
        {part for floor in FLOORS for part in floor if not part.startswith("deploy")} if floors is not FLOORS else set()
    )
    for floor in floors:
        for path, tree in sources(*FOLDERS):
            for name in imported(tree) if part_of(path) in floor else ():
                assert name.split(".")[0] not in FOLDERS, f"{path}: import {name} through embershard.{name}"
                if file := file_of(name):
                    part = part_of(file)
                    assert part == part_of(path) or part in below, f"{path} imports {part}"
        below |= floor


def test_every_file_stands_on_a_floor_and_no_folder_is_crowded():
    paths = [path for path, _ in sources(*FOLDERS)]
    assert set(map(part_of, paths)) == set().union(*FLOORS, *FLOORS_OF_PS, *FLOORS_OF_WORKER)
    files = Counter(path.parent for path in paths)
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}
    assert files[ROOT / "worker"] <= MOST_FILES_OF_WORKER


def test_only_the_command_line_imports_itself_and_a_shard_needs_no_trainer_library():
    for path, tree in sources("proto", "ps", "deploy", "src"):
        package = path.relative_to(ROOT).parts[2] if path.is_relative_to(ROOT / "src") else "a shard's"
        for name in imported(tree):
            assert package in ("cli", "__main__.py") or not name.startswith("embershard.cli"), f"{path} imports {name}"
            if package == "a shard's" and path.name not in ASKED_FOR:
                assert name.split(".")[0] not in HEAVY, f"{path} imports {name}"


def test_nothing_executes_what_it_receives():
    for path, tree in sources(*FOLDERS, "src"):
        assert not {"pickle", "marshal", "shelve"} & {name.split(".")[0] for name in imported(tree)}, path
        for call in (node.func for node in nodes(tree) if isinstance(node, ast.Call)):
            if isinstance(call, ast.Name):
                assert call.id not in FORBIDDEN_CALLS, f"{path}:{call.lineno}"
            if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
                assert (call.value.id, call.attr) not in FORBIDDEN_ATTRIBUTES, f"{path}:{call.lineno}"


def test_the_name_of_a_public_class_stands_for_one_class():
    found = defaultdict(list)
    for path, tree in sources(*FOLDERS, "src"):
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_star_import_gives_the_public_names_each_of_which_is_there_and_no_others():
    names = {}
    exec("from embershard import *", names)
    assert set(names) - {"__builtins__"} == set(embershard.__all__) <= set(dir(embershard))
    assert None not in names.values()
    assert {"connect", "wrap", "errors"} <= set(names)
    assert not {"use_onednn", "keep_freed_memory"} & set(names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = embershard.no_such_name


def test_importing_the_package_loads_nothing_of_it():
    code = "import sys, embershard; print(*(m for m in sys.modules if m.startswith('embershard.') or m == 'torch'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
