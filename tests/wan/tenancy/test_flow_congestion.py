"""How a flow is carried: one step at a time, after a while, and back; nothing moves a flow to and fro."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.tenancy.flow_congestion import (
    CALM_S,
    MAX_CALM_S,
    RAISE_S,
    RELAPSE_S,
    CarriedBy,
    FlowCongestion,
    LinkQuality,
)

CALM, BETWEEN = LinkQuality(), LinkQuality(marked_share=0.005)
MARKED, LOSSY = LinkQuality(marked_share=0.2), LinkQuality(lost_share=0.02)
STEPS = {("direct", "marked"), ("marked", "tcp"), ("tcp", "marked"), ("marked", "direct")}


def run(flow: FlowCongestion, quality: LinkQuality, seconds: float, start_s: float) -> list[CarriedBy]:
    """Return the states that a flow passes while a link stays as it is."""
    found = [flow.now]
    for step in range(round(seconds / 0.1)):
        state = flow.measured(quality, start_s + step * 0.1)
        found += [state] if state is not found[-1] else []
    return found


def test_marks_alone_never_take_a_flow_to_tcp() -> None:
    """Congestion without loss is answered by another mark; loss that goes on, by TCP; calm brings it back."""
    flow = FlowCongestion()
    assert run(flow, MARKED, 60, 0) == [CarriedBy.DIRECT, CarriedBy.MARKED]
    assert run(flow, LOSSY, 5, 60) == [CarriedBy.MARKED, CarriedBy.TCP]
    assert run(flow, CALM, 2 * CALM_S + 1, 65) == [CarriedBy.TCP, CarriedBy.MARKED, CarriedBy.DIRECT]


def test_a_short_burst_moves_nothing() -> None:
    """What lasts less than the time to raise is over before a move would help."""
    flow = FlowCongestion()
    assert run(flow, LOSSY, RAISE_S, 0) == [CarriedBy.DIRECT]
    assert run(flow, CALM, 1, 1) == [CarriedBy.DIRECT]


def test_between_congested_and_calm_nothing_moves() -> None:
    """That is the hysteresis: a raised flow stays, and so does a direct one."""
    flow = FlowCongestion()
    assert run(flow, BETWEEN, 30, 0) == [CarriedBy.DIRECT]
    run(flow, LOSSY, 5, 30)
    assert run(flow, BETWEEN, 60, 35) == [CarriedBy.TCP]


def test_a_link_that_relapses_keeps_a_flow_raised_for_longer() -> None:
    """The time of calm doubles with each relapse, to its bound, and is the first again after a long calm."""
    flow, now_s, waits = FlowCongestion(), 0.0, list[float]()
    for _ in range(8):
        while flow.measured(LOSSY, now_s) is not CarriedBy.MARKED:
            now_s += 0.1
        start_s = now_s
        while flow.measured(CALM, now_s) is not CarriedBy.DIRECT:
            now_s += 0.1
        waits.append(now_s - start_s)
    assert all(later > earlier * 1.5 for earlier, later in pairwise(waits[:6]))
    assert max(waits) <= MAX_CALM_S + 1
    now_s += 2 * RELAPSE_S
    while flow.measured(LOSSY, now_s) is not CarriedBy.MARKED:
        now_s += 0.1
    assert flow.calm_s == CALM_S


@given(seed=st.integers(0, 2**40))
def test_every_history_moves_one_step_at_a_time_and_seldom(seed: int) -> None:
    """Only the table's steps; none sooner than the time to raise after the one before; calm ends where it began."""
    rng, flow, now_s, moved_s = Random(seed), FlowCongestion(), 0.0, -1.0
    for _ in range(40):
        quality = rng.choice((CALM, BETWEEN, MARKED, LOSSY))
        for _ in range(rng.randint(1, 60)):
            now_s += 0.1
            before = flow.now
            after = flow.measured(quality, now_s)
            if after is not before:
                assert (before.value, after.value) in STEPS
                assert moved_s < 0 or now_s - moved_s >= RAISE_S - 1e-9
                moved_s = now_s
    run(flow, CALM, 2 * MAX_CALM_S + 1, now_s)
    assert flow.now is CarriedBy.DIRECT
