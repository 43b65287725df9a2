"""`--ps` and EMBERSHARD_PS: where a command finds its shards."""

import json
import socket
import time
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import evaluate, export, local_job, shards
from embershard.deploy import workers
from embershard.deploy.engine import LOCAL, meeting
from embershard.deploy.supervisor import LocalShards
from embershard.proto.errors import BadAddress, BadToken, ShardFailed, ShardRestarted
from embershard.proto.monitoring.exporter import parse_address
from embershard.proto.security.tokens import new_token
from embershard.worker.checkpoint import checkpoint as checkpoints
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms

JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, eval_samples: 100, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 512}
workers: 1
"""


def run(*words, ps=None):
    return CliRunner().invoke(cli.app, words, env={shards.ENVIRONMENT: ps} if ps is not None else {})


def asked(*words, ps=None):
    return [one["address"] for one in json.loads(run("status", "--json", *words, ps=ps).stdout)["shards"]]


def test_the_option_overrides_the_environment_and_that_the_shards_of_up(monkeypatch):
    monkeypatch.setattr("embershard.cli.status.shards_of_up", lambda: ["127.0.0.1:3"])
    assert asked("--ps", "127.0.0.1:1", ps="127.0.0.1:2,127.0.0.1:4") == ["127.0.0.1:1"]
    assert asked(ps="127.0.0.1:2,127.0.0.1:4") == ["127.0.0.1:2", "127.0.0.1:4"]
    assert asked() == asked(ps="") == ["127.0.0.1:3"]
    assert isinstance(run("status", "--ps", "").exception, BadAddress)  # as of a script's variable that is not set


def test_what_runs_on_this_machine_alone_uses_ipv6_where_there_is_no_ipv4(monkeypatch):
    monkeypatch.setattr("embershard.proto.monitoring.exporter._can_listen", lambda host: host == "::1")
    assert shards.first_of_up() == "[::1]:7700"
    assert LocalShards(2, base_port=7800).addresses == ("[::1]:7800", "[::1]:7801")
    assert parse_address(":7790") == ("::1", 7790)  # of the metrics
    assert meeting(LOCAL.workers(1)[0], 7)["MASTER_ADDR"] == "::1"
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with workers._reserve_port() as reserved:
        assert reserved.getsockname()[0] == "::1"


@pytest.mark.parametrize(("text", "mode"), [(None, 0), ("a token", 0o644), ("no token", 0o600)])
def test_a_token_file_that_cannot_be_used_is_named_before_a_shard_is_waited_for(tmp_path, text, mode):
    path = tmp_path / "a.token"
    if text is not None:
        path.write_text(new_token() if text == "a token" else text)
        path.chmod(mode)
    error = run("status", "--ps", "127.0.0.1:1", "--token-file", str(path)).exception
    assert isinstance(error, BadToken)
    assert error.fields["path"] == str(path)


@pytest.mark.parametrize(
    "words", [("snapshot", "folder"), ("restore", "folder"), ("compression", "show")], ids=lambda words: words[0]
)
def test_a_command_about_shards_without_any_says_so(words, monkeypatch):
    monkeypatch.setattr(shards, "shards_of_up", lambda: [])
    assert isinstance(run(*words).exception, shards.NoShards)


@pytest.mark.parametrize(
    ("words", "ps", "used"),
    [
        ((), "127.0.0.1:1", "127.0.0.1:1"),
        (("--shards", "1"), "127.0.0.1:1", None),
        (("--set", "strategy=local"), "127.0.0.1:1", None),
        (("--ps", "127.0.0.1:2"), "127.0.0.1:1", "127.0.0.1:2"),
    ],
)
def test_options_of_train_override_the_shards_of_the_environment(words, ps, used, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    taken = []
    monkeypatch.setattr(local_job.LocalJob, "train", lambda self, checkpoint: taken.append(self.ps))
    assert run("train", "job.yaml", "--output", "out", *words, ps=ps).exit_code == 0
    assert taken == [used]


def test_a_job_without_shards_or_with_shards_of_its_own_refuses_named_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    for words in (("--shards", "1"), ("--set", "strategy=local")):
        assert run("train", "job.yaml", "--ps", "127.0.0.1:1", *words).exit_code == 2


@pytest.mark.parametrize(
    ("words", "ps", "opened"),
    [
        (("evaluate", "job.yaml", "run"), None, ("run", None)),
        (("evaluate", "job.yaml", "run"), "127.0.0.1:1", ("run", "127.0.0.1:1")),  # which open_source leaves out
        (("evaluate", "job.yaml"), "127.0.0.1:1", (None, "127.0.0.1:1")),
        (("evaluate", "job.yaml", "--ps", "127.0.0.1:1"), None, (None, "127.0.0.1:1")),
        (("export", "job.yaml", "run", "out"), "127.0.0.1:1", ("run", "127.0.0.1:1")),
        (("export", "job.yaml", "out", "--ps", "127.0.0.1:1"), None, (None, "127.0.0.1:1")),
        (("evaluate", "job.yaml"), None, None),
        (("evaluate", "job.yaml", "run", "--ps", "127.0.0.1:1"), None, None),
        (("export", "job.yaml", "out"), None, None),
        (("export", "job.yaml", "run", "out", "--ps", "127.0.0.1:1"), None, None),
    ],
)
def test_trained_weights_have_one_source(words, ps, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    taken = []

    def open_source(source, ps, *_, **__):
        taken.append((source, ps))
        raise KeyboardInterrupt

    for command in (evaluate, export):
        monkeypatch.setattr(command, "open_source", open_source)
    done = run(*words, ps=ps)
    assert taken == ([opened] if opened else [])
    assert opened or done.exit_code == 2


def test_a_command_that_takes_shards_takes_certificates():
    without = set()
    for name in cli.COMMANDS:
        command = cli._load(name)
        for part in getattr(command, "commands", {"": command}).values():
            options = {option for param in part.params for option in param.opts}
            if "--ps" in options and "--tls" not in options:
                without.add(name)
    assert not without


def test_a_shard_that_every_restore_ends_is_not_restored_for_ever(stream_shard, monkeypatch):
    def restore(client, *_, **__):
        restores.append(client)
        raise ShardRestarted(address=stream_shard, got="b", want="a")

    restores, checkpoint = [], SimpleNamespace(manifest=SimpleNamespace(snapshot=True))
    monkeypatch.setattr(checkpoints, "restore_shards", restore)
    with pytest.raises(ShardRestarted):
        local_job._meet_shards(stream_shard, checkpoint, replace=False, timeout=timedelta(seconds=1))
    assert len(restores) == 3


def test_a_restore_ends_at_once_where_a_shard_is_gone_for_good(stream_shard, monkeypatch):
    def restore(client, *_, **__):
        for _ in range(100):
            client.status()
            time.sleep(0.01)

    failure = ShardFailed(what="shard 0 ended", log="", code=-9, served=True)
    local = SimpleNamespace(addresses=[stream_shard], failure=failure, wait=lambda timeout: failure)
    monkeypatch.setattr(checkpoints, "restore_shards", restore)
    with pytest.raises(ShardFailed):
        local_job._restore_onto(local, SimpleNamespace(manifest=SimpleNamespace(snapshot=True)), False, None)


def test_a_job_says_that_it_ends_the_one_that_is_on_its_shards(stream_shard, capsys):
    with closing(Client.connect(stream_shard)) as other:
        local_job._meet_shards(stream_shard, None, replace=False, is_first=True)
        assert not capsys.readouterr().err
        other.join(Terms(workers=1))
        for is_paused in (False, True):  # as in an evaluation
            if is_paused:
                other.membership.pause()
            local_job._meet_shards(stream_shard, None, replace=False, is_first=True)
            assert "another job (workers: 1)" in capsys.readouterr().err
        local_job._meet_shards(stream_shard, None, replace=False)  # as the job itself is started again
        assert not capsys.readouterr().err
