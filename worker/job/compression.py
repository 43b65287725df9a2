"""The section of a job file that says by which codecs rows and gradients travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from embershard.proto.codec.name import CodecName
from embershard.worker.compression.settings import Compression
from embershard.worker.job.sections import Count, Section, is_off

Direction = Literal["push", "pull"]
DENSE = "dense"  # what the tables of dense weights are called, or begin with


def _codec_text(value: object) -> object:
    if is_off(value):
        return "none"
    if not isinstance(value, str):
        raise ValueError(f"must be the text of a codec, as int8 or topk:0.01, got {value!r}")
    return str(CodecName.parse(value))


_CodecText = Annotated[str, BeforeValidator(_codec_text, json_schema_input_type=str | Literal[False])]


def _schedule(value: object) -> object:
    """A text as the schedule that it stands for; its mistakes are those of the field itself."""
    return value if isinstance(value, Mapping | Section) else {"at": {0: _codec_text(value)}}


def _from_step_0(at: dict[int, str]) -> dict[int, str]:
    if 0 not in at:
        raise ValueError("a schedule of codecs begins with step 0")
    return at


class CodecsSection(Section):
    """Switch the codec during training."""

    at: Annotated[dict[Annotated[int, Field(ge=0)], _CodecText], AfterValidator(_from_step_0)]
    """Step -> the codec from this step on; step 0 must be there."""

    @property
    def codecs(self) -> list[CodecName]:
        """All codecs of the schedule, in its order."""
        return [CodecName.parse(text) for text in self.at.values()]

    def codec(self, step: int) -> CodecName:
        """The codec of a step."""
        return CodecName.parse(self.at[max(start for start in self.at if start <= step)])


Codecs = Annotated[
    CodecsSection, BeforeValidator(_schedule, json_schema_input_type=str | Literal[False] | CodecsSection)
]


class DirectionsSection(Section):
    """The codecs of some tables: each a name, or a schedule by step, such as {at: {0: none, 1000: topk:0.01}}."""

    push: Codecs | None = None  # codec of the gradients
    pull: Codecs | None = None  # codec of the rows

    def given(self) -> Iterator[tuple[Direction, CodecsSection]]:
        """The directions that it says something of."""
        if self.push is not None:
            yield "push", self.push
        if self.pull is not None:
            yield "pull", self.pull


class CompressionSection(DirectionsSection):
    """Choose the codecs of rows and gradients (docs/compression.md): of embeddings, of dense weights, or of some
    tables.

    `tables` maps patterns to codecs; a pattern matches names of tables without the job's prefix, including those of
    dense weights ("dense"), and the first match applies. A worker keeps the residuals of at most `residual_rows` rows
    of a table. dgc trains `warmup_steps` steps at each density, with its own `momentum` and `clip_norm` instead of the
    optimizer's. With `auto` each worker measures, and uses the codecs that save time: fp16s, int8, and those of `allow`
    that fit the optimizer. With `unless_slower` it tries the job's codecs, and switches them off if steps take longer.
    """

    dense: DirectionsSection = DirectionsSection()  # codecs of dense weights
    tables: dict[str, DirectionsSection] = Field(default_factory=dict)
    residual_rows: Count = 1_000_000
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    auto: bool = False
    allow: tuple[_CodecText, ...] = ()
    unless_slower: bool = False

    @property
    def steps(self) -> list[int]:
        """Return the steps at which a codec changes."""
        sections = [self, self.dense, *self.tables.values()]
        return sorted({step for section in sections for _, codecs in section.given() for step in codecs.at} - {0})

    def settings(self, step: int | None = None) -> Compression:
        """Return the settings of a step; None: without codecs."""
        chosen: dict[str, Any] = {}
        if step is not None:
            tables = {name: _at(table, step) for name, table in self.tables.items()}
            chosen = {**_at(self, step), "dense": _at(self.dense, step), "tables": tables}
        own = {name: getattr(self, name) for name in ("residual_rows", "warmup_steps", "momentum", "clip_norm")}
        return Compression(**own, **chosen)

    def choices(self) -> Iterator[tuple[tuple[str, ...], Direction, bool, CodecName]]:
        """(Where it stands, direction, whether of dense weights, codec) of every codec that is named."""
        sections: list[tuple[tuple[str, ...], bool, DirectionsSection]] = [
            ((), False, self),
            (("dense",), True, self.dense),
        ]
        sections += [(("tables", name), of_dense(name), table) for name, table in self.tables.items()]
        for at, dense, section in sections:
            for direction, codecs in section.given():
                for codec in codecs.codecs:
                    yield (*at, direction), direction, dense, codec


def _at(section: DirectionsSection, step: int) -> dict[str, CodecName]:
    return {direction: codecs.codec(step) for direction, codecs in section.given()}


def of_dense(pattern: str) -> bool:
    """Whether a pattern under `tables` is that of dense weights."""
    return pattern.split(".")[0] in (DENSE, f"{DENSE}*")


def _compression(value: object) -> object:
    if is_off(value):
        return None
    return {"auto": True} if value == "auto" else value


_Given = Literal["auto", "off", False] | CompressionSection | None  # as a file has it
AnyCompression = Annotated[CompressionSection | None, BeforeValidator(_compression, json_schema_input_type=_Given)]
