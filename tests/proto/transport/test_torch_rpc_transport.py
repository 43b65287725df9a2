"""The `rpc` transport before it has a shard to talk to."""

import socket
import threading
from contextlib import closing
from datetime import timedelta

from embershard.proto.errors import WrongVersion
from embershard.proto.messages import Hello
from embershard.proto.transport.torch_rpc import RpcTransport
from embershard.proto.wire import OLDEST_VERSION, VERSION
from harness.raises import raises


def test_a_shard_of_version_1_is_told_from_something_else():
    def greet():
        sock, _ = listener.accept()
        with sock:
            sock.recv(100)
            sock.sendall(b"embershard rpc 1 tcp://127.0.0.1:1\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        old = threading.Thread(target=greet)
        old.start()
        own = {"own_lowest": OLDEST_VERSION, "own_highest": VERSION}
        with (
            closing(RpcTransport(f"rpc://127.0.0.1:{listener.getsockname()[1]}")) as transport,
            raises(WrongVersion, lowest=1, highest=1, **own),
        ):
            transport.submit(Hello(), timedelta(seconds=60)).result()
        old.join(60)
