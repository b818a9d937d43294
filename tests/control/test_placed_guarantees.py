"""Guarantees and limits of chips of one cluster or node group: who lends them, who takes them back, what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.control.queries.accounts.lent_chips import is_above
from isthmus.control.queries.accounts.limit_refusals import free_within_limits
from isthmus.control.state.allocations import chip_needs_of
from isthmus.control.state.events import AccountsSet
from isthmus.control.state.job_records import JobRecord
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.errors import ConflictError, FieldError
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.chip_scope import ChipScope
from isthmus.core.pool import NodeGroup
from isthmus.core.pool_resource import PoolResource
from tests.control.driver import Driver
from tests.control.samples import cluster, plan

A, B = (PoolResource.chips(site, "g") for site in "ab")


def at(cluster: str, chips: int, group: str | None = None) -> dict[str, Any]:
    return {"cluster": cluster, "node_group": group, "chips": chips}


def project(name: str, *places: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A project with one member of its name, and guarantees at places."""
    return {"name": name, "members": [name], "guaranteed_at": places} | more


def pool_with(*projects: dict[str, Any], chips: int = 4, **more: Any) -> Driver:
    """A pool of `a` and `b`."""
    pool = Driver("a", "b", chips=chips)
    set_accounts(pool, *projects, **more)
    return pool


def set_accounts(pool: Driver, *projects: dict[str, Any], **more: Any) -> None:
    given = Accounts.model_validate({"projects": projects} | more)
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=given))


def start(pool: Driver, job: str, user: str, sites: str, **more: Any) -> None:
    pool.submit(job, plan(*sites), user=user, **more)
    pool.obey()
    pool.obey()


def settle(pool: Driver, turns: int = 12) -> None:
    """Let all sites obey; the planner proposes for a job the sites that its name ends with."""
    for _ in range(turns):
        for job in list(pool.asked):
            pool.answer(job, plan(*job.rpartition("-")[2]))
        pool.obey()
        pool.wait(1.0)


def states(pool: Driver) -> dict[str, str]:
    return {job.id: job.state for job in pool.coordinator.list_jobs()}


def running(pool: Driver) -> str:
    return " ".join(sorted(job for job, state in states(pool).items() if state == "running"))


def test_chips_of_a_site_are_taken_back_from_jobs_that_hold_them() -> None:
    """X has borrowed all of both sites. Y is guaranteed two chips of `a`: jobs there make way, those at `b` run on."""
    pool = pool_with(project("y", at("a", 2)))
    for number in range(4):
        start(pool, f"x{number}-a", "x", "a")
        start(pool, f"x{number}-b", "x", "b")
    start(pool, "y0-aa", "y", "aa")
    start(pool, "y1-b", "y", "b")
    settle(pool)
    found = states(pool)
    assert found["y0-aa"] == "running"
    assert [found[f"x{number}-a"] for number in range(4)].count("running") == 2
    assert [found[f"x{number}-b"] for number in range(4)].count("running") == 4
    assert found["y1-b"] != "running"  # nothing is guaranteed there


def test_chips_that_are_guaranteed_elsewhere_do_not_keep_borrowed_ones() -> None:
    """X holds two of its four at `b`, and two of Y's at `a`: it makes way at `a` although it holds four in all."""
    pool = pool_with(project("x", at("b", 4)), project("y", at("a", 4)))
    for job in ("x0-a", "x1-a", "x2-b", "x3-b"):
        start(pool, job, "x", job[-1])
    for number in range(4):
        start(pool, f"y{number}-a", "y", "a")
    settle(pool)
    assert running(pool) == "x2-b x3-b y0-a y1-a y2-a y3-a"


