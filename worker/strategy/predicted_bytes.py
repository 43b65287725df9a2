"""Predict the bytes that codecs send for given rows and messages, to compare with the counted ones.

And the bandwidth at which a codec breaks even.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from embershard.proto.arrays import Bytes, Ids
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.predict import HEAD_BYTES, age_bytes, predict_bytes
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.proto.messages import (
    PACKED,
    Pull,
    Push,
    Pushed,
    PushToken,
    Reply,
    Request,
    Rows,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.protobuf import head_bytes
from embershard.proto.routing import make_route
from embershard.proto.spec import TableSpec
from embershard.proto.wire import frame_bytes
from embershard.worker.client.byte_counts import ByteCount, ByteCounts, BytePart
from embershard.worker.client.client import Client
from embershard.worker.client.connections import split_into_messages
from embershard.worker.compression.compressor import Compressor
from embershard.worker.compression.error_feedback import SentAverages
from embershard.worker.compression.low_rank import DenseLayout, predict_low_rank
from embershard.worker.compression.settings import WARMUP_DENSITIES, Directions, warmup_density
from embershard.worker.compression.table_compressor import packed_ids

_ID_BYTES, _FLOAT_BYTES = 8, 4
# optimizers that leave an element alone whose gradient is 0
_ELEMENT_BY_ELEMENT = ("sgd", "adagrad")
_ELEMENTS = ("topk", "randomk", "dgc")  # of a push, that are chosen one by one
# numbers as they are after some hundred steps: their size in a head is that of their digits
_TYPICAL, _EPOCH = 1000, time.time_ns()
_CODING_BYTES = len(head_bytes(Rows((), coding_seconds=1.0))) - len(head_bytes(Rows(())))
_NO_IDS, _NO_BYTES = np.empty(0, np.int64), np.empty(0, np.uint8)


def predict_volumes(moved: ByteCounts, client: Client) -> dict[BytePart, float]:
    """Bytes expected of every part of `moved`, from the rows (its raw bytes) and messages that it counts.

    Of the codecs that the client uses now, dgc from its first push on. What is neither push nor pull is left out:
    nobody knows it beforehand. So are tables that used other codecs before: it is not known which rows went by which.
    And so are changes of dense weights by momentum (`_changes`).
    """
    directions, find = client.compressor.directions(), client.compressor.find
    expected: dict[BytePart, float] = {}
    for part, counted in moved.items():
        if part.kind == "other" or not counted.messages or part.table in client.compressor.switched:
            continue
        codec = directions[part.table].pull if part.direction == "pull" else directions[part.table].push
        if part.kind == "residual":
            expected[part] = _residual_bytes(part, counted, client)
        elif part.kind == "ids":
            pack = partial(client.compressor.packed_ids, part.table)
            share = 1.0 if codec.is_plain else _packed_share(client.byte_counter.packed(part), pack)
            expected[part] = counted.raw * share
        elif codec.select == "powersgd":
            expected[part] = _factor_bytes(codec, counted, client, part.table)
        else:
            spec = client.spec(part.table)
            sent = client.compressor.sent(part.table) if part.direction == "push" else SentAverages()
            calls = -(-counted.messages // client.num_shards)
            if codec.select == "delta":
                layout = client.compressor.layout(part.table)
                stages = _changes(directions[part.table].push, spec, layout, client.compressor, calls)
            else:
                stages = _stages(codec, calls, client.compressor.settings.warmup_steps)
            if not stages:
                continue
            rows = counted.raw / (_FLOAT_BYTES * spec.dim) / counted.messages
            fewer, share = math.floor(rows), rows % 1  # a message has whole rows
            expected[part] = counted.messages * sum(
                weight
                * part_of_messages
                * _payload_bytes(stage, part.direction, count, spec.dim, find, sent.of(count, rows))
                for stage, weight in stages
                for count, part_of_messages in ((fewer, 1 - share), (fewer + 1, share))
            )
    for direction in ("pull", "push"):
        part = BytePart(direction, "other")
        if part in moved:
            expected[part] = _heads(part, moved, directions)
    return expected


def break_even(raw_bytes: float, sent_bytes: float, coding_seconds: float) -> float | None:
    """Bits per second of a link on which a codec costs as much time as it saves; None where it costs none."""
    return 8 * (raw_bytes - sent_bytes) / coding_seconds if coding_seconds > 0 else None


def _payload_bytes(
    codec: CodecName, direction: str, rows: int, dim: int, find: Callable[[str], ValuesCodec], sent: SentAverages
) -> float:
    if direction == "pull" and codec.select == "all":  # without the head of a push's payload
        return float(find(codec.values).nbytes(rows, dim))
    return predict_bytes(codec, rows, dim, find, age=sent.age, touched=sent.rows, elements=sent.elements)


def _residual_bytes(part: BytePart, counted: ByteCount, client: Client) -> float:
    """Bytes of residual rows that are sent as float32, with their ages and ids."""
    spec = client.spec(part.table)
    row = _ID_BYTES * _packed_share(client.byte_counter.packed(part), packed_ids) + _FLOAT_BYTES * spec.dim
    ages = age_bytes(counted.residual / counted.messages, client.compressor.sent(part.table).age or 1.0)
    return counted.residual * row + counted.messages * (ages + HEAD_BYTES)


def _factor_bytes(codec: CodecName, counted: ByteCount, client: Client, table: str) -> float:
    """Bytes of the factors of all weights, in as many messages as they take; less where some have no gradient."""
    spec, layout = client.spec(table), client.compressor.layout(table)
    route = make_route(layout.ids, spec.space_key, client.placement)
    parts = [
        route.ids[chunk.rows]
        for shard, limit in client.limits.items()
        for (chunk,) in split_into_messages([(table, route)], shard, [16 + _FLOAT_BYTES * spec.dim], limit)
    ]
    values = client.compressor.find(codec.values)
    whole = predict_low_rank(layout, spec.dim, int(codec.number), parts, values)
    return whole * counted.raw / (_FLOAT_BYTES * spec.dim * len(layout.ids))


def _packed_share(samples: Iterable[Ids], pack: Callable[[Ids], Bytes | None]) -> float:
    """Bytes of packed ids relative to plain ones."""
    packed = raw = 0
    for ids in samples:
        raw += ids.nbytes
        packed += ids.nbytes if (found := pack(ids)) is None else found.nbytes
    return packed / raw if raw else 1.0


def _changes(
    push: CodecName, spec: TableSpec, layout: DenseLayout, compressor: Compressor, pulls: int
) -> list[tuple[CodecName, float]]:
    """The forms of so many pulls of what changes from one to the next, each with its share of them.

    An empty list where it depends on the gradients: momentum moves an element for some steps after it was sent.
    """
    params = spec.optimizer.params()
    alone = spec.optimizer.name in _ELEMENT_BY_ELEMENT and not params.get("momentum") and not params.get("weight_decay")
    if push.select in _ELEMENTS and not alone:
        return []
    filled = layout.filled(spec.dim)
    most = float(filled.mean()) / spec.dim if len(filled) else 1.0  # padding never changes
    selects = push.select in (*_ELEMENTS, "rows")
    changed = [
        (min(most, stage.number * compressor.workers) if selects else most, weight)
        for stage, weight in _stages(push, pulls, compressor.settings.warmup_steps)
    ]
    whole = CodecName()  # where hardly less would be sent
    return [(whole if part > 0.9 else CodecName(select="topk", number=part), weight) for part, weight in changed]


def _stages(codec: CodecName, pushes: int, warmup_steps: int) -> list[tuple[CodecName, float]]:
    """The codecs of so many pushes, each with its share of them: those of dgc are dense at first."""
    if codec.select != "dgc":
        return [(codec, 1.0)]
    warm = min(pushes, warmup_steps * len(WARMUP_DENSITIES))
    counts = Counter(warmup_density(codec.number, push, warmup_steps) for push in range(warm))
    counts[codec.number] += pushes - warm
    return [(replace(codec, number=density), count / pushes) for density, count in counts.items()]


def _heads(part: BytePart, moved: ByteCounts, directions: Mapping[str, Directions]) -> float:
    """Frames and heads of the messages of one direction: each message's own, and what a table adds."""
    make = _pull if part.direction == "pull" else _push
    empty = _exchange(*make("", None, ids=False))
    total = float(moved[part].messages * empty)
    for other, counted in moved.items():
        if other.direction == part.direction and other.kind in ("rows", "dense", "residual") and counted.messages:
            ids = counted if other.kind == "residual" else moved.get(BytePart(part.direction, "ids", other.table))
            share = 0.0 if ids is None else ids.messages / counted.messages
            codec = getattr(directions[other.table], part.direction)
            with_ids, without = (_exchange(*make(other.table, codec, ids=given)) - empty for given in (True, False))
            total += counted.messages * (share * with_ids + (1 - share) * without)
    return total + _CODING_BYTES * _coded_replies(part, moved, directions)


