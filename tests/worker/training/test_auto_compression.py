"""What `compression: auto` chooses and `unless_slower` leaves on, on links and by a clock that are made up."""

import time

import pytest
import torch

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.values.registry import find_values
from embershard.proto.messages import Compress, TableCodecs, bulk_bytes
from embershard.worker.client import connections
from embershard.worker.session import session as session_module
from embershard.worker.training import autotune as auto
from embershard.worker.training.autotune import CodecTuner, Cost, best, candidates, link_speed, measure
from embershard.worker.training.codecs import JobCodecs
from harness.job import make_job

SPEC = es.TableSpec(name="t", dim=64, optimizer=es.Adagrad(lr=0.1), initializer=es.Constant(value=0.0))
INT8, FP16S = CodecName.parse("int8"), CodecName.parse("fp16s")


def cost(codec, coded, seconds):
    return Cost(codec, 4e6, coded, seconds / 2, seconds / 2)


COSTS = [cost(FP16S, 2e6, 0.001), cost(INT8, 1e6, 0.003)]  # break-even at 2 GB/s and 1 GB/s


@pytest.mark.parametrize(
    ("bytes_per_second", "want"), [(1e7, INT8), (4e8, INT8), (6e8, FP16S), (1.5e9, FP16S), (1.7e9, None), (1e12, None)]
)
def test_what_saves_the_most_time_on_a_link_is_chosen(bytes_per_second, want):
    found, why = best(COSTS, bytes_per_second)
    assert (found and found.codec) == want
    if found is None:
        assert "fp16s would pay below 12.8 Gbit/s" in why
    else:
        assert f"pays below {'8' if want == INT8 else '16'} Gbit/s" in why


def test_a_link_is_what_its_larger_and_faster_calls_saw():
    waited = [(1_000_000, 5.0)] * 10  # for another worker
    calls = [(1_000_000, 0.11)] * 10 + waited + [(10, 0.01)] * 12  # the last say nothing of the link
    assert link_speed(calls, round_trip=0.01) == pytest.approx(1e7)
    assert link_speed([], 0.0) is None


ALLOW = [CodecName.parse(text) for text in ("topk:0.01", "onebit", "bf16", "dgc:0.01")]


@pytest.mark.parametrize(
    ("optimizer", "direction", "dense", "want"),
    [
        (es.Adam(lr=1), "push", False, "fp16s int8 bf16"),
        (es.SGD(lr=1), "push", False, "fp16s int8 topk:0.01 bf16 dgc:0.01"),
        (es.SGD(lr=1, momentum=0.9), "push", False, "fp16s int8 topk:0.01 bf16"),  # dgc would give it twice
        (es.SGD(lr=1), "push", True, "fp16s int8 topk:0.01 onebit bf16 dgc:0.01"),
        (es.SGD(lr=1), "pull", False, "fp16s int8 bf16"),
        (es.SGD(lr=1), "pull", True, "fp16s bf16"),
    ],
)
def test_only_quantisation_comes_before_an_optimizer_that_adapts(optimizer, direction, dense, want):
    spec = es.TableSpec(name="t", dim=4, optimizer=optimizer)
    assert [str(codec) for codec in candidates(spec, direction, dense=dense, allow=ALLOW)] == want.split()


@pytest.mark.parametrize(("text", "ratio"), [("int8", 64 * 4 / 66), ("fp16s", 64 * 4 / 129), ("topk:0.01+fp16s", 133)])
def test_a_codec_is_measured_at_the_size_of_a_step(text, ratio):
    found = measure(CodecName.parse(text), 256 * 1000, 64, find_values)
    assert found.raw_bytes / found.coded_bytes == pytest.approx(ratio, rel=0.2)
    assert min(found.encode, found.decode) > 0


