"""`WorkerContainers`: renders a worker's part and writes the bundle with which `runc` runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, worker_environment
from isthmus.agent.adapters.worker_limits import TEMPORARY_FOLDER, allowed_variables, host_folders
from isthmus.agent.containers import container_start
from isthmus.agent.containers.image_tool import unpack_image
from isthmus.agent.containers.site_runtime import read_registration, read_site_runtime
from isthmus.core.errors import InputError
from isthmus.core.job import job_accesses
from isthmus.core.messages.worker_folder import WorkerAccount, WorkerSpec, write_atomically
from isthmus.core.pool import Pool
from isthmus.core.rights.worker_rights import ContainerRules, WorkerRights
from isthmus.render import (
    SPEC_FILE,
    Blueprint,
    Container,
    ContainerUser,
    RenderedPart,
    Setting,
    make_blueprints,
    mount,
    oci_config,
    render_part,
    settings_document,
)

BUNDLE = "bundle"
"""Folder of a worker's container in the worker's folder."""

RENDER_FILE = "render.json"
_FROM_NETWORK = ("lanes", "congestion_control")
"""Fields of `spec.json` that rendering may set."""

_COPY_TIMEOUT_S = 600.0
_NEVER_MOUNTED = ("/proc", "/sys", "/dev")


class WorkerContainers:
    """The containers of a site's workers; `pool` has its chips and its links to other clusters."""

    def __init__(
        self,
        rules: ContainerRules,
        rights: WorkerRights,
        state: Path,
        pool: Pool,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._rules, self._rights, self._pool = rules, rights, pool
        self._worker_command = tuple(worker_command)
        self._images, self._runtime_state = state / "images", state / "containers"

    def prepare(
        self,
        folder: Path,
        spec: WorkerSpec,
        devices: Sequence[str],
        account: WorkerAccount | None,
        *,
        protected: Sequence[Path],
        also_read: Sequence[Path],
    ) -> tuple[WorkerSpec, tuple[str, ...]]:
        """Write the bundle of a worker; return its spec with what the network asks for, and its command.

        Raises `InputError` if no image fits or a value cannot be passed, `UnavailableError` if the image cannot be
        unpacked.
        """
        # Step 1: render the part with what the site has now.
        folder = folder.absolute()
        part = self._render(spec)
        # Step 2: the root folder: a copy of the image by links to its files, so that mounts leave no trace in it.
        root = unpack_image(Path(self._rules.images), part.image, self._images)
        bundle = folder / BUNDLE
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(mode=0o700, parents=True)
        subprocess.run(["/bin/cp", "-al", str(root), str(bundle / "rootfs")], check=True, timeout=_COPY_TIMEOUT_S)  # noqa: S603
        # Step 3: what the worker may see beside the job's own paths.
        mounts = {str(folder): (str(folder), True), **{str(one): (str(one), False) for one in also_read}}
        if part.image.facts.host_files:
            places = host_folders(self._rights, protected)
            mounts = {place: (os.path.realpath(place), False) for place in places if _is_mounted(place)} | mounts
        container = Container(
            root=str(bundle / "rootfs"),
            command=self._command(part, folder),
            environment=self._environment(part, folder, devices),
            working_folder=str(folder),
            user=_user(account, self._rights),
            mounts=mounts,
            cgroup=f"/{container_name(spec)}",
        )
        write_atomically(bundle / "config.json", json.dumps(oci_config(part, container)))
        write_atomically(folder / RENDER_FILE, settings_document(part.settings))
        state = str(self._runtime_state)
        starter = (sys.executable, "-I", "-S", "-B", container_start.__file__)
        command = (*starter, shutil.which("runc") or "runc", state, str(bundle), container_name(spec))
        return _with_network_settings(spec, part), command

    def _render(self, spec: WorkerSpec) -> RenderedPart:
        blueprints = make_blueprints(spec.job, spec.run, spec.plan, self._pool, spec.cluster)
        blueprint = next(one for one in blueprints if one.node_group == spec.stage.node_group)
        code = spec.job.runtime.code
        return render_part(
            blueprint,
            read_site_runtime(self._rules),
            registration=None if code is None else read_registration(Path(code)),
            mounts=_job_mounts(spec, blueprint),
        )

    def _command(self, part: RenderedPart, folder: Path) -> tuple[str, ...]:
        """Return the program of the container: that of the image, or this agent's own worker with host files."""
        facts = part.image.facts
        if facts.code != "system":
            raise InputError(
                f"image {part.image.reference} starts another program than Isthmus' own; this site runs none",
                hint="name another image in runtime.image; engine: command runs programs at sites without containers",
            )
        command = self._worker_command if facts.host_files else part.command
        if not command:
            raise InputError(f"image {part.image.reference} names no command", hint="name it in the file of --facts")
        return (*command, *part.arguments, str(folder))

    def _environment(self, part: RenderedPart, folder: Path, devices: Sequence[str]) -> Mapping[str, str]:
        base: Mapping[str, str] = part.image.environment
        if part.image.facts.host_files:
            base = allowed_variables(os.environ, self._rights.environment) | dict(base)
        temporary = {"TMPDIR": str(folder / TEMPORARY_FOLDER)}
        return worker_environment(base, devices, {}) | temporary | part.of("environment")


def container_name(spec: WorkerSpec) -> str:
    """Return the name of a worker's container."""
    return f"isthmus-{spec.run}-{spec.attempt}-{spec.rank}"


def _with_network_settings(spec: WorkerSpec, part: RenderedPart) -> WorkerSpec:
    values = {name.removeprefix(f"{SPEC_FILE}#"): value for name, value in part.of("file").items()}
    update = {name: values[name] for name in _FROM_NETWORK if name in values}
    return WorkerSpec.model_validate(spec.model_dump() | update) if update else spec


def _job_mounts(spec: WorkerSpec, blueprint: Blueprint) -> Iterator[Setting]:
    """Yield the storage roots of the job's user; without them the paths of the job, or what exists above them."""
    if spec.storage is not None:
        for root in spec.storage.roots:
            if "://" not in root.path and Path(root.path).exists():
                place = os.path.realpath(root.path)
                yield mount(place, place, root.access == "write", "owner's policy")
        return
    rights: dict[str, bool] = {}
    for field, path, access in job_accesses(blueprint.job):
        if path.startswith("/"):
            place = _existing(field, Path(path))
            rights[place] = rights.get(place, False) or access == "write"
    for place, writable in rights.items():
        yield mount(place, place, writable, "job")


def _existing(field: str, path: Path) -> str:
    """Return `path` or the nearest folder above it that exists, with links resolved."""
    place = next(one for one in (path, *path.parents) if one.exists())
    if place == Path("/"):
        raise InputError(f"{field}: no folder of {path} exists at this site", hint="create its parent folder")
    return os.path.realpath(place)


def _user(account: WorkerAccount | None, rights: WorkerRights) -> ContainerUser:
    umask = int(rights.umask, 8)
    if account is None:
        return ContainerUser(os.geteuid(), os.getegid(), (), umask)
    return ContainerUser(account.uid, account.gid, account.groups, umask)


def _is_mounted(place: str) -> bool:
    """Return whether a folder or file of the host exists and is none that the container has of its own."""
    return Path(place).exists() and not any(Path(place).is_relative_to(own) for own in _NEVER_MOUNTED)
