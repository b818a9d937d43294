"""`Layout`: a result of the search before it is written as a plan: pipelines and their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.chains.chain_shape import Chain, Shape
from isthmus.plan.search.compose.compose_even import deal_evenly
from isthmus.plan.search.costs.stage_costs import StageCut
from isthmus.plan.search.splits.deal_micro_batches import Pace, deal_micro_batches


@dataclass(frozen=True)
class Row:
    """The replicas of one pipeline."""

    shape: Shape
    chain: Chain
    # Micro-batches of each replica in a step, shape [dp].
    counts: tuple[int, ...]

    @cached_property
    def cuts(self) -> tuple[StageCut, ...]:
        """Every stage with its recomputed layers."""
        return self.shape.stage_cuts(self.chain.layers, max(self.counts)) or ()

    @property
    def end_s(self) -> float:
        """Seconds until the last replica finishes, gradients reduced inside its clusters."""
        cost = self.chain.cost
        return cost.first_s + (max(self.counts) - 1) * cost.pace_s


@dataclass(frozen=True)
class Layout:
    """Pipelines side by side."""

    rows: tuple[Row, ...]
    # Samples of a micro-batch; the largest where pipelines have mixed sizes.
    micro_batch_size: int
    schedule: str
    # Seconds of the gradient ring between clusters.
    ring_s: float

    @cached_property
    def estimate_s(self) -> float:
        """Closed-form seconds of an iteration, by which the search compares layouts."""
        return max(pipeline.end_s for pipeline in self.rows) + self.ring_s

    @property
    def link_bound(self) -> bool:
        """Whether the gradient ring between clusters takes longer than all micro-batches."""
        return self.ring_s > max(pipeline.end_s for pipeline in self.rows)

    @property
    def unlike_sizes(self) -> bool:
        """Whether pipelines have different micro-batch sizes."""
        return any(pipeline.shape.micro_batch_size != self.micro_batch_size for pipeline in self.rows)

    @property
    def local_steps(self) -> int:
        """Steps between two parameter averages of groups of replicas; 1: every step reduces gradients."""
        return self.rows[0].shape.task.local_steps

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return sum(pipeline.shape.dp for pipeline in self.rows)

    @cached_property
    def num_chips(self) -> int:
        """Chips of all stages."""
        return sum(pipeline.shape.num_chips for pipeline in self.rows)

    @cached_property
    def clusters(self) -> tuple[str, ...]:
        """The clusters it uses, sorted by name."""
        return tuple(
            sorted(
                {slot.cluster for pipeline in self.rows for slot in (s.spot for s in pipeline.shape.segments)}
            )
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
                    pipeline.counts,
                    pipeline.shape.micro_batch_size,
                    tuple((s.cluster, s.group.name) for s in pipeline.shape.spots),
                    pipeline.chain.layers,
                    tuple((s.degrees.tp, s.degrees.cp, s.degrees.ep) for s in pipeline.shape.seats),
                )
                for pipeline in self.rows
            ),
        )

    def rate(self, each: str) -> float:
        """Return the sum over chips of `price` (per second) or `power` (watts)."""
        total = 0.0
        for pipeline in self.rows:
            for slot, cost_table in zip(pipeline.shape.spots, pipeline.shape.seats, strict=True):
                value = slot.group.price_per_chip_hour / 3600 if each == "price" else slot.chip.power_w
                total += pipeline.shape.dp * cost_table.num_chips * value
        return total


def deal(
    chosen: Sequence[tuple[Shape, Chain]],
    total: int,
    micro_batch_size: int,
    ring_s: float,
    even: bool = False,
) -> Layout | None:
    """Return the layout of split pipelines with the micro-batches distributed; None with too few of them.

    Distributes by speed, or equally with `even`.
    """
    chosen = placed(chosen)
    paces = [Pace(chain.cost.first_s, chain.cost.pace_s, shape.dp) for shape, chain in chosen]
    counts = deal_evenly(paces, total) if even else deal_micro_batches(paces, total)
    if counts is None:
        return None
    pipelines = tuple(
        Row(shape, chain, pipeline) for (shape, chain), pipeline in zip(chosen, counts, strict=True)
    )
    return Layout(pipelines, micro_batch_size, chosen[0][0].schedule, ring_s)


def placed(chosen: Sequence[tuple[Shape, Chain]]) -> list[tuple[Shape, Chain]]:
    """Return split pipelines, pooled ones expanded into one per distinct set of stage locations."""
    return [one for shape, chain in chosen for one in chain.parts or ((shape, chain),)]
