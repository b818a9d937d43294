"""Training resources: `NodeGroup`, `Cluster`, `Owner`, `Link`, `Pool`.

`pool.yaml` is the file format of `Pool`; see `docs/formats.md`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import Currency, FrozenModel, Name, NonNegativeFloat, PositiveFloat, PositiveInt
from isthmus.core.chip import Chip, chip_catalogue
from isthmus.core.errors import InputError
from isthmus.core.pool_parts.crossing import Crossing, SiteAccess, check_crossings
from isthmus.core.pool_parts.group_topology import GroupTopology, TopologyError
from isthmus.core.pool_parts.owner_users import MAX_OWNER_USERS, check_owner_users
from isthmus.core.pool_parts.placed_error import PlacedError
from isthmus.core.priority import PriorityMap
from isthmus.core.units import TB, Bytes

MAX_NICS = 64
"""Most network cards of a node."""
MAX_NODES, MAX_CHIPS_PER_NODE = 100_000, 1024
"""Largest node group: what an owner reports enters the plans of every job of the pool."""
MAX_AGGREGATORS = 4096
"""Most parameter servers or switches of a cluster."""
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
"""A rate in Gbit/s, from a kilobit to a petabit per second."""
Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
"""A multiple of what a chip has."""


def _normal_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise ValueError(f"'{text[:60]}' is not an IP address") from error


IpAddress = Annotated[str, AfterValidator(_normal_address)]
"""An IPv4 or IPv6 address, in its usual notation."""


class VirtualChip(FrozenModel):
    """Emulation of a chip with `compute_scale` times the speed and `memory_scale` times the memory.

    A worker on a virtual chip computes for real, then waits until the virtual chip's time has passed. The
    planner and the site apply the scaled memory limit.
    """

    compute_scale: Scale = 1.0
    memory_scale: Scale = 1.0


class NetworkCard(FrozenModel):
    """A network card that each node of a group has, with its IP address at each node, in node order."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@:-]{0,14}$")]
    addresses: tuple[IpAddress, ...] = Field(min_length=1)


