"""`RunTable`: measured iterations, for `isthmus calibrate` to fit and `isthmus compare` to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from isthmus.core.base_model import FrozenModel, PositiveFloat
from isthmus.core.files.user_files import load_plan, load_pool
from isthmus.core.files.validation_errors import to_file_error
from isthmus.core.files.yaml_lines import read_yaml
from isthmus.core.model import load_model
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.fit_calibration import Observation
from isthmus.plan.time.predict import simulate_plan


class MeasuredRun(FrozenModel):
    """One measured run: its name, the files of its plan and pool, and the seconds of an iteration.

    The plan names its model. Relative paths are relative to the folder of the table.
    """

    name: str
    plan: str
    pool: str
    iteration_s: PositiveFloat


class RunTable(FrozenModel):
    """Measured runs and their source."""

    version: Literal[1] = 1
    source: str
    runs: tuple[MeasuredRun, ...] = Field(min_length=1)


def is_run_table(path: Path) -> bool:
    """Return whether a YAML file is a table of runs, that is, has the field `runs`."""
    document, _ = read_yaml(path)
    return isinstance(document, dict) and "runs" in document


def load_runs(path: Path) -> RunTable:
    """Read a table of runs; raise `FileError` with the line and field of an error."""
    document, lines = read_yaml(path)
    try:
        table = RunTable.model_validate(document)
    except ValidationError as error:
        raise to_file_error(error, document, lines, path, RunTable) from error
    base = path.resolve().parent
    runs = (run.model_copy(update={"plan": str(base / run.plan), "pool": str(base / run.pool)}) for run in table.runs)
    return table.model_copy(update={"runs": tuple(runs)})


def observations(table: RunTable, model: str | None = None) -> tuple[Observation, ...]:
    """Return the runs as observations of simulated plans; `model` takes precedence over the plans' model."""
    return tuple(_observation(run, model) for run in table.runs)


def _observation(run: MeasuredRun, model: str | None) -> Observation:
    plan, pool = load_plan(run.plan), load_pool(run.pool)
    profile = profile_model(load_model(model or plan.model or ""))

    def iteration_s(calibration: Calibration) -> float:
        return simulate_plan(plan, pool, profile, calibration)[0].iteration_s

    return Observation(name=run.name, measured_s=run.iteration_s, predict_s=iteration_s)
