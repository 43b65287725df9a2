"""What a shard tells systemd."""

import socket

import pytest

from embershard.ps.monitoring.systemd import notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_state_reaches_the_socket_that_systemd_names(is_abstract, tmp_path, monkeypatch):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + path if is_abstract else path)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + path if is_abstract else path)
        notify("READY=1\nSTATUS=serves")
        assert sock.recv(100) == b"READY=1\nSTATUS=serves"


@pytest.mark.parametrize("name", [None, "", "vsock:1:2", "/nowhere/at/all"])
def test_where_systemd_does_not_listen_nothing_happens(name, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if name is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", name)
    notify("READY=1")
