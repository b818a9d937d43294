"""`TenantGateway`: tenants with equal addresses over one network, each under its own VNI, as a pure state machine.

Source: the report on cross-domain pooling, 4.3.3. A frame is taken if its tenant, its addresses at both sites and its
ports are those of the file; the first frame of a flow passes here, and a rule for the kernel or the NIC follows.
Everything else is dropped and counted by its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from isthmus.core.errors import ProtocolError
from isthmus.wan.tenancy.flow_congestion import CarriedBy, LinkQuality
from isthmus.wan.tenancy.flow_table import FlowTable, key_of
from isthmus.wan.tenancy.gateway_link import HEARTBEAT_S, GatewayLink
from isthmus.wan.tenancy.packets.ecn_marks import CE, merged_ecn, set_ecn
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.packets.gateway_heartbeat import build_heartbeat, parse_heartbeat
from isthmus.wan.tenancy.packets.inner_frame import ARP, ETHERNET_BYTES, TCP, UDP, InnerView, view_inner
from isthmus.wan.tenancy.packets.vxlan_header import pull_vxlan, push_outer, push_vxlan
from isthmus.wan.tenancy.resend_watch import ResendWatch
from isthmus.wan.tenancy.tcp_side import TcpSide
from isthmus.wan.tenancy.tenant_events import (
    DatagramFromGateway,
    EndTcp,
    FlowRule,
    FrameFromTenant,
    FrameFromTunnel,
    InstallRule,
    KernelCounts,
    RemoveRule,
    RuleRefused,
    RulesUsed,
    SendByTcp,
    SendToGateway,
    SendToTenant,
    TcpBytes,
    TcpChanged,
    TcpResends,
    TenantEvent,
    TenantInstruction,
    TenantsChanged,
)
from isthmus.wan.tenancy.tenant_flow import RuleState, TenantFlow
from isthmus.wan.tenancy.tenant_table import TenantEntry, TenantTable
from isthmus.wan.tenancy.tenants_file import TenantsFile


@dataclass(frozen=True, kw_only=True)
class LinkStatistics:
    """The link to a site."""

    site: str
    is_up: bool
    has_tcp: bool
    round_trip_s: float
    quality: LinkQuality
    num_sent: int
    num_heard: int
    heartbeats_missed: int


@dataclass(frozen=True, kw_only=True)
class TenantStatistics:
    """What a gateway has done."""

    frames_sent: int
    """By this process, to other sites."""
    frames_handed: int
    """By this process, to tenants."""
    frames_by_tcp: int
    notifications: int
    """RoCEv2 congestion notifications that passed here."""
    dropped: Mapping[str, int]
    """Frames by the reason why they were dropped."""
    flows: int
    rules: int
    carried: Mapping[str, int]
    """Flows going out by how they are carried."""
    links: tuple[LinkStatistics, ...]


class TenantGateway:
    """The gateway of one site. Call `handle` with each event and carry out what it returns, in order."""

    def __init__(self, file: TenantsFile, epoch: int) -> None:
        self._epoch = epoch
        self._links: dict[str, GatewayLink] = {}
        self._tcp: dict[str, TcpSide] = {}
        self._flows = FlowTable()
        self._dropped: Counter[str] = Counter()
        self._num_sent = self._num_handed = self._num_by_tcp = self._num_notifications = 0
        self._heartbeat_s = -1.0
        self._adopt(file)

    def _adopt(self, file: TenantsFile) -> None:
        self.file, self._table = file, TenantTable(file)
        self._own = file.gateways[file.site].packed
        others = {site: address.packed for site, address in file.gateways.items() if site != file.site}
        self._site_of = {address: site for site, address in others.items()}
        for site, address in others.items():
            link = self._links.get(site)
            if link is None or link.address != address:
                self._links[site], self._tcp[site] = GatewayLink(site, address, self._epoch), TcpSide()
        for site in self._links.keys() - others.keys():
            del self._links[site], self._tcp[site]

    def next_tick_s(self) -> float:
        """Return when a `Tick` is due."""
        return self._heartbeat_s

    def statistics(self, now_s: float) -> TenantStatistics:
        """Return counters."""
        return TenantStatistics(
            frames_sent=self._num_sent,
            frames_handed=self._num_handed,
            frames_by_tcp=self._num_by_tcp,
            notifications=self._num_notifications,
            dropped=dict(self._dropped),
            flows=len(self._flows),
            rules=self._flows.num_rules,
            carried=self._flows.carried(),
            links=tuple(
                LinkStatistics(
                    site=one.site,
                    is_up=one.is_up(now_s),
                    has_tcp=self._tcp[one.site].is_up,
                    round_trip_s=one.round_trip_s,
                    quality=one.quality(now_s),
                    num_sent=one.own.num_sent + one.kernel.num_sent,
                    num_heard=one.own.num_heard + one.kernel.num_heard,
                    heartbeats_missed=one.num_missed,
                )
                for one in self._links.values()
            ),
        )

    def handle(self, event: TenantEvent, now_s: float) -> list[TenantInstruction]:
        """Return what to do after `event` at `now_s`, in order."""
        out: list[TenantInstruction] = []
        try:
            match event:
                case FrameFromTenant(vlan, buffer):
                    self._from_tenant(vlan, buffer, now_s, out)
                case DatagramFromGateway(gateway, traffic_class, buffer):
                    self._from_gateway(gateway, traffic_class, buffer, now_s, out)
                case FrameFromTunnel(vni, gateway, buffer):
                    self._from_tunnel(vni, gateway, buffer, None, now_s, out)
                case TcpBytes(site, data):
                    self._from_tcp(site, data, now_s, out)
                case TcpChanged(site, is_up):
                    self._change_tcp(site, is_up, out)
                case TenantsChanged(file):
                    self._change_tenants(file, out)
                case _:
                    self._note(event, now_s)
        except ProtocolError:
            self._dropped["malformed"] += 1
            return out
        if now_s >= self._heartbeat_s:
            self._tick(now_s, out)
        return out

    def _note(self, event: TenantEvent, now_s: float) -> None:
        """Take in what only counts."""
        match event:
            case TcpResends(site, num_sent, num_resent) if site in self._tcp:
                self._tcp[site].count_resends(num_sent, num_resent, now_s)
            case RuleRefused(key):
                self._flows.refuse(key)
            case RulesUsed(keys):
                self._flows.use(keys, now_s)
            case KernelCounts(site, num_sent, num_heard, num_marked) if site in self._links:
                counts = self._links[site].kernel
                counts.num_sent, counts.num_heard, counts.num_marked = num_sent, num_heard, num_marked

    # From tenants to other sites

    def _from_tenant(self, vlan: int, buffer: FrameBuffer, now_s: float, out: list[TenantInstruction]) -> None:
        entry = self._table.by_vlan.get(vlan)
        if entry is None:
            self._dropped["unknown VLAN"] += 1
            return
        view = view_inner(buffer)
        key = key_of(entry.tenant.vni, True, view)
        flow = self._flows.get(key)
        if flow is None:
            if entry.site_of(view.source) != self.file.site:
                self._dropped["not an address of the tenant"] += 1
                return
            site = entry.site_of(view.target)
            if site is None or site == self.file.site:
                self._dropped["to no other site"] += 1
                return
            flow = self._admit(TenantFlow(key, entry, site, view.is_roce, now_s), view)
            if flow is None:
                return
        if len(buffer) > self.file.max_tenant_bytes:
            self._dropped["too long"] += 1
            return
        flow.used_s = now_s
        self._num_notifications += view.is_notification
        if flow.resends is not None and view.is_roce and not view.is_notification:
            flow.resends.count(buffer.data, view.base)
        self._carry(flow, view.ecn, buffer, out)
        self._offload(flow, out)

    def _admit(self, flow: TenantFlow, view: InnerView) -> TenantFlow | None:
        """Add a flow if its tenant may have it."""
        if not flow.entry.allows(view) and self._flows.get(flow.key.answer) is None:
            self._dropped["not an allowed port"] += 1
            return None
        if flow.is_roce and flow.key.is_outgoing:
            flow.resends = ResendWatch()
        if not self._flows.add(flow):
            self._dropped["too many flows"] += 1
            return None
        return flow

    def _carry(self, flow: TenantFlow, ecn: int, buffer: FrameBuffer, out: list[TenantInstruction]) -> None:
        tcp = self._tcp[flow.site]
        if flow.carried is CarriedBy.TCP and tcp.is_up:
            self._send_by_tcp(flow, buffer.view, out)
        elif flow.last_tcp > tcp.acknowledged:
            if not flow.hold(bytes(buffer.view)):
                for frame in flow.take_held():
                    self._send_by_tcp(flow, frame, out)
                self._send_by_tcp(flow, buffer.view, out)
        else:
            self._send_direct(flow, ecn, buffer, out)

    def _send_direct(self, flow: TenantFlow, ecn: int, buffer: FrameBuffer, out: list[TenantInstruction]) -> None:
        link = self._links[flow.site]
        dscp = self._dscp_of(flow)
        push_vxlan(buffer, flow.key.vni)
        push_outer(buffer, self._own, link.address, dscp << 2 | ecn, flow.entropy, self.file.port)
        out.append(SendToGateway(link.address, flow.key.vni, buffer.view))
        link.own.num_sent += 1
        self._num_sent += 1

    def _dscp_of(self, flow: TenantFlow) -> int:
        return self.file.dscp.of(flow.entry.tenant.service, flow.carried is not CarriedBy.DIRECT)

    def _send_by_tcp(self, flow: TenantFlow, frame: bytes | memoryview, out: list[TenantInstruction]) -> None:
        tcp = self._tcp[flow.site]
        data = tcp.pack(flow.key.vni, frame)
        if data is None:
            self._dropped["TCP is full"] += 1
            return
        flow.last_tcp = tcp.number
        self._num_by_tcp += 1
        out.append(SendByTcp(flow.site, data))

    def _offload(self, flow: TenantFlow, out: list[TenantInstruction]) -> None:
        """Ask for a flow's rule, or another one where it has changed; while frames go by TCP it has none."""
        if flow.rule_state is RuleState.REFUSED or flow.key.protocol not in (TCP, UDP):
            return
        if flow.key.is_outgoing and (
            flow.carried is CarriedBy.TCP or flow.last_tcp > self._tcp[flow.site].acknowledged
        ):
            self._take_back(flow, out)
            return
        tenant = flow.entry.tenant
        dscp = self._dscp_of(flow) if flow.key.is_outgoing else 0
        rule = FlowRule(flow.key, tenant.vlan, tenant.port, self._links[flow.site].address, dscp)
        if rule != flow.rule:
            flow.rule_state, flow.rule = RuleState.INSTALLED, rule
            out.append(InstallRule(rule))

    def _take_back(self, flow: TenantFlow, out: list[TenantInstruction]) -> None:
        if flow.rule is not None:
            out.append(RemoveRule(flow.rule))
            flow.rule_state, flow.rule = RuleState.NONE, None

    # From other sites to tenants

    def _from_gateway(
        self, gateway: bytes, traffic_class: int, buffer: FrameBuffer, now_s: float, out: list[TenantInstruction]
    ) -> None:
        if gateway not in self._site_of:
            self._dropped["unknown gateway"] += 1
            return
        vni = pull_vxlan(buffer)
        self._from_tunnel(vni, gateway, buffer, traffic_class & 3, now_s, out)

    def _from_tunnel(
        self, vni: int, gateway: bytes, buffer: FrameBuffer, outer_ecn: int | None, now_s: float,
        out: list[TenantInstruction], by_tcp: bool = False,
    ) -> None:  # fmt: skip
        """Take a frame out of a tunnel; `outer_ecn` is None where marks are merged."""
        site = self._site_of.get(gateway)
        if site is None:
            self._dropped["unknown gateway"] += 1
            return
        if vni == self.file.control.vni and not by_tcp:
            self._links[site].hear(parse_heartbeat(buffer.view), now_s)
            return
        entry = self._table.by_vni.get(vni)
        if entry is None:
            self._dropped["unknown VNI"] += 1
            return
        view = view_inner(buffer)
        key = key_of(vni, False, view)
        flow = self._flows.get(key)
        if flow is None:
            if entry.site_of(view.source) != site or entry.site_of(view.target) != self.file.site:
                self._dropped["not an address of the tenant"] += 1
                return
            flow = self._admit(TenantFlow(key, entry, site, view.is_roce, now_s), view)
            if flow is None:
                return
        elif flow.site != site:
            self._dropped["not an address of the tenant"] += 1
            return
        if not by_tcp:
            self._links[site].own.num_heard += 1
        if outer_ecn is not None and not self._merge_marks(self._links[site], view, outer_ecn, buffer):
            self._dropped["marked, and cannot carry a mark"] += 1
            return
        flow.used_s = now_s
        self._num_notifications += view.is_notification
        self._num_handed += 1
        out.append(SendToTenant(entry.tenant.vlan, buffer.view))
        self._offload(flow, out)

    def _merge_marks(self, link: GatewayLink, view: InnerView, outer_ecn: int, buffer: FrameBuffer) -> bool:
        """Give a frame the mark of both headers; return False if it is to be dropped."""
        link.own.num_marked += outer_ecn == CE
        if view.ether_type == ARP:
            return True
        mark = merged_ecn(view.ecn, outer_ecn)
        if mark is not None and mark != view.ecn:
            set_ecn(buffer.data, buffer.start + ETHERNET_BYTES, mark)
        return mark is not None

    def _from_tcp(self, site: str, data: bytes, now_s: float, out: list[TenantInstruction]) -> None:
        if site not in self._tcp:
            return
        tcp = self._tcp[site]
        before = tcp.acknowledged
        try:
            frames, answer = tcp.take(data)
        except ProtocolError:
            out.append(EndTcp(site))
            raise
        for entry in frames:
            buffer = FrameBuffer(entry.frame or b"")
            try:
                self._from_tunnel(entry.vni, self._links[site].address, buffer, None, now_s, out, by_tcp=True)
            except ProtocolError:
                self._dropped["malformed"] += 1
        if answer:
            out.append(SendByTcp(site, answer))
        if tcp.acknowledged > before:
            self._release(site, out)

    def _change_tcp(self, site: str, is_up: bool, out: list[TenantInstruction]) -> None:
        if site in self._tcp:
            self._tcp[site].change(is_up)
            self._release(site, out)
            for flow in self._flows:
                if flow.site == site and flow.carried is CarriedBy.TCP:
                    self._offload(flow, out)

    def _release(self, site: str, out: list[TenantInstruction]) -> None:
        """Send what waited for frames in TCP, once these have come or are lost."""
        acknowledged = self._tcp[site].acknowledged
        for flow in self._flows:
            if flow.held and flow.site == site and flow.last_tcp <= acknowledged:
                for frame in flow.take_held():
                    buffer = FrameBuffer(frame)
                    self._send_direct(flow, view_inner(buffer).ecn, buffer, out)

    # Time

    def _tick(self, now_s: float, out: list[TenantInstruction]) -> None:
        self._heartbeat_s = now_s + HEARTBEAT_S
        for link in self._links.values():
            buffer = build_heartbeat(link.heartbeat(now_s))
            push_vxlan(buffer, self.file.control.vni)
            push_outer(buffer, self._own, link.address, self.file.dscp.control << 2, b"", self.file.port)
            out.append(SendToGateway(link.address, self.file.control.vni, buffer.view))
            self._measure(link, now_s, out)
        out += [RemoveRule(rule) for rule in self._flows.sweep(now_s)]

    def _measure(self, link: GatewayLink, now_s: float, out: list[TenantInstruction]) -> None:
        """Let the RoCEv2 flows of a link follow what is measured of it."""
        quality = link.quality(now_s)
        if (resent := self._tcp[link.site].resent_share(now_s)) > quality.lost_share:
            quality = replace(quality, lost_share=resent)
        for flow in self._flows:
            if not (flow.is_roce and flow.key.is_outgoing and flow.site == link.site):
                continue
            own = quality
            if flow.resends is not None and (resent := flow.resends.share(now_s)) > quality.lost_share:
                own = replace(quality, lost_share=resent)
            before = flow.carried
            if flow.congestion.measured(own, now_s) is not before and flow.rule_state is not RuleState.REFUSED:
                self._offload(flow, out)

    def _change_tenants(self, file: TenantsFile, out: list[TenantInstruction]) -> None:
        """Take other tenants over: flows that the new file allows go on, all others end at once."""
        self._adopt(file)
        for flow in list(self._flows):
            entry = self._table.by_vni.get(flow.key.vni)
            if entry is None or not self._may_stay(flow, entry):
                self._take_back(flow, out)
                self._flows.remove(flow)
                continue
            entry.num_flows += 1
            flow.entry = entry
            if flow.rule is not None:
                self._offload(flow, out)

    def _may_stay(self, flow: TenantFlow, entry: TenantEntry) -> bool:
        key = flow.key
        ends = (self.file.site, flow.site) if key.is_outgoing else (flow.site, self.file.site)
        if flow.site not in self._links or (entry.site_of(key.source), entry.site_of(key.target)) != ends:
            return False
        if entry.num_flows >= entry.tenant.max_flows:
            return False
        return entry.allows_key(key) or entry.allows_key(key.answer)
