"""A Unix socket for a server of this process that no other process finds."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from embershard.proto.errors import CannotListen

_LONGEST_FOLDER = 80  # bytes: a socket's whole path has at most 107


class HiddenSocket:
    """A place for a server that takes nothing but a path, as gRPC's: bind to `target`, then `hide`.

    Once hidden it is without a name. This process connects by a descriptor of it; another would need the right to look
    into this process, which its own user and root have. No check of peers would do: gRPC speaks first.
    """

    def __init__(self) -> None:
        self._folder = _private_folder()
        self._descriptor = -1
        self.target = f"unix:{self._folder}/grpc"
        self.path = f"{self._folder}/grpc"

    def hide(self) -> None:
        """Take the name away; the server has bound it."""
        if sys.platform == "linux":  # elsewhere a folder that only this user may enter has to do
            self._descriptor = os.open(self.path, os.O_PATH)
            shutil.rmtree(self._folder, ignore_errors=True)
            self.path = f"/proc/self/fd/{self._descriptor}"

    def close(self) -> None:
        """Forget the socket, or remove it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder of mode 0700; CannotListen where no place may be written."""
    reason = "no folder for temporary files may be written"
    for folder in ("/dev/shm", "/tmp", None):  # the last one is the system's, or of TMPDIR
        try:
            made = tempfile.mkdtemp(prefix="embershard-", dir=folder)
        except OSError as error:
            reason = f"{error.filename or folder}: {error.strerror}"
            continue
        if len(os.fsencode(made)) <= _LONGEST_FOLDER:
            return Path(made)
        os.rmdir(made)
        reason = f"{made} is too long for the path of a socket"
    raise CannotListen(address="the socket of gRPC", reason=f"{reason}; set TMPDIR to a short one that may be written")
