"""Parts that are promised bandwidth, where a decision centre books paths: prepared with them, or refused."""

from __future__ import annotations

import pytest

from isthmus.core.messages.agent_messages import PartOrder
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import PathObserved
from isthmus.site.site_invariants import check_site
from tests.agent.test_promised_rates import LINKS, sending
from tests.site.driver import Site
from tests.site.samples import INVENTORY, order


class NetworkSite(Site):
    """A site whose network is booked by a decision centre."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = SiteMachine("east", DeviceIdAllocator(INVENTORY), asks_for_paths=True)

    def path(self, state: str, detail: str = "") -> None:
        """Learn what became of the part's paths."""
        self.handle(PathObserved(now_s=self.now_s, part=("a", 1), state=state, detail=detail))  # type: ignore[arg-type]
        check_site(self.machine)


def promised(desired: str, gbps: float = 0.7) -> PartOrder:
    """An order whose plan sends to west."""
    return order(desired, links=LINKS).model_copy(update={"plan": sending(gbps)})  # type: ignore[arg-type]


def test_a_part_is_prepared_once_its_paths_are_held() -> None:
    """Its devices are kept meanwhile; then it starts as any other."""
    site = NetworkSite()
    site.obey(promised("prepared"))
    assert site.states == {"a/1": "ready"}
    assert site.part().path == "asked"
    site.path("held")
    assert site.states == {"a/1": "prepared"}
    site.obey(promised("running"))
    assert site.states == {"a/1": "running"}


def test_a_part_without_a_path_is_refused_with_the_reason() -> None:
    """Its devices are free again, and the coordinator learns why."""
    site = NetworkSite()
    site.obey(promised("prepared"))
    site.path("ended", "no path to west: no path from east to west has 0.7 Gbit/s free")
    assert site.states == {"a/1": "refused"}
    assert "0.7 Gbit/s free" in site.detail()
    assert site.part().path == ""


@pytest.mark.parametrize(("state", "expected"), [("prepared", "released"), ("running", "running")])
def test_a_path_that_ends_releases_a_prepared_part_and_leaves_a_running_one(state: str, expected: str) -> None:
    """What runs goes on without its promise: the centre seeks another path."""
    site = NetworkSite()
    site.obey(promised("prepared"))
    site.path("held")
    if state == "running":
        site.obey(promised("running"))
    site.path("ended", "its pipe has failed")
    assert site.states == {"a/1": expected}


def test_a_part_that_is_promised_nothing_asks_for_no_path() -> None:
    """Without a rate in its plan, or without a decision centre, a part is prepared at once."""
    site = NetworkSite()
    site.obey(promised("prepared", gbps=0.0))
    assert site.states == {"a/1": "prepared"}
    other = Site()
    other.obey(promised("prepared"))
    assert other.states == {"a/1": "prepared"}
