"""Rules of a schedule's run on the virtual clock."""

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.plan import StageTime
from isthmus.schedule import make_schedule
from isthmus.sim import SimulatedLink, run_pipeline

times = st.floats(0.001, 0.1)


def equal_stages(count, forward_s=0.01, backward_s=0.02):
    return [StageTime(forward_s=forward_s, backward_s=backward_s)] * count


@given(st.integers(1, 6), st.integers(1, 12), times, times, st.sampled_from(["1f1b", "gpipe"]))
def test_without_delay_the_bubble_is_the_textbook_one(stages, micro_batches, forward_s, backward_s, name):
    """Equal stages and free wires: a step takes (M + S - 1) (F + B)."""
    run = run_pipeline(make_schedule(name, stages, micro_batches), equal_stages(stages, forward_s, backward_s), {}, 1)
    expected_s = (micro_batches + stages - 1) * (forward_s + backward_s)
    assert abs(run.step_s - expected_s) < 1e-9 * micro_batches * stages
    assert all(abs(busy - micro_batches * (forward_s + backward_s)) < 1e-9 for busy in run.busy_s)


@given(
    st.lists(st.tuples(times, times), min_size=1, max_size=5),
    st.integers(1, 10),
    st.floats(0, 0.05),
    st.floats(1e6, 1e9),
)
def test_a_step_lies_between_the_critical_path_and_the_serial_sum(stages, micro_batches, delay_s, bytes_per_s):
    """Never faster than the busiest stage or one micro-batch's round; never slower than all in a row."""
    stage_times = [StageTime(forward_s=f, backward_s=b) for f, b in stages]
    wires = both_ways(len(stages), bytes_per_s, delay_s)
    run = run_pipeline(make_schedule("1f1b", len(stages), micro_batches), stage_times, wires, 1e5)
    hop_s = delay_s + 1e5 / bytes_per_s
    round_s = sum(f + b for f, b in stages) + 2 * (len(stages) - 1) * hop_s
    busiest_s = max(f + b for f, b in stages) * micro_batches
    assert max(round_s, busiest_s) - 1e-9 <= run.step_s <= round_s * micro_batches + 1e-9


def both_ways(stages, bytes_per_s, delay_s):
    pairs = [(s, s + 1) for s in range(stages - 1)]
    return {
        pair: SimulatedLink(name=f"{pair}", bytes_per_s=bytes_per_s, delay_s=delay_s)
        for pair in [*pairs, *((b, a) for a, b in pairs)]
    }


@given(st.integers(2, 5), st.integers(1, 10), st.floats(0, 0.05), st.floats(0, 0.05))
def test_more_delay_never_makes_a_step_faster(stages, micro_batches, delay_s, more_s):
    """Delay is monotone."""
    schedule = make_schedule("1f1b", stages, micro_batches)
    near = run_pipeline(schedule, equal_stages(stages), both_ways(stages, 1e8, delay_s), 1e5)
    far = run_pipeline(schedule, equal_stages(stages), both_ways(stages, 1e8, delay_s + more_s), 1e5)
    assert far.step_s >= near.step_s - 1e-9


def test_boundaries_on_one_wire_share_its_rate():
    """Two boundaries over one wire take longer than over two such wires, and carry the same bytes."""
    schedule = make_schedule("gpipe", 3, 4)
    own = {
        (a, b): SimulatedLink(name=f"{a}{b}", bytes_per_s=1e6, delay_s=0) for a, b in [(0, 1), (1, 2), (1, 0), (2, 1)]
    }
    shared = {
        pair: SimulatedLink(name="out" if pair[0] < pair[1] else "back", bytes_per_s=1e6, delay_s=0) for pair in own
    }
    apart = run_pipeline(schedule, equal_stages(3), own, 2e4)
    together = run_pipeline(schedule, equal_stages(3), shared, 2e4)
    assert together.step_s > apart.step_s
    assert sum(together.link_bytes.values()) == sum(apart.link_bytes.values()) == 4 * 4 * 2e4
