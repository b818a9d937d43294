"""`merged_ecn`, `set_ecn`: congestion marks of a packet that leaves a tunnel.

Source: RFC 6040, "Tunnelling of Explicit Congestion Notification", section 4.1 (normal mode: the mark is copied to the
outer header) and figure 4 (what a decapsulator makes of both marks).
"""

from __future__ import annotations

from typing import Final

NOT_ECT: Final = 0
ECT_1: Final = 1
ECT_0: Final = 2
CE: Final = 3
"""Congestion experienced."""

_MERGED: Final = (
    (NOT_ECT, NOT_ECT, NOT_ECT, None),  # inner not-ECT
    (ECT_1, ECT_1, ECT_1, CE),
    (ECT_0, ECT_1, ECT_0, CE),
    (CE, CE, CE, CE),
)
"""By inner and then outer mark. A packet that cannot carry a mark is dropped, as the router would have done."""


def merged_ecn(inner: int, outer: int) -> int | None:
    """Return the mark of a packet that leaves a tunnel; None: it is to be dropped. Marks are from 0 to 3."""
    return _MERGED[inner][outer]


def set_ecn(data: bytearray, place: int, mark: int) -> None:
    """Set the mark of the IP packet at `place`; an IPv4 checksum is kept right (RFC 1624)."""
    if data[place] >> 4 == 6:
        data[place + 1] = data[place + 1] & 0xCF | mark << 4
        return
    old = data[place] << 8 | data[place + 1]
    data[place + 1] = data[place + 1] & 0xFC | mark
    new = data[place] << 8 | data[place + 1]
    total = (~(data[place + 10] << 8 | data[place + 11]) & 0xFFFF) + (~old & 0xFFFF) + new
    total = (total & 0xFFFF) + (total >> 16)
    total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    data[place + 10], data[place + 11] = total >> 8, total & 0xFF
