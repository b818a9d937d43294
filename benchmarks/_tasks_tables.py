"""What `benchmarks.whitepaper` prints: rows for the page of all benchmarks, and tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks._tasks import FIBRE_MS, Task
from benchmarks._virtual_run import Rehearsed
from benchmarks.table import Row, compared
from isthmus.plan.time.predict import PlanForecast

WITHIN = 8.0
"""Per cent by which a run may differ from the simulator's iteration; the mean over all tasks, by 3."""

WITHIN_MEAN = 3.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A task as it was run at full size, what the simulator says of it, and what was published."""

    task: Task
    delay_ms: float
    forecast: PlanForecast
    iteration_s: float
    rehearsed: Rehearsed

    @property
    def ratio(self) -> float:
        """Our iteration over the simulator's."""
        return self.iteration_s / self.forecast.iteration_s

    @property
    def tgs(self) -> float:
        """Tokens per card and second."""
        return self.forecast.tgs_tokens_per_card_s / self.ratio

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.forecast.samples_per_s / self.ratio

    @property
    def note(self) -> str:
        """What to know about the run."""
        run = self.rehearsed
        calm = f"{run.num_calm} of {run.num_steps} steps count, overrun {100 * run.overrun_share:.2g} %"
        return f"{self.task.note}; {calm}" if self.task.note else calm


def base_of(result: Result, results: Sequence[Result]) -> Result | None:
    """Return the run in one cluster that the efficiency of `result` is measured by."""
    return next((one for one in results if one.task.name == result.task.base and one is not result), None)


def rows(results: Sequence[Result], delays: Sequence[Result]) -> Iterator[Row]:
    """Yield the figures of every task beside the published ones, where there are any, and the simulator's."""
    for one in results:
        task, forecast = one.task, one.forecast
        yield Row(
            what=f"{task.name}: iteration ({one.note})", ours=one.iteration_s, unit="s", peer="simulator",
            peer_value=forecast.iteration_s, ratio=one.ratio, target=f"within {WITHIN:g} %",
            met=abs(one.ratio - 1) <= WITHIN / 100,
        )  # fmt: skip
        if task.measured_s:
            yield compared(f"{task.name}: iteration", one.iteration_s, "s", "report", task.measured_s)
        yield _row(f"{task.name}: TGS", one.tgs, "tokens/card/s", task.tgs, forecast.tgs_tokens_per_card_s)
        yield _row(f"{task.name}: samples", one.samples_per_s, "1/s", task.samples_per_s, forecast.samples_per_s)
        if base := base_of(one, results):
            ours, theirs, simulated = _efficiencies(one, base)
            yield _row(f"{task.name}: share of {base.task.name}'s TGS", ours, "%", theirs, simulated)
    errors = [100 * abs(one.ratio - 1) for one in results if one.task.name != "task 7"]
    mean = statistics.fmean(errors)
    yield Row(
        what=f"{len(errors)} tasks: distance from the simulator, mean", ours=mean, unit="%",
        target=f"at most {WITHIN_MEAN:g}", met=mean <= WITHIN_MEAN,
    )  # fmt: skip
    for one in delays:
        base = base_of(one, results)
        if base is not None and one.delay_ms != FIBRE_MS:
            ours, _, simulated = _efficiencies(one, base)
            what = f"{one.task.name} at {one.delay_ms:g} ms one way: share of {base.task.name}'s TGS"
            yield compared(what, ours, "%", "simulator", simulated)


def _row(what: str, ours: float, unit: str, published: float | None, simulated: float) -> Row:
    if published is None:
        return compared(what, ours, unit, "simulator", simulated)
    return compared(what, ours, unit, "report", published)


def _efficiencies(one: Result, base: Result) -> tuple[float, float | None, float]:
    """Return the share of the base's TGS in per cent: ours, the published one, the simulator's."""
    told = 100 * one.task.tgs / base.task.tgs if one.task.tgs and base.task.tgs else None
    simulated = 100 * one.forecast.tgs_tokens_per_card_s / base.forecast.tgs_tokens_per_card_s
    return 100 * one.tgs / base.tgs, told, simulated


def page(results: Sequence[Result], delays: Sequence[Result]) -> str:
    """Return the tables that people read: iterations, rates and efficiency, efficiency by delay."""
    first = [
        (one.task.name, one.task.measured_s, one.forecast.iteration_s, one.iteration_s, one.ratio,
         one.iteration_s / one.task.measured_s if one.task.measured_s else None, one.note)
        for one in results
    ]  # fmt: skip
    second = []
    for one in results:
        base, task = base_of(one, results), one.task
        shares = _efficiencies(one, base) if base else (None, None, None)
        second.append(
            (task.name, task.tgs, one.forecast.tgs_tokens_per_card_s, one.tgs, task.samples_per_s,
             one.forecast.samples_per_s, one.samples_per_s, shares[1], shares[2], shares[0])
        )  # fmt: skip
    third = []
    for one in delays:
        if base := base_of(one, results):
            ours, told, simulated = _efficiencies(one, base)
            third.append((one.delay_ms, one.task.name, told if one.delay_ms == FIBRE_MS else None, simulated, ours))
    heads = (
        ("task", "published s", "simulator s", "run s", "run / simulator", "run / published", "note"),
        ("task", "TGS published", "simulator", "run", "samples/s published", "simulator", "run",
         "efficiency % published", "simulator", "run"),
        ("delay ms", "task", "efficiency % published", "simulator", "run"),
    )  # fmt: skip
    tables = [(head, body) for head, body in zip(heads, (first, second, sorted(third)), strict=True) if body]
    return "\n\n".join(_table(head, body) for head, body in tables)


def _table(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in body]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
