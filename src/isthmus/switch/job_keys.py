"""`read_job_keys`, `DerivedJobKeys`: the keys of the jobs that may use a switch, from files of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from isthmus.core.errors import FileError
from isthmus.core.messages.switch_keys import MAX_KEY_BYTES, MIN_KEY_BYTES, job_number, job_switch_key

_MAX_FILE_BYTES = 2**20
_REMEMBERED = 4096


class DerivedJobKeys(Mapping[int, bytes]):
    """The keys of all jobs of a pool, each derived from the pool's `secret`, after the `named` ones.

    It remembers the keys of the last jobs only: packets without a tag can name any number of jobs.
    """

    def __init__(self, secret: bytes, named: Mapping[int, bytes]) -> None:
        self._named = dict(named)
        self._derive = lru_cache(maxsize=_REMEMBERED)(lambda job: job_switch_key(secret, job))

    def __getitem__(self, job: int) -> bytes:
        """Return the key of the job with number `job`."""
        return self._named.get(job) or self._derive(job)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the jobs that are named."""
        return iter(self._named)

    def __len__(self) -> int:
        """Return how many jobs are named."""
        return len(self._named)


def read_job_keys(file: Path) -> dict[int, bytes]:
    """Return the keys of `file` by `job_number`: one `JOB HEXADECIMAL-KEY` a line; `#` begins a comment.

    Raises `FileError` with the line of an error, or if other accounts may read the file. No error shows a key.
    """
    try:
        with file.open("rb") as opened:
            mode, text = file.stat().st_mode, opened.read(_MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise FileError(f"cannot be read: {reason}", file=str(file)) from error
    if mode & 0o077:
        raise FileError("other accounts may read or write the keys", file=str(file), hint=f"chmod 600 {file}")
    if len(text) > _MAX_FILE_BYTES:
        raise FileError("is larger than 1 MiB", file=str(file))
    keys: dict[int, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        key = _key(words[1]) if len(words) == 2 else None
        if key is None:
            raise FileError(
                f"is not a job's name and a key of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes in hexadecimal",
                file=str(file), line=number, hint="create a key: openssl rand -hex 32",
            )  # fmt: skip
        job = job_number(words[0])
        if job in keys:
            raise FileError(f"a second key of job {words[0]}", file=str(file), line=number)
        keys[job] = key
    if not keys:
        raise FileError("has no key", file=str(file), hint="one line for each job: JOB KEY")
    return keys


def _key(text: str) -> bytes | None:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return key if MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES else None
