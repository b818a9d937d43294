"""`DeviceIdAllocator`: the device allocator of an agent, which assigns devices to workers by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.site.devices.claim import Claim
from isthmus.site.devices.device_allocator import DeviceAllocator, DevicesByGroup
from isthmus.site.parts import CLAIMING, HOLDING, PartKey, SitePart, SitePartState


class DeviceIdAllocator(DeviceAllocator):
    """Allocator of a site with device `ids` by node group, ordered so that neighbours are adjacent."""

    def __init__(self, ids: Mapping[str, Sequence[str]]) -> None:
        self.ids: dict[str, tuple[str, ...]] = {}
        self.former_ids: set[str] = set()
        self._holder_by_device: dict[str, PartKey] = {}
        self._claimer_by_device: dict[str, PartKey] = {}
        self.set_ids(ids)

    def set_ids(self, ids: Mapping[str, Sequence[str]]) -> None:
        """Adopt another inventory; parts keep devices that are gone, and no other part gets these."""
        self.former_ids |= {device for devices in self.ids.values() for device in devices}
        self.ids = {group: tuple(devices) for group, devices in ids.items()}
        self.former_ids -= {device for devices in self.ids.values() for device in devices}
        self.inventory = {group: len(devices) for group, devices in self.ids.items()}
        self._position = {device: i for i, device in enumerate(d for ids in self.ids.values() for d in ids)}

    def record_transition(self, part: SitePart, before: SitePartState, after: SitePartState) -> None:
        """Record the transition of `part` from state `before` to `after`."""
        for states, owner in ((HOLDING, self._holder_by_device), (CLAIMING, self._claimer_by_device)):
            if after in states:
                self._record(owner, part)
            elif before in states:
                _remove_part(owner, part)

    def assign(self, part: SitePart, taken: Claim[PartKey]) -> None:
        """Assign each worker of `part` its devices, neighbours together."""
        ids: dict[str, list[str]] = {}
        for group, num in taken.free.items():
            ids[group] = [device for device in self.ids[group] if self.is_free(device, part)][:num]
        for key, devices in taken.victims.items():
            for group, num in devices.items():
                ids[group] += self._obtainable_ids(key, part)[group][:num]
        unassigned = {group: iter(sorted(devices, key=self._position_of)) for group, devices in ids.items()}
        for worker in part.workers.values():
            group_ids = unassigned[worker.node_group]
            worker.devices = tuple(next(group_ids) for _ in range(worker.chips))
        if part.state in CLAIMING:
            self._record(self._claimer_by_device, part)

    def num_held(self) -> DevicesByGroup:
        """Return the number of devices that parts hold."""
        return {group: sum(one in self._holder_by_device for one in devices) for group, devices in self.ids.items()}

    def num_free(self, part: SitePart | None = None) -> DevicesByGroup:
        """Return the number of devices that no part holds and that no part other than `part` has claimed."""
        return {group: sum(self.is_free(device, part) for device in devices) for group, devices in self.ids.items()}

    def used_by_pool(self, without: SitePart | None = None) -> DevicesByGroup:
        """Return the number of devices that parts of the pool, except `without`, hold or have claimed."""
        return {
            group: sum(self._is_used_by_pool(device, without) for device in devices)
            for group, devices in self.ids.items()
        }

    def obtainable(self, victim: SitePart, part: SitePart) -> DevicesByGroup:
        """Return the number of devices that `part` could take from `victim`."""
        return {group: len(devices) for group, devices in self._obtainable_ids(victim.key, part).items()}

    def current_holders(self, part: SitePart) -> list[PartKey]:
        """Return the other parts that still hold devices which `part` has claimed."""
        devices = (device for worker in part.workers.values() for device in worker.devices)
        holders = {self._holder_by_device[device] for device in devices if device in self._holder_by_device}
        return sorted(holders - {part.key})

    def _position_of(self, device: str) -> int:
        return self._position.get(device, 0)

    def is_free(self, device: str, part: SitePart | None) -> bool:
        """Return whether no part holds `device` and no part other than `part` has claimed it."""
        claimer = self._claimer_by_device.get(device)
        return device not in self._holder_by_device and (claimer is None or (part is not None and claimer == part.key))

    def _is_used_by_pool(self, device: str, without: SitePart | None) -> bool:
        owners = (self._holder_by_device.get(device), self._claimer_by_device.get(device))
        return any(key is not None and key[1] > 0 and (not without or key != without.key) for key in owners)

    def _obtainable_ids(self, victim: PartKey, part: SitePart) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for group, devices in self.ids.items():
            for device in devices:
                holder, claimer = self._holder_by_device.get(device), self._claimer_by_device.get(device)
                available = holder in (None, victim) and claimer in (None, victim, part.key)
                if available and victim in (holder, claimer):
                    found.setdefault(group, []).append(device)
        return found

    def _record(self, owner: dict[str, PartKey], part: SitePart) -> None:
        _remove_part(owner, part)
        owner.update((device, part.key) for worker in part.workers.values() for device in worker.devices)


def _remove_part(owner: dict[str, PartKey], part: SitePart) -> None:
    for device in [device for device, key in owner.items() if key == part.key]:
        del owner[device]
