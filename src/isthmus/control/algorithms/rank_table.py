"""`RankTable`: where each rank of a run is and which of its addresses talks to which address of its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isthmus.control.algorithms.rank_links import RankLink, rank_links
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.plan import Plan
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.views.rank_views import AddressPair, RankPeer, RankView


@dataclass(frozen=True)
class AddressChange:
    """What a placed worker changes for the network controller: the demands between addresses that end and begin."""

    ended: tuple[AddressPair, ...]
    begun: tuple[AddressPair, ...]


class RankTable:
    """The ranks of `plan` on the nodes of `clusters`, by name.

    A rank has the network cards beside its devices, in the order of their names: of n cards and d devices of a node,
    the rank on device i has card i * n / d and those up to the next device's. Two ranks pair their addresses in order.
    A rank's place says nothing of other ranks' numbers, nodes or addresses, so a replaced worker changes its own alone.
    """

    def __init__(self, plan: Plan, clusters: Mapping[str, Cluster]) -> None:
        self._plan = plan
        self._groups = {
            (name, group.name): group for name, cluster in clusters.items() for group in cluster.node_groups
        }
        self._workers: dict[int, WorkerAddress] = {}
        self._addresses: dict[int, tuple[str, ...]] = {}
        self._links: list[list[RankLink]] = [[] for _ in range(plan.num_ranks)]
        for link in rank_links(plan):
            self._links[link.source].append(link)

    def place(self, worker: WorkerAddress) -> AddressChange:
        """Give a rank its worker, the first one or a replacement; return what that changes between addresses.

        Raises `ValueError` for a rank that the plan does not have at the worker's cluster.
        """
        rank = worker.rank
        if rank >= len(self._links) or self._plan.stage_of(rank).cluster != worker.cluster:
            raise ValueError(f"the plan has no rank {rank} in cluster {worker.cluster}")
        ended = self._pairs_of(rank)
        self._workers[rank], self._addresses[rank] = worker, self._find_addresses(worker)
        begun = self._pairs_of(rank)
        kept = set(ended) & set(begun)
        return AddressChange(
            tuple(one for one in ended if one not in kept), tuple(one for one in begun if one not in kept)
        )

    def view(self, rank: int) -> RankView:
        """Return the node, addresses and peers of a rank; without addresses until it has a worker."""
        worker = self._workers.get(rank)
        return RankView(
            rank=rank,
            cluster=self._plan.stage_of(rank).cluster,
            node=node_of(worker) if worker else "",
            addresses=self._addresses.get(rank, ()),
            port=worker.port if worker else None,
            peers=tuple(
                RankPeer(
                    rank=link.target,
                    cluster=self._plan.rank_clusters[link.target],
                    gbps=link.gbps,
                    pairs=self._pairs(link),
                )
                for link in self._links[rank]
            ),
        )

    def views(self) -> tuple[RankView, ...]:
        """Return the views of all ranks, in their order."""
        return tuple(map(self.view, range(len(self._links))))

    def _pairs_of(self, rank: int) -> list[AddressPair]:
        """Return the pairs of all links from and to a rank; links have both directions."""
        back = (RankLink(link.target, rank, self._rate(link.target, rank)) for link in self._links[rank])
        return [pair for link in (*self._links[rank], *back) for pair in self._pairs(link)]

    def _rate(self, source: int, target: int) -> float:
        return next(link.gbps for link in self._links[source] if link.target == target)

    def _pairs(self, link: RankLink) -> tuple[AddressPair, ...]:
        ones, others = self._addresses.get(link.source, ()), self._addresses.get(link.target, ())
        pairs = list(zip(ones, others, strict=False))
        return tuple(AddressPair(source=one, target=other, gbps=link.gbps / len(pairs)) for one, other in pairs)

    def _find_addresses(self, worker: WorkerAddress) -> tuple[str, ...]:
        group, node, device = split_device(worker.device)
        found = self._groups.get((worker.cluster, group))
        if found is None or not found.nics or not (node < found.nodes and device < found.chips_per_node):
            return (worker.host,)
        num_devices = self._plan.chips_of(worker.rank)
        return tuple(nic_addresses(found, node, device, num_devices))


def nic_addresses(group: NodeGroup, node: int, device: int, num_devices: int) -> Iterable[str]:
    """Return the addresses of the cards beside `num_devices` devices of a node, from `device` on, by card name."""
    cards, per_node = sorted(group.nics, key=lambda nic: nic.name), group.chips_per_node
    first, last = device * len(cards) // per_node, min(device + num_devices, per_node) * len(cards) // per_node
    return (card.addresses[node] for card in cards[first : max(last, first + 1)])


def split_device(device: str) -> tuple[str, int, int]:
    """Return node group, node and index of a device `group/node/device`; ("", 0, 0) for any other text."""
    group, _, rest = device.partition("/")
    node, _, index = rest.partition("/")
    if not (group and node.isascii() and node.isdigit() and index.isascii() and index.isdigit()):
        return "", 0, 0
    return group, int(node), int(index)


def node_of(worker: WorkerAddress) -> str:
    """Return the node of a worker, `group/node`, or "" if its site did not say."""
    group, node, _ = split_device(worker.device)
    return f"{group}/{node}" if group else ""
