"""`render_part`: a part's blueprint becomes an image and a configuration (`cross-domain-pooling.txt` 4.1.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.core.errors import InputError
from isthmus.core.job import job_accesses
from isthmus.render.blueprint import Blueprint
from isthmus.render.check_passing import CPU_LIMIT, MEMORY_LIMIT, StartKind, check_passing
from isthmus.render.code_registration import CodeRegistration
from isthmus.render.communication_settings import chosen_library, communication_settings
from isthmus.render.find_image import find_image
from isthmus.render.image import Image, Passing, host_image
from isthmus.render.setting import SETTING_CLASSES, Setting
from isthmus.render.template import Template, TemplateConflictError, part_facts
from isthmus.render.training_settings import training_settings

CODE_MOUNT = "/code"
"""Where a user's code is in the container, which is also its working folder."""


@dataclass(frozen=True)
class SiteRuntime:
    """What a site offers for rendering: its images, its templates, and communication libraries, a `.so` by name.

    Without `images` (None) workers run in what the nodes, or the pods, have. `starts` says how workers are started.
    """

    images: Sequence[Image] | None = None
    templates: Sequence[Template] = ()
    library_files: Mapping[str, str] = field(default_factory=dict)
    starts: StartKind = "container"


@dataclass(frozen=True)
class RenderedPart:
    """The image of a part and every setting, ordered by class."""

    image: Image
    library: str
    command: tuple[str, ...]
    settings: tuple[Setting, ...]

    def of(self, passed_as: str) -> dict[str, str]:
        """Return name and value of the settings that are passed in this way."""
        return {one.name: one.value for one in self.settings if one.passed_as == passed_as}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the program, after its command."""
        return tuple(text for name, value in self.of("argument").items() for text in (name, value))

    @property
    def mounts(self) -> dict[str, tuple[str, bool]]:
        """The source of each mount and whether the container may write there, by place in the container."""
        places = {name: value for name, value in self.of("container").items() if name.startswith("/")}
        return {name: (value[: value.rindex(":")], value.endswith(":rw")) for name, value in places.items()}

    @property
    def cpu_cores(self) -> float | None:
        """The limit of CPU time, in cores; None: not limited."""
        text = self.of("container").get(CPU_LIMIT)
        return None if text is None else float(text)

    @property
    def memory_bytes(self) -> int | None:
        """The limit of host memory; None: not limited."""
        text = self.of("container").get(MEMORY_LIMIT)
        return None if text is None else int(text)


def render_part(
    blueprint: Blueprint,
    site: SiteRuntime,
    *,
    registration: CodeRegistration | None = None,
    mounts: Iterable[Setting] | None = None,
) -> RenderedPart:
    """Return the image and the configuration of a part.

    `registration` is the user's `code.yaml`, if the job names code; `mounts` are the places that the job may use at
    the site, by default the paths that it names. Raises `InputError` if no image fits, a value cannot be passed, or two
    templates set one value.
    """
    # Step 1: the image, which fixes how everything else is passed.
    image = _image_of_nodes(blueprint) if site.images is None else find_image(site.images, blueprint)
    if image.facts.code == "own" and registration is None:
        raise InputError(f"{blueprint.runtime.code} has no code.yaml", hint="it says how to start the code")
    library = chosen_library(image, blueprint)
    # Step 2: what the job, the site and the network ask for.
    settings = [
        *training_settings(image, blueprint, registration.parameters if registration else {}),
        *_resource_settings(blueprint),
        *(job_mounts(blueprint) if mounts is None else mounts),
        *_code_mount(blueprint),
        *communication_settings(image, blueprint, site.library_files),
    ]
    # Step 3: the site's templates; the job's own choices stay above them, and two templates never set one value.
    taken = {one.target for one in settings if one.origin == "job"}
    added = [one for one in _from_templates(site.templates, blueprint, image, library) if one.target not in taken]
    replaced = {one.target for one in added}
    settings = [one for one in settings if one.target not in replaced] + added
    # Step 4: nothing may be lost on the way to the program.
    check_passing(settings, image, site.starts)
    settings = [one for one in settings if site.starts != "process" or one.passed_as != "container"]
    settings.sort(key=lambda one: SETTING_CLASSES.index(one.setting_class))
    command = registration.command if registration else image.facts.command
    return RenderedPart(image=image, library=library, command=command, settings=tuple(settings))


def _image_of_nodes(blueprint: Blueprint) -> Image:
    """Return what stands for an image where workers have none; raise `InputError` if the job asks for one."""
    runtime = blueprint.runtime
    asked = [f"label {name}: {value}" for name, value in runtime.labels.items()]
    if runtime.image is not None:
        asked.insert(0, f"image {runtime.image}")
    if asked:
        raise InputError(
            f"cluster '{blueprint.cluster}' starts workers without images; the job asks for {', '.join(asked)}",
            hint="leave out runtime.image and runtime.labels, or choose clusters with images",
        )
    return find_image((host_image((blueprint.collective_library,)),), blueprint)


def job_mounts(blueprint: Blueprint) -> Iterator[Setting]:
    """Yield a mount for each path of the job that is a folder or file of the site, at its own place."""
    rights: dict[str, str] = {}
    for _, path, access in job_accesses(blueprint.job):
        if path.startswith("/"):
            rights[path] = "rw" if access == "write" or rights.get(path) == "rw" else "ro"
    for path, right in rights.items():
        yield mount(path, path, right == "rw", "job")


def mount(source: str, place: str, writable: bool, origin: str) -> Setting:
    """Return the setting that mounts `source` at `place` of the container."""
    return Setting(
        name=place,
        setting_class="mounts",
        value=f"{source}:{'rw' if writable else 'ro'}",
        passed_as="container",
        origin=origin,
    )


def _code_mount(blueprint: Blueprint) -> Iterator[Setting]:
    if blueprint.runtime.code is not None:
        yield mount(blueprint.runtime.code, CODE_MOUNT, False, "job")


def _resource_settings(blueprint: Blueprint) -> Iterator[Setting]:
    """Yield what a worker has of its node: chips, network cards, cores and memory, as far as the pool states them."""
    origin = f"node group {blueprint.node_group}"
    values = {
        "chips.kind": blueprint.chip,
        "chips.count": blueprint.num_chips,
        "nics": ",".join(blueprint.nics) or None,
        CPU_LIMIT: blueprint.cpus,
        MEMORY_LIMIT: blueprint.memory_bytes,
    }
    for name, value in values.items():
        if value is not None:
            text = f"{value:.15g}" if isinstance(value, float) else str(value)
            yield Setting(name=name, setting_class="resources", value=text, passed_as="container", origin=origin)


def _from_templates(templates: Iterable[Template], blueprint: Blueprint, image: Image, library: str) -> list[Setting]:
    """Return the settings of the templates for this part; raise `TemplateConflictError` if two set one value.

    A key of the program's file may be written without the name of the file.
    """
    facts, made = part_facts(blueprint), list[Setting]()
    seen: dict[tuple[str, str], str] = {}
    for number, template in enumerate(templates):
        if not template.applies_to(blueprint, library):
            continue
        for place, made_one in template.render(facts):
            one = made_one
            if one.passed_as == "file" and "#" not in one.name:
                one = one.model_copy(update={"name": image.passed_name(Passing(passed_as="file", name=one.name))})
            if one.target in seen:
                text = f"templates '{seen[one.target]}' and '{template.name}' both set {one.passed_as} '{one.name}'"
                raise TemplateConflictError(text, template=number, setting=place)
            seen[one.target] = template.name
            made.append(one)
    return made
