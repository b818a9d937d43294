"""`SlurmSite`: how a Slurm cluster's partitions, nodes and jobs are the node groups, cards and jobs of a site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from isthmus.agent.adapters.scheduler_adapter import CardNode, ForeignJob, HoldRequest
from isthmus.agent.adapters.site_options import MIN_TIMEOUT_S, check_options, number_option
from isthmus.agent.adapters.slurm.slurm_holds import allocation_units
from isthmus.agent.adapters.slurm.slurm_output import JobRow, NodeRow
from isthmus.core.errors import FieldError, InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster

OPTIONS = ("account", "config", "max_minutes", "preempting_partition", "timeout_s")
_DEFAULT_RESOURCE = "gpu"
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "mlu": "MLU_VISIBLE_DEVICES"}
"""What names its cards to a program (Ascend CANN, Cambricon CNToolkit), by a resource for which Slurm sets nothing."""


def job_name(job: int) -> str:
    """Return the name of a job of others at the site."""
    return f"slurm-{job}"


class SlurmSite:
    """The mapping of `site.yaml` for `cluster`. Raises `InputError` for options or labels that Slurm cannot have."""

    def __init__(self, file: SiteFile, cluster: Cluster) -> None:
        check_options(file, "Slurm", OPTIONS)
        self.file, self.cluster, self._groups = file, cluster, {}
        for group in cluster.node_groups:
            selector, place = file.node_groups.get(group.name), ("node_groups", group.name)
            if selector is None or not selector.partition:
                hint = "add node_groups"
                raise FieldError(f"names no partition for node group '{group.name}'", place=place, hint=hint)
            if selector.labels:
                raise FieldError("Slurm has no labels", place=(*place, "labels"), hint="name a partition instead")
            self._groups[group.name] = selector
        self.preempting_partition = str(file.options.get("preempting_partition", ""))
        self.max_minutes = round(number_option(file, "max_minutes", 0, whole=True))
        self.timeout_s = number_option(file, "timeout_s", 10.0, least=MIN_TIMEOUT_S)
        self.account = str(file.options.get("account", ""))

    def partition(self, group: str) -> str:
        """Return the partition of a node group; raise `InputError` for an unknown one."""
        if group not in self._groups:
            raise InputError(f"unknown node group '{group}'", hint=suggest_name(group, self._groups))
        return self._groups[group].partition

    def resource(self, group: str) -> str:
        """Return what Slurm calls a card of a node group."""
        return self._groups[group].resource or _DEFAULT_RESOURCE

    def units(self, request: HoldRequest) -> list[tuple[str, int, list[int]]]:
        """Return the allocations of a hold; raise `InputError` for what `site.yaml` does not name."""
        for rank in request.ranks:
            self.partition(rank.node_group)
        if request.preempts and not self.preempting_partition:
            raise InputError("site.yaml names no preempting_partition", hint="set options.preempting_partition")
        return self.units_of([(rank.node_group, rank.num_cards) for rank in request.ranks])

    def units_of(self, ranks: list[tuple[str, int]]) -> list[tuple[str, int, list[int]]]:
        """Return the allocations that hold `ranks`, pairs of node group and number of cards.

        A rank whose cards Slurm does not call `gpu` has an allocation of its own: Slurm counts those by node alone.
        """
        return allocation_units(ranks, apart={group for group in self._groups if not self._is_gpu(group)})

    def visible_cards(self, group: str, cards: Sequence[str]) -> dict[str, str]:
        """Return the variable that names the cards of a rank to its program, where Slurm sets none."""
        name = _VISIBLE.get(self.resource(group).partition(":")[0])
        return {} if name is None else {name: ",".join(card.rpartition("/")[2] for card in cards)}

    def _is_gpu(self, group: str) -> bool:
        return self.resource(group).partition(":")[0] == _DEFAULT_RESOURCE

    def asks(
        self, group: str, num_cards: int, num_ranks: int, *, preempts: bool, nodes: Iterable[str] = ()
    ) -> tuple[str, ...]:
        """Return the options with which a command asks for cards, on `nodes` where placement has chosen them."""
        partition = self.preempting_partition if preempts else self.partition(group)
        limit = (f"--time={self.max_minutes}",) if self.max_minutes else ()
        account = (f"--account={self.account}",) if self.account else ()
        asked = ":".join([*self.resource(group).split(":")[1:], str(num_cards)])
        by_node = ("--nodes=1", *self.asks_of_step(group, str(num_cards)))
        cards = (f"--gpus-per-task={asked}",) if self._is_gpu(group) else by_node
        chosen = ",".join(dict.fromkeys(node for node in nodes if node))
        on = (f"--nodelist={chosen}",) if chosen and not preempts else ()
        return (
            f"--partition={partition}", f"--ntasks={num_ranks}", *cards, "--chdir=/", *limit, *account, *on,
        )  # fmt: skip

    def asks_of_step(self, group: str, num_cards: str) -> tuple[str, ...]:
        """Return the option that gives a step cards of its node; without it each step of a job gets the first ones."""
        return (f"--gres={self.resource(group)}:{num_cards}",)

    def card_nodes(self, rows: Iterable[NodeRow]) -> list[CardNode]:
        """Return the nodes with cards, by node group."""
        rows = list(rows)
        return [
            CardNode(
                name=row.name,
                node_group=group,
                cards=tuple(f"{group}/{row.name}/{card}" for card in range(row.num_cards(self.resource(group)))),
                usable=row.usable,
            )
            for group, selector in self._groups.items()
            for row in rows
            if selector.partition in row.partitions and row.num_cards(self.resource(group))
        ]

    def foreign_jobs(
        self, rows: Sequence[JobRow], nodes: Sequence[CardNode], taken: Set[str]
    ) -> tuple[ForeignJob, ...]:
        """Return the jobs of others that use or want cards of the site's node groups.

        Slurm tells which cards a job has only one job at a time, so a running job is given cards of its nodes that no
        hold has: as many as it asked for.
        """
        left = {node.name: [card for card in node.cards if card not in taken] for node in nodes}
        groups = {node.name: node.node_group for node in nodes}
        found: list[ForeignJob] = []
        for row in rows:
            running = row.state not in ("PD", "RH", "RD", "RQ", "RF", "SE")
            waits_in = [group for group, selector in self._groups.items() if selector.partition == row.partition]
            group = groups.get(row.nodes[0]) if row.nodes else next(iter(waits_in), None)
            num = row.num_cards(self.resource(group)) if group is not None else 0
            if group is None or num == 0:
                continue
            cards: list[str] = []
            for at, node in enumerate(row.nodes if running else ()):
                share = -(-(num - len(cards)) // (len(row.nodes) - at))
                cards += left.get(node, [])[:share]
                left[node] = left.get(node, [])[share:]
            found.append(
                ForeignJob(
                    name=job_name(row.id), priority=row.priority, wanted={group: num}, cards=tuple(cards),
                    running=running, preemptible=row.requeue, ends_at_s=row.ends_at_s,
                )
            )  # fmt: skip
        return tuple(found)
