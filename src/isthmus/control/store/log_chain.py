"""The hash chain of the event log: each event carries SHA-256 over the previous hash, its number and its bytes.

The first hash follows from the store's identity, so that no row of another store fits. A changed, missing or foreign
row breaks the chain at its place, and the last hash stands for the whole log (Haber and Stornetta 1991).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from isthmus.core.errors import ConflictError, UnavailableError

STORE_ID_BYTES = 16


class LogEnd(NamedTuple):
    """The number and the hash of an event: the end of the log up to it. Number 0: before the first event."""

    number: int
    digest: bytes


class LogDamagedError(UnavailableError):
    """The log is not what was written: an event is changed, missing or lost."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(
            f"the event log is damaged at event {number}: {problem}",
            hint="stop the servers, keep their state folders, run `isthmus server check`, and see docs/guide/backup.md",
        )
        self.number, self.problem = number, problem


class OtherStoreError(ConflictError):
    """The database is not the one that the state folder belongs to."""

    def __init__(self, expected: str, found: str | None) -> None:
        what = f"belongs to store {found}" if found else "holds no store: it is empty or was emptied"
        super().__init__(
            f"this state folder belongs to store {expected}, but the database {what}",
            hint="name the right database or another state folder; see docs/guide/backup.md",
        )


def new_store_id() -> str:
    """Return a random identity for a new store, 128 bits in hexadecimal."""
    return secrets.token_hex(STORE_ID_BYTES)


def chain_start(store_id: str) -> LogEnd:
    """Return the end of the empty log of a store."""
    return LogEnd(0, hashlib.sha256(f"isthmus log of store {store_id}".encode()).digest())


def next_link(end: LogEnd, body: str) -> LogEnd:
    """Return the end of the log after one more event with this encoded form."""
    number = end.number + 1
    return LogEnd(number, hashlib.sha256(end.digest + number.to_bytes(8, "big") + body.encode()).digest())


def link_rows(end: LogEnd, bodies: Iterable[str]) -> list[tuple[int, str, bytes]]:
    """Return the rows (number, body, hash) that append these events behind `end`."""
    rows = []
    for body in bodies:
        end = next_link(end, body)
        rows.append((end.number, body, end.digest))
    return rows


def follow_link(end: LogEnd, number: int, body: str, digest: bytes | None) -> LogEnd:
    """Return the end of the log after a row that was read; raise `LogDamagedError` if it does not follow `end`."""
    if number != end.number + 1:
        raise LogDamagedError(end.number + 1, f"it is missing, the next one is {number}")
    found = next_link(end, body)
    if digest is None or found.digest != digest:
        raise LogDamagedError(number, "its hash does not fit its content and the event before")
    return found


def require_end(known: LogEnd, end: LogEnd, digest_of_known: bytes | None) -> None:
    """Raise `LogDamagedError` unless a log that ends with `end` contains the acknowledged event `known`.

    `digest_of_known` is the hash that the log has at the number of `known`, None if it has no such event.
    """
    if end.number < known.number:
        problem = f"the log ends with event {end.number}, but event {known.number} was acknowledged"
        raise LogDamagedError(end.number + 1, problem)
    if known.number and digest_of_known != known.digest:
        raise LogDamagedError(known.number, "it is another one than was acknowledged")


ReadRows = Callable[[int], Sequence[tuple[int, str]]]
"""Returns the next (number, body) rows of a log after a number."""


def chain_rows(end: LogEnd, read: ReadRows, write: Callable[[list[tuple[bytes, int]]], object]) -> None:
    """Add the hashes to a log that an earlier version wrote; `write` takes (hash, number) rows."""
    while page := read(end.number):
        hashed = []
        for number, body in page:
            if number != end.number + 1:
                raise LogDamagedError(end.number + 1, f"it is missing, the next one is {number}")
            end = next_link(end, body)
            hashed.append((end.digest, number))
        write(hashed)
