"""Devices of victims: claimed, taken, released; and the owner's final decision. Each test states a rule."""

from __future__ import annotations

import pytest

from isthmus.core.messages.agent_messages import PartOrder, RankMap, Victim
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.priority import PriorityMap
from tests.site.driver import Site, asked_to_save, local, started_jobs, stops
from tests.site.samples import address, order

WILLING = OwnerPolicy(preemptible_from="low", grace_s=20)
MAP = RankMap(workers=(address(0),))


def wants(desired: str, num: int = 3, *victims: str, job: str = "a", **more: object) -> PartOrder:
    """An order for `num` devices, those of `victims` included: local jobs `x`, parts of the pool `b/1`."""
    named = [victim.partition("/") for victim in victims]
    given = tuple(Victim(job=name, attempt=int(attempt or 0)) for name, _, attempt in named)
    return order(desired, job, places=["east/h20"] * num, victims=given, **more)  # type: ignore[arg-type]


def training(site: Site, num: int = 3, job: str = "a", **more: object) -> None:
    """Have part JOB/1 train on `num` devices."""
    site.obey(wants("prepared", num, job=job, **more))
    site.obey(wants("running", num, job=job, **more))
    site.obey(wants("running", num, job=job, ranks=MAP, **more))
    for rank in range(num):
        site.see("running", rank, job, address=address(rank))


def test_to_be_ready_evicts_nobody() -> None:
    """`ready` claims a victim's devices: it works on, and no other job gets them."""
    site = Site(WILLING)
    site.local(local("x", 3, "low"))
    assert site.obey(wants("ready", 3, "x")) == []
    assert site.states == {"a/1": "ready"}
    assert site.part("x", 0).state == "running"
    site.obey(wants("ready", 3, "x"), wants("ready", 1, job="b"))
    assert site.states["b/1"] == "refused"


def test_prepared_evicts_the_local_victims_and_waits_until_they_are_gone() -> None:
    """SIGTERM, the owner's grace, SIGKILL; only then is the part `prepared`, and the victim queued again."""
    site = Site(WILLING)
    site.local(local("x", 3, "low"))
    site.obey(wants("ready", 3, "x"))
    assert stops(site.obey(wants("prepared", 3, "x"))) == [(0, False)]
    assert site.states == {"a/1": "ready"}, "its cards are not free yet"
    assert stops(site.wait(19)) == []
    assert stops(site.wait(1)) == [(0, True)]
    site.see("exited", 0, "x", attempt=0, exit_status=137)
    assert site.states == {"a/1": "prepared"}
    assert site.part("x", 0).state == "queued"
    done = site.obey(wants("released", 3))
    assert started_jobs(done) == ["x"], "it starts again once the cards are back"
    assert site.part("x", 0).num_preemptions == 1, "in a folder of its own"


def test_a_claim_that_ends_leaves_its_victims_alone() -> None:
    """Another site was refused: the claim goes, and the victim never knew."""
    site = Site(WILLING)
    site.local(local("x", 3, "low"))
    site.obey(wants("ready", 3, "x"))
    assert site.obey(wants("released", 3)) == []
    assert site.part("x", 0).state == "running"
    assert site.states == {"a/1": "released"}


def test_a_dead_control_plane_leaves_no_claim_behind() -> None:
    """A claim, too, is let go at the end of its lease, before or after its victims went."""
    site = Site(WILLING)
    site.local(local("x", 3, "low"))
    site.obey(wants("ready", 3, "x", lease_s=5))
    site.wait(5)
    assert site.states == {"a/1": "released"}
    site.obey(wants("prepared", 3, "x", job="b", lease_s=5))
    site.see("exited", 0, "x", attempt=0, exit_status=143)
    assert site.states["b/1"] == "prepared"
    done = site.wait(5)
    assert site.states["b/1"] == "released"
    assert started_jobs(done) == ["x"], "the owner has its cards back"