def test_a_guarantee_of_any_cluster_holds_beside_those_of_sites() -> None:
    """X may hold two of `a` and one more anywhere: its job over both sites is within, the next one at `b` is not."""
    pool = pool_with(project("x", at("a", 2), guaranteed_chips=1), chips=2)
    start(pool, "s0-aa", "s", "aa")
    start(pool, "s1-b", "s", "b")
    start(pool, "s2-b", "s", "b")
    start(pool, "x0-aab", "x", "aab")
    start(pool, "x1-b", "x", "b")
    settle(pool)
    found = running(pool).split()
    assert (len(found), "x0-aab" in found, "x1-b" in found) == (2, True, False), found


def test_chips_within_a_guarantee_stay_although_the_project_borrows_elsewhere() -> None:
    """X's job holds its one chip of `a`, and one of `b` that it borrows: Y's job at `a` waits, one at `b` takes it."""
    pool = pool_with(project("x", at("a", 1)), project("y", at("a", 1), at("b", 1)), chips=2)
    start(pool, "s0-a", "s", "a", preemptible=False)
    start(pool, "s1-b", "s", "b", preemptible=False)
    start(pool, "x0-ab", "x", "ab")
    start(pool, "y0-a", "y", "a")
    settle(pool)
    assert running(pool) == "s0-a s1-b x0-ab"
    start(pool, "y1-b", "y", "b")
    settle(pool)
    assert running(pool) == "s0-a s1-b y0-a y1-b"


def test_a_project_lends_no_more_than_it_holds_above_its_guarantee() -> None:
    """X has borrowed one chip of `a`; for Y's job of two both of X's would have to go, so none does."""
    pool = pool_with(project("x", at("a", 1)), project("y", at("a", 2)), chips=3)
    start(pool, "s0-a", "s", "a", preemptible=False)
    start(pool, "x0-a", "x", "a")
    start(pool, "x1-a", "x", "a")
    start(pool, "y0-aa", "y", "aa")
    settle(pool)
    assert running(pool) == "s0-a x0-a x1-a"
    start(pool, "y1-a", "y", "a")
    settle(pool)
    assert "y1-a" in running(pool)


def test_a_limit_at_a_site_keeps_only_jobs_there() -> None:
    """The lab may hold two chips of `a`; the refusal says so, what holds them, and that a larger job never starts."""
    pool = pool_with(project("lab", limits={"chips_at": [at("a", 2)]}))
    start(pool, "one", "lab", "aa")
    start(pool, "two", "lab", "ab")
    start(pool, "three", "lab", "bb")
    start(pool, "four", "lab", "aaa")
    assert running(pool) == "one three"
    assert pool.reason("two") == "project lab may hold 2 chips of a at once: 2 are held by 1 job, this one needs 1"
    assert pool.reason("four") == "project lab may hold 2 chips of a at once, this job needs 3"
    pool.cancel("one")
    settle(pool, 3)
    assert states(pool)["two"] == "running"
    state = pool.coordinator.state
    assert restore_state(serialize_state(state)) == state


def test_the_planner_gets_no_more_chips_of_a_site_than_the_limit_there() -> None:
    """Without it the fastest plan might be one that can never start."""
    pool = pool_with(project("lab", limits={"chips_at": [at("a", 2), at("b", 3, "g")]}))
    pool.submit("one", user="lab")
    assert pool.asked["one"].free_chips == {"a": {"g": 2}, "b": {"g": 3}}
    pool.answer("one", plan("a"))
    pool.submit("two", user="other")
    assert pool.asked["two"].free_chips["b"] == {"g": 4}


@pytest.mark.parametrize("first", [0, 1])
def test_limits_of_node_groups_count_before_those_of_their_cluster(first: int) -> None:
    """In any order: the four chips of the cluster are those of the group that the job may use."""
    pool = Driver("a")
    groups = tuple(NodeGroup(name=name, chip="H20", nodes=1, chips_per_node=4) for name in "gh")
    pool.clusters["a"] = pool.clusters["a"].model_copy(update={"node_groups": groups})
    pool.report("a")
    lines = [at("a", 4), at("a", 0, "g")]
    set_accounts(pool, project("lab", limits={"chips_at": [lines[first], lines[1 - first]]}))
    pool.submit("one", user="lab")
    state = pool.coordinator.state
    assert free_within_limits(state, state.jobs["one"], {"a": {"g": 4, "h": 4}}) == {"a": {"g": 0, "h": 4}}


