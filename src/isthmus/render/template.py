"""`Template`: settings that a site adds to parts of a kind, with values from the part's blueprint."""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.errors import InputError
from isthmus.render.blueprint import Blueprint
from isthmus.render.setting import PassedAs, Setting, SettingClass, SettingName, SettingText
from isthmus.render.training_settings import job_parameters
from isthmus.render.wide_area_path import NetworkKind

MAX_SETTINGS = 256
"""Most settings of one template."""

_JOB_FACTS = (
    "steps", "sequence_length", "micro_batch_size", "global_batch_size", "learning_rate", "precision", "seed", "model",
    "data", "output", "tokenizer", "checkpoints", "checkpoint_every_steps",
)  # fmt: skip
_PART_FACTS = (
    "job_id", "cluster", "node_group", "chip", "driver", "num_chips", "world_size", "cpus", "memory_bytes",
    "round_trip_ms", "bandwidth_gbps", "in_flight_bytes",
)  # fmt: skip
FACTS = (*_PART_FACTS, *_JOB_FACTS)
"""Names that `${...}` in a template may use."""


class TemplateConflictError(InputError):
    """Two templates set one value; `template` and `setting` are the places of the second one in their lists."""

    def __init__(self, message: str, *, template: int, setting: int) -> None:
        super().__init__(message, hint="remove it from one of them, or let their conditions exclude each other")
        self.template, self.setting = template, setting


class _FactTemplate(string.Template):
    idpattern = "[a-z][a-z_]*"


class TemplateSetting(FrozenModel):
    """One setting of a template; `${name}` in `value` stands for a fact of the part."""

    name: SettingName
    value: SettingText
    passed_as: PassedAs

    @model_validator(mode="after")
    def _check_facts(self) -> TemplateSetting:
        template = _FactTemplate(self.value)
        if not template.is_valid():
            raise ValueError(f"'{self.value}': a $ starts a fact such as ${{chip}}; write $$ for a dollar sign")
        for name in template.get_identifiers():
            if name not in FACTS:
                near = difflib.get_close_matches(name, FACTS, n=1)
                raise ValueError(f"unknown fact '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        return self


class Template(FrozenModel):
    """Settings of one class for the parts that match: every list that is not empty names what it applies to."""

    version: Literal[1] = 1
    name: Name
    setting_class: SettingClass = Field(alias="class")
    networks: tuple[NetworkKind, ...] = ()
    chips: tuple[Name, ...] = ()
    frameworks: tuple[Name, ...] = ()
    libraries: tuple[Name, ...] = ()
    settings: Annotated[tuple[TemplateSetting, ...], Field(min_length=1, max_length=MAX_SETTINGS)]

    def applies_to(self, blueprint: Blueprint, library: str) -> bool:
        """Return whether the template is for this part, which communicates with `library`."""
        pairs: tuple[tuple[tuple[str, ...], str], ...] = (
            (self.networks, blueprint.path.kind),
            (self.chips, blueprint.chip),
            (self.frameworks, blueprint.framework),
            (self.libraries, library),
        )
        return all(not names or value in names for names, value in pairs)

    def render(self, facts: Mapping[str, str | None]) -> Iterator[tuple[int, Setting]]:
        """Yield its settings, each with its place; one whose facts are not known for this part is left out."""
        for place, one in enumerate(self.settings):
            template = _FactTemplate(one.value)
            if all(facts.get(name) is not None for name in template.get_identifiers()):
                known = {name: value for name, value in facts.items() if value is not None}
                yield (
                    place,
                    Setting(
                        name=one.name,
                        setting_class=self.setting_class,
                        value=template.substitute(known),
                        passed_as=one.passed_as,
                        origin=f"template {self.name}",
                    ),
                )


def part_facts(blueprint: Blueprint) -> dict[str, str | None]:
    """Return the facts of a part; None for one that is not known."""
    wide = blueprint.path.kind != "local"
    numbers: dict[str, float | None] = {
        "num_chips": blueprint.num_chips,
        "world_size": blueprint.world_size,
        "cpus": blueprint.cpus,
        "memory_bytes": blueprint.memory_bytes,
        "round_trip_ms": blueprint.path.round_trip_s * 1e3 if wide else None,
        "bandwidth_gbps": blueprint.path.bandwidth_gbps if wide else None,
        "in_flight_bytes": blueprint.path.in_flight_bytes if wide else None,
    }
    parameters = job_parameters(blueprint.job)
    return {
        "job_id": blueprint.job_id,
        "cluster": blueprint.cluster,
        "node_group": blueprint.node_group,
        "chip": blueprint.chip,
        "driver": blueprint.driver or None,
        **{name: None if value is None else f"{value:.15g}" for name, value in numbers.items()},
        **{name: parameters[name] for name in _JOB_FACTS},
    }