def test_a_server_that_renews_for_ever_holds_no_longer_than_the_owner_allows() -> None:
    """`hold_s` counts from the claim, however often the lease is renewed."""
    site = Site(OwnerPolicy(hold_s=60))
    for _ in range(6):
        site.obey(wants("prepared", 1))
        site.wait(10)
    assert site.states == {"a/1": "released"}
    assert site.detail() == "held without running for 60 s, the longest that the owner allows"


@pytest.mark.parametrize(
    ("policy", "job", "priority", "words"),
    [
        (OwnerPolicy(), local("x", 3, "low"), "high", "does not let the pool preempt local job 'x'"),
        (WILLING, local("x", 3, "middle"), "high", "does not let the pool preempt local job 'x'"),
        (WILLING, local("x", 3, "low", preemptible=False), "high", "does not let the pool preempt"),
        (WILLING, local("x", 3, "low"), "low", "is not below 'low', the level of the pool's job"),
    ],
)
def test_the_owner_has_the_last_word_on_victims(policy: OwnerPolicy, job: object, priority: str, words: str) -> None:
    """Whatever the server orders: the level, the job's own word and the policy stand."""
    site = Site(policy)
    site.local(job)  # type: ignore[arg-type]
    assert site.obey(wants("prepared", 3, "x", priority=priority)) == []
    assert site.states == {"a/1": "refused"}
    assert words in site.detail()
    assert site.part("x", 0).state == "running"


def test_a_victim_of_the_pool_goes_by_its_own_orders() -> None:
    """The claim waits; no process of the victim is touched for it. After its release the claimant has its devices."""
    site = Site()
    training(site, 3, "b", priority="low")
    low = wants("running", 3, job="b", ranks=MAP, priority="low")
    assert site.obey(low, wants("ready", 3, "b/1", priority="high")) == []
    assert site.states == {"b/1": "running", "a/1": "ready"}
    assert site.obey(low, wants("prepared", 3, "b/1", priority="high")) == []
    assert site.states == {"b/1": "running", "a/1": "ready"}
    gone = wants("released", 3, job="b")
    assert stops(site.obey(gone, wants("prepared", 3, "b/1", priority="high"))) == [(r, False) for r in range(3)]
    for rank in range(3):
        site.see("exited", rank, "b", exit_status=143)
    assert site.states == {"b/1": "released", "a/1": "prepared"}


def test_free_cards_go_first_and_no_victim_more_than_needed() -> None:
    """Of two victims named the one suffices with what is free: the other works on."""
    site = Site(WILLING)
    site.local(local("x", 1, "low"), local("y", 1, "low"))
    assert [step for step, _ in stops(site.obey(wants("prepared", 2, "x", "y")))] == [0]
    assert {site.part("x", 0).state, site.part("y", 0).state} == {"running", "stopping"}


def test_the_pool_has_no_more_cards_than_the_owner_lets_it() -> None:
    """Claims count, too; the devices of a victim that is the pool's take no more room."""
    site = Site(OwnerPolicy(pool_chips={"h20": 2}))
    site.obey(wants("prepared", 3))
    assert site.detail() == "east: node group 'h20': 3 devices wanted, the owner lets the pool have 2"
    site.obey(wants("ready", 2, job="b"))
    assert site.machine.free_chips()["h20"] == 0
    site.obey(wants("ready", 2, job="b"), wants("prepared", 1, job="c"))
    assert "the owner lets the pool have 0 more" in site.detail("c")
    training(site := Site(OwnerPolicy(pool_chips={"h20": 2})), 2, "b")
    both = wants("running", 2, job="b", ranks=MAP)
    site.obey(both, wants("ready", 2, "b/1"))
    assert site.states["a/1"] == "ready"


def test_users_that_the_owner_does_not_know_are_refused() -> None:
    """Whether to queue, to claim or to hold."""
    site = Site(OwnerPolicy(users=("ann",)))
    for desired in ("queued", "ready", "prepared"):
        site.obey(wants(desired, 1, job=desired, user="eve"))
        assert site.states[f"{desired}/1"] == "refused"
        assert "not of 'eve'" in site.detail(desired)
    site.obey(wants("prepared", 1, user="ann"))
    assert site.states["a/1"] == "prepared"


