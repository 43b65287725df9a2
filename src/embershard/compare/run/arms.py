"""Turn the words behind --arms into arms, each a few settings over the job file.

none, fp16s, int8, topk:0.01      a codec, for rows and dense weights, in the directions that it serves
push=int8/pull=fp16s/dense.push=dgc:0.001     codecs one by one (push, pull, dense.push, dense.pull; the others none)
strategy=ddp,ps    staleness=0,4,none         any field of the job, with each of its values
train.prefetch=2/train.staleness=4            several fields at once
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from embershard.compare.results import FP16_BASELINE, Arm
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import EmbershardError
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.job.training import TrainSection

OF_DGC = ("warmup_steps", "momentum", "clip_norm")  # fields of the job's section
DECIDED = ("train.seed", "network.bandwidth", "output", "checkpoint")  # by the comparison, for every run
DIRECTIONS = ("push", "pull", "dense.push", "dense.pull")
_NONE = CodecName()
_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not those of a list or a mapping
_SLASH = re.compile(r"/(?=[A-Za-z_][\w.]*=)")  # not those of a path


class BadArm(EmbershardError):
    """An arm cannot be run, or equals another one."""

    template = "arm {arm}: {reason}"


def find_arms(
    groups: Sequence[str], path: Path, overrides: Sequence[str], data: Path | None
) -> dict[str, tuple[Arm, Job]]:
    """Map labels to (arm, its job), the baseline first; an arm of fp16s is added where other codecs are compared.

    `groups` are the texts of --arms, `overrides` and `data` those of load_job for all of them. BadArm names what no job
    can be, and arms that are equal; JobFileError the mistakes of the job itself.
    """
    base = load_job(path, overrides, data)
    arms = [arm for text in groups for arm in _parse(text, base)]
    if any(arm.is_codec and arm.label != "none" for arm in arms) and all(arm.label != FP16_BASELINE for arm in arms):
        arms.insert(1, _codec_arm(FP16_BASELINE, _uniform(FP16_BASELINE), base).model_copy(update={"added": True}))
    found: dict[str, tuple[Arm, Job]] = {}
    for arm in arms:
        try:
            job = load_job(path, [*overrides, *arm.settings], data)
        except JobFileError as error:
            raise BadArm(arm=arm.label, reason=str(error)) from None
        equal = next((label for label, (_, other) in found.items() if other == job), None)
        if equal is not None and not arm.added:
            also = " (it is added to every comparison of codecs)" if found[equal][0].added else ""
            raise BadArm(arm=arm.label, reason=f"it is the same as {equal}{also}: there is nothing to compare")
        if equal is None:
            found[arm.label] = (arm, job)
    if len(found) < 2:
        raise BadArm(arm=", ".join(found) or "(none)", reason="a comparison needs at least two, as in --arms none,int8")
    return found


def _parse(text: str, base: Job) -> Iterator[Arm]:
    """Parse the arms of one --arms; a word without `=` behind `field=value` is another value of that field."""
    field = ""
    for part in _COMMA.split(text):
        word = part.strip()
        if not word:
            raise BadArm(arm=text, reason="there is nothing between two of its commas")
        pairs = [assignment.partition("=") for assignment in _SLASH.split(word)]
        if "=" not in word:
            if field:
                yield _assigned(f"{field}={word}", [(field, word)], base)
            else:
                yield _codec_arm(word, _uniform(word), base)
            continue
        field = pairs[0][0] if len(pairs) == 1 else ""
        yield _assigned(word, [(key, value) for key, _, value in pairs], base)


def _assigned(label: str, pairs: Sequence[tuple[str, str]], base: Job) -> Arm:
    codecs = {key: value for key, value in pairs if key in DIRECTIONS}
    fields = [_setting(key, value) for key, value in pairs if key not in DIRECTIONS]
    for field in fields:
        decided = next((name for name in DECIDED if f"{field}.".startswith((f"{name}=", f"{name}."))), None)
        if decided is not None:
            raise BadArm(arm=label, reason=f"the comparison itself gives {decided} to every run of all arms")
    if not codecs:
        return Arm(label=label, meaning=_say_fields(fields), settings=tuple(fields), is_codec=False)
    arm = _codec_arm(label, {name: _codec(label, text) for name, text in codecs.items()}, base)
    if not fields:
        return arm
    meaning = f"{arm.meaning}; {_say_fields(fields)}"
    return arm.model_copy(update={"meaning": meaning, "settings": (*fields, *arm.settings), "is_codec": False})


def _setting(key: str, value: str) -> str:
    """Write `field=value` with the whole name of the field."""
    if "." not in key and key not in Job.model_fields and key in TrainSection.model_fields:
        key = f"train.{key}"
    return f"{key}=off" if (key, value) == ("train.staleness", "none") else f"{key}={value}"


def _codec(arm: str, text: str) -> CodecName:
    try:
        return CodecName.parse(text)
    except ValueError as error:
        raise BadArm(arm=arm, reason=str(error)) from None


def _uniform(text: str) -> dict[str, CodecName] | None:
    """Expand a codec's name to its codec in each direction; None for `auto`.

    A codec of values serves rows and dense weights, both ways. One that selects serves what is pushed: of both; dgc,
    powersgd and onebit, which are made for dense weights, of these. Rows are pulled as they are then, and of dense
    weights what has changed.
    """
    if text == "auto":
        return None
    codec = _codec(text, text)
    if codec.for_pull and codec.select == "all":
        return dict.fromkeys(DIRECTIONS, codec)
    if codec.select == "delta":
        return {"dense.pull": codec}
    rows = _NONE if codec.dense_only or codec.select == "dgc" else codec
    return {"push": rows, "dense.push": codec, "dense.pull": CodecName(select="delta")}


def _codec_arm(label: str, given: Mapping[str, CodecName] | None, base: Job) -> Arm:
    if given is None:
        meaning = "each worker measures its link and the codecs, and takes what pays"
        return Arm(label=label, meaning=meaning, settings=("compression=auto",), is_codec=True)
    on_shards = base.has_shards and base.dense_mode == "ps"
    codecs = {name: given.get(name, _NONE) for name in DIRECTIONS if on_shards or not name.startswith("dense")}
    setting = f"compression={_section(codecs, base)}"
    return Arm(label=label, meaning=_say_codecs(codecs), settings=(setting,), is_codec=True)


def _section(codecs: Mapping[str, CodecName], base: Job) -> str:
    """Write the job's section as YAML; it replaces that of the file but for what the codecs need of it."""
    if all(codec.is_plain for codec in codecs.values()):
        return "null"
    section: dict[str, object] = {name: str(codec) for name, codec in codecs.items() if "." not in name}
    dense = {name.partition(".")[2]: str(codec) for name, codec in codecs.items() if "." in name}
    if dense:
        section["dense"] = dense
    own = base.compression
    if own is not None and "residual_rows" in own.model_fields_set and codecs["push"].has_feedback:
        section["residual_rows"] = own.residual_rows
    if own is not None and any(codec.select == "dgc" for codec in codecs.values()):
        section |= {name: getattr(own, name) for name in OF_DGC if name in own.model_fields_set}
    return json.dumps(section)


