"""`ChipScope`: the chips that a guarantee or a limit is about: all of the pool, of a cluster, or of a node group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from isthmus.core.pool_resource import PoolResource


class ChipScope(NamedTuple):
    """All chips of the pool, those of `cluster`, or those of one of its node groups."""

    cluster: str = ""
    node_group: str = ""

    def chips_in(self, chips: Mapping[PoolResource, int]) -> int:
        """Return how many of `chips` are in the scope."""
        if not self.cluster:
            return sum(chips.values())
        return sum(
            number for key, number in chips.items() if key.cluster == self.cluster and self.node_group in ("", key.name)
        )

    def around(self) -> tuple[ChipScope, ...]:
        """Return the scopes that have all chips of this one, the narrowest first: itself, its cluster, the pool."""
        return tuple(dict.fromkeys((self, ChipScope(self.cluster), ALL_CHIPS)))

    @property
    def of_text(self) -> str:
        """The scope after a number of chips: ` of east/h20`; empty for the pool."""
        return f" of {self}" if self.cluster else ""

    def __str__(self) -> str:
        """Return `CLUSTER` or `CLUSTER/GROUP`."""
        return f"{self.cluster}/{self.node_group}" if self.node_group else self.cluster


ALL_CHIPS = ChipScope()
"""The chips of the pool."""


def within_scopes(lines: Mapping[ChipScope, int]) -> dict[ChipScope, int]:
    """Return by scope the chips of all lines within it: 2 of the pool and 4 of a cluster are 6 within the pool."""
    found: dict[ChipScope, int] = {}
    for scope, chips in lines.items():
        for at in scope.around():
            found[at] = found.get(at, 0) + chips
    return found
