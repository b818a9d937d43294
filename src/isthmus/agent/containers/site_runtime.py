"""`read_site_runtime`: what a site offers for rendering, from the files that its policy names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from isthmus.agent.containers.read_images import read_images
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_model_file
from isthmus.core.rights.worker_rights import ContainerRules
from isthmus.render import CodeRegistration, SiteRuntime, Template

CODE_FILE = "code.yaml"
_MAX_TEMPLATES = 256


def read_site_runtime(rules: ContainerRules) -> SiteRuntime:
    """Return the images, templates and libraries of a site.

    Raises `FileError` for a malformed image or template, with file and line, and `InputError` for a missing library.
    """
    for name, file in rules.libraries.items():
        if not Path(file).is_file():
            raise InputError(f"workers.containers.libraries: {name}: no file {file}", hint="correct the path")
    return SiteRuntime(
        images=read_images(Path(rules.images)),
        templates=tuple(load_model_file(file, Template) for file in template_files(rules)),
        library_files=rules.libraries,
    )


def read_registration(code: Path) -> CodeRegistration | None:
    """Return the `code.yaml` of a user's code folder, None without one; raise `FileError` if it is malformed."""
    file = code / CODE_FILE
    return load_model_file(file, CodeRegistration) if file.is_file() else None


def check_containers(rules: ContainerRules) -> None:
    """Raise `InputError` if this agent cannot run workers in the containers that the policy asks for."""
    if os.geteuid() != 0:
        raise InputError(
            f"workers.containers needs an agent that runs as root, not as uid {os.geteuid()}",
            hint="run the agent as root, or leave out containers",
        )
    for tool in ("runc", "umoci"):
        if shutil.which(tool) is None:
            raise InputError(f"workers.containers needs '{tool}'", hint=f"sudo apt-get install -y {tool}")
    if not read_site_runtime(rules).images:
        raise InputError(f"workers.containers: no image in {rules.images}", hint="isthmus images build --help")


def template_files(rules: ContainerRules) -> tuple[Path, ...]:
    """Return the files of a site's templates, in the order of `SiteRuntime.templates`."""
    if rules.templates is None:
        return ()
    folder = Path(rules.templates)
    if not folder.is_dir():
        raise InputError(f"workers.containers.templates: no folder {folder}", hint="correct the path")
    files = tuple(sorted(folder.glob("*.yaml")))
    if len(files) > _MAX_TEMPLATES:
        raise InputError(f"{folder} has {len(files)} templates; at most {_MAX_TEMPLATES} are read")
    return files