class NodeGroup(FrozenModel):
    """Identical nodes with one chip type; the unit of placement inside a cluster.

    A part that runs in containers gets the share of `cpus_per_node` and `memory_bytes_per_node` that its chips have;
    without them it is not limited. `driver` is the version of the chips' driver, by which images are matched.
    `chips_per_domain` is the number of chips that the in-node link joins where that is more than a node (72 in an
    NVL72 rack of nodes with 4 chips); it is whole nodes.

    `nics` are the network cards for traffic between ranks; without them a rank has the address at which it listens.
    `topology` is the tree that the nodes are in; without it the agent asks the site's scheduler. Where no super-nodes
    are known, those of `chips_per_domain` follow each other in node order.
    """

    name: Name
    chip: Name
    nodes: Annotated[PositiveInt, Field(le=MAX_NODES)]
    chips_per_node: Annotated[PositiveInt, Field(le=MAX_CHIPS_PER_NODE)]
    chips_per_domain: PositiveInt | None = None
    network_gbps: Rate = 400.0
    virtual: VirtualChip | None = None
    price_per_chip_hour: Annotated[NonNegativeFloat, Field(le=1e9)] = 0.0
    cpus_per_node: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    memory_bytes_per_node: Bytes | None = None
    driver: Annotated[str, Field(max_length=64)] = ""
    nics: Annotated[tuple[NetworkCard, ...], Field(max_length=MAX_NICS)] = ()
    topology: GroupTopology | None = None

    @model_validator(mode="after")
    def _check_topology(self) -> NodeGroup:
        """Raise `TopologyError` for cards and nodes that the group does not have, or too small super-nodes."""
        if self.topology is None:
            return self
        for at, link in enumerate(self.topology.card_links):
            if max(link.cards) >= self.chips_per_node:
                message = f"card {max(link.cards)} of a node with {self.chips_per_node} chips, from 0"
                raise TopologyError(message, ("topology", "card_links", at, "cards"))
        if self.topology.num_nodes() > self.nodes:
            message = f"the topology names {self.topology.num_nodes()} nodes, the group has {self.nodes}"
            raise TopologyError(message, ("topology",))
        for at, domain in enumerate(self.topology.super_nodes):
            num_chips = sum(1 for _ in domain.node_names()) * self.chips_per_node
            if num_chips < (self.chips_per_domain or 0):
                message = (
                    f"super-node '{domain.name}' has {num_chips} chips, chips_per_domain is {self.chips_per_domain}"
                )
                raise TopologyError(message, ("topology", "super_nodes", at, "nodes"))
        return self

    @model_validator(mode="after")
    def _check_nics(self) -> NodeGroup:
        _require_unique((nic.name for nic in self.nics), f"nics of node group {self.name}")
        for nic in self.nics:
            if len(nic.addresses) != self.nodes:
                raise ValueError(f"nic {nic.name} has {len(nic.addresses)} addresses for {self.nodes} nodes, one each")
        _require_unique((one for nic in self.nics for one in nic.addresses), f"addresses of node group {self.name}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" not in data and isinstance(data.get("chip"), str):
            return {**data, "name": data["chip"].lower()}
        return data

    @model_validator(mode="after")
    def _check_domain(self) -> NodeGroup:
        """Raise unless a domain is whole nodes of this group."""
        domain, node = self.chips_per_domain, self.chips_per_node
        if domain is not None and (domain % node or domain > self.num_chips):
            nearest = max(node, min(domain // node, self.nodes) * node)
            raise ValueError(
                f"chips_per_domain {domain} is not whole nodes of {node} chips, at most {self.num_chips}; "
                f"nearest valid: {nearest}"
            )
        return self

    @property
    def num_chips(self) -> int:
        """Number of chips in the group."""
        return self.nodes * self.chips_per_node

    @property
    def num_linked_chips(self) -> int:
        """Number of chips that the in-node link joins: those of a node, or of a domain of several nodes."""
        return self.chips_per_domain or self.chips_per_node


def _check_udp_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"'{text}' is not an address and a port; an example: 10.0.0.9:8475")
    return text


UdpAddress = Annotated[str, Field(max_length=255), AfterValidator(_check_udp_address)]
"""`HOST:PORT`; an IPv6 address is in brackets."""


class Aggregators(FrozenModel):
    """`count` machines of a cluster that add gradients for its nodes: parameter servers, or switches that add packets.

    `network_gbps` is the rate of a server's network card, or of all ports of a switch together; without it a server
    has the rate of a node, and a switch adds at the rate of each port. A switch with `slots` holds as many packets of
    `slot_bytes` at a time. Runs use the switches of which `addresses` are stated, one for each: where
    `isthmus switch` listens, reachable from all nodes of the run.
    """

    kind: Literal["server", "switch"]
    count: Annotated[PositiveInt, Field(le=MAX_AGGREGATORS)] = 1
    network_gbps: Rate | None = None
    slots: Annotated[PositiveInt, Field(le=2**24)] | None = None
    slot_bytes: Annotated[PositiveInt, Field(le=2**20)] = 256
    addresses: Annotated[tuple[UdpAddress, ...], Field(max_length=32)] = ()

    @model_validator(mode="after")
    def _check_slots(self) -> Aggregators:
        if self.slots is not None and self.kind == "server":
            raise ValueError("a server has no slots; leave `slots` out")
        if self.addresses and self.kind == "server":
            raise ValueError("ranks play the servers; leave `addresses` out")
        if len(self.addresses) not in (0, self.count):
            raise ValueError(f"{len(self.addresses)} addresses of {self.count} switches; state one for each, or none")
        return self


class Cluster(FrozenModel):
    """One site with one local scheduler. `priorities` maps pool priorities to the site's own.

    `aggregators` are the parameter servers and switches that synchronisation may use, at most one entry per kind.
    `access` are the proxies and gateways by which its workers reach other sites, where links state a `crossing`.
    """

    name: Name
    owner: Name
    region: str = ""
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)
    storage_bytes: Bytes = 10 * TB
    priorities: PriorityMap = PriorityMap()
    aggregators: tuple[Aggregators, ...] = ()
    access: SiteAccess | None = None

    @model_validator(mode="after")
    def _check_unique_groups(self) -> Cluster:
        _require_unique((one.kind for one in self.aggregators), f"aggregators of cluster {self.name}")
        _require_unique((group.name for group in self.node_groups), f"node groups of cluster {self.name}")
        return self

    def group(self, name: str) -> NodeGroup:
        """Return the node group `name`; raise `KeyError` if unknown."""
        return {group.name: group for group in self.node_groups}[name]


class Owner(FrozenModel):
    """An organisation that operates clusters and is paid for their use.

    `users` are its own, whose waiting times `isthmus waits` compares with those that they would have on its clusters
    alone; a user is listed at one owner.
    """

    name: Name
    title: str = ""
    users: Annotated[tuple[Name, ...], Field(max_length=MAX_OWNER_USERS)] = ()


MIN_MTU_BYTES, MAX_MTU_BYTES = 576, 9_000
LossRate = Annotated[float, Field(ge=0, lt=1)]
"""Packet loss probability, below 1."""
_NOT_BY_RDMA = (
    "loss", "loss_burst_packets", "reordering", "reordering_ms", "duplication", "congestion_control", "crossing",
)  # fmt: skip
"""What a link says of a path of TCP alone."""


class Link(FrozenModel):
    """One direction of a WAN path between two clusters.

    `delay_ms` is one way (half the round trip), `jitter_ms` the standard deviation of the one-way delay,
    `loss` the packet loss probability, `congestion_control` the algorithm of TCP flows on the link. Packets are lost
    independently of each other (`loss_burst_packets` 1), or that many in a row on average. `reordering` is the share of
    packets that arrive `reordering_ms` late, so that later ones overtake them, `duplication` that of packets that
    arrive twice, `mtu_bytes` the size of the largest IP packet. With `transport: rdma`, inside a data centre, workers'
    connections are opened over TCP and go on over the RDMA card of each node; such a link states no losses, no
    `congestion_control` and no `crossing`. `crossing` says that workers' connections cross it through the proxies or
    gateways of both sites, which their agents start; without it they connect directly, or by the routes of
    `isthmus agent --routes`.
    """

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    bandwidth_gbps: PositiveFloat
    delay_ms: NonNegativeFloat
    jitter_ms: NonNegativeFloat = 0.0
    loss: LossRate = 0.0
    link_class: Literal["best-effort", "reserved"] = Field("best-effort", alias="class")
    congestion_control: Literal["cubic", "bbr"] = "bbr"
    loss_burst_packets: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    reordering: LossRate = 0.0
    reordering_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    duplication: LossRate = 0.0
    mtu_bytes: Annotated[int, Field(ge=MIN_MTU_BYTES, le=MAX_MTU_BYTES)] = 1500
    transport: Literal["tcp", "rdma"] = "tcp"
    crossing: Crossing | None = None

    @model_validator(mode="after")
    def _faults_are_possible(self) -> Link:
        for name in _NOT_BY_RDMA if self.transport == "rdma" else ():
            if getattr(self, name) != Link.model_fields[name].default:
                raise PlacedError(
                    f"`{name}` and `transport: rdma` exclude each other",
                    (name,),
                    "RDMA goes from card to card over a network that loses nothing: leave out one of the two",
                )
        if self.reordering and not self.reordering_ms:
            raise ValueError("reordering needs reordering_ms, by which those packets are late")
        if self.loss_burst_packets > 1 and self.loss > self.loss_burst_packets * (1 - self.loss):
            least = self.loss / (1 - self.loss)
            raise ValueError(
                f"a loss of {self.loss:g} comes in bursts of {least:.3g} packets at least; "
                f"loss_burst_packets is {self.loss_burst_packets:g}"
            )
        return self

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth in bytes per second."""
        return self.bandwidth_gbps * 1e9 / 8

    @property
    def delay_s(self) -> float:
        """One-way delay in seconds."""
        return self.delay_ms / 1e3


class Pool(FrozenModel):
    """A snapshot of clusters, owners and links. `currency` names the unit of all prices, such as `EUR`."""

    version: Literal[1] = 1
    owners: tuple[Owner, ...] = ()
    chips: tuple[Chip, ...] = ()
    clusters: tuple[Cluster, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    currency: Currency = ""

    @model_validator(mode="before")
    @classmethod
    def _expand_links(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        links = data.get("links") or []
        if isinstance(links, list | tuple):
            data = {**data, "links": tuple(one for link in links for one in expand_link_shorthand(link))}
        return data

    @model_validator(mode="after")
    def _check_references(self) -> Pool:
        names = [cluster.name for cluster in self.clusters]
        _require_unique(names, "clusters")
        _require_unique(((link.source, link.target) for link in self.links), "links")
        known_names = set(names)
        for at, link in enumerate(self.links):
            for end in (link.source, link.target):
                if end not in known_names:
                    raise UnknownNameError("cluster", end, names)
            if link.source == link.target:
                raise ValueError(f"link from {link.source} to itself; a link must join two clusters")
            back = self.link(link.target, link.source)
            if back is not None and back.transport != link.transport:
                raise PlacedError(
                    f"{link.source} to {link.target} has another `transport` than {link.target} to it",
                    ("links", at, "transport"),
                    "state one `between` link",
                )
        known = [*chip_catalogue(), *(chip.name for chip in self.chips)]
        for cluster in self.clusters:
            for group in cluster.node_groups:
                if group.chip not in known:
                    raise UnknownNameError("chip", group.chip, known)
        check_owner_users((owner.name, owner.users) for owner in self.owners)
        if self.owners:
            owners = [owner.name for owner in self.owners]
            for cluster in self.clusters:
                if cluster.owner not in owners:
                    raise UnknownNameError("owner", cluster.owner, owners)
        check_crossings(
            {cluster.name: cluster.access for cluster in self.clusters},
            ((link.source, link.target, link.crossing) for link in self.links),
        )
        return self

    def cluster(self, name: str) -> Cluster:
        """Return the cluster `name`; raise `KeyError` if unknown."""
        return {cluster.name: cluster for cluster in self.clusters}[name]

    def node_group(self, cluster: str, name: str) -> NodeGroup:
        """Return the node group `name` of `cluster`; raise `InputError` if the pool has no such cluster or group."""
        known = {one.name: one for one in self.clusters}
        if cluster not in known:
            raise InputError(f"the pool has no cluster '{cluster}'", hint="available: " + ", ".join(known))
        groups = {group.name: group for group in known[cluster].node_groups}
        if name not in groups:
            raise InputError(f"cluster '{cluster}' has no node group '{name}'", hint="available: " + ", ".join(groups))
        return groups[name]

    def chip(self, group: NodeGroup) -> Chip:
        """Return the chip of `group`, scaled if virtual."""
        chip = {**chip_catalogue(), **{chip.name: chip for chip in self.chips}}[group.chip]
        if group.virtual is None:
            return chip
        scale = group.virtual
        return chip.model_copy(
            update={
                "peak_flop_per_s": {k: v * scale.compute_scale for k, v in chip.peak_flop_per_s.items()},
                "memory_bandwidth_bytes_per_s": chip.memory_bandwidth_bytes_per_s * scale.compute_scale,
                "memory_bytes": round(chip.memory_bytes * scale.memory_scale),
                "reported_bytes": None,
                "sustained": None,
            }
        )

    def rdma_peers(self, cluster: str) -> list[str]:
        """Return the clusters that workers of `cluster` reach by RDMA."""
        ends = [(one.source, one.target) for one in self.links if one.transport == "rdma"]
        return sorted({other for end in ends if cluster in end for other in end if other != cluster})

    def link(self, source: str, target: str) -> Link | None:
        """Return the link from `source` to `target`, or None."""
        return next((one for one in self.links if one.source == source and one.target == target), None)


class UnknownNameError(ValueError):
    """A reference to an unknown name; `known` lists the valid ones."""

    def __init__(self, kind: str, value: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} '{value}'")
        self.kind, self.value, self.known = kind, value, sorted(set(known))


def expand_link_shorthand(link: Any) -> list[Any]:
    """Expand `between: [a, b]` with `round_trip_ms` into two directed links."""
    if not isinstance(link, dict):
        return [link]
    fields = {key: value for key, value in link.items() if key not in ("between", "round_trip_ms")}
    if "round_trip_ms" in link and "delay_ms" not in link and isinstance(link["round_trip_ms"], int | float):
        fields["delay_ms"] = link["round_trip_ms"] / 2
    elif "round_trip_ms" in link:
        fields["round_trip_ms"] = link["round_trip_ms"]
    ends = link.get("between")
    if ends is None:
        return [fields]
    if not (isinstance(ends, list | tuple) and len(ends) == 2):
        return [{**fields, "between": ends}]
    return [{**fields, "from": ends[0], "to": ends[1]}, {**fields, "from": ends[1], "to": ends[0]}]


def _require_unique(names: Iterable[Any], what: str) -> None:
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r} appears twice")
        seen.add(name)
