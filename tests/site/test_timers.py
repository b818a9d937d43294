"""When a site must act next although nothing is observed: `next_due_s`, and which timers a restart sets anew."""

from __future__ import annotations

import math

import pytest

from isthmus.core.messages.agent_messages import AgentOrders, RankMap
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import ObservedWorker, OrdersReceived, WorkersObserved
from tests.site.driver import Site, local, stops
from tests.site.samples import INVENTORY, address, order
from tests.site.test_evictions import training

MAP = RankMap(workers=(address(0),))


def due_s(site: Site) -> float:
    """Return when the site must act next."""
    return site.machine.next_due_s


def running(site: Site) -> Site:
    """Let a/1 start one worker at 10 s."""
    site.now_s = 10.0
    site.obey(order("prepared"))
    site.obey(order("running"))
    return site


def test_an_idle_site_waits_for_no_time() -> None:
    """Neither does one whose local job runs."""
    site = Site()
    assert due_s(site) == math.inf
    site.local(local("x", 1))
    assert due_s(site) == math.inf


def test_a_lease_is_due_at_its_end_or_at_that_of_the_owners_hold() -> None:
    """The earlier of the two; an order renews the first only."""
    site = Site(OwnerPolicy(hold_s=50))
    site.now_s = 5.0
    site.obey(order("ready", lease_s=30))
    assert due_s(site) == 35
    site.now_s = 30.0
    site.obey(order("ready", lease_s=30))
    assert due_s(site) == 55
    site.obey(order("prepared", lease_s=30))
    assert due_s(site) == 55, "held since the claim"


def test_a_worker_is_due_to_check_in_and_then_to_write() -> None:
    """A worker that runs on without peers has no time at which it must write."""
    site = running(Site())
    assert due_s(site) == 130
    site.see("running", address=address())
    site.wait(0)
    assert due_s(site) == math.inf
    site.obey(order("running", ranks=MAP))
    assert due_s(site) == 7210
    site.now_s = 40.0
    site.see("running", address=address(), output_bytes=1)
    site.wait(0)
    assert due_s(site) == 7240


def test_the_worker_that_was_silent_longest_is_due_first() -> None:
    """Each has its own time; one that has ended has none."""
    site = Site()
    training(site, 2)
    site.now_s = 20.0
    site.see("running", 0, output_bytes=5)
    site.wait(0)
    assert due_s(site) == 7200
    site.wait(7180)
    assert (site.states, site.detail()) == ({"a/1": "failed"}, "rank 1 has written nothing for 7200 s")


def test_a_worker_that_has_ended_well_need_not_write_nor_check_in() -> None:
    """The part runs on with its other workers."""
    site = Site()
    site.obey(order("prepared", places=["east/h20"] * 2))
    site.obey(order("running", places=["east/h20"] * 2))
    site.see("exited", 0, exit_status=0)
    site.see("running", 1, address=address(1))
    site.wait(1000)
    assert site.states == {"a/1": "running"}


def test_the_end_of_the_run_lease_is_due() -> None:
    """For parts that were started with it."""
    machine = Site().machine
    orders = AgentOrders(parts=(order("prepared"),), run_lease_s=60)
    machine.handle(OrdersReceived(now_s=0, orders=orders))
    machine.handle(OrdersReceived(now_s=0, orders=orders.model_copy(update={"parts": (order("running"),)})))
    assert machine.next_due_s == 60
    worker = ObservedWorker(job="a", attempt=1, rank=0, state="running", address=address())
    machine.handle(WorkersObserved(now_s=1, workers=(worker,)))
    assert machine.next_due_s == 60


def test_stopped_workers_are_killed_after_the_grace_and_again_until_they_end() -> None:
    """A kill may be lost; each is repeated after the same time."""
    site = running(Site())
    site.see("running", address=address())
    site.obey(order("released"))
    assert due_s(site) == 13
    assert stops(site.wait(3)) == [(0, True)]
    assert due_s(site) == 16
    assert stops(site.wait(3)) == [(0, True)]
    site.see("exited", exit_status=137)
    site.wait(0)
    assert due_s(site) == math.inf


