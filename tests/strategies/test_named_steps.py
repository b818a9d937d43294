"""Rules of the named strategies: each contribution once, the whole sum everywhere, bytes as the sources count them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import InputError, PlanError
from isthmus.strategies import (
    STRATEGIES,
    ElementCounts,
    Phase,
    Step,
    StrategySteps,
    check_steps,
    rank_program,
    steps,
)

SWITCHED = [name for name, one in STRATEGIES.items() if one.aggregator == "switch"]


def checked(name: str, hosts: int, chips: int, num_elements: int, **options: int) -> ElementCounts:
    """Return the counts of steps that the checker has proved."""
    return check_steps(steps(name, hosts, chips, num_elements, **options))


def sums(of: StrategySteps) -> list[dict[int, int]]:
    """Run every participant's program; return each worker's value of each element.

    Worker `w` contributes 10^w, so a sum shows which contribution is missing or counted twice.
    """
    workers = of.grid.num_workers
    held = [dict.fromkeys(range(of.grid.num_elements), 10**rank) for rank in range(workers)]
    held += [{} for _ in of.aggregators]
    programs = [rank_program(of, of.regions, rank) for rank in range(of.num_participants)]
    mail: dict[tuple[int, int, int], dict[int, int]] = {}
    for rank, program in enumerate(programs):
        for elements, message in program.first_sends:
            mail[rank, message.peer, message.number] = {at: held[rank][at] for at in range(*elements)}
    waiting = [deque(program.turns) for program in programs]
    while any(waiting):
        rank = next(
            rank for rank, turns in enumerate(waiting)
            if turns and all((part.peer, rank, part.number) in mail for part in turns[0].parts)
        )  # fmt: skip
        turn = waiting[rank].popleft()
        parts = [mail.pop((part.peer, rank, part.number)) for part in turn.parts]
        for at in range(*turn.elements):
            held[rank][at] = sum(part[at] for part in parts) + (held[rank].get(at, 0) if turn.adds else 0)
        for message in turn.sends:
            mail[rank, message.peer, message.number] = {at: held[rank][at] for at in range(*turn.elements)}
    assert not mail, "every message is received"
    return held[:workers]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(STRATEGIES)), st.integers(1, 5), st.integers(1, 5), st.integers(0, 60), st.integers(1, 4))
def test_every_strategy_sums_each_contribution_once(
    name: str, hosts: int, chips: int, num_elements: int, num_aggregators: int
) -> None:
    """Any hosts, chips, elements (fewer than workers, or none) and aggregators; the programs end with the sum."""
    of = steps(name, hosts, chips, num_elements, num_aggregators=num_aggregators)
    counts = check_steps(of)
    assert sum(counts.sent_by_host) + sum(counts.sent_by_aggregator) == sum(counts.received_by_host) + sum(
        counts.received_by_aggregator
    )
    everything = sum(10**rank for rank in range(hosts * chips))
    assert all(set(values.values()) <= {everything} for values in sums(of))


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(SWITCHED), st.integers(1, 4), st.integers(1, 4), st.integers(0, 60), st.integers(1, 3),
    st.integers(1, 5), st.integers(1, 4),
)  # fmt: skip
def test_few_slots_change_the_rounds_and_never_the_sum(
    name: str, hosts: int, chips: int, num_elements: int, num_aggregators: int, num_slots: int, slot_elements: int
) -> None:
    """Any number and size of slots."""
    of = steps(
        name, hosts, chips, num_elements,
        num_aggregators=num_aggregators, num_slots=num_slots, slot_elements=slot_elements,
    )  # fmt: skip
    check_steps(of)
    everything = sum(10**rank for rank in range(hosts * chips))
    assert all(set(values.values()) <= {everything} for values in sums(of))


M = 960
"""Elements, divisible by all chunks of 4 x 4 workers and 1 to 3 aggregators."""

PER_HOST_4X4 = {
    "ring": 2 * 15 * M // 16,
    "hierarchical-ring": 3 * M // 2,
    "2d-torus": 3 * M // 2,
    "2d-mesh": 6 * M,
    "parameter-server": 4 * M,
    "psring": M,
    "passing": M,
    "switchml": 4 * M,
    "atp": 4 * M,
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_of_four_hosts_of_four_chips_by_hand(name: str) -> None:
    """Per host and direction, in units of M: ring 1.875, torus 1.5, PS and SwitchML 4, PSRing and PASSING 1."""
    counts = checked(name, 4, 4, M)
    assert set(counts.sent_by_host) == set(counts.received_by_host) == {PER_HOST_4X4[name]}


@pytest.mark.parametrize(
    ("name", "copies"), [("parameter-server", 16), ("psring", 4), ("passing", 4), ("switchml", 16)]
)
@pytest.mark.parametrize("num_aggregators", [1, 2, 3])
def test_aggregators_share_the_elements(name: str, copies: int, num_aggregators: int) -> None:
    """Each of p aggregators receives, and sends, 1/p of one copy per worker, or of one per host after the ring."""
    counts = checked(name, 4, 4, M, num_aggregators=num_aggregators)
    share = copies * M // num_aggregators
    assert counts.received_by_aggregator == counts.sent_by_aggregator == (share,) * num_aggregators


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_bytes_of_any_grid(hosts: int, chips: int, unit: int) -> None:
    """Ring 2 (N - 1) / N, torus and hierarchical ring 2 (H - 1) / H, PSRing and PASSING 1, the others G times M."""
    workers = hosts * chips
    num = 2 * workers * unit
    want = {
        "ring": 2 * (workers - 1) * num // workers,
        "hierarchical-ring": 2 * (hosts - 1) * num // hosts,
        "2d-torus": 2 * (hosts - 1) * num // hosts,
        "2d-mesh": 2 * chips * (hosts - 1) * num // hosts,
        "psring": num,
        "passing": num,
    }
    for name in STRATEGIES:
        counts = checked(name, hosts, chips, num)
        assert set(counts.sent_by_host) == set(counts.received_by_host) == {want.get(name, chips * num)}


def test_rounds_by_hand() -> None:
    """A ring of N takes 2 (N - 1) message delays; PASSING 2 + 2 (G - 1); a switch of few slots 2 per window."""
    assert checked("ring", 4, 4, M).num_rounds == 30
    assert checked("2d-torus", 4, 4, M).num_rounds == 3 + 6 + 3
    assert checked("passing", 4, 4, M).num_rounds == 2 + 2 * 3
    # A chip's share is 240; its quarter of 8 slots of 10 holds 20: 12 windows.
    assert checked("passing", 4, 4, M, num_slots=8, slot_elements=10).num_rounds == 3 + 24 + 3
    assert checked("switchml", 4, 4, M, num_slots=8, slot_elements=10).num_rounds == 24


def test_atp_sends_what_finds_no_slot_to_its_parameter_server() -> None:
    """Two switches of 10 slots of 20 elements hold 200 of 480 each; the server adds the other 560."""
    counts = checked("atp", 2, 2, M, num_aggregators=2, num_slots=10, slot_elements=20)
    assert counts.received_by_aggregator == counts.sent_by_aggregator == (800, 800, 4 * 560)
    assert checked("atp", 2, 2, M, num_aggregators=2).received_by_aggregator == (4 * 480, 4 * 480, 0)


def test_steps_are_pure_data() -> None:
    """Two calls give equal objects; steps are sorted by round, and phases count their rounds on."""
    of = steps("psring", 3, 2, 25, num_aggregators=2)
    assert of == steps("psring", 3, 2, 25, num_aggregators=2)
    assert [step.round for step in of] == sorted(step.round for step in of)
    assert len(of) == len(list(of)) == sum(len(phase.steps) for phase in of.phases)
    assert [phase.name.split()[0] for phase in of.phases] == ["reduce-scatter", "push", "broadcast", "all-gather"]
    assert of.aggregators == ("server", "server")
    assert [of.host_of(participant) for participant in range(of.num_participants)] == [0, 0, 1, 1, 2, 2, 3, 4]


def test_the_checker_rejects_a_damaged_strategy() -> None:
    """A lost step, a doubled one and a participant that does not exist."""
    of = steps("passing", 2, 2, 8)
    first = of.messages[0]
    lost = replace(of, messages=(replace(first, steps=first.steps[1:]), *of.messages[1:]))
    doubled = replace(of, messages=(replace(first, steps=(*first.steps, first.steps[0])), *of.messages[1:]))
    for damaged in (lost, doubled):
        with pytest.raises(PlanError, match="ends with"):
            check_steps(damaged)
    stranger = replace(of, messages=(*of.messages, Phase("stranger", (Step(99, 0, 77, 0, 4, adds=False),))))
    with pytest.raises(PlanError, match="not below 5"):
        check_steps(stranger)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("pasing", 2, 2, 8), {}, "did you mean 'passing'"),
        (("xyz", 2, 2, 8), {}, "known: ring, "),
        (("ring", 0, 2, 8), {}, "hosts is 0"),
        (("ring", 2, -1, 8), {}, "chips is -1"),
        (("ring", 2, 2, -8), {}, "num_elements is -8"),
        (("psring", 2, 2, 8), {"num_aggregators": 0}, "num_aggregators is 0"),
        (("passing", 2, 2, 8), {"num_slots": 0}, "num_slots is 0"),
        (("passing", 2, 2, 8), {"num_slots": 1, "slot_elements": 0}, "slot_elements is 0"),
        (("psring", 2, 2, 8), {"num_slots": 4}, "has no switch"),
    ],
)
def test_bad_arguments_have_named_errors(
    arguments: tuple[str, int, int, int], options: dict[str, int], message: str
) -> None:
    """Unknown names give the nearest one; counts below 1 and slots without a switch are refused."""
    with pytest.raises(InputError, match=message):
        steps(*arguments, **options)


def test_all_network_cards_and_chips_share_the_work() -> None:
    """In ring, torus, PSRing and PASSING all chips of all hosts send equally much."""
    for name in ("ring", "2d-torus", "psring", "passing"):
        sent: Counter[int] = Counter()
        for step in steps(name, 4, 4, M):
            sent[step.sender] += step.stop - step.start
        assert len({sent[worker] for worker in range(16)}) == 1
