"""Checkpoints that survive a part: how its site's agent requests and observes them."""

from __future__ import annotations

import pytest

from isthmus.core.messages.agent_messages import PartOrder, RankMap, VerifiedCheckpoint
from isthmus.site.machine_events import LogWarning
from tests.site.driver import Site, asked_to_save
from tests.site.samples import address, order

MAP = RankMap(workers=(address(0), address(1)))


def wants(protect: bool) -> PartOrder:
    """An order to run two ranks, and perhaps to protect them."""
    return order("running", places=["east/h20"] * 2, ranks=MAP, protect=protect)


@pytest.fixture
def site() -> Site:
    """A site at which a/1 trains on two devices."""
    site = Site()
    site.obey(order("prepared", places=["east/h20"] * 2))
    site.obey(wants(False))
    return site


def told(site: Site) -> VerifiedCheckpoint | None:
    """What the site reports to the server about a/1's protection."""
    return site.machine.observed_parts()[0].protection


def test_a_checkpoint_counts_once_all_ranks_have_verified_the_same_one(site: Site) -> None:
    """Asked once, however often it is ordered; the sizes of the ranks' files add up."""
    assert asked_to_save(site.obey(wants(True))) == [("a", 0)]
    assert asked_to_save(site.obey(wants(True))) == []
    site.saved(5, 0)
    assert told(site) is None
    site.saved(5, 1)
    assert told(site) == VerifiedCheckpoint(step=5, num_bytes=20)
    assert asked_to_save(site.obey(wants(True))) == []


def test_another_request_wants_a_newer_checkpoint(site: Site) -> None:
    """Withdrawn and made again, it is not answered by the old one."""
    site.obey(wants(True))
    site.saved(5, 0)
    site.saved(5, 1)
    site.obey(wants(False))
    assert told(site) is None
    assert asked_to_save(site.obey(wants(True))) == [("a", 5)]
    site.saved(5, 0)
    assert told(site) is None
    site.saved(9, 0)
    site.saved(9, 1)
    assert told(site) == VerifiedCheckpoint(step=9, num_bytes=20)


def test_orders_under_an_older_fence_are_dropped_and_complained_of_once(site: Site) -> None:
    """A server that was replaced and does not know it yet ends nothing and starts nothing."""
    site.obey(wants(False), fence=4)
    complaints = [step for step in site.obey(fence=3) if isinstance(step, LogWarning)]
    assert [step.text for step in complaints] == ["dropped orders with fence 3: orders with fence 4 were seen before"]
    assert site.obey(fence=3) == []
    assert site.states == {"a/1": "running"}
    site.obey(fence=4)
    assert site.part().state == "stopping"
