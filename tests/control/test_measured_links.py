"""Rules of measured links: which pairs have one, whose claims count, and that the planner gets them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from isthmus.control.queries.sites.measured_links import measured_links
from isthmus.control.queries.sites.part_links import part_links
from isthmus.control.queries.sites.plan_switches import plan_switches
from isthmus.control.service.planner_queue import assemble_pool
from isthmus.control.state.events import PoolSet
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.messages.agent_messages import PeerCheck
from isthmus.core.pool import Aggregators, Link, Pool
from isthmus.core.pool_resource import PoolResource
from tests.control.driver import Driver
from tests.control.samples import cluster
from tests.control.serving import job
from tests.control.test_reachability import Sites
from tests.site.samples import plan as make_plan

HONEST = (0.02, 2.0)


class MeasuringSites(Sites):
    """Sites whose agents claim a round trip and a rate towards each other; None: not measured."""

    def __init__(self, *names: str, **claims: tuple[float, float] | None) -> None:
        self.claims = claims
        super().__init__(*names)
        self.check()
        self.check()

    def report(self, name: str, **changes: object) -> None:
        self.checks[name] = tuple(self._claim(name, one) for one in self.checks.get(name, ()))
        super().report(name, **changes)

    def _claim(self, name: str, check: PeerCheck) -> PeerCheck:
        round_trip_s, gbps = self.claims.get(f"{name}_{check.cluster}", HONEST) or (None, None)
        return check.model_copy(update={"round_trip_s": round_trip_s, "gbps": gbps})

    def links(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return rate and delay of each link, by its ends."""
        found = measured_links(self.coordinator.state, self.clusters)
        return {(one.source, one.target): (one.bandwidth_gbps, one.delay_ms) for one in found}


def test_two_sites_that_have_measured_each_other_have_a_link_both_ways() -> None:
    """Half a round trip is the delay, and the link is no reserved one."""
    pool = MeasuringSites("a", "b")
    assert pool.links() == {("a", "b"): (2.0, 10.0), ("b", "a"): (2.0, 10.0)}
    (one, _) = pool.coordinator.pool_view().measured
    assert (one.link_class, pool.coordinator.pool_view().links) == ("best-effort", ())


def test_pairs_of_sites_that_have_measured_nothing_cost_nothing() -> None:
    """Each planner request asks for the links of all sites: 200 of them are looked up once each, not in pairs."""

    class Counting(dict[str, ClusterRecord]):
        lookups = 0

        def get(self, *key: Any) -> Any:
            self.lookups += 1
            return super().get(*key)

    pool = MeasuringSites("a", "b")
    state = pool.coordinator.state
    lonely = {f"s{number}": Driver(f"s{number}").coordinator.state.clusters[f"s{number}"] for number in range(200)}
    clusters = Counting(state.clusters | lonely)
    state.clusters = clusters
    assert [(one.source, one.target) for one in measured_links(state, clusters)] == [("a", "b"), ("b", "a")]
    assert clusters.lookups <= 210


def test_a_site_gets_the_links_of_its_part_as_the_server_knows_them() -> None:
    """The operator's link where there is one, else the measured ones; none of sites beyond the plan."""
    pool = MeasuringSites("a", "b", "c")
    operators = Link.model_validate({"from": "a", "to": "b", "bandwidth_gbps": 40, "delay_ms": 1, "class": "reserved"})
    pool.coordinator.state.links[PoolResource.link("a", "b")] = operators
    plan = make_plan(("a/h20", "b/h20"))
    found = {(one.source, one.target): one.bandwidth_gbps for one in part_links(pool.coordinator.state, plan, "b")}
    assert found["a", "b"] == 40
    assert {name for pair in found for name in pair} == {"a", "b"}
    assert part_links(pool.coordinator.state, make_plan(("a/h20",)), "a") == ()


