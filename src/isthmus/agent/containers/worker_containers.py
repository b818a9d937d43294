"""`WorkerContainers`: writes the bundle with which `runc` runs a worker of a rendered part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, job_program, worker_environment
from isthmus.agent.adapters.worker_limits import TEMPORARY_FOLDER, allowed_variables, host_folders
from isthmus.agent.containers.image_tool import unpack_image
from isthmus.agent.containers.part_renderer import rank_variables
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import WorkerAccount, WorkerSpec, write_atomically
from isthmus.core.process import container_start
from isthmus.core.process.rank_runner import AFTER_FILE
from isthmus.core.rights.worker_rights import ContainerRules, WorkerRights
from isthmus.render import Container, ContainerUser, RenderedPart, oci_config

BUNDLE = "bundle"
"""Folder of a worker's container in the worker's folder."""

RUNTIME_FOLDER = "containers"
"""Folder of `runc` in the agent's state folder."""

_COPY_TIMEOUT_S = 600.0
_NEVER_MOUNTED = ("/proc", "/sys", "/dev")


class WorkerContainers:
    """The containers of a site's workers.

    Where a scheduler starts them (`in_step`), a container's control group is inside that of the scheduler's step, and
    the step removes what a kill leaves of the container.
    """

    def __init__(
        self,
        rules: ContainerRules,
        rights: WorkerRights,
        state: Path,
        worker_command: Sequence[str] = WORKER_COMMAND,
        *,
        in_step: bool = False,
    ) -> None:
        self._rules, self._rights, self._in_step = rules, rights, in_step
        self._worker_command = tuple(worker_command)
        self._images, self._runtime_state = state / "images", state / RUNTIME_FOLDER

    def prepare(
        self,
        folder: Path,
        spec: WorkerSpec,
        part: RenderedPart,
        devices: Sequence[str],
        account: WorkerAccount | None,
        *,
        protected: Sequence[Path],
        also_read: Sequence[Path],
    ) -> tuple[str, ...]:
        """Write the bundle of a worker; return its command. Raises `UnavailableError` if it cannot unpack the image."""
        folder, name = folder.absolute(), container_name(spec.run, spec.attempt, spec.rank)
        # Step 1: the root folder: a copy of the image by links to its files, so that mounts leave no trace in it.
        root = unpack_image(Path(self._rules.images), part.image, self._images)
        bundle = folder / BUNDLE
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(mode=0o700, parents=True)
        subprocess.run(["/bin/cp", "-al", str(root), str(bundle / "rootfs")], check=True, timeout=_COPY_TIMEOUT_S)  # noqa: S603
        # Step 2: what the worker may see beside the job's own paths.
        mounts = {str(folder): (str(folder), True), **{str(one): (str(one), False) for one in also_read}}
        if part.image.facts.host_files:
            places = host_folders(self._rights, protected)
            mounts = {place: (os.path.realpath(place), False) for place in places if _is_mounted(place)} | mounts
        container = Container(
            root=str(bundle / "rootfs"),
            command=self._command(spec.job, part, folder),
            environment=self._environment(part, folder, devices),
            working_folder=str(folder),
            user=container_user(account, self._rights),
            mounts=mounts,
            cgroup=name if self._in_step else f"/{name}",
        )
        write_atomically(bundle / "config.json", json.dumps(oci_config(part, container)))
        words = start_words(shutil.which("runc") or "runc", self._runtime_state, bundle, name)
        if self._in_step:
            write_atomically(folder / AFTER_FILE, json.dumps((*container_starter(), container_start.DELETE, *words)))
        return (*container_starter(), *words)

    def _command(self, job: Job, part: RenderedPart, folder: Path) -> tuple[str, ...]:
        """Return the program of the container: that of the image, or this agent's own worker with host files."""
        command = self._worker_command if part.image.facts.host_files else part.command
        return (*job_program(job, tuple(command)), *part.arguments, str(folder))

    def _environment(self, part: RenderedPart, folder: Path, devices: Sequence[str]) -> Mapping[str, str]:
        base: Mapping[str, str] = part.image.environment
        if part.image.facts.host_files:
            base = allowed_variables(os.environ, self._rights.environment) | dict(base)
        temporary = {"TMPDIR": str(folder / TEMPORARY_FOLDER)}
        return worker_environment(base, devices, {}) | temporary | rank_variables(part)


def container_starter() -> tuple[str, ...]:
    """Return the command that runs one container."""
    return (sys.executable, "-I", "-S", "-B", container_start.__file__)


def start_words(runtime: str, state: Path, bundle: Path, name: str) -> tuple[str, ...]:
    """Return the arguments of `container_starter` for one container."""
    return (runtime, str(state), str(bundle), name)


def container_name(job_id: str, attempt: int, rank: int) -> str:
    """Return the name of a worker's container."""
    return f"isthmus-{job_id}-{attempt}-{rank}"


def container_user(account: WorkerAccount | None, rights: WorkerRights) -> ContainerUser:
    """Return the account inside a container: that of the job's user, else the agent's own."""
    umask = int(rights.umask, 8)
    if account is None:
        return ContainerUser(os.geteuid(), os.getegid(), (), umask)
    return ContainerUser(account.uid, account.gid, account.groups, umask)


def _is_mounted(place: str) -> bool:
    """Return whether a folder or file of the host exists and is none that the container has of its own."""
    return Path(place).exists() and not any(Path(place).is_relative_to(own) for own in _NEVER_MOUNTED)
