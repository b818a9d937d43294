"""`PartRenderer`: the image and settings with which this site starts a part, from the site's files as they are now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import ContainerNeed
from isthmus.agent.containers.site_runtime import read_registration, read_site_runtime
from isthmus.core.errors import InputError
from isthmus.core.job import Job, job_accesses
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.core.pool import Link, Pool
from isthmus.core.rights.worker_rights import WorkerRights
from isthmus.render import (
    SPEC_FIELDS,
    SPEC_FILE,
    Blueprint,
    RenderedPart,
    Setting,
    StartKind,
    make_blueprints,
    mount,
    render_part,
)


class PartRenderer:
    """Renders the parts of the site `cluster`, which starts workers as `starts` says and as the owner's `rights` allow.

    `pool` has the chips of the cluster, and its links as far as the agent's own file names them. Pods see the files of
    jobs below `storage_path`, if it is given. With `apart` the nodes share no files with this machine: they find the
    places of a job's files themselves.
    """

    def __init__(
        self,
        rights: WorkerRights,
        pool: Pool,
        cluster: str,
        starts: StartKind,
        storage_path: str = "",
        *,
        apart: bool = False,
    ) -> None:
        self._rights, self._pool, self._cluster, self._storage_path = rights, pool, cluster, storage_path
        self._apart = apart
        self.starts = starts if rights.containers is not None or starts == "pod" else "process"

    def render(self, job: Job, job_id: str, plan: Plan, links: Iterable[Link] = ()) -> dict[str, RenderedPart]:
        """Return a part rendered for each node group that it uses; `links` are those that the server knows.

        Raises `InputError` if no image fits, a value cannot be passed, or the site does not run the image's program.
        """
        self._require_visible(job)
        site = read_site_runtime(self._rights, self.starts)
        code = None if job.runtime.code is None else read_registration(Path(job.runtime.code))
        found = {}
        for blueprint in make_blueprints(job, job_id, plan, self._pool, self._cluster, links):
            mounts = None if self.starts == "container" else ()
            part = render_part(blueprint, site, registration=code, mounts=mounts)
            _require_own_program(part, blueprint, self.starts)
            found[blueprint.node_group] = part
        return found

    def render_worker(self, spec: WorkerSpec, links: Iterable[Link] = ()) -> RenderedPart:
        """Return the part of a worker, with the places of its job's files at this site."""
        self._require_visible(spec.job)
        job, blueprints = spec.job, make_blueprints(spec.job, spec.run, spec.plan, self._pool, spec.cluster, links)
        blueprint = next(one for one in blueprints if one.node_group == spec.stage.node_group)
        part = render_part(
            blueprint,
            read_site_runtime(self._rights, self.starts),
            registration=None if job.runtime.code is None else read_registration(Path(job.runtime.code)),
            mounts=_job_mounts(spec, blueprint, apart=self._apart) if self.starts == "container" else (),
        )
        _require_own_program(part, blueprint, self.starts)
        return part

    def _require_visible(self, job: Job) -> None:
        """Raise `InputError` for a path of the job that no pod sees."""
        root = Path(self._storage_path)
        for field, path, _ in job_accesses(job) if self._storage_path else ():
            if path.startswith("/") and not Path(os.path.normpath(path)).is_relative_to(root):
                raise InputError(
                    f"{field}: the pods of cluster '{self._cluster}' see files below {root} alone, not '{path}'",
                    hint="name a path there or a URL; copies of the catalogue are at the agent's --cache",
                )


def with_rendered_fields(spec: WorkerSpec, part: RenderedPart) -> WorkerSpec:
    """Return the spec of a worker with the fields that rendering sets; raise `InputError` for a value it refuses."""
    values = {name.removeprefix(f"{SPEC_FILE}#"): value for name, value in part.of("file").items()}
    update = {name: values[name] for name in SPEC_FIELDS if name in values}
    if not update:
        return spec
    try:
        return WorkerSpec.model_validate(spec.model_dump() | update)
    except ValueError as error:
        origins = {one.name: one.origin for one in part.settings}
        said = ", ".join(f"{name}: {value} ({origins[f'{SPEC_FILE}#{name}']})" for name, value in update.items())
        raise InputError(f"the worker does not take {said}", hint="correct the template") from error


