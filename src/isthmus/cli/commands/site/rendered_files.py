"""The files that `isthmus render` writes and compares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.render import (
    Blueprint,
    Container,
    ContainerUser,
    RenderedPart,
    Setting,
    host_image,
    oci_config,
    settings_document,
    training_settings,
)

RENDER_FILE, CONTAINER_FILE = "render.json", "config.json"
_FOLDER = "{worker_folder}"
"""Stands in a rendered job file for the folder that the agent gives each worker."""

SettingsByFolder = Mapping[PurePath, tuple[Setting, ...]]


@dataclass(frozen=True)
class RenderedFiles:
    """Job files by their path, and the settings of each folder: of the output folder, or of each node group."""

    job_files: Mapping[PurePath, str]
    settings: SettingsByFolder


def container_files(parts: Sequence[RenderedPart], blueprints: Sequence[Blueprint]) -> RenderedFiles:
    """Return the configuration of each node group's containers."""
    folders = _folders(blueprints)
    return RenderedFiles(
        job_files={
            folder / CONTAINER_FILE: json.dumps(oci_config(part, _container(part)), indent=1)
            for folder, part in zip(folders, parts, strict=True)
        },
        settings={folder: part.settings for folder, part in zip(folders, parts, strict=True)},
    )


def hold_files(held: Any, blueprints: Sequence[Blueprint]) -> RenderedFiles:
    """Return the job file of a scheduler, a `RenderedHold`, with what each node group's workers read in their files."""
    image = host_image()
    settings = {
        folder: (*training_settings(image, one, {}), *held.settings[one.node_group])
        for folder, one in zip(_folders(blueprints), blueprints, strict=True)
    }
    return RenderedFiles(job_files={PurePath(held.file_name): held.text}, settings=settings)


def write_files(output: Path, files: RenderedFiles) -> SettingsByFolder:
    """Write the files below `output`; return the settings."""
    for folder, settings in files.settings.items():
        _write(output / folder / RENDER_FILE, settings_document(settings))
    for path, text in files.job_files.items():
        _write(output / path, text)
    return files.settings


def read_settings(folder: Path) -> SettingsByFolder:
    """Return the settings of an earlier folder; raise `FileError` if it has none or they are malformed."""
    files = sorted(folder.glob(f"**/{RENDER_FILE}"))
    if not files:
        raise InputError(f"{folder} has no {RENDER_FILE}", hint="name a folder that `isthmus render` wrote")
    found: dict[PurePath, tuple[Setting, ...]] = {}
    for file in files:
        try:
            settings = TypeAdapter(tuple[Setting, ...]).validate_json(read_within(file))
        except ValidationError as error:
            raise FileError(error.errors()[0]["msg"], file=str(file), hint="render it again") from error
        found[PurePath(file.parent.relative_to(folder))] = settings
    return found


def setting_differences(ours: SettingsByFolder, theirs: SettingsByFolder) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the values that differ, by name and how they are passed; "-" where a side has none.

    Names of several node groups begin with the group.
    """
    mine, other = _values(ours), _values(theirs)
    keys = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
    return {key: (mine.get(key, "-"), other.get(key, "-")) for key in keys}


def _values(found: SettingsByFolder) -> dict[tuple[str, str], str]:
    return {
        (f"{folder}: {one.name}" if folder.parts else one.name, one.passed_as): one.value
        for folder, settings in found.items()
        for one in settings
    }


def _folders(blueprints: Iterable[Blueprint]) -> list[PurePath]:
    """Return the folder of each node group below the output folder: a part of one group has none of its own."""
    names = [one.node_group for one in blueprints]
    return [PurePath(name if len(names) > 1 else "") for name in names]


def _container(part: RenderedPart) -> Container:
    return Container(
        root=f"{_FOLDER}/bundle/rootfs",
        command=(*part.command, *part.arguments),
        environment=part.image.environment | part.of("environment"),
        working_folder=_FOLDER,
        user=ContainerUser(0, 0),
        mounts={_FOLDER: (_FOLDER, True)},
    )


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.rstrip("\n") + "\n")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}", hint="choose another --output") from error
