"""Codecs that are switched while a session trains: by hand, by the shards' settings, by a job's schedule."""

import logging

import numpy as np
import pytest
import torch

import embershard as es
from embershard.proto.errors import JobError, UnknownCodec
from embershard.proto.messages import READ_ONLY_WORKER, Compress, Pull, Push, TableCodecs
from embershard.worker.compression.settings import advice, codec_of
from embershard.worker.session.codec_switch import settings_of
from embershard.worker.training.codecs import JobCodecs
from harness.job import make_job


def table(name):
    return es.TableSpec(name=name, dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))


SPEC = table("t")
IDS = torch.tensor([1, 2, 3])


def codecs_sent(wires):
    """(pull codec, push codec) of every step."""
    pulls = [part.codec for request in wires.sent(Pull) for part in request.tables]
    pushes = [part.codec for request in wires.sent(Push) for part in request.tables]
    return list(zip(pulls, pushes, strict=False))


def train(session, steps):
    module = es.Embedding(session.table(SPEC))
    for _ in range(steps):
        module(IDS).sum().backward()
        session.step()


def tell(wires, revision, *tables):
    for wire in wires.wires:
        wire.shard.handle(Compress(revision=revision, tables=tables))


def test_workers_switch_as_the_shards_were_told_and_say_so(make_wires, caplog):
    wires = make_wires(1)
    session = wires.session()
    train(session, 2)
    tell(wires, 1, TableCodecs(table="t", push="int8"))
    train(session, 2)
    tell(wires, 2, TableCodecs(table="t", pull="fp16s"))
    train(session, 2)
    # the first pull after a change brings its revision: that step's push is the first that follows it
    assert codecs_sent(wires) == [("", "")] * 2 + [("", "packed")] * 3 + [("fp16s", "packed")]
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: table t uses push=int8 pull=none, as set on the shards",
        "step 4: table t uses push=int8 pull=fp16s, as set on the shards",
    ]


def test_a_direction_of_which_the_shards_were_told_nothing_stays(make_wires):
    wires = make_wires(2)
    session = wires.session()
    session.table(SPEC)
    session.compress("t", push="int8", pull="bf16")
    for wire in wires.wires:  # where it is shown
        (shown,) = wire.shard.status().tables
        assert (shown.push_codec, shown.pull_codec) == ("int8", "bf16")
    tell(wires, 1, TableCodecs(table="t", push="fp16s"))
    train(session, 1)
    assert list(map(str, session.client.compressor.directions()["t"])) == ["fp16s", "bf16"]


def test_a_session_without_the_codec_stays_as_it_is(make_wires, caplog):
    wires = make_wires(1)
    session = wires.session()
    train(session, 1)
    session.client.compressor.find = lambda name: (_ for _ in ()).throw(UnknownCodec(codec=name, known="none"))
    tell(wires, 1, TableCodecs(table="t", push="int8"), TableCodecs(table="t", pull="none"))
    train(session, 2)
    assert [push for _, push in codecs_sent(wires)] == ["", "", ""]
    (record,) = caplog.records
    assert "step 1: table t keeps its codecs: no codec 'int8' here (known: none)" in record.getMessage()


def test_settings_of_tables_that_a_session_has_not_are_no_concern_of_it(make_wires, caplog):
    wires = make_wires(1)
    wires.session().table(table("other"))
    tell(wires, 1, TableCodecs(table="other", push="int8"))
    train(wires.session(), 2)
    assert not caplog.records


@pytest.mark.parametrize("staleness", [None, 1])  # alone, and as a member
def test_what_the_shards_were_told_for_a_job_is_not_put_on_the_next_one(stream_shard, staleness):
    with es.connect(stream_shard, staleness=staleness) as session:
        session.table(SPEC)
        session.client.ask_all(Compress(revision=1, tables=(TableCodecs(table="t", push="int8"),)))
        train(session, 2)
        assert session.client.compressor.packs("t")
    with es.connect(stream_shard, worker=READ_ONLY_WORKER) as reader:  # who only looks leaves them alone
        assert settings_of(reader.client).tables
    with es.connect(stream_shard, staleness=staleness) as session:
        train(session, 2)
        assert not session.client.compressor.packs("t")
        session.client.ask_all(Compress(revision=3, tables=(TableCodecs(table="t", push="bf16"),)))
        train(session, 2)
        assert session.client.compressor.packs("t")


