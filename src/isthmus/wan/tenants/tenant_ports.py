"""`TenantPorts`: the devices of a gateway's tenants: the trunk with VLAN tags, and devices of single tenants."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.errors import InputError
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.packet_port import PacketPort


class TenantPorts:
    """Open packet ports by device. Without a trunk every tenant of the file needs a `port`."""

    def __init__(self, trunk: str | None) -> None:
        self.trunk = trunk
        self._ports: dict[str, PacketPort] = {}
        self._vlans: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def change(self, file: TenantsFile) -> None:
        """Open the devices that a file names, and close those that it does not."""
        without = [one.name for one in file.tenants if one.port is None and self.trunk is None]
        if without:
            raise InputError(
                f"{without[0]} has no port at {file.site}, and there is no trunk",
                hint="state its `port`, or name the device with VLAN tags: --trunk DEVICE",
            )
        own = {one.port: one.vlan for one in file.tenants if one.port is not None}
        if self.trunk in own:
            raise InputError(f"{self.trunk} is the trunk and a tenant's port", hint="a port belongs to one tenant")
        wanted = {*own, *([self.trunk] if self.trunk is not None else [])}
        opened = {name: PacketPort(name) for name in sorted(wanted - self._ports.keys())}
        for name in self._ports.keys() - wanted:
            self._ports.pop(name).close()
        self._ports.update(opened)
        self._vlans = own
        self._names = {vlan: name for name, vlan in own.items()}

    def all(self) -> Sequence[PacketPort]:
        """Return the open ports."""
        return list(self._ports.values())

    def by_name(self, name: str) -> PacketPort:
        """Return the port of a device."""
        return self._ports[name]

    def vlan_of(self, name: str) -> int | None:
        """Return the VLAN of the tenant that a device belongs to; None for the trunk."""
        return self._vlans.get(name)

    def send(self, vlan: int, frame: bytes | memoryview) -> None:
        """Send a frame to a tenant."""
        name = self._names.get(vlan)
        if name is not None:
            self._ports[name].send(0, frame)
        elif self.trunk is not None:
            self._ports[self.trunk].send(vlan, frame)

    def close(self) -> None:
        """Close all ports."""
        for port in self._ports.values():
            port.close()
        self._ports.clear()
