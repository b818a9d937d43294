"""`TenantFlow`: one direction of a flow, how it is carried, and what is held while that changes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from isthmus.wan.tenancy.flow_congestion import CarriedBy, FlowCongestion
from isthmus.wan.tenancy.resend_watch import ResendWatch
from isthmus.wan.tenancy.tenant_events import FlowKey, FlowRule
from isthmus.wan.tenancy.tenant_table import TenantEntry

MAX_HELD_BYTES = 2**20
"""Of a flow that comes back from TCP while frames of it are still under way there."""


class RuleState(enum.Enum):
    """Whether a kernel or a NIC carries a flow."""

    NONE = "none"
    INSTALLED = "installed"
    REFUSED = "refused"


@dataclass(slots=True)
class TenantFlow:
    """A flow that its tenant may have. `site` is the other end's."""

    key: FlowKey
    entry: TenantEntry
    site: str
    is_roce: bool
    used_s: float
    congestion: FlowCongestion = field(default_factory=FlowCongestion)
    resends: ResendWatch | None = None
    """Of RoCEv2 going out."""
    rule_state: RuleState = RuleState.NONE
    rule: FlowRule | None = None
    last_tcp: int = 0
    """Number of its last frame in the TCP connection."""
    held: list[bytes] = field(default_factory=list)
    held_bytes: int = 0

    @property
    def entropy(self) -> bytes:
        """What distinguishes the flow to networks that choose among paths."""
        key = self.key
        ports = key.source_port << 16 | key.target_port
        return b"%b%b%c%b" % (key.source, key.target, key.protocol, ports.to_bytes(4, "big"))

    @property
    def carried(self) -> CarriedBy:
        """How its frames go out."""
        return self.congestion.now

    def hold(self, frame: bytes) -> bool:
        """Keep a frame until those in TCP have come; return False if there are too many."""
        if self.held_bytes + len(frame) > MAX_HELD_BYTES:
            return False
        self.held.append(frame)
        self.held_bytes += len(frame)
        return True

    def take_held(self) -> list[bytes]:
        """Return what is held, and hold nothing more."""
        found, self.held, self.held_bytes = self.held, [], 0
        return found
