"""`BoundedLog`: filter of log records that leaves out repetitions, so that no peer can fill a disk through a log.

Records of one place in the code (logger, level and text before its values) share a token bucket (ITU-T I.371). The
first record after a gap says how many were left out.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_PLACES = 500
"""Places whose rate is kept; the one that was silent for longest is forgotten first."""


@dataclass(frozen=True)
class LogRate:
    """Records at once, and per second in the long run."""

    num_at_once: float
    per_s: float


INFO_RATE = LogRate(2000, 50)
"""Rate of a place below level WARNING: the acts of known callers."""
WARNING_RATE = LogRate(20, 0.1)
"""Rate of a place from level WARNING on."""
TRACEBACK_RATE = LogRate(5, 0.02)
"""Rate of a place that logs tracebacks, which are long."""
ALL_WARNINGS_RATE = LogRate(300, 1)
"""Rate of all places together from level WARNING on."""
MAX_MESSAGE_CHARS = 4000
"""Longest message; the rest is cut."""


@dataclass(slots=True)
class _Bucket:
    num_left: float
    at_s: float
    num_left_out: int = 0

    def take(self, rate: LogRate, now_s: float) -> bool:
        self.num_left = min(rate.num_at_once, self.num_left + max(0.0, now_s - self.at_s) * rate.per_s)
        self.at_s = now_s
        if self.num_left < 1:
            return False
        self.num_left -= 1
        return True


class BoundedLog(logging.Filter):
    """Passes a bounded number of records; `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: OrderedDict[tuple[str, int, str], _Bucket] = OrderedDict()
        self._warnings = _Bucket(ALL_WARNINGS_RATE.num_at_once, clock())

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; add the number of records left out before it."""
        now_s, rate = self._clock(), _rate(record)
        place = (record.name, record.levelno, str(record.msg)[:200])
        bucket = self._places.setdefault(place, _Bucket(rate.num_at_once, now_s))
        self._places.move_to_end(place)
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)
        passes = bucket.take(rate, now_s)
        if passes and record.levelno >= logging.WARNING:
            passes = self._warnings.take(ALL_WARNINGS_RATE, now_s)
        if not passes:
            bucket.num_left_out += 1
            return False
        text = record.getMessage()
        if bucket.num_left_out:
            text = f"{text[:MAX_MESSAGE_CHARS]} (repeated {bucket.num_left_out} times)"
            bucket.num_left_out = 0
        if text is not record.msg or len(text) > MAX_MESSAGE_CHARS:
            record.msg, record.args = text[: MAX_MESSAGE_CHARS + 40], ()
        return True


def _rate(record: logging.LogRecord) -> LogRate:
    if record.exc_info:
        return TRACEBACK_RATE
    return WARNING_RATE if record.levelno >= logging.WARNING else INFO_RATE
