"""bench/mutants.py changes one thing in a statement, and nothing else in its file."""

import ast
import importlib
from pathlib import Path

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
# the statements of functions that are not compiled, and what may be changed in each
CHANGES = {
    "if rows < LIMIT and not ( self.closed ):": {"and, or", "comparison", "not", "negated condition"},
    "self.count = rows + 1": {"operator", "constant", "left out"},
    "elif rows is None:": {"comparison", "negated condition"},
    "self.clear()": {"left out"},
    "for row in rows[1:]:": {"constant"},
    'row.add(f"{row:04d}")': {"left out"},
    "return rows": {"return None"},
}


def test_a_change_of_a_statement_leaves_all_other_statements_on_their_lines(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    mutants = importlib.import_module("mutants")
    lines, kinds = SOURCE.splitlines(), {}
    for key, site in mutants.sites_of("ps/table.py", SOURCE):
        for what, statement in mutants.changes_of(site.head):
            new = site.replaced(lines, statement)
            assert len(new) == len(lines)
            assert new[: site.first - 1] == lines[: site.first - 1]
            assert new[site.last :] == lines[site.last :]
            assert ast.dump(ast.parse("\n".join(new))) != ast.dump(ast.parse(SOURCE)), what
            kinds.setdefault(key.text, set()).add(what.partition(":")[0])
    assert kinds == CHANGES
