"""Rules of the steps of collectives: each contribution once, no deadlock, and the fewest bytes between clusters."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.strategies import Region, Step, check_steps, crossing_elements, plan_steps, rank_program, regions
from isthmus.strategies.plan_steps import FAN_OUT

CLUSTERS = st.text(alphabet="abc", min_size=1, max_size=7)


def collectives(size: int, num: int, root: int, sizes: Sequence[int]) -> dict[str, list[Region]]:
    """Return the regions of every collective among `size` ranks."""
    return {
        "all_reduce": regions.all_reduce(num, size),
        "reduce": regions.reduce(num, size, root),
        "broadcast": regions.broadcast(num, size, root),
        "all_gather": regions.all_gather(sizes),
        "reduce_scatter": regions.reduce_scatter(sizes),
        "gather": regions.gather(sizes, root),
        "scatter": regions.scatter(sizes, root),
    }


def execute(steps: Sequence[Step], of: Sequence[Region], size: int, seed: int) -> list[dict[int, Counter[int]]]:
    """Run every rank's program, the ranks in any order; return what each rank holds of each element."""
    choose = random.Random(seed)
    programs = [rank_program(steps, of, rank) for rank in range(size)]
    held: list[dict[int, Counter[int]]] = [
        {at: Counter([rank]) for one in of if rank in one.contributors for at in range(one.start, one.stop)}
        for rank in range(size)
    ]
    mail: dict[tuple[int, int, int], dict[int, Counter[int]]] = {}
    waiting = [deque(one.turns) for one in programs]

    def send(rank: int, peer: int, number: int, elements: tuple[int, int]) -> None:
        mail[rank, peer, number] = {at: held[rank][at] for at in range(*elements)}

    for rank, program in enumerate(programs):
        for elements, message in program.first_sends:
            send(rank, message.peer, message.number, elements)
    while any(waiting):
        ready = [
            rank for rank, turns in enumerate(waiting)
            if turns and all((part.peer, rank, part.number) in mail for part in turns[0].parts)
        ]  # fmt: skip
        assert ready, "the ranks wait for each other"
        rank = choose.choice(ready)
        turn = waiting[rank].popleft()
        values = [mail.pop((part.peer, rank, part.number)) for part in turn.parts]
        for at in range(*turn.elements):
            own = held[rank].get(at, Counter()) if turn.adds else Counter()
            held[rank][at] = sum((value[at] for value in values), own)
        for message in turn.sends:
            send(rank, message.peer, message.number, turn.elements)
    assert not mail, "every message is received"
    for rank, program in enumerate(programs):
        covered = [at for elements in program.results for at in range(*elements)]
        wanted = [at for one in of if rank in one.receivers for at in range(one.start, one.stop)]
        assert covered == sorted(wanted), "results are what the rank receives"
    return held