def test_who_only_looks_does_not_change_how_a_table_is_shown_to_travel(stream_shard):
    with es.connect(stream_shard, compression=es.Compression(push="int8")) as session:
        session.table(SPEC)
        with es.connect(stream_shard, worker=READ_ONLY_WORKER) as reader:
            reader.table(SPEC)
        (table,) = session.client.status()[0].tables
        assert table.push_codec == "int8"


@pytest.fixture
def begin(make_wires):
    """A job's codecs at a step, in a session with these tables, and its wires."""

    def make(compression, tables=("t",), step=0, prefix=""):
        wires = make_wires(1)
        job = make_job(compression=compression, train={"steps": 1}).model_copy(update={"prefix": prefix})
        codecs = JobCodecs(job, wires.session())
        for name in tables:
            wires.sessions[0].table(table(name))
        codecs.begin(step)
        return codecs, wires.sessions[0], wires

    return make


def pushed_by(session):
    return {name: str(used.push) for name, used in session.client.compressor.directions().items()}


def test_a_schedule_switches_at_its_steps(begin, caplog):
    codecs, session, wires = begin({"push": {"at": {0: "none", 2: "int8"}}, "pull": {"at": {0: "bf16", 3: "none"}}})
    for step in range(4):
        codecs.before_step(step)
        train(session, 1)
    assert codecs_sent(wires) == [("bf16", ""), ("bf16", ""), ("bf16", "packed"), ("", "packed")]
    assert "step 2: table t uses push=int8 pull=bf16, by the job's schedule" in caplog.text


def test_a_schedule_leaves_alone_what_was_switched_by_hand(begin):
    codecs, session, _ = begin({"push": "none", "tables": {"u": {"push": {"at": {0: "none", 2: "int8"}}}}}, ("t", "u"))
    session.compress("t", push="bf16")
    codecs.before_step(2)
    assert pushed_by(session) == {"t": "bf16", "u": "int8"}


def test_a_resumed_run_begins_with_the_codec_of_its_step(begin):
    _, session, _ = begin({"push": {"at": {0: "none", 100: "int8", 200: "bf16"}}}, step=150)
    assert pushed_by(session) == {"t": "int8"}


@pytest.mark.parametrize(
    ("tables", "want"),
    [
        ({"wide": {"push": "int8"}}, r"compression.tables: 'wide' matches nothing that is left \(known: t\)"),
        ({"*": {"push": "onebit"}}, "compression: table 't': codec 'onebit' on the push of rows"),
    ],
)
def test_what_a_table_cannot_have_ends_the_job(begin, tables, want):
    with pytest.raises(JobError, match=want):
        begin({"tables": tables})


def test_tables_of_a_job_with_a_prefix_are_named_without_it(begin):
    _, session, _ = begin({"tables": {"t": {"push": "int8"}}}, ["mine/t"], prefix="mine/")
    assert pushed_by(session) == {"mine/t": "int8"}


@pytest.mark.parametrize(
    ("optimizer", "push", "want"),
    [
        ("adam", "topk:0.01", "topk:0.01 with adam changes the size of its steps"),
        ("rowwise_adagrad", "rows:0.1+int8", "use int8, which does not"),
        ("adagrad", "int8", ""),
        ("sgd", "int8", "int8 with sgd sends far more than topk:0.01+fp16s"),
        ("sgd", "topk:0.01", ""),
        ("sgd", "none", ""),
    ],
)
def test_a_codec_that_does_not_suit_its_optimizer_is_said(optimizer, push, want):
    found = advice(optimizer, codec_of(push))
    assert want in found
    assert bool(found) == bool(want)


def test_advice_is_given_once_by_the_first_worker(begin, caplog):
    caplog.set_level(logging.WARNING)
    begin({"push": "int8"})
    (record,) = caplog.records
    assert advice("sgd", codec_of("int8")) in record.getMessage()


def test_a_push_in_flight_is_acknowledged_before_another_codec_is_used(make_wires):
    wires = make_wires(1)
    session = wires.session()
    module = es.Embedding(session.table(SPEC))
    for step, _ in enumerate(session.prefetch([IDS] * 6, staleness=2, inputs=lambda ids: {"t": ids})):
        if step == 3:
            session.compress("t", push="int8")
        module(IDS).sum().backward()
        session.step()
    pushes = wires.sent(Push)
    assert [push.tables[0].codec for push in sorted(pushes, key=lambda push: push.clock)] == [""] * 3 + ["packed"] * 3
    assert np.isfinite(module(IDS).detach().numpy()).all()
