"""Data flows one way: worker -> proto <- ps. Read from the source, so that lazy imports count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "proto": {"proto"},
    "ps": {"ps", "proto"},
    "worker": {"worker", "proto"},
    "deploy": {"deploy", "proto"},
}
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


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    found = sources(folder)
    assert found, f"no sources in {folder}/"
    for path in found:
        for name in imported(ast.parse(path.read_text())):
            parts = name.split(".")
            assert parts[0] not in ALLOWED, f"{path}: import {name} through embershard.{name}"
            if parts[0] == "embershard" and len(parts) > 1 and parts[1] in ALLOWED:
                assert parts[1] in ALLOWED[folder], f"{path} imports {name}"


@pytest.mark.parametrize("folder", ["proto", "ps", "deploy"])
def test_a_shard_needs_no_trainer_library(folder: str) -> None:
    for path in sources(folder):
        if path.name in ASKED_FOR:
            continue
        for name in imported(ast.parse(path.read_text())):
            assert name.split(".")[0] not in HEAVY, f"{path} imports {name}"


@pytest.mark.parametrize("folder", [*ALLOWED, "src"])
def test_nothing_executes_what_it_receives(folder: str) -> None:
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
