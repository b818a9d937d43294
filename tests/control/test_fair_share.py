"""Fair share within a priority: users approach their weights, none starves, and the server says why a job waits."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sortedcontainers import SortedList

from isthmus.control.accounts.account_tree import AccountTree
from isthmus.control.algorithms.fair_share import FairShare
from isthmus.control.algorithms.share_node import Key
from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.queries.user_views import iterate_queue
from isthmus.control.state.events import AccountsSet, PoolSet
from isthmus.control.state.queue_order import queue_head
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.owner.accounts import Accounts, Project
from tests.control.driver import Driver
from tests.control.samples import plan

pytestmark = pytest.mark.integration

DAY_S = 86400.0
RANKS = range(3)


def queues(*users: str) -> dict[str, SortedList]:
    """Return the queues of jobs submitted one a second by these users."""
    found: dict[str, SortedList] = {}
    for number, user in enumerate(users, start=1):
        found.setdefault(user, SortedList()).add((1, float(number), number))
    return found


def shares(**weights: float) -> FairShare:
    made = FairShare()
    made.configure(DAY_S, weights, 0.0)
    return made


def test_a_user_who_has_used_less_goes_first_and_equal_users_take_turns() -> None:
    """By arrival among equals; a priority precedes any usage."""
    made = shares()
    waiting = queues("ann", "ann", "ann", "bob", "bob")
    assert [number for _, _, number in made.order(waiting, RANKS)] == [1, 4, 2, 5, 3]
    made.charge("ann", 8, 0.0)
    made.now_s = 100.0
    assert [number for _, _, number in made.order(waiting, RANKS)] == [4, 5, 1, 2, 3]
    waiting["ann"].add((0, 9.0, 9))
    assert next(made.order(waiting, RANKS))[2] == 9


def test_usage_decays_by_its_half_life_and_grows_while_chips_are_held() -> None:
    """4 chips for a day, half of which is forgotten by the day after; settled at any moments it is the same."""
    one, often = shares(), shares()
    for made, moments in ((one, ()), (often, range(0, int(DAY_S), 977))):
        made.charge("ann", 4, 0.0)
        for at_s in moments:
            made.charge("ann", 0, float(at_s))
        made.charge("ann", -4, DAY_S)
        made.now_s = DAY_S
    used = one.used_chip_s("ann")
    assert used == pytest.approx(often.used_chip_s("ann"), rel=1e-9)
    assert 0.7 * 4 * DAY_S < used < 4 * DAY_S
    one.now_s = 2 * DAY_S
    assert one.used_chip_s("ann") == pytest.approx(used / 2)
    one.now_s = 0.0  # a clock that was set back gives no usage
    assert one.used_chip_s("ann") == pytest.approx(used)


def test_another_half_life_counts_from_the_change_on() -> None:
    """A day's usage stays as it was: half of it was forgotten, and the next half goes in an hour."""
    made = shares()
    made.charge("ann", 4, 0.0)
    made.charge("ann", -4, 0.0)
    made.usage["ann"].used_chip_s = 800.0
    made.configure(3600.0, {}, DAY_S)
    for at_s, used_chip_s in ((DAY_S, 400.0), (DAY_S + 3600.0, 200.0)):
        made.now_s = at_s
        assert made.used_chip_s("ann") == pytest.approx(used_chip_s)


keys = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd"), st.integers(0, 50)), max_size=60)


trees = st.sampled_from(
    (
        {},
        {"a": "ea", "b": "eb", "e": "e "},
        {"a": "eba", "b": "eb ", "c": "ec", "e": "e "},
        {"a": "a ", "b": "ab ", "d": "abd"},
    )
)
"""The path of each account that is below another, or above; " " are the own jobs of one."""


@given(keys, st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9)), st.sampled_from(range(1, 4)), trees)
@settings(max_examples=150, deadline=None)
def test_the_place_of_every_job_is_its_place_in_the_order(
    jobs: list[tuple[int, str, int]], held: dict[str, int], weight: int, tree: dict[str, str]
) -> None:
    """Also of one that is not in the queue yet; each job has one place, and a rank is never passed by a later one."""
    made = shares(a=float(weight))
    made.paths = {name: tuple(one.strip() for one in path) for name, path in tree.items()}
    for user, chips in held.items():
        made.charge(user, chips, 0.0)
    made.now_s = 5000.0
    waiting: dict[str, SortedList] = {}
    for number, (rank, user, at_s) in enumerate(jobs):
        waiting.setdefault(user, SortedList()).add((rank, float(at_s), number))
    order = list(made.order(waiting, RANKS))
    assert len(order) == len(set(order)) == len(jobs)
    assert [key[0] for key in order] == sorted(key[0] for key in order)
    for number, (rank, user, at_s) in enumerate(jobs):
        key: Key = (rank, float(at_s), number)
        assert made.place(waiting, user, key) == order.index(key) + 1
        waiting[user].remove(key)
        assert made.place(waiting, user, key) <= order.index(key) + 1
        waiting[user].add(key)


