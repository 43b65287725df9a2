"""A name of a public class stands for one class in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["proto", "ps", "worker", "deploy", "src"]


def places_of_classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):  # rglob does not follow the links in src/embershard
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_a_class_name_stands_for_one_class():
    found = places_of_classes()
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
