"""The parts of the report's pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embershard.compare.report import charts as panels
from embershard.compare.report.tables import BYTE_PARTS, STEP_PARTS

CSS = (Path(panels.__file__).parents[1] / "templates" / "picture.css").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("styles", "parts"), [(panels._BYTE_STYLES, BYTE_PARTS), (panels._STEP_STYLES, (*STEP_PARTS[1:], "other"))]
)
def test_every_part_has_a_colour_of_its_own_in_light_and_in_dark(
    styles: dict[str, int], parts: tuple[str, ...]
) -> None:
    assert set(styles) == set(parts)
    assert len(set(styles.values())) == len(styles)
    for style in styles.values():
        assert len(re.findall(rf"--p{style}: #[0-9a-f]{{6}};", CSS)) == 2
        assert f".p{style} {{ --c: var(--p{style}); }}" in CSS
