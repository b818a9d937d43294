"""`SyncCounts`: how the exchanges of an agent with its server went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SyncCounts:
    """Exchanges that the server answered, and that failed; their time in seconds; when the last answer came (epoch)."""

    num_answered: int = 0
    num_failed: int = 0
    answered_s: float = 0.0
    last_answer_s: float | None = None

    def add_answer(self, seconds: float, now_s: float) -> None:
        """Count an answer at `now_s`, in seconds since the epoch."""
        self.num_answered += 1
        self.answered_s += seconds
        self.last_answer_s = now_s
