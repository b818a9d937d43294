"""The agent's decisions, with no process, file or clock: each test states a rule."""

from __future__ import annotations

import pytest

from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder, RankMap
from isthmus.core.messages.worker_folder import WorkerWait
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    LocalJob,
    ObservedWorker,
    OrdersReceived,
    RenewRunLease,
    StartWorker,
    WorkersObserved,
    WriteRankMap,
)
from isthmus.site.part_lifecycle import move_part
from tests.site.driver import Site, starts, stops
from tests.site.samples import INVENTORY, address, order


@pytest.fixture
def site() -> Site:
    return Site()


def running(site: Site, *places: str) -> Site:
    """Take part a/1 with a stage at each of `places` to running."""
    site.obey(order("prepared", places=places or ("east/h20", "west/h20")))
    site.obey(order("running", places=places or ("east/h20", "west/h20")))
    return site


def test_prepare_holds_one_card_for_each_stage_here_and_starts_nothing(site: Site) -> None:
    """`prepared` means that devices are held, and nothing else."""
    done = site.obey(order("prepared", places=("east/h20", "west/h20", "east/l40s", "east/h20")))
    assert done == []
    assert site.states == {"a/1": "prepared"}
    assert site.machine.free_chips() == {"h20": 1, "l40s": 1}
    held = {rank: worker.devices for rank, worker in site.machine.parts["a", 1].workers.items()}
    assert held == {0: ("h20/0/0",), 1: ("h20/0/1",), 2: ("l40s/0/0",)}


def test_what_does_not_fit_is_refused_by_name_and_holds_nothing(site: Site) -> None:
    """A refusal names the group, what was wanted and what is free; no device of another group is held."""
    site.obey(order("prepared", places=["east/h20"] * 2))
    more = order("prepared", job="b", places=("east/l40s", "east/h20", "east/h20"))
    site.obey(order("prepared", places=["east/h20"] * 2), more)
    assert site.states == {"a/1": "prepared", "b/1": "refused"}
    assert site.detail("b") == "east: node group 'h20': 2 devices wanted, 1 free"
    assert site.machine.free_chips() == {"h20": 1, "l40s": 2}


def test_a_refusal_stands_until_it_is_released(site: Site) -> None:
    """A refused part is not prepared later without a report: its other sites had orders to release."""
    site.obey(order("prepared", places=["east/h20"] * 4))
    site.obey(order("prepared", places=["east/h20"] * 4))
    assert site.states == {"a/1": "refused"}
    site.obey(order("released", places=["east/h20"] * 4))
    assert site.states == {"a/1": "released"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (order("prepared", places=("east/gpu",)), "no node group 'gpu'; available: h20, l40s"),
        (order("prepared", places=("west/h20",)), "no stage at east"),
        (PartOrder(job="a", attempt=1, desired="prepared"), "the order has no job or no plan"),
    ],
)
def test_an_order_that_makes_no_sense_here_is_refused_with_its_reason(site: Site, wrong: PartOrder, words: str) -> None:
    """Unknown group, another cluster's plan, no plan: refused in words, nothing held."""
    site.obey(wrong)
    assert site.states == {"a/1": "refused"}
    assert words in site.detail()
    assert site.machine.free_chips() == {"h20": 3, "l40s": 2}


def test_cards_of_released_parts_serve_the_same_orders(site: Site) -> None:
    """Of one set of orders those to release are executed first, at whichever position they are."""
    site.obey(order("prepared", job="old", places=["east/h20"] * 3))
    fresh = order("prepared", job="new", places=["east/h20"] * 3)
    site.obey(fresh, order("released", job="old"))
    assert site.states == {"old/1": "released", "new/1": "prepared"}


def test_commit_starts_each_worker_once_however_often_it_is_ordered(site: Site) -> None:
    """Orders are levels: repeating them does nothing."""
    site.obey(order("prepared", places=["east/h20"] * 2))
    assert starts(site.obey(order("running", places=["east/h20"] * 2))) == [0, 1]
    assert site.obey(order("running", places=["east/h20"] * 2)) == []
    assert site.obey(order("prepared", places=["east/h20"] * 2)) == [], "a late order takes nothing back"
    assert site.states == {"a/1": "running"}


