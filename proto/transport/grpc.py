"""A shard behind gRPC.

Bytes go to gRPC and come from it: messages are made and read here, so that garbage in a reply is told from a failed
call. gRPC's own retries are off, since they keep at most 256 KiB of a call; the client sends the same token again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, Protocol
from urllib.parse import quote

import grpc

from embershard.proto.arrays import MAX_MESSAGE_BYTES, Array
from embershard.proto.errors import EmbershardError, InternalError, InvalidRequest, NotAShard, from_wire
from embershard.proto.messages import METHODS, SERVICE, GetStatus, Greeting, Hello, Reply, Request
from embershard.proto.protobuf import dumps, loads
from embershard.proto.security.client_token import ClientToken
from embershard.proto.transport.transport import TransportClosed, Unreachable
from embershard.proto.wire import VERSION, wrong_version

if TYPE_CHECKING:
    from embershard.proto.security.credentials import Credentials
    from embershard.proto.transport.client_tls import ClientTLS

ERROR_KEY = "embershard-error-bin"
INSTANCE_KEY = "embershard-instance"
_OPTIONS = [
    # the limit is the messages' own; gRPC must not refuse one that the shard would take
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + 2**20),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + 2**20),
    ("grpc.enable_retries", 0),
    # a peer that vanished without a word is noticed while a call waits for it
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # a shard that starts later, or again, is found within a second
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # shards are addressed directly, whatever proxy the environment names
    ("grpc.enable_http_proxy", 0),
]
_GRACE_SECONDS = 1.0  # gRPC ends a call at its deadline; this much later we stop believing that it does
# what gRPC says when the other side speaks something, but not gRPC
_PREFACE = re.compile(r"failed to connect to all addresses; last error: \w+: \S+: |errors resolving .*?lookup error:")
_SILENCE = "timed out before receiving settings frame"
_FOREIGN_SIGNS = ("http1.x", "failed parsing http/2", "http2 header with status", "content-type", "invalid content")
_Metadata = list[tuple[str, str]]


class _GrpcCall(Protocol):
    """The parts of grpc.Future and grpc.Call that are used here."""

    def result(self, timeout: float | None = None) -> bytes: ...
    def cancel(self) -> bool: ...


class GrpcTransport:
    """One channel to `address` ("host:port" or "unix:/path"); connects at the first call and again when it must.

    With `tls` it is encrypted, and made anew when the certificates change. `token` says what to show with every call.
    A channel connects again by itself, so every call names the process that answered the latest Hello: another one at
    the same address refuses it, which is Unreachable.
    """

    def __init__(self, address: str, *, tls: ClientTLS | None = None, token: ClientToken | None = None) -> None:
        self.address = address
        self._token = token or ClientToken()
        is_unix = address.startswith("unix:")
        # to gRPC it is a URI, in which # and % have a meaning
        self._target = f"unix:{quote(address[5:])}" if is_unix else address
        # a shard with certificates writes no token
        self._loopback = [] if is_unix or tls is not None else _loopback_addresses(address)
        self._tells = not is_unix or self._token.at_unix_sockets
        self.sent_bytes = 0
        self.received_bytes = 0
        self.tls = tls
        self._used: Credentials | None = None
        self._retired: grpc.Channel | None = None  # of the certificates of before: its calls go on
        self._closed = self._is_checked = False
        self._instance = ""  # of the process that answered the latest Hello
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        if self.tls is None:
            self._channel = grpc.insecure_channel(self._target, options=_OPTIONS)
        else:
            self._used = self.tls.credentials()
            pair = {"private_key": self._used.key, "certificate_chain": self._used.certificate}
            credentials = grpc.ssl_channel_credentials(self._used.authorities, **pair)
            name = [("grpc.ssl_target_name_override", self.tls.server_name)]
            self._channel = grpc.secure_channel(self._target, credentials, options=_OPTIONS + name)
        self._methods: dict[type[Request], Callable[[bytes, float, _Metadata], _GrpcCall]] = {
            kind: self._method(name) for kind, (name, _) in METHODS.items()
        }

    def _follow_certificates(self, tls: ClientTLS) -> None:
        """Use a new channel with new certificates; UntrustedCertificate where the shard's was revoked."""
        with self._lock:
            if tls.credentials() is not self._used and not self._closed:
                if self._retired is not None:
                    self._retired.close()
                self._retired = self._channel
                self._open()
                self._is_checked = False
            # gRPC's client knows no revocation lists, and shows no certificate
            if not self._is_checked and self._used is not None and self._used.revoked and (error := tls.diagnose()):
                raise error
            self._is_checked = True

    def _method(self, name: str) -> Callable[[bytes, float, _Metadata], _GrpcCall]:
        method = self._channel.unary_unary(f"/{SERVICE}/{name}")

        def start(data: bytes, seconds: float, metadata: _Metadata) -> _GrpcCall:
            call: _GrpcCall = method.future(data, timeout=seconds, metadata=metadata)
            return call

        return start

    def _metadata(self, kind: type[Request], token: str | None) -> _Metadata:
        shown = [] if token is None else [("authorization", f"Bearer {token}")]
        if self._instance and kind not in (Hello, GetStatus):  # whoever asks these is told who answers
            shown.append((INSTANCE_KEY, self._instance))
        return shown

    def token(self) -> str | None:
        """Return the token for this shard, or None. BadToken where its file cannot be read."""
        if not self._loopback:
            return self._token.find("", 0) if self._tells else None
        found = (self._token.find(ip, port) for ip, port in self._loopback)
        return next((token for token in found if token is not None), None)

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> _GrpcReply:
        """Send a request without waiting for its reply, which comes in memory of its own."""
        data = dumps(request)
        self.sent_bytes += len(data)
        seconds = timeout.total_seconds()
        if self.tls is not None:
            self._follow_certificates(self.tls)
        token = self.token()
        try:
            call = self._methods[type(request)](data, seconds, self._metadata(type(request), token))
        except ValueError:  # gRPC's word for a channel that was closed
            raise TransportClosed from None
        return _GrpcReply(self, call, METHODS[type(request)][1], seconds, len(data), token)

    def greeted(self, greeting: Greeting) -> None:
        """A Hello was answered: the calls from now on are for that process."""
        self._instance = greeting.instance

    def check_version(self) -> None:
        """WrongVersion where a shard of an earlier version of the contract answers, which does not know ours."""
        for version in range(1, VERSION):
            with contextlib.suppress(grpc.RpcError, ValueError):  # a closed channel is a ValueError
                self._channel.unary_unary(f"/embershard.v{version}.Shard/Hello")(b"", timeout=_GRACE_SECONDS)
                raise wrong_version(version)

    def close(self) -> None:
        """Cancel the calls in flight and close the connection."""
        with self._lock:
            self._closed = True
            if self._retired is not None:
                self._retired.close()
            self._channel.close()


