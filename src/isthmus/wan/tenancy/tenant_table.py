"""`TenantTable`: whose a frame is, where it goes, and whether its tenant may send it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from isthmus.wan.tenancy.packets.inner_frame import ARP, ICMP, ICMPV6, TCP, UDP, InnerView
from isthmus.wan.tenancy.tenant_events import FlowKey
from isthmus.wan.tenancy.tenants_file import Tenant, TenantsFile

MAX_REMEMBERED = 65_536
"""Addresses of a tenant whose site is remembered; they come from frames."""
_PROTOCOLS = {"tcp": (TCP,), "udp": (UDP,), "icmp": (ICMP, ICMPV6)}


@dataclass
class TenantEntry:
    """A tenant with what is looked up of it."""

    tenant: Tenant
    num_flows: int = 0
    _sites: dict[bytes, str | None] = field(default_factory=dict)
    _allowed: tuple[tuple[int, int, int, int, int], ...] = ()

    def __post_init__(self) -> None:
        self._allowed = tuple(
            (number, *_ends(rule.from_ports), *_ends(rule.to_ports))
            for rule in self.tenant.allow
            for number in _PROTOCOLS[rule.protocol]
        )

    def site_of(self, address: bytes) -> str | None:
        """Return the site in whose networks an address of the tenant is."""
        if address not in self._sites:
            if len(self._sites) >= MAX_REMEMBERED:
                self._sites.clear()
            self._sites[address] = self._find_site(address)
        return self._sites[address]

    def _find_site(self, address: bytes) -> str | None:
        found = ipaddress.ip_address(address)
        for site, networks in self.tenant.networks.items():
            if any(found.version == one.version and found in one for one in networks):
                return site
        return None

    def allows(self, view: InnerView) -> bool:
        """Return whether a rule allows a frame, not counting answers. Neighbours may always be asked for."""
        return self.allows_key(view) or view.ether_type == ARP or view.is_neighbour_message

    def allows_key(self, of: InnerView | FlowKey) -> bool:
        """Return whether a rule allows a protocol with its ports."""
        for protocol, first_from, last_from, first_to, last_to in self._allowed:
            if protocol != of.protocol:
                continue
            if protocol in (ICMP, ICMPV6):
                return True
            if first_from <= of.source_port <= last_from and first_to <= of.target_port <= last_to:
                return True
        return False


class TenantTable:
    """The tenants of a file by VLAN and by VNI."""

    def __init__(self, file: TenantsFile) -> None:
        self.file = file
        entries = [TenantEntry(one) for one in file.tenants]
        self.by_vlan = {one.tenant.vlan: one for one in entries}
        self.by_vni = {one.tenant.vni: one for one in entries}


def _ends(ports: str | int) -> tuple[int, int]:
    first, _, last = str(ports).partition("-")
    return int(first), int(last or first)
