"""`fit_framework`: recompute more layers of a layout, until its framework can express the recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from isthmus.plan.search.compose.plan_layout import PlacedPipeline, PlanLayout
from isthmus.plan.search.costs.framework_rules import FrameworkRules, RecomputeRule


def fit_framework(layout: PlanLayout, rules: FrameworkRules | None) -> PlanLayout | None:
    """Return `layout` with recomputation that `rules` admit; None if it then exceeds the memory or replicas differ."""
    if rules is None:
        return layout
    if len({pipeline.split.layers for pipeline in layout.pipelines}) > 1:
        return None
    places = [(pipeline, stage) for pipeline in layout.pipelines for stage in range(len(pipeline.stages))]
    cuts = [pipeline.stages[stage] for pipeline, stage in places]
    needed, num_layers = [cut.recomputed for cut in cuts], [cut.last - cut.first for cut in cuts]
    counts = common_recomputation(
        needed, num_layers, rules.recompute, lambda place, count: _fits(*places[place], count)
    )
    if counts is None:
        return None
    left = iter(counts)
    pipelines = (replace(one, recomputed=tuple(next(left) for _ in one.stages)) for one in layout.pipelines)
    return replace(layout, pipelines=tuple(pipelines))


def common_recomputation(
    needed: Sequence[int], num_layers: Sequence[int], rule: RecomputeRule, fits: Callable[[int, int], bool]
) -> list[int] | None:
    """Return the layers that each stage recomputes, at least `needed`; None if a stage then does not fit.

    `first_layers`: the first N of every stage, or all where it has fewer; the least N is taken. `all_or_none`: all
    layers of all stages. `fits(stage, count)` is whether a stage fits with `count` layers recomputed: the working
    buffer of recomputation can exceed what few layers save.
    """
    if not any(needed):
        return list(needed)
    least = max(needed) if rule == "first_layers" else max(num_layers)
    for most in range(least, max(num_layers) + 1):
        counts = [min(most, count) for count in num_layers]
        if all(fits(stage, count) for stage, count in enumerate(counts)):
            return counts
    return None


def _fits(pipeline: PlacedPipeline, stage: int, recomputed: int) -> bool:
    shape, cut = pipeline.shape, pipeline.stages[stage]
    cost_table = shape.cost_tables[stage]
    in_flight = min(shape.max_in_flight(stage), max(pipeline.micro_batch_counts))
    num_bytes = cost_table.stage_bytes(cut.first, cut.last, in_flight, recomputed, shape.dp, shape.zero)
    return num_bytes <= cost_table.memory_limit_bytes
