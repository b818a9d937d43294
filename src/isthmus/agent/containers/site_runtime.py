"""`read_site_runtime`: what a site offers for rendering, from the files that its policy names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from isthmus.agent.containers.read_images import read_images
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_model_file
from isthmus.core.rights.worker_rights import ContainerRules, WorkerRights
from isthmus.render import CodeRegistration, SiteRuntime, StartKind, Template

CODE_FILE = "code.yaml"
_MAX_TEMPLATES = 256


def read_site_runtime(rights: WorkerRights, starts: StartKind) -> SiteRuntime:
    """Return what a site, which starts workers so, offers for rendering; a pod has files of its own.

    Raises `FileError` for a malformed image or template, with file and line, and `InputError` for a missing library.
    """
    rules, templates = rights.containers, tuple(load_model_file(file, Template) for file in template_files(rights))
    if rules is None:
        return SiteRuntime(templates=templates, starts="pod" if starts == "pod" else "process")
    for name, file in rules.libraries.items():
        if not Path(file).is_file():
            raise InputError(f"workers.containers.libraries: {name}: no file {file}", hint="correct the path")
    images = [one for one in read_images(Path(rules.images)) if starts != "pod" or not one.facts.host_files]
    return SiteRuntime(images=images, templates=templates, library_files=rules.libraries, starts=starts)


def read_registration(code: Path) -> CodeRegistration | None:
    """Return the `code.yaml` of a user's code folder, None without one; raise `FileError` if it is malformed."""
    file = code / CODE_FILE
    return load_model_file(file, CodeRegistration) if file.is_file() else None


def check_containers(rules: ContainerRules, *, runs_them: bool) -> None:
    """Raise `InputError` if there are no images, or this agent cannot run workers in containers and has to."""
    if runs_them and os.geteuid() != 0:
        raise InputError(
            f"workers.containers needs an agent that runs as root, not as uid {os.geteuid()}",
            hint="run the agent as root, or leave out containers",
        )
    for tool in ("runc", "umoci") if runs_them else ():
        if shutil.which(tool) is None:
            raise InputError(f"workers.containers needs '{tool}'", hint=f"sudo apt-get install -y {tool}")
    if not read_images(Path(rules.images)):
        raise InputError(f"workers.containers: no image in {rules.images}", hint="isthmus images build --help")


def template_files(rights: WorkerRights) -> tuple[Path, ...]:
    """Return the files of a site's templates, in the order of `SiteRuntime.templates`."""
    if rights.templates is None:
        return ()
    folder = Path(rights.templates)
    if not folder.is_dir():
        raise InputError(f"workers.templates: no folder {folder}", hint="correct the path")
    files = tuple(sorted(folder.glob("*.yaml")))
    if len(files) > _MAX_TEMPLATES:
        raise InputError(f"{folder} has {len(files)} templates; at most {_MAX_TEMPLATES} are read")
    return files
