"""The fast form of the model check leaves nothing out: compared with the plain one, and with itself.

`sweep` counts on three things (`docs/design/model-check.md`): two components of one key behave alike; owners'
names do not matter; a state met with fewer faults left adds nothing. Each is tried here on small models.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from isthmus.control.coordinator import advance_job
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.site import DeviceIdAllocator
from tests.control.model.components import Components, Effect, Placed
from tests.control.model.explore import explore
from tests.control.model.pool import EXCHANGES, Pool, World, whole_key
from tests.control.model.scenario import SMALL_PREEMPTION, Scenario
from tests.control.model.site import Site
from tests.control.model.sweep import key_of, sweep

pytestmark = pytest.mark.integration

LONE = Scenario(sites=("a",), jobs=(("j", "a"),), faults=1)
TINY = Scenario(sites=("a", "b"), jobs=(("j", "ab"),), faults=1)
ONE_JOB = Scenario(jobs=(("j", "abc"),), faults=0, cancels=1)
UNLIKE = Scenario(sites=("a", "b"), jobs=(("j", "ab"), ("k", "a")), faults=0, cancels=1)
SAMPLED = (replace(LONE, faults=2), UNLIKE, replace(TINY, evictions=1))
"""Larger models that a run without `--whole` tries: each of the others takes the plain form 10 CPU seconds or more."""


class Listed(Pool):
    """Goes through all states with owners by name, and notes what each is without the names."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, named=True)
        self.keys, self.goals = set[int](), set[int]()

    def wrong(self, world: World) -> str:
        key = hash(whole_key(world.coordinator, tuple(world.sites.values()), self.scenario.jobs))
        self.keys.add(key)
        if self.is_goal(world):
            self.goals.add(key)
        return super().wrong(world)


def agree(scenario: Scenario) -> None:
    """Both forms come to the same states, the same goals and the same verdict."""
    plain = Listed(scenario)
    full, fast = explore(plain), sweep(scenario)
    assert full.complete
    assert (full.wrong, fast.wrong) == ("", "")
    assert {hash(key_of(fast.all, state)) for state in fast.states.tolist()} == plain.keys
    goals = fast.states[fast.all.goals(fast.states)]
    assert {hash(key_of(fast.all, state)) for state in goals.tolist()} == plain.goals


def test_the_fast_form_meets_the_states_of_the_plain_one() -> None:
    """Neither more nor less, up to owners' names; the same are goals."""
    agree(TINY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        replace(LONE, faults=2),
        replace(LONE, evictions=1),
        ONE_JOB,
        UNLIKE,
        SMALL_PREEMPTION,
    ],
    ids=str,
)
def test_the_fast_form_meets_the_states_of_the_plain_one_on_larger_models(scenario: Scenario, whole: bool) -> None:
    """The same with two faults and two jobs; with `--whole` with three owners and with a joint preemption too."""
    if not whole and scenario not in SAMPLED:
        pytest.skip("one of the models that --whole tries")
    agree(scenario)


class Doubled(Components):
    """Keeps each coordinator and site that is taken for another one that was met before."""

    servers_met: list[tuple[Coordinator, Placed]]
    sites_met: list[tuple[Site, int]]

    def __init__(self, scenario: Scenario) -> None:
        self.servers_met, self.sites_met = [], []
        super().__init__(scenario)

    def place(self, coordinator: Coordinator) -> Placed:
        placed = super().place(coordinator)
        if self.server(placed.server) is not coordinator:
            self.servers_met.append((coordinator, placed))
        return placed

    def put(self, site: Site) -> int:
        number = super().put(site)
        if self.site(number) is not site:
            self.sites_met.append((site, number))
        return number


def _numbers(effects: list[Effect]) -> Counter[tuple[Any, ...]]:
    return Counter((kind, heard and heard.placed.server, site) for kind, _, heard, site in effects)


def _sites_behave_alike(parts: Doubled) -> None:
    answers = list(parts.answers)
    for site, number in parts.sites_met[:1500]:
        for faulty in (False, True):
            steps = site.faults() if faulty else site.steps()
            other = [Effect(kind, name, site=parts.put(after)) for kind, name, after in steps]
            assert _numbers(other) == _numbers(parts.of_site(number, faulty))
        if number in parts.looks:
            looked = site.copy()
            report = looked.look()
            assert parts.looks[number][0] == parts.put(looked)
            said, kept = parts.rules.said(report, "a"), parts.reports.things[parts.looks[number][1]]
            assert said == parts.rules.said(kept, "a")
    met = {number: site for site, number in parts.sites_met}
    for looked_at, orders, place in answers:
        if looked_at in met:
            after = met[looked_at].copy()
            EXCHANGES[place][2](after, parts.orders.things[orders])
            assert parts.put(after) == parts.answers[looked_at, orders, place]


