"""`movable_parts`: the running parts that the owner's rules let move, with what their moves cost."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.site.devices.topology_allocator import TopologyAllocator
from isthmus.site.parts import PartKey, SitePart
from isthmus.site.site_state import SiteState
from isthmus.site.topology.gang_request import GangRequest
from isthmus.site.topology.plan_moves import RunningGang


def movable_parts(
    site: SiteState, devices: TopologyAllocator, group: str, most_unit_cards: int, now_s: float
) -> Iterator[RunningGang[PartKey]]:
    """Yield the parts on node group `group` that may move for a part whose largest unit has `most_unit_cards`.

    A part with larger units stays: the waiting part is placed before those that move, and takes the place as planned.
    """
    for part in site.parts.values():
        if not _is_movable(site, part, now_s):
            continue
        request = devices.requests(part).get(group)
        if request is None or _largest_unit(request) > most_unit_cards or part.plan is None:
            continue
        num_cards = sum(chips for one in part.plan.parts() for chips in one.chips.values())
        yield RunningGang(
            key=part.key,
            request=request,
            taken=devices.cards_of(group, part),
            cost_card_s=site.policy.moves.pause_s * num_cards,
        )


def _is_movable(site: SiteState, part: SitePart, now_s: float) -> bool:
    """Return whether a part trains, can be saved, has rested, and is not exempt."""
    if part.local or part.state != "running" or part.rank_map is None or part.evicted or part.protect_after is not None:
        return False
    spec, rules = part.spec, site.policy.moves
    if spec is None or not spec.preemptible or spec.engine == "command" or part.user in rules.exempt_users:
        return False
    return now_s - part.since_s >= rules.rest_s


def _largest_unit(request: GangRequest) -> int:
    return max(unit.num_cards for unit in request.units)
