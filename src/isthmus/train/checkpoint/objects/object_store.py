"""`ObjectStore`: objects below one URL of any fsspec file system, with bounded requests and one kind of error.

Credentials come from where the library of the store looks for them (environment, files, the machine's identity), never
from a job. An object store is not trusted: what it returns has the size that was asked for, or is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem, sync

from isthmus.core.errors import UnavailableError

MAX_READ_BYTES = 8 << 20
"""Most bytes of one request."""

_BLOCK_BYTES = 8 << 20
"""Bytes of one part of an upload."""

_REQUEST_S = 60.0
"""Longest request of this module: at most `MAX_READ_BYTES`, or a list of names."""

_MAX_REASON_CHARS = 200


class ObjectStore:
    """Objects below `root` of a file system; names have no empty, `.` or `..` part."""

    def __init__(self, filesystem: AbstractFileSystem, root: str) -> None:
        self._filesystem, self._root = filesystem, root.rstrip("/")

    @classmethod
    def at(cls, url: str) -> ObjectStore:
        """Return the object store of a URL; raise `UnavailableError` if its library is missing or refuses it."""
        with _one_error(f"cannot use {url}"):
            options = {"auto_mkdir": True} if url.startswith("file://") else {"use_listings_cache": False}
            filesystem, root = fsspec.url_to_fs(url, **options)
            return cls(filesystem, root)

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Store an object; raises `UnavailableError`. An object that could not be stored whole may be left in part."""
        with _one_error(f"cannot store {name}"):
            stream = self._filesystem.open(self._path(name), "wb", block_size=_BLOCK_BYTES)
            try:
                for chunk in chunks:
                    stream.write(chunk)
            except BaseException:
                with suppress(Exception):
                    stream.discard()
                raise
            stream.close()

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if there is none; raises `UnavailableError`."""
        with _one_error(f"cannot look for {name}"):
            try:
                found = self._call("info", self._path(name))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end - 1` of an object, at most `MAX_READ_BYTES`; raises `UnavailableError`."""
        with _one_error(f"cannot read {name}"):
            data: bytes = self._call("cat_file", self._path(name), start=start, end=end)
        if len(data) != end - start:
            raise UnavailableError(f"cannot read {name}: {len(data)} bytes instead of {end - start}", hint=_HINT)
        return data

    def names(self, folder: str) -> list[str]:
        """Return the last parts of the names directly below `folder`; raises `UnavailableError`."""
        with _one_error(f"cannot list {folder}"):
            try:
                found = self._call("ls", self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return [str(one).rstrip("/").rpartition("/")[2] for one in found]

    def remove(self, folder: str) -> None:
        """Remove all objects below `folder`, as far as that is possible."""
        with suppress(UnavailableError), _one_error(f"cannot remove {folder}"), suppress(FileNotFoundError):
            self._filesystem.rm(self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"'{name}' is no name of an object")
        return f"{self._root}/{name}"

    def _call(self, method: str, path: str, **options: Any) -> Any:
        """Call a method of the file system; one with an event loop is cut off after `_REQUEST_S`."""
        if isinstance(self._filesystem, AsyncFileSystem):
            coroutine: Callable[..., Any] = getattr(self._filesystem, f"_{method}")
            return sync(self._filesystem.loop, coroutine, path, timeout=_REQUEST_S, **options)
        return getattr(self._filesystem, method)(path, **options)


_HINT = "check the object store, its address and the credentials that the site's agent passes on"


@contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Turn every error of a file system into `UnavailableError`; each library has a tree of its own."""
    try:
        yield
    except UnavailableError:
        raise
    except Exception as error:
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        if isinstance(error, ImportError):
            reason = str(error)
        raise UnavailableError(f"{what}: {reason[:_MAX_REASON_CHARS]}", hint=_HINT) from error
