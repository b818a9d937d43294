"""`DeviceCountAllocator`: the device allocator of the pool simulator, which counts devices without ids.

Sums are updated at each transition, so the cost of a query does not depend on the number of parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.site.devices.claim import Claim
from isthmus.site.devices.device_allocator import DeviceAllocator, DevicesByGroup
from isthmus.site.parts import CLAIMING, HOLDING, PartKey, SitePart, SitePartState


class DeviceCountAllocator(DeviceAllocator):
    """Allocator of a site with `inventory` devices by node group."""

    def __init__(self, inventory: Mapping[str, int]) -> None:
        self.inventory = dict(inventory)
        self.held: DevicesByGroup = dict.fromkeys(inventory, 0)
        self._held_by_pool: DevicesByGroup = dict.fromkeys(inventory, 0)
        self._holders: dict[PartKey, DevicesByGroup] = {}
        self._claimers: dict[PartKey, SitePart] = {}
        self._taken_from: dict[PartKey, dict[PartKey, Mapping[str, int]]] = {}

    def record_transition(self, part: SitePart, before: SitePartState, after: SitePartState) -> None:
        """Record the transition of `part` from state `before` to `after`."""
        if (after in HOLDING) != (before in HOLDING):
            self._update_held(part, after in HOLDING)
        if after in CLAIMING:
            self._claimers[part.key] = part
        else:
            self._claimers.pop(part.key, None)
            self._taken_from.pop(part.key, None)

    def _update_held(self, part: SitePart, holds: bool) -> None:
        if holds:
            self._holders[part.key] = part.wanted
            devices, sign = self._holders[part.key], 1
        else:
            devices, sign = self._holders.pop(part.key), -1
            for taken in self._taken_from.values():
                taken.pop(part.key, None)
        for group, num in devices.items():
            self.held[group] += sign * num
            if not part.local:
                self._held_by_pool[group] += sign * num

    def assign(self, part: SitePart, taken: Claim[PartKey]) -> None:
        """Record from which holders `part` takes its devices."""
        self._taken_from[part.key] = {key: num for key, num in taken.victims.items() if key in self._holders}

    def num_held(self) -> DevicesByGroup:
        """Return the number of devices that parts hold."""
        return dict(self.held)

    def num_free(self, part: SitePart | None = None) -> DevicesByGroup:
        """Return the number of devices that no part holds and that no part other than `part` has claimed."""
        free = {group: num - self.held[group] for group, num in self.inventory.items()}
        for claimer in self._claimers.values():
            if claimer is not part:
                for group, num in self._claimed_unheld(claimer).items():
                    free[group] -= num
        return free

    def used_by_pool(self, without: SitePart | None = None) -> DevicesByGroup:
        """Return the number of devices that parts of the pool, except `without`, hold or have claimed."""
        used = dict(self._held_by_pool)
        if without is not None and not without.local:
            for group, num in self._holders.get(without.key, {}).items():
                used[group] -= num
        for claimer in self._claimers.values():
            if claimer.local or claimer is without:
                continue
            for group, num in claimer.wanted.items():
                used[group] += num
            for key, taken in self._taken_from.get(claimer.key, {}).items():
                if key[1]:  # already counted as held by another part of the pool
                    for group, num in taken.items():
                        used[group] -= num
        return used

    def obtainable(self, victim: SitePart, part: SitePart) -> DevicesByGroup:
        """Return the number of devices that `part` could take from `victim`."""
        if victim.state in CLAIMING:
            return self._claimed_unheld(victim)
        devices = dict(self._holders.get(victim.key, {}))
        for claimer in self._claimers.values():
            if claimer is not part and claimer is not victim:
                for group, num in self._taken_from.get(claimer.key, {}).get(victim.key, {}).items():
                    devices[group] -= num
        return devices

    def current_holders(self, part: SitePart) -> list[PartKey]:
        """Return the other parts that still hold devices which `part` has claimed."""
        return sorted(self._taken_from.get(part.key, ()))

    def _claimed_unheld(self, part: SitePart) -> DevicesByGroup:
        """Return the number of devices that `part` has claimed and no other part holds."""
        devices = dict(part.wanted)
        for taken in self._taken_from.get(part.key, {}).values():
            for group, num in taken.items():
                devices[group] -= num
        return devices
