"""The chip-hours that owners have given and users have taken, as `isthmus usage` shows them."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt


class UsageRow(FrozenModel):
    """Chip-hours of a user at a cluster of an owner, and the chips that it holds there now."""

    owner: Name
    cluster: Name
    user: Name
    chip_hours: NonNegativeFloat
    num_chips: NonNegativeInt


class UsageView(FrozenModel):
    """Chip-hours from `since_s` to `now_s` (seconds since the epoch), as far as the caller may see them.

    `given` sums the rows by owner, `taken` by user. Chips count while a part holds them, from its allocation until its
    site has released it. `since_s` is None before anything was counted.
    """

    since_s: float | None
    now_s: float
    given: dict[Name, NonNegativeFloat]
    taken: dict[Name, NonNegativeFloat]
    rows: tuple[UsageRow, ...] = ()
