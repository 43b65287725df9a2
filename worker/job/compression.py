"""The section of a job file that says how rows and gradients travel, and which of its fields contradict the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from embershard.proto.codec.name import CodecName
from embershard.worker.compression.advice import advice
from embershard.worker.compression.schedule import CodecSchedule
from embershard.worker.compression.settings import Compression
from embershard.worker.job.checks import Found
from embershard.worker.job.sections import Count, OptimizerSection, Section

if TYPE_CHECKING:
    from embershard.worker.job.job import Job

Direction = Literal["push", "pull"]
_WARM_UP = "dgc begins with a quarter of all elements, which later steps do not send; set warmup_steps to 0"
DENSE = "dense"  # what the tables of dense weights are called, or begin with


def _codec_text(value: object) -> object:
    if value is False:  # `off`, which YAML reads as false
        return "none"
    if not isinstance(value, str):
        raise ValueError(f"must be the text of a codec, as int8 or topk:0.01, got {value!r}")
    return str(CodecName.parse(value))


def _schedule(value: object) -> object:
    """A text as the schedule that it stands for; its mistakes are those of the field itself."""
    return value if isinstance(value, Mapping | Section) else {"at": {0: _codec_text(value)}}


def _from_step_0(at: dict[int, str]) -> dict[int, str]:
    CodecSchedule.of(at)
    return at


class CodecsSection(Section):
    """The codec from each step on."""

    at: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[str, BeforeValidator(_codec_text)]], AfterValidator(_from_step_0)
    ]

    @property
    def schedule(self) -> CodecSchedule:
        """As the trainer uses it."""
        return CodecSchedule.of(self.at)

    @property
    def codecs(self) -> list[CodecName]:
        """All of them."""
        return list(self.schedule.at.values())


Codecs = Annotated[CodecsSection, BeforeValidator(_schedule)]


class DirectionsSection(Section):
    """The codecs of some tables: a text each, or {at: {0: none, 1000: topk:0.01}} by step."""

    push: Codecs | None = None
    pull: Codecs | None = None

    def given(self) -> Iterator[tuple[Direction, CodecsSection]]:
        """The directions that it says something of."""
        if self.push is not None:
            yield "push", self.push
        if self.pull is not None:
            yield "pull", self.pull


class CompressionSection(DirectionsSection):
    """How rows and gradients travel (docs/compression.md): those of embedding tables, of dense weights, of some tables.

    `tables` are patterns over the tables' names without the job's prefix, those of dense weights ("dense") among them;
    the first that matches counts. At most `residual_rows` rows of a table wait in a worker to be sent. dgc stays
    `warmup_steps` steps at each density, and has `momentum` and `clip_norm` in place of the optimizer's. With `auto`
    the worker measures, and takes what pays: of fp16s, int8, and what `allow` adds where it suits the optimizer. With
    `unless_slower` it tries what the job says, and switches it off where steps take longer with it.
    """

    dense: DirectionsSection = DirectionsSection()
    tables: dict[str, DirectionsSection] = Field(default_factory=dict)
    residual_rows: Count = 1_000_000
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    auto: bool = False
    allow: tuple[Annotated[str, BeforeValidator(_codec_text)], ...] = ()
    unless_slower: bool = False

    @property
    def steps(self) -> list[int]:
        """Those at which a codec changes."""
        sections = [self, self.dense, *self.tables.values()]
        return sorted({step for section in sections for _, codecs in section.given() for step in codecs.at} - {0})

    def settings(self, step: int | None = None) -> Compression:
        """Those of a step; None: without codecs."""
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
    return {direction: codecs.schedule.codec(step) for direction, codecs in section.given()}


def of_dense(pattern: str) -> bool:
    """Whether a pattern under `tables` is that of dense weights."""
    return pattern.split(".")[0] in (DENSE, f"{DENSE}*")


def _compression(value: object) -> object:
    if value is False:  # `off`, which YAML reads as false
        return None
    return {"auto": True} if value == "auto" else value


AnyCompression = Annotated[CompressionSection | None, BeforeValidator(_compression)]


def compression_contradictions(job: Job) -> Found:
    """Field -> why it cannot be with the others."""
    section = job.compression
    if section is None:
        return
    if not job.has_shards:
        yield ("compression",), f"strategy {job.strategy} has no shards to send anything to; remove it"
        return
    if job.dense_mode != "ps" and "dense" in section.model_fields_set:
        reason = f"torch all-reduces the dense weights (dense.mode {job.dense_mode}), past the shards"
        yield ("compression", "dense"), f"{reason}; remove it, or use dense.mode ps"
    yield from _cannot_serve(job, section)
    yield from _without_meaning(section)
    yield from _auto(job, section)
    if section.unless_slower:
        yield from _unless_slower(job, section)


def compression_advice(job: Job) -> list[str]:
    """A line for every codec that is a poor choice in front of its optimizer; the job is trained all the same."""
    section = job.compression
    if section is None:
        return []
    names = {False: job.embedding.optimizer.name, True: (job.dense.optimizer or job.embedding.optimizer).name}
    found = []
    for at, direction, dense, codec in section.choices():
        line = advice(names[dense], codec) if direction == "push" and not _in_groups(job, at, dense) else ""
        if line:
            found.append(f"compression.{'.'.join(at)}: {line}")
    return found


def _cannot_serve(job: Job, section: CompressionSection) -> Found:
    momenta = {
        False: _momentum(job.embedding.optimizer),
        True: _momentum(job.dense.optimizer or job.embedding.optimizer),
    }
    seen = set()
    for at, direction, dense, codec in section.choices():
        try:
            codec.check(direction, dense)
        except ValueError as error:
            yield ("compression", *at), str(error)
            continue
        if codec.select == "dgc" and momenta[dense] and not _in_groups(job, at, dense) and at not in seen:
            seen.add(at)
            reason = f"{codec} applies momentum before it selects, and the optimizer's {momenta[dense]:g} would again"
            yield ("compression", *at), f"{reason}; set the optimizer's momentum to 0"
        if codec.select == "dgc" and job.train.local_steps and at not in seen:
            seen.add(at)
            reason = (
                f"{codec} keeps a momentum of gradients, and train.staleness {job.train.staleness} pushes differences"
            )
            yield ("compression", *at), f"{reason} of weights; use topk"


def _in_groups(job: Job, at: tuple[str, ...], dense: bool) -> bool:
    """Whether a codec is that of tables which may have the optimizer of a group: it is known once the tables are."""
    return at[0] == "tables" and bool((job.dense if dense else job.embedding).groups)


def _momentum(optimizer: OptimizerSection) -> float:
    return float(getattr(optimizer, "momentum", 0.0))


def _without_meaning(section: CompressionSection) -> Found:
    pushes = [(dense, codec) for _, direction, dense, codec in section.choices() if direction == "push"]
    pushes += [(False, CodecName.parse(text)) for text in section.allow]
    given = section.model_fields_set
    if "residual_rows" in given and not any(codec.has_feedback and not dense for dense, codec in pushes):
        yield ("compression", "residual_rows"), "no codec of an embedding table leaves anything for later; remove it"
    for name in ("warmup_steps", "momentum", "clip_norm"):
        if name in given and not any(codec.select == "dgc" for _, codec in pushes):
            yield ("compression", name), "only dgc has it, and no push travels so; remove it"


def _auto(job: Job, section: CompressionSection) -> Found:
    if section.auto:
        if job.train.local_steps:
            reason = f"most steps send nothing with train.staleness {job.train.staleness}, and auto judges by steps"
            yield ("compression", "auto"), f"{reason}; name codecs"
        for name in ("push", "pull", "dense"):
            if name in section.model_fields_set:
                yield ("compression", name), "auto chooses it; remove it, or name tables under compression.tables"
        for position, text in enumerate(section.allow):
            if CodecName.parse(text).select in ("powersgd", "delta"):
                reason = f"what {text} sends is not known before it does; name it under compression.tables"
                yield ("compression", "allow", position), reason
            elif CodecName.parse(text).select == "dgc" and section.warmup_steps:
                yield ("compression", "allow", position), _WARM_UP
    elif section.allow:
        yield ("compression", "allow"), "says what auto may choose; add auto: true"


def _unless_slower(job: Job, section: CompressionSection) -> Found:
    at = ("compression", "unless_slower")
    codecs = [codec for _, _, _, codec in section.choices()]
    if section.auto:
        yield at, "auto tries what it chooses anyway; remove it"
    elif all(codec.is_plain for codec in codecs):
        yield at, "there is no codec to try; remove it, or name one"
    elif job.train.local_steps:
        yield at, f"most steps send nothing with train.staleness {job.train.staleness}; remove either"
    elif section.steps:
        yield at, "codecs are tried in the first steps, and a schedule changes them later; remove either"
    elif section.warmup_steps and any(codec.select == "dgc" for codec in codecs):
        yield at, _WARM_UP
