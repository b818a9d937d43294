"""`DeviceAllocator`: the interface of device allocators, which record the parts that hold or claim devices.

A part that is `ready` or `evicting` has *claimed* its devices: they are reserved for it, although a victim
may still hold some. From `prepared` on a part *holds* them. A device has at most one holder and one claimer.
Agents assign devices by id (`DeviceIdAllocator`), the pool simulator counts them (`DeviceCountAllocator`);
`tests/site/test_device_books.py` checks that both agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from isthmus.site.devices.claim import Claim, DeviceSource, claim
from isthmus.site.parts import PartKey, SitePart, SitePartState

DevicesByGroup = dict[str, int]
"""Number of devices by node group."""


class DeviceAllocator(ABC):
    """The devices of a site; `inventory` is their number by node group."""

    inventory: Mapping[str, int]

    @abstractmethod
    def record_transition(self, part: SitePart, before: SitePartState, after: SitePartState) -> None:
        """Record the transition of `part` from state `before` to `after`."""

    @abstractmethod
    def assign(self, part: SitePart, taken: Claim[PartKey]) -> None:
        """Assign to `part` the devices that it claims; it must not hold or have claimed any others."""

    @abstractmethod
    def num_free(self, part: SitePart | None = None) -> DevicesByGroup:
        """Return the number of devices that no part holds and that no part other than `part` has claimed."""

    @abstractmethod
    def num_held(self) -> DevicesByGroup:
        """Return the number of devices that parts hold."""

    def num_offered(self) -> DevicesByGroup:
        """Return the number of free devices that a part of the pool may count on: fewer where they are in fragments."""
        return self.num_free()

    def why_no_place(self, part: SitePart, victims: Sequence[PartKey]) -> str:  # noqa: ARG002 - counted ones have one
        """Return why `part` has no place although enough devices are free or held by `victims`, or ""."""
        return ""

    @abstractmethod
    def used_by_pool(self, without: SitePart | None = None) -> DevicesByGroup:
        """Return the number of devices that parts of the pool, except `without`, hold or have claimed."""

    @abstractmethod
    def obtainable(self, victim: SitePart, part: SitePart) -> DevicesByGroup:
        """Return the number of devices that `part` could take from `victim`."""

    @abstractmethod
    def current_holders(self, part: SitePart) -> list[PartKey]:
        """Return the other parts that still hold devices which `part` has claimed."""

    def claim(
        self, part: SitePart, victims: Sequence[DeviceSource[PartKey]], headroom: Mapping[str, int]
    ) -> Claim[PartKey] | None:
        """Return the devices that `part` takes, or None if too few are available; see `claim`."""
        return claim(part.wanted, self.num_free(part), victims, headroom)
