"""`check_slurm`: what `isthmus site check` finds out about a Slurm cluster; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.agent.adapters.card_checks import check_cards, is_card
from isthmus.agent.adapters.scheduler_adapter import SchedulerCheck
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_output import NodeRow, parse_boot_time, parse_nodes
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.files.validation_errors import suggest_name


def check_slurm(site: SlurmSite, commands: SlurmCommands) -> Sequence[SchedulerCheck]:
    """Return the findings: does Slurm answer, are partitions and cards those of `site.yaml` and `pool.yaml`."""
    try:
        epoch = parse_boot_time(commands.run("scontrol", "show", "config"))
        nodes = parse_nodes(commands.run("scontrol", "show", "node", "-o"))
    except IsthmusError as error:
        hint = error.hint or "start slurmctld, or set options.config to its slurm.conf"
        return [SchedulerCheck(check="scheduler", ok=False, detail=error.message, hint=hint)]
    found = [SchedulerCheck(check="scheduler", ok=True, detail=f"slurmctld answers, up since {epoch}")]
    found += [*_check_partitions(site, nodes), *_check_cards(site, nodes), *_check_unmapped(site, nodes)]
    return found if any(not one.ok for one in found) else [*found, *_check_rights(site, commands)]


def _check_partitions(site: SlurmSite, nodes: Sequence[NodeRow]) -> Iterator[SchedulerCheck]:
    partitions = sorted({partition for node in nodes for partition in node.partitions})
    wanted: dict[tuple[str, ...], str]
    wanted = {("node_groups", group, "partition"): site.partition(group) for group in site.file.node_groups}
    if site.preempting_partition:
        wanted["options", "preempting_partition"] = site.preempting_partition
    for place, partition in wanted.items():
        known = partition in partitions
        yield SchedulerCheck(
            check="partition", ok=known,
            detail=f"partition '{partition}' exists" if known else f"unknown partition '{partition}'",
            hint="" if known else suggest_name(partition, partitions) or "", file_path=() if known else place,
        )  # fmt: skip


def _check_rights(site: SlurmSite, commands: SlurmCommands) -> Iterator[SchedulerCheck]:
    """Yield where this account may submit no job, by Slurm's own dry run for one card; nothing where it may."""
    for group in site.cluster.node_groups:
        for preempts in (False, True) if site.preempting_partition else (False,):
            asks = site.asks(group.name, 1, 1, preempts=preempts)
            partition = asks[0].partition("=")[2]
            try:
                commands.run_fully("sbatch", "--test-only", *asks, "--wrap=true")
            except UnavailableError as error:
                place = ("options", "preempting_partition") if preempts else ("node_groups", group.name, "partition")
                yield SchedulerCheck(
                    check="rights", ok=False, detail=f"missing right: submit jobs to partition '{partition}'",
                    hint=error.message, file_path=place,
                )  # fmt: skip


def _check_cards(site: SlurmSite, nodes: Sequence[NodeRow]) -> Iterator[SchedulerCheck]:
    yield from check_cards(
        site.cluster, site.card_nodes(nodes),
        lambda group: f"is '{site.resource(group)}' what Slurm calls a card (Gres of the nodes)?",
        "scontrol show node says why",
    )  # fmt: skip


def _check_unmapped(site: SlurmSite, nodes: Sequence[NodeRow]) -> Iterator[SchedulerCheck]:
    mapped: dict[str, set[str]] = {}
    for one in site.card_nodes(nodes):
        mapped.setdefault(one.name, set()).add(site.resource(one.node_group))
    left = []
    for node in nodes:
        names = [
            name for name in node.resource_names
            if is_card(name.partition(":")[0]) and not {name, name.partition(":")[0]} & mapped.get(node.name, set())
        ]  # fmt: skip
        left += [f"{node.name} ({', '.join(names)})"] if names else []
    if left:
        yield SchedulerCheck(
            check="cards", ok=False, detail=f"cards of no node group: {', '.join(left)}", file_path=("node_groups",),
            hint="add a node group with their partition and resource, or take them out of the partition",
        )  # fmt: skip
