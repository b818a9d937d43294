"""`FlowTable`: the flows that pass a tenant gateway, both ways; idle ones are forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from isthmus.wan.tenancy.packets.inner_frame import InnerView
from isthmus.wan.tenancy.tenant_events import FlowKey, FlowRule
from isthmus.wan.tenancy.tenant_flow import RuleState, TenantFlow

IDLE_S = 60.0
SWEEP_S = 10.0


def key_of(vni: int, is_outgoing: bool, view: InnerView) -> FlowKey:
    """Return the flow that a frame belongs to."""
    return FlowKey(
        vni, is_outgoing, view.ether_type, view.protocol, view.source, view.target, view.source_port, view.target_port
    )  # fmt: skip


class FlowTable:
    """Flows by their key. What bounds them is `max_flows` of each tenant, both directions counted."""

    def __init__(self) -> None:
        self._flows: dict[FlowKey, TenantFlow] = {}
        self._sweep_s = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    def __iter__(self) -> Iterator[TenantFlow]:
        return iter(self._flows.values())

    @property
    def num_rules(self) -> int:
        """Flows that a kernel or a NIC carries."""
        return sum(one.rule_state is RuleState.INSTALLED for one in self._flows.values())

    def carried(self) -> dict[str, int]:
        """Return the number of flows going out by how they are carried."""
        return dict(Counter(one.carried.value for one in self._flows.values() if one.key.is_outgoing))

    def get(self, key: FlowKey) -> TenantFlow | None:
        """Return a flow."""
        return self._flows.get(key)

    def add(self, flow: TenantFlow) -> bool:
        """Add a flow; return False if its tenant has as many as it may."""
        if flow.entry.num_flows >= flow.entry.tenant.max_flows:
            return False
        flow.entry.num_flows += 1
        self._flows[flow.key] = flow
        return True

    def remove(self, flow: TenantFlow) -> None:
        """Forget a flow."""
        del self._flows[flow.key]
        flow.entry.num_flows -= 1

    def refuse(self, key: FlowKey) -> None:
        """Note that a flow's rule was not taken."""
        if (flow := self._flows.get(key)) is not None:
            flow.rule_state, flow.rule = RuleState.REFUSED, None

    def use(self, keys: Iterable[FlowKey], now_s: float) -> None:
        """Note that flows had frames."""
        for key in keys:
            if (flow := self._flows.get(key)) is not None:
                flow.used_s = now_s

    def sweep(self, now_s: float) -> list[FlowRule]:
        """Forget idle flows, now and then; return the rules to remove."""
        if now_s < self._sweep_s:
            return []
        self._sweep_s = now_s + SWEEP_S
        idle = [one for one in self._flows.values() if now_s - one.used_s > IDLE_S]
        for flow in idle:
            self.remove(flow)
        return [one.rule for one in idle if one.rule is not None]
