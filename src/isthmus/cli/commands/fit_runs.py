"""Fits of `isthmus calibrate` to measured runs: reading tables and logs, and what is printed of a fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.commands.export_commands import log_lines
from isthmus.cli.terminal.tables import table
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_plan
from isthmus.core.units import format_seconds
from isthmus.plan import (
    TIME_MODEL_PARAMETERS,
    Calibration,
    CandidateRun,
    FitReport,
    PlannedRun,
    default_keys,
    describe_fit,
    fit_calibration,
    fit_memory,
    informative_runs,
    load_runs,
    measured_run,
    planned_run,
    planned_runs,
    read_training_log,
    summarise_log,
    with_prior_rates,
)


class RunReport(NamedTuple):
    """What a fit has taught, and the runs that would teach most."""

    fit: FitReport
    next_runs: tuple[CandidateRun, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        return {
            "learned": [
                {"key": one.key, "before": one.before.model_dump(), "after": one.after.model_dump()}
                for one in self.fit.learned
            ],
            "not_learned": list(self.fit.not_learned),
            "predicted_over_measured": {name: math.exp(error) for name, error in self.fit.errors},
            "warnings": list(self.fit.warnings),
            "next_runs": [
                {"like": one.like, "change": one.change, "bits": one.bits, "iteration_s": one.iteration_s}
                for one in self.next_runs
            ],
        }


def read_runs(
    runs: Path | None, logs: list[Path], plan: Path | None, pool: Path | None, warm_up: int
) -> tuple[str, tuple[PlannedRun, ...]]:
    """Return the source and the runs of a table, and of logs of one run."""
    read = load_runs(runs) if runs else None
    found = list(planned_runs(read)) if read else []
    if logs:
        if plan is None or pool is None:
            raise InputError("--from without --plan and --pool", hint="name the plan that was run and its pool")
        given = load_plan(plan)
        if given.model is None:
            raise InputError(f"plan '{given.id}' has no model", hint="set `model` in the plan")
        summary = summarise_log(read_training_log(log_lines(logs), given), warm_up)
        found.append(planned_run(measured_run(summary, name=logs[0].stem, plan=plan, pool=pool)))
    return read.source if read else f"logs: {', '.join(log.name for log in logs)}", tuple(found)


def fit_runs(
    given: tuple[str, tuple[PlannedRun, ...]], start: Calibration, fit: str | None, name: str
) -> tuple[Calibration, RunReport]:
    """Return the calibration that runs make most probable, and what they taught."""
    source, runs = given
    seen = [run.run.name for run in runs if run.run.name in start.fitted_on]
    if seen:
        raise InputError(
            f"calibration '{start.name}' was fitted on '{seen[0]}' already", hint="count a run once: remove it"
        )
    named = None if fit is None else [key.strip() for key in fit.split(",") if key.strip()]
    if named is not None:
        _require_known(named, runs)
    keys = [key for key in named if key != "shape_time"] if named is not None else list(default_keys(runs))
    shapes = named is None or "shape_time" in named
    observed = [run.observation for run in runs]
    start = with_prior_rates(start, [(run.plan, run.pool) for run in runs], keys)
    made = fit_calibration(start, keys, observed, name=name, source=source, shapes=shapes)
    made = fit_memory(made, runs)
    return made, RunReport(describe_fit(start, made, keys, observed), informative_runs(runs, made))


def _require_known(keys: list[str], runs: Sequence[PlannedRun]) -> None:
    """Raise `InputError` for an unknown parameter, or for a chip, stack or link that no run uses."""
    if not keys:
        raise InputError("no parameter to fit", hint="choose with --fit from " + ", ".join(TIME_MODEL_PARAMETERS))
    chips = [chip for run in runs for chip in run.chips]
    pairs = [pair for run in runs for pair in run.joined]
    links = [f"{a}>{b}" for pair in pairs for a, b in itertools.permutations(pair.split("<>"))]
    scopes = dict.fromkeys([*chips, *(run.stack for run in runs), *pairs, *links])
    for key in keys:
        scope, slash, name = key.rpartition("/")
        if name not in TIME_MODEL_PARAMETERS:
            raise InputError(f"unknown parameter '{key}'", hint="known: " + ", ".join(TIME_MODEL_PARAMETERS))
        if slash and scope.partition(":")[0] not in scopes:
            raise InputError(f"'{key}': no run uses '{scope}'", hint="the runs use " + ", ".join(scopes))


def render_fit(made: Calibration, report: RunReport, output: Path | None) -> RenderableType:
    """Render what runs have taught: parameters, those that keep their priors, warnings, and runs worth doing."""
    rows = [
        (
            one.key,
            f"{one.before.value:.4g} ± {one.before.relative:.0%}",
            f"{one.after.value:.4g} ± {one.after.relative:.0%}",
            TIME_MODEL_PARAMETERS[one.key.rpartition("/")[2]].description,
        )
        for one in report.fit.learned
    ]
    where = f"written to {output}" if output else "not written; use --output FILE"
    errors = [abs(math.expm1(error)) for _, error in report.fit.errors]
    shown: list[RenderableType] = []
    if rows:
        shown += [table("Learned", ("parameter", "before", "now", "meaning"), rows, "before|now"), Text("")]
    memory = [key for key in made.parameters if key.endswith(("activation_memory", "outside_memory_bytes"))]
    lines = [
        f"{made.name}: {len(made.fitted_on)} runs, met to {sum(errors) / len(errors):.1%} in the mean; {where}",
        f"further runs are expected to scatter by {made.residual:.1%}",
    ]
    lines += [f"memory: {key} {made.key_value(key):.4g} ± {made.key_relative(key):.0%}" for key in memory]
    if report.fit.not_learned:
        lines.append("the runs say little about " + ", ".join(report.fit.not_learned) + ": these keep their priors")
    lines += [f"warning: {text}" for text in report.fit.warnings]
    lines += [
        f"to learn more, run '{one.like}' with {one.change}: about {one.bits:.1f} bits, "
        f"{format_seconds(one.iteration_s)} an iteration"
        for one in report.next_runs
    ]
    return Group(*shown, *(Text(line) for line in lines))