def test_a_preempted_local_job_has_the_owners_grace() -> None:
    """A withdrawn one has the agent's."""
    site = Site(OwnerPolicy(preemptible_from="low", grace_s=20))
    site.local(local("x", 3, "low"))
    site.obey(order("prepared", victims=({"job": "x", "attempt": 0},), lease_s=100))
    assert due_s(site) == 20
    other = Site(OwnerPolicy(grace_s=20))
    other.local(local("x", 3, "low"))
    other.local()
    assert due_s(other) == 3


def test_the_end_of_an_owners_patience_is_due() -> None:
    """An evicted part goes `protect_s` after it was asked to save."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site, 1)
    site.now_s = 7.0
    site.hours(False)
    assert due_s(site) == 37


def test_an_event_of_one_part_leaves_the_earlier_time_of_another() -> None:
    """Only what concerns one part is looked at."""
    site = Site()
    site.obey(order("prepared", "early", places=["east/l40s"], lease_s=5), order("prepared", lease_s=100))
    site.obey(order("prepared", "early", places=["east/l40s"], lease_s=5), order("running"))
    site.see("running", address=address())
    assert due_s(site) == 5


def restarted(site: Site, now_s: float, policy: OwnerPolicy | None = None) -> Site:
    """Return the site with a new agent process that has the previous one's table."""
    fresh = Site(policy)
    fresh.now_s = now_s
    parts = list(site.machine.parts.values())
    fresh.machine = SiteMachine("east", DeviceIdAllocator(INVENTORY), parts, policy=policy, now_s=now_s)
    return fresh


def test_after_a_restart_leases_and_holds_count_anew() -> None:
    """The clock of the previous process may have been another one."""
    policy = OwnerPolicy(hold_s=50)
    site = Site(policy)
    site.obey(order("prepared", lease_s=30))
    site = restarted(site, 1000.0, policy)
    site.wait(29)
    assert site.states == {"a/1": "prepared"}
    site.obey(order("prepared", lease_s=30))
    site.wait(20)
    assert site.states == {"a/1": "prepared"}
    site.wait(1)
    assert site.states == {"a/1": "released"}


def test_after_a_restart_workers_have_their_whole_time_to_check_in_and_to_write() -> None:
    """The silence before is not theirs."""
    site = restarted(running(Site()), 1000.0)
    site.wait(119)
    assert site.states == {"a/1": "running"}
    site.see("running", address=address())
    site.obey(order("running", ranks=MAP))
    site.now_s = 1000.0 + 7199
    site.wait(0)
    assert site.states == {"a/1": "running"}
    site.wait(1)
    assert site.states == {"a/1": "failed"}


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_restart_workers_of_a_part_that_ends_are_killed_at_once(*, fails: bool) -> None:
    """They have had their grace, or had it while no agent was there."""
    site = running(Site())
    site.see("running", address=address())
    if fails:
        site.see("absent")
    else:
        site.obey(order("released"))
    assert site.part().state == ("failed" if fails else "stopping")
    site = restarted(site, 1000.0)
    assert stops(site.wait(0)) == [(0, True)]


def test_after_a_restart_a_preempted_local_job_has_its_grace_again() -> None:
    """SIGTERM may not have been sent."""
    policy = OwnerPolicy(preemptible_from="low", grace_s=20)
    site = Site(policy)
    site.local(local("x", 3, "low"))
    site.obey(order("prepared", victims=({"job": "x", "attempt": 0},), lease_s=100))
    site = restarted(site, 1000.0, policy)
    assert stops(site.wait(0)) == [(0, False)]
    assert stops(site.wait(19)) == []
    assert stops(site.wait(1)) == [(0, True)]


def test_after_a_restart_an_evicted_part_is_asked_to_save_again_and_has_its_time() -> None:
    """The request may not have reached its workers."""
    policy = OwnerPolicy(protect_s=30)
    site = Site(policy)
    training(site, 1)
    site.hours(False)
    site = restarted(site, 1000.0, policy)
    site.hours(False)
    assert stops(site.wait(29)) == []
    assert stops(site.wait(1)) == [(0, False)]


def test_after_a_restart_parts_arrive_behind_those_of_the_table() -> None:
    """The order of arrival decides between the pool's and local jobs of one level."""
    site = Site()
    site.local(local("x", 1), local("y", 1))
    site = restarted(site, 1000.0)
    site.local(local("x", 1), local("y", 1), local("z", 1))
    assert site.part("z", 0).arrived == 3
