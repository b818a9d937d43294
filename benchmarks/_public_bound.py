"""Bounds of a public set: how far runs that a plan cannot tell apart differ, and what factors could do in hindsight."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks._public_run import PublicRun
from benchmarks.table import Row
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.stack import find_stack


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


def kind_of(run: PublicRun) -> tuple[object, ...]:
    """Return the kind of a run: its stack, precision and scales, and which kinds of parallelism it has."""
    plan, stage = run.plan, run.plan.stages[0]
    scales = plan.formats.scales if plan.formats else None
    degrees = (stage.tp > 1, stage.cp > 1, len(plan.pipeline()) > 1)
    return find_stack(plan.stack).name, plan.precision, scales, degrees


def factor_rows(label: str, runs: Sequence[PublicRun], predicted_s: Mapping[str, float]) -> list[Row]:
    """Return the mean errors that remain with the factor that is best for all runs, for each stack, for each kind.

    The factors are chosen in hindsight, with every run seen: a calibration with so many parameters that sees a part of
    the runs can hardly be closer.
    """
    ran = [(run, run.measured_s / predicted_s[run.name]) for run in runs if run.measured_s is not None]
    keys: dict[str, Callable[[PublicRun], object]] = {
        "all runs": lambda run: run.kind,
        "each stack": lambda run: find_stack(run.plan.stack).name,
        "each kind": kind_of,
    }
    rows = []
    for told, key in keys.items():
        groups: dict[object, list[float]] = defaultdict(list)
        for run, factor in ran:
            groups[key(run)].append(factor)
        left = 100 * least_error(list(groups.values())) / len(ran)
        what = f"{label}: best factor of {told} in hindsight, {len(groups)} of them: what remains"
        rows.append(Row(what=what, ours=left, unit="% mean error"))
    return rows
