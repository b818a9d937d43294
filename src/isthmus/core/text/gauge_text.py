"""`GaugeText`: gauges in the text format of Prometheus 0.0.4, written in one pass over their samples.

A scrape has a series for each job, part, link and node group; the client library takes several times as long for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Literal

MetricKind = Literal["gauge", "counter"]

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class GaugeText:
    """Collects gauges and counters; `encoded` returns them. One without samples is left out."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, text: str, value: float, *, kind: MetricKind = "gauge") -> None:
        """Add a metric without labels."""
        self._lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {float(value)!r}")

    def add_series(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        samples: Iterable[tuple[Sequence[str], float | None]],
        *,
        kind: MetricKind = "gauge",
    ) -> None:
        """Add a metric with a series for each sample: the values of its labels, and its value; None has no series."""
        pairs = ",".join(f'{label}="%s"' for label in labels)
        form = f"{name}{{{pairs}}} %r"
        found = [form % (*map(_escaped, values), float(value)) for values, value in samples if value is not None]
        if found:
            self._lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}", *found)

    def encoded(self) -> bytes:
        """Return the text."""
        return "".join(f"{line}\n" for line in self._lines).encode()


@functools.lru_cache(maxsize=16_384)
def _escaped(value: str) -> str:
    return value.translate(_ESCAPES)