# --- in plain words ---

_VALUES = {
    "none": "as float32",
    "fp16s": "as 16-bit floats with a scale per row",
    "bf16": "as bfloat16",
    "int8": "as 8-bit integers with a scale per row (per 64 floats where rows are longer)",
    "onebit": "as one bit per float with a scale per block, the error sent later",
}
_SELECTED = {
    "topk": "the largest {share} of the floats, the rest later",
    "rows": "the largest {share} of the rows, the rest later",
    "randomk": "a random {share} of the floats, the rest later",
    "dgc": "the largest {share} of the floats, momentum-corrected, the rest later",
    "powersgd": "two thin matrices of rank {number:g}, the error later",
    "delta": "what has changed",
}
_FIELDS = {
    "strategy=ps": "every weight on shards",
    "strategy=hybrid": "rows on shards, dense weights in the workers, all-reduced",
    "strategy=ddp": "torch's DistributedDataParallel, without shards",
    "strategy=dp": "torch's DataParallel, without shards",
    "strategy=local": "torch in one process, without shards",
    "train.staleness=0": "workers make every step together",
    "train.staleness=off": "workers do not wait for each other",
}


def _say(codec: CodecName) -> str:
    values = _VALUES.get(codec.values, f"as {codec.values} codes them")
    if codec.select == "all":
        return values
    selected = _SELECTED[codec.select].format(share=f"{100 * codec.number:g} %", number=codec.number)
    return selected if codec.values == "none" else f"{selected}, {values}"


def _say_codecs(codecs: Mapping[str, CodecName]) -> str:
    if len(set(codecs.values())) == 1:
        return f"rows and dense weights travel {_say(codecs['push'])}, both ways"
    said = {name: ("all, " if codec.select == "all" else "") + _say(codec) for name, codec in codecs.items()}
    text = f"of row gradients: {said['push']}; of pulled rows: {said['pull']}"
    if "dense.push" not in said:
        return text
    return f"{text}; of dense gradients: {said['dense.push']}; of pulled dense weights: {said['dense.pull']}"


def _say_fields(fields: Sequence[str]) -> str:
    said = [_FIELDS.get(field, f"{field.replace('=', ' is ', 1)}") for field in fields]
    return f"{', '.join(said)}; the rest as the job says"
