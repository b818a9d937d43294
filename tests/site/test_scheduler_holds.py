"""Sites whose scheduler owns the cards: parts start on what it has granted, and nothing is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.agent.adapters.scheduler_adapter import ForeignJob, Hold, HoldRequest, SchedulerLook
from isthmus.agent.service.scheduler_calls import SchedulerCalls
from isthmus.agent.service.site_holds import SiteHolds, foreign_part
from isthmus.core.errors import PeerError
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.site import (
    DeviceIdAllocator,
    ForeignPart,
    HoldObserved,
    InventoryObserved,
    ObservedWorker,
    OrdersReceived,
    ProbeObserved,
    ShutdownRequested,
    SiteMachine,
    SitePart,
    StartWorker,
    StopWorker,
    WorkersObserved,
)
from isthmus.site.machine import CHECKIN_TIMEOUT_S
from isthmus.site.site_invariants import check_site
from isthmus.site.site_report import observe_part
from isthmus.site.site_state import VERDICT_S
from tests.site.samples import INVENTORY, order

PLACES = ("east/h20",)
KEY = ("a", 1)


class Scheduled:
    """A site machine that asks for holds, and the events of its scheduler."""

    def __init__(self, *, asks_for_probes: bool = False, parts: tuple[SitePart, ...] | None = None) -> None:
        restarted, none = parts is not None, dict.fromkeys(INVENTORY, ())
        self.machine = SiteMachine(
            "east", DeviceIdAllocator(none if restarted else INVENTORY), parts or (), asks_for_holds=True,
            asks_for_probes=asks_for_probes, knows_inventory=not restarted,
            policy=OwnerPolicy(preemptible_from="middle"),
        )  # fmt: skip
        self.now_s = 0.0

    @property
    def part(self) -> SitePart:
        return self.machine.parts[KEY]

    def obey(self, *parts: PartOrder) -> None:
        self.machine.handle(OrdersReceived(now_s=self.now_s, orders=AgentOrders(parts=parts)))
        check_site(self.machine)

    def answer(self, state: str, number: int = 1, card: str = "h20/0/2") -> None:
        devices = ((card,),) if state == "granted" else ()
        seen = HoldObserved(now_s=self.now_s, part=KEY, number=number, state=state, devices=devices)  # type: ignore[arg-type]
        self.machine.handle(seen)
        check_site(self.machine)

    def probed(self, *preempted: str, victims: tuple[str, ...] = ("slurm-7",)) -> None:
        keys = tuple((name, 0) for name in victims)
        self.machine.handle(ProbeObserved(now_s=self.now_s, part=KEY, victims=keys, preempted=preempted))
        check_site(self.machine)

    def look(self, *foreign: ForeignPart, devices: dict[str, tuple[str, ...]] | None = None) -> None:
        self.machine.handle(InventoryObserved(now_s=self.now_s, devices=devices or INVENTORY, foreign=foreign))
        check_site(self.machine)


@pytest.fixture
def site() -> Scheduled:
    return Scheduled()


def others(*cards: str, preemptible: bool = True) -> ForeignPart:
    return ForeignPart(name="slurm-7", devices={"h20": cards}, level="middle", preemptible=preemptible)


def test_free_cards_are_held_before_a_part_is_ready(site: Scheduled) -> None:
    """Until the scheduler has granted them the part waits, and no other site evicts for it."""
    site.obey(order("ready", places=PLACES))
    assert (site.part.state, site.part.hold, site.part.commits) == ("queued", "asked", False)
    site.answer("waiting")
    site.obey(order("ready", places=PLACES))
    assert site.part.state == "queued"
    site.answer("granted")
    site.obey(order("ready", places=PLACES))
    assert site.part.state == "ready"
    assert site.part.workers[0].devices == ("h20/0/2",), "the cards that the scheduler named"
    site.obey(order("prepared", places=PLACES))
    assert (site.part.state, site.part.commits) == ("prepared", True)
    site.obey(order("running", places=PLACES))
    assert site.part.workers[0].devices == ("h20/0/2",)


@pytest.mark.parametrize("desired", ["queued", "ready", "prepared"])
def test_nothing_is_refused_before_the_first_look(desired: str) -> None:
    """1. The agent starts; its scheduler has not answered yet. 2. An order comes. 3. The first look: it is obeyed."""
    site = Scheduled(parts=())
    wanted = order(desired, places=PLACES)  # type: ignore[arg-type]
    site.obey(wanted)
    assert KEY not in site.machine.parts
    site.look()
    site.obey(wanted)
    assert site.machine.parts[KEY].state in ("queued", "evicting")


def test_a_queued_part_outlives_an_order_before_the_first_look(site: Scheduled) -> None:
    """A restart of the agent refuses no part that waits for its cards."""
    site.obey(order("ready", places=PLACES))
    again = Scheduled(parts=(site.machine.parts[KEY],))
    again.obey(order("ready", places=PLACES))
    assert again.machine.parts[KEY].state == "queued"
    again.look()
    again.obey(order("ready", places=PLACES))
    again.answer("granted", again.machine.parts[KEY].num_holds)
    again.obey(order("ready", places=PLACES))
    assert again.machine.parts[KEY].state == "ready"


def test_prepared_waits_for_the_hold(site: Scheduled) -> None:
    """An order that skips `ready` asks and waits; the answer of an earlier hold counts for nothing."""
    site.obey(order("prepared", places=PLACES))
    assert (site.part.state, site.part.hold) == ("evicting", "asked")
    site.answer("granted", number=0)
    assert site.part.state == "evicting"
    assert observe_part(site.part).ungranted, "the server is told that the part holds nothing yet"
    site.answer("granted")
    assert (site.part.state, site.part.workers[0].devices) == ("prepared", ("h20/0/2",))
    assert not observe_part(site.part).ungranted


def test_a_part_that_is_given_up_wants_no_hold(site: Scheduled) -> None:
    """Released, refused and back in the queue: nothing is asked for; the next claim is another hold."""
    site.obey(order("ready", places=PLACES))
    site.obey(order("queued", places=PLACES))
    assert (site.part.state, site.part.hold) == ("queued", "")
    site.obey(order("ready", places=PLACES))
    assert (site.part.hold, site.part.num_holds) == ("asked", 2)
    site.answer("granted", number=1)
    assert site.part.hold == "asked", "a late answer to the first hold grants nothing"
    site.obey(order("released", places=PLACES))
    assert (site.part.state, site.part.hold) == ("released", "")


def test_a_hold_that_ends_ends_the_claim(site: Scheduled) -> None:
    """The scheduler takes cards back from a part that does not run yet: it is refused or released, with the reason."""
    site.obey(order("prepared", places=PLACES))
    site.answer("ended")
    assert site.part.state == "refused"
    assert "ended the hold" in site.part.detail


def test_a_hold_that_ends_releases_a_part_that_has_its_cards(site: Scheduled) -> None:
    """The part was prepared and has started nothing yet."""
    site.obey(order("prepared", places=PLACES))
    site.answer("granted")
    assert site.part.state == "prepared"
    site.answer("ended")
    assert (site.part.state, site.part.live) == ("released", False)
    assert "ended the hold" in site.part.detail


def test_a_hold_that_ends_leaves_running_workers_to_their_observation(site: Scheduled) -> None:
    """Whether a worker still runs is seen at the worker, not guessed from the hold."""
    site.obey(order("prepared", places=PLACES))
    site.answer("granted")
    site.obey(order("running", places=PLACES))
    site.answer("ended")
    assert (site.part.state, site.part.live, site.part.hold) == ("running", True, "")


def test_a_lease_that_ends_drops_the_hold(site: Scheduled) -> None:
    """Without the server nobody's cards stay held."""
    site.obey(order("prepared", places=PLACES, lease_s=30))
    site.answer("granted")
    site.now_s = 31.0
    site.machine.handle(WorkersObserved(now_s=site.now_s))
    assert (site.part.state, site.part.hold) == ("released", "")