def test_a_lease_that_is_not_renewed_ends(site: Site) -> None:
    """`prepared` holds devices for `lease_s` after the last order that renewed it, and no longer."""
    site.obey(order("prepared", lease_s=30))
    site.wait(29)
    site.obey(order("prepared", lease_s=30))
    site.wait(29)
    assert site.states == {"a/1": "prepared"}
    site.wait(1)
    assert site.states == {"a/1": "released"}
    assert "lease of 30 s" in site.detail()
    assert site.machine.free_chips() == {"h20": 3, "l40s": 2}


def test_a_part_whose_lease_ended_is_not_started_by_a_late_commit(site: Site) -> None:
    """All or none: a part that lost its devices does not run, and reports that."""
    site.obey(order("prepared", lease_s=1))
    site.wait(1)
    assert site.obey(order("running")) == []
    assert site.states == {"a/1": "released"}


def test_an_order_to_run_what_was_never_prepared_fails(site: Site) -> None:
    """An agent that lost its state does not start half a job: it says that nothing is held."""
    assert site.obey(order("running")) == []
    assert site.states == {"a/1": "failed"}
    assert "holds no devices here" in site.detail()


def test_a_part_reports_what_its_rank_waits_for(site: Site) -> None:
    """Of several waiting ranks the one that waits longest is reported; an ended wait is withdrawn."""
    running(site, "east/h20", "west/h20", "east/h20")
    site.see("running", 0, wait=WorkerWait(reason="waits for rank 2", since_s=20))
    site.see("running", 1, wait=WorkerWait(reason="waits for rank 0", since_s=10))
    (seen,) = site.machine.observed_parts()
    assert (seen.waiting, seen.waiting_since_s) == ("rank 1 waits for rank 0", 10)
    site.see("running", 1)
    site.see("running", 0)
    (seen,) = site.machine.observed_parts()
    assert (seen.waiting, seen.waiting_since_s) == ("", None)


def test_a_running_part_outlives_any_silence_of_the_server(site: Site) -> None:
    """A lease bounds `prepared` only: training goes on while the server is away."""
    running(site)
    site.see("running", address=address())
    assert site.wait(1e6) == []
    assert site.states == {"a/1": "running"}


def test_addresses_go_up_and_the_rank_map_comes_down_once(site: Site) -> None:
    """A worker's address is reported; the rank map is written when it comes, and again only if it differs."""
    running(site)
    site.see("running", address=address())
    assert site.machine.observed_parts()[0].workers == (address(),)
    ranks = RankMap(workers=(address(), address(1)))
    done = site.obey(order("running", ranks=ranks))
    assert [step.rank_map for step in done if isinstance(step, WriteRankMap)] == [ranks]
    assert site.obey(order("running", ranks=ranks)) == []


def test_a_worker_that_never_checks_in_fails_the_part(site: Site) -> None:
    """No address within the check-in time: failed, with the rank and the time, and stopped."""
    running(site)
    done = site.wait(120)
    assert site.states == {"a/1": "failed"}
    assert site.detail() == "rank 0 did not check in within 120 s"
    assert stops(done) == [(0, False)]


def test_a_worker_that_trains_and_writes_nothing_is_ended_after_two_hours(site: Site) -> None:
    """Every line it writes restarts the time; before it has its peers it is not expected to write."""
    running(site)
    site.see("running", address=address())
    site.wait(100)
    site.obey(order("running", ranks=RankMap(workers=(address(),))))
    site.see("running", output_bytes=10)
    site.wait(7000)
    site.see("running", output_bytes=20)
    site.wait(7199)
    assert site.states == {"a/1": "running"}
    done = site.wait(1)
    assert site.states == {"a/1": "failed"}
    assert site.detail() == "rank 0 has written nothing for 7200 s"
    assert stops(done) == [(0, False)]


