"""Rules of parts that only decode: all start together, and a running job goes on without those that leave."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.control.state.events import AgentLost, RunLeaseEnded
from isthmus.core.job import PlacementConstraints
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.plan import Plan
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from tests.control.driver import Driver, seen
from tests.control.samples import plan

RL = RlConfig(max_prompt_tokens=4, max_response_tokens=4, reward={"exact": True})


def rl_plan() -> Plan:
    """a trains; b and c decode."""
    return plan("a").model_copy(update={"rollouts": tuple(RolloutPlace(cluster=one, node_group="g") for one in "bc")})


def running(least: int = 1, **more: Any) -> Driver:
    """A pool in which job `j` trains at a and decodes at b and c."""
    pool = Driver("a", "b", "c")
    placement = PlacementConstraints(train=("a",), rollouts=("b", "c"), least_rollouts=least)
    pool.submit("j", rl_plan(), task="rl", rl=RL, placement=placement, **more)
    assert {site: pool.orders(site) for site in "abc"} == {site: {("j", 1): "prepared"} for site in "abc"}
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool


@pytest.mark.parametrize("how", ["failed", "released"])
def test_a_job_goes_on_without_a_site_that_decoded(how: str) -> None:
    """Failed, or taken by its owner: its chips are released, no restart is used, and the job ends well without it."""
    pool = running(restarts=0)
    pool.report("c", seen("j", 1, how, "its owner took the chips"))
    assert pool.state("j") == "running"
    assert pool.orders("a") == pool.orders("b") == {("j", 1): "running"}
    assert pool.orders("c") == ({("j", 1): "released"} if how == "failed" else {})
    pool.obey("c")
    assert pool.coordinator.state.clusters["c"].free_by_group() == {"g": 4}
    told = [one.text for one in pool.coordinator.state.jobs["j"].history.entries if one.kind == "left"]
    assert len(told) == 1
    assert "its owner took the chips" in told[0]
    for site in "ab":
        pool.report(site, seen("j", 1, "succeeded"))
    pool.obey()
    assert pool.state("j") == "succeeded"


def test_the_least_that_decode_and_all_that_train_are_needed() -> None:
    """Without them the attempt ends and the job starts again, all or none."""
    pool = running(least=2)
    pool.report("c", seen("j", 1, "failed"))
    assert pool.state("j") == "stopping"
    pool = running()
    for site in "cb":
        pool.report(site, seen("j", 1, "failed"))
    assert pool.state("j") == "stopping"
    pool = running()
    pool.report("a", seen("j", 1, "failed"))
    assert {site: pool.orders(site) for site in "abc"} == {site: {("j", 1): "released"} for site in "abc"}


def test_a_site_that_is_lost_leaves_when_its_lease_ends() -> None:
    """Until then its workers may run; afterwards they have ended themselves."""
    pool = running()
    pool.tell(AgentLost(now_s=pool.now_s, cluster="b"))
    assert pool.state("j") == "running"
    pool.coordinator.state.clusters["b"].run_lease_s = 60.0
    pool.tell(RunLeaseEnded(now_s=pool.now_s, cluster="b"))
    assert pool.state("j") == "running"
    assert [part.cluster for part in pool.coordinator.state.jobs["j"].remaining_parts()] == ["a", "c"]


def ranks_known(pool: Driver) -> dict[int, int]:
    """Return the port of each rank in the rank map that sites are told."""
    (order,) = pool.coordinator.orders("a")
    assert order.rank_map is not None
    return {one.rank: one.port for one in order.rank_map.workers}


def settle(pool: Driver) -> None:
    """Let the sites obey until nothing changes, with time between."""
    for _ in range(4):
        pool.obey()
        pool.wait(2)


def test_a_site_that_left_joins_again_in_the_same_attempt() -> None:
    """Once its site has forgotten the part and has a chip: it is started, and the rank map has its new place."""
    pool = running(restarts=0)
    pool.report("c", seen("j", 1, "released", "its owner took the chips"), free=0)
    pool.wait(60)
    assert pool.orders("c") == {}
    pool.report("c", free=0)
    assert pool.orders("c") == {}
    pool.wait(60)
    pool.report("c", free=3)
    assert pool.orders("c") == {("j", 1): "prepared"}
    pool.obey("c")
    assert pool.orders("c") == {("j", 1): "running"}
    address = pool.done("c", pool.coordinator.orders("c")[0]).workers[0].model_copy(update={"port": 999})
    pool.report("c", seen("j", 1, "running").model_copy(update={"workers": (address,)}))
    assert ranks_known(pool)[2] == 999
    kinds = [one.kind for one in pool.coordinator.state.jobs["j"].history.entries]
    assert (kinds.count("left"), kinds.count("joined")) == (1, 1)
    for site in "abc":
        pool.report(site, seen("j", 1, "succeeded"))
    pool.obey()
    assert pool.state("j") == "succeeded"
    assert pool.coordinator.state.jobs["j"].attempt == 1


def test_a_site_that_fails_again_and_again_is_asked_ever_later() -> None:
    """The time between two orders doubles, and a part that is not prepared in time is given up."""
    pool = running()
    waits = []
    for _ in range(3):
        pool.report("c", seen("j", 1, "failed", "its worker crashed"))
        pool.obey("c")
        pool.report("c")
        since_s = pool.now_s
        while not pool.orders("c"):
            pool.wait(1)
        waits.append(pool.now_s - since_s)
        pool.obey("c")
        pool.obey("c")
    assert waits == [2, 4, 8]
    pool.report("c", seen("j", 1, "failed"))
    pool.obey("c")
    pool.report("c")
    pool.wait(8)
    assert pool.orders("c") == {("j", 1): "prepared"}
    pool.wait(11)
    assert pool.orders("c") == {("j", 1): "released"}
    assert pool.state("j") == "running"


def test_a_job_ends_without_a_part_that_is_about_to_join() -> None:
    """It is not waited for."""
    pool = running()
    pool.report("c", seen("j", 1, "released"))
    pool.wait(2)
    pool.report("c")
    assert pool.orders("c") == {("j", 1): "prepared"}
    for site in "ab":
        pool.report(site, seen("j", 1, "succeeded"))
    settle(pool)
    assert pool.state("j") == "succeeded"


def test_a_cluster_without_a_free_chip_joins_after_the_start() -> None:
    """The job starts without it, and other work there comes first."""
    pool = Driver("a", "b", "c")
    late = (RolloutPlace(cluster="b", node_group="g"), RolloutPlace(cluster="c", node_group="g", joins=True))
    pool.report("c", free=0)
    placement = PlacementConstraints(train=("a",), rollouts=("b", "c"))
    found = plan("a").model_copy(update={"rollouts": late})
    pool.submit("j", found, task="rl", rl=RL, placement=placement)
    for _ in range(2):
        pool.obey("a", "b")
    assert pool.state("j") == "running"
    assert sorted(ranks_known(pool)) == [0, 1]
    assert pool.orders("c") == {}
    pool.report("c", free=1)
    assert pool.orders("c") == {("j", 1): "prepared"}
    settle(pool)
    assert sorted(ranks_known(pool)) == [0, 1, 2]


def test_a_job_of_higher_priority_takes_the_part_that_decodes() -> None:
    """The other job trains on without a checkpoint, and its part joins again when the chips are free."""
    pool = running(preemptible=True, priority="low")
    pool.submit("h", plan(*"cccc"), priority="high")
    assert pool.preempt("h") == ("c/j",)
    settle(pool)
    assert (pool.state("j"), pool.state("h")) == ("running", "running")
    assert pool.coordinator.state.jobs["j"].attempt == 1
    assert not any(order.protect for order in pool.coordinator.orders("a"))
    assert pool.orders("c") == {("h", 1): "running"}
    pool.report("c", seen("h", 1, "succeeded"))
    settle(pool)
    assert pool.orders("c") == {("j", 1): "running"}
    assert pool.state("j") == "running"


def test_a_job_of_higher_priority_takes_all_where_too_few_would_be_left() -> None:
    """With `least_rollouts: 2` the attempt ends, after a checkpoint."""
    pool = running(2, preemptible=True, priority="low")
    pool.submit("h", plan(*"cccc"), priority="high")
    assert pool.preempt("h") == ("c/j",)
    pool.obey()
    assert any(order.protect for order in pool.coordinator.orders("a"))
    settle(pool)
    assert pool.state("h") == "running"
    assert pool.state("j") != "running"
