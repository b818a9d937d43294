"""The site's own jobs: queued once, started in order, and reported to their user when they end."""

from __future__ import annotations

import pytest

from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.site.machine_events import LocalJobsObserved, LocalJobSubmitted, LocalJobWithdrawn, ReportLocalExit
from tests.site.driver import Site, local, started_jobs, stops
from tests.site.samples import order


@pytest.mark.parametrize(("seen", "told"), [(0, 0), (3, 3), (None, 1)])
def test_the_exit_status_of_a_local_job_is_reported_until_it_is_withdrawn(seen: int | None, told: int) -> None:
    """A status that is not known counts as a failure; a job that still runs, and one that is unknown, report none."""
    site = Site()
    site.local(local("x", 1), local("y", 1))
    assert site.local(local("x", 1), local("y", 1)) == []
    site.see("exited", 0, "x", attempt=0, exit_status=seen)
    if site.part("x", 0).live:
        site.see("exited", 0, "x", attempt=0, exit_status=seen)
    for _ in range(2):
        (report,) = site.local(local("x", 1), local("y", 1))
        assert report == ReportLocalExit(part=site.part("x", 0), exit_status=told)
    site.local(local("y", 1))
    assert list(site.machine.parts) == [("y", 0)]


def test_a_job_whose_file_cannot_be_read_now_goes_on() -> None:
    """A file that is being written is not a job that was withdrawn."""
    site = Site()
    site.local(local("x", 1), local("y", 1))
    done = site.handle(LocalJobsObserved(now_s=0, jobs=(), unreadable=("x",)))
    assert [step.part.job for step in done if hasattr(step, "part")] == ["y"]
    assert site.part("x", 0).state == "running"


def test_a_local_job_keeps_what_it_was_submitted_with() -> None:
    """Its command, level and consent; a second job of that name is not taken in, and the first keeps its place."""
    site = Site()
    site.handle(LocalJobSubmitted(now_s=0, job=local("x", 2, "low", preemptible=False)))
    site.handle(LocalJobSubmitted(now_s=0, job=local("x", 1, "high")))
    part = site.part("x", 0)
    assert (part.command, part.level, part.preemptible, part.wanted) == (("true",), "low", False, {"h20": 2})
    assert (part.arrived, site.machine.site.num_arrivals) == (1, 1)


def test_a_site_that_shuts_down_takes_in_no_local_job() -> None:
    """The next agent process finds it in the queue."""
    site = Site()
    site.shut_down()
    site.local(local("x", 1))
    assert site.machine.parts == {}


def test_the_withdrawal_of_an_unknown_job_changes_nothing() -> None:
    """Its user may withdraw it twice."""
    site = Site()
    site.local(local("x", 1))
    assert site.handle(LocalJobWithdrawn(now_s=0, name="y")) == []
    assert stops(site.handle(LocalJobWithdrawn(now_s=0, name="x"))) == [(0, False)]
    site.see("exited", 0, "x", attempt=0, exit_status=143)
    assert site.handle(LocalJobWithdrawn(now_s=0, name="x")) == []
    assert site.machine.parts == {}


def test_a_preempted_job_that_is_withdrawn_does_not_return_to_the_queue() -> None:
    """It ends, and its name is free."""
    site = Site(OwnerPolicy(preemptible_from="low"))
    site.local(local("x", 3, "low"))
    site.obey(order("prepared", places=["east/h20"], victims=({"job": "x", "attempt": 0},)))
    site.local()
    site.see("exited", 0, "x", attempt=0, exit_status=143)
    assert list(site.machine.parts) == [("a", 1)]


def test_a_job_that_does_not_fit_blocks_only_its_own_node_group() -> None:
    """Those behind it in the group wait although they would fit; another group starts its own."""
    site = Site()
    small = [local(name, 1) for name in ("b", "c")]
    elsewhere = [type(small[0])(name=name, command=(), node_group="l40s", chips=1) for name in ("d", "e", "f")]
    done = site.local(local("a", 2), local("large", 2), *small, *elsewhere)
    assert started_jobs(done) == ["a", "d", "e"]
    assert started_jobs(site.see("exited", 0, "d", attempt=0, exit_status=0)) == ["f"]


def test_a_part_ahead_reserves_what_it_wants_and_no_more() -> None:
    """Two free devices and a part that waits for one of them: a local job behind it gets the other."""
    site = Site(OwnerPolicy(hold_back_s=60, pool_chips={"h20": 2}))
    site.local(local("now", 1))
    site.obey(order("queued", "p", places=["east/h20"], priority="high"))
    assert started_jobs(site.local(local("now", 1), local("x", 1), local("y", 1))) == ["x"]
    assert started_jobs(site.wait(59)) == []
    assert started_jobs(site.wait(1)) == ["y"]


def test_no_device_is_reserved_for_a_part_beyond_the_owners_limit() -> None:
    """The part could not have it in any case."""
    site = Site(OwnerPolicy(hold_back_s=60, pool_chips={"h20": 1}))
    site.obey(order("prepared", "runs", places=["east/h20"]))
    site.obey(order("prepared", "runs", places=["east/h20"]), order("queued", "p", places=["east/h20"]))
    assert started_jobs(site.local(local("x", 2))) == ["x"]
