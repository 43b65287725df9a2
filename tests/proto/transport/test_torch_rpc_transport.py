"""The `rpc` transport before it has a shard to talk to."""

import socket
import threading
from datetime import timedelta

import pytest

from embershard.proto.errors import WrongVersion
from embershard.proto.messages import Hello
from embershard.proto.transport.torch_rpc import RpcTransport
from embershard.proto.wire import OLDEST_VERSION, VERSION


def test_a_shard_of_version_1_is_told_from_something_else():
    def greet():
        sock, _ = listener.accept()
        with sock:
            sock.recv(100)
            sock.sendall(b"embershard rpc 1 tcp://127.0.0.1:1\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        old = threading.Thread(target=greet)
        old.start()
        transport = RpcTransport(f"rpc://127.0.0.1:{listener.getsockname()[1]}")
        try:
            with pytest.raises(WrongVersion) as refused:
                transport.submit(Hello(), timedelta(seconds=60)).result()
        finally:
            transport.close()
            old.join(60)
    own = {"own_lowest": OLDEST_VERSION, "own_highest": VERSION}
    assert refused.value.fields == {"lowest": 1, "highest": 1, **own}
