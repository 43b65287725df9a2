"""The memory that workers of this machine share with a shard: how much of it is mapped, and what messages say of it.

What lies there may change at any time. So nothing but gradients is read from it, whose values are all allowed, and they
are copied, as they are applied, where they are needed after their reply; and nothing but rows is written there.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast
from weakref import WeakValueDictionary

import numpy as np

from embershard.proto.arrays import Floats
from embershard.proto.errors import BadFrame, InvalidRequest
from embershard.proto.messages import Pull, Push, Request, Rows, TableGradients
from embershard.proto.protobuf import read
from embershard.proto.shared_memory import HEAP_BYTES, SharedMemory
from embershard.proto.wire import IN_FRAME, Header
from embershard.ps.monitoring.counters import TransportCounters

ALL_SHARED_BYTES = 64 * HEAP_BYTES  # of address space
# Pages are charged to who touches them first: to a client of ours, so that they do not count in the shard's budget. A
# peer that touches none has the shard pay for those that it reads or writes: for this part of its budget at most.
_BUDGET_SHARE = 0.5

_FLOAT_BYTES = 4
_FILE = struct.Struct("i")  # a descriptor, as sockets bring it

_log = logging.getLogger(__name__)


class _CountedMemory(SharedMemory):
    """Counted as long as it is mapped."""

    def __init__(self, file: int, nbytes: int, counters: TransportCounters) -> None:
        self._counters, self.nbytes = counters, nbytes
        counters.shared_bytes += nbytes
        super().__init__(file, nbytes)

    def __del__(self) -> None:
        self._counters.shared_bytes -= self.nbytes


class SharedMemories:
    """Maps the memory that workers give to a shard, 8 GiB or half of its `budget_bytes` at most, and counts it.

    A worker gives the same memory over each of its connections; it is mapped once, until the last of them has ended.
    """

    def __init__(self, counters: TransportCounters, budget_bytes: int) -> None:
        self._counters = counters
        self._limit = min(ALL_SHARED_BYTES, int(_BUDGET_SHARE * budget_bytes))
        self._mapped = WeakValueDictionary[tuple[int, int], _CountedMemory]()  # by device and inode
        self._has_told = False

    def map(self, file: int) -> SharedMemory | None:
        """Map what a peer has given, and close its descriptor; None where it is not to be had, or not safe to use.

        It is a memfd of ordinary pages that cannot shrink: an access behind its end would end this process.
        """
        try:
            found, seals = os.fstat(file), fcntl.fcntl(file, fcntl.F_GET_SEALS)
            memory = self._mapped.get((found.st_dev, found.st_ino))
            if memory is None and self._is_safe(file, found.st_size, seals) and self._has_room(found.st_size):
                memory = _CountedMemory(file, found.st_size, self._counters)
                self._mapped[found.st_dev, found.st_ino] = memory
            return memory
        except (OSError, ValueError):  # no memfd, or one that may not be written
            return None
        finally:
            os.close(file)

    @staticmethod
    def _is_safe(file: int, nbytes: int, seals: int) -> bool:
        has_ordinary_pages = os.fstatvfs(file).f_bsize <= mmap.PAGESIZE  # a hole in huge ones may not be filled again
        return bool(seals & fcntl.F_SEAL_SHRINK) and 0 < nbytes <= HEAP_BYTES and has_ordinary_pages

    def _has_room(self, nbytes: int) -> bool:
        has_room = self._counters.shared_bytes + nbytes <= self._limit
        if not has_room and not self._has_told:
            self._has_told = True
            _log.warning(
                "a worker would share %d MiB of memory, and %d MiB are left of %d (half of --memory, 8 GiB at most): "
                "its rows travel by a socket, which is slower, as those of all such workers; give the shard more "
                "--memory",
                nbytes >> 20, (self._limit - self._counters.shared_bytes) >> 20, self._limit >> 20,
            )  # fmt: skip
        return has_room


def received_file(transport_socket: socket.socket) -> int | None:
    """The descriptor that came with the first bytes of a Unix socket, which are still to be read; None without one.

    Of asyncio's sockets only the number is used: uvloop's cannot receive.
    """
    try:
        with socket.socket(fileno=os.dup(transport_socket.fileno())) as sock:
            # not recv_fds, which forgets the flags; with room for one descriptor, the system closes others
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_LEN(_FILE.size), flags)
    except OSError:  # nothing came, or it has left; or there is no descriptor for it
        return None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) == _FILE.size:
            (file,) = _FILE.unpack(data)
            return int(file)
    return None


def place_in(memory: SharedMemory | None, offset: int, nbytes: int) -> memoryview:
    """The memory of a buffer that lies in shared memory. BadFrame where it is not within, or no whole float32."""
    if memory is not None and nbytes and offset % _FLOAT_BYTES == 0 and nbytes % _FLOAT_BYTES == 0:
        with suppress(ValueError):
            return memory.view(offset, nbytes)
    size = 0 if memory is None else memory.nbytes
    raise BadFrame(what="a place in shared memory", got=f"{nbytes} bytes at {offset}", want=f"float32 within {size}")


class SharedBuffers:
    """The arrays of a request of which some lie in shared memory, and of its reply.

    Those may be the gradients of a push. Behind the ids of a pull comes memory for the rows of each table, which is
    shared or empty.
    """

    def __init__(self, kind: type[Request], header: Header, buffers: Sequence[memoryview]) -> None:
        self._kind, self._header, self._buffers = kind, header, buffers
        self._num_ids = len(buffers) // 2 if kind is Pull else 0
        self.read_bytes = sum(header.lengths) - header.bulk_bytes if kind is Push else 0  # of shared memory
        self.written_bytes = 0
        self._into = [
            None if offset == IN_FRAME else np.frombuffer(buffer, np.float32)
            for buffer, offset in zip(buffers[self._num_ids :], header.offsets[self._num_ids :], strict=True)
            if kind is Pull
        ]

    def read(self, *, copies: bool) -> Request:
        """As protobuf.read. `copies`: gradients come with memory for a copy.

        InvalidRequest where anything but gradients and memory for rows lies there.
        """
        if self._kind is Pull:
            return self._read_pull()
        if self._kind is Push:
            return self._read_push(copies)
        raise InvalidRequest(reason=f"arrays of a {self._kind.__name__} in shared memory; they travel")

    def _read_pull(self) -> Pull:
        num_ids, offsets = self._num_ids, self._header.offsets
        if len(offsets) != 2 * num_ids or any([offset != IN_FRAME for offset in offsets[:num_ids]]):
            raise InvalidRequest(reason="a pull whose ids do not travel, or with memory for more or fewer tables")
        pull = read(Pull, self._header.head, self._buffers[:num_ids])
        parts = [
            part if into is None else replace(part, into=into)
            for part, into in zip(pull.tables, self._into, strict=True)
        ]
        return replace(pull, tables=tuple(parts))

    def _read_push(self, copies: bool) -> Push:
        offsets = self._header.offsets
        travelling = [
            buffer if offset == IN_FRAME else buffer[:0] for buffer, offset in zip(self._buffers, offsets, strict=True)
        ]
        push, tables, number = read(Push, self._header.head, travelling), list[TableGradients](), 0
        for part in push.tables:
            if not part.route:
                if offsets[number] != IN_FRAME:
                    raise InvalidRequest(reason="ids of a push in shared memory; they travel")
                number += 1
            if offsets[number] != IN_FRAME:
                if part.codec:
                    raise InvalidRequest(reason=f"a payload of {part.codec!r} in shared memory; it travels")
                # read-only: so a table knows that another process may change them
                gradients = np.frombuffer(self._buffers[number].toreadonly(), np.float32)
                part = replace(part, gradients=gradients, copy=np.empty_like(gradients) if copies else None)
            tables.append(part)
            number += 1
        return replace(push, tables=tuple(tables))

    def offsets(self, reply: Rows) -> list[int]:
        """Where the rows of the reply lie: in the memory that was given for them, or IN_FRAME."""
        places = [
            IN_FRAME if into is None or cast(Floats, rows).base is not into else offset
            for rows, into, offset in zip(reply.tables, self._into, self._header.offsets[self._num_ids :], strict=True)
        ]
        self.written_bytes = sum(
            [rows.nbytes for rows, place in zip(reply.tables, places, strict=True) if place != IN_FRAME]
        )
        return places
