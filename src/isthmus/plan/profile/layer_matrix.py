"""The layer matrix of `cross-domain-pooling.txt`, 4.1.1: compute, memory and communication by kind of layer.

Also the matrix of communication between layers, and the merging of small layers before a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.units import format_bytes
from isthmus.plan.profile.component import Component
from isthmus.plan.profile.layer_profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One row: the forward cost of a part of the model for one micro-batch."""

    name: str
    kind: str
    count: int
    """Number of occurrences in the model."""
    parameters: int
    forward_flops: float
    moved_bytes: float
    """Memory traffic."""
    kept_bytes: float
    """Activations saved for the backward pass."""
    sent_bytes: float
    """Bytes that a pipeline sends if it is split after this part."""

    @property
    def intensity(self) -> float:
        """Operations per byte of memory traffic; above the chip's own ratio the part is compute-bound."""
        return self.forward_flops / self.moved_bytes if self.moved_bytes else 0.0


def layer_matrix(
    profile: ModelProfile, *, sequence_length: int, num_tokens: float, precision_bytes: int = 2
) -> tuple[LayerCost, ...]:
    """Return one row per kind of part, in forward order, for a micro-batch of `num_tokens` tokens."""
    counted: dict[tuple[str, Component], int] = {}
    for layer in profile.layers:
        for part in layer.components:
            label = layer.kind if part.kind != "norm" else "layer"
            counted[label, part] = counted.get((label, part), 0) + 1
    ends = {("", profile.embedding): 1}
    last = {("", profile.final_norm): 1, ("", profile.head): 1}
    sent = profile.boundary_bytes(num_tokens, precision_bytes)
    return tuple(
        LayerCost(
            name=f"{part.name} ({label})" if label else part.name,
            kind=part.kind,
            count=count,
            parameters=part.parameters,
            forward_flops=part.forward_flops(sequence_length, num_tokens),
            moved_bytes=part.bytes_moved(sequence_length, num_tokens, precision_bytes),
            kept_bytes=part.activation_bytes(num_tokens, sequence_length, precision_bytes),
            sent_bytes=0.0 if part.kind == "head" else sent,
        )
        for (label, part), count in {**ends, **counted, **last}.items()
    )


def communication_matrix(
    profile: ModelProfile, num_tokens: float, precision_bytes: int = 2
) -> tuple[tuple[float, ...], ...]:
    """Return the bytes that layer i sends to layer j in the forward pass, (num_layers, num_layers).

    A decoder is a chain, so only the hidden states to the next layer count; the backward pass sends the same
    in the opposite direction.
    """
    size, sent = profile.num_layers, profile.boundary_bytes(num_tokens, precision_bytes)
    return tuple(tuple(sent if j == i + 1 else 0.0 for j in range(size)) for i in range(size))


def merge_small_layers(costs_s: Sequence[float], smallest_s: float) -> tuple[tuple[int, int], ...]:
    """Merge neighbouring layers until each group costs at least `smallest_s`; return ranges [first, last).

    `costs_s`, (num_layers,), are seconds. Fewer groups make the split faster and avoid poor boundaries. A
    remainder that is too small joins the previous group. The ranges are in order and cover each layer once.
    """
    ranges: list[tuple[int, int]] = []
    first, cost_s = 0, 0.0
    for index, each_s in enumerate(costs_s):
        cost_s += each_s
        if cost_s >= smallest_s:
            ranges.append((first, index + 1))
            first, cost_s = index + 1, 0.0
    if first < len(costs_s):
        start = ranges.pop()[0] if ranges else 0
        ranges.append((start, len(costs_s)))
    return tuple(ranges)


def render_layer_matrix(rows: Sequence[LayerCost]) -> str:
    """Return the matrix as a text table."""
    head = ("part", "times", "parameters", "GFLOP", "moved", "FLOP/byte", "kept", "sent")
    cells = [
        (
            row.name,
            str(row.count),
            f"{row.parameters:,}",
            f"{row.forward_flops / 1e9:,.1f}",
            format_bytes(row.moved_bytes),
            f"{row.intensity:,.0f}",
            format_bytes(row.kept_bytes),
            format_bytes(row.sent_bytes),
        )
        for row in rows
    ]
    return render_table(head, cells)


def render_communication(matrix: Sequence[Sequence[float]]) -> str:
    """Return the pairs of layers that communicate as a text table; `matrix` is (num_layers, num_layers) in bytes.

    Neighbouring layers that send the same to the next one share a line.
    """
    runs: list[tuple[int, int, int, float]] = []  # first and last sender, distance to the receiver, bytes
    for source, row in enumerate(matrix):
        for target, num_bytes in enumerate(row):
            if not num_bytes:
                continue
            if runs and runs[-1][1:] == (source - 1, target - source, num_bytes):
                runs[-1] = (runs[-1][0], source, target - source, num_bytes)
            else:
                runs.append((source, source, target - source, num_bytes))
    cells = [
        (_range(first, last), _range(first + distance, last + distance), *(format_bytes(num_bytes),) * 2)
        for first, last, distance, num_bytes in runs
    ]
    return render_table(("from layer", "to layer", "forward, each", "backward, each"), cells)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with the first column left-aligned and the others right-aligned."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *(line(row) for row in rows)])
