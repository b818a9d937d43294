"""`DeltaSummary`: size and number of changes of a delta."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeltaSummary:
    """Changed values, bytes of the delta and of the whole new file, and the names of both versions in hexadecimal."""

    num_changed: int
    num_bytes: int
    full_bytes: int
    base: str
    target: str