def _servers_behave_alike(parts: Doubled) -> None:
    heard: dict[int, list[tuple[int, int]]] = {}
    for server, at, report in parts.heard:
        heard.setdefault(server, []).append((at, report))
    for coordinator, placed in parts.servers_met[:1500]:
        steps = [*parts.rules.steps(coordinator), *parts.rules.faults(coordinator)]
        other = [Effect(kind, name, heard=parts.hear_told(placed.server, told)) for kind, name, told in steps]
        kept = parts.of_server(placed.server, False) + parts.of_server(placed.server, True)
        assert _numbers(other) == _numbers(kept)
        for at, report in heard.get(placed.server, ()):
            here = placed.order.index(at)
            told = parts.rules.hear(coordinator, parts.scenario.sites[here], parts.reports.things[report])
            expected = parts.heard[placed.server, at, report]
            found = parts.place(told.coordinator)
            assert found.server == expected.placed.server
            assert bool(told.ended) == bool(expected.ended)
            seen = parts.server_facts[found.server].seen
            moved = [expected.placed.order[place] for place in placed.order]
            assert [seen[place] for place in found.order] == [seen[place] for place in moved]
            name, name_kept = parts.scenario.sites[found.order[here]], parts.order_at(found.server, moved[here])
            assert parts.order_at(found.server, parts.scenario.sites.index(name)) == name_kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [replace(ONE_JOB, faults=1), replace(TINY, evictions=1), SMALL_PREEMPTION], ids=str
)
def test_components_of_one_key_behave_alike(scenario: Scenario, whole: bool) -> None:
    """Whatever was taken for something met before does, in every step, what that did: names and all."""
    if not whole and scenario not in SAMPLED:
        pytest.skip("one of the models that --whole tries")
    parts = sweep(scenario, components=Doubled).all.parts
    assert isinstance(parts, Doubled)
    assert parts.sites_met
    assert parts.servers_met
    _sites_behave_alike(parts)
    _servers_behave_alike(parts)


def _finds(scenario: Scenario, what: str) -> None:
    """Both forms find it, with traces of the same length where all of them are faultless."""
    full, fast = explore(Pool(scenario), most_states=4000), sweep(scenario)
    assert what in full.wrong
    assert what in fast.wrong
    assert len(fast.trace) == len(full.trace)


def test_both_find_a_site_that_gives_a_card_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that gives a part devices that others hold."""
    is_free = DeviceIdAllocator.is_free
    monkeypatch.setattr(
        DeviceIdAllocator,
        "is_free",
        lambda book, device, part: part is not None or is_free(book, device, part),
    )
    _finds(Scenario(jobs=(("j", "abc"),), faults=0, evictions=1), "two holders")


def test_both_find_a_coordinator_that_commits_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is content with a single prepared part."""

    def hasty(state: PoolState, job: JobRecord, now_s: float) -> None:
        if any(part.state == "prepared" for part in job.current_parts()):
            advance_job.move_job(state, job, "starting", now_s)

    monkeypatch.setitem(advance_job.ADVANCE_BY_STATE, "preparing", hasty)
    _finds(Scenario(jobs=(("j", "abc"),), faults=0), "job j is starting, but not every part was prepared")


def test_both_find_a_preemption_that_does_not_wait_for_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that takes every victim for protected."""
    monkeypatch.setattr(JobRecord, "verified_step", lambda _: 1)
    _finds(SMALL_PREEMPTION, "j is ended for another, and its processes have saved the steps {None}")


def test_both_find_a_job_that_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that never leaves `stopping`: nothing is wrong with any state, but no goal is reached."""
    monkeypatch.setattr("isthmus.control.coordinator.attempts.end_if_released", lambda *_: None)
    monkeypatch.setattr(advance_job, "end_if_released", lambda *_: None)
    scenario = Scenario(sites=("a", "b"), jobs=(("j", "ab"),), faults=0)
    full, fast = explore(Pool(scenario)), sweep(scenario)
    assert full.wrong == fast.wrong == "no goal can be reached from here without a fault"
