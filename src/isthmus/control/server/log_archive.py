"""`archive_events`: a copy of the events that compaction drops, compressed JSON lines with the hashes of the chain."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.control.server.stored_log import StoredLog, store_identity, stored_events
from isthmus.control.store.log_chain import LogDamagedError, LogEnd, chain_start, follow_link
from isthmus.core.errors import FileError
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error

MAX_LINE_BYTES = 64 << 20
"""Longest line that is read."""


_NAME = re.compile(r"events-(\d{12})-\d{12}\.jsonl\.gz")


def archive_events(log: StoredLog, end: LogEnd, folder: Path, max_bytes: int | None = None) -> Path:
    """Write the events of `log` up to `end` to a file in `folder`, verify it, and return its path.

    The file is complete and on disk when it has its name, `events-FIRST-LAST.jsonl.gz`. Then the oldest such files are
    removed until those left have `max_bytes` at most (None: all stay); the new one stays in any case. Raises
    `UnavailableError` if it cannot be written, `LogDamagedError` if the events are not those of the chain.
    """
    begin = _begin(log)
    file = folder / f"events-{begin.number + 1:012}-{end.number:012}.jsonl.gz"
    draft = folder / f".{file.name}.{os.getpid()}.tmp"
    head = {"store": store_identity(log), "after": begin.number, "hash": begin.digest.hex()}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as out:
            out.write(json.dumps(head).encode() + b"\n")
            for number, body, digest in stored_events(log, begin.number):
                if number > end.number:
                    break
                row = {"number": number, "hash": bytes(digest).hex(), "body": body}
                out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        found = check_archive(draft)
        if found != end:
            raise LogDamagedError(found.number + 1, "the archive of the events up to it is not complete")
        fsync_path(draft)
        draft.replace(file)
        fsync_path(folder)
        if max_bytes is not None:
            _remove_oldest(folder, file, max_bytes)
    except OSError as error:
        raise unwritable_folder_error(folder, error) from error
    finally:
        draft.unlink(missing_ok=True)
    return file


def _remove_oldest(folder: Path, newest: Path, max_bytes: int) -> None:
    """Remove archives of the folder, those of the first events first; other files there stay."""
    files = sorted(one for one in folder.iterdir() if _NAME.fullmatch(one.name) and one != newest)
    total = newest.stat().st_size + sum(one.stat().st_size for one in files)
    for one in files:
        if total <= max_bytes:
            return
        total -= one.stat().st_size
        one.unlink()


def check_archive(file: Path) -> LogEnd:
    """Return the last event of an archive whose chain is complete; raise `FileError` or `LogDamagedError`."""
    lines = _lines(file)
    head = next(lines, {})
    try:
        end = LogEnd(int(head["after"]), bytes.fromhex(head["hash"]))
        if end.number == 0 and end != chain_start(str(head["store"])):
            raise LogDamagedError(1, "the archive does not begin like the log of its store")
        for row in lines:
            end = follow_link(end, int(row["number"]), str(row["body"]), bytes.fromhex(row["hash"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _no_archive(file, error) from error
    return end


def _begin(log: StoredLog) -> LogEnd:
    """Return the last event that the active base replaces, or the start of the chain."""
    sql = "SELECT number, hash FROM bases WHERE active = 1 ORDER BY number DESC LIMIT 1"
    rows = log.rows(sql)
    return LogEnd(rows[0][0], bytes(rows[0][1])) if rows else chain_start(store_identity(log) or "")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(file, "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                yield json.loads(line)
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise _no_archive(file, error) from error


def _no_archive(file: Path, error: Exception) -> FileError:
    return FileError(f"is no archive of events: {str(error)[:200]}", file=str(file), hint="use another copy of it")
