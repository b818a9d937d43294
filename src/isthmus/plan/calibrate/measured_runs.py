"""`RunTable`: measured iterations, for `isthmus calibrate` to fit and `isthmus compare` to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from isthmus.core.base_model import FrozenModel, PositiveFloat
from isthmus.core.files.user_files import load_plan, load_pool
from isthmus.core.files.validation_errors import to_file_error
from isthmus.core.files.yaml_lines import read_yaml
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan import require_possible
from isthmus.core.stack import find_stack
from isthmus.plan.calibrate.fit_calibration import Observation
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import Calibration, ChipRates
from isthmus.plan.time.model_sizes import model_sizes
from isthmus.plan.time.predict import simulate_plan
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS, shape_scope


class MeasuredRun(FrozenModel):
    """One measured run: its name, the files of its plan and pool, and the seconds of an iteration.

    The plan names its model. Relative paths are relative to the folder of the table. `allocated_bytes` is what the
    framework's allocator held at most on the fullest chip, `device_bytes` what the device reported as used.
    """

    name: str
    plan: str
    pool: str
    iteration_s: PositiveFloat
    allocated_bytes: PositiveFloat | None = None
    device_bytes: PositiveFloat | None = None


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


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A measured run with its plan, pool and profile read."""

    run: MeasuredRun
    plan: Plan
    pool: Pool
    profile: ModelProfile

    @property
    def chips(self) -> tuple[str, ...]:
        """Names of the plan's chips."""
        names = (self.pool.chip(self.pool.node_group(one.cluster, one.node_group)).name for one in self.plan.stages)
        return tuple(dict.fromkeys(names))

    @property
    def stack(self) -> str:
        """Name of the plan's stack."""
        return find_stack(self.plan.stack).name

    @property
    def joined(self) -> tuple[str, ...]:
        """Pairs of clusters `A<>B` whose links the plan uses, for messages or for gradients."""
        pairs = [*self.plan.all_hops()]
        for index, stage in enumerate(self.plan.stages):
            pairs += [(stage.cluster, other) for other in self.plan.gradient_peer_clusters(index)]
        return tuple(dict.fromkeys("<>".join(sorted(pair)) for pair in pairs))

    @property
    def shape(self) -> str:
        """Scope of the layers' shape, empty if stages or layers differ in theirs."""
        scopes = {
            shape_scope(
                self.pool.chip(self.pool.node_group(stage.cluster, stage.node_group)).name,
                self.profile.hidden_size,
                self.plan.micro_batch_size_of(stage.replica) * self.plan.sequence_length / stage.cp,
                stage.tp,
            )
            for stage in self.plan.stages
        }
        return scopes.pop() if len(scopes) == 1 else ""

    def iteration_s(self, calibration: Calibration) -> float:
        """Return the simulated iteration time."""
        return simulate_plan(self.plan, self.pool, self.profile, calibration)[0].iteration_s

    @property
    def observation(self) -> Observation:
        """The run as the fit takes it."""
        return Observation(
            name=self.run.name, measured_s=self.run.iteration_s, predict_s=self.iteration_s, shape_scope=self.shape
        )


def planned_runs(table: RunTable, model: str | None = None) -> tuple[PlannedRun, ...]:
    """Return the runs of a table with what their files hold; `model` takes precedence over the plans' model.

    Raises `FileError` for a file that cannot be read, `PlanError` for a plan that is impossible.
    """
    return tuple(planned_run(run, model) for run in table.runs)


def planned_run(run: MeasuredRun, model: str | None = None) -> PlannedRun:
    """Return a run with its plan, pool and profile; raises as `planned_runs`."""
    plan, pool = load_plan(run.plan), load_pool(run.pool)
    profile = profile_model(load_model(model or plan.model or ""))
    require_possible(plan, model_sizes(profile), pool)
    return PlannedRun(run=run, plan=plan, pool=pool, profile=profile)


def default_keys(runs: Sequence[PlannedRun]) -> tuple[str, ...]:
    """Return the keys that a fit to `runs` takes unless others are named.

    All parameters with an uncertainty of the chips that the plans use, a factor of each stack, and of each pair of
    linked clusters one share for both directions.
    """
    chips = dict.fromkeys(chip for run in runs for chip in run.chips)
    pairs = dict.fromkeys(pair for run in runs for pair in run.joined)
    names = [name for name in ChipRates.__dataclass_fields__ if TIME_MODEL_PARAMETERS[name].relative]
    return (
        *(f"{chip}/{name}" for chip in chips for name in names),
        *dict.fromkeys(f"{run.stack}/stack_factor" for run in runs),
        *(f"{pair}/wan_share" for pair in pairs),
    )
