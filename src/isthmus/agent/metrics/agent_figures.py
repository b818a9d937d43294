"""`agent_figures`: what an agent's page of metrics shows. Labels are names of `pool.yaml` and of states: bounded."""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

from isthmus.agent.metrics.sync_counts import SyncCounts
from isthmus.core.text.gauge_text import GaugeText
from isthmus.site import SiteMachine, SitePartState

STATES: tuple[SitePartState, ...] = tuple(one for one in get_args(SitePartState) if one not in ("new", "forgotten"))


def agent_figures(machine: SiteMachine, syncs: SyncCounts, *, now_s: float, num_deferred: int, wall_s: float) -> bytes:
    """Return the page at `now_s` by the clock of the machine's events, `wall_s` by that of the day."""
    site, page = machine.site, GaugeText()
    page.add("isthmus_agent_page_timestamp_seconds", "When this page was made.", wall_s)
    page.add_series(
        "isthmus_agent_syncs_total", "Exchanges with the server.", ("outcome",),
        [(("answered",), syncs.num_answered), (("failed",), syncs.num_failed)], kind="counter",
    )  # fmt: skip
    page.add("isthmus_agent_sync_seconds_total", "Time of the answered exchanges.", syncs.answered_s, kind="counter")
    if syncs.last_answer_s is not None:
        text = "Time of the server's last answer."
        page.add("isthmus_agent_last_answer_timestamp_seconds", text, syncs.last_answer_s)
    _add_devices(page, machine)
    _add_parts(page, machine)
    text = "Parts that lack nothing but a place, and have devices in fragments."
    page.add("isthmus_agent_parts_without_place", text, len(site.lacks))
    page.add("isthmus_agent_moves_proposed", "Waiting parts for which moves are proposed.", len(site.proposals))
    page.add("isthmus_agent_moves_in_hour", "Moves that have begun in the last hour.", len(site.moved_at_s))
    page.add("isthmus_agent_admits_pool", "1 within the owner's hours for the pool.", site.is_open)
    page.add(
        "isthmus_agent_instructions_deferred", "Instructions that wait for a state that can be saved.", num_deferred
    )
    if site.run_lease_until_s < math.inf:
        text = "Time until the workers of the pool end themselves."
        page.add("isthmus_agent_run_lease_seconds", text, site.run_lease_until_s - now_s)
    return page.encoded()


def _add_devices(page: GaugeText, machine: SiteMachine) -> None:
    devices = machine.site.devices
    offered = machine.free_chips()
    for name, text, counts in (
        ("isthmus_agent_devices", "Devices that there are.", devices.inventory),
        ("isthmus_agent_devices_free", "Devices that nothing holds or has claimed.", devices.num_free()),
        ("isthmus_agent_devices_offered", "Free devices that the pool may have, without fragments.", offered),
        ("isthmus_agent_devices_of_pool", "Devices that parts of the pool hold.", devices.used_by_pool()),
    ):
        page.add_series(name, text, ("node_group",), [((group,), counts[group]) for group in sorted(counts)])


def _add_parts(page: GaugeText, machine: SiteMachine) -> None:
    found = Counter((part.state, part.local) for part in machine.parts.values())
    for name, text, local in (
        ("isthmus_agent_parts", "Parts of the pool's jobs.", False),
        ("isthmus_agent_local_jobs", "Jobs of the site's own users.", True),
    ):
        page.add_series(name, text, ("state",), [((state,), found[state, local]) for state in STATES])
    unsaved = [part.unsaved_s for part in machine.parts.values() if not part.local]
    text = "Longest time of work of a part since its last checkpoint."
    page.add("isthmus_agent_unsaved_seconds", text, max(unsaved, default=0.0))