def _coded_replies(whole: BytePart, moved: ByteCounts, directions: Mapping[str, Directions]) -> int:
    """Replies that say how long coding took: one for each table with a payload, unless they shared their messages."""
    coded = 0
    for part, counted in moved.items():
        if part.direction == whole.direction and part.kind in ("rows", "dense", "residual"):
            is_plain = getattr(directions[part.table], part.direction).is_plain
            # rows of a residual are a payload, too, and where there is a codec they come with others
            coded += counted.messages if is_plain == (part.kind == "residual") else 0
    return min(coded, moved[whole].messages)


def _exchange(request: Request, reply: Reply) -> int:
    """Frames and heads of a call; the arrays are left out."""
    return sum(frame_bytes(len(head_bytes(m)), [0] * len(arrays(m))) for m in (request, reply))


def _pull(table: str, codec: CodecName | None, *, ids: bool) -> tuple[Pull, Rows]:
    packed: Bytes | None = None if codec is None or codec.is_plain else _NO_BYTES
    text = "" if codec is None or codec.is_plain else str(codec)
    tables = () if codec is None else (TableIds(table, _NO_IDS, _TYPICAL, text, packed=packed),)
    rows = tuple(_NO_BYTES for _ in tables)
    return Pull(1, tables, 0, _EPOCH), Rows(rows, _TYPICAL, (text,) if text else ())


def _push(table: str, codec: CodecName | None, *, ids: bool) -> tuple[Push, Pushed]:
    tables: tuple[TableGradients, ...] = ()
    if codec is not None:
        form = "" if codec.is_plain else codec.values if codec.is_custom else PACKED
        packed = _NO_BYTES if form and ids else None
        tables = (TableGradients(table, _NO_IDS, _NO_BYTES, 1.0, 0 if ids else _TYPICAL, form, packed),)
    token = PushToken(0, _EPOCH, _TYPICAL, _TYPICAL)
    return Push(token, _TYPICAL, 1, tables, version=_TYPICAL), Pushed(False, _TYPICAL, 0)
