"""bench/mutants.py changes one thing in a statement, and nothing else in its file."""

import ast
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SOURCE = '''"""A module."""

LIMIT = 3


@compiled(types.int64)
def kernel(ids):
    return ids + 1


class Table:
    def apply(self, rows, wait=1):
        # a comment
        if rows < LIMIT and not (
            self.closed
        ):
            self.count = rows + 1
        elif rows is None:
            self.clear()
        for row in rows[1:]:
            row.add(f"{row:04d}")
        return rows
'''


@pytest.fixture(scope="module")
def sites():  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(BENCH))
    try:
        import mutants
    finally:
        sys.path.remove(str(BENCH))
    return mutants, {key.text: site for key, site in mutants.sites_of("ps/table.py", SOURCE)}


def test_statements_of_functions_are_found_but_for_compiled_ones(sites):  # type: ignore[no-untyped-def]
    _, found = sites
    assert list(found) == [
        "if rows < LIMIT and not ( self.closed ):",
        "self.count = rows + 1",
        "elif rows is None:",
        "self.clear()",
        "for row in rows[1:]:",
        'row.add(f"{row:04d}")',
        "return rows",
    ]


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("if rows < LIMIT and not ( self.closed ):", {"and, or", "comparison", "not", "negated condition"}),
        ("self.count = rows + 1", {"operator", "constant", "left out"}),
        ("elif rows is None:", {"comparison", "negated condition"}),
        ("self.clear()", {"left out"}),
        ("for row in rows[1:]:", {"constant"}),
        ('row.add(f"{row:04d}")', {"left out"}),
        ("return rows", {"return None"}),
    ],
)
def test_a_change_leaves_all_other_statements_on_their_lines(sites, text, changes):  # type: ignore[no-untyped-def]
    mutants, found = sites
    lines = SOURCE.splitlines()
    site = found[text]
    kinds = set()
    for what, statement in mutants.changes_of(site.head):
        new = site.replaced(lines, statement)
        assert len(new) == len(lines)
        assert new[: site.first - 1] == lines[: site.first - 1]
        assert new[site.last :] == lines[site.last :]
        assert ast.dump(ast.parse("\n".join(new))) != ast.dump(ast.parse(SOURCE)), what
        kinds.add(what.partition(":")[0])
    assert kinds == changes
