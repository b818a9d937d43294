"""What the coordinator's events cost: from the hold of chips to their release, by whose fault."""

from __future__ import annotations

import pytest

from isthmus.control.accounting.check_ledger import check_ledger
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import (
    AgentLost,
    DrainTimedOut,
    JobDeleted,
    RunLeaseEnded,
    SiteCordoned,
    SiteDraining,
    TariffPublished,
)
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.errors import ConflictError, FieldError
from isthmus.core.messages.agent_messages import ObservedPart, PartEvent
from tests.control.driver import Driver, seen
from tests.control.priced import HOUR_S, UNIT, balances, chip_price, tariff
from tests.control.samples import plan
from tests.control.test_coordinator_allocations import linked, predicted


def priced(*sites: str, price: float = 1) -> Driver:
    """A pool of `a` and `b` with 4 chips each, at a price for a chip in an hour; the clock says 100 s."""
    pool = Driver("a", "b")
    prices = [chip_price(name, price) for name in sites or ("a", "b")]
    pool.tell(TariffPublished(now_s=pool.now_s, by="root", tariff=tariff(*prices)))
    return pool


def running(*sites: str, user: str = "ann") -> Driver:
    """A priced pool on which job `j` trains with one chip at each of `sites`, started in no time."""
    pool = priced()
    pool.submit("j", plan(*sites), user=user)
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool


def cost(pool: Driver) -> dict[str, float]:
    """The balances of the pool's accounts."""
    check = check_ledger(pool.coordinator.state.meter.ledger)
    assert (check.sum, check.unpaired, check.differences) == (0, 0, ())
    return balances(pool.coordinator.state.meter)


def phases(pool: Driver, cluster: str = "a") -> list[tuple[str, float]]:
    """Phases and hours of what was held at a cluster for some time, in order."""
    return [
        (str(one.phase), (one.end_ms - one.begin_ms) / 3_600_000)
        for one in pool.coordinator.state.meter.ledger.transactions
        if one.cluster == cluster and one.resource and one.end_ms > one.begin_ms
    ]


def test_chips_cost_from_when_their_site_holds_them_until_it_has_released_them() -> None:
    """Two hours of training and one until the release; waiting in the queue costs nothing."""
    pool = running("a")
    pool.now_s += 2 * HOUR_S
    pool.cancel("j")
    pool.now_s += HOUR_S
    pool.report("a", seen("j", 1, "released"))
    pool.now_s += HOUR_S
    pool.report("a")
    assert phases(pool) == [("running", 2.0), ("leaving", 1.0)]
    assert cost(pool) == {"job:j": -3.0, "owner:owner-a": 3.0}


def test_chips_that_the_sites_scheduler_has_not_granted_cost_nothing() -> None:
    """For an hour the scheduler is busy; the hour after it counts."""
    pool = priced("a")
    pool.submit("j", plan("a"), user="ann")
    pool.report("a", ObservedPart(job="j", attempt=1, state="ready", ungranted=True))
    pool.now_s += HOUR_S
    pool.report("a", ObservedPart(job="j", attempt=1, state="ready"))
    pool.now_s += HOUR_S
    pool.cancel("j")
    pool.report("a", seen("j", 1, "released"))
    assert sum(hours for _, hours in phases(pool)) == 1.0
    assert cost(pool) == {"job:j": -1.0, "owner:owner-a": 1.0}


@pytest.mark.parametrize(("ago_s", "hours"), [(HOUR_S / 2, 1.5), (99 * HOUR_S, 3.0), (-HOUR_S, 1.0), (None, 1.0)])
@pytest.mark.parametrize("state", ["ready", "queued"])
def test_chips_count_since_the_scheduler_has_granted_them(state: str, ago_s: float | None, hours: float) -> None:
    """The report comes later; but they never count from before the pool asked for them, or from a time to come."""
    pool = priced("a")
    pool.submit("j", plan("a"), user="ann")
    for _ in range(2):
        pool.report("a", ObservedPart(job="j", attempt=1, state=state, ungranted=state == "ready"))  # type: ignore[arg-type]
        pool.now_s += HOUR_S
    pool.clock_s, at_s = 5e6, None if ago_s is None else 5e6 - ago_s
    pool.report("a", ObservedPart(job="j", attempt=1, state="ready", granted_at_s=at_s))
    pool.now_s += HOUR_S
    pool.clock_s += HOUR_S
    pool.report("a", ObservedPart(job="j", attempt=1, state="prepared", granted_at_s=at_s))
    pool.cancel("j")
    pool.report("a", seen("j", 1, "released"))
    assert sum(held for _, held in phases(pool)) == hours
    assert cost(pool) == {"job:j": -hours, "owner:owner-a": hours}


