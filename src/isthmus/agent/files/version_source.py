"""`VersionSource`: the bytes of a version's files, from the URL that its entry names and within the owner's policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from isthmus.agent.files.http_source import HttpReader
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import open_regular
from isthmus.core.owner.owner_policy import FetchPolicy

_BLOCK_BYTES = 1 << 20
_FILE = "file://"


@dataclass(frozen=True, kw_only=True)
class VersionSource:
    """Reads files at URLs for the owners of entries: what their own jobs may read here, and what anyone may read."""

    policy: FetchPolicy
    storage: SiteStorage
    http: HttpReader

    def read(self, source: str, path: str, owner: str, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of the file `path` at the URL `source` with their places, from `offset` on if it can.

        Raises `InputError` if the site may not or cannot read it, `UnavailableError` if it cannot be read now.
        """
        scheme = source.partition("://")[0]
        if scheme in ("http", "https"):
            yield from self.http.read(f"{source}/{quote(path)}", offset)
        elif scheme == "file":
            yield from self._read_file(source, path, owner, offset)
        else:
            yield from self._read_remote(source, path, owner, offset)

    def _read_file(self, source: str, path: str, owner: str, offset: int) -> Iterator[tuple[int, bytes]]:
        """Read a file of this site that a job of `owner` could read: links are followed and checked."""
        if self.storage.allowed(owner) is None:
            self._require_scheme("file", source)
        place = self.storage.resolve("source", f"{source.removeprefix(_FILE).rstrip('/')}/{path}", "read", owner)
        try:
            with open_regular(Path(place)) as stream:
                yield from _read_from(stream, offset)
        except FileNotFoundError as error:
            raise InputError(f"{place} is not there, or no regular file", hint="check the source") from error
        except OSError as error:
            raise UnavailableError(f"{place}: {error.strerror or error}") from error

    def _read_remote(self, source: str, path: str, owner: str, offset: int) -> Iterator[tuple[int, bytes]]:
        """Read a file by fsspec, with the credentials of this site: only where the roots of `owner` admit it."""
        scheme, allowed = source.partition("://")[0], self.storage.allowed(owner)
        self._require_scheme(scheme, source)
        if allowed is not None and (problem := allowed.problem(f"{source}/{path}", "read")):
            raise allowed.error("source", source, problem)
        try:
            import fsspec
        except ImportError:
            raise InputError(f"{source}: fsspec is not installed at this site", hint="pip install fsspec") from None
        try:
            system, root = fsspec.core.url_to_fs(source)
            stream: Any = system.open(f"{str(root).rstrip('/')}/{path}", "rb")
            with stream:
                yield from _read_from(stream, offset)
        except FileNotFoundError as error:
            raise InputError(f"{source}/{path} is not there", hint="check the source") from error
        except (ImportError, ValueError, PermissionError) as error:
            raise InputError(f"{source}: {error}", hint=f"the site's owner installs and sets up '{scheme}'") from error
        except OSError as error:
            raise UnavailableError(f"{source}/{path}: {error}") from error

    def _require_scheme(self, scheme: str, source: str) -> None:
        if scheme not in self.policy.schemes:
            raise InputError(
                f"{source}: the site reads URLs of {', '.join(self.policy.schemes)}",
                hint="the site's owner sets fetch.schemes of the policy",
            )


def _read_from(stream: Any, offset: int) -> Iterator[tuple[int, bytes]]:
    stream.seek(offset)
    while block := stream.read(_BLOCK_BYTES):
        yield offset, block
        offset += len(block)
