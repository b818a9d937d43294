"""`training_settings`: the training parameters and paths of a job, as the program of the image takes them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping

from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.job_parts.command_job import CommandConfig
from isthmus.render.blueprint import Blueprint
from isthmus.render.image import Image, Passing
from isthmus.render.setting import MAX_VALUE_CHARS, Setting

CODE_FILE = "code.yaml"
"""File of a user's code folder that registers how its parameters are passed."""


def job_parameters(job: Job) -> dict[str, str]:
    """Return every parameter that a job can pass to its program, by name."""
    training = job.training.model_dump(mode="json")
    places = {"model": job.model, "data": ",".join(job.data.paths), "output": job.output}
    return {
        **{name: _text(value) for name, value in training.items()},
        **places,
        "tokenizer": job.data.tokenizer,
        "checkpoints": job.checkpoints.folder,
        "checkpoint_every_steps": str(job.checkpoints.every_steps),
    }


def training_settings(image: Image, blueprint: Blueprint, registered: Mapping[str, Passing]) -> Iterator[Setting]:
    """Yield the training parameters of a part (`cross-domain-pooling.txt` 4.1.2 (3), the three cases of passing).

    Isthmus' own program reads all of them from `spec.json`. A user's code takes those `registered` in its
    `code.yaml`, and a program inside an image those that the image lists. Raises `InputError` if the job sets a
    training parameter that the program has no way to take, or the program asks for one that no job has. The program of
    a job with `engine: command` has its arguments and variables.
    """
    if blueprint.job.command is not None:
        yield from _command_settings(image, blueprint.job.command)
        return
    values = job_parameters(blueprint.job)
    if image.facts.code == "system":
        for name, value in values.items():
            yield _setting(image, Passing(passed_as="file", name=name), value, "job")
        return
    own = image.facts.code == "own"
    passings, source = (registered, CODE_FILE) if own else (image.facts.parameters, f"image {image.reference}")
    _require_known(passings, values, source)
    _require_passed(blueprint.job, passings, source)
    for name, passing in passings.items():
        yield _setting(image, passing, values[name], source)


def _command_settings(image: Image, command: CommandConfig) -> Iterator[Setting]:
    arguments = Passing(passed_as="file", name="command.arguments")
    yield _setting(image, arguments, _one_line(json.dumps(command.arguments, ensure_ascii=False)), "job")
    for name, value in command.environment.items():
        yield _setting(image, Passing(passed_as="environment", name=name), _one_line(value), "job")


def _one_line(text: str) -> str:
    """Return `text` as a setting shows it: one line, cut at its limit."""
    line = text if text.isprintable() else json.dumps(text)
    return line if len(line) <= MAX_VALUE_CHARS else f"{line[: MAX_VALUE_CHARS - 3]}..."


def _require_known(passings: Mapping[str, Passing], values: Mapping[str, str], source: str) -> None:
    for name in passings:
        if name not in values:
            near = difflib.get_close_matches(name, values, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"parameters: {', '.join(values)}"
            raise InputError(f"{source}: unknown parameter '{name}'", hint=hint)


def _require_passed(job: Job, passings: Mapping[str, Passing], source: str) -> None:
    """Raise `InputError` for a training parameter that the job sets and the program would never see."""
    lost = sorted(name for name in job.training.model_fields_set if name not in passings)
    if lost:
        raise InputError(
            f"{source}: the program takes no {', '.join(lost)}, which the job sets",
            hint="list them under `parameters` there, or leave them out of the job",
        )


def _setting(image: Image, passing: Passing, value: str, origin: str) -> Setting:
    name = image.passed_name(passing)
    return Setting(name=name, setting_class="training", value=value, passed_as=passing.passed_as, origin=origin)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