def test_when_the_hours_end_jobs_that_train_save_and_go() -> None:
    """Parts that only hold devices are released at once; no new part is accepted until the hours begin again."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site, 1)
    running = wants("running", 1, ranks=MAP)
    site.obey(running, wants("prepared", 1, job="b"))
    assert asked_to_save(site.hours(False)) == [("a", 0)]
    assert site.states == {"a/1": "running", "b/1": "released"}
    assert site.machine.free_chips() == {"h20": 0, "l40s": 0}
    site.obey(running, wants("prepared", 1, job="c"))
    assert site.detail("c") == "east: the owner does not admit the pool's jobs at this hour"
    assert stops(site.saved(7)) == [(0, False)]
    site.see("exited", exit_status=143)
    assert (site.states["a/1"], site.part().fault) == ("released", "evicted")
    site.hours(True)
    site.obey(wants("prepared", 1, job="d"))
    assert site.states["d/1"] == "prepared"


def test_hours_that_begin_again_spare_who_is_still_saving() -> None:
    """The part trains on, and is not evicted after all."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site, 1)
    site.hours(False)
    site.hours(True)
    assert stops(site.wait(100)) == []
    assert site.states == {"a/1": "running"}


def urgent(chips: int = 3) -> Site:
    """A site on which a/1 trains on all three devices at level `low`."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site, 3, priority="low")
    site.local(local("x", chips, "high"))
    return site


def test_an_owners_urgent_job_takes_the_pools_cards_once_the_work_is_saved() -> None:
    """All ranks save after the same step; then SIGTERM; then the owner's job starts."""
    site = urgent()
    assert site.states == {"a/1": "running"}
    assert site.saved(7, 0) == []
    assert site.saved(7, 1) == []
    assert site.saved(6, 2) == [], "of another step: not one checkpoint"
    assert stops(site.saved(7, 2)) == [(0, False), (1, False), (2, False)]
    for rank in range(3):
        done = site.see("exited", rank, exit_status=143)
    assert started_jobs(done) == ["x"]
    assert (site.states, site.part().fault) == ({"a/1": "released"}, "evicted")
    assert site.detail() == "evicted by the owner: its devices go to local job 'x' of level 'high'"


def test_an_owner_waits_for_the_pools_checkpoint_only_so_long() -> None:
    """After `protect_s` the part goes, saved or not."""
    site = urgent()
    assert stops(site.wait(29)) == []
    assert len(stops(site.wait(1))) == 3


def test_an_urgent_job_that_is_withdrawn_spares_the_pool() -> None:
    """The part trains on."""
    site = urgent()
    site.local()
    assert stops(site.wait(100)) == []
    assert site.states == {"a/1": "running"}


def test_an_owners_job_evicts_nobody_of_its_level_or_above() -> None:
    """The map registered with the cluster says what the pool's priorities stand for there."""
    priorities = PriorityMap(levels=("root", "vip", "user", "guest"), high="vip", middle="user", low="guest")
    site = Site(priorities=priorities)
    training(site, 3, priority="high")
    assert asked_to_save(site.local(local("x", 3, "vip"))) == []
    assert asked_to_save(site.local(local("x", 3, "vip"), local("y", 3, "root"))) == [("a", 0)]
    assert (site.part("x", 0).state, site.part("y", 0).state) == ("queued", "evicting")


def test_an_owner_may_do_without_eviction() -> None:
    """Then its own jobs wait for the pool's to end."""
    site = Site(OwnerPolicy(local_evicts_pool=False))
    training(site, 3, priority="low")
    assert asked_to_save(site.local(local("x", 3, "high"))) == []
    assert site.part("x", 0).state == "queued"


def test_what_has_done_no_work_yet_goes_first_and_at_once() -> None:
    """Of a part that trains and one that is only prepared the owner's job takes the latter's devices."""
    site = Site(OwnerPolicy(protect_s=30))
    training(site, 2, priority="low")
    site.obey(wants("running", 2, ranks=MAP, priority="low"), wants("prepared", 1, job="b", priority="low"))
    done = site.local(local("x", 1, "high"))
    assert started_jobs(done) == ["x"]
    assert site.states == {"a/1": "running", "b/1": "released"}
    assert site.part("b").fault == "evicted"