def test_a_part_succeeds_when_all_its_workers_have(site: Site) -> None:
    """One worker of two is not enough; its devices stay held until the server releases the part."""
    running(site, "east/h20", "east/h20")
    site.see("exited", exit_status=0)
    assert site.states == {"a/1": "running"}
    site.see("exited", rank=1, exit_status=0)
    assert site.states == {"a/1": "succeeded"}
    assert site.machine.free_chips()["h20"] == 1
    site.obey(order("released"))
    assert site.states == {"a/1": "released"}
    assert site.machine.free_chips()["h20"] == 3


def test_one_dead_worker_fails_the_part_and_stops_the_others(site: Site) -> None:
    """The report of failure does not wait for the others to end; the release does."""
    running(site, "east/h20", "east/h20")
    done = site.see("exited", exit_status=137, log_tail="PeerError: rank 1 was lost")
    assert site.states == {"a/1": "failed"}
    assert site.detail() == "rank 0 was ended by signal 9: PeerError: rank 1 was lost"
    assert stops(done) == [(1, False)]
    site.obey(order("released"))
    assert site.states == {"a/1": "failed"}, "a process is left"
    site.see("exited", rank=1, exit_status=143)
    assert site.states == {"a/1": "released"}


@pytest.mark.parametrize(
    ("status", "fault"),
    [(2, "permanent"), (3, "permanent"), (7, "permanent"), (9, "peer"), (1, "own"), (137, "own")],
)
def test_the_exit_status_says_where_the_cause_lies(site: Site, status: int, fault: str) -> None:
    """Input, plan and version cannot mend themselves; who lost a peer is not the cause; the rest is here."""
    running(site)
    site.see("exited", exit_status=status)
    assert [part.fault for part in site.machine.observed_parts()] == [fault]


def test_of_two_failures_the_one_that_explains_more_is_told(site: Site) -> None:
    """A rank that lost its neighbour may be seen first; neither it nor a stopped worker hides the cause."""
    running(site, "east/h20", "east/h20", "east/h20")
    site.see("exited", exit_status=9, log_tail="PeerError: rank 1 was lost")
    site.see("exited", rank=1, exit_status=2, log_tail="DataError: no text")
    site.see("exited", rank=2, exit_status=143)
    (told,) = site.machine.observed_parts()
    assert (told.state, told.fault) == ("failed", "permanent")
    assert told.detail == "rank 1 ended with status 2: DataError: no text"


def test_a_worker_that_failed_before_it_was_stopped_says_so(site: Site) -> None:
    """Another site reported first and all is released: the cause, found here, goes with the release."""
    running(site)
    site.obey(order("released"))
    site.see("exited", exit_status=2, log_tail="DataError: no text")
    (told,) = site.machine.observed_parts()
    assert (told.state, told.fault) == ("released", "permanent")


def test_of_deaths_seen_in_one_look_the_cause_is_told(site: Site) -> None:
    """Who lost a peer is judged last, whatever the order of ranks."""
    running(site, "east/h20", "east/h20")
    deaths = [ObservedWorker(job="a", attempt=1, rank=r, state="exited", exit_status=s) for r, s in ((0, 9), (1, 137))]
    site.handle(WorkersObserved(now_s=site.now_s, workers=tuple(deaths)))
    assert site.detail() == "rank 1 was ended by signal 9"


def test_release_asks_and_then_insists(site: Site) -> None:
    """SIGTERM, after the grace SIGKILL, and `released` only once no process is left."""
    running(site)
    site.see("running", address=address())
    assert stops(site.obey(order("released"))) == [(0, False)]
    assert site.wait(2.9) == []
    assert stops(site.wait(0.2)) == [(0, True)]
    assert site.states == {"a/1": "running"}
    site.see("exited", exit_status=137)
    assert site.states == {"a/1": "released"}


def test_what_the_orders_no_longer_name_is_released_and_forgotten(site: Site) -> None:
    """A part that should not exist is stopped; its name goes once nothing of it is left."""
    running(site)
    assert stops(site.obey()) == [(0, False)]
    site.see("exited", exit_status=143)
    assert site.states == {"a/1": "released"}
    site.obey()
    assert site.states == {}


