"""`Kind`: what sort of step it is: whether it may be counted on, and what it is counted against."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """A `TIMEOUT` is a fault unless nothing else can happen; from `SUBMIT` on, a user or owner requests the step."""

    ORDINARY = 0
    FAULT = 1
    TIMEOUT = 2
    SUBMIT = 3
    CANCEL = 4
    AGREE = 5
    EVICT = 6
