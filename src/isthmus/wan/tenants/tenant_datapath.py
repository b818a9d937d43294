"""`TenantDatapath`: how frames come to a gateway's process, and what carries flows that have a rule.

`ProcessDatapath` leaves everything to the process: it needs packet and UDP sockets only, and takes no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from isthmus.wan.tenancy.packets.frame_buffer import MAX_FRAME_BYTES, FrameBuffer
from isthmus.wan.tenancy.tenant_events import DatagramFromGateway, FlowKey, FlowRule, FrameFromTenant, TenantEvent
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.outer_sockets import OuterReceivers, read_outer
from isthmus.wan.tenants.tenant_ports import TenantPorts

BATCH = 32
"""Frames that are read from one source before the next one's turn."""

Read = Callable[[], int]
"""Gives what waits at a source, up to `BATCH` frames; returns their number."""


class TenantDatapath(Protocol):
    """What a service uses."""

    @property
    def label(self) -> str:
        """What carries flows, for a log."""
        ...

    def sources(self) -> Mapping[int, Read]:
        """Return what to read when a descriptor can be read."""
        ...

    def read_control(self) -> int:
        """Give heartbeats that wait: at once, whatever else does."""
        ...

    def install(self, rule: FlowRule) -> bool:
        """Set a rule; return whether it is taken."""
        ...

    def remove(self, rule: FlowRule) -> None:
        """Remove a rule."""
        ...

    def used(self) -> Sequence[FlowKey]:
        """Return the flows whose rules had frames since the last call."""
        ...

    def counts(self) -> Mapping[bytes, tuple[int, int, int]]:
        """Return by gateway the frames that rules have sent and received in all, and how many were marked."""
        ...

    def change(self, file: TenantsFile) -> None:
        """Take other tenants over."""
        ...

    def close(self) -> None:
        """Undo everything."""
        ...


class ProcessDatapath:
    """Every frame passes the process."""

    label = "process"

    def __init__(self, file: TenantsFile, ports: TenantPorts, give: Callable[[TenantEvent], None]) -> None:
        self._ports, self._give = ports, give
        self._outer = OuterReceivers(str(file.gateways[file.site]), file.port, file.control.vni)
        self._buffer = FrameBuffer(bytes(MAX_FRAME_BYTES))

    def sources(self) -> Mapping[int, Read]:
        """See `TenantDatapath`."""
        found: dict[int, Read] = {
            self._outer.tenants.fileno(): self._read_tenants_of_others, self._outer.control.fileno(): self.read_control
        }  # fmt: skip
        for port in self._ports.all():
            found[port.fileno()] = partial(self._read_port, port.name)
        return found

    def _read_port(self, name: str) -> int:
        port = self._ports.by_name(name)
        own_vlan = self._ports.vlan_of(name)
        for count in range(BATCH):
            vlan = port.read(self._buffer)
            if vlan is None:
                return count
            if own_vlan is not None:  # a frame with a tag has no place there
                vlan = 0 if vlan else own_vlan
            self._give(FrameFromTenant(vlan, self._buffer))
        return BATCH

    def _read_tenants_of_others(self) -> int:
        for count in range(BATCH):
            found = read_outer(self._outer.tenants, self._buffer)
            if found is None:
                return count
            self._give(DatagramFromGateway(*found, self._buffer))
        return BATCH

    def read_control(self) -> int:
        """See `TenantDatapath`."""
        for count in range(BATCH):
            found = read_outer(self._outer.control, self._buffer)
            if found is None:
                return count
            self._give(DatagramFromGateway(*found, self._buffer))
        return BATCH

    def install(self, rule: FlowRule) -> bool:
        """See `TenantDatapath`."""
        del rule
        return False

    def remove(self, rule: FlowRule) -> None:
        """See `TenantDatapath`."""

    def used(self) -> Sequence[FlowKey]:
        """See `TenantDatapath`."""
        return ()

    def counts(self) -> Mapping[bytes, tuple[int, int, int]]:
        """See `TenantDatapath`."""
        return {}

    def change(self, file: TenantsFile) -> None:
        """See `TenantDatapath`."""

    def close(self) -> None:
        """See `TenantDatapath`."""
        self._outer.close()