def test_release_of_what_is_not_known_is_confirmed(site: Site) -> None:
    """Silence proves nothing: the agent says `released` of a part that it has never had."""
    site.obey(order("released"))
    assert site.states == {"a/1": "released"}


def test_an_illegal_step_raises_with_the_story_of_the_part(site: Site) -> None:
    """The table is all there is: any other step is a bug, and shows how the part came there."""
    site.obey(order("prepared"))
    with pytest.raises(IllegalTransitionError, match="a/1 at east: new -> prepared -> succeeded"):
        move_part(site.machine.site, site.machine.parts["a", 1], "succeeded", 0.0)


def reborn(site: Site) -> Site:
    """The agent's next life, from the same table."""
    fresh = Site()
    fresh.machine = SiteMachine("east", DeviceIdAllocator(INVENTORY), site.machine.parts.values())
    return fresh


def test_after_a_restart_what_never_started_is_started_and_what_runs_is_kept(site: Site) -> None:
    """The script: 1. saved as running; 2. rank 0 started; 3. kill -9; 4. rank 1 is started, rank 0 is not."""
    site = reborn(running(site, "east/h20", "east/h20"))
    assert site.see("running") == []
    assert starts(site.see("absent", rank=1)) == [1]
    assert site.states == {"a/1": "running"}
    assert starts(site.see("absent", rank=1)) == [], "not a second time"
    assert site.states == {"a/1": "failed"}


def test_a_worker_that_cannot_be_started_fails_the_part_and_is_barred(site: Site) -> None:
    """Still absent after this life started it: failed, and stopped so that it never starts late."""
    running(site)
    done = site.see("absent")
    assert site.states == {"a/1": "failed"}
    assert (0, True) in stops(done)


def test_after_a_restart_a_stopped_worker_is_stopped_for_ever(site: Site) -> None:
    """The script: 1. saved as stopping; 2. kill -9 before the stop; 3. a late start must find a claim."""
    running(site).obey(order("released"))
    site = reborn(site)
    assert (0, True) in stops(site.see("absent"))
    assert site.states == {"a/1": "running"}, "not released while a start may still be under way"


def test_after_a_restart_the_rank_map_is_written_again(site: Site) -> None:
    """It may have been lost between the table and the folder; writing it again does no harm."""
    ranks = RankMap(workers=(address(),))
    running(site).obey(order("running", ranks=ranks))
    done = reborn(site).obey(order("running", ranks=ranks))
    assert [type(step) for step in done] == [WriteRankMap]


def test_shutdown_stops_and_releases_everything_and_takes_nothing_new(site: Site) -> None:
    """Ctrl-C leaves no worker and no held device; a part that comes meanwhile is refused with the reason."""
    running(site)
    held = order("prepared", job="b", places=("east/l40s",))
    site.obey(order("running"), held)
    assert stops(site.shut_down()) == [(0, False)]
    site.obey(order("running"), held, order("prepared", job="c"))
    site.see("exited", exit_status=143)
    assert site.states == {"a/1": "released", "b/1": "released", "c/1": "released"}
    assert all("being stopped" in site.detail(job) for job in "abc")
    assert site.machine.free_chips() == {"h20": 3, "l40s": 2}


def mine(name: str, chips: int, group: str = "h20") -> LocalJob:
    """A job of the site's own users."""
    return LocalJob(name=name, command=("true",), node_group=group, chips=chips)


def test_local_jobs_queue_in_order_and_are_nobody_elses_business(site: Site) -> None:
    """What fits starts; what does not waits, and holds back what is behind it in its group only."""
    jobs = (mine("one", 2), mine("two", 2), mine("three", 1), mine("four", 1, "l40s"))
    done = site.local(*jobs)
    assert [step.part.job for step in done if isinstance(step, StartWorker)] == ["one", "four"]
    assert site.states == {}, "not reported"
    assert site.machine.free_chips() == {"h20": 0, "l40s": 1}, "what is queued for is not offered"
    done = site.see("exited", job="one", attempt=0, exit_status=0)
    assert [step.part.job for step in done if isinstance(step, StartWorker)] == ["two", "three"]


