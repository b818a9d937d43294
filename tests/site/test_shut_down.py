"""Rules of an agent's end: what is released, what stays queued, and which reason is reported."""

from __future__ import annotations

from tests.site.driver import Site, local
from tests.site.samples import order
from tests.site.test_evictions import training

REASON = "the agent of east is being stopped"


def test_local_jobs_that_wait_stay_queued_and_all_else_is_released() -> None:
    """The next agent process starts the waiting local job; running and pool parts end with the reason."""
    site = Site()
    site.local(local("now"))
    site.local(local("now"), local("later"))
    site.obey(order("queued", "pool"))
    site.shut_down()
    found = {job: (part.state, part.detail) for (job, _), part in site.machine.parts.items()}
    assert found == {"now": ("stopping", REASON), "later": ("queued", ""), "pool": ("released", REASON)}


def test_a_part_that_has_ended_keeps_its_own_reason() -> None:
    """A part that failed or was refused before the agent stops says why, not that the agent stops."""
    site = Site()
    places = ("east/l40s",)
    site.obey(order("prepared", "works", places=places), order("prepared", "large", places=("east/h20",) * 4))
    site.obey(order("running", "works", places=places), order("prepared", "large", places=("east/h20",) * 4))
    site.see("exited", job="works", exit_status=3, log_tail="DataError: no text")
    before = {job: site.detail(job) for job in ("works", "large")}
    assert site.states == {"works/1": "failed", "large/1": "refused"}
    site.shut_down()
    assert {job: site.detail(job) for job in ("works", "large")} == before
    assert "no text" in before["works"]
    assert "devices wanted" in before["large"]


def test_a_local_job_that_waits_for_its_victim_is_queued_again() -> None:
    """The pool's part has not left its devices yet; the next agent process starts the local job."""
    site = Site()
    training(site, priority="low")
    site.local(local("high", 3, "high"))
    assert site.part("high", 0).state == "evicting"
    site.shut_down()
    assert (site.part("high", 0).state, site.part("high", 0).detail) == ("queued", "")