class _GrpcReply:
    """The reply to one call."""

    def __init__(
        self,
        transport: GrpcTransport,
        call: _GrpcCall,
        kind: type[Reply],
        seconds: float,
        num_bytes: int,
        token: str | None = None,
    ) -> None:
        self._transport, self._call, self._kind, self._seconds = transport, call, kind, seconds
        self._token = token
        self.num_bytes = num_bytes

    def result(self) -> Reply:
        try:
            data = self._call.result(timeout=self._seconds + _GRACE_SECONDS)
        except grpc.FutureTimeoutError:
            self._call.cancel()
            raise Unreachable("no answer") from None
        except grpc.FutureCancelledError:
            raise Unreachable("the call was cancelled") from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._transport.check_version()
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._transport.tls is not None:
                if reason := self._transport.tls.diagnose():
                    raise reason from None
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._transport.token() != self._token:
                raise Unreachable("the shard was started again, with another token") from None
            _raise(error, self._transport.address)
        self._transport.received_bytes += len(data)
        self.num_bytes += len(data)
        try:
            reply = loads(self._kind, data)
        except InvalidRequest as error:
            raise NotAShard(address=self._transport.address, reason=str(error)) from None
        if isinstance(reply, Greeting):
            self._transport.greeted(reply)
        return reply


def _loopback_addresses(address: str) -> list[tuple[str, int]]:
    """Those of this machine's loopback that an address stands for."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, UnicodeError):
        return []  # gRPC says what is wrong with it
    places = [(str(place[0]), int(place[1])) for *_, place in found]
    return [(ip, port) for ip, port in places if ipaddress.ip_address(ip.partition("%")[0]).is_loopback]


def _raise(failure: grpc.RpcError, address: str) -> NoReturn:
    """Raise what a failed call means."""
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_KEY:
            raise from_wire(value, "") from None
    code: grpc.StatusCode = failure.code()
    raise _meaning(code, _short(str(failure.details() or "")), address) from None


def _short(text: str) -> str:
    """What gRPC says, without the address and the names of its own parts."""
    text = _PREFACE.sub("", " ".join(text.split())).removesuffix("]")
    return "it takes connections and says nothing" if _SILENCE in text.lower() else text


def _meaning(code: grpc.StatusCode, text: str, address: str) -> EmbershardError | Unreachable:
    """The error of a gRPC status that carries no error of ours."""
    if code is grpc.StatusCode.UNIMPLEMENTED or any(sign in text.lower() for sign in _FOREIGN_SIGNS):
        return NotAShard(address=address, reason=text or code.name)
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable("no answer")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in text:
            return InvalidRequest(reason=f"gRPC refused a message: {text}")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Unreachable(text or code.name)
        case _:
            return InternalError(reason=f"gRPC {code.name}: {text}")
