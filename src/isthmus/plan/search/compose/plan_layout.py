"""`PlanLayout`: a result of the search before it is written as a plan: pipelines and their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.compose.compose_equal import distribute_equally
from isthmus.plan.search.compose.joined_node_groups import joined_ring_s
from isthmus.plan.search.costs.stage_cost_table import TimedStage
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape, PipelineSplit
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming, distribute_micro_batches


@dataclass(frozen=True)
class PlacedPipeline:
    """The replicas of one pipeline."""

    shape: PipelineShape
    split: PipelineSplit
    # Micro-batches of each replica in a step, shape [dp].
    micro_batch_counts: tuple[int, ...]
    # Layers that each stage recomputes; None: as few as fit.
    recomputed: tuple[int, ...] | None = None

    @cached_property
    def stages(self) -> tuple[TimedStage, ...]:
        """Every stage with its recomputed layers."""
        if self.recomputed is not None:
            rows = zip(self.shape.cost_tables, self.split.layers, self.recomputed, strict=True)
            return tuple(cost_table.time_stage(*layers, count) for cost_table, layers, count in rows)
        return self.shape.fit_stages(self.split.layers, max(self.micro_batch_counts)) or ()

    @property
    def end_s(self) -> float:
        """Seconds until the last replica finishes, gradients reduced inside its clusters."""
        cost = self.split.cost
        return cost.first_s + (max(self.micro_batch_counts) - 1) * cost.interval_s


@dataclass(frozen=True)
class PlanLayout:
    """Pipelines side by side."""

    pipelines: tuple[PlacedPipeline, ...]
    # Samples of a micro-batch; the largest where pipelines have mixed sizes.
    micro_batch_size: int
    schedule: str
    # Seconds of the gradient ring between clusters.
    ring_s: float

    @cached_property
    def estimate_s(self) -> float:
        """Closed-form seconds of an iteration, by which the search compares layouts."""
        return max(pipeline.end_s for pipeline in self.pipelines) + self.ring_s

    @property
    def link_bound(self) -> bool:
        """Whether the gradient ring between clusters takes longer than all micro-batches."""
        return self.ring_s > max(pipeline.end_s for pipeline in self.pipelines)

    @property
    def mixed_sizes(self) -> bool:
        """Whether pipelines have different micro-batch sizes."""
        return any(pipeline.shape.micro_batch_size != self.micro_batch_size for pipeline in self.pipelines)

    @cached_property
    def simulation_cells(self) -> int:
        """(Stage, micro-batch) pairs that a simulation computes: its cost. Equal replicas are simulated once."""
        return sum(one.shape.num_stages * sum(set(one.micro_batch_counts)) for one in self.pipelines)

    @property
    def local_steps(self) -> int:
        """Steps between two parameter averages of groups of replicas; 1: every step reduces gradients."""
        return self.pipelines[0].shape.workload.local_steps

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return sum(pipeline.shape.dp for pipeline in self.pipelines)

    @cached_property
    def num_chips(self) -> int:
        """Chips of all stages."""
        return sum(pipeline.shape.num_chips for pipeline in self.pipelines)

    @cached_property
    def clusters(self) -> tuple[str, ...]:
        """The clusters it uses, sorted by name."""
        return tuple(
            sorted({slot.cluster for pipeline in self.pipelines for slot in (s.slot for s in pipeline.shape.segments)})
        )

    @property
    def key(self) -> tuple[object, ...]:
        """An identity that is independent of the order in which layouts are found."""
        return (
            self.micro_batch_size,
            self.schedule,
            self.local_steps,
            tuple(
                (
                    pipeline.micro_batch_counts,
                    pipeline.shape.micro_batch_size,
                    tuple((s.cluster, s.group.name) for s in pipeline.shape.slots),
                    pipeline.split.layers,
                    tuple((s.degrees.tp, s.degrees.cp, s.degrees.ep) for s in pipeline.shape.cost_tables),
                )
                for pipeline in self.pipelines
            ),
        )

    @cached_property
    def price_per_s(self) -> float:
        """Price of all chips for a second."""
        return sum(
            pipeline.shape.dp * cost_table.num_chips * slot.group.price_per_chip_hour / 3600
            for pipeline in self.pipelines
            for slot, cost_table in zip(pipeline.shape.slots, pipeline.shape.cost_tables, strict=True)
        )

    @cached_property
    def energy_j(self) -> float:
        """Closed-form joules of an iteration: the idle power of all chips, and what the passes draw more."""
        total_j = 0.0
        for pipeline in self.pipelines:
            rows = zip(pipeline.shape.slots, pipeline.shape.cost_tables, pipeline.stages, strict=True)
            passes = sum(pipeline.micro_batch_counts)
            for slot, cost_table, stage in rows:
                chip = slot.chip
                waiting_j = pipeline.shape.dp * chip.waiting_power_w * self.estimate_s
                more_j = passes * stage.total_s * (chip.power_w - chip.waiting_power_w)
                total_j += cost_table.num_chips * (waiting_j + more_j)
        return total_j


def make_layout(
    chosen: Sequence[tuple[PipelineShape, PipelineSplit]],
    total: int,
    micro_batch_size: int,
    ring_s: float,
    equal: bool = False,
) -> PlanLayout | None:
    """Return the layout of split pipelines with the micro-batches distributed; None with too few of them.

    Distributes by speed, or equally with `equal`.
    """
    chosen = expand_pools(chosen)
    paces = [ReplicaTiming(chain.cost.first_s, chain.cost.interval_s, shape.dp) for shape, chain in chosen]
    counts = distribute_equally(paces, total) if equal else distribute_micro_batches(paces, total)
    if counts is None:
        return None
    pipelines = tuple(
        PlacedPipeline(shape, chain, pipeline) for (shape, chain), pipeline in zip(chosen, counts, strict=True)
    )
    return PlanLayout(pipelines, micro_batch_size, chosen[0][0].schedule, joined_ring_s(chosen, ring_s))


def expand_pools(
    chosen: Sequence[tuple[PipelineShape, PipelineSplit]],
) -> list[tuple[PipelineShape, PipelineSplit]]:
    """Return split pipelines, pooled ones expanded into one per distinct set of stage locations."""
    return [one for shape, chain in chosen for one in chain.members or ((shape, chain),)]
