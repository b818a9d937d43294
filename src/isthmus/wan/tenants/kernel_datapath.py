"""`KernelDatapath`: flows go by tc-flower after their first frame, in the NIC where it takes their rules.

All tunnels are one VXLAN device of the kernel; frames without a rule come to the process by TAP devices: those of
tenants under their VLAN, those of other sites under a further tag with the number of the site, and heartbeats by a
device of their own, so that no tenant's frames fill the queue before them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from isthmus.core.errors import UnavailableError
from isthmus.wan.tenancy.kernel.flower_rules import GatewayDevices, flower_defaults, flower_lines, site_numbers
from isthmus.wan.tenancy.packets.frame_buffer import HEADROOM_BYTES, MAX_FRAME_BYTES, FrameBuffer
from isthmus.wan.tenancy.packets.inner_frame import VLAN
from isthmus.wan.tenancy.tenant_events import FlowKey, FlowRule, FrameFromTenant, FrameFromTunnel, TenantEvent
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.kernel_commands import run_batch, run_checked
from isthmus.wan.tenants.tenant_datapath import BATCH, Read

_TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002
Where = Literal["skip_sw", "skip_hw"]


class KernelDatapath:
    """Rules as tc-flower filters: in the NIC if it takes them, else in the kernel, else the flow stays here."""

    def __init__(
        self,
        file: TenantsFile,
        trunk: str | None,
        give: Callable[[TenantEvent], None],
        run: Callable[[str, Sequence[str]], None] = run_batch,
        show: Callable[[Sequence[str]], str] = run_checked,
        open_tap: Callable[[str], int] | None = None,
    ) -> None:
        self._file, self._give, self._run, self._show = file, give, run, show
        self.devices = GatewayDevices(
            trunk=trunk, vxlan="ist-vxlan", from_tenants="ist-out", from_tunnel="ist-in", from_control="ist-ctl"
        )
        self._handles: dict[FlowKey, tuple[int, Where, FlowRule]] = {}
        self._by_handle: dict[int, FlowKey] = {}
        self._last_handle = 0
        self._packets: dict[FlowKey, int] = {}
        self._sent: dict[bytes, int] = {}
        self._heard: dict[bytes, int] = {}
        self._buffer = FrameBuffer(bytes(MAX_FRAME_BYTES))
        taps = (self.devices.from_tenants, self.devices.from_tunnel, self.devices.from_control)
        self._taps = {name: (open_tap or _open_tap)(name) for name in taps}
        try:
            vxlan = f"link add {self.devices.vxlan} type vxlan external dstport {file.port} noudp6zerocsumrx"
            self._run("ip", [vxlan, *(f"link set {one} up" for one in (self.devices.vxlan, *taps))])
            self._defaults(file)
        except BaseException:
            self.close()
            raise

    @property
    def label(self) -> str:
        """See `TenantDatapath`."""
        num_hardware = sum(where == "skip_sw" for _, where, _ in self._handles.values())
        return f"tc-flower ({num_hardware} of {len(self._handles)} rules in the NIC)"

    def _defaults(self, file: TenantsFile) -> None:
        self._run("tc", flower_defaults(self.devices, file))
        sites = {number: site for site, number in site_numbers(file).items()}
        self._gateways = {number: file.gateways[site].packed for number, site in sites.items()}
        self._vnis = {one.vlan: one.vni for one in file.tenants}

    # Frames without a rule

    def sources(self) -> Mapping[int, Read]:
        """See `TenantDatapath`."""
        return {
            self._taps[self.devices.from_tenants]: self._read_tenants,
            self._taps[self.devices.from_tunnel]: self._read_tunnel,
            self._taps[self.devices.from_control]: self.read_control,
        }

    def _read(self, name: str) -> bool:
        self._buffer.start = HEADROOM_BYTES
        room = memoryview(self._buffer.data)[HEADROOM_BYTES : HEADROOM_BYTES + MAX_FRAME_BYTES]
        try:
            self._buffer.end = HEADROOM_BYTES + os.readv(self._taps[name], [room])
        except OSError:  # nothing waits, or the device is down
            return False
        return True

    def _read_tenants(self) -> int:
        for count in range(BATCH):
            if not self._read(self.devices.from_tenants):
                return count
            self._give(FrameFromTenant(_pull_tag(self._buffer), self._buffer))
        return BATCH

    def _read_tunnel(self) -> int:
        for count in range(BATCH):
            if not self._read(self.devices.from_tunnel):
                return count
            gateway = self._gateways.get(_pull_tag(self._buffer), b"")
            self._give(FrameFromTunnel(self._vnis.get(_pull_tag(self._buffer), 0), gateway, self._buffer))
        return BATCH

    def read_control(self) -> int:
        """See `TenantDatapath`."""
        for count in range(BATCH):
            if not self._read(self.devices.from_control):
                return count
            gateway = self._gateways.get(_pull_tag(self._buffer), b"")
            self._give(FrameFromTunnel(self._file.control.vni, gateway, self._buffer))
        return BATCH

    # Rules

    def install(self, rule: FlowRule) -> bool:
        """See `TenantDatapath`."""
        known = self._handles.get(rule.key)
        if known is None:
            self._last_handle += 1
        handle = known[0] if known is not None else self._last_handle
        tries: tuple[Where, ...] = ("skip_sw", "skip_hw")
        for where in tries:
            lines = flower_lines("replace", rule, handle, self.devices, self._file, where)
            try:
                self._run("tc", lines)
            except UnavailableError:
                continue
            if lines:
                self._handles[rule.key] = handle, where, rule
                self._by_handle[handle] = rule.key
            return bool(lines)
        if known is not None:
            self.remove(rule)
        return False

    def remove(self, rule: FlowRule) -> None:
        """See `TenantDatapath`."""
        if (known := self._handles.pop(rule.key, None)) is None:
            return
        handle, where, old = known
        del self._by_handle[handle]
        self._packets.pop(rule.key, None)
        with contextlib.suppress(UnavailableError):  # its device is gone, and the rule with it
            self._run("tc", flower_lines("del", old, handle, self.devices, self._file, where))

    def used(self) -> Sequence[FlowKey]:
        """See `TenantDatapath`."""
        ports = {rule.port or self.devices.trunk for _, _, rule in self._handles.values()}
        found = list[FlowKey]()
        for device in sorted({self.devices.vxlan, *(one for one in ports if one is not None)}):
            with contextlib.suppress(UnavailableError):
                shown = self._show(["tc", "-s", "-j", "filter", "show", "dev", device, "ingress"])
                found += self._count(json.loads(shown or "[]"))
        return found

    def _count(self, filters: Sequence[Mapping[str, Any]]) -> Sequence[FlowKey]:
        found = []
        for one in filters:
            options = one.get("options", {})
            key = self._by_handle.get(options.get("handle", 0))
            packets = max(
                (action.get("stats", {}).get("packets", 0) for action in options.get("actions", ())), default=0
            )
            if key is None or packets <= self._packets.get(key, 0):
                continue
            _, _, rule = self._handles[key]
            counts = self._sent if key.is_outgoing else self._heard
            counts[rule.gateway] = counts.get(rule.gateway, 0) + packets - self._packets.get(key, 0)
            self._packets[key] = packets
            found.append(key)
        return found

    def counts(self) -> Mapping[bytes, tuple[int, int, int]]:
        """See `TenantDatapath`. The kernel merges marks, and counts none of them."""
        gateways = self._sent.keys() | self._heard.keys()
        return {one: (self._sent.get(one, 0), self._heard.get(one, 0), 0) for one in gateways}

    def change(self, file: TenantsFile) -> None:
        """See `TenantDatapath`."""
        gone = {one.vni: one for one in self._file.tenants}
        for tenant in file.tenants:
            gone.pop(tenant.vni, None)
        lines = flower_defaults(self.devices, self._file.model_copy(update={"tenants": tuple(gone.values())}), "del")
        for line in lines:
            with contextlib.suppress(UnavailableError):  # a device that is gone
                self._run("tc", [line])
        self._file = file
        self._defaults(file)

    def close(self) -> None:
        """See `TenantDatapath`."""
        for descriptor in self._taps.values():
            os.close(descriptor)
        own = {one.port for one in self._file.tenants if one.port is not None} | {self.devices.trunk}
        lines = [f"qdisc del dev {one} clsact" for one in sorted(one for one in own if one is not None)]
        for command, line in (*(("tc", line) for line in lines), ("ip", f"link del {self.devices.vxlan}")):
            with contextlib.suppress(UnavailableError):
                self._run(command, [line])


def _pull_tag(buffer: FrameBuffer) -> int:
    """Remove a frame's outer VLAN tag in place; return its VLAN, 0 without one."""
    data, start = buffer.data, buffer.start
    if len(buffer) < 18 or data[start + 12] << 8 | data[start + 13] != VLAN:
        return 0
    vlan = (data[start + 14] << 8 | data[start + 15]) & 0xFFF
    data[start + 4 : start + 16] = data[start : start + 12]
    buffer.pull(4)
    return vlan


def _open_tap(name: str) -> int:
    try:
        descriptor = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnavailableError(
            f"{_TUN_DEVICE} cannot be opened: {error.strerror}", hint="--carried-in process needs none"
        ) from error
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    except OSError as error:
        os.close(descriptor)
        raise UnavailableError(
            f"the TAP device {name} cannot be made: {error.strerror}", hint="does another gateway run here?"
        ) from error
    return descriptor