def test_a_running_part_has_its_chips_whatever_its_site_says_of_the_grant() -> None:
    """User and owner gain nothing from a report that calls chips of a running part ungranted."""
    pool = running("a")
    pool.report("a", ObservedPart(job="j", attempt=1, state="running", ungranted=True))
    pool.now_s += HOUR_S
    pool.cancel("j")
    pool.report("a", seen("j", 1, "released"))
    assert cost(pool) == {"job:j": -1.0, "owner:owner-a": 1.0}


def test_a_site_that_prepares_late_pays_the_one_that_waits() -> None:
    """Site a holds its chips for an hour until b has them too; then both train for an hour."""
    pool = priced()
    pool.submit("j", plan("a", "b"), user="ann")
    pool.obey("a")
    pool.now_s += HOUR_S
    pool.obey("b")
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    pool.now_s += HOUR_S
    pool.cancel("j")
    pool.obey()
    assert phases(pool)[0] == ("waiting", 1.0)
    assert cost(pool) == {"job:j": -2.0, "owner:owner-a": 2.0}


def test_an_attempt_that_its_site_loses_is_paid_by_its_owner() -> None:
    """The agent of b has restarted without its part: a is paid by b, and the job pays for neither."""
    pool = running("a", "b")
    pool.now_s += 2 * HOUR_S
    pool.report("b", incarnation="2")
    pool.obey()
    assert cost(pool) == {"owner:owner-a": 2.0, "owner:owner-b": -2.0}


def test_an_attempt_that_fails_by_its_own_fault_is_charged() -> None:
    """A program that ends with an error costs what it held, and so does the next attempt."""
    pool = running("a")
    pool.now_s += HOUR_S
    pool.report("a", ObservedPart(job="j", attempt=1, state="failed", fault="own", detail="exit 1"))
    pool.obey()
    pool.wait(8.0)
    pool.obey()
    pool.obey()
    assert (pool.state("j"), pool.coordinator.state.jobs["j"].attempt) == ("running", 2)
    pool.now_s += HOUR_S
    pool.cancel("j")
    pool.obey()
    assert cost(pool)["job:j"] == -2.0


def test_an_eviction_is_paid_from_the_last_checkpoint_on() -> None:
    """The owner takes its chips back two hours after the start, an hour after a checkpoint: one hour was lost."""
    pool = running("a")
    pool.now_s += HOUR_S
    saved = PartEvent(rank=0, number=0, kind="saved", time_s=pool.now_s, step=1)
    pool.report("a", seen("j", 1, "running").model_copy(update={"events": (saved,)}))
    pool.now_s += HOUR_S
    pool.report("a", ObservedPart(job="j", attempt=1, state="failed", fault="evicted", detail="a local job"))
    pool.report("a", seen("j", 1, "released"))
    assert cost(pool) == {"job:j": -1.0, "owner:owner-a": 1.0}


def test_chips_that_a_preempted_job_lends_change_the_payer_at_the_release() -> None:
    """Up to its release the victim pays, then the job that took the chips, whenever the scheduler granted them."""
    pool = Driver("a", chips=1)
    pool.tell(TariffPublished(now_s=pool.now_s, by="root", tariff=tariff(chip_price("a", 1))))
    pool.submit("low", plan("a"), user="ann", preemptible=True, priority="low")
    pool.obey()
    pool.obey()
    pool.submit("high", plan("a"), user="bob", priority="high")
    pool.now_s += HOUR_S
    assert pool.preempt("high") == ("a/low",)
    pool.now_s += HOUR_S
    pool.clock_s, granted = 5e6, {"granted_at_s": 5e6 - HOUR_S}
    for _ in range(6):
        parts = [pool.done("a", order) for order in pool.coordinator.orders("a")]
        pool.report("a", *(one.model_copy(update=granted) if one.job == "high" else one for one in parts))
    assert pool.state("high") == "running"
    pool.now_s += HOUR_S
    pool.cancel("high")
    pool.obey()
    assert cost(pool) == {"job:low": -2.0, "job:high": -1.0, "owner:owner-a": 3.0}
    assert ("saving", 0.0) not in phases(pool)


