"""What happens at a tenant gateway, and what it does: `TenantEvent`, `TenantInstruction`.

Buffers belong to the caller again once its event is handled and the instructions are carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.tenants_file import TenantsFile


class FlowKey(NamedTuple):
    """One direction of a flow of a tenant."""

    vni: int
    is_outgoing: bool
    """From this site's tenant to another site."""
    ether_type: int
    protocol: int
    source: bytes
    target: bytes
    source_port: int
    target_port: int

    @property
    def answer(self) -> FlowKey:
        """The direction of its answers."""
        ports = self.target_port, self.source_port
        return FlowKey(
            self.vni, not self.is_outgoing, self.ether_type, self.protocol, self.target, self.source, *ports
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlowRule:
    """What a kernel or a NIC does with a flow's frames instead of the gateway's process."""

    key: FlowKey
    vlan: int
    port: str | None
    """The tenant's own device; None for the trunk."""
    gateway: bytes
    """Address of the other site's gateway."""
    dscp: int
    """Of the outer header, going out."""


# Events


@dataclass(frozen=True, slots=True)
class FrameFromTenant:
    """A frame of a tenant's device or VLAN, without its tag."""

    vlan: int
    buffer: FrameBuffer


@dataclass(frozen=True, slots=True)
class DatagramFromGateway:
    """A UDP payload, from its VXLAN header on, with address and traffic class of its IP header."""

    gateway: bytes
    traffic_class: int
    buffer: FrameBuffer


@dataclass(frozen=True, slots=True)
class FrameFromTunnel:
    """A frame whose VXLAN header the kernel has removed; it has merged the congestion marks."""

    vni: int
    gateway: bytes
    buffer: FrameBuffer


@dataclass(frozen=True, slots=True)
class TcpChanged:
    """The TCP connection to a site is there, or is lost with what it has not delivered."""

    site: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class TcpBytes:
    """Bytes that the TCP connection of a site has brought."""

    site: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TcpResends:
    """Bytes that the TCP connection to a site has sent in all, and of these again: what the link loses of them."""

    site: str
    num_sent: int
    num_resent: int


@dataclass(frozen=True, slots=True)
class RuleRefused:
    """Neither kernel nor NIC takes a rule: its flow stays with the gateway's process."""

    key: FlowKey


@dataclass(frozen=True, slots=True)
class RulesUsed:
    """Flows whose rules have had packets since the last time."""

    keys: Sequence[FlowKey]


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """Frames of rules, in all so far: sent to a site, come from it, and how many of these had a congestion mark."""

    site: str
    num_sent: int
    num_heard: int
    num_marked: int


@dataclass(frozen=True, slots=True)
class TenantsChanged:
    """The file of tenants has changed."""

    file: TenantsFile


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


TenantEvent = (
    FrameFromTenant | DatagramFromGateway | FrameFromTunnel | TcpChanged | TcpBytes | TcpResends
    | RuleRefused | RulesUsed | KernelCounts | TenantsChanged | Tick
)  # fmt: skip


# Instructions


@dataclass(frozen=True, slots=True)
class SendToGateway:
    """Send a packet with its outer IPv4 header; `vni` says whose it is."""

    gateway: bytes
    vni: int
    packet: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SendToTenant:
    """Send a frame without a tag to a tenant of this site."""

    vlan: int
    frame: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SendByTcp:
    """Send bytes in the TCP connection to a site."""

    site: str
    data: bytes


@dataclass(frozen=True, slots=True)
class EndTcp:
    """End the TCP connection to a site: what it brings is not frames."""

    site: str


@dataclass(frozen=True, slots=True)
class InstallRule:
    """Set a rule, in place of an earlier one with the same key."""

    rule: FlowRule


@dataclass(frozen=True, slots=True)
class RemoveRule:
    """Remove a rule."""

    rule: FlowRule


TenantInstruction = SendToGateway | SendToTenant | SendByTcp | EndTcp | InstallRule | RemoveRule
