"""`evaluate_chips`: scores chips by compute, memory and communication (`cross-domain-pooling.txt`, 4.1.1).

Peak FLOP/s alone mislead, because memory bounds many layers. Each dimension has the quantities that the report names:
throughput in 16 and in 8 bits; capacity, bandwidth and access latency of the memory; bandwidth and latency of the link
between chips. A quantity is a ratio to the best chip of the comparison, a dimension the geometric mean of its
quantities, and the score that of the dimensions, weighted by the user or by the layers of a model (`model_weights`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

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
        """Parse `compute=2,memory=1`; a name alone weighs 1, dimensions left out weigh 0.

        Raises `InputError` for a dimension that is unknown or repeated, and for an invalid weight.
        """
        weights = {field.name: 0.0 for field in fields(cls)}
        given: set[str] = set()
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = part.partition("=")
            value = value if equals else "1"
            if name not in weights or name in given or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
                raise InputError(
                    f"weight '{part}'", hint=f"write NAME or NAME=NUMBER, each once; names: {', '.join(weights)}"
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


@dataclass(frozen=True, kw_only=True)
class ChipEvaluation:
    """Scores, best first, and what they rest on."""

    scores: tuple[ChipScore, ...]
    # Quantities compared by micro-benchmarks: all chips of the comparison have one.
    measured: tuple[str, ...]
    # The others, with the chips that lack a measurement: data sheets count, and latencies count nothing.
    unmeasured: Mapping[str, tuple[str, ...]]


class _Quantity(NamedTuple):
    """What a dimension consists of: the value of a chip, more is better; None if it is not known."""

    name: str
    measured: Callable[[Chip], float | None]
    data_sheet: Callable[[Chip], float | None]


def evaluate_chips(
    chips: Sequence[Chip], weights: DimensionWeights | None = None, *, precision: Precision | None = None
) -> ChipEvaluation:
    """Return the chips' scores, best first.

    Compute is the geometric mean of the throughput in bf16 and int8, or that in `precision` alone. A quantity is
    compared by micro-benchmarks if every chip has one, otherwise by data sheets; a latency, which data sheets omit,
    then counts nothing.
    """
    if not chips:
        raise InputError("no chips to evaluate", hint="name at least one chip of the catalogue")
    w = weights or DimensionWeights()
    formats: tuple[Precision, ...] = (precision,) if precision else ("bf16", "int8")
    measured: list[str] = []
    unmeasured: dict[str, tuple[str, ...]] = {}

    def log_ratios(quantities: Sequence[_Quantity]) -> list[float]:
        """Return the logarithm of each chip's ratio to the best, the mean over the quantities, (chips,)."""
        rows = []
        for one in quantities:
            lacking = tuple(chip.name for chip in chips if one.measured(chip) is None)
            values = [(one.data_sheet if lacking else one.measured)(chip) for chip in chips]
            known = [value for value in values if value is not None]
            if lacking:
                unmeasured[one.name] = lacking
            else:
                measured.append(one.name)
            if len(known) == len(chips):
                rows.append([math.log(value / max(known)) for value in known])
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    parts = {
        "compute": log_ratios([_throughput(one) for one in formats]),
        "memory": log_ratios(_MEMORY),
        "communication": log_ratios(_COMMUNICATION),
    }
    shares = w.shares()
    scores = [
        ChipScore(
            chip=chip.name,
            **{name: math.exp(logs[place]) for name, logs in parts.items()},
            score=math.exp(sum(share * parts[name][place] for name, share in shares.items())),
        )
        for place, chip in enumerate(chips)
    ]
    ordered = tuple(sorted(scores, key=lambda one: (-one.score, one.chip)))
    return ChipEvaluation(scores=ordered, measured=tuple(measured), unmeasured=unmeasured)


def _throughput(precision: Precision) -> _Quantity:
    def sustained(chip: Chip) -> float | None:
        return chip.sustained.matmul_flop_per_s.get(precision) if chip.sustained else None

    return _Quantity(f"{precision} throughput", sustained, lambda chip: chip.flop_per_s(precision))


def _inverse(name: str) -> Callable[[Chip], float | None]:
    """Return a reader of one over a latency of the chip's micro-benchmarks."""

    def read(chip: Chip) -> float | None:
        seconds: float | None = getattr(chip.sustained, name, None)
        return 1 / seconds if seconds else None

    return read


_MEMORY = (
    _Quantity("memory capacity", lambda chip: chip.reported_bytes, lambda chip: chip.memory_bytes),
    _Quantity("memory bandwidth", lambda _: None, lambda chip: chip.memory_bandwidth_bytes_per_s),
    _Quantity(
        "memory latency",
        _inverse("memory_latency_s"),
        lambda _: None,
    ),
)
_COMMUNICATION = (
    _Quantity(
        "link bandwidth",
        lambda chip: chip.sustained.link_bytes_per_s if chip.sustained else None,
        lambda chip: chip.in_node_link.bandwidth_bytes_per_s,
    ),
    _Quantity(
        "link latency",
        _inverse("small_all_reduce_s"),
        lambda _: None,
    ),
)


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


def render_chip_scores(evaluation: ChipEvaluation) -> str:
    """Return the scores as a text table, with what was compared by data sheets below it."""
    rows = [
        (one.chip, f"{one.compute:.2f}", f"{one.memory:.2f}", f"{one.communication:.2f}", f"{one.score:.2f}")
        for one in evaluation.scores
    ]
    lines = [render_table(("chip", "compute", "memory", "communication", "score"), rows), ""]
    lines.append(f"measured for every chip: {', '.join(evaluation.measured) or 'nothing'}")
    for name, lacking in evaluation.unmeasured.items():
        counts = "counts nothing" if name.endswith("latency") else "by data sheets"
        named = ", ".join(lacking[:4]) + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
        lines.append(f"{name} {counts}: not measured for {named}")
    return "\n".join(lines)