@settings(max_examples=60, deadline=None)
@given(CLUSTERS, st.data(), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_every_receiver_ends_with_each_contribution_once(
    clusters: str, data: st.DataObject, num: int, piece: int, direct: bool, seed: int
) -> None:
    """Any collective, clusters, cut and order of ranks; the checker agrees with an execution."""
    size = len(clusters)
    root = data.draw(st.integers(0, size - 1))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    for of in collectives(size, num, root, sizes).values():
        steps = plan_steps(of, clusters, piece, direct=direct)
        check_steps(steps, of)
        held = execute(steps, of, size, seed)
        for one in of:
            for rank in one.receivers:
                assert all(held[rank][at] == Counter(one.contributors) for at in range(one.start, one.stop))


@given(CLUSTERS, st.integers(1, 6), st.booleans())
def test_clusters_send_as_little_as_can_be(clusters: str, pieces: int, direct: bool) -> None:
    """An all-reduce of n elements: 2 (C - 1) / C n per cluster, (C - 1) n if direct; a broadcast enters once."""
    names = set(clusters)
    num = 12 * len(names) * pieces
    sent = crossing_elements(plan_steps(regions.all_reduce(num, len(clusters)), clusters, 12, direct=direct), clusters)
    share = 2 * (len(names) - 1) / len(names) if len(names) < 3 or not direct else len(names) - 1
    assert set(sent.values()) == {share * num}
    steps = plan_steps(regions.broadcast(num, len(clusters), 0), clusters, 12)
    entered = defaultdict(int)
    for step in steps:
        if clusters[step.sender] != clusters[step.receiver]:
            entered[clusters[step.receiver]] += step.stop - step.start
    assert entered == dict.fromkeys(names - {clusters[0]}, num)


def test_all_ranks_of_a_cluster_send_across() -> None:
    """Leaders vary between pieces, so that every network card has its share."""
    sent: Counter[int] = Counter()
    for step in plan_steps(regions.all_reduce(4000, 6), "aaabbb", 100):
        if "aaabbb"[step.sender] != "aaabbb"[step.receiver]:
            sent[step.sender] += step.stop - step.start
    assert max(sent.values()) <= 1.1 * min(sent.values())
    assert len(sent) == 6


@given(CLUSTERS, st.sets(st.integers(0, 11)), st.booleans())
def test_only_senders_send_across_where_a_cluster_has_some(clusters: str, senders: set[int], direct: bool) -> None:
    """The sums stay right, and no more bytes cross."""
    of = regions.all_reduce(240, len(clusters))
    steps = plan_steps(of, clusters, 12, direct=direct, senders=frozenset(senders))
    check_steps(steps, of)
    assert crossing_elements(steps, clusters) == crossing_elements(
        plan_steps(of, clusters, 12, direct=direct), clusters
    )
    having = {clusters[one] for one in senders if one < len(clusters)}
    for step in steps:
        if clusters[step.sender] != clusters[step.receiver]:
            assert step.sender in senders or clusters[step.sender] not in having


@given(st.data(), st.integers(1, 5))
def test_all_to_all_needs_a_ranks_own_row_and_column_only(data: st.DataObject, size: int) -> None:
    """Ranks know only their own sizes; their programs fit together, and each block goes straight to its receiver."""
    block = st.integers(0, 5)
    sizes = data.draw(st.lists(st.lists(block, min_size=size, max_size=size), min_size=size, max_size=size))
    messages: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        of = regions.all_to_all(rank, sizes[rank], [row[rank] for row in sizes])
        steps = plan_steps(of, ["a", "b"] * size, 2)
        program = rank_program(steps, of, rank)
        messages.update((rank, message.peer) for _, message in program.first_sends)
        messages.subtract((part.peer, rank) for turn in program.turns for part in turn.parts)
    assert not any(messages.values())


SUM = [Region(0, 4, (0, 1), (0, 1))]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([Step(0, 0, 1, 0, 4, True)], "rank 0 ends with"),
        ([Step(0, 0, 1, 0, 4, True), Step(1, 1, 0, 0, 4, True)], "rank 0 ends with"),
        ([Step(0, 0, 1, 0, 4, False), Step(0, 1, 0, 0, 4, True)], "rank 1 ends with"),
        ([Step(0, 0, 1, 0, 2, True), Step(0, 1, 0, 0, 2, True)], "move 2 elements"),
        ([Step(0, 0, 1, 0, 4, True), Step(1, 1, 0, 2, 4, False)], "inside another step's range"),
        ([Step(0, 2, 1, 0, 4, True)], "does not hold"),
        ([Step(0, 0, 1, 8, 9, True)], "in no region"),
        ([], "move 0 elements"),
    ],
)
def test_the_checker_finds_what_is_wrong(steps: list[Step], why: str) -> None:
    """Half a sum, a contribution twice, a lost one, uncovered elements, and values that do not exist."""
    with pytest.raises(PlanError, match=why):
        check_steps(steps, SUM)


def test_two_messages_that_replace_one_value_are_refused() -> None:
    """Which of them stays would depend on their order of arrival."""
    of = [Region(0, 1, (0, 1), (2,))]
    with pytest.raises(PlanError, match="replace one value"):
        check_steps([Step(0, 0, 2, 0, 1, False), Step(0, 1, 2, 0, 1, False)], of)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.sampled_from(["all_reduce", "reduce", "broadcast"]))
def test_few_bytes_have_neighbours_by_the_number_of_clusters_not_of_ranks(sizes: list[int], collective: str) -> None:
    """A rank has the neighbours of a tree, a leader one more per cluster; rounds grow with the logarithm of a cluster.

    Every rank sends and receives each value once per neighbour.
    """
    cluster_of = "".join(letter * num for letter, num in zip("abcde", sizes, strict=False))
    size = len(cluster_of)
    of = collectives(size, 3, size // 2, [1] * size)[collective]
    steps = plan_steps(of, cluster_of, 4, direct=True)
    check_steps(steps, of)
    neighbours: dict[int, set[int]] = defaultdict(set)
    for step in steps:
        neighbours[step.sender].add(step.receiver)
        neighbours[step.receiver].add(step.sender)
    assert max(map(len, neighbours.values()), default=0) <= FAN_OUT + 1 + len(sizes)
    assert max(Counter((step.sender, step.receiver) for step in steps).values(), default=0) <= 1
    levels = math.ceil(math.log(max(sizes) * (FAN_OUT - 1) + FAN_OUT, FAN_OUT))
    assert len({step.round for step in steps}) <= 2 * levels + 2
    crossing = Counter((cluster_of[one.sender], cluster_of[one.receiver]) for one in steps)
    assert all(num == 1 for (a, b), num in crossing.items() if a != b)
