"""One queue for the site's own jobs and the pool's parts: who stands where, and what mends it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.agent.adapters.local_queue_file import LocalQueueFile
from isthmus.agent.adapters.scheduler_adapter import QueueMove
from isthmus.core.messages.agent_messages import PartOrder, QueueEntry
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.site.devices.claim import DeviceSource, claim
from isthmus.site.fewest_moves import fewest_moves
from isthmus.site.machine_events import ReorderQueue, SiteInstruction
from isthmus.site.parts import PartKey
from isthmus.site.site_queue import queue_order
from tests.site.driver import Site, local, started_jobs
from tests.site.samples import order


def waits(job: str, priority: str = "middle", num: int = 3) -> PartOrder:
    """An order to queue a part."""
    return order("queued", job, places=["east/h20"] * num, priority=priority)


def stands(site: Site) -> list[str]:
    """The site's queue as it should be."""
    return [part.job for part in queue_order(site.machine.site)]


def moved(done: list[SiteInstruction]) -> tuple[list[str], list[str]]:
    """Who is moved in the site's queue, and who is taken out of it."""
    (step,) = [step for step in done if isinstance(step, ReorderQueue)]
    return [key[0] for key, _ in step.moves], [key[0] for key in step.removed]


@pytest.fixture
def site() -> Site:
    """A site whose three devices are taken by the local job `now`."""
    site = Site()
    site.local(local("now"))
    return site


def test_the_pool_stands_in_its_own_order_and_local_jobs_by_level_and_arrival(site: Site) -> None:
    """Where the two meet, the higher level goes first, and within a level who came earlier."""
    site.local(local("now"), local("m1", 1))
    site.obey(waits("p1"), waits("p2"), queue=["p1", "p2"])
    site.local(local("now"), local("m1", 1), local("m2", 1), local("h", 1, "high"), local("l", 1, "low"))
    assert stands(site) == ["h", "m1", "p1", "p2", "m2", "l"]
    site.obey(waits("p1"), waits("p2"), queue=["p2", "p1"])
    assert stands(site) == ["h", "m1", "p2", "p1", "m2", "l"]
    site.obey(waits("p1"), waits("p2", "high"), queue=["p2", "p1"])
    assert stands(site) == ["p2", "h", "m1", "p1", "m2", "l"]


def test_drift_is_mended_with_the_fewest_moves(site: Site) -> None:
    """Unknown jobs are removed; the pool's job that was moved goes to its place again, and no other moves."""
    site.obey(waits("p1"), waits("p2"), waits("p3"), queue=["p1", "p2", "p3"])
    seen: list[PartKey] = [("p3", 1), ("gone", 2), ("p1", 1), ("p2", 1)]
    assert moved(site.queued(*seen)) == (["p3"], ["gone"])
    assert site.queued(("p1", 1), ("p2", 1), ("p3", 1)) == []


def test_how_people_at_the_site_arrange_their_own_jobs_stands(site: Site) -> None:
    """Within a level; a job is not lifted over one of a higher level."""
    jobs = (local("now"), local("a", 1), local("b", 1), local("c", 1), local("h", 1, "high"))
    site.local(*jobs)
    site.queued(("h", 0), ("c", 0), ("a", 0), ("b", 0))
    assert stands(site) == ["h", "c", "a", "b"]
    site.queued(("b", 0), ("h", 0), ("c", 0), ("a", 0))
    assert stands(site) == ["h", "b", "c", "a"]


def test_a_job_of_the_pool_holds_cards_back_only_as_long_as_the_owner_lets_it() -> None:
    """It waits before a local job: free devices are kept for it for `hold_back_s`."""
    site = Site(OwnerPolicy(hold_back_s=60))
    site.local(local("now", 2))
    site.obey(waits("p", "high", 2))
    assert started_jobs(site.local(local("now", 2), local("x", 1))) == []
    assert started_jobs(site.wait(60)) == ["x"]