def test_cards_of_others_are_not_free(site: Scheduled) -> None:
    """A job of the site's users has its cards until the scheduler says that it is gone."""
    site.look(others("h20/0/0", "h20/0/1"))
    assert site.machine.free_chips()["h20"] == 1
    assert [job.name for job in site.machine.local_jobs()] == ["slurm-7"]
    site.look(others("h20/0/0"))
    assert site.machine.free_chips()["h20"] == 2
    site.look()
    assert site.machine.free_chips()["h20"] == 3
    assert not site.machine.parts


def test_victims_of_others_are_preempted_by_the_commit_alone(site: Scheduled) -> None:
    """The claim disturbs nobody; the hold that may preempt is asked for when the part is to be prepared."""
    site.look(others("h20/0/0", "h20/0/1", "h20/0/2"))
    victims = ({"job": "slurm-7", "attempt": 0},)
    site.obey(order("ready", places=PLACES, victims=victims, priority="high"))
    assert (site.part.state, site.part.hold) == ("ready", "")
    site.obey(order("prepared", places=PLACES, victims=victims, priority="high"))
    assert (site.part.state, site.part.hold, site.part.commits) == ("evicting", "asked", True)
    site.answer("granted", card="h20/0/1")
    assert site.part.state == "evicting", "the job of others is still seen on the card"
    site.look(others("h20/0/0"))
    assert (site.part.state, site.part.workers[0].devices) == ("prepared", ("h20/0/1",))


