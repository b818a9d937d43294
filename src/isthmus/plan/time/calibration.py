"""`Calibration`: fitted parameters of the time model, with their source and uncertainty.

A calibration file is YAML of version 1. It names its source and the runs it was fitted on; its predictions
must not be compared with those runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, PositiveFloat
from isthmus.core.errors import FileError, InputError
from isthmus.core.files.validation_errors import to_file_error
from isthmus.core.files.yaml_lines import read_yaml
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS

LEAST_VALUE = 1e-6
"""Where a fit starts for a parameter whose default is 0."""

Correlation = Annotated[float, Field(ge=-1, le=1)]
"""A correlation of two parameters."""


class FittedParameter(FrozenModel):
    """A fitted value and its relative uncertainty, the standard deviation of its logarithm."""

    value: PositiveFloat
    relative: NonNegativeFloat


class Calibration(FrozenModel):
    """Parameters by name, or by `CHIP/name` and `FROM>TO/name` for a single chip or link.

    `A<>B/name` is a parameter of both directions of a link. `fitted_on` names the runs or micro-benchmarks of the
    fit; `residual` is the scatter of runs that no parameter explains (standard deviation of the logarithm),
    `memory_residual` that of peaks of memory; `correlations` are those of the parameters' logarithms, each pair once.
    Missing parameters have their defaults.
    """

    version: Literal[1] = 1
    name: Name
    source: str
    fitted_on: tuple[str, ...] = ()
    parameters: dict[str, FittedParameter] = Field(default_factory=dict)
    correlations: dict[str, dict[str, Correlation]] = Field(default_factory=dict)
    residual: NonNegativeFloat = 0.05
    memory_residual: NonNegativeFloat = 0.1

    @model_validator(mode="after")
    def _check_names(self) -> Calibration:
        for key in self.parameters:
            if key.rpartition("/")[2] not in TIME_MODEL_PARAMETERS:
                raise ValueError(f"unknown parameter '{key}'; known: {', '.join(TIME_MODEL_PARAMETERS)}")
        for key in (*self.correlations, *(other for row in self.correlations.values() for other in row)):
            if key not in self.parameters:
                raise ValueError(f"correlation of '{key}', which is none of the calibration's parameters")
        return self

    def scoped_key(self, name: str, scope: str = "") -> str:
        """Return the key of parameter `name` for a chip or link: its own if present, else the general one.

        A link without its own may share one with its opposite direction.
        """
        if not scope:
            return name
        own = f"{scope}/{name}"
        if own in self.parameters:
            return own
        source, arrow, target = scope.partition(">")
        tied = (f"{source}<>{target}/{name}", f"{target}<>{source}/{name}") if arrow else ()
        return next((key for key in tied if key in self.parameters), name)

    def value(self, name: str, scope: str = "") -> float:
        """Return a parameter's value for a chip or link (`scope`), or its default."""
        found = self.parameters.get(self.scoped_key(name, scope)) if self.parameters else None
        return found.value if found else TIME_MODEL_PARAMETERS[name].default

    def relative_uncertainty(self, name: str, scope: str = "") -> float:
        """Return a parameter's relative uncertainty for a chip or link, or its default's."""
        found = self.parameters.get(self.scoped_key(name, scope))
        return found.relative if found else TIME_MODEL_PARAMETERS[name].relative

    def key_value(self, key: str) -> float:
        """Return the value of a key, that of its chip or link if it has none, or the default; positive for a fit."""
        found = self.parameters.get(key)
        scope, _, name = key.rpartition("/")
        return found.value if found else self.value(name, scope) or LEAST_VALUE

    def key_relative(self, key: str) -> float:
        """Return the relative uncertainty of a key, that of its chip or link if it has none, or the default's."""
        found = self.parameters.get(key)
        scope, _, name = key.rpartition("/")
        return found.relative if found else self.relative_uncertainty(name, scope)

    def correlation(self, a: str, b: str) -> float:
        """Return the correlation of two keys: 1 of a key with itself, 0 unless a fit has found another."""
        if a == b:
            return 1.0
        return self.correlations.get(a, {}).get(b) or self.correlations.get(b, {}).get(a) or 0.0

    def with_values(self, values: Mapping[str, float]) -> Calibration:
        """Return a calibration with new values for some keys and unchanged uncertainties."""
        parameters = dict(self.parameters)
        for key, value in values.items():
            parameters[key] = FittedParameter(value=value, relative=self.key_relative(key))
        return self.model_copy(update={"parameters": parameters})

    def require_unseen(self, run: str) -> None:
        """Raise `InputError` if the calibration was fitted on `run`."""
        if run in self.fitted_on:
            raise InputError(
                f"calibration '{self.name}' was fitted on '{run}'",
                hint="compare its predictions with other runs, or calibrate without this run",
            )


DATA_SHEET = Calibration(name="data-sheet", source="data sheets and the defaults of the time model", residual=0.05)
"""The calibration without measurements.

Equal configurations differ between releases of their software by 3.4 % for dense models and 14 % for those with experts
in the tables of NeMo Megatron Bridge (`benchmarks/_public_bound.py` counts it), in their middle 7 %. Half of this
variance is assumed to be the stack's, alike in all its runs (`stack_factor`, 5 %), the other half scatter of runs.
"""


@dataclass(frozen=True, kw_only=True)
class ChipRates:
    """The values of the parameters in `TIME_MODEL_PARAMETERS` for one chip."""

    matmul_share: float
    attention_share: float
    narrow_factor: float
    context_factor: float
    memory_share: float
    launch_s: float
    bias_factor: float
    skew_s: float
    link_share: float
    link_latency_s: float
    network_share: float
    network_latency_s: float
    backward_overlap: float
    step_s: float
    update_time: float

    @classmethod
    def of(cls, calibration: Calibration, chip: str) -> ChipRates:
        """Return the parameters of `calibration` for `chip`."""
        return cls(**{name: calibration.value(name, chip) for name in cls.__dataclass_fields__})


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration file; raise `FileError` with the line and field of an error."""
    file = Path(path)
    document, lines = read_yaml(file)
    try:
        return Calibration.model_validate(document)
    except ValidationError as error:
        raise to_file_error(error, document, lines, file, Calibration) from error


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration file; raise `FileError` if the file cannot be written."""
    text = yaml.safe_dump(calibration.model_dump(mode="json"), sort_keys=False)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot be written: {error}", file=str(path)) from error


def smooth_max(first_s: float, second_s: float, sharpness: float = 3.0) -> float:
    """Return the smooth maximum (a^k + b^k)^(1/k) of two overlapping times a and b, between max(a, b) and a + b.

    Kernels of a pass differ: if host and chip are about equally fast, each waits for the other in turn.
    """
    high, low = max(first_s, second_s), min(first_s, second_s)
    return high * math.pow(1 + math.pow(low / high, sharpness), 1 / sharpness) if high > 0 else 0.0