def serve(
    made: FairShare, waiting: dict[str, SortedList], num_slots: int, ends_s: float, seed: int
) -> dict[str, float]:
    """Run jobs of 8 chips on slots until `ends_s`; return the chip-seconds of each user. A run takes about an hour."""
    chance, running, got = random.Random(seed), list[tuple[float, str]](), dict.fromkeys(waiting, 0.0)
    now_s = 0.0
    while now_s < ends_s:
        made.now_s = now_s
        while len(running) < num_slots and (key := next(made.order(waiting, RANKS), None)) is not None:
            user = next(one for one, queue in waiting.items() if key in queue)
            waiting[user].remove(key)
            run_s = 3600.0 * chance.uniform(0.5, 1.5)
            got[user] += 8 * run_s
            made.charge(user, 8, now_s)
            running.append((now_s + run_s, user))
        if not running:
            break
        running.sort()
        now_s, user = running.pop(0)
        made.charge(user, -8, now_s)
    return got


@pytest.mark.parametrize("seed", range(5))
def test_the_shares_of_users_with_work_approach_their_weights(seed: int) -> None:
    """Three users of weights 1, 2 and 1 with endless queues: after a week each has its part within a tenth."""
    made = shares(bob=2.0)
    waiting = queues(*["ann", "bob", "cyd"] * 3000)
    got = serve(made, waiting, 8, 7 * DAY_S, seed)
    total = sum(got.values())
    for user, part in (("ann", 0.25), ("bob", 0.5), ("cyd", 0.25)):
        assert got[user] / total == pytest.approx(part, rel=0.1)


def test_no_user_starves_behind_newcomers() -> None:
    """A user with a day's usage of all chips waits behind 2,000 jobs of a new one, but for less than two half-lives."""
    made = shares()
    made.charge("old", 64, -DAY_S)
    made.charge("old", -64, 0.0)
    waiting = queues(*["old"] * 10 + ["new"] * 2000)
    made.now_s = 0.0
    assert made.place(waiting, "old", (1, 1.0, 1)) > 300
    assert serve(made, waiting, 8, 2 * DAY_S, 1)["old"] > 0


def fair_pool(chips: int = 4) -> Driver:
    """Return a pool with fair share and one site."""
    pool = Driver("a", chips=chips)
    pool.tell(PoolSet(now_s=1, planner_turns=True, half_life_s=DAY_S))
    return pool


def settle(pool: Driver) -> None:
    """Answer every request for plans, and let the site do what its orders say."""
    while pool.asked:
        pool.answer(next(iter(pool.asked)), plan("a"))
    for _ in range(4):
        pool.obey()


def test_three_hundred_jobs_of_one_user_delay_another_user_by_what_runs_only() -> None:
    """1. A user submits 300 jobs; 4 run. 2. Another submits one. 3. It takes the first chip that is released."""
    pool = fair_pool()
    for number in range(300):
        pool.submit(f"many-{number}", user="hog")
    state = pool.coordinator.state
    settle(pool)
    running = [job.id for job in state.jobs.values() if job.state == "running"]
    assert len(running) == 4
    pool.submit("single", user="other")
    settle(pool)
    assert state.jobs["single"].state == "waiting"
    assert pool.coordinator.job_view("single").place == 1
    assert next(job.id for job in iterate_queue(state, None, 2)) == "single"
    (status,) = answer_query(query_job(state, state.jobs["single"], pool.now_s, {}, None))
    assert any("place by fair share: user other has used 0.0 chip-hours" in note for note in status.notes)
    pool.cancel(running[0])
    settle(pool)
    assert state.jobs["single"].state == "running"


def test_without_a_half_life_the_queue_is_by_arrival() -> None:
    """As in logs of earlier versions."""
    pool = Driver("a", chips=1)
    for number in range(3):
        pool.submit(f"many-{number}", user="hog")
    pool.submit("single", user="other")
    settle(pool)
    assert pool.coordinator.job_view("single").place == 3


def test_the_usage_of_users_survives_a_snapshot() -> None:
    """The order after a restart is the one before it."""
    pool = fair_pool()
    for number in range(6):
        pool.submit(f"j{number}", user=f"u{number % 2}")
    settle(pool)
    before = pool.coordinator.state
    assert before.shares.usage["u0"].num_chips == 2
    after = restore_state(serialize_state(pool.coordinator.state))
    assert after.shares == before.shares
    assert after.indexes.queued_by_user == before.indexes.queued_by_user


