"""`evaluate_chips`: scores chips by compute, memory and communication (`cross-domain-pooling.txt`, 4.1.1).

Peak FLOP/s alone mislead, because memory bounds many layers. Each dimension is a ratio to the best chip of
the comparison; the score is their geometric mean, weighted by the user or by the layers of a model
(`model_weights`). `isthmus score-chips` prints them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from isthmus.core.chip import Chip, Precision
from isthmus.core.errors import InputError
from isthmus.plan.profile.layer_matrix import LayerCost, render_table


@dataclass(frozen=True, kw_only=True)
class DimensionWeights:
    """Weights of the dimensions; only their proportions matter."""

    compute: float = 1.0
    memory: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        parts = (self.compute, self.memory, self.communication)
        if min(parts) < 0 or sum(parts) <= 0:
            raise InputError(f"weights {parts}", hint="all must be at least 0, and one above 0")

    @classmethod
    def parse(cls, text: str) -> DimensionWeights:
        """Parse `compute=2,memory=1`; dimensions left out weigh 0.

        Raises `InputError` for a dimension that is unknown or repeated, and for an invalid weight.
        """
        weights = {field.name: 0.0 for field in fields(cls)}
        given: set[str] = set()
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in weights or name in given or not re.fullmatch(r"\d+(\.\d+)?", value):
                raise InputError(
                    f"weight '{part}'", hint=f"write NAME=NUMBER, each name once; names: {', '.join(weights)}"
                )
            weights[name] = float(value)
            given.add(name)
        return cls(**weights)

    def shares(self) -> dict[str, float]:
        """Return the weight of each dimension as a share of their sum."""
        total = self.compute + self.memory + self.communication
        return {field.name: getattr(self, field.name) / total for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class ChipScore:
    """The ratios of a chip to the best of the comparison in each dimension, and its score."""

    chip: str
    compute: float
    memory: float
    communication: float
    score: float


def evaluate_chips(
    chips: Sequence[Chip],
    weights: DimensionWeights | None = None,
    *,
    precision: Precision = "bf16",
    capacity_share: float = 0.5,
) -> tuple[ChipScore, ...]:
    """Return the chips' scores, best first.

    Compute is the dense peak at `precision`; memory the geometric mean of capacity (with weight
    `capacity_share`) and bandwidth; communication the bandwidth to the chips of the node. Latencies do not
    count, as data sheets omit them.
    """
    if not chips:
        raise InputError("no chips to evaluate", hint="name at least one chip of the catalogue")
    w = weights or DimensionWeights()
    total = w.compute + w.memory + w.communication

    def memory(chip: Chip) -> float:
        return float(chip.memory_bytes**capacity_share * chip.memory_bandwidth_bytes_per_s ** (1 - capacity_share))

    best_compute = max(chip.flop_per_s(precision) for chip in chips)
    best_memory = max(memory(chip) for chip in chips)
    best_link = max(chip.in_node_link.bandwidth_bytes_per_s for chip in chips)
    scores = []
    for chip in chips:
        compute, memory_ratio = chip.flop_per_s(precision) / best_compute, memory(chip) / best_memory
        link = chip.in_node_link.bandwidth_bytes_per_s / best_link
        logs = w.compute * math.log(compute) + w.memory * math.log(memory_ratio) + w.communication * math.log(link)
        scores.append(
            ChipScore(
                chip=chip.name,
                compute=compute,
                memory=memory_ratio,
                communication=link,
                score=math.exp(logs / total),
            )
        )
    return tuple(sorted(scores, key=lambda one: (-one.score, one.chip)))


def model_weights(
    rows: Sequence[LayerCost], chip: Chip, *, precision: Precision = "bf16", crossings: int = 1
) -> DimensionWeights:
    """Return weights for a model: the seconds that its forward pass spends on each dimension on `chip`.

    `rows` is the layer matrix; `crossings` is the number of times a micro-batch leaves the chip.
    """
    flops = sum(row.count * row.forward_flops for row in rows)
    moved = sum(row.count * row.moved_bytes for row in rows)
    sent = crossings * max(row.sent_bytes for row in rows)
    return DimensionWeights(
        compute=flops / chip.flop_per_s(precision),
        memory=moved / chip.memory_bandwidth_bytes_per_s,
        communication=sent / chip.in_node_link.bandwidth_bytes_per_s,
    )


def render_chip_scores(scores: Sequence[ChipScore]) -> str:
    """Return the scores as a text table."""
    rows = [
        (one.chip, f"{one.compute:.2f}", f"{one.memory:.2f}", f"{one.communication:.2f}", f"{one.score:.2f}")
        for one in scores
    ]
    return render_table(("chip", "compute", "memory", "communication", "score"), rows)