def image_program(part: RenderedPart, starts: StartKind) -> tuple[str, ...]:
    """Return the program of an image's workers; empty where it is the site's own."""
    return part.command if starts == "pod" and not part.image.facts.host_files else ()


def image_reference(part: RenderedPart) -> str:
    """Return the image as a scheduler gets it, by the digest that was matched; empty for what the site has."""
    return "" if part.image.facts.host_files else f"{part.image.name}@{part.image.digest}"


def rank_variables(part: RenderedPart) -> dict[str, str]:
    """Return the variables of a worker. Those of a job with `engine: command` are for its program, not for the worker.

    A worker starts with the rights of the agent's account, before it gives them up.
    """
    return {
        one.name: one.value
        for one in part.settings
        if one.passed_as == "environment" and (one.setting_class, one.origin) != ("training", "job")
    }


def container_need(part: RenderedPart) -> ContainerNeed:
    """Return what a scheduler makes the container of a rank from."""
    return ContainerNeed(image=image_reference(part), cpu_cores=part.cpu_cores, memory_bytes=part.memory_bytes)


def start_kind(containers: str) -> StartKind:
    """Return how a site whose adapter can have such `containers` starts workers, if its owner wants containers."""
    kinds: dict[str, StartKind] = {"agent": "container", "node": "container", "scheduler": "pod", "none": "process"}
    return kinds[containers]


def refuse_images(kind: str) -> None:
    """Raise `InputError` for a policy with containers at a site of `kind`, whose adapter starts none from images."""
    option = {"kubernetes": "options.registry", "ray": "options.images"}.get(kind, "")
    hint = f"set {option}, or leave containers out of the policy" if option else "leave containers out of the policy"
    raise InputError(f"workers.containers: this site of kind '{kind}' starts no workers from images", hint=hint)


def _require_own_program(part: RenderedPart, blueprint: Blueprint, starts: StartKind) -> None:
    facts = part.image.facts
    if facts.code != "system":
        raise InputError(
            f"image {part.image.reference} starts another program than Isthmus' own; this site runs none",
            hint="name another image in runtime.image; engine: command runs programs at sites without containers",
        )
    if not facts.host_files and not part.command:
        raise InputError(f"image {part.image.reference} names no command", hint="name it in the file of --facts")
    if starts == "container" and blueprint.job.engine == "command":
        raise InputError(
            "this site runs workers in containers, which jobs with engine: command do not use yet",
            hint="name clusters without containers in command.ranks",
        )


def _job_mounts(spec: WorkerSpec, blueprint: Blueprint, *, apart: bool) -> Iterator[Setting]:
    """Yield the storage roots of the job's user; without them the paths of the job, or what exists above them."""
    if spec.storage is not None:
        for root in spec.storage.roots:
            if "://" not in root.path and (apart or Path(root.path).exists()):
                place = root.path if apart else os.path.realpath(root.path)
                yield mount(place, place, root.access == "write", "owner's policy")
        return
    rights: dict[str, bool] = {}
    for field, path, access in job_accesses(blueprint.job):
        if path.startswith("/"):
            place = path if apart else _existing(field, Path(path))
            rights[place] = rights.get(place, False) or access == "write"
    for place, writable in rights.items():
        yield mount(place, place, writable, "job")


def _existing(field: str, path: Path) -> str:
    """Return `path` or the nearest folder above it that exists, with links resolved."""
    place = next(one for one in (path, *path.parents) if one.exists())
    if place == Path("/"):
        raise InputError(f"{field}: no folder of {path} exists at this site", hint="create its parent folder")
    return os.path.realpath(place)