def test_the_inventory_may_change_under_a_running_part(site: Scheduled) -> None:
    """A card that is gone is given to nobody; what runs on it goes on and ends as usual."""
    site.obey(order("prepared", places=PLACES))
    site.answer("granted")
    site.obey(order("running", places=PLACES))
    fewer = INVENTORY | {"h20": ("h20/0/0",)}
    site.machine.handle(InventoryObserved(now_s=0.0, devices=fewer))
    assert (site.part.state, site.machine.free_chips()["h20"]) == ("running", 1)
    site.obey(order("released", places=PLACES))
    assert site.machine.free_chips()["h20"] == 1


@pytest.fixture
def probing() -> Scheduled:
    """A site whose cards users' jobs 7 and 8 have; job a is to preempt the first of them."""
    site = Scheduled(asks_for_probes=True)
    site.look(others(*INVENTORY["h20"][:2]), ForeignPart(name="slurm-8", devices={"h20": INVENTORY["h20"][2:]},
                                                         level="middle", preemptible=True))  # fmt: skip
    return site


def wanted(*victims: str, desired: str = "ready") -> PartOrder:
    named = tuple({"job": name, "attempt": 0} for name in victims)
    return order(desired, places=PLACES, victims=named, priority="high")


def test_victims_are_claimed_once_the_scheduler_agrees(probing: Scheduled) -> None:
    """Until it has said that it would preempt these and no other the part waits; then nothing is asked again."""
    probing.obey(wanted("slurm-7"))
    assert (probing.part.state, probing.part.probe, probing.part.hold) == ("queued", "asked", "")
    probing.probed("slurm-7")
    probing.obey(wanted("slurm-7"))
    assert (probing.part.state, probing.part.probe) == ("ready", "agreed")
    probing.obey(wanted("slurm-7", desired="prepared"))
    assert (probing.part.state, probing.part.commits) == ("evicting", True)


def test_a_part_is_refused_that_would_cost_others_than_its_victims(probing: Scheduled) -> None:
    """Before any other site evicts for it; the reason names them."""
    probing.obey(wanted("slurm-7"))
    probing.probed("slurm-7", "slurm-8", "b/2")
    assert (probing.part.state, probing.part.probe) == ("refused", "")
    assert "would preempt b/2, slurm-8" in probing.part.detail


def test_other_victims_are_another_question(probing: Scheduled) -> None:
    """An answer to the earlier one counts for nothing."""
    probing.obey(wanted("slurm-7"))
    probing.obey(wanted("slurm-8"))
    probing.probed("slurm-7")
    assert (probing.part.state, probing.part.probe) == ("queued", "asked")
    probing.probed("slurm-8", victims=("slurm-8",))
    probing.obey(wanted("slurm-7"))
    assert (probing.part.state, probing.part.probe) == ("queued", "asked"), "an agreement is one about its victims"
    probing.obey(order("queued", places=PLACES))
    probing.probed("slurm-7")
    assert (probing.part.state, probing.part.probe) == ("queued", "")


