"""Commands on how a part is started at a site: render its configuration, list and build images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from isthmus.cli.command import JobArgument, command
from isthmus.cli.commands.process_commands import import_extra
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.client.api_client import ApiClient
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import ConflictError, FileError, InputError
from isthmus.core.files.user_files import load_model_file, load_policy, load_pool
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.pool import Pool
from isthmus.render import (
    CodeRegistration,
    Container,
    ContainerUser,
    ImageFacts,
    RenderedPart,
    Setting,
    SiteRuntime,
    host_image,
    make_blueprints,
    oci_config,
    render_part,
)

commands = typer.Typer()
image_commands = typer.Typer(help="Images of a site for the workers of pool jobs.", no_args_is_help=True)
commands.add_typer(image_commands, name="images", rich_help_panel="Site")

PANEL = "Site"
RENDER_FILE, JOB_FILE = "render.json", "config.json"
_FOLDER = "{worker_folder}"
"""Stands in a rendered job file for the folder that the agent gives each worker."""

LayoutArgument = Annotated[Path, typer.Argument(metavar="LAYOUT", help="Folder with an OCI image layout.")]


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus render 3f2a --cluster hangzhou --output rendered",
        "isthmus render 3f2a --cluster hangzhou --policy policy.yaml --output new --diff rendered",
        "isthmus render 3f2a --cluster hangzhou --output rendered --json",
    ],
)
def render(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    cluster: Annotated[str, typer.Option(metavar="NAME", help="Cluster whose part is rendered.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write to.")],
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The owner's policy with `workers.containers`; without it, processes."),
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Pool with chips of its own (default: the server's).")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Compare with an earlier folder: name the values that differ.")
    ] = None,
) -> None:
    """Render the part of a job at a cluster: the site's job file, and every setting with its origin.

    Writes `render.json` (name, class, value, how it is passed, and who set it) and the configuration of the first
    worker's container; a part on several node groups gets a folder for each.
    """
    view = client.job(job)
    if view.plan is None:
        raise ConflictError(f"job {view.id} has no plan yet", hint=f"choose one: isthmus plans {view.id}")
    if pool is None:
        seen = client.pool()
        known = Pool(clusters=tuple(one.cluster for one in seen.clusters), links=seen.links)
    else:
        known = load_pool(pool)
    site = _site_runtime(policy)
    made: list[Setting] = []
    blueprints = make_blueprints(view.job, view.id, view.plan, known, cluster)
    for blueprint in blueprints:
        part = render_part(blueprint, site, registration=_registration(view.job.runtime.code))
        folder = output if len(blueprints) == 1 else output / blueprint.node_group
        _write(folder / RENDER_FILE, part.document())
        _write(folder / JOB_FILE, json.dumps(oci_config(part, _container(part)), indent=1))
        made += part.settings
    if diff is not None:
        differences = _differences(made, _read_settings(diff))
        rows = [(name, kind, *values) for (name, kind), values in differences.items()]
        titles = ("name", "passed as", str(output), str(diff))
        env.answer(
            [dict(zip(("name", "passed_as", "value", "other"), row, strict=True)) for row in rows],
            lambda: table("Settings that differ", titles, rows) if rows else "no setting differs",
        )
        return
    settings = [(one.name, one.setting_class, one.value, one.passed_as, one.origin) for one in made]
    env.answer(made, lambda: table(f"Written to {output}", ("name", "class", "value", "passed as", "from"), settings))


@command(image_commands, panel=PANEL, name="list", examples=["isthmus images list /srv/images"])
def list_images(env: CliEnvironment, layout: LayoutArgument) -> None:
    """List the images that parts may run with, with the chips, drivers and libraries that they are for."""
    agent = import_extra("isthmus.agent", "agent")
    found = agent.read_images(layout)

    def show() -> object:
        rows = [
            (one.reference, ", ".join(one.facts.chips) or "any", one.facts.drivers or "any", one.facts.framework,
             ", ".join(one.facts.libraries) or "-", one.digest[7:19])
            for one in found
        ]  # fmt: skip
        return table("Images", ("image", "chips", "drivers", "framework", "libraries", "digest"), rows)

    env.answer(list(found), show)


@command(
    image_commands,
    panel=PANEL,
    examples=[
        "isthmus images build /srv/images host 1 --host-files",
        "isthmus images build /srv/images train 3 --base torch:2.13 --code ./train --facts facts.yaml",
        "isthmus images build /srv/images train 3 --base torch:2.13 --label torch=2.13 --facts facts.yaml --json",
    ],
)
def build(
    env: CliEnvironment,
    layout: LayoutArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new image.")],
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Its version; the highest that fits is used.")],
    base: Annotated[str | None, typer.Option(metavar="IMAGE", help="Image to start from, as NAME:VERSION.")] = None,
    code: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to add at /code.")] = None,
    facts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML with chips, drivers, framework, code, command, parameters, libraries."),
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label that jobs may ask for.")] = None,
    host_files: Annotated[
        bool, typer.Option("--host-files", help="The image is empty: the site's system folders are mounted.")
    ] = False,
) -> None:
    """Build an image from a base and a folder of code, with the facts by which parts find it. Needs umoci."""
    agent = import_extra("isthmus.agent", "agent")
    stated = load_model_file(facts, ImageFacts) if facts else ImageFacts()
    if host_files:
        libraries = stated.libraries or host_image().facts.libraries
        stated = stated.model_copy(update={"host_files": True, "libraries": libraries})
    labels = dict(_split_label(text) for text in label or ())
    made = agent.build_image(layout, name, version, stated, base=base, code=code, labels=labels)
    env.answer(made, lambda: f"built {made.reference} ({made.digest})")


def _split_label(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InputError(f"--label {text}: not NAME=VALUE", hint="for example --label torch=2.13")
    return name, value


def _site_runtime(policy: Path | None) -> SiteRuntime:
    """Return what the policy's containers offer; without them workers are processes with the site's own files."""
    rules = load_policy(policy).workers.containers if policy else None
    if rules is None:
        return SiteRuntime(images=(host_image(),))
    found: SiteRuntime = import_extra("isthmus.agent", "agent").read_site_runtime(rules)
    return found


def _registration(code: str | None) -> CodeRegistration | None:
    if code is None:
        return None
    found: CodeRegistration | None = import_extra("isthmus.agent", "agent").read_registration(Path(code))
    return found


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
        write_atomically(file, text + "\n")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}", hint="choose another --output") from error


def _read_settings(folder: Path) -> list[Setting]:
    """Return the settings of an earlier folder; raise `FileError` if it has none or they are malformed."""
    files = sorted(folder.glob(f"**/{RENDER_FILE}"))
    if not files:
        raise InputError(f"{folder} has no {RENDER_FILE}", hint="name a folder that `isthmus render` wrote")
    found: list[Setting] = []
    for file in files:
        try:
            found += TypeAdapter(list[Setting]).validate_json(read_within(file))
        except ValidationError as error:
            raise FileError(error.errors()[0]["msg"], file=str(file), hint="render it again") from error
    return found


def _differences(ours: list[Setting], theirs: list[Setting]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the values that differ, by name and how they are passed; "-" where a side has none."""
    mine = {(one.name, one.passed_as): one.value for one in ours}
    other = {(one.name, one.passed_as): one.value for one in theirs}
    keys = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
    return {key: (mine.get(key, "-"), other.get(key, "-")) for key in keys}
