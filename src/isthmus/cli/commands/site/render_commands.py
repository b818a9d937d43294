"""Commands on how a part is started at a site: render its configuration, list and build images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.commands.process_setup import import_extra, read_site
from isthmus.cli.commands.site.rendered_files import (
    read_settings,
    setting_differences,
    site_files,
    write_files,
)
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import ConflictError, InputError
from isthmus.core.files.user_files import errors_placed, load_model_file, load_policy, load_pool, place_error
from isthmus.core.pool import Pool
from isthmus.core.rights.worker_rights import WorkerRights
from isthmus.render import ImageFacts, TemplateConflictError, host_image

commands = typer.Typer()
image_commands = typer.Typer(help="Images of a site for the workers of pool jobs.", no_args_is_help=True)
commands.add_typer(image_commands, name="images", rich_help_panel="Site")

PANEL = "Site"
LayoutArgument = Annotated[Path, typer.Argument(metavar="LAYOUT", help="Folder with an OCI image layout.")]


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus render 3f2a --cluster hangzhou --output rendered",
        "isthmus render 3f2a --cluster hangzhou --policy policy.yaml --output new --diff rendered",
        "isthmus render 3f2a --cluster hangzhou --site slurm.yaml --output rendered --json",
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
        typer.Option(metavar="FILE", help="The owner's policy, with images (`workers.containers`) and templates."),
    ] = None,
    site: Annotated[
        Path | None, typer.Option(metavar="SITE.yaml", help="The site's scheduler; without it, processes of the site.")
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Pool with chips of its own (default: the server's).")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Compare with an earlier folder: name the values that differ.")
    ] = None,
) -> None:
    """Render the part of a job at a cluster: the site's job file, and every setting with its origin.

    Writes `render.json` (name, class, value, how it is passed, and who set it), in a folder for each node group if the
    part uses several, and the job file that the site's agent starts it with: `job.sh` with its commands at a local and
    a Slurm site, with images also `config.json` of the containers; at a Kubernetes site `job.yaml` with the objects
    that it creates; at a Ray site `job.json` with the orders to its holder.
    """
    view = client.job(job)
    if view.plan is None:
        raise ConflictError(f"job {view.id} has no plan yet", hint=f"choose one: isthmus plans {view.id}")
    if pool is None:
        seen = client.pool()
        known = Pool(clusters=tuple(one.cluster for one in seen.clusters), links=seen.known_links)
    else:
        known = load_pool(pool)
    if cluster not in view.plan.clusters:
        hint = f"its clusters: {', '.join(view.plan.clusters)}"
        raise InputError(f"plan {view.plan.id} has no part at cluster '{cluster}'", hint=hint)
    own, rights = read_site(site, known.cluster(cluster)), load_policy(policy).workers if policy else WorkerRights()
    agents: Any = import_extra("isthmus.agent", "agent")
    try:
        with errors_placed(site):
            rendered = agents.render_site(
                own, rights, known, known.cluster(cluster), view.job, view.id, max(view.attempt, 1), view.plan
            )
    except TemplateConflictError as error:
        file = agents.template_files(rights)[error.template]
        raise place_error(file, ("settings", error.setting), error.message, error.hint) from error
    files = site_files(rendered)
    earlier = None if diff is None else read_settings(diff)  # it may be the folder that is written to
    made = write_files(output, files)
    if earlier is not None:
        differences = setting_differences(made, earlier)
        differing = [(name, kind, *values) for (name, kind), values in differences.items()]
        titles = ("name", "passed as", str(output), str(diff))
        env.answer(
            [dict(zip(("name", "passed_as", "value", "other"), row, strict=True)) for row in differing],
            lambda: table("Settings that differ", titles, differing) if differing else "no setting differs",
        )
        return
    found = [one for settings in made.values() for one in settings]
    rows = [(one.name, one.setting_class, one.value, one.passed_as, one.origin) for one in found]
    env.answer(found, lambda: table(f"Written to {output}", ("name", "class", "value", "passed as", "from"), rows))


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