@given(st.lists(st.tuples(st.integers(-1, 8), st.floats(0.1, 10)), min_size=1, max_size=9))
def test_projects_below_one_divide_its_share(drawn: list[tuple[int, float]]) -> None:
    """The shares below each project at the top sum to its weight; equal ones get equal shares."""
    projects = [
        Project(name=f"p{at}", parent=f"p{parent % at}" if at and parent >= 0 else None, weight=weight)
        for at, (parent, weight) in enumerate(drawn)
    ]
    tree = AccountTree(Accounts(projects=tuple(projects)))
    shares = tree.shares()
    assert shares.keys() == {f"project:{one.name}" for one in projects}
    for top in (one for one in projects if one.parent is None):
        assert sum(shares[f"project:{name}"] for name in tree.below(top.name)) == pytest.approx(top.weight)
    lab = Project(name="lab", weight=6)
    below = (Project(name="a", parent="lab"), Project(name="b", parent="lab", weight=4))
    assert AccountTree(Accounts(projects=(lab, *below))).shares() == {
        "project:lab": 1, "project:a": 1, "project:b": 4,
    }  # fmt: skip


def by_tree(*projects: Project) -> FairShare:
    """Shares of projects by their tree."""
    made, tree = shares(), AccountTree(Accounts(projects=projects))
    made.project_weights = {f"project:{one.name}": one.weight for one in projects}
    made.paths = tree.paths()
    return made


LAB = (Project(name="lab"), Project(name="a", parent="lab"), Project(name="b", parent="lab"), Project(name="other"))


@pytest.mark.parametrize(
    ("busy", "parts"),
    [("a other", (0.5, 0.5)), ("a b other", (0.25, 0.25, 0.5)), ("lab b other", (0.25, 0.25, 0.5))],
)
def test_what_an_idle_project_leaves_goes_to_those_beside_it(busy: str, parts: tuple[float, ...]) -> None:
    """The lab has half of the chips, whichever of its projects has work."""
    made, names = by_tree(*LAB), [f"project:{name}" for name in busy.split()]
    got = serve(made, queues(*names * 2000), 8, 5 * DAY_S, 3)
    for name, part in zip(names, parts, strict=True):
        assert got[name] / sum(got.values()) == pytest.approx(part, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(-1, 8), st.sampled_from((0.5, 1.0, 2.0, 3.0))), min_size=2, max_size=9),
    st.sets(st.integers(0, 8), min_size=1),
)
@settings(deadline=None)
def test_at_each_project_those_with_work_share_by_their_weights(drawn: list[tuple[int, float]], busy: set[int]) -> None:
    """Of equal usage, at every moment of the order: none is more than its next job ahead of one beside it."""
    projects = [
        Project(name=f"p{at}", parent=f"p{parent % at}" if at and parent >= 0 else None, weight=weight)
        for at, (parent, weight) in enumerate(drawn)
    ]
    made = by_tree(*projects)
    names = [f"project:p{at}" for at in range(len(drawn)) if at in busy]
    waiting = queues(*names * 60)
    account_of = {key[2]: name for name, queue in waiting.items() for key in queue}
    counts = dict.fromkeys(
        (path[: at + 1] for name in names for path in [made.paths[name]] for at in range(len(path))), 0
    )
    for _, _, number in list(made.order(waiting, RANKS))[:59]:  # so that none has run out of jobs
        path = made.paths[account_of[number]]
        for at in range(len(path)):
            counts[path[: at + 1]] += 1
        for one, other in permutations(counts, 2):
            if one[:-1] == other[:-1]:
                ahead = (counts[one] - 1) / (made.weight(one[-1]) if one[-1] else 1.0)
                assert ahead <= counts[other] / (made.weight(other[-1]) if other[-1] else 1.0)


def test_a_pool_shares_by_the_tree_once_the_log_says_so() -> None:
    """Logs of earlier versions keep the order in which they were decided; a job below a project is told of it."""
    rows = [{"name": "lab"}, {"name": "a", "parent": "lab", "members": ["ann"]}, {"name": "b", "members": ["bob"]}]
    pool = fair_pool(chips=1)
    given = Accounts.model_validate({"projects": rows})
    pool.tell(AccountsSet(now_s=pool.now_s, by="root", accounts=given))
    assert pool.coordinator.state.shares.project_weights == {"project:lab": 0.5, "project:a": 0.5, "project:b": 1}
    pool.tell(PoolSet(now_s=1, planner_turns=True, half_life_s=DAY_S, share_by_tree=True))
    state = pool.coordinator.state
    assert (state.shares.project_weights["project:a"], state.shares.paths["project:lab"]) == (1, ("project:lab", ""))
    for number in range(3):
        pool.submit(f"a{number}", user="ann")
        pool.submit(f"b{number}", user="bob")
    settle(pool)
    order = [state.indexes.ids_by_number[key[2]] for key in queue_head(state)]
    assert [pool.coordinator.job_view(name).place for name in order] == [*range(1, len(order) + 1)]
    (status,) = answer_query(query_job(state, state.jobs["a1"], pool.now_s, {}, None))
    assert any("below project lab (weight 1), which shares as a whole" in note for note in status.notes)
    assert restore_state(serialize_state(state)).shares == state.shares