def test_a_part_of_the_pool_does_not_overtake_the_sites_own_queue(site: Site) -> None:
    """A free device for which a local job waits is refused to the pool, with that reason."""
    site.local(mine("one", 2), mine("two", 2))
    site.obey(order("prepared"))
    assert site.detail() == "east: node group 'h20': 1 devices wanted, queued behind local job 'two'"


def test_a_withdrawn_local_job_is_stopped(site: Site) -> None:
    """A local job that should no longer exist ends, running or queued."""
    site.local(mine("one", 2), mine("two", 2))
    assert stops(site.local()) == [(0, False)]
    site.see("exited", job="one", attempt=0, exit_status=143)
    assert site.machine.parts == {}
    assert site.machine.free_chips()["h20"] == 3


def test_orders_say_nothing_about_local_jobs(site: Site) -> None:
    """The server neither starts nor ends what is the owner's own."""
    site.local(mine("one", 1))
    assert site.handle(OrdersReceived(now_s=0, orders=AgentOrders())) == []
    assert len(site.machine.parts) == 1


def leased(sent_s: float, *parts: PartOrder, now_s: float | None = None, lease_s: float = 60) -> OrdersReceived:
    """The answer, with a run lease, to a report that was sent at `sent_s`."""
    orders = AgentOrders(parts=parts, run_lease_s=lease_s)
    return OrdersReceived(now_s=sent_s if now_s is None else now_s, orders=orders, sent_s=sent_s)


def test_the_run_lease_counts_from_when_the_answered_report_was_sent(site: Site) -> None:
    """The server has heard from the site later than that, whatever the answer's delay; small gains write no file."""
    machine = site.machine
    assert machine.handle(leased(100, now_s=130)) == [RenewRunLease(lease_s=60, until_s=160)]
    assert machine.handle(leased(105)) == []
    assert machine.handle(leased(106)) == [RenewRunLease(lease_s=60, until_s=166)]
    assert machine.handle(leased(106, lease_s=30)) == [RenewRunLease(lease_s=30, until_s=136)]


def test_a_run_lease_that_other_machines_count_is_written_often() -> None:
    """Workers there begin once they have seen a renewal; a tenth of the lease would be a long wait."""
    machine = SiteMachine("east", DeviceIdAllocator({"h20": ("h20/0/0",)}), renewal_s=2)
    assert machine.handle(leased(100)) == [RenewRunLease(lease_s=60, until_s=160)]
    assert machine.handle(leased(101)) == []
    assert machine.handle(leased(102)) == [RenewRunLease(lease_s=60, until_s=162)]


def test_orders_that_arrive_after_their_lease_start_nothing(site: Site) -> None:
    """The server may have given the job to other sites meanwhile."""
    machine = site.machine
    machine.handle(leased(0, order("prepared")))
    told = machine.handle(leased(1, order("running"), now_s=61))
    assert not any(isinstance(one, StartWorker) for one in told)
    assert site.states == {"a/1": "released"}


def test_running_parts_fail_when_the_run_lease_ends_and_say_why(site: Site) -> None:
    """Only parts that were started with a lease; the report says whether all were."""
    machine = site.machine
    machine.handle(leased(0, order("prepared")))
    machine.handle(leased(1, order("running")))
    assert machine.run_lease_s() == 60
    machine.handle(WorkersObserved(now_s=59.9))
    assert site.states == {"a/1": "running"}
    machine.handle(WorkersObserved(now_s=60.0))
    assert site.states == {"a/1": "failed"}
    assert "no contact with the server for 60 s" in machine.parts["a", 1].detail


def test_a_part_from_before_the_lease_runs_without_and_is_reported_so(site: Site) -> None:
    """The server must not count it as ended."""
    machine = running(site).machine
    machine.handle(leased(0, order("running")))
    assert machine.run_lease_s() == 0
    machine.handle(WorkersObserved(now_s=1e6))
    assert site.states["a/1"] != "failed" or "contact" not in machine.parts["a", 1].detail