def evicting(*parts: tuple[str, str, float], chips: int = 1) -> tuple[Site, list[str]]:
    """Have parts `(job, priority, unsaved work in s)` train on one device each; return whom a local job evicts."""
    site = Site(OwnerPolicy(protect_s=30))
    running: list[PartOrder] = []
    for job, priority, unsaved_s in parts:
        site.obey(*running, wants("prepared", 1, job=job, priority=priority))
        running.append(wants("running", 1, job=job, priority=priority, ranks=MAP))
        site.obey(*running)
        site.see("running", 0, job, address=address(), unsaved_s=unsaved_s)
    return site, [job for job, _ in asked_to_save(site.local(local("x", chips, "high")))]


def test_an_owners_job_evicts_the_lowest_level_first() -> None:
    """Whatever work that costs."""
    assert evicting(("a", "middle", 0), ("b", "low", 900), ("c", "middle", 0))[1] == ["b"]


def test_of_one_level_the_part_with_the_least_unsaved_work_is_evicted() -> None:
    """Where that is equal, the one that came last."""
    assert evicting(("a", "low", 50), ("b", "low", 20), ("c", "low", 90))[1] == ["b"]
    assert evicting(("a", "low", 20), ("b", "low", 20), ("c", "low", 20))[1] == ["c"]


def test_devices_that_are_about_to_be_free_are_taken_before_others_are_evicted() -> None:
    """Two devices: one of a part that is being stopped, one of the cheaper of the parts that train."""
    site, _ = evicting(("a", "low", 50), ("b", "low", 20), ("c", "middle", 0), chips=4)
    assert site.part("x", 0).state == "queued", "four devices are not there"
    parts = [wants("running", 1, job=job, priority=level, ranks=MAP) for job, level in (("a", "low"), ("b", "low"))]
    site.obey(*parts, wants("released", 1, job="c"))
    done = site.local(local("y", 2, "high"))
    assert asked_to_save(done) == [("b", 0)]
    assert site.part("y", 0).state == "evicting"


def test_an_owners_job_that_waits_for_devices_about_to_be_free_evicts_nobody() -> None:
    """They suffice."""
    site, _ = evicting(("a", "low", 0), ("b", "low", 0), ("c", "low", 0), chips=4)
    parts = [wants("running", 1, job=job, priority="low", ranks=MAP) for job in "ab"]
    site.obey(*parts, wants("released", 1, job="c"))
    assert asked_to_save(site.local(local("y", 1, "high"))) == []
    assert site.part("y", 0).state == "queued"


def test_a_part_that_does_not_train_yet_is_evicted_without_a_checkpoint() -> None:
    """It runs, but has no peers; neither is there one where the owner protects for no time."""
    site = Site(OwnerPolicy(protect_s=30))
    site.obey(wants("prepared", 3, priority="low"))
    site.obey(wants("running", 3, priority="low"))
    assert [force for _, force in stops(site.local(local("x", 3, "high")))] == [False] * 3
    assert site.detail() == "evicted by the owner: its devices go to local job 'x' of level 'high'"
    site = Site(OwnerPolicy(protect_s=0))
    training(site, 3, priority="low")
    done = site.local(local("x", 3, "high"))
    assert (asked_to_save(done), len(stops(done)), site.part().fault) == ([], 3, "evicted")


def test_an_eviction_is_told_once() -> None:
    """The hours end while the part saves for a local job: its first reason and its time stay."""
    site = urgent()
    site.wait(20)
    site.hours(False)
    assert "local job 'x'" in site.detail()
    assert len(stops(site.wait(10))) == 3


def test_what_a_preempted_job_is_told_names_the_pools_job() -> None:
    """Its user reads it at the site."""
    site = Site(WILLING)
    site.local(local("x", 3, "low"))
    site.obey(wants("prepared", 3, "x"))
    assert site.detail("x", 0) == "preempted by job 'a' of the pool"
