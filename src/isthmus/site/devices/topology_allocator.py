"""`TopologyAllocator`: the device allocator of a site whose topology is known: by id, placed by `place_gang`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from isthmus.core.pool import NodeGroup
from isthmus.site.devices.claim import Claim, DeviceSource
from isthmus.site.devices.device_allocator import DevicesByGroup
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.parts import PartKey, SitePart
from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement, GangRefusal
from isthmus.site.topology.gang_request import GangRequest, GangUnit, RankId, gang_requests
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.site_tree import SiteTree
from isthmus.site.topology.tree_of_group import tree_of_group


class TopologyAllocator(DeviceIdAllocator):
    """Allocator of the cluster `cluster`; of `groups`, those with a topology are placed by it, the others in order.

    A rank has cards of one node, a unit cards of one super-node: a part may find no place although enough devices are
    free.
    """

    def __init__(self, cluster: str, groups: Iterable[NodeGroup], ids: Mapping[str, Sequence[str]]) -> None:
        self._cluster = cluster
        self._groups = {one.name: one for one in groups if one.topology is not None}
        self._trees: dict[str, SiteTree] = {}
        self._places: dict[str, dict[str, tuple[int, int]]] = {}
        self._memory: dict[str, dict[object, dict[object, object]]] = {}
        super().__init__(ids)

    def set_ids(self, ids: Mapping[str, Sequence[str]]) -> None:
        """Adopt another inventory, and the trees of its nodes."""
        super().set_ids(ids)
        for name, group in self._groups.items():
            cards: dict[str, list[str]] = {}
            for device in self.ids.get(name, ()):
                cards.setdefault(_node_of(device), []).append(device)
            self._trees[name] = tree_of_group(group, {node: len(devices) for node, devices in cards.items()})
            self._places[name] = {
                device: (node, card)
                for node, devices in enumerate(cards.values())
                for card, device in enumerate(devices)
            }
            self._memory[name] = {}

    def claim(
        self, part: SitePart, victims: Sequence[DeviceSource[PartKey]], headroom: Mapping[str, int]
    ) -> Claim[PartKey] | None:
        """Return the devices that `part` takes, of the fewest victims, or None if it has no place."""
        if not self._groups.keys() & part.wanted.keys():
            return super().claim(part, victims, headroom)
        chosen = list(victims)
        taken = self._take(part, chosen, headroom)
        for victim in reversed(victims) if taken is not None else ():
            fewer = [other for other in chosen if other is not victim]
            enough = self._take(part, fewer, headroom)
            if enough is not None:
                chosen, taken = fewer, enough
        return taken

    def assign(self, part: SitePart, taken: Claim[PartKey]) -> None:
        """Assign each worker of `part` its devices: by topology where that is known, neighbours together elsewhere."""
        super().assign(part, taken)
        for name, placement in self.placements(part, tuple(taken.victims)).items():
            if isinstance(placement, GangRefusal):
                raise AssertionError(f"a claim has no place: {placement.reason}")
            for rank, devices in self._devices_by_rank(name, placement).items():
                part.workers[rank].devices, part.workers[rank].node = devices, _node_of(devices[0])
        self.record_transition(part, part.state, part.state)

    def why_no_place(self, part: SitePart, victims: Sequence[PartKey]) -> str:
        """Return why `part` has no place although enough devices are free, or ""."""
        for name, found in self.placements(part, victims).items():
            if isinstance(found, GangRefusal):
                return f"node group '{name}': {found.reason}"
        return ""

    def num_offered(self) -> DevicesByGroup:
        """Return the free devices that a part of the pool may count on: whole nodes, and the emptiest broken one.

        Planners assume whole nodes and one broken node.
        """
        free = self.num_free()
        for name, tree in self._trees.items():
            counts = self._free_cards(name, None, ()).counts
            whole = sum(num for num, size in zip(counts, tree.cards, strict=True) if num == size)
            broken = max((num for num, size in zip(counts, tree.cards, strict=True) if num < size), default=0)
            free[name] = min(free[name], whole + broken)
        return free

    def placements(self, part: SitePart, victims: Sequence[PartKey]) -> dict[str, GangPlacement | GangRefusal]:
        """Return where `part` would be placed in each node group with a topology, with what `victims` hold."""
        return {
            name: place_gang(self._free_cards(name, part, victims), request)
            for name, request in self.requests(part).items()
        }

    def requests(self, part: SitePart) -> dict[str, GangRequest]:
        """Return what `part` asks for in each node group with a topology."""
        plan = None if part.plan is None else gang_requests(part.plan, self._cluster)
        found: dict[str, GangRequest] = {}
        for name in self._groups:
            ranks = {rank: one.chips for rank, one in part.workers.items() if one.node_group == name}
            if plan is not None and name in plan:
                units = [dict(unit.ranks) for unit in plan[name].units]
            else:
                units = [{rank: num} for rank, num in ranks.items()]
            most = self._trees[name].max_cards
            if units and most:
                found[name] = GangRequest(units=tuple(GangUnit(ranks=_cut(unit, most)) for unit in units))
        return found

    def free_cards(self, name: str, part: SitePart) -> FreeCards:
        """Return the cards of a node group with a topology that are free for `part`."""
        return self._free_cards(name, part, ())

    def cards_of(self, name: str, part: SitePart) -> dict[int, int]:
        """Return the cards of a node group that the workers of `part` have, by node, a bit for each."""
        found: dict[int, int] = {}
        for worker in part.workers.values():
            for device in worker.devices if worker.node_group == name else ():
                if device in self._places[name]:
                    node, card = self._places[name][device]
                    found[node] = found.get(node, 0) | 1 << card
        return found

    def _take(
        self, part: SitePart, victims: Sequence[DeviceSource[PartKey]], headroom: Mapping[str, int]
    ) -> Claim[PartKey] | None:
        """Return what `part` takes of the free devices and of all `victims`, by its placement; None without one."""
        plain = super().claim(part, victims, headroom)
        if plain is None:
            return None
        free, from_victims = dict(plain.free), {key: dict(num) for key, num in plain.victims.items()}
        for name, placement in self.placements(part, [victim.key for victim in victims]).items():
            if isinstance(placement, GangRefusal):
                return None
            devices = [device for one in self._devices_by_rank(name, placement).values() for device in one]
            free[name] = sum(self.is_free(device, part) for device in devices)
            for victim in victims:
                from_victims.get(victim.key, {}).pop(name, None)
                num = len(set(self._obtainable_ids(victim.key, part).get(name, ())) & set(devices))
                if num:
                    from_victims.setdefault(victim.key, {})[name] = num
            uncounted = free[name] + sum(
                from_victims.get(one.key, {}).get(name, 0) for one in victims if not one.counted
            )
            if uncounted > headroom.get(name, uncounted):
                return None
        return Claim(free, {key: num for key, num in from_victims.items() if num})

    def _free_cards(self, name: str, part: SitePart | None, victims: Sequence[PartKey]) -> FreeCards:
        tree, places = self._trees[name], self._places[name]
        masks = [0] * len(tree.nodes)
        for device, (node, card) in places.items():
            if self.is_free(device, part):
                masks[node] |= 1 << card
        for key in victims:
            if part is None:
                break
            for device in self._obtainable_ids(key, part).get(name, ()):
                node, card = places[device]
                masks[node] |= 1 << card
        free = FreeCards(tree, masks)
        free.memory = self._memory[name]
        return free

    def _devices_by_rank(self, name: str, placement: GangPlacement) -> dict[int, tuple[str, ...]]:
        by_place = {place: device for device, place in self._places[name].items()}
        found: dict[int, tuple[str, ...]] = {}
        for rank_id, (node, mask) in placement.places.items():
            rank = rank_id if isinstance(rank_id, int) else rank_id[0]
            cards = (card for card in range(mask.bit_length()) if mask >> card & 1)
            found[rank] = (*found.get(rank, ()), *(by_place[node, card] for card in cards))
        return found


def _cut(unit: Mapping[RankId, int], most: int) -> dict[RankId, int]:
    """Return the ranks of a unit; one with more cards than a node has becomes pieces of one card."""
    found: dict[RankId, int] = {}
    for rank, num in unit.items():
        if num <= most or not isinstance(rank, int):
            found[rank] = num
        else:
            found |= {(rank, piece): 1 for piece in range(num)}
    return found


def _node_of(device: str) -> str:
    """Return the node of a device `GROUP/NODE/CARD`."""
    return device.partition("/")[2].rpartition("/")[0]
