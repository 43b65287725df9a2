"""What ends a command from outside."""

import signal

import pytest

from embershard.cli.signals import ended_by_signals


@pytest.fixture
def hangup():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_a_command_and_is_its_exit_code(number):
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number


def test_a_command_that_nohup_started_goes_on_where_its_terminal_is_closed(hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_by_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
