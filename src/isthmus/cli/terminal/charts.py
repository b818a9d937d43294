"""Text charts for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = "▁▂▃▄▅▆▇█"


def area_chart(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return an area chart of `values` as `height` lines, top first, with the scale at the left.

    Columns have a resolution of an eighth of a line; no values give no lines.
    """
    columns = resample(values, width)
    if not columns:
        return []
    low, high = min(columns), max(columns)
    span = high - low or 1.0
    eighths = [max(1, round((value - low) / span * height * 8)) for value in columns]
    lines = []
    for row in reversed(range(height)):
        filled = (min(8, max(0, count - row * 8)) for count in eighths)
        label = high if row == height - 1 else low if row == 0 else None
        scale = f"{label:8.3f} ┤" if label is not None else " " * 8 + " │"
        lines.append(scale + "".join(_EIGHTHS[part - 1] if part else " " for part in filled))
    return lines


def stacked_bar(parts: Sequence[float], marks: str, width: int) -> str:
    """Return a bar of `width` characters divided in proportion to `parts`, each drawn with its mark."""
    total = sum(parts)
    if total <= 0:
        return " " * width
    ends, done = [], 0.0
    for part in parts:
        done += part
        ends.append(round(done / total * width))
    starts = [0, *ends]
    return "".join(mark * (end - start) for mark, start, end in zip(marks, starts, ends, strict=False))


def resample(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` means over equal-sized runs of `values`."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
