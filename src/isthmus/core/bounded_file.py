"""`read_within`: the content of a file, if it is not larger than a file of its kind may be."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.errors import FileError

MAX_FILE_BYTES = 16 * 2**20
"""Largest file that a person writes or a model names: a job, a pool, a configuration."""


def read_within(file: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a file; raise `FileError` if it has more than `max_bytes`, and `OSError`.

    At most one byte more than that is read, so a device or a file that grows costs no more.
    """
    with file.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        size = f"{max_bytes // 2**20} MiB" if max_bytes >= 2**20 else f"{max_bytes:,} bytes"
        raise FileError(f"is larger than {size}", file=str(file), hint="check the path; files of this kind are small")
    return content
