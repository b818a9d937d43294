"""`LogBase`: the state after an event of the log, in place of all events up to it.

A base is stored in two steps. A *staged* one is a copy of the state that changes nothing. It becomes *active* once the
log has recorded it in a `LogCompacted` event, whose hash the chain carries on: replays then begin with it, and the
events up to it may be deleted. So a forged base lacks its event, and each step can be interrupted and repeated.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.control.state.events import Event, LogCompacted
from isthmus.control.store.log_chain import LogEnd
from isthmus.core.errors import ConflictError


class LogCompactedError(ConflictError):
    """Events that a reader has not read were dropped by compaction: it begins again with the base."""

    def __init__(self, after: int, base: int) -> None:
        super().__init__(
            f"the events after {after} cannot be read: those up to {base} were dropped by compaction",
            hint="read the log from its base",
        )


class BaseMark(NamedTuple):
    """A stored base without its state."""

    end: LogEnd
    made_s: float
    is_active: bool


@dataclass(frozen=True, kw_only=True)
class LogBase:
    """The state after event `end.number`, as compressed JSON, and when it was made (seconds since the epoch)."""

    end: LogEnd
    made_s: float
    body: bytes

    @classmethod
    def of(cls, state: bytes, end: LogEnd, now_s: float) -> LogBase:
        """Return the base with the state after the events up to `end`, as `serialize_state` returns it."""
        return cls(end=end, made_s=now_s, body=zlib.compress(state, 1))

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the body in hexadecimal."""
        return hashlib.sha256(self.body).hexdigest()

    def event(self, now_s: float) -> LogCompacted:
        """Return the event that records this base in the log."""
        return LogCompacted(now_s=now_s, number=self.end.number, digest=self.end.digest.hex(), state=self.sha256)

    def is_recorded_by(self, event: Event) -> bool:
        """Return whether an event of the log records exactly this base."""
        return isinstance(event, LogCompacted) and event == self.event(event.now_s)
