"""`DeviceBook`: which part holds and which has claimed how many of a site's devices.

A part that is `ready` or `evicting` has *claimed* its devices: they are reserved for it, although a victim
may still hold some. From `prepared` on a part *holds* them. A device has at most one holder and one claimer.
The site machine keeps one of two books: agents assign devices by id (`DeviceIds`), the pool simulator counts
them (`DeviceCounts`). `tests/site/test_device_books.py` holds both to the same answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from isthmus.site.devices.claim import Claim, DeviceSource, claim
from isthmus.site.parts import PartKey, SitePart, SitePartState

Counts = dict[str, int]
"""Numbers of devices by node group."""


class DeviceBook(ABC):
    """The devices of a site; `inventory` is their number by node group."""

    inventory: Mapping[str, int]

    @abstractmethod
    def change(self, part: SitePart, before: SitePartState, after: SitePartState) -> None:
        """Record that `part` went from state `before` to `after`."""

    @abstractmethod
    def assign(self, part: SitePart, taken: Claim[PartKey]) -> None:
        """Give `part` the devices that it claims. It holds or has claimed none of others."""

    @abstractmethod
    def num_free(self, part: SitePart | None = None) -> Counts:
        """Return the devices that no part, or none but `part`, has claimed, and that no part holds."""

    @abstractmethod
    def used_by_pool(self, without: SitePart | None = None) -> Counts:
        """Return the devices that parts of the pool, except `without`, hold or have claimed."""

    @abstractmethod
    def obtainable(self, victim: SitePart, part: SitePart) -> Counts:
        """Return the devices that `part` could have if all were taken from `victim`."""

    @abstractmethod
    def occupants(self, part: SitePart) -> list[PartKey]:
        """Return the other parts that still hold devices which `part` has claimed."""

    def claim(
        self, part: SitePart, victims: Sequence[DeviceSource[PartKey]], room: Mapping[str, int]
    ) -> Claim[PartKey] | None:
        """Return what `part` takes of which victims, or None if its devices cannot be had (see `claim`)."""
        return claim(part.wanted, self.num_free(part), victims, room)
