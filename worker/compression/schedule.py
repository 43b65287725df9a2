"""Which codec a direction of a table uses at which step, and the densities that dgc begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embershard.proto.codec.name import CodecName

WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)  # Lin et al. 2018, section 3.3


@dataclass(frozen=True, slots=True)
class CodecSchedule:
    """Step -> the codec from there on. ValueError unless it begins with step 0."""

    at: Mapping[int, CodecName]

    def __post_init__(self) -> None:
        if 0 not in self.at or min(self.at) < 0:
            raise ValueError("a schedule of codecs begins with step 0, and its steps are whole numbers")

    @staticmethod
    def of(text: str | Mapping[int, str]) -> CodecSchedule:
        """The schedule of one codec text, or of a text for each step at which it changes."""
        texts = {0: text} if isinstance(text, str) else text
        return CodecSchedule({step: CodecName.parse(codec) for step, codec in texts.items()})

    def codec(self, step: int) -> CodecName:
        """The codec of a step."""
        return self.at[max(start for start in self.at if start <= step)]


def warmup_density(ratio: float, steps: int, steps_per_density: int) -> float:
    """The part of the gradient that `dgc:ratio` sends after so many steps: the ratio itself once it is warm."""
    above = [density for density in WARMUP_DENSITIES if density > ratio]
    stage = steps // steps_per_density if steps_per_density else len(above)
    return above[stage] if stage < len(above) else ratio
