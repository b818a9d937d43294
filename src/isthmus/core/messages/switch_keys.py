"""The keys by which switches accept packets of jobs, derived from one secret that a server and its switches share.

The operator writes the secret to a file for the server (`isthmus serve --switch-key-file`) and for each switch
(`isthmus switch --pool-key-file`). Workers get the key of their own job alone, with those of their links.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
"""Size of a secret."""

_JOB_KEY_BYTES = 32
_MAX_FILE_BYTES = 1024


def job_number(name: str) -> int:
    """Return the number of 64 bits by which packets name the job `name`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def job_switch_key(secret: bytes, job: int) -> bytes:
    """Return the key of the job with number `job`: keyed BLAKE2b (RFC 7693) of the number, 32 bytes."""
    text = job.to_bytes(8, "little")
    return hashlib.blake2b(text, digest_size=_JOB_KEY_BYTES, key=secret, person=b"isthmus switch").digest()


def read_switch_secret(file: Path) -> bytes:
    """Return the secret in `file`, one line in hexadecimal; raise `FileError` if others may read it. No error shows it.

    Raises `FileError` too if the file cannot be read or has something else.
    """
    try:
        mode, text = file.stat().st_mode, read_within(file, _MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise FileError(f"cannot be read: {reason}", file=str(file)) from error
    if mode & 0o077:
        raise FileError("other accounts may read or write the secret", file=str(file), hint=f"chmod 600 {file}")
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
        raise FileError(
            f"is not one line of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes in hexadecimal",
            file=str(file),
            hint=f"create it: (umask 077; openssl rand -hex 32 > {file})",
        )
    return secret
