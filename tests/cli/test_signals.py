"""What ends a command from outside."""

import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import restore, snapshot
from embershard.cli.signals import check_interrupt, ended_by_signals, note_interrupts
from embershard.deploy.supervisor import LocalShards


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_a_command_and_is_its_exit_code(number):
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number


def test_a_ctrl_c_that_code_of_a_library_does_not_pass_on_is_seen_at_the_next_look():
    note_interrupts()
    check_interrupt()
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        check_interrupt()
    note_interrupts()  # of another command
    check_interrupt()


def test_a_command_that_nohup_started_goes_on_where_its_terminal_is_closed():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_by_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_up_also_while_its_shards_start(number, monkeypatch):
    closed, went_on = [], []

    def recover(shards):
        signal.raise_signal(number)
        went_on.append(shards)

    monkeypatch.setattr(LocalShards, "start", lambda _: None)
    monkeypatch.setattr(LocalShards, "wait_until_serving", recover)
    monkeypatch.setattr(LocalShards, "close", lambda shards: closed.append(shards))
    assert CliRunner().invoke(cli.app, ["up"]).exit_code == 128 + number
    assert closed
    assert not went_on


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", [snapshot, restore], ids=["snapshot", "restore"])
def test_a_signal_unwinds_a_snapshot_and_a_restore(module, number, monkeypatch):
    cancelled = []

    def work(*_, **__):
        assert signal.getsignal(number) != signal.SIG_DFL  # which would end the tests
        try:
            signal.raise_signal(number)
        finally:
            cancelled.append(True)

    client = SimpleNamespace(connect=lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(snapshot, "Client", client)
    monkeypatch.setattr(module, f"{'take' if module is snapshot else 'restore'}_snapshot", work)
    words = [module.__name__.rpartition(".")[2], "folder", "--ps", "127.0.0.1:1"]
    assert CliRunner().invoke(cli.app, words).exit_code == 128 + number
    assert cancelled