def test_a_start_that_came_to_nothing_is_repeated_in_its_hold(site: Scheduled) -> None:
    """The scheduler was down as it started: every second again, at most until the worker is late."""
    site.obey(order("prepared", places=PLACES))
    site.answer("granted")
    site.obey(order("running", places=PLACES))

    def absent(now_s: float) -> list[object]:
        site.now_s = now_s
        seen = ObservedWorker(job="a", attempt=1, rank=0, state="absent")
        return [type(one) for one in site.machine.handle(WorkersObserved(now_s=now_s, workers=(seen,)))]

    assert absent(0.5) == []
    assert absent(1.0) == [StartWorker]
    assert absent(1.5) == []
    assert absent(2.0) == [StartWorker]
    assert StopWorker in absent(CHECKIN_TIMEOUT_S)
    assert site.part.state in ("failed", "stopping"), site.part.state


def test_without_its_hold_a_start_is_not_repeated(site: Scheduled) -> None:
    """The scheduler has given the cards to others: the part fails and says so."""
    site.obey(order("prepared", places=PLACES))
    site.answer("granted")
    site.obey(order("running", places=PLACES))
    site.answer("ended")
    seen = ObservedWorker(job="a", attempt=1, rank=0, state="absent")
    site.machine.handle(WorkersObserved(now_s=5.0, workers=(seen,)))
    assert site.part.state == "failed"
    assert "its hold has ended" in site.part.detail


def running(site: Scheduled) -> None:
    """A part with one rank runs in its hold."""
    site.obey(order("prepared", places=PLACES))
    site.answer("granted")
    site.obey(order("running", places=PLACES))


def ends(site: Scheduled, status: int) -> None:
    """The rank of the part has ended; the server, which hears of it, has it released."""
    seen = ObservedWorker(job="a", attempt=1, rank=0, state="exited", exit_status=status)
    site.machine.handle(WorkersObserved(now_s=site.now_s, workers=(seen,)))
    check_site(site.machine)
    site.obey(order("released", places=PLACES))


@pytest.mark.parametrize("status", [143, 137])
def test_a_rank_that_the_scheduler_ended_was_evicted(site: Scheduled, status: int) -> None:
    """1. A user's job takes the devices: the rank ends by a signal. 2. The part is kept until the scheduler has spoken.
    3. Its hold has ended: the part did not fail, so its job uses no restart.
    """
    running(site)
    ends(site, status)
    assert (site.part.state, site.part.fault) == ("stopping", "peer"), (
        "the cause is elsewhere; what it is, is not known"
    )
    site.answer("ended")
    assert (site.part.state, site.part.fault) == ("released", "evicted")
    assert "the scheduler ended the hold of its devices; rank 0 was ended by signal" in site.part.detail


def test_a_rank_that_ends_after_its_hold_was_evicted() -> None:
    """The same, seen in the other order; a rank that only lost its peer by that is no cause either."""
    for status in (143, PeerError.exit_code):
        one = Scheduled()
        running(one)
        one.answer("ended")
        ends(one, status)
        assert (one.part.state, one.part.fault) == ("released", "evicted")


def test_a_rank_that_died_in_its_hold_has_failed(site: Scheduled) -> None:
    """Killed by the system for want of memory, say: the hold lasts, so after a while the part is let go."""
    running(site)
    ends(site, 137)
    site.now_s = VERDICT_S - 1
    site.machine.handle(WorkersObserved(now_s=site.now_s))
    assert site.part.state == "stopping"
    site.now_s = VERDICT_S
    site.machine.handle(WorkersObserved(now_s=site.now_s))
    assert (site.part.state, site.part.fault) == ("released", "peer")


def test_a_rank_with_an_error_of_its_own_waits_for_no_hold(site: Scheduled) -> None:
    """Nor does its fault change when the hold ends as well."""
    running(site)
    seen = ObservedWorker(job="a", attempt=1, rank=0, state="exited", exit_status=1)
    site.machine.handle(WorkersObserved(now_s=site.now_s, workers=(seen,)))
    site.answer("ended")
    assert (site.part.state, site.part.fault) == ("failed", "own")
    site.obey(order("released", places=PLACES))
    assert (site.part.state, site.part.fault) == ("released", "own")


