"""The code blocks of README.md and docs/, and how each is run.

The words behind a block's language say how; a reader of the page does not see them.

    ```python          run with the other Python blocks of its page, from top to bottom, in one namespace
    ```python slow     the same, by `make bar-docs` alone
    ```yaml            a part of a job; `yaml train`: of that section; `yaml job`: a whole one. It is checked as a job
    ```bash            run by `make bar-docs`, in the page's folder; every command is parsed by the quick test, too
    ```bash service    the same, in the background until the page ends
    ```bash usage      a synopsis or an example of another cluster: its commands are parsed alone
    ```text, ```hex    nothing to run: output, or bytes that tests of their own read
    <!-- setup python  code that the page does not show, run in its place (also: setup bash); ends with -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference")]
LANGUAGES = {
    "python": {"slow"},
    "yaml": {"access", "job", "train", "compression"},
    "bash": {"service", "usage"},
    "text": set(),
    "hex": None,  # described where they are read
    "{toctree}": None,
    "{include}": None,
}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str
    is_shown: bool = True

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, and every setup, in order."""
    lines = page.read_text().splitlines()
    index = 0
    while index < len(lines):
        opening = re.fullmatch(r"( *)(```|<!-- setup )(\S+)(.*)", lines[index])
        if opening is None:
            index += 1
            continue
        indent = opening[1]
        close = lines.index(indent + ("```" if opening[2] == "```" else "-->"), index + 1)
        text = "\n".join(line.removeprefix(indent) for line in lines[index + 1 : close]) + "\n"
        yield Block(page, index + 1, opening[3], tuple(opening[4].split()), text, opening[2] == "```")
        index = close + 1


def run_page(
    page: Path, names: Mapping[str, object], *, slow: bool = False, run_commands: Callable[[Block], object] = id
) -> None:
    """Run the Python blocks of a page in one namespace that begins with `names`, and its bash by `run_commands`."""
    namespace: dict[str, object] = {"__name__": f"page_{page.stem.replace('-', '_')}", **names}
    for block in blocks(page):
        if block.language == "bash":
            run_commands(block)
        if block.language == "python" and (slow or "slow" not in block.words):
            if module := re.match(r"# (\w+\.py)\n", block.text):  # modules of the user are named by their first line
                Path(module[1]).write_text(block.text)
            code = compile("\n" * block.line + block.text, str(block), "exec")  # errors name the page's line
            exec(code, namespace)
