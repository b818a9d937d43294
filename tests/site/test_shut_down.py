"""Rules of an agent's end: what is released, what stays queued, and which reason is reported."""

from __future__ import annotations

from isthmus.core.owner.owner_policy import OwnerPolicy
from tests.site.driver import Site, asked_to_save, local, stops
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
    """A part that failed or was refused before the agent stops says why, and one that succeeded says nothing."""
    site = Site()
    site.obey(order("prepared", "done"))
    site.obey(order("running", "done"))
    site.see("exited", job="done", exit_status=0)
    site.shut_down()
    assert (site.states, site.detail("done")) == ({"done/1": "released"}, "")
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


def test_a_part_that_trains_saves_before_the_agent_stops() -> None:
    """Its checkpoint is requested, and it is stopped as evicted once all ranks have verified it: no restart is used."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site)
    assert asked_to_save(site.shut_down(saves_first=True)) == [("a", 0)]
    assert stops(site.wait(1)) == []
    assert site.saved(7, 0) == site.saved(7, 1) == []
    assert stops(site.saved(7, 2)) == [(0, False), (1, False), (2, False)]
    for rank in range(3):
        site.see("exited", rank, exit_status=143)
    assert (site.states, site.part().fault) == ({"a/1": "released"}, "evicted")
    assert site.detail() == f"evicted by the owner: {REASON}"


def test_a_checkpoint_is_awaited_only_as_long_as_the_owner_protects() -> None:
    """After `protect_s` the workers are stopped, saved or not; a part that only holds devices goes at once."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site, 2)
    site.obey(order("prepared", "b", places=("east/l40s",)), order("running", "a", places=("east/h20",) * 2))
    site.shut_down(saves_first=True)
    assert site.states["b/1"] == "released"
    assert stops(site.wait(29)) == []
    assert len(stops(site.wait(1))) == 2


def test_a_second_request_ends_the_wait() -> None:
    """The workers are stopped at once; the reason is that the agent stops."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site)
    site.shut_down(saves_first=True)
    assert len(stops(site.shut_down())) == 3