def test_a_shutdown_waits_for_no_scheduler(site: Scheduled) -> None:
    """The agent that is being stopped lets an ended part go at once."""
    running(site)
    ends(site, 143)
    site.machine.handle(ShutdownRequested(now_s=site.now_s))
    assert site.part.state == "released"


def test_a_hold_that_a_look_lacks_is_asked_for_at_once(site: Scheduled) -> None:
    """Renewals of a running part's hold are minutes apart; its end is known within a few looks."""
    running(site)
    asked: list[str] = []

    class Calls:
        def submit(self, key: tuple[str, str], _call: object, _answer: object, *, urgent: bool) -> None:
            asked.append(key[0])
            assert urgent, "the renewal of a granted hold goes before what new holds need"

    holds = SiteHolds(Mute(), Calls(), "key", lambda _: None, lambda: site.now_s, lambda: 0.0)  # type: ignore[arg-type]
    hold = Hold(id=holds.hold_id(site.part), state="granted", cards=(("h20/0/2",),))
    for now_s, seen in ((0.0, (hold,)), (1.0, (hold,)), (2.0, ()), (3.0, ())):
        holds.reconcile([site.part], now_s, 0.0)
        holds.observe_look(SchedulerLook(nodes=(), holds=seen))
        asked.append(f"{now_s:g}")
    assert asked == ["hold", "0", "1", "2", "hold", "3"]


@pytest.mark.parametrize(("said_s", "at_s"), [(995.0, 45.0), (1007.0, 50.0), (None, None)])
def test_a_grant_is_reported_by_the_agents_clock(site: Scheduled, said_s: float | None, at_s: float | None) -> None:
    """The scheduler counts from the epoch, the agent from the start of its machine; a grant to come is one of now."""
    site.obey(order("ready", places=PLACES))
    site.now_s = 50.0
    told: list[HoldObserved] = []
    adapter = Granting(granted_at_s=said_s)
    holds = SiteHolds(adapter, SchedulerCalls(blocks=False), "key", told.append, lambda: site.now_s, lambda: 1000.0)  # type: ignore[arg-type]
    holds.reconcile([site.part], site.now_s, 0.0)
    site.machine.handle(told[0])
    site.obey(order("ready", places=PLACES))
    assert observe_part(site.part).granted_at_s == at_s
    site.obey(order("released", places=PLACES))
    assert observe_part(site.part).granted_at_s is None, "the next hold has its own time"


class Granting:
    """An adapter that has granted every hold at the time that it says."""

    def __init__(self, granted_at_s: float | None) -> None:
        self._at_s = granted_at_s

    def hold(self, request: HoldRequest) -> Hold:
        return Hold(id=request.id, state="granted", cards=(("h20/0/2",),), granted_at_s=self._at_s)

    commit = hold


class Mute:
    """An adapter that nothing may call."""

    def hold(self, _request: HoldRequest) -> Hold:
        raise AssertionError("called")

    commit = hold


def test_the_end_of_a_users_job_is_reported_and_follows_the_scheduler(site: Scheduled) -> None:
    """It is a fixed time, so an unchanged job sends no new report; a longer limit does."""
    running = replace(others("h20/0/0"), ends_at_s=5000.0)
    site.look(running)
    first = site.machine.local_jobs()
    assert [(job.name, job.ends_at_s) for job in first] == [("slurm-7", 5000.0)]
    site.look(running)
    assert site.machine.local_jobs() == first
    site.look(replace(running, ends_at_s=9000.0))
    assert [job.ends_at_s for job in site.machine.local_jobs()] == [9000.0]


@pytest.mark.parametrize("ends_at_s", [float("nan"), float("inf"), -1.0, 1e13])
def test_an_end_that_is_no_time_is_unknown(ends_at_s: float) -> None:
    """Whatever an adapter says, the report stays one."""
    job = ForeignJob(name="x", priority=1, wanted={"h20": 1}, cards=("h20/0/0",), running=True, ends_at_s=ends_at_s)
    assert foreign_part(job, "middle", may_preempt=False).ends_at_s is None
    assert foreign_part(replace(job, ends_at_s=7.0), "middle", may_preempt=False).ends_at_s == 7.0
