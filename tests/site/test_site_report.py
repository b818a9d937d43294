"""What a site reports to the server: its parts, its local jobs, its free devices."""

from __future__ import annotations

import pytest

from isthmus.core.messages.agent_messages import ObservedLocalJob, ObservedPart, VerifiedCheckpoint
from isthmus.core.messages.worker_folder import WorkerWait
from isthmus.core.owner.owner_policy import OwnerPolicy
from tests.site.driver import Site, local
from tests.site.samples import address, order


@pytest.fixture
def site() -> Site:
    """A site at which a/1 runs on two devices."""
    site = Site(OwnerPolicy(preemptible_from="middle"))
    site.obey(order("prepared", places=["east/h20"] * 2))
    site.obey(order("running", places=["east/h20"] * 2))
    return site


def test_a_part_is_reported_whole(site: Site) -> None:
    """Unsaved work is the largest of its ranks, in whole steps of 10 s; only addresses that are known are listed."""
    site.obey(order("running", places=["east/h20"] * 2, protect=True))
    site.see("running", 0, protection=VerifiedCheckpoint(step=4, num_bytes=5), unsaved_s=9.9)
    site.see("running", 1, protection=VerifiedCheckpoint(step=4, num_bytes=7), unsaved_s=29.9, address=address(1))
    assert site.machine.observed_parts() == (
        ObservedPart(
            job="a",
            attempt=1,
            state="running",
            workers=(address(1),),
            unsaved_s=20.0,
            protection=VerifiedCheckpoint(step=4, num_bytes=12),
        ),
    )


def test_a_part_is_reported_as_the_same_object_until_a_reported_figure_changes(site: Site) -> None:
    """So that an unchanged site sends nothing; unsaved work changes the report once per 10 s."""
    site.see("running", 0, unsaved_s=11)
    (before,) = site.machine.observed_parts()
    changes = site.machine.site.num_changes
    site.see("running", 0, unsaved_s=19)
    assert site.machine.observed_parts()[0] is before
    site.wait(1)
    assert site.machine.site.num_changes == changes, "nothing of it is sent at once"
    site.see("running", 0, unsaved_s=20)
    assert site.machine.observed_parts()[0].unsaved_s == 20


def test_the_wait_of_a_worker_that_has_ended_is_not_reported(site: Site) -> None:
    """The failure is."""
    site.see("running", 0, wait=WorkerWait(reason="waits for rank 1", since_s=20))
    site.see("exited", 0, exit_status=1)
    (seen,) = site.machine.observed_parts()
    assert (seen.waiting, seen.waiting_since_s, seen.fault) == ("", None, "own")


def test_local_jobs_are_reported_while_they_wait_or_run(site: Site) -> None:
    """With their devices, whether they run, whether the pool may preempt them, and what they would lose."""
    site.local(local("runs", 1, "low"))
    jobs = (local("runs", 1, "low"), local("waits", 2, "middle"), local("mine", 1, "high"))
    site.local(*jobs, local("firm", 1, "low", preemptible=False))
    site.see("running", 0, "runs", attempt=0, unsaved_s=39)
    assert {job.name: job for job in site.machine.local_jobs()} == {
        job.name: job
        for job in (
            ObservedLocalJob(name="runs", chips={"h20": 1}, level="low", running=True, preemptible=True, unsaved_s=30),
            ObservedLocalJob(name="waits", chips={"h20": 2}, level="middle", running=False, preemptible=True),
            ObservedLocalJob(name="mine", chips={"h20": 1}, level="high", running=False),
            ObservedLocalJob(name="firm", chips={"h20": 1}, level="low", running=False),
        )
    }
    site.see("exited", 0, "runs", attempt=0, exit_status=0)
    assert "runs" not in {job.name for job in site.machine.local_jobs()}


def test_free_devices_are_those_that_the_owner_still_lets_the_pool_have() -> None:
    """Less what local jobs queue for; outside the pool's hours there are none."""
    site = Site(OwnerPolicy(pool_chips={"h20": 2, "l40s": 1}))
    assert site.machine.free_chips() == {"h20": 2, "l40s": 1}
    site.obey(order("prepared", places=["east/h20"]))
    assert site.machine.free_chips() == {"h20": 1, "l40s": 1}
    site.local(local("x", 3))
    assert site.machine.free_chips() == {"h20": 0, "l40s": 1}
    site.local()
    assert site.machine.free_chips() == {"h20": 1, "l40s": 1}
    site.hours(False)
    assert site.machine.free_chips() == {"h20": 0, "l40s": 0}
