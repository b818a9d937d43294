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