def test_what_the_owner_never_lets_the_pool_have_does_not_queue() -> None:
    """It would wait without end; the refusal names the limit."""
    site = Site(OwnerPolicy(pool_chips={"h20": 2}))
    site.obey(waits("p"))
    assert site.states == {"p/1": "refused"}
    assert site.detail("p") == "east: node group 'h20': 3 devices wanted, the owner lets the pool have 2"


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(8)), st.sets(st.integers(0, 7)), st.sets(st.integers(8, 11)))
def test_moves_lead_to_the_wanted_order_and_are_the_fewest(
    wanted: list[int], missing: set[int], fresh: set[int]
) -> None:
    """What stays is a longest sequence that is in order already (checked against all subsets)."""
    present = [entry for entry in range(8) if entry not in missing]
    wanted = [*wanted, *fresh]
    moves = fewest_moves(present, wanted)
    done = list(present)
    for entry, after in moves:
        if entry in done:
            done.remove(entry)
        done.insert(done.index(after) + 1 if after is not None else 0, entry)
    assert done == wanted
    place = {entry: index for index, entry in enumerate(wanted)}
    longest = max(
        num
        for num in range(len(present) + 1)
        for some in itertools.combinations(present, num)
        if all(place[a] < place[b] for a, b in itertools.pairwise(some))
    )
    assert len(moves) == len(wanted) - longest


def test_the_local_queue_is_a_file_that_people_may_edit(tmp_path: Path) -> None:
    """Nonsense is passed over, what stands twice counts once; a move behind what is gone puts last."""
    file = tmp_path / "queue"
    queue = LocalQueueFile(file)
    assert queue.entries() == ()
    file.write_text("b/2\n!?\na\nb/2\nb/x\n")
    a, b, c = QueueEntry(job="a"), QueueEntry(job="b", attempt=2), QueueEntry(job="c", attempt=1)
    assert queue.entries() == (b, a)
    queue.reorder([QueueMove(entry=c, after=QueueEntry(job="nobody")), QueueMove(entry=a)], removed=[b])
    assert queue.entries() == (a, c)
    assert file.read_text() == "a\nc/1\n"


def test_a_queue_in_any_disorder_comes_into_order(tmp_path: Path) -> None:
    """The moves that the machine asks for, carried out by the adapter's file, leave nothing to do."""
    rng = random.Random(5)
    wanted = [QueueEntry(job=f"j{i}", attempt=i % 2) for i in range(300)]
    present = rng.sample(wanted, 250)
    queue = LocalQueueFile(tmp_path / "queue")
    queue.reorder([QueueMove(entry=entry) for entry in present], removed=())
    moves = fewest_moves(queue.entries(), wanted)
    queue.reorder([QueueMove(entry=entry, after=after) for entry, after in moves], removed=())
    assert list(queue.entries()) == wanted


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 6),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4),
    st.integers(0, 6),
)
def test_a_claim_is_found_where_there_is_one_and_takes_no_victim_in_vain(
    wanted: int, num_free: int, given_up: list[tuple[int, bool]], room: int
) -> None:
    """Compared with all subsets of victims; devices that are not the pool's yet stay within its room."""
    sources = [
        DeviceSource(key=f"v{i}", num_devices={"g": num}, counted=counted) for i, (num, counted) in enumerate(given_up)
    ]

    def reach(some: tuple[DeviceSource[str], ...]) -> int:
        counted = sum(one.num_devices["g"] for one in some if one.counted)
        return counted + min(room, num_free + sum(one.num_devices["g"] for one in some if not one.counted))

    taken = claim({"g": wanted}, {"g": num_free}, sources, {"g": room})
    assert (taken is not None) == (reach(tuple(sources)) >= wanted)
    if taken is not None:
        from_victims = {key: devices["g"] for key, devices in taken.victims.items()}
        assert taken.free["g"] + sum(from_victims.values()) == wanted
        assert 0 <= taken.free["g"] <= num_free
        used = [one for one in sources if from_victims.get(one.key)]
        assert all(from_victims[one.key] <= one.num_devices["g"] for one in used)
        for one in used:
            others = tuple(other for other in used if other is not one)
            assert reach(others) < wanted, "a victim that could be left out"


def test_a_queued_part_that_is_ordered_to_run_fails_and_holds_nothing(site: Site) -> None:
    """A server that skips the steps between gets no process, and no device is counted for it."""
    site.obey(waits("p1"), queue=["p1"])
    site.obey(order("running", "p1", places=["east/h20"] * 3))
    part = next(part for part in site.machine.parts.values() if part.job == "p1")
    assert part.state == "failed"
    assert not part.workers