class Clock:
    """Time that passes only as the links and codecs of a test say."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (auto, connections, session_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def connect(make_wires, clock):
    """A session with a shard behind a link of so many bytes per second."""

    def make(bytes_per_second=4e6, slowly_coded=False):
        wires = make_wires(1)

        def handle(request):
            reply = wires.wires[0].shard.handle(request)
            clock.now += (bulk_bytes(request) + bulk_bytes(reply)) / bytes_per_second
            return reply

        wires.hold(before=handle)
        session = wires.session()
        if slowly_coded:
            compressor = session.client.compressor
            compressor.find = lambda name: find_values(name) if name == "none" else Sleepy(name, clock)
        return session

    return make


def train(session, follow, steps):
    module = es.Embedding(session.table(SPEC))
    ids = torch.arange(64)
    for step in range(steps):
        follow(step)
        module(ids).sum().backward()
        session.step()


def used(session):
    directions = session.client.compressor.directions()["t"]
    return str(directions.push), str(directions.pull)


TURN = auto.WARM_UP + auto.TURN_STEPS
TRIAL = len(auto.TURNS) * TURN
STEPS = auto.WARM_UP + auto.STEPS + TRIAL + 1


def test_a_slow_link_switches_on_what_pays_and_says_why(connect, caplog):
    session = connect()
    chooser = CodecTuner(session, [], frozenset())
    train(session, chooser.before_step, STEPS)
    assert used(session) == ("int8", "int8")
    assert chooser.done
    assert session.client.connections.watch is None
    push, pull, after = [record.getMessage() for record in caplog.records]
    assert push.startswith(
        "step 23: table t: push=int8: 0.0164 MB of a step become 0.00423 (3.88 times less); the link"
    )
    assert "the link gives 32 Mbit/s" in push
    assert pull.startswith("step 23: table t: pull=int8: ")
    assert after == "step 75: a step takes 2.13 ms with these codecs, and 8.33 without: they are left on"


def codecs_of(session, **compression):
    """Those of a job, once its one table is there."""
    codecs = JobCodecs(make_job(compression=compression, train={"steps": 1}), session)
    session.table(SPEC)
    codecs.begin(0)
    return codecs


def test_what_is_pinned_is_left_alone(connect):
    session = connect()
    train(session, codecs_of(session, auto=True, tables={"t": {"push": "none"}}).before_step, STEPS)
    assert used(session) == ("none", "int8")


def test_a_fast_link_switches_nothing_on(connect, caplog, monkeypatch):
    monkeypatch.setattr(auto, "measure", lambda codec, raw, *_: cost(codec, raw / 2, 1.0))
    session = connect()
    train(session, CodecTuner(session, [], frozenset()).before_step, STEPS)
    assert used(session) == ("none", "none")
    assert "table t: push=none: the link gives 32 Mbit/s, and fp16s would pay below" in caplog.text


def test_training_that_does_not_wait_is_left_alone(connect, clock, caplog):
    session = connect()
    chooser = CodecTuner(session, [], frozenset())

    def follow(step):
        clock.now += 1.0  # the batch takes long
        chooser.before_step(step)

    train(session, follow, STEPS)
    assert used(session) == ("none", "none")
    (record,) = caplog.records
    assert "compression stays off: training waits for shards 0.8 % of the time" in record.getMessage()


class Sleepy:
    """A codec that takes its time."""

    def __init__(self, name, clock):
        self.codec, self.clock = find_values(name), clock
        self.name, self.code, self.nbytes = self.codec.name, self.codec.code, self.codec.nbytes
        self.decode = self.codec.decode

    def encode(self, rows, out, key=None):
        self.clock.now += 0.02
        self.codec.encode(rows, out, key)


ONE_ROUND = ["int8"] * TURN + ["none"] * 2 * TURN + ["int8"] * TURN


def followed(session, codecs, steps):
    """How pushes travelled, from step to step."""
    seen = []

    def follow(step):
        codecs.before_step(step)
        seen.append(used(session)[0])

    train(session, follow, steps)
    return seen


@pytest.mark.parametrize(
    ("link", "said", "then"),
    [((4e6,), "2.13 ms with these codecs, and 8.33 without: they are left on", "int8"), ((1e12, True), "off", "none")],
    ids=["left on", "switched off"],
)
def test_a_jobs_codec_is_left_on_where_steps_take_less_time(connect, caplog, link, said, then):
    session = connect(*link)
    codecs = codecs_of(session, push="int8", pull="int8", unless_slower=True)
    assert followed(session, codecs, TRIAL + 5) == [*ONE_ROUND, *[then] * 5]
    assert caplog.records[-1].getMessage().startswith("step 52: a step takes ")
    assert caplog.records[-1].getMessage().endswith(said)


def test_a_trial_goes_on_while_it_is_not_sure(connect, clock):
    session = connect(1e12)
    codecs = codecs_of(session, push="int8", unless_slower=True)

    def follow(step):
        clock.now += 1.0  # beside which a codec takes no time
        codecs.before_step(step)

    for round_ in range(1, auto.ROUNDS + 1):
        assert codecs.trial.left_on is None
        train(session, lambda step, start=(round_ - 1) * TRIAL: follow(start + step), TRIAL + (round_ == auto.ROUNDS))
    assert codecs.trial.left_on
    assert used(session)[0] == "int8"


def test_batches_that_make_one_step_are_one_step_of_a_trial(connect, clock):
    session = connect(1e12, slowly_coded=True)
    codecs = codecs_of(session, push="int8", unless_slower=True)

    def follow(step):
        for _ in range(4):
            clock.now += 0.001
            codecs.before_step(step)

    train(session, follow, TRIAL + 1)
    assert used(session) == ("none", "none")


def test_what_a_selection_held_back_is_sent_where_it_is_switched_off(connect):
    session = connect(1e12, slowly_coded=True)
    codecs = codecs_of(session, push="topk:0.01+fp16s", unless_slower=True)
    train(session, codecs.before_step, TRIAL + 5)
    assert used(session) == ("none", "none")
    assert session.client.compressor.residual("t").ids.size == 0


@pytest.mark.parametrize("step", [5, TURN + 5])
def test_a_trial_ends_where_somebody_says_how_tables_travel(connect, step):
    session = connect()
    codecs = codecs_of(session, push="int8", pull="int8", unless_slower=True)
    set_by_hand = Compress(revision=1, tables=(TableCodecs(table="t", push="fp16s", pull="fp16s"),))
    train(
        session, lambda now: (codecs.before_step(now), now == step and session.client.ask_all(set_by_hand)), TRIAL + 5
    )
    assert used(session) == ("fp16s", "fp16s")


@pytest.mark.parametrize("left_on", [True, False, None])
def test_a_resumed_run_goes_on_as_its_trial_was_decided(connect, left_on):
    session = connect()
    codecs = codecs_of(session, push="int8", unless_slower=True)
    state = {"left_on": left_on, "wanted": {"t": ["int8", "none"]}}
    codecs.trial.load_state_dict(state)
    assert codecs.trial.state_dict() == state
    want = "none" if left_on is False else "int8"
    assert followed(session, codecs, 2 * TURN)[: TURN - 1] == [want] * (TURN - 1)
    assert used(session)[0] == ("none" if left_on is None else want)
    other = connect()  # a trial of other codecs than these
    codecs = codecs_of(other, push="int8", unless_slower=True)
    codecs.trial.load_state_dict({"left_on": left_on, "wanted": {"t": ["topk:0.01", "none"]}})
    assert followed(other, codecs, TRIAL) == ONE_ROUND
