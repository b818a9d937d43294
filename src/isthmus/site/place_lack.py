"""`PlaceLack`: a waiting part of the pool that lacks nothing but a place at its site."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.site.parts import SitePart


@dataclass(kw_only=True, slots=True)
class PlaceLack:
    """What waits: a part that holds no devices, in node group `group`; since when, and when it last asked."""

    part: SitePart
    group: str
    since_s: float
    seen_s: float
