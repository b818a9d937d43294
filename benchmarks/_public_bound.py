"""How far runs of a public set that a plan cannot tell apart differ: no prediction can be closer to all of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks._public_run import PublicRun
from benchmarks.table import Row
from isthmus.core.plan_parts.tensor_formats import TensorFormats


def alike(runs: Iterable[PublicRun]) -> list[list[float]]:
    """Return the measured seconds of configurations that ran more than once, by configuration.

    Two runs are alike if chips, model and plan are, whatever version of its stack they had, or format of gathers.
    """
    found: dict[object, list[float]] = defaultdict(list)
    for run in runs:
        if run.measured_s is not None:
            formats = TensorFormats(scales=run.plan.formats.scales) if run.plan.formats else TensorFormats()
            plan = run.plan.model_copy(update={"id": "one", "stack": "isthmus", "formats": formats})
            found[id(run.profile), run.pool.model_dump_json(), plan.model_dump_json()].append(run.measured_s)
    return [measured for measured in found.values() if len(measured) > 1]


def scatter(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of the logarithms within groups, of all groups together."""
    squares = free = 0.0
    for group in groups:
        logs = [math.log(one) for one in group]
        mean = statistics.fmean(logs)
        squares, free = squares + sum((one - mean) ** 2 for one in logs), free + len(logs) - 1
    return math.sqrt(squares / free) if free else 0.0


def least_error(groups: Sequence[Sequence[float]]) -> float:
    """Return the sum of the relative errors that remain if each group has the one prediction that is best for it."""
    return sum(min(sum(abs(guess / one - 1) for one in group) for guess in group) for group in groups)


def bound_rows(label: str, runs: Sequence[PublicRun]) -> list[Row]:
    """Return the rows of a set with runs that are alike; none for a set without."""
    groups, ran = alike(runs), sum(run.ran for run in runs)
    if not groups:
        return []
    told = f"{label}: {len(groups)} configurations that ran {sum(map(len, groups))} times"
    return [
        Row(what=f"{told}: scatter within one", ours=100 * scatter(groups), unit="% standard deviation"),
        Row(what=f"{label}: least mean error that one prediction each leaves", ours=100 * least_error(groups) / ran,
            unit="% mean error"),
    ]  # fmt: skip
