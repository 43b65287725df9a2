"""`embershard compression`: what it shows, switches and refuses, over shards in this process."""

import json

import pytest
from typer.testing import CliRunner

import embershard as es
from embershard.cli import compression as command
from embershard.local_shards import InProcessShards
from embershard.proto.errors import EmbershardError, InvalidRequest, UnknownTable
from embershard.worker.client.client import Client
from embershard.worker.session.session import Session


@pytest.fixture(autouse=True)
def shards(monkeypatch):
    shards = InProcessShards(2)
    monkeypatch.setattr(command.Client, "connect", lambda _, timeout, tls: Client(shards.transports(), timeout=timeout))
    session = Session(Client(shards.transports()))
    for name, optimizer in (("embedding", es.SGD(lr=1.0)), ("embedding.more", es.Adam(lr=1.0))):
        session.table(es.TableSpec(name=name, dim=2, optimizer=optimizer))


def run(*words, code=0):
    result = CliRunner().invoke(command.compression, [*words, "--ps", "h:1,h:2"])
    if isinstance(result.exception, EmbershardError):
        raise result.exception
    assert result.exit_code == code
    return result.stdout or " ".join(result.stderr.replace("│", " ").split())


def shown():
    return json.loads(run("show", "--json"))


def test_tables_are_switched_under_a_new_revision():
    plain = {"push": "none", "pull": "none", "set": None}
    assert shown() == {"revision": 0, "tables": {"embedding": plain, "embedding.more": plain}}
    assert run("set", "embedding.more", "push=int8", "pull=fp16s") == (
        "table embedding.more: push=int8 pull=fp16s (revision 1); workers switch before their next step\n"
    )
    run("set", "embedding.more", "pull=none")
    found = shown()
    assert found["revision"] == 2
    assert found["tables"]["embedding.more"]["set"] == {"push": "int8", "pull": "none"}
    assert "set (revision 2)" in run("show")


def test_a_pattern_switches_all_that_it_fits_and_a_poor_choice_is_said():
    out = run("set", "embedding", "push=topk:0.010")
    assert "table embedding: push=topk:0.01 (revision 1)" in out
    assert "table embedding.more: push=topk:0.01 (revision 1)" in out
    assert "topk:0.01 with adam changes" in out


def test_what_one_table_cannot_have_or_is_not_there_is_refused_for_all():
    with pytest.raises(UnknownTable, match=r"wide.*embedding, embedding.more"):
        run("set", "wide", "push=int8")
    with pytest.raises(InvalidRequest, match="codec 'onebit' on the push of rows"):
        run("set", "emb*", "push=onebit")
    assert shown()["revision"] == 0


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], "Missing argument 'push=CODEC|pull=CODEC'"),
        (["int8"], "'int8' must read push=CODEC or pull=CODEC"),
        (["both=int8"], "'both=int8' must read"),
        (["push=int8", "push=none"], "push is given twice"),
        (["push=topk:2"], "its ratio must be above 0 and at most 1, got 2"),
    ],
)
def test_what_is_no_codec_is_refused(words, want):
    assert want in run("set", "embedding", *words, code=2)
