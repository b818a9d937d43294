"""Finds and reads the files of a data set, in a defined order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import fsspec
from fsspec import AbstractFileSystem

from isthmus.core.errors import DataError

_PROBE_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file: its fsspec name and its content, possibly truncated by the byte limit."""

    name: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of a data set in order, and the number of hidden or binary files skipped."""

    files: tuple[DataFile, ...]
    num_skipped: int


def read_files(paths: Sequence[str], max_bytes: int | None = None) -> DataFiles:
    """Read the files that `paths` name: files, folders (recursively) or globs, local or any fsspec URL.

    Files follow the order of `paths`, and within a path are sorted by name; duplicates are read once. In
    folders and globs, hidden files (a leading dot in any part of the path), binary files (a zero byte in the
    first 8 KiB) and non-files (pipes, links to folders, broken links) are skipped and counted. At most
    `max_bytes` are read: the file that crosses the limit is truncated after its last whole line, if it
    has one. Raises `DataError` if a path does not exist, matches nothing, cannot be read, or has only
    hidden, binary or empty files.
    """
    files: dict[str, DataFile] = {}
    left_bytes, num_skipped = max_bytes, 0
    for path in paths:
        num_read = 0
        for filesystem, name, visible in _list_files(path):
            if name in files:
                num_read += 1
                continue
            if left_bytes is not None and left_bytes <= 0:
                return DataFiles(files=tuple(files.values()), num_skipped=num_skipped)
            content = _read(filesystem, name, left_bytes) if visible else None
            if content is None:
                num_skipped += 1
                continue
            files[name] = DataFile(name=name, content=content)
            num_read += bool(content)
            left_bytes = None if left_bytes is None else left_bytes - len(content)
        if num_read == 0:
            raise DataError(
                f"{path} contains no text ({num_skipped} hidden or binary files skipped)",
                hint="give the file names, or unpack archives first",
            )
    return DataFiles(files=tuple(files.values()), num_skipped=num_skipped)


def _list_files(path: str) -> Iterator[tuple[AbstractFileSystem, str, bool]]:
    """Yield (file system, name, whether to read it) for each file of `path`, sorted by name."""
    try:
        filesystem, root = fsspec.url_to_fs(path)
        others: set[str] = set()
        is_glob = any(sign in root for sign in "*?[") and not filesystem.exists(root)
        if is_glob:
            names = [name for name in filesystem.glob(root) if filesystem.isfile(name)]
        elif filesystem.isfile(root):
            yield filesystem, root, True
            return
        else:
            found = filesystem.find(root, detail=True)
            names = list(found)
            others = {name for name in names if found[name]["type"] != "file" and not filesystem.isfile(name)}
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"cannot open data path {path}: {error}") from error
    if not names:
        raise DataError(
            f"no data at {path}" if not is_glob else f"no file matches {path}",
            hint="check the path on the workers' machines; folders are read recursively",
        )
    base = len(root[: _first_wildcard(root)].rpartition("/")[0]) if is_glob else len(root)
    for name in sorted(names):
        hidden = any(part.startswith(".") for part in name[base:].split("/"))
        yield filesystem, name, not hidden and name not in others


def _first_wildcard(pattern: str) -> int:
    return min(pattern.index(sign) for sign in "*?[" if sign in pattern)


def _read(filesystem: AbstractFileSystem, name: str, limit_bytes: int | None) -> bytes | None:
    """Return the first `limit_bytes` of a file, up to its last whole line; None if it is binary."""
    try:
        with filesystem.open(name, "rb") as file:
            content: bytes = file.read(_PROBE_BYTES)
            if b"\0" in content:
                return None
            content += file.read() if limit_bytes is None else file.read(max(0, limit_bytes + 1 - len(content)))
    except OSError as error:
        raise DataError(f"cannot read {name}: {error}") from error
    if limit_bytes is None or len(content) <= limit_bytes:
        return content
    cut = content.rfind(b"\n", 0, limit_bytes) + 1
    return content[: cut or limit_bytes]
