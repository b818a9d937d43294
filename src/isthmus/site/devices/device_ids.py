"""`DeviceIds`: the device allocator of an agent, which assigns devices to workers by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.site.devices.book import Counts, DeviceBook
from isthmus.site.devices.claim import Claim
from isthmus.site.parts import CLAIMING, HOLDING, PartKey, SitePart, SitePartState


class DeviceIds(DeviceBook):
    """Allocator of a site with device `ids` by node group, ordered so that neighbours are adjacent."""

    def __init__(self, ids: Mapping[str, Sequence[str]]) -> None:
        self.ids = {group: tuple(devices) for group, devices in ids.items()}
        self.inventory = {group: len(devices) for group, devices in self.ids.items()}
        self._position = {device: i for i, device in enumerate(d for ids in self.ids.values() for d in ids)}
        self._holder: dict[str, PartKey] = {}
        self._claimer: dict[str, PartKey] = {}

    def change(self, part: SitePart, before: SitePartState, after: SitePartState) -> None:
        """Record the transition of `part` from state `before` to `after`."""
        for states, owner in ((HOLDING, self._holder), (CLAIMING, self._claimer)):
            if after in states:
                self._record(owner, part)
            elif before in states:
                _erase(owner, part)

    def assign(self, part: SitePart, taken: Claim[PartKey]) -> None:
        """Assign each worker of `part` its devices, neighbours together."""
        ids: dict[str, list[str]] = {}
        for group, num in taken.free.items():
            ids[group] = [device for device in self.ids[group] if self._is_free(device, part)][:num]
        for key, devices in taken.victims.items():
            for group, num in devices.items():
                ids[group] += self._obtainable(key, part)[group][:num]
        unassigned = {group: iter(sorted(devices, key=self._place)) for group, devices in ids.items()}
        for worker in part.workers.values():
            group_ids = unassigned[worker.node_group]
            worker.devices = tuple(next(group_ids) for _ in range(worker.chips))
        if part.state in CLAIMING:
            self._record(self._claimer, part)

    def num_free(self, part: SitePart | None = None) -> Counts:
        """Return the number of devices that no part holds and that no part other than `part` has claimed."""
        return {
            group: sum(self._is_free(device, part) for device in devices)
            for group, devices in self.ids.items()
        }

    def used_by_pool(self, without: SitePart | None = None) -> Counts:
        """Return the number of devices that parts of the pool, except `without`, hold or have claimed."""
        return {
            group: sum(self._is_pools(device, without) for device in devices)
            for group, devices in self.ids.items()
        }

    def obtainable(self, victim: SitePart, part: SitePart) -> Counts:
        """Return the number of devices that `part` could take from `victim`."""
        return {group: len(devices) for group, devices in self._obtainable(victim.key, part).items()}

    def occupants(self, part: SitePart) -> list[PartKey]:
        """Return the other parts that still hold devices which `part` has claimed."""
        devices = (device for worker in part.workers.values() for device in worker.devices)
        holders = {self._holder[device] for device in devices if device in self._holder}
        return sorted(holders - {part.key})

    def _place(self, device: str) -> int:
        return self._position.get(device, 0)

    def _is_free(self, device: str, part: SitePart | None) -> bool:
        claimer = self._claimer.get(device)
        return device not in self._holder and (claimer is None or (part is not None and claimer == part.key))

    def _is_pools(self, device: str, without: SitePart | None) -> bool:
        owners = (self._holder.get(device), self._claimer.get(device))
        return any(key is not None and key[1] > 0 and (not without or key != without.key) for key in owners)

    def _obtainable(self, victim: PartKey, part: SitePart) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for group, devices in self.ids.items():
            for device in devices:
                holder, claimer = self._holder.get(device), self._claimer.get(device)
                available = holder in (None, victim) and claimer in (None, victim, part.key)
                if available and victim in (holder, claimer):
                    found.setdefault(group, []).append(device)
        return found

    def _record(self, owner: dict[str, PartKey], part: SitePart) -> None:
        _erase(owner, part)
        owner.update((device, part.key) for worker in part.workers.values() for device in worker.devices)


def _erase(owner: dict[str, PartKey], part: SitePart) -> None:
    for device in [device for device, key in owner.items() if key == part.key]:
        del owner[device]
