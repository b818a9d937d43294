"""`CompactionPolicy`: when the event log of a server is compacted, by age and size; it bounds both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CompactionPolicy:
    """How much of the log is kept: the events of the last `keep_s` seconds, unless they exceed `keep_bytes`.

    The log then has at most twice as much, since a base is staged when it may be needed and used that much later.
    """

    keep_s: float = 30 * 86400.0
    keep_bytes: int = 512 << 20

    def next_step(
        self, *, age_s: float, num_bytes: float, staged_age_s: float | None, staged_bytes: float
    ) -> Literal["stage", "compact"] | None:
        """Return what to do with a log whose base is `age_s` old and followed by `num_bytes` of events.

        `staged_age_s` is the age of the staged base (None without one), followed by `staged_bytes`.
        """
        if staged_age_s is None:
            return "stage" if num_bytes and (age_s >= self.keep_s or num_bytes >= self.keep_bytes) else None
        due = staged_age_s >= self.keep_s or staged_bytes >= self.keep_bytes
        return "compact" if due else None
