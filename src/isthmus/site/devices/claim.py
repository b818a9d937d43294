"""`claim`: how many free devices a job takes, and how many from each of its victims."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

VictimKey = TypeVar("VictimKey", bound=Hashable)


@dataclass(frozen=True)
class DeviceSource(Generic[VictimKey]):
    """Number of devices by node group that one victim would release.

    `counted`: the pool already uses these devices, so taking them does not count against the owner's limit.
    """

    key: VictimKey
    num_devices: Mapping[str, int]
    counted: bool


@dataclass(frozen=True)
class Claim(Generic[VictimKey]):
    """Number of devices by node group that a claim takes: of the free ones, and of each victim."""

    free: Mapping[str, int]
    victims: Mapping[VictimKey, Mapping[str, int]]


def claim(
    wanted: Mapping[str, int],
    free: Mapping[str, int],
    victims: Sequence[DeviceSource[VictimKey]],
    headroom: Mapping[str, int],
) -> Claim[VictimKey] | None:
    """Return the devices to take, or None if too few are available.

    `wanted` and `free` are numbers of devices by node group. `headroom` limits the devices of a group that are
    taken without being `counted`; groups missing in it are unlimited. Free devices are taken first, then
    those of `victims` in order. The set of victims is minimal: each is dropped if possible, last first.
    """
    chosen = list(victims)
    taken = _take_devices(wanted, free, chosen, headroom)
    if taken is None:
        return None
    for victim in reversed(victims):
        fewer = [other for other in chosen if other is not victim]
        enough = _take_devices(wanted, free, fewer, headroom)
        if enough is not None:
            chosen, taken = fewer, enough
    return taken


def _take_devices(
    wanted: Mapping[str, int],
    free: Mapping[str, int],
    victims: Iterable[DeviceSource[VictimKey]],
    headroom: Mapping[str, int],
) -> Claim[VictimKey] | None:
    from_free: dict[str, int] = {}
    from_victims: dict[VictimKey, dict[str, int]] = {}
    for group, num in wanted.items():
        left = max(0, headroom.get(group, num))
        taken = from_free[group] = min(num, left, max(0, free.get(group, 0)))
        left -= taken
        for victim in victims:
            more = min(victim.num_devices.get(group, 0), num - taken)
            if not victim.counted:
                more = min(more, left)
                left -= more
            if more > 0:
                from_victims.setdefault(victim.key, {})[group] = more
                taken += more
        if taken < num:
            return None
    return Claim(from_free, from_victims)
