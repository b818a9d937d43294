"""`RaySite`: how a Ray cluster's nodes and resources are the node groups and cards of a site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from isthmus.agent.adapters.ray.ray_rest import RayNode
from isthmus.agent.adapters.scheduler_adapter import CardNode, ForeignJob, NodeImages
from isthmus.agent.adapters.site_options import MIN_TIMEOUT_S, check_options, number_option
from isthmus.core.errors import FieldError, InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster

OPTIONS = (
    "address", "courier_host", "courier_port", "image_store", "images", "python", "timeout_s", "token_file",
)  # fmt: skip
DEFAULT_IMAGE_STORE = "/var/lib/isthmus/images"
DEFAULT_RESOURCE = "GPU"


class RaySite:
    """The mapping of `site.yaml` for `cluster`. Raises `InputError` for options and selectors that Ray cannot have."""

    def __init__(self, file: SiteFile, cluster: Cluster) -> None:
        check_options(file, "Ray", OPTIONS)
        self.address = str(file.options.get("address", ""))
        if not self.address.startswith(("http://", "https://")):
            wrong = f"'{self.address}' is no URL" if self.address else "names no dashboard"
            raise FieldError(wrong, place=("options", "address"), hint="set it, such as http://HEAD:8265")
        self.courier_port = round(number_option(file, "courier_port", 0, most=65535, whole=True))
        self.timeout_s = number_option(file, "timeout_s", 10.0, least=MIN_TIMEOUT_S)
        for group in cluster.node_groups:
            selector = file.node_groups.get(group.name)
            if selector is not None and selector.partition:
                place = ("node_groups", group.name, "partition")
                raise FieldError("Ray has no partitions", place=place, hint="name labels instead")
        self.images = _node_images(file)
        self.file, self.cluster = file, cluster
        self.python = str(file.options.get("python", "python"))
        self._groups = {group.name: file.node_groups.get(group.name) for group in cluster.node_groups}

    def resource(self, group: str) -> str:
        """Return what Ray calls a card of a node group; raise `InputError` for an unknown one."""
        if group not in self._groups:
            raise InputError(f"unknown node group '{group}'", hint=suggest_name(group, self._groups))
        selector = self._groups[group]
        return selector.resource if selector is not None and selector.resource else DEFAULT_RESOURCE

    def labels(self, group: str) -> dict[str, str]:
        """Return the labels that a node of a node group must have."""
        selector = self._groups[group]
        return dict(selector.labels) if selector is not None else {}

    def hold_order(
        self, ranks: Sequence[tuple[str, int]], *, renewals: int, lease_s: float, released: bool
    ) -> dict[str, Any]:
        """Return the order to the holder for a hold; its ranks are pairs of node group and number of cards."""
        labels = [self.labels(group) for group, _ in ranks]
        return {
            "bundles": [{self.resource(group): num} for group, num in ranks],
            "labels": labels if any(labels) else [],
            "renewals": renewals, "lease_s": lease_s, "released": released,
        }  # fmt: skip

    def group_of(self, node: RayNode) -> str | None:
        """Return the node group of a node with cards, None if it belongs to none."""
        for group in self._groups:
            has_labels = self.labels(group).items() <= node.labels.items()
            if has_labels and node.total.get(self.resource(group), 0) >= 1:
                return group
        return None

    def names(self, nodes: Iterable[RayNode]) -> dict[str, str]:
        """Return a name for each node, by its id: Ray's, with the id's start where two nodes share it."""
        nodes = list(nodes)
        plain = {node.id: _plain(node.name) for node in nodes}
        shared = {name for name in plain.values() if list(plain.values()).count(name) > 1}
        return {node: f"{name}-{node[:8]}" if name in shared else name for node, name in plain.items()}

    def card_nodes(self, nodes: Sequence[RayNode]) -> list[CardNode]:
        """Return the nodes with cards, by node group and name."""
        names, found = self.names(nodes), []
        for node in nodes:
            group = self.group_of(node)
            if group is not None:
                cards = tuple(f"{group}/{names[node.id]}/{card}" for card in range(self.num_cards(node, group)))
                found.append(CardNode(name=names[node.id], node_group=group, cards=cards))
        order = list(self._groups)
        return sorted(found, key=lambda one: (order.index(one.node_group), one.name))

    def num_cards(self, node: RayNode, group: str) -> int:
        """Return how many cards a node has."""
        return int(node.total.get(self.resource(group), 0))

    def foreign_jobs(self, nodes: Sequence[RayNode], ours: Mapping[str, Set[str]]) -> tuple[ForeignJob, ...]:
        """Return what others use, a job per node: Ray tells amounts and neither jobs nor cards.

        `ours` are this agent's cards by name of the node. Raises nothing: an amount below ours counts as none.
        """
        names, found = self.names(nodes), []
        for node in nodes:
            group = self.group_of(node)
            if group is None:
                continue
            own = ours.get(names[node.id], frozenset())
            num = round(node.used.get(self.resource(group), 0)) - len(own)
            cards = [f"{group}/{names[node.id]}/{card}" for card in range(self.num_cards(node, group))]
            free = [card for card in cards if card not in own]
            if num > 0:
                found.append(
                    ForeignJob(
                        name=f"ray-{names[node.id]}", priority=0, wanted={group: num}, cards=tuple(free[-num:]),
                        running=True,
                    )
                )  # fmt: skip
        return tuple(found)


def _node_images(file: SiteFile) -> NodeImages | None:
    """Return where Ray's nodes have images, None where workers are processes; raise `FieldError` for a wrong path."""
    layout, store = (str(file.options.get(name, "")) for name in ("images", "image_store"))
    for name, path in (("images", layout), ("image_store", store)):
        if path and not path.startswith("/"):
            raise FieldError(
                f"'{path}' is no absolute path", place=("options", name), hint="name a folder of the nodes"
            )
    if store and not layout:
        raise FieldError("image_store without images", place=("options", "image_store"), hint="set options.images")
    return NodeImages(layout=layout, store=store or DEFAULT_IMAGE_STORE) if layout else None


def _plain(name: str) -> str:
    """Return a name of a node as part of the id of a card."""
    return "".join(one if one.isalnum() or one in "._-:" else "-" for one in name)
