"""Why a site refuses the pool devices, in words, and what counts against the owner's limit."""

from __future__ import annotations

import pytest

from isthmus.core.messages.agent_messages import PartOrder, Victim
from isthmus.core.owner.owner_policy import OwnerPolicy
from tests.site.driver import Site, local
from tests.site.samples import order


def wants(job: str, num: int, *victims: str, desired: str = "ready", **more: object) -> PartOrder:
    """An order for `num` devices of h20, with those of `victims`: local jobs, or parts of the pool as `b/1`."""
    named = [victim.partition("/") for victim in victims]
    given = tuple(Victim(job=name, attempt=int(attempt or 0)) for name, _, attempt in named)
    return order(desired, job, places=["east/h20"] * num, victims=given, **more)  # type: ignore[arg-type]


def test_a_local_victims_devices_count_against_the_owners_limit() -> None:
    """Only those of a part of the pool are the pool's already."""
    site = Site(OwnerPolicy(preemptible_from="low", pool_chips={"h20": 2}))
    site.local(local("x", 2, "low"))
    site.obey(wants("b", 1))
    site.obey(wants("b", 1), wants("a", 2, "x"))
    assert site.states == {"b/1": "ready", "a/1": "refused"}
    assert site.detail() == (
        "east: node group 'h20': 2 devices wanted, 0 free, 2 of victims, the owner lets the pool have 1 more"
    )
    site.obey(wants("b", 1), wants("c", 1, "x"))
    assert site.states["c/1"] == "ready"


def test_a_refusal_counts_what_victims_would_have_given() -> None:
    """A victim named twice, one that is gone, one without devices and the part itself give nothing more."""
    site = Site(OwnerPolicy(preemptible_from="low"))
    site.local(local("x", 1, "low"))
    site.obey(wants("b", 1, desired="queued"), wants("a", 4, "x", "x", "gone", "b/1", "a/1"))
    assert site.detail() == "east: node group 'h20': 4 devices wanted, the owner lets the pool have 3"
    site.obey(wants("held", 2, desired="prepared"), wants("c", 2, "x", "x", "gone"))
    assert site.detail("c") == "east: node group 'h20': 2 devices wanted, 0 free, 1 of victims"


def test_the_owners_limit_is_named_only_where_it_binds() -> None:
    """Otherwise there are too few devices, whatever the owner lets the pool have."""
    site = Site(OwnerPolicy(pool_chips={"h20": 2}))
    site.local(local("x", 3))
    site.obey(wants("a", 1))
    assert site.detail() == "east: node group 'h20': 1 devices wanted, 0 free"
    site = Site(OwnerPolicy(pool_chips={"h20": 2}))
    site.obey(wants("b", 2))
    site.obey(wants("b", 2), wants("a", 1))
    assert site.detail() == "east: node group 'h20': 1 devices wanted, 1 free, the owner lets the pool have 0 more"


def test_the_first_group_that_lacks_devices_is_named() -> None:
    """A group that has enough is passed over."""
    site = Site()
    site.obey(order("ready", "b", places=["east/l40s"] * 2))
    site.obey(
        order("ready", "b", places=["east/l40s"] * 2), order("ready", places=["east/h20", "east/l40s", "east/h20"])
    )
    assert site.detail() == "east: node group 'l40s': 1 devices wanted, 0 free"


@pytest.mark.parametrize(("level", "state"), [("high", "ready"), ("middle", "refused"), ("low", "refused")])
def test_a_queued_part_is_not_lifted_over_local_jobs_ahead_of_it(level: str, state: str) -> None:
    """Of its level the earlier arrival goes first; a part of a higher level goes before them."""
    site = Site()
    site.local(local("now", 2), local("first", 2))
    site.obey(wants("p", 1, desired="queued", priority=level))
    site.obey(wants("p", 1, priority=level))
    assert site.states == {"p/1": state}
    if state == "refused":
        assert site.detail("p") == "east: node group 'h20': 1 devices wanted, queued behind local job 'first'"


def test_a_queued_part_goes_before_local_jobs_that_came_later() -> None:
    """Within its level; a job in another node group is in no one's way."""
    site = Site()
    elsewhere = [type(local())(name=name, command=(), node_group="l40s", chips=2) for name in ("d", "e")]
    site.local(local("now", 2), *elsewhere)
    site.obey(wants("p", 1, desired="queued"))
    site.local(local("now", 2), *elsewhere, local("later", 2))
    site.obey(wants("p", 1))
    assert site.states == {"p/1": "ready"}


def test_a_part_that_was_never_queued_stands_behind_all_local_jobs_of_its_level() -> None:
    """And before those of a lower one."""
    site = Site()
    site.local(local("now", 2), local("first", 2, "low"), local("second", 2, "low"))
    site.obey(wants("low", 1, priority="low"), wants("middle", 1))
    assert site.states == {"low/1": "refused", "middle/1": "ready"}
    assert "queued behind local job 'first'" in site.detail("low")


def test_a_victim_that_the_owner_does_not_give_refuses_the_claim_though_another_would() -> None:
    """Each victim is judged; one that is gone, and a part of the pool, need no permission."""
    site = Site(OwnerPolicy(preemptible_from="low"))
    site.local(local("x", 1, "low"), local("y", 1))
    site.obey(wants("a", 1, "gone", "b/1", "x", "y"))
    assert site.detail() == "east: the owner does not let the pool preempt local job 'y'"
    site.obey(wants("a", 1, "gone", "b/1", "x", "y"), wants("c", 2, "gone", "b/1", "x"))
    assert site.states["c/1"] == "ready"
