"""`render_slurm`: the script with which the agent starts a part at Slurm, from the commands that the adapter runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from isthmus.agent.adapters.local_adapter import confined_worker, worker_variables
from isthmus.agent.adapters.rendered_hold import (
    STATE_FOLDER,
    WORKER_FOLDER,
    PartRequest,
    RenderedHold,
    shown_words,
    variable_settings,
)
from isthmus.agent.adapters.slurm.slurm_holds import RUNNER, SlurmHold
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.agent.adapters.slurm.slurm_starts import KEEP, STEP, keeper_arguments, step_arguments
from isthmus.render import Setting

JOB_FILE = "job.sh"
_HEAD = """#!/bin/sh
# Part {job}, attempt {attempt}, at cluster {cluster}: the commands of the agent.
# Words in braces stand for what is known at the start only: {{state}}, the agent's state folder; {{worker_folder}}, a
# rank's folder in it; {{python}}, the agent's interpreter; {{job}}, {{node}}, {{places}} and {{cards}}, which Slurm
# chooses; {{other_nodes}}, the allocation's other nodes (without any, --exclude is left out); {{start}}, the id of a
# start. The id of the hold, drawn with the agent's key, is shown as zeros.
"""


def render_slurm(site: SlurmSite, part: PartRequest) -> RenderedHold:
    """Return the script of a part: an allocation for each node group and size of rank, and a step for each rank.

    Raises `InputError` for a node group that `site.yaml` does not name.
    """
    request, units = part.request, site.units(part.request)
    folder = SlurmHold(Path(STATE_FOLDER) / "holds", request.id)
    head = _HEAD.format(job=request.job, attempt=request.attempt, cluster=site.cluster.name)
    lines = [f"{head}export RUNNER={shlex.quote(' '.join(shown_words(RUNNER)))}"]
    for at, unit in enumerate(units):
        group, num_cards, numbers = unit
        lines.append(f"\n# allocation {at}: {len(numbers)} ranks with {num_cards} cards each, node group {group}")
        lines.append(_script(KEEP, keeper_arguments(site, folder, at, unit, preempts=False)))
    place = Path(WORKER_FOLDER)
    for at, (rank, start, need) in enumerate(zip(part.ranks, part.starts, request.ranks, strict=True)):
        asks = site.asks_of_step(need.node_group, "{cards_on_node}")
        unit_number = next(number for number, (_, _, numbers) in enumerate(units) if at in numbers)
        others = ("{other_nodes}",) if len(units[unit_number][2]) > 1 else ()
        step = step_arguments(
            place, folder, job="{job}", node="{node}", other_nodes=others, asks=asks, places="{places}",
            start="{start}", program=confined_worker(place, start.command, part.limits),
        )  # fmt: skip
        variables = worker_variables(place, {}, start, part.limits)
        variables |= site.visible_cards(need.node_group, start.cards)
        prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"\n# rank {rank}, in allocation {unit_number}\n{prefix} {_script(STEP, shown_words(step))}")
    settings = dict[str, tuple[Setting, ...]]()
    for group, _, _ in units:
        variables = worker_variables(place, {}, part.start_in(group), part.limits)
        settings[group] = (*_asked(site, part, group), *variable_settings(variables))
    return RenderedHold(file_name=JOB_FILE, text="\n".join(lines), settings=settings)


def _script(script: str, arguments: tuple[str, ...]) -> str:
    return f"sh -c {shlex.quote(script)} isthmus {shlex.join(arguments)}"


def _asked(site: SlurmSite, part: PartRequest, wanted: str) -> Iterator[Setting]:
    """Yield what `salloc` is asked for in a node group; a second size of ranks has its number of tasks and cards."""
    origins = {
        "--partition": f"site.yaml node_groups.{wanted}.partition",
        "--time": "site.yaml options.max_minutes",
        "--account": "site.yaml options.account",
    }
    units = [unit for unit in site.units(part.request) if unit[0] == wanted]
    for at, (group, num_cards, numbers) in enumerate(units):
        for option in site.asks(group, num_cards, len(numbers), preempts=False):
            name, _, value = option.partition("=")
            of_unit = name in ("--ntasks", "--gpus-per-task", "--gres")
            if at == 0 or of_unit:
                yield Setting(
                    name=f"{name}[{at}]" if of_unit and len(units) > 1 else name, setting_class="resources",
                    value=value, passed_as="argument", origin=origins.get(name, "plan" if of_unit else "agent"),
                )  # fmt: skip
