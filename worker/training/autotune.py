"""`compression: auto`: measure the link and the codecs while the first steps run, and switch on only what pays.

A codec saves (bytes - its bytes) / W seconds on a link of W bytes per second, and costs the time to encode and decode:
it pays below W* = (bytes - its bytes) / (encode + decode), its break-even bandwidth. What a link gives is seen with the
work of the shards in it, so that a choice is only kept where steps have become faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode, encode_rows
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Hello, Pull, Push, Reply, Request, bulk_bytes, ids_by_table
from embershard.proto.spec import TableSpec
from embershard.worker.compression.error_feedback import EncodeOptions, Feedback, ShardGradients
from embershard.worker.compression.settings import ADAPTIVE, Directions, check_momentum
from embershard.worker.job.compression import Direction
from embershard.worker.session.session import Session

_log = logging.getLogger(__name__)

DIRECTIONS: tuple[Direction, ...] = ("push", "pull")
Find = Callable[[str], ValuesCodec]

WARM_UP = 3  # steps that load and compile what later ones have, or that other codecs still travel in
STEPS = 20  # that are measured before a choice
WAITING = 0.05  # of the time: where training waits less for shards, sending less cannot make it faster
MARGIN = 1.25  # the break-even must be so far above what the link gives: both are measured beside other work
FASTER = 0.95  # of a step's time at most, with what was chosen: else it is switched off again
_ROWS = 65_536  # of which a codec is timed
_TRIES = 3  # the fastest counts: others were disturbed


def link_speed(calls: Sequence[tuple[int, float]], round_trip: float) -> float | None:
    """Bytes per second beyond the round trip, by calls (bytes, seconds) of one direction; None without calls.

    The best quarter of the larger ones counts: the others waited for something else, as for other workers.
    """
    if not calls:
        return None
    middle = float(np.median([size for size, _ in calls]))
    rates = [size / max(seconds - round_trip, 1e-9) for size, seconds in calls if size >= middle]
    return float(np.quantile(rates, 0.75))


@dataclass(frozen=True, slots=True)
class Cost:
    """A codec on one table and direction, per step."""

    codec: CodecName
    raw_bytes: float
    coded_bytes: float
    encode: float  # seconds
    decode: float  # seconds; measured here, for shards run the same code

    @property
    def break_even(self) -> float:
        """Bytes per second of the link below which it pays."""
        return (self.raw_bytes - self.coded_bytes) / max(self.encode + self.decode, 1e-9)

    def saving(self, link: float) -> float:
        """Seconds per step over a link of so many bytes per second; below zero it costs."""
        return (self.raw_bytes - self.coded_bytes) / link - self.encode - self.decode


def best(costs: Sequence[Cost], link: float) -> tuple[Cost | None, str]:
    """Return the codec that saves the most time on a link (bytes per second), None where none does, and the reason."""
    paying = [cost for cost in costs if cost.break_even > MARGIN * link]
    speed = _speed(link)
    if not paying:
        nearest = max(costs, key=lambda cost: cost.break_even)
        return (
            None,
            f"the link gives {speed}, and {nearest.codec} would pay below {_speed(nearest.break_even / MARGIN)}",
        )
    found = max(paying, key=lambda cost: cost.saving(link))
    ratio = found.raw_bytes / max(found.coded_bytes, 1.0)
    return found, (
        f"{found.raw_bytes / 1e6:.3g} MB of a step become {found.coded_bytes / 1e6:.3g} ({ratio:.3g} times less); the "
        f"link gives {speed}, and it pays below {_speed(found.break_even)}; saves {1e3 * found.saving(link):.3g} ms"
    )


def candidates(
    spec: TableSpec, direction: Direction, *, dense: bool, allow: Sequence[CodecName] = (), momentum: float = 0.0
) -> list[CodecName]:
    """Return the codecs that may be tried for a table: quantisation, and allowed ones that suit its optimizer.

    `momentum` is that which dgc would have.

    The weights of layers are pulled as fp16s at the least: all of them go into every prediction.
    """
    names = ["fp16s"] if dense and direction == "pull" else ["fp16s", "int8"]
    found = [CodecName.parse(name) for name in names]
    for codec in allow:
        try:
            codec.check(direction, dense)
            check_momentum(spec, codec, momentum)
        except ValueError:
            continue
        unsuited = codec.has_feedback and spec.optimizer.name in ADAPTIVE
        if not unsuited and codec not in found:
            found.append(codec)
    return found


def measure(codec: CodecName, raw_bytes: float, dim: int, find: Find) -> Cost:
    """The cost of a codec for so many bytes of rows, timed on random ones."""
    rows = raw_bytes / (4 * dim)
    count = max(1, min(_ROWS, round(rows)))
    values = find(codec.values)
    # of the size of gradients; which they are makes no difference to the time
    data = np.random.default_rng(0).standard_normal((count, dim), np.float32) * np.float32(0.01)
    out = np.empty(0, np.uint8)
    feedback = Feedback(dim, None) if codec.has_feedback else None
    encode = unpack = float("inf")
    for key in range(1, 1 + _TRIES):
        start = time.perf_counter()
        if feedback is None:
            out = encode_rows(data, values, key)
        else:
            share = ShardGradients(np.arange(count), data, 1.0)
            out = feedback.pack(share, EncodeOptions(codec, values, codec.number, key)).payload
        between = time.perf_counter()
        decode(out, count, dim, lambda _: values, codec.values)
        encode, unpack = min(encode, between - start), min(unpack, time.perf_counter() - between)
    scale = rows / count
    return Cost(codec, raw_bytes, out.nbytes * scale, encode * scale, unpack * scale)


class CodecTuner:
    """Watches the first steps of a session, switches what should pay, and off again what did not make steps faster.

    `pinned`: (table, direction) that are left alone. All steps of a worker pass by `before_step`.
    """

    def __init__(self, session: Session, allow: Sequence[CodecName], pinned: frozenset[tuple[str, Direction]]) -> None:
        self._session, self._allow, self._pinned = session, allow, pinned
        self._round_trip = 0.0
        self._calls: dict[Direction, list[tuple[int, float]]] = {"push": [], "pull": []}
        self._rows: dict[tuple[str, Direction], int] = {}  # that travelled in them
        self._waited = 0.0
        self._steps = 0
        self._began = 0.0  # when the first step that is measured did
        self._before: dict[str, Directions] = {}  # how tables travelled of which something was chosen
        self._trial: Trial | None = None  # of what was chosen
        self._nothing_chosen = False

    @property
    def done(self) -> bool:
        """Whether the tuner has decided which codecs to use."""
        return self._nothing_chosen if self._trial is None else self._trial.left_on is not None

    def before_step(self, step: int) -> None:
        """Before a step: take its time, and decide when it is time."""
        if self._trial is not None:
            self._trial.before_step(step)
            return
        if self._nothing_chosen:
            return
        if self._steps == WARM_UP:
            self._round_trip = min(self._ping() for _ in range(5))
            self._waited, self._began = self._session.stats.wait_seconds, time.perf_counter()
            self._session.client.connections.watch = self._watch
        elif self._steps == WARM_UP + STEPS:
            total = time.perf_counter() - self._began
            self._session.client.connections.watch = None
            self._session.switching.settle()
            self._decide(step, (self._session.stats.wait_seconds - self._waited) / max(total, 1e-9))
            self._nothing_chosen = not self._before
            if self._before:
                now = self._session.client.compressor.directions()
                wanted = {name: now[name] for name in self._before}
                self._trial = Trial(self._session, wanted, self._before, FASTER)
                self._trial.before_step(step)
        self._steps += 1

    def _ping(self) -> float:
        start = time.perf_counter()
        self._session.client.ask_all(Hello(worker=self._session.client.worker))
        return time.perf_counter() - start

    def _watch(
        self, requests: Mapping[int, Request], replies: Mapping[int, Reply | EmbershardError], seconds: float
    ) -> None:
        """A call to the shards is over; several threads may say so."""
        size = 0
        direction: Direction = "push"
        for shard, request in requests.items():
            reply = replies[shard]
            if isinstance(reply, EmbershardError) or not isinstance(request, Pull | Push):
                return
            direction = "pull" if isinstance(request, Pull) else "push"
            size += bulk_bytes(request) + bulk_bytes(reply)
            for table, count in ids_by_table(request.tables):
                key = table, direction
                self._rows[key] = self._rows.get(key, 0) + count
        if size:
            self._calls[direction].append((size, seconds))

    def _decide(self, step: int, waited: float) -> None:
        if waited < WAITING:
            _log.warning(
                "step %d: compression stays off: training waits for shards %.1f %% of the time; no codec can save more",
                step, 100 * waited,
            )  # fmt: skip
            return
        for table in self._session.tables:
            for direction in DIRECTIONS:
                if (table.spec.name, direction) not in self._pinned:
                    self._choose(step, table.spec, direction)

    def _choose(self, step: int, spec: TableSpec, direction: Direction) -> None:
        link = link_speed(self._calls[direction], self._round_trip)
        raw = 4 * spec.dim * self._rows.get((spec.name, direction), 0) / STEPS
        if link is None or raw == 0:
            return
        compressor, switching = self._session.client.compressor, self._session.switching
        dense, now = compressor.is_dense(spec.name), compressor.directions()[spec.name]
        momentum = compressor.settings.momentum
        found = candidates(spec, direction, dense=dense, allow=self._allow, momentum=momentum)
        choice, why = best([measure(codec, raw, spec.dim, compressor.find) for codec in found], link)
        if choice is not None:
            self._before.setdefault(spec.name, now)
            push, pull = (choice.codec, now.pull) if direction == "push" else (now.push, choice.codec)
            switching.switch({spec.name: Directions(push, pull)})
        text = "none" if choice is None else str(choice.codec)
        _log.warning("step %d: table %s: %s=%s: %s", step, spec.name, direction, text, why)


def _speed(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


TURN_STEPS = 10  # measured in each turn of a trial, with codecs or without
TURNS = (True, False, False, True)  # what goes on beside, and grows or shrinks, falls on both sides
ROUNDS = 3  # of these turns at most
SLOWER = 1.03  # of a step's time without codecs at most: less is noise
UNSURE = 0.05  # so near to the bound another round decides


class Trial:
    """Has tables travel as wanted and otherwise by turns, and then as wanted if steps do not take too long with it.

    `wanted`: table -> its codecs, in use by now. `otherwise`: without any, unless it is given. `bound`: what a step may
    take as wanted, of its time otherwise. Every step of a worker calls `before_step`. It ends where somebody else
    changes how tables travel.
    """

    def __init__(
        self,
        session: Session,
        wanted: Mapping[str, Directions],
        otherwise: Mapping[str, Directions] | None = None,
        bound: float = SLOWER,
    ) -> None:
        self._session, self._wanted, self._bound = session, dict(wanted), bound
        self._otherwise = {name: Directions() for name in wanted} if otherwise is None else dict(otherwise)
        self._turn = 0
        self._starts: list[float] = []  # of the steps of this turn
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of steps with codecs, and without
        self.left_on: bool | None = None  # once that is decided

    def before_step(self, step: int) -> None:
        """Before a step: take its time, and change over when it is time."""
        if self.left_on is not None:
            return
        self._starts.append(time.perf_counter())
        if len(self._starts) <= WARM_UP + TURN_STEPS:
            return
        coded = TURNS[self._turn % len(TURNS)]
        now = self._session.client.compressor.directions()
        if {name: now[name] for name in self._wanted} != self._directions(coded):
            self.left_on = True  # as it was set
            _log.warning("step %d: the trial of codecs ends, because other codecs were set", step)
            return
        self._seconds[coded] += np.diff(self._starts[WARM_UP:]).tolist()
        self._turn += 1
        if self._turn % len(TURNS) == 0 and self._decide(step):
            return
        self._use(TURNS[self._turn % len(TURNS)])
        self._starts = [time.perf_counter()]

    def state_dict(self) -> Mapping[str, object]:
        """Return the decision and its codecs, for a checkpoint."""
        return {"left_on": self.left_on, "wanted": self._texts()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned; a trial that was unfinished, or of other codecs, is repeated."""
        self.left_on = None if state["left_on"] is None else bool(state["left_on"])
        if self.left_on is not None and state["wanted"] != self._texts():
            self.left_on = None
        if self.left_on is not None:
            self._use(self.left_on)
            how = "left on" if self.left_on else "switched off"
            _log.warning("codecs are %s, as was decided before the run was resumed", how)

    def _texts(self) -> dict[str, list[str]]:
        return {name: [str(way.push), str(way.pull)] for name, way in self._wanted.items()}

    def _decide(self, step: int) -> bool:
        """Whether these turns are enough; what they say is done then."""
        coded, plain = (float(np.median(self._seconds[which])) for which in (True, False))
        if abs(coded / plain - self._bound) < UNSURE and self._turn < ROUNDS * len(TURNS):
            return False
        self.left_on = coded <= self._bound * plain
        self._use(self.left_on)
        text = f"a step takes {1e3 * coded:.3g} ms with these codecs, and {1e3 * plain:.3g} without"
        _log.warning("step %d: %s: they are %s", step, text, "left on" if self.left_on else "switched off")
        return True

    def _use(self, coded: bool) -> None:
        self._session.switching.switch(self._directions(coded))

    def _directions(self, coded: bool) -> dict[str, Directions]:
        return self._wanted if coded else self._otherwise