def test_a_site_that_comes_back_with_its_part_is_paid_for_its_absence() -> None:
    """It was away for an hour, and still has what it held."""
    pool = running("a")
    pool.now_s += HOUR_S
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.now_s += HOUR_S
    assert cost(pool) == {"job:j": -1.0, "owner:owner-a": 1.0}
    pool.obey("a")
    assert cost(pool) == {"job:j": -2.0, "owner:owner-a": 2.0}


def test_a_site_that_stays_away_until_its_lease_has_ended_loses_the_attempt() -> None:
    """What it held before is credited back, what it held meanwhile was never charged."""
    pool = Driver("a", "b")
    pool.tell(TariffPublished(now_s=pool.now_s, by="root", tariff=tariff(chip_price("a", 1))))
    pool.run_lease_s = 60.0
    pool.report("a")
    pool.submit("j", plan("a"), user="ann")
    pool.obey()
    pool.obey()
    pool.now_s += HOUR_S
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.now_s += HOUR_S
    pool.tell(RunLeaseEnded(now_s=pool.now_s, cluster="a"))
    assert cost(pool) == {}
    assert [one.kind for one in pool.coordinator.state.meter.ledger.transactions if any(v for _, v in one.entries)] == [
        "usage",
        "lost",
    ]


@pytest.mark.parametrize(("saves", "due"), [(True, {"job:j": -1.0, "owner:owner-a": 1.0}), (False, {})])
def test_a_drained_site_pays_for_what_the_job_could_not_save(saves: bool, due: dict[str, float]) -> None:
    """With a verified checkpoint nothing is lost; by the deadline without one the attempt is."""
    pool = running("a")
    pool.now_s += HOUR_S
    deadline_s = pool.now_s + 60
    pool.tell(SiteDraining(now_s=pool.now_s, cluster="a", by="o", role="owner", deadline_s=deadline_s))
    if saves:
        pool.obey("a")
    else:
        pool.now_s = deadline_s
        pool.tell(DrainTimedOut(now_s=pool.now_s, cluster="a"))
    pool.obey("a")
    assert cost(pool) == due


def test_a_site_that_is_opened_again_ends_the_saving_of_its_jobs() -> None:
    """The job trains on, and no interval of its last phase is left."""
    pool = running("a")
    draining = SiteDraining(now_s=pool.now_s, cluster="a", by="o", role="owner", deadline_s=pool.now_s + 1e6)
    pool.tell(draining)
    pool.now_s += HOUR_S
    pool.tell(SiteCordoned(now_s=pool.now_s, cluster="a", by="o", role="owner", cordoned=False))
    pool.now_s += HOUR_S
    pool.cancel("j")
    assert phases(pool) == [("saving", 1.0), ("running", 1.0)]


def test_an_agent_proves_until_when_its_site_held_a_part_that_it_released_while_it_was_away() -> None:
    """Of two hours without contact it held the part for half an hour, by its own clock, which counts from anywhere."""
    pool = running("a")
    pool.now_s += HOUR_S
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.cancel("j")
    pool.now_s += 2 * HOUR_S
    assert cost(pool)["job:j"] == -1.0
    done = seen("j", 1, "released").model_copy(update={"released_at_s": 5e6 - 1.5 * HOUR_S})
    for incarnation in ("1", "1", "2"):
        pool.clock_s = 5e6
        pool.report("a", done, incarnation=incarnation)
        assert cost(pool) == {"job:j": -1.5, "owner:owner-a": 1.5}
        pool.now_s += HOUR_S


@pytest.mark.parametrize("released_ago_s", [None, -HOUR_S, 9 * HOUR_S])
def test_an_agent_that_proves_nothing_of_its_absence_is_paid_for_none_of_it(released_ago_s: float | None) -> None:
    """It does not know, its clock has begun again, or the part was released before."""
    pool = running("a")
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.cancel("j")
    pool.now_s += 2 * HOUR_S
    at_s = None if released_ago_s is None else 5e6 - released_ago_s
    pool.clock_s = 5e6
    pool.report("a", seen("j", 1, "released").model_copy(update={"released_at_s": at_s}))
    assert cost(pool) == {}


