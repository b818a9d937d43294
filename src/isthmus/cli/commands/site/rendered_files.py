"""The files that `isthmus render` writes and compares."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.render import Container, ContainerUser, RenderedPart, Setting, oci_config, settings_document

RENDER_FILE, CONTAINER_FILE = "render.json", "config.json"
_FOLDER = "{worker_folder}"
"""Stands in a rendered job file for the folder that the agent gives each worker."""

SettingsByFolder = Mapping[PurePath, tuple[Setting, ...]]


@dataclass(frozen=True)
class RenderedFiles:
    """Job files by their path, and the settings of each folder: of the output folder, or of each node group."""

    job_files: Mapping[PurePath, str]
    settings: SettingsByFolder


def site_files(rendered: Any) -> RenderedFiles:
    """Return the job file of a `RenderedSite`, the containers that its agent makes, and the settings."""
    folders, hold = _folders(rendered.parts), rendered.hold
    job_files, settings = {PurePath(hold.file_name): hold.text}, dict[PurePath, tuple[Setting, ...]]()
    for group, part in rendered.parts.items():
        folder = folders[group]
        if rendered.in_containers:
            job_files[folder / CONTAINER_FILE] = json.dumps(oci_config(part, _container(part)), indent=1)
        own = [one for one in part.settings if rendered.in_containers or one.passed_as != "container"]
        known = {one.target for one in own}
        settings[folder] = (*own, *(one for one in hold.settings[group] if one.target not in known))
    return RenderedFiles(job_files=job_files, settings=settings)


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


def _folders(groups: Collection[str]) -> dict[str, PurePath]:
    """Return the folder of each node group below the output folder: a part of one group has none of its own."""
    return {name: PurePath(name if len(groups) > 1 else "") for name in groups}


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
