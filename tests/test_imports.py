"""Imports go one way: worker -> proto <- ps, and within each from its floors to those below. Lazy imports count too.

And what else holds for every file: which calls it makes, which class a name stands for; and what the package shows.
"""

import ast
import functools
import gc
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import embershard

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("proto", "ps", "worker", "deploy")
PACKAGE = ROOT / "src" / "embershard"
# Which part imports which, bottom first: a part (a folder, a file of a root, or one that a row names) imports itself,
# parts of the rows above its own, and what its root may use. Parts of one row do not import each other. An
# import-linter contract cannot say this: it wants packages with an __init__, which proto/ must not have.
FLOORS = {
    "proto": (
        {"proto/arrays", "proto/clock", "proto/errors"},
        {"proto/compiled", "proto/monitoring", "proto/security", "proto/shared_memory"},
        {"proto/routing", "proto/timing", "proto/user_modules", "proto/wire"},
        {"proto/codec/values", "proto/torch_rpc"},
        {"proto/codec"},
        {"proto/spec"},
        {"proto/messages", "proto/optim", "proto/snapshot"},
        {"proto/protobuf"},
        {"proto/transport"},
    ),
    "deploy": ({"deploy"}, {"deploy/grafana", "deploy/manifests"}),
    "ps": (
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
    ),
    "worker": (
        {"worker/device", "worker/kernels", "worker/metrics", "worker/patterns"},
        {"worker/compression"},
        {"worker/client"},
        {"worker/session"},
        {"worker/data/inputs"},
        {"worker/nn", "worker/data"},
        {"worker/data/readers"},
        {"worker/data/interactions"},
        {"worker/models"},
        {"worker/models/ctr", "worker/models/multitask", "worker/models/retrieval", "worker/models/sequence"},
        {"worker/job/registry"},
        {"worker/job/sections"},
        {"worker/job/data_section"},
        {"worker/job/readers"},
        {"worker/job"},
        {"worker/strategy", "worker/checkpoint"},
        {"worker/reporting"},
        {"worker/training"},
        {"worker/trained"},
    ),
    "src": (
        {"errors", "local_shards", "ray"},
        {"benchmark", "doctor", "init"},
        {"compare"},
        {"compare/run"},
        {"compare/analysis"},
        {"compare/report"},
        {"dash/page"},
        {"dash"},
        {"cli"},
        {"__init__", "__main__"},
    ),
}
PARTS = {part for floors in FLOORS.values() for floor in floors for part in floor}
USES = {
    "proto": (),
    "deploy": ("proto",),
    "ps": ("proto",),
    "worker": ("proto",),
    "src": ("proto", "deploy", "ps", "worker"),
}
# files of one folder that name each other's classes in annotations; no others import each other, also not in a circle
ONLY_FOR_TYPES = {
    ("proto/transport/stream_connection.py", "proto/transport/stream.py"),
    ("ps/table/frozen.py", "ps/table/table.py"),
    ("ps/transport/stream_connection.py", "ps/transport/stream.py"),
    ("worker/session/tables.py", "worker/session/session.py"),
}
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
    """The file of a module or package of ours; None of any other name, which may be a name inside a module."""
    words = name.split(".")
    if words[0] != "embershard":
        return None
    folder = ROOT if words[1:2] and words[1] in FOLDERS else PACKAGE
    for file in (folder.joinpath(*words[1:], "__init__.py"), folder.joinpath(*words[1:]).with_suffix(".py")):
        if file.exists():
            return None if "_pb2" in file.name else file
    return None


@functools.cache
def part_of(path):
    """The part that a file belongs to."""
    in_package = path.is_relative_to(PACKAGE)
    path = path.relative_to(PACKAGE if in_package else ROOT)
    is_root = len(path.parts) == (1 if in_package else 2) and path.parts[0] != "deploy"
    name = path.with_suffix("").as_posix()
    return name if is_root or name in PARTS else path.parent.as_posix()


@functools.cache
def imported_for_types(tree):
    """Those of the imported names that annotations alone need."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [name for block in blocks for name in imported(block)]


@pytest.mark.parametrize("root", FLOORS)
def test_a_part_imports_only_those_below_it(root):
    """`worker -> proto <- ps`, all of them below the commands, and within each no import goes up or round."""
    below = {part for used in USES[root] for floor in FLOORS[used] for part in floor}
    for floor in FLOORS[root]:
        for path, tree in sources(root):
            for name in imported(tree) if part_of(path) in floor else ():
                assert name.split(".")[0] not in FOLDERS, f"{path}: import {name} through embershard.{name}"
                # the public names are looked up when they are asked for: a command may use them
                if (file := file_of(name)) and not (root == "src" and name == "embershard"):
                    part = part_of(file)
                    assert part == part_of(path) or part in below, f"{path} imports {part}"
        below |= floor


def test_no_files_import_each_other_but_for_the_types_in_annotations():
    graph, for_types = defaultdict(set), set()
    for path, tree in sources(*FOLDERS, "src"):
        used = Counter(filter(None, map(file_of, imported(tree))))
        annotated = Counter(filter(None, map(file_of, imported_for_types(tree))))
        for file in used.keys() - {path}:
            edge = path.relative_to(ROOT).as_posix(), file.relative_to(ROOT).as_posix()
            if edge in ONLY_FOR_TYPES and used[file] == annotated[file]:
                for_types.add(edge)
            else:
                graph[edge[0]].add(edge[1])
    assert sum(map(len, graph.values())) > 2000
    assert for_types == ONLY_FOR_TYPES
    TopologicalSorter(graph).prepare()  # CycleError: the files of a circle


def test_every_file_stands_on_a_floor_and_no_folder_is_crowded():
    assert {part_of(path) for path, _ in sources(*FOLDERS, "src")} == PARTS
    files = Counter(path.parent for path, _ in sources(*FOLDERS))
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


def test_the_name_of_a_class_stands_for_one_class():
    found = defaultdict(list)
    for path, tree in sources(*FOLDERS, "src"):
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
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