def test_a_guarantee_beyond_a_cluster_that_shrank_may_be_lowered_step_by_step() -> None:
    """Only what grows is refused."""
    pool = pool_with(project("x", at("a", 4)), project("y", at("a", 4)), chips=8)
    pool.clusters["a"] = cluster("a", 4)
    pool.report("a")
    set_accounts(pool, project("x", at("a", 2)), project("y", at("a", 4)))
    with pytest.raises(ConflictError, match="7 chips of a are guaranteed, it has 4"):
        set_accounts(pool, project("x", at("a", 3)), project("y", at("a", 4)))


def test_a_change_is_not_checked_against_what_it_leaves_as_it_is() -> None:
    """A project above a limit keeps nobody from changing another, and is not told of."""
    over = project("x", limits={"chip_hours_per_month": 1})
    pool = pool_with(over, project("y"))
    start(pool, "one", "x", "aa")
    pool.now_s += 3600
    set_accounts(pool, over, project("y", at("b", 1)))
    with pytest.raises(ConflictError, match=r"project x has used .* more than 1"):
        set_accounts(pool, project("x", limits={"chip_hours_per_month": 1, "spend_per_month": "9"}), project("y"))


def test_a_project_takes_chips_of_a_site_back_below_a_parent_at_its_limit_there() -> None:
    """The lab may hold two chips of `a`: X's job at `a` makes way for Y's, its job at `b` does not."""
    rows = [
        project("lab", at("a", 2), members=["x", "y"], limits={"chips_at": [at("a", 2)]}),
        project("x", parent="lab"),
        project("y", at("a", 1), parent="lab"),
    ]
    pool = pool_with(*rows)
    for job in ("x0-a", "x1-a", "x2-b"):
        start(pool, job, "x", job[-1], project="x")
    start(pool, "y0-a", "y", "a", project="y")
    settle(pool)
    assert running(pool) == "x0-a x2-b y0-a"


