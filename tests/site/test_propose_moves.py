"""Moves that a site proposes: for a part that lacks nothing but a place, within the owner's rules."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.messages.agent_messages import PartOrder, RankMap, Victim, WorkerAddress
from isthmus.core.owner.move_rules import MoveRules
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.site import HoursObserved
from tests.site.driver import Site, local
from tests.site.test_topology_allocator import part, site

RULES = MoveRules(at_once=2, rest_s=100, after_s=30, pause_s=10)


def running(job: str, tp: int, **more: object) -> PartOrder:
    """Return an order for a part that trains."""
    return part(job, tp, desired="running", rank_map=RankMap(workers=()), **more)


def fragmented(rules: MoveRules = RULES, **more: object) -> tuple[Site, list[PartOrder]]:
    """Return a site whose four nodes of four cards have two cards taken each, and its orders."""
    east = site(OwnerPolicy(moves=rules))
    jobs = [part(name, 2, **more) for name in "abcdefgh"]
    east.obey(*jobs)
    kept = [running(name, 2, **more) for name in "aceg"]
    east.obey(*kept, *(part(name, 2, desired="released") for name in "bdfh"))
    start(east, kept)
    return east, kept


def start(east: Site, kept: list[PartOrder]) -> None:
    """Let the workers of all parts check in."""
    east.obey(*kept)
    for order in kept:
        for rank in east.part(order.job).workers:
            at = WorkerAddress(rank=rank, cluster="east", host="h", port=1)
            east.see("running", rank, order.job, address=at)


def stop(east: Site, job: str) -> None:
    """Let the workers of a part end."""
    for rank in list(east.part(job).workers):
        east.see("exited", rank, job, exit_status=143)


def waits(job: str = "w", tp: int = 4) -> PartOrder:
    return part(job, tp, desired="queued")


def test_moves_are_proposed_once_the_wait_costs_more_than_they_do() -> None:
    """A whole node is wanted, two halves are free. One move of 2 cards for 10 s costs 20 card-seconds; 4 cards wait."""
    east, kept = fragmented()
    east.wait(200)
    east.obey(*kept, waits())
    assert east.machine.moves() == ()
    east.wait(31)
    (found,) = east.machine.moves()
    assert found.job == "w"
    assert len(found.moved) == 1
    assert found.cost_card_s == 20
    assert found.loss_card_s >= 4 * 30 > found.cost_card_s


@pytest.mark.parametrize(
    ("rules", "more", "why"),
    [
        ({"at_once": 0}, {}, "the owner allows none"),
        ({"per_hour": 0}, {}, "the hour's budget is used"),
        ({"rest_s": 1000}, {}, "the jobs have not rested"),
        ({"pause_s": 1000}, {}, "moves cost more than they gain"),
        ({"exempt_users": ("u",)}, {"user": "u"}, "their user is exempt"),
    ],
)
def test_no_move_outside_of_the_owners_rules(rules: dict[str, Any], more: dict[str, Any], why: str) -> None:
    """Each rule alone keeps all parts where they are."""
    east, kept = fragmented(RULES.model_copy(update=rules), **more)
    east.wait(200)
    east.obey(*kept, waits())
    east.wait(60)
    assert east.machine.moves() == (), why


def test_jobs_that_must_not_be_stopped_stay() -> None:
    """`preemptible: false` exempts a job from moves."""
    east, kept = fragmented()
    fixed = [
        one.model_copy(update={"spec": one.spec.model_copy(update={"preemptible": False})}) for one in kept if one.spec
    ]
    for order in fixed:
        east.part(order.job).spec = order.spec
    east.wait(200)
    east.obey(*fixed, waits())
    east.wait(60)
    assert east.machine.moves() == ()


def test_moves_begin_within_the_owners_hours() -> None:
    """Outside of them a proposal is withdrawn."""
    east, kept = fragmented()
    east.wait(200)
    east.obey(*kept, waits())
    east.wait(40)
    assert len(east.machine.moves()) == 1
    east.handle(HoursObserved(now_s=east.now_s, is_open=True, may_move=False))
    east.wait(11)
    assert east.machine.moves() == ()


def test_queued_jobs_of_the_owner_get_free_devices_first() -> None:
    """While a local job waits for devices, nothing moves for the pool."""
    east, kept = fragmented()
    east.wait(200)
    east.local(local("mine", chips=16))
    east.obey(*kept, waits())
    east.wait(60)
    assert east.machine.moves() == ()


def test_a_part_that_is_refused_for_a_place_counts_as_waiting() -> None:
    """The server cannot see fragments of super-nodes: its orders are refused, again and again, until moves are made."""
    east = site(OwnerPolicy(moves=RULES))
    jobs = [part(name, 4) for name in "abcd"]
    east.obey(*jobs)
    kept = [running("a", 4), running("c", 4)]
    east.obey(*kept, part("b", 4, desired="released"), part("d", 4, desired="released"))
    start(east, kept)
    east.wait(200)
    for attempt in (1, 2, 3):
        asked = part("e", 8).model_copy(update={"attempt": attempt})
        east.obey(*kept, asked)
        assert east.states[f"e/{attempt}"] == "refused"
        east.obey(*kept, asked.model_copy(update={"desired": "released"}))
        east.obey(*kept)
        east.wait(20)
    (found,) = east.machine.moves()
    assert (found.job, len(found.moved)) == ("e", 1)


def test_moves_that_begin_use_the_budget_of_the_hour() -> None:
    """After one move with a budget of one an hour, the next waits for the hour to pass."""
    east, kept = fragmented(RULES.model_copy(update={"per_hour": 1}))
    east.wait(200)
    east.obey(*kept, waits())
    east.wait(40)
    (found,) = east.machine.moves()
    victims = tuple(Victim(job=one.job, attempt=one.attempt) for one in found.moved)
    east.obey(*kept, part("w", 4, desired="ready", victims=victims))
    assert east.states["w/1"] == "ready"
    east.obey(*kept, part("w", 4, desired="prepared", victims=victims))
    left = [one for one in kept if one.job != found.moved[0].job]
    leaves = part(found.moved[0].job, 2, desired="released")
    east.obey(*left, leaves, part("w", 4, desired="prepared", victims=victims))
    stop(east, leaves.job)
    east.wait(1)
    assert east.states["w/1"] == "prepared"
    east.obey(*left, running("w", 4), waits("v"))
    east.wait(120)
    assert east.machine.moves() == ()