def test_a_part_that_fails_while_its_site_is_away_is_lost_by_its_owner() -> None:
    """Its workers have ended themselves, since they had no contact: the site says so when it is back."""
    pool = running("a")
    pool.now_s += HOUR_S
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    pool.now_s += HOUR_S
    pool.report("a", ObservedPart(job="j", attempt=1, state="failed", fault="own", detail="its lease ended"))
    pool.obey()
    assert cost(pool) == {}


def test_reserved_bandwidth_is_owed_to_the_pool_and_storage_to_the_owner() -> None:
    """0.7 Gbit/s of one direction at 0.50 and two terabytes at 0.01, for an hour."""
    pool = linked(1.0, "a", "b")
    given = tariff({"link": "a>b", "per_gbps_hour": "0.5"}, {"cluster": "a", "per_tb_hour": "0.01"})
    pool.tell(TariffPublished(now_s=pool.now_s, by="root", tariff=given))
    pool.submit("j", predicted(plan("a", "b"), gbps=0.7, num_bytes=2 * 10**12))
    pool.obey()
    pool.obey()
    pool.now_s += HOUR_S
    pool.cancel("j")
    pool.obey()
    assert cost(pool) == {"job:j": -0.37, "pool": 0.35, "owner:owner-a": 0.02}


def test_the_operator_alone_prices_links_and_only_those_of_the_pool() -> None:
    """An owner has no link, and the pool none from b to c."""
    pool = linked(1.0, "a", "b")
    for owner, link, text in (("owner-a", "a>b", "the operator sets its price"), ("", "b>c", "no link b>c")):
        given = tariff({"link": link, "per_gbps_hour": 1})
        event = TariffPublished(now_s=pool.now_s, by="x", owner=owner, tariff=given)
        with pytest.raises(FieldError, match=text):
            pool.tell(event)


def test_an_owner_prices_its_own_clusters_alone() -> None:
    """To an owner, clusters of others do not exist; unknown groups and a second currency are refused."""
    pool = Driver("a", "b")

    def publish(*prices: dict[str, object], owner: str = "owner-a", currency: str = "EUR") -> None:
        given = tariff(*prices, currency=currency)
        pool.tell(TariffPublished(now_s=pool.now_s, by="x", owner=owner, tariff=given))

    with pytest.raises(FieldError, match="no cluster 'b' of owner-a"):
        publish(chip_price("b", 1))
    with pytest.raises(FieldError, match="no node group 'h'"):
        publish(chip_price("a", 1) | {"node_group": "h"})
    publish(chip_price("a", 1))
    with pytest.raises(ConflictError, match="one currency"):
        publish(chip_price("b", 1), owner="owner-b", currency="USD")
    with pytest.raises(FieldError, match="overlaps a published price"):
        publish(chip_price("a", 2))
    with pytest.raises(FieldError, match="has passed"):
        publish(chip_price("a", 2, **{"from": "1970-01-01T00:01"}))
    assert [event.kind for event in pool.log].count("tariff-published") == 1


def test_a_deleted_job_keeps_its_cost_and_a_replay_finds_the_same_ledger() -> None:
    """To the byte, from nothing, and over a snapshot."""
    pool = running("a", "b")
    pool.now_s += 1.5 * HOUR_S
    pool.cancel("j")
    pool.obey()
    pool.tell(JobDeleted(now_s=pool.now_s, job_id="j"))
    assert "j" not in pool.coordinator.state.jobs
    assert cost(pool) == {"job:j": -3.0, "owner:owner-a": 1.5, "owner:owner-b": 1.5}
    meter = pool.coordinator.state.meter
    assert (meter.jobs, meter.ledger.balances["job:j"]) == ({}, -3 * UNIT)
    again = Coordinator.replay(pool.log)
    assert again.state.meter == meter
    assert restore_state(serialize_state(again.state)).meter == meter


def test_a_state_of_an_earlier_version_is_metered_from_now_on() -> None:
    """Its parts are observed with the next change; nothing before it is charged."""
    pool = running("a")
    pool.coordinator.state.meter.jobs = {}
    pool.now_s += HOUR_S
    pool.cancel("j")
    pool.now_s += HOUR_S
    pool.obey()
    assert cost(pool) == {"job:j": -1.0, "owner:owner-a": 1.0}