BAD: tuple[tuple[list[dict[str, Any]], type[Exception], str], ...] = (
    (
        [project("x", at("none", 1))], FieldError,
        "projects.0.guaranteed_at.0: no cluster 'none' has joined",
    ),
    (
        [project("x", at("a", 1, "none"))], FieldError,
        "projects.0.guaranteed_at.0: cluster a has no node group 'none'",
    ),
    ([project("x", at("a", 5))], FieldError, "projects.0.guaranteed_at.0.chips: 5 chips of a are guaranteed, it has 4"),
    (
        [project("x", limits={"chips_at": [at("none", 1)]})], FieldError,
        "projects.0.limits.chips_at.0: no cluster 'none' has joined",
    ),
    (
        [project("x", at("a", 3, "g")), project("y", at("a", 2))], ConflictError,
        "5 chips of a are guaranteed, it has 4: x 3, y 2",
    ),
    (
        [project("x", at("a", 3)), project("y", at("a", 2), parent="x"), project("z", at("a", 2), parent="x")],
        FieldError, "projects.2.guaranteed_at: the projects below x are guaranteed 4 chips of a, x itself 3",
    ),
    (
        [project("x", guaranteed_chips=3), project("y", at("a", 1), parent="x")], FieldError,
        "projects.1.guaranteed_at: the projects below x are guaranteed 1 chips of a, x itself 0",
    ),
    (
        [project("x", at("a", 3), limits={"chips_at": [at("a", 2)]})], FieldError,
        "projects.0.guaranteed_at: 3 chips of a are guaranteed, but project x may hold 2 at once",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("rows", "error", "message"), BAD, ids=lambda one: one if isinstance(one, str) else "")
def test_chips_that_do_not_exist_or_are_guaranteed_twice_are_refused(
    rows: list[dict[str, Any]], error: type[Exception], message: str
) -> None:
    """With the field, or with who else is guaranteed what; nothing takes effect."""
    pool = pool_with()
    with pytest.raises(error) as raised:
        set_accounts(pool, *rows)
    assert raised.value.message == message  # type: ignore[attr-defined]
    assert pool.coordinator.state.accounts.accounts == Accounts()


def test_a_cluster_or_node_group_is_listed_once() -> None:
    """The line of the file is named."""
    with pytest.raises(ValidationError, match="a/g is listed twice"):
        Accounts.model_validate({"projects": [project("x", at("a", 1, "g"), at("a", 2), at("a", 2, "g"))]})


def test_a_limit_of_a_site_below_what_runs_there_is_refused() -> None:
    """With what holds how much of it."""
    pool = pool_with(project("x"))
    start(pool, "one", "x", "aab")
    with pytest.raises(ConflictError, match="project x holds 2 chips of a now, more than 1;") as raised:
        set_accounts(pool, project("x", limits={"chips_at": [at("a", 1)]}))
    assert raised.value.hint == "set it then, or end jobs first; they hold chips: one (2)"
    set_accounts(pool, project("x", limits={"chips_at": [at("a", 2), at("b", 1)]}))


scopes = st.sampled_from([ChipScope(), ChipScope("a"), ChipScope("b"), ChipScope("a", "g"), ChipScope("a", "h")])
KEYS = (A, PoolResource.chips("a", "h"), B)


def covered(lines: Mapping[ChipScope, int], held: Mapping[PoolResource, int]) -> int:
    """Return the most held chips that can each be given a guaranteed chip of their own: a matching by augmentation."""
    places = [scope for scope, chips in lines.items() for _ in range(chips)]
    taken: dict[int, int] = {}
    chips = [key for key, number in held.items() for _ in range(number)]

    def augment(chip: int, seen: set[int]) -> bool:
        for place, scope in enumerate(places):
            if place not in seen and scope.chips_in({chips[chip]: 1}):
                seen.add(place)
                if place not in taken or augment(taken[place], seen):
                    taken[place] = chip
                    return True
        return False

    return sum(augment(chip, set()) for chip in range(len(chips)))


@given(
    st.dictionaries(scopes, st.integers(0, 3)), st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.sampled_from(KEYS),
)  # fmt: skip
def test_a_project_is_above_its_guarantee_of_chips_if_it_could_do_without_one_of_them(
    lines: dict[ChipScope, int], numbers: list[int], key: PoolResource
) -> None:
    """That is, if one less of them leaves as many chips covered by guarantees."""
    held = {one: number for one, number in zip(KEYS, numbers, strict=True) if number}
    if key in held:
        fewer = held | {key: held[key] - 1}
        assert is_above(lines, sum(held.values()), held, key) == (covered(lines, held) == covered(lines, fewer))


sites_of = st.sampled_from(("a", "b", "ab", "aa", "aab", "bb"))
jobs_of = st.lists(st.tuples(st.sampled_from("sxyz"), sites_of), min_size=6, max_size=14)
amounts = st.sampled_from(((1, 2, 0), (2, 0, 1), (0, 2, 1), (2, 2, 1), (0, 0, 2), (0, 0, 0)))


@settings(deadline=None)
@given(jobs=jobs_of, guarantees=st.tuples(amounts, amounts, amounts), in_lab=st.booleans())
def test_reclaim_frees_what_is_guaranteed_there_and_no_more(
    jobs: list[tuple[str, str]], guarantees: tuple[tuple[int, ...], ...], in_lab: bool
) -> None:
    """Each reclaim takes whole jobs, enough and none too many, of projects above their guarantee of the chips wanted.

    When nothing changes any more, no job waits that is within the guarantee of its project. With `in_lab` all projects
    are below one that may hold no more of each site than they are guaranteed together.
    """
    rows = [
        project(name, at("a", here), at("b", there, "g"), guaranteed_chips=more)
        for name, (here, there, more) in zip("xyz", guarantees, strict=True)
    ]
    a, b, anywhere = (sum(one[index] for one in guarantees) for index in range(3))
    if in_lab:
        limits = {"chips": max(1, a + b + anywhere), "chips_at": [at("a", a + anywhere)]}
        rows = [row | {"parent": "lab"} for row in rows]
        rows.append(project("lab", at("a", a), at("b", b, "g"), guaranteed_chips=anywhere, limits=limits))
    pool = pool_with(*rows, chips=max(2, a + anywhere, b + anywhere))
    seen = set[tuple[str, int]]()
    borrowed = [(user, sites) for user in "sz" for sites in ("a", "b", "ab")]
    for number, (user, sites) in enumerate([*borrowed, *jobs]):
        pool.submit(f"{user}{number}-{sites}", plan(*sites), user=user)
        check_reclaims(pool, seen)
        pool.obey()
    for _ in range(40):
        settle(pool, 1)
        check_reclaims(pool, seen)
    book = pool.coordinator.state.accounts
    for job in pool.coordinator.state.live_jobs.values():
        if job.state != "running" and job.project:
            use, needs = book.use_of(f"project:{job.project}"), chip_needs_of(job.plan_parts)
            chips_at = {key: use.chips_at.get(key, 0) + needs.get(key, 0) for key in (A, B)}
            lines = book.tree.projects[job.project].guarantees
            above = [is_above(lines, sum(chips_at.values()), chips_at, key) for key in needs]
            assert any(above), (states(pool), job.id, job.reason)


def check_reclaims(pool: Driver, seen: set[tuple[str, int]]) -> None:
    """Check the victims of each reclaim that has just begun."""
    state = pool.coordinator.state
    for job in state.live_jobs.values():
        if job.state != "preempting" or not job.reclaims or (job.id, job.attempt) in seen:
            continue
        seen.add((job.id, job.attempt))
        victims = [state.jobs[name] for name in dict.fromkeys(one.job for one in job.victims)]
        freed = {one.id: chip_needs_of(one.plan_parts) for one in victims}
        parts = {part.cluster: part for part in job.current_parts()}
        lacking = {key: parts[key.cluster].borrowed.get("g", 0) for key in chip_needs_of(job.plan_parts)}
        lacking = {key: chips for key, chips in lacking.items() if chips}
        for key, chips in lacking.items():
            assert chips <= sum(one.get(key, 0) for one in freed.values())
        for victim in victims:
            assert victim.preemptor == job.id
            others = [chips for name, chips in freed.items() if name != victim.id]
            assert any(chips > sum(one.get(key, 0) for one in others) for key, chips in lacking.items())
        tree = state.accounts.tree
        for name in tree.guarantees.keys() - set(tree.chain(job.project)):
            inside = [one for one in victims if name in tree.chain(one.project)]
            assert any(are_lent(pool, name, order, lacking) for order in permutations(inside))


def are_lent(pool: Driver, name: str, jobs: Iterable[JobRecord], lacking: Iterable[PoolResource]) -> bool:
    """Return whether a project stays above its guarantee of chips that lack until the last of the jobs is taken."""
    book = pool.coordinator.state.accounts
    held, lines = dict(book.use_of(f"project:{name}").chips_at), book.tree.guarantees[name]
    for job in jobs:
        mine = chip_needs_of(job.plan_parts)
        wanted = [key for key in lacking if key in mine]
        if all(covered(lines, held) != covered(lines, held | {key: held[key] - 1}) for key in wanted):
            return False
        held = {key: chips - mine.get(key, 0) for key, chips in held.items()}
    return True
