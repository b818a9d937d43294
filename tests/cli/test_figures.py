"""What metrics add up to, and charts of characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cli.job_statistics import (
    JobStatistics,
    downsample,
    pipeline_neighbours,
    predicted_tokens_per_s,
    wan_links,
    wan_neighbours,
)
from isthmus.cli.terminal.charts import area_chart, resample, stacked_bar
from isthmus.cli.terminal.tables import stages_text
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import Plan, Stage
from tests.cli.samples import make_metrics, make_plan

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=200)


@settings(max_examples=30, deadline=None)
@given(st.permutations(make_metrics(6)))
def test_the_order_of_arrival_does_not_matter(metrics: list[StepMetrics]) -> None:
    """Ranks report when they can; the sums are the same."""
    expected, found = JobStatistics(make_metrics(6)), JobStatistics(metrics)
    assert found.series("loss") == expected.series("loss")
    assert found.iteration_s() == expected.iteration_s()
    assert found.link_traffic_mbps(make_plan()) == expected.link_traffic_mbps(make_plan())
    assert [found.step_breakdown(rank) for rank in found.ranks] == [
        expected.step_breakdown(rank) for rank in expected.ranks
    ]


@given(st.permutations([1, 2, 3]))
def test_the_latest_attempt_of_a_step_counts(attempts: list[int]) -> None:
    """In whatever order the attempts' figures arrive."""
    figures = JobStatistics(
        StepMetrics(job="j", attempt=attempt, rank=0, step=4, values={"loss": float(attempt)}) for attempt in attempts
    )
    assert figures.series("loss") == [(4, 3.0)]


def test_the_first_step_does_not_count_in_the_pace() -> None:
    """Its caches are cold; alone it is better than nothing."""
    metrics = make_metrics(5)
    whole, first = JobStatistics(metrics), JobStatistics(metrics[:3])
    pace_s, first_s = whole.iteration_s(), first.iteration_s()
    assert pace_s is not None
    assert first_s is not None
    assert first_s > pace_s
    assert whole.eta_s(8) == pytest.approx(3 * pace_s)
    assert whole.eta_s(5) == whole.eta_s(2) == 0


def test_without_metrics_there_is_nothing_to_say() -> None:
    """Every figure is absent rather than zero."""
    figures = JobStatistics()
    assert (figures.iteration_s(), figures.tokens_per_s(), figures.latest("loss")) == (None, None, None)
    assert (figures.eta_s(10), figures.step_breakdown(0), figures.num_steps_done(10)) == (None, None, 0)
    assert set(figures.link_traffic_mbps(make_plan()).values()) == {0.0}


def test_every_byte_sent_crosses_one_link() -> None:
    """The links' traffic times the time is what the ranks sent; a middle stage's is halved between two."""
    metrics = make_metrics(4)
    figures = JobStatistics(metrics)
    sent = sum(one.values["wan_bytes"] or 0.0 for one in metrics)
    took_s = sum(value for _, value in figures.series("step_s"))
    carried = sum(figures.link_traffic_mbps(make_plan()).values()) * 1e6 / 8 * took_s
    assert carried == pytest.approx(sent)
    assert len(set(map(round, figures.link_traffic_mbps(make_plan()).values()))) == 1


def test_neighbours_follow_the_pipeline_of_the_replica() -> None:
    """With two replicas a rank's neighbours are in its own; ends have none."""
    one = make_plan()
    stages = [stage.model_copy(update={"replica": replica}) for replica in (0, 1) for stage in one.stages]
    plan = Plan.model_validate(one.model_dump() | {"stages": stages, "dp": 2, "predicted": None})
    assert [pipeline_neighbours(plan, rank) for rank in range(6)] == [
        (None, 2), (None, 3), (0, 4), (1, 5), (2, None), (3, None),
    ]  # fmt: skip
    assert pipeline_neighbours(plan, 6) == (None, None)
    assert wan_neighbours(plan, 3) == [1, 5]
    assert len(wan_links(plan)) == 4
    assert predicted_tokens_per_s(plan) is None
    assert predicted_tokens_per_s(one) == pytest.approx(4 * 256 / 0.62)


@given(VALUES, st.integers(2, 50))
def test_thinning_keeps_the_ends_and_the_order(values: list[float], limit: int) -> None:
    """At most `limit` points, each of them one that was there."""
    series = list(enumerate(values))
    thinned = downsample(series, limit)
    assert len(thinned) == min(len(series), limit)
    assert thinned == sorted(set(thinned) & set(series))
    assert thinned[:1] == series[:1]
    assert thinned[-1:] == series[-1:]


@given(VALUES, st.integers(1, 60))
def test_resampling_keeps_within_the_range(values: list[float], width: int) -> None:
    """Means lie between the least and the greatest; no more of them than asked."""
    bins = resample(values, width)
    assert len(bins) == min(len(values), width)
    assert all(min(values) - 1e-6 <= one <= max(values) + 1e-6 for one in bins)


@given(VALUES, st.integers(1, 60), st.integers(2, 10))
def test_charts_have_the_size_that_was_asked(values: list[float], width: int, height: int) -> None:
    """One character a column; a curve has its height in lines of one width."""
    lines = area_chart(values, width=width, height=height)
    assert len(lines) == (height if values else 0)
    assert len({line.index("┤") if "┤" in line else line.index("│") for line in lines if values}) <= len(lines)


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.integers(1, 80))
def test_a_bar_is_as_wide_as_asked(parts: list[float], width: int) -> None:
    """Shares are rounded so that the whole stays whole; a part without size has no mark."""
    drawn = stacked_bar(parts, "abc", width)
    assert len(drawn) == width
    assert all(mark not in drawn for mark, part in zip("abc", parts, strict=True) if part == 0)


def unlike_plan() -> Plan:
    """Three replicas: two stages at `a`, twice one at `b`, with unlike micro-batches."""
    stages = (
        Stage(cluster="a", node_group="g", layers=(0, 3)),
        Stage(cluster="a", node_group="g", layers=(3, 4)),
        Stage(cluster="b", node_group="g", layers=(0, 4), replica=1, tp=2),
        Stage(cluster="b", node_group="g", layers=(0, 4), replica=2, tp=2),
    )
    return Plan(
        id="u", stages=stages, dp=3, micro_batches=5, replica_micro_batches=(5, 2, 2), micro_batch_size=1,
        sequence_length=8,
    )  # fmt: skip


def test_unlike_replicas_stand_side_by_side_and_their_gradients_cross_links() -> None:
    """Each kind with its stages, its micro-batches and how often; what a rank sends is gradients' traffic."""
    plan = unlike_plan()
    assert stages_text(plan) == "a 0-2 > a 3 (5 micro-batches) | b 0-3 (tp 2) (2 micro-batches)  × 2"
    assert wan_links(plan) == [("a", "b"), ("b", "a")]
    values = {"wan_bytes": 100.0, "step_s": 2.0}
    metrics = [StepMetrics(job="j", attempt=1, rank=rank, step=0, values=values) for rank in range(6)]
    sent = JobStatistics(metrics).link_traffic_mbps(plan)
    assert sent == {("a", "b"): pytest.approx(800e-6), ("b", "a"): pytest.approx(1600e-6)}
