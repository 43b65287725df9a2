"""The frames of the `stream` transport: bytes in, frames out; no socket, no asyncio, no message (docs/wire.md).

A connection starts with a hello of either side (`client_hello`, `server_hello`, `read_server_hello`). After it, both
sides send what `encode` returns, and give a `FrameReader` what they receive.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from embershard.proto.errors import BadFrame, InvalidRequest, MessageTooLarge, WrongVersion

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAGIC = b"EMBSHRD\n"  # the first 8 bytes of either direction: no HTTP/2 preface, no TLS record, and a whole line to
# a server of text, which then says that it is none of ours instead of waiting for the rest
OLDEST_VERSION = 2  # of the contract: of frames, messages and the gRPC package
VERSION = 2

# The head is a message without its arrays. A pull of 2,048 tables with names of 100 letters needs 0.2 MiB of it.
MAX_HEAD_BYTES = 2**20
# Ids and gradients of 2,048 tables. It bounds the work that one small frame can ask for, and fits in a u16.
MAX_BUFFERS = 4096
# What a peer can make a reader keep before anything is checked is this, or the largest start of a frame (1.02 MiB).
# Also where a copy costs as much as a receive of its own: smaller buffers arrive through the scratch, many in a call.
SCRATCH_BYTES = 2**17

_HELLO = struct.Struct("<8sHHI")
HELLO_BYTES = _HELLO.size  # 16, both ways
IN_FRAME = 2**32 - 1  # in place of an offset in shared memory: the buffer travels

_FRAME_MAGIC = b"EMBF"
_CHECKED = struct.Struct("<4sBBHIIIII")  # the prefix without its last field, the checksum
_PREFIX = struct.Struct("<4sBBHIIIIII")
PREFIX_BYTES = _PREFIX.size  # 32


class Feature(enum.IntFlag):
    """Features that the two sides of a connection agree on beside the version."""

    CHECKSUM = 1  # the buffers have a checksum too
    TLS = 2  # a TLS handshake follows the hello, and another hello inside it
    TOKEN = 4  # before its first frame the client sends a token, see security/tokens.py
    SHARED_MEMORY = 8  # with its hello the client has given memory in which buffers may lie


class Agreed(NamedTuple):
    """The version and the features that both sides of a connection speak."""

    version: int
    features: Feature


class Header(NamedTuple):
    """A frame without its buffers."""

    kind: int  # 0..255
    call: int  # a reply carries the number of its request
    timeout_ms: int  # how long the caller waits; 0 in replies
    head: bytes
    lengths: tuple[int, ...]  # bytes of each buffer
    offsets: tuple[int, ...] = ()  # of each buffer in shared memory, or IN_FRAME; (): all of them travel

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole frame, as if all buffers travelled."""
        return frame_bytes(len(self.head), self.lengths)

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the buffers that travel."""
        if not self.uses_memory:
            return sum(self.lengths)
        return sum([size for size, offset in zip(self.lengths, self.offsets, strict=True) if offset == IN_FRAME])

    @property
    def uses_memory(self) -> bool:
        """Whether a buffer lies in shared memory."""
        return self.offsets.count(IN_FRAME) < len(self.offsets)


class Frame(NamedTuple):
    """A frame that has arrived; `buffers` are what `place` returned for it, filled."""

    header: Header
    buffers: Sequence[memoryview]


def frame_bytes(head_bytes: int, lengths: Sequence[int]) -> int:
    """Bytes of a frame with a head and buffers of these sizes."""
    return PREFIX_BYTES + 4 * len(lengths) + head_bytes + sum(lengths)


def local_socket(ip: str, port: int) -> str:
    """The Unix socket, in Linux's abstract namespace, of the shard that listens on this TCP address.

    Found only from within the same network namespace; and a proxy on another port is never passed by.
    """
    return f"\0embershard/{ip}:{port}"


def client_hello(features: Feature) -> bytes:
    """The first HELLO_BYTES of a client: the versions that it speaks and the features that it wants."""
    return _HELLO.pack(MAGIC, OLDEST_VERSION, VERSION, features)


def server_hello(hello: bytes, supported: Feature) -> tuple[bytes, Agreed | None]:
    """The answer to a client's hello, and what was agreed on.

    None: there is no common version; the answer says which ones this side speaks, and the connection ends with it.
    BadFrame where `hello` (HELLO_BYTES) does not start with MAGIC.
    """
    lowest, highest, wanted = _read_hello(hello)
    version = min(highest, VERSION)
    if version < max(lowest, OLDEST_VERSION):
        return _HELLO.pack(MAGIC, OLDEST_VERSION, VERSION, 0), None
    agreed = Agreed(version, Feature(wanted & supported))
    return _HELLO.pack(MAGIC, version, version, agreed.features), agreed


def read_server_hello(answer: bytes) -> Agreed:
    """Read which version and features the server agreed on.

    WrongVersion without a common version; BadFrame where the answer (HELLO_BYTES) is not a shard's, or agrees on
    features that this side does not know.
    """
    lowest, highest, features = _read_hello(answer)
    if lowest != highest or not OLDEST_VERSION <= lowest <= VERSION:
        raise WrongVersion(lowest=lowest, highest=highest, own_lowest=OLDEST_VERSION, own_highest=VERSION)
    if features & ~sum(Feature):
        raise BadFrame(what="the features agreed on", got=f"{features:#x}", want=f"within {sum(Feature):#x}")
    return Agreed(lowest, Feature(features))


def wrong_version(other: int) -> WrongVersion:
    """The error of this side about another that speaks only version `other`."""
    return WrongVersion(lowest=other, highest=other, own_lowest=OLDEST_VERSION, own_highest=VERSION)


def _read_hello(data: bytes) -> tuple[int, int, int]:
    magic, lowest, highest, features = _HELLO.unpack(data)
    if magic != MAGIC:
        raise BadFrame(what="the start of the connection", got=repr(magic), want=repr(MAGIC))
    return lowest, highest, features


def encode(
    kind: int,
    call: int,
    timeout_ms: int,
    head: bytes,
    buffers: Sequence[ReadableBuffer] = (),
    *,
    checksum: bool,
    offsets: Sequence[int] | None = None,
) -> list[bytes | memoryview]:
    """The pieces of a frame in order: its start as bytes, then the memory of the buffers themselves, uncopied.

    Buffers are C-contiguous; empty ones need no piece. `offsets` are for a connection with shared memory: where each
    buffer lies there, or IN_FRAME. MessageTooLarge, InvalidRequest over the limits of a frame.
    """
    pieces: list[bytes | memoryview] = [b""]
    bulk_bytes = bulk_crc = 0
    tail = head  # what follows the prefix
    if buffers:
        lengths = []
        for number, buffer in enumerate(buffers):
            view = memoryview(buffer)
            lengths.append(view.nbytes)
            if view.nbytes and (offsets is None or offsets[number] == IN_FRAME):  # an empty view cannot be cast
                pieces.append(view.cast("B"))
        bulk_bytes = sum(map(len, pieces))
        if bulk_bytes >= 2**32:
            raise MessageTooLarge(got=bulk_bytes, limit=2**32 - 1)
        if len(lengths) > MAX_BUFFERS:
            raise InvalidRequest(reason=f"a message of {len(lengths)} arrays; send at most {MAX_BUFFERS} per call")
        if checksum:
            for piece in pieces:
                bulk_crc = crc32(piece, bulk_crc)
        entries = lengths if offsets is None else [*lengths, *offsets]
        tail = struct.pack(f"<{len(entries)}I", *entries) + head
    if len(head) > MAX_HEAD_BYTES:
        raise MessageTooLarge(got=len(head), limit=MAX_HEAD_BYTES)
    checked = _CHECKED.pack(
        _FRAME_MAGIC, VERSION, kind, len(buffers), call, timeout_ms, len(head), bulk_bytes, bulk_crc
    )
    pieces[0] = b"".join((checked, crc32(tail, crc32(checked)).to_bytes(4, "little"), tail))
    return pieces


class FrameReader:
    """Turns received bytes into frames, and has the bulk of large ones received straight into its place.

    `limit` bounds the bulk of a frame in bytes. `place(header)` is called for a frame with buffers once its start has
    been checked, and returns their memory: a writable C-contiguous memoryview of exactly `lengths[i]` bytes each (its
    pages untouched, so that memory is taken by bytes that came, not by bytes that were announced), or None to have the
    frame read and dropped, as the reply to a call that nobody waits for any more. On a connection with shared memory
    (`has_memory`) it returns that of buffers which lie there, too, and checks where they do.

    A BadFrame, or an error of `place`, ends the stream: where the next frame starts is unknown. Frames that came in the
    same call go with it.
    """

    __slots__ = (
        "_buffers",
        "_checksum",
        "_crc",
        "_filled",
        "_has_memory",
        "_header",
        "_left",
        "_limit",
        "_next",
        "_place",
        "_scratch",
        "_start",
        "_target",
        "_want_crc",
    )

    def __init__(
        self,
        limit: int,
        place: Callable[[Header], Sequence[memoryview] | None],
        *,
        checksum: bool,
        has_memory: bool = False,
    ) -> None:
        self._limit = limit
        self._place = place
        self._checksum = checksum
        self._has_memory = has_memory
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._scratch  # where bytes land: the scratch, or a larger one for one frame with a large head
        self._filled = 0  # bytes in _start: a part of the start of a frame
        self._header: Header | None = None  # of the frame whose bulk is arriving
        self._buffers: Sequence[memoryview] | None = None  # its places; None: it is dropped
        self._next = 0  # index of the buffer after _target
        self._target: memoryview | None = None  # what is left of the buffer that is arriving
        self._left = 0  # bytes of bulk still to come
        self._crc = self._want_crc = 0  # of the bulk

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun and not ended: a peer that falls silent now will never be understood."""
        return self._filled > 0 or self._header is not None

    def buffer(self) -> memoryview:
        """Return the memory for the next received bytes; it is never empty."""
        target = self._target
        if target is not None and len(target) >= SCRATCH_BYTES:
            return target
        return self._start[self._filled :]

    def received(self, n: int) -> list[Frame]:
        """The frames that the `n` bytes just put into `buffer()` complete. BadFrame where they are no frames."""
        frames: list[Frame] = []
        target = self._target
        if target is not None and len(target) >= SCRATCH_BYTES:
            if self._checksum:
                self._crc = crc32(target[:n], self._crc)
            self._left -= n
            self._advance(target, n)
            if not self._left:
                self._end_frame(frames)
            return frames
        view, pos, end = self._start, 0, self._filled + n
        while pos < end:
            if self._header is None:
                start_bytes = self._begin_frame(view[pos:end])
                if not start_bytes:
                    break
                pos += start_bytes
            else:
                pos += self._scatter(view[pos:end])
            if not self._left:
                self._end_frame(frames)
        self._keep(view, pos, end)
        return frames

    def _begin_frame(self, data: memoryview) -> int:
        """Check the start of a frame and find the places of its buffers; bytes of the start, 0 while incomplete."""
        if len(data) < PREFIX_BYTES:
            return 0
        prefix = _PREFIX.unpack_from(data)
        magic, version, kind, num_buffers, call, timeout_ms, head_bytes, bulk_bytes, bulk_crc, crc = prefix
        if magic != _FRAME_MAGIC:
            raise BadFrame(what="the magic of a frame", got=repr(magic), want=repr(_FRAME_MAGIC))
        if version != VERSION:
            raise BadFrame(what="the version of a frame", got=version, want=VERSION)
        if num_buffers > MAX_BUFFERS:
            raise BadFrame(what="the number of buffers", got=num_buffers, want=f"at most {MAX_BUFFERS}")
        if head_bytes > MAX_HEAD_BYTES:
            raise BadFrame(what="the size of the head", got=head_bytes, want=f"at most {MAX_HEAD_BYTES}")
        if bulk_bytes > self._limit:
            raise BadFrame(what="the size of the buffers", got=bulk_bytes, want=f"at most {self._limit}")
        head_at = PREFIX_BYTES + self._entries_bytes(num_buffers)
        start_bytes: int = head_at + head_bytes
        if len(data) < start_bytes:
            return 0
        found = crc32(data[PREFIX_BYTES:start_bytes], crc32(data[: PREFIX_BYTES - 4]))
        if found != crc:
            raise BadFrame(what="the checksum of a frame's start", got=f"{found:#010x}", want=f"{crc:#010x}")
        entries: tuple[int, ...] = struct.unpack_from(f"<{(head_at - PREFIX_BYTES) // 4}I", data, PREFIX_BYTES)
        head = bytes(data[head_at:start_bytes])
        header = self._header = Header(kind, call, timeout_ms, head, entries[:num_buffers], entries[num_buffers:])
        if header.bulk_bytes != bulk_bytes:
            raise BadFrame(what="the sum of the buffers' lengths", got=header.bulk_bytes, want=bulk_bytes)
        in_memory = sum(header.lengths) - bulk_bytes
        if in_memory > self._limit:
            raise BadFrame(what="the size of buffers in shared memory", got=in_memory, want=f"at most {self._limit}")
        if bulk_crc and not self._checksum:
            raise BadFrame(what="the checksum of buffers that have none", got=f"{bulk_crc:#010x}", want=0)
        self._left, self._want_crc = bulk_bytes, bulk_crc
        self._buffers = ()
        if num_buffers:
            self._buffers = self._place(header)
            if self._buffers is not None:
                assert [part.nbytes for part in self._buffers] == list(header.lengths), "place() gave other sizes"
                self._next_target()
        return start_bytes

    def _entries_bytes(self, num_buffers: int) -> int:
        """Bytes of the lengths of so many buffers, and of their offsets."""
        return (8 if self._has_memory else 4) * num_buffers

    def _next_target(self) -> None:
        """Go to the next buffer that travels and is not empty."""
        buffers, self._target = self._buffers, None
        assert buffers is not None
        assert self._header is not None
        offsets = self._header.offsets
        while self._next < len(buffers):
            number, buffer = self._next, buffers[self._next]
            self._next += 1
            if buffer.nbytes and (not offsets or offsets[number] == IN_FRAME):
                self._target = buffer.cast("B")
                return

    def _advance(self, target: memoryview, n: int) -> None:
        """Count `n` bytes that reached `target`."""
        if n < len(target):
            self._target = target[n:]
        else:
            self._next_target()

    def _scatter(self, data: memoryview) -> int:
        """Copy the bulk in `data` to its place; the bytes of it."""
        bulk = data[: self._left]
        self._left -= len(bulk)
        if self._checksum:
            self._crc = crc32(bulk, self._crc)
        pos = 0
        while self._target is not None and pos < len(bulk):
            target = self._target
            n = min(len(target), len(bulk) - pos)
            target[:n] = bulk[pos : pos + n]
            self._advance(target, n)
            pos += n
        return len(bulk)

    def _end_frame(self, frames: list[Frame]) -> None:
        """Hand the frame over, and keep nothing of it."""
        assert self._header is not None
        if self._crc != self._want_crc:
            raise BadFrame(what="the checksum of the buffers", got=f"{self._crc:#010x}", want=f"{self._want_crc:#010x}")
        if self._buffers is not None:
            frames.append(Frame(self._header, self._buffers))
        self._header = self._buffers = self._target = None
        self._next = self._crc = 0

    def _keep(self, view: memoryview, pos: int, end: int) -> None:
        """Keep the incomplete start of a frame, data[pos:end], with room for the rest of it."""
        self._filled = rest = end - pos
        if not rest:
            self._start = self._scratch
            return
        if pos:
            view[:rest] = view[pos:end]  # at most once per frame
        if rest == len(view):  # no room: the prefix is known, and its sizes are within the limits
            entries_bytes, head_bytes = self._entries_bytes(_PREFIX.unpack_from(view)[3]), _PREFIX.unpack_from(view)[6]
            self._start = memoryview(bytearray(PREFIX_BYTES + entries_bytes + head_bytes))
            self._start[:rest] = view
