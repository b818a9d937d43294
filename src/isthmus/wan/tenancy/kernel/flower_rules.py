"""`flower_lines`: a flow's rule as a tc-flower filter, for a NIC (`skip_sw`) or for the kernel.

Source: the report on cross-domain pooling, 4.3.3 (3): the first frame of a flow passes in software, and what follows
in the switch of the NIC; what the NIC does not take stays in software. Actions: cls_flower, act_tunnel_key, act_vlan
and act_mirred of Linux.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from isthmus.wan.tenancy.packets.inner_frame import IPV6, TCP
from isthmus.wan.tenancy.tenant_events import FlowRule
from isthmus.wan.tenancy.tenants_file import TenantsFile

PREFERENCE, TENANT_PREFERENCE, LAST_PREFERENCE = 10, 100, 200
"""Of rules of flows, of frames without one, and of what is dropped."""
Where = Literal["skip_sw", "skip_hw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDevices:
    """Devices of a gateway whose frames a kernel carries."""

    trunk: str | None
    """Tenants' frames with VLAN tags."""
    vxlan: str
    """The device of all tunnels."""
    from_tenants: str
    """TUN device of frames without a rule, each with the VLAN of its tenant."""
    from_tunnel: str
    """The same of frames from other sites, with a further tag that has the number of the site."""
    from_control: str
    """The same of heartbeats, with the number of the site alone."""


def flower_lines(
    verb: Literal["replace", "del"], rule: FlowRule, handle: int, devices: GatewayDevices, file: TenantsFile,
    where: Where,
) -> list[str]:  # fmt: skip
    """Return the line for `tc -batch` that sets or removes a rule; none for a tenant without a place here."""
    port = rule.port or devices.trunk
    if port is None:
        return []
    key = rule.key
    on = port if key.is_outgoing else devices.vxlan
    ether = "ipv6" if key.ether_type == IPV6 else "ip"
    tagged = key.is_outgoing and rule.port is None
    protocol = "802.1Q" if tagged else ether
    start = f"filter {verb} dev {on} ingress prio {PREFERENCE + _order(protocol)} handle {handle} protocol {protocol}"
    if verb == "del":
        return [f"{start} flower"]
    match = [
        *([f"vlan_id {rule.vlan} vlan_ethtype {'ipv6' if ether == 'ipv6' else 'ipv4'}"] if tagged else []),
        *([] if key.is_outgoing else [_tunnel_match(key.vni, rule.gateway, file)]),
        f"ip_proto {'tcp' if key.protocol == TCP else 'udp'}",
        f"src_ip {ipaddress.ip_address(key.source)} dst_ip {ipaddress.ip_address(key.target)}",
        f"src_port {key.source_port} dst_port {key.target_port}",
    ]
    if key.is_outgoing:
        own, far, tos = file.gateways[file.site], ipaddress.ip_address(rule.gateway), f"tos {rule.dscp << 2:#x}"
        actions = [
            *(["vlan pop"] if tagged else []),
            f"tunnel_key set id {key.vni} src_ip {own} dst_ip {far} dst_port {file.port} {tos} nocsum",
            f"mirred egress redirect dev {devices.vxlan}",
        ]
    else:
        push = [] if rule.port else [f"vlan push id {rule.vlan} protocol 802.1Q"]
        actions = ["tunnel_key unset", *push, f"mirred egress redirect dev {port}"]
    return [" ".join([start, "flower", where, *match, *(f"action {one}" for one in actions)])]


def flower_defaults(
    devices: GatewayDevices, file: TenantsFile, verb: Literal["replace", "del"] = "replace"
) -> list[str]:
    """Return the lines that lead frames without a rule to the gateway's process, and drop strangers.

    With `del`, those that take back what the file's tenants have; devices and control traffic stay.
    """
    lines = list[str]()
    numbers = site_numbers(file)
    last, redirect = f"prio {TENANT_PREFERENCE} protocol all matchall", "action mirred egress redirect dev"
    if verb == "replace":
        lines.append(f"qdisc replace dev {devices.vxlan} clsact")
        if devices.trunk is not None:
            lines.append(f"qdisc replace dev {devices.trunk} clsact")
            lines.append(f"filter replace dev {devices.trunk} ingress {last} {redirect} {devices.from_tenants}")
        for site, number in numbers.items():
            if site != file.site:
                start = _from_site(devices, "replace", number, file.control.vni, site, file)
                tag = f"action vlan push id {number} protocol 802.1Q"
                lines.append(f"{start} action tunnel_key unset {tag} {redirect} {devices.from_control}")
    for tenant in file.tenants:
        push = f"action vlan push id {tenant.vlan} protocol 802.1Q"
        if tenant.port is not None and verb == "replace":
            lines.append(f"qdisc replace dev {tenant.port} clsact")
            lines.append(f"filter replace dev {tenant.port} ingress {last} {push} {redirect} {devices.from_tenants}")
        elif tenant.port is not None:
            lines.append(f"qdisc del dev {tenant.port} clsact")
        for site in tenant.networks:
            if site == file.site:
                continue
            handle = tenant.vlan << 8 | numbers[site]
            start = _from_site(devices, verb, handle, tenant.vni, site, file)
            tag = f"action vlan push id {numbers[site]} protocol 802.1Q"
            actions = f" action tunnel_key unset {push} {tag} {redirect} {devices.from_tunnel}"
            lines.append(start + (actions if verb == "replace" else ""))
    if verb == "replace":
        strangers = f"prio {LAST_PREFERENCE} protocol all matchall action drop"
        lines.append(f"filter replace dev {devices.vxlan} ingress {strangers}")
    return lines


def _from_site(
    devices: GatewayDevices, verb: Literal["replace", "del"], handle: int, vni: int, site: str, file: TenantsFile
) -> str:
    """Return the begin of the line of frames of a VNI from a site."""
    start = f"filter {verb} dev {devices.vxlan} ingress prio {TENANT_PREFERENCE} handle {handle} protocol all flower"
    return start if verb == "del" else f"{start} {_tunnel_match(vni, file.gateways[site].packed, file)}"


def site_numbers(file: TenantsFile) -> dict[str, int]:
    """Return a number from 1 on for each site, the same at every start."""
    return {site: number for number, site in enumerate(sorted(file.gateways), 1)}


def _tunnel_match(vni: int, gateway: bytes, file: TenantsFile) -> str:
    far, own = ipaddress.ip_address(gateway), file.gateways[file.site]
    return f"enc_key_id {vni} enc_src_ip {far} enc_dst_ip {own} enc_dst_port {file.port}"


def _order(protocol: str) -> int:
    """Filters of one preference have one protocol."""
    return ("ip", "ipv6", "802.1Q").index(protocol)
