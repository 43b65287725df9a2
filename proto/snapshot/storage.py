"""The place of snapshots: a folder, or whatever fsspec reaches by a URL.

What a local disk says is written is on the disk: files and the folders that name them are synced.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import has_magic
from pathlib import Path
from typing import BinaryIO, cast

from embershard.proto.errors import BadSnapshotName, EmbershardError, SnapshotNotWritten, SnapshotUnreadable
from embershard.proto.snapshot import folders

_NO_UTF_8 = re.compile("[\ud800-\udfff]")  # bytes of a name that is none, as Python has them


class Storage:
    """Files below one URL, by their paths in it.

    BadSnapshotName for a URL that makes no sense here, or whose fsspec package is not installed. What cannot be written
    is a SnapshotNotWritten, what cannot be read a SnapshotUnreadable, but for files that are not there:
    FileNotFoundError.
    """

    def __init__(self, url: str) -> None:
        if not url:  # a variable of a script that is not set: fsspec would take the current folder
            raise BadSnapshotName(name=url, what="a folder of snapshots", reason="it is empty; name a folder or a URL")
        if "::" in url:  # a chain reads through one storage from another, and cannot be written
            raise BadSnapshotName(name=url, what="a folder of snapshots", reason="name one storage, without '::'")
        # imported here: fsspec reads the metadata of every installed package, for which no start should wait
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # a storage's own package may fail in any way, and each does in its own
            scheme, is_url, _ = url.partition("://")
            if is_url and scheme not in fsspec.available_protocols():
                reason = f"there is no storage {scheme}://; name a folder, or a URL as s3://, gs:// or abfs://"
            else:
                reason = _reason(error)
            raise BadSnapshotName(name=url, what="a folder of snapshots", reason=reason) from None
        self._local = isinstance(self._files, LocalFileSystem)
        self.url = self._root if self._local else url.rstrip("/")
        if _NO_UTF_8.search(self.url):  # shards are told of it in UTF-8
            reason = "it is no UTF-8; name another folder, or rename it"
            raise BadSnapshotName(name=self.url, what="a folder of snapshots", reason=reason)

    def at(self, path: str) -> str:
        """A file as people name it."""
        return f"{self.url}/{path}" if path else self.url

    @property
    def is_missing(self) -> bool:
        """Whether it is a place of this machine where no folder is; object stores have no folders."""
        return self._local and not os.path.isdir(self.url)

    def make_folder(self, path: str) -> None:
        """A folder, and those above it."""
        with self._writing(path):
            if self._local:
                folders.make_folder(Path(self._full(path)))
            else:
                self._files.makedirs(self._full(path), exist_ok=True)
            self._sync_folder(posixpath.dirname(self._full(path)))

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """A new file to write; where the block, or the disk, ends with an error there is none."""
        with self._writing(path):
            try:
                with self._files.open(self._full(path), "wb") as file:
                    yield cast(BinaryIO, file)
                    if self._local:
                        file.flush()
                        os.fsync(file.fileno())
            except BaseException:
                with suppress(Exception):  # the error that counts is the one above
                    self._files.rm_file(self._full(path))
                raise
            self._sync_folder(posixpath.dirname(self._full(path)))

    def replace(self, path: str, data: bytes) -> None:
        """A file with this content, in place of the one before: a reader finds either of the two, whole."""
        if not self._local:
            with self._writing(path):
                self._files.pipe_file(self._full(path), data)
            return
        with self.create(f"{path}.new") as file:
            file.write(data)
        with self._writing(path):
            os.replace(self._full(f"{path}.new"), self._full(path))
            self._sync_folder(posixpath.dirname(self._full(path)))

    def read(self, path: str) -> bytes:
        """The whole of a file."""
        with self._reading(path):
            return cast(bytes, self._files.cat_file(self._full(path)))

    def sizes(self, path: str) -> dict[str, int | None]:
        """Name -> bytes of all files in a folder, None for the folders in it; empty where there is no such folder."""
        try:
            with self._reading(path):
                self._files.invalidate_cache()  # of listings that were made before others wrote
                entries = self._files.ls(self._full(path), detail=True)
        except FileNotFoundError:
            return {}
        return {
            posixpath.basename(entry["name"].rstrip("/")): None if entry["type"] == "directory" else int(entry["size"])
            for entry in entries
        }

    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it; it may be gone already."""
        full = self._full(path)
        with self._writing(path), suppress(FileNotFoundError):
            if self._local or not has_magic(full):
                self._files.rm(full, recursive=True)
                return
            # fsspec would take the name for a pattern, and remove what others have
            for one, about in sorted(self._files.find(full, withdirs=True, detail=True).items(), reverse=True):
                if about.get("type") == "directory":
                    self.remove_if_empty(one.removeprefix(self._root).strip("/"))
                else:
                    self._files.rm_file(one)
            self.remove_if_empty(path)

    def remove_if_empty(self, path: str) -> None:
        """A folder without anything in it."""
        with suppress(Exception):  # whatever a storage says to it, nothing depends on it
            self._files.rmdir(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _sync_folder(self, full: str) -> None:
        if self._local:
            folders.sync(full)

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except EmbershardError:
            raise
        except MemoryError as error:
            remedy = SnapshotNotWritten.of_memory
            raise SnapshotNotWritten(path=self.at(path), reason="no memory to write it", remedy=remedy) from error
        except Exception as error:
            raise SnapshotNotWritten(path=self.at(path), reason=_reason(error)) from error

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(self.at(path)) from None
        except Exception as error:
            raise SnapshotUnreadable(path=self.at(path), reason=_reason(error)) from error


def _reason(error: Exception) -> str:
    """What a storage's own package says, in a line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {text}".splitlines()[0]