def test_a_site_gets_the_switches_of_the_plan_for_a_job_that_sums_by_them() -> None:
    """Those of the plan's clusters that have addresses, whichever of its sites declares them."""
    pool = MeasuringSites("a", "b", "c")
    switches = {name: Aggregators(kind="switch", addresses=(f"10.0.0.{number}:1",)) for number, name in enumerate("bc")}
    for name, one in switches.items():
        record = pool.coordinator.state.clusters[name]
        record.cluster = record.cluster.model_copy(update={"aggregators": (one, Aggregators(kind="server"))})
    plan, state = make_plan(("a/h20", "b/h20")), pool.coordinator.state
    asking = job(runtime={"synchronisation": "passing"})
    assert plan_switches(state, plan, asking) == (switches["b"],)
    assert plan_switches(state, plan, job()) == plan_switches(state, None, asking) == ()


@pytest.mark.attack
def test_no_owner_makes_a_link_better_than_the_other_end_saw_it() -> None:
    """Of two rates the lower one counts, of two round trips the longer one."""
    pool = MeasuringSites("a", "b", a_b=(0.0001, 900.0))
    assert pool.links() == {("a", "b"): (2.0, 10.0), ("b", "a"): (2.0, 10.0)}


@pytest.mark.attack
def test_a_claim_touches_links_of_its_own_site_only() -> None:
    """A site that calls all its links slow leaves those between others as they are."""
    pool = MeasuringSites("a", "b", "c", a_b=(9.0, 1e-6), a_c=(9.0, 1e-6))
    assert pool.links()["b", "c"] == pool.links()["c", "b"] == (2.0, 10.0)
    assert pool.links()["a", "b"] == (1e-6, 4500.0)


@pytest.mark.attack
def test_claims_that_nobody_asked_for_change_nothing() -> None:
    """An answer counts for the order of its number, so a site cannot report for a pair, or again."""
    pool = MeasuringSites("a", "b", "c")
    before = pool.links()
    pool.checks["a"] = (
        PeerCheck(cluster="b", number=999, reached=True), PeerCheck(cluster="zz", number=1, reached=True)
    )  # fmt: skip
    pool.claims = {"a_b": (10.0, 1e-9), "a_zz": (10.0, 1e-9)}
    pool.report("a")
    assert pool.links() == before


@pytest.mark.attack
@pytest.mark.parametrize("claim", [{"gbps": 0}, {"gbps": 1e6}, {"gbps": "nan"}, {"round_trip_s": -1}, {"gbps": "inf"}])
def test_claims_beyond_the_bounds_are_no_report(claim: dict[str, object]) -> None:
    """They end at the edge."""
    with pytest.raises(ValidationError):
        PeerCheck.model_validate({"cluster": "b", "number": 1, "reached": True} | claim)


def test_one_end_without_a_measurement_is_no_link() -> None:
    """An agent of an older release measures nothing, and a link that is closed one way is none."""
    assert MeasuringSites("a", "b", a_b=None).links() == {}
    closed = MeasuringSites("a", "b")
    closed.closed["b", "a"] = "timed out"
    closed.join("b", incarnation="2")
    closed.check()
    assert closed.links() == {}


def test_the_operators_link_counts_in_place_of_what_was_measured() -> None:
    """In both directions of the pair, also if the file names one."""
    pool = MeasuringSites("a", "b", "c")
    stated = Link.model_validate({"from": "a", "to": "b", "bandwidth_gbps": 100, "delay_ms": 1})
    pool.tell(PoolSet(now_s=pool.now_s, links=(stated,), objective="arrival", patience_s=60.0))
    assert set(pool.links()) == {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}


def test_the_planner_gets_the_links_of_the_clusters_that_it_plans_for() -> None:
    """With its request; they stand beside those of the operator's file."""
    pool = MeasuringSites("a", "b")
    pool.submit("j")
    request = pool.asked["j"]
    assert {(one.source, one.target) for one in request.links} == {("a", "b"), ("b", "a")}
    clusters = tuple(cluster(name, 4) for name in "abc")
    stated = Link.model_validate({"from": "b", "to": "a", "bandwidth_gbps": 7, "delay_ms": 1})
    assert assemble_pool(clusters, None, request.links).links == request.links
    assert assemble_pool(clusters, Pool(clusters=clusters, links=(stated,)), request.links).links == (stated,)
