"""Rules of the coordinator about sites that move, close, leave and are full; mutation tests found them unstated."""

from __future__ import annotations

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import JobCancelled, PoolSet, SiteLeft, TariffPublished
from isthmus.control.state.site_membership import CordonRecord
from isthmus.core.errors import FieldError, IsthmusError
from tests.control.driver import Driver, seen, started
from tests.control.priced import chip_price, tariff
from tests.control.samples import plan
from tests.control.test_reachability import Sites
from tests.control.test_site_duty import cordon, drain


def test_a_site_whose_workers_listen_elsewhere_is_checked_again_both_ways() -> None:
    """Another host or range of ports; not the listener that a check opens, nor a report of the same address."""
    pool = Sites("a", "b")
    pool.check()
    records = pool.coordinator.state.clusters

    def ordered() -> list[set[str]]:
        return [set(records[name].to_check) for name in "ab"]

    assert ordered() == [set(), set()]
    pool.join("a")
    assert ordered() == [set(), set()]
    for change in ({"host": "10.0.0.9"}, {"first_port": 40000}, {"last_port": 42000}):
        pool.hosts["a"] = pool.hosts["a"] | change
        pool.join("a")
        assert ordered() == [{"b"}, {"a"}], change
        pool.check()
        assert ordered() == [set(), set()]


def test_who_drains_a_site_has_closed_it() -> None:
    """By name and right, from then on; a site that was closed before keeps who closed it."""
    pool = started("a")
    drain(pool, "a")
    record = pool.coordinator.state.clusters["a"]
    closed = CordonRecord(by="x", role="owner", since_s=pool.now_s)
    assert record.cordon == closed
    other = started("a")
    cordon(other, "a", role="admin")
    other.now_s += 5
    drain(other, "a")
    assert other.coordinator.state.clusters["a"].cordon == CordonRecord(by="x", role="admin", since_s=other.now_s - 5)


def test_a_site_that_has_left_holds_no_files_of_a_job() -> None:
    """Those of the other sites are still there."""
    pool = started("a", "b")
    drain(pool, "a", leaves=True)
    for _ in range(3):
        pool.obey()
    assert pool.coordinator.state.jobs["j"].file_clusters == ("a", "b")
    pool.tell(SiteLeft(now_s=pool.now_s, cluster="a"))
    assert pool.coordinator.state.jobs["j"].file_clusters == ("b",)


def test_the_last_of_the_later_jobs_gives_its_chips_first() -> None:
    """An earlier job needs one chip; of two that only prepare with one each, the later one waits again."""
    pool = Driver("a", "b", chips=2)
    pool.submit("one", plan("a"), policy="manual")
    pool.choose("one", "p")
    pool.report("a", seen("one", 1, "refused", "busy"))
    pool.obey()
    assert pool.state("one") == "waiting"
    for name in ("two", "three"):
        pool.now_s += 1
        pool.submit(name, plan("a", "b"))
    assert (pool.state("two"), pool.state("three")) == ("preparing", "preparing")
    pool.wait(2)
    assert (pool.state("one"), pool.state("two"), pool.state("three")) == ("blocked", "preparing", "stopping")


def test_a_price_holds_from_the_time_of_its_event_at_the_earliest() -> None:
    """Whatever the last event before it was."""
    pool = Driver("a")
    pool.now_s = 5000.0
    late = TariffPublished(
        now_s=pool.now_s, by="root", tariff=tariff(chip_price("a", 1, **{"from": "1970-01-01T01:00:00"}))
    )
    with pytest.raises(FieldError, match="01:00:00Z has passed, it is 1970-01-01T01:23:20Z"):
        pool.tell(late)


def test_a_job_is_planned_on_the_whole_pool_where_no_chip_is_free() -> None:
    """No site has one: a request on none could only be refused."""
    pool = Driver("a", chips=1)
    pool.tell(PoolSet(now_s=1, planner_turns=True, needs_free_chips=True))
    pool.submit("first", plan("a"))
    pool.obey()
    pool.submit("next")
    assert pool.asked["next"].free_chips == {"a": {"g": 1}}


def test_an_event_that_cannot_be_replayed_is_named_by_its_place_and_kind() -> None:
    """With what went wrong, and what to do."""
    with pytest.raises(IsthmusError) as raised:
        Coordinator.replay([PoolSet(now_s=1), JobCancelled(now_s=1, job_id="ghost")])
    assert str(raised.value).startswith("event 2 of the log, 'job-cancelled', cannot be replayed: NotFoundError: ")
    assert "keep the state folder, start the version that wrote it" in str(raised.value)
