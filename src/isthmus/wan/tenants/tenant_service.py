"""`TenantService`: devices, sockets and timers around `TenantGateway`; it decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan.tenancy.kernel.stranger_filter import COUNTER, TABLE, stranger_filter
from isthmus.wan.tenancy.kernel.tenant_shaping import TenantShaping, shaping_commands, tenant_shaping
from isthmus.wan.tenancy.tenant_events import (
    EndTcp,
    InstallRule,
    KernelCounts,
    RemoveRule,
    RuleRefused,
    RulesUsed,
    SendByTcp,
    SendToGateway,
    SendToTenant,
    TenantEvent,
    TenantInstruction,
    TenantsChanged,
    Tick,
)
from isthmus.wan.tenancy.tenant_gateway import TenantGateway
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.kernel_commands import run_batch, run_checked, run_nft
from isthmus.wan.tenants.outer_sockets import OuterSenders
from isthmus.wan.tenants.tcp_links import TcpLinks
from isthmus.wan.tenants.tenant_datapath import Read, TenantDatapath
from isthmus.wan.tenants.tenant_ports import TenantPorts

COUNT_S = 1.0
"""Between looks at counters of the kernel."""
CONTROL_S = 0.001
"""Longest time between looks for heartbeats while frames are read."""

_log = logging.getLogger(__name__)
MakeDatapath = Callable[[TenantsFile, TenantPorts, Callable[[TenantEvent], None]], TenantDatapath]


class TenantService:
    """The gateway of `file.site`. `device` is the one towards other sites; None leaves its queueing alone."""

    def __init__(
        self, file: TenantsFile, trunk: str | None, device: str | None, make_datapath: MakeDatapath
    ) -> None:  # fmt: skip
        self._file, self._device, self._make = file, device, make_datapath
        self._gateway = TenantGateway(file, secrets.randbelow(2**32 - 1) + 1)
        self._ports = TenantPorts(trunk)
        self._stack = contextlib.ExitStack()
        self._sources: dict[int, Read] = {}
        self._shaping: TenantShaping | None = None
        self._is_shaped = False
        self._control_s = self._count_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._counting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Set everything up; raise `UnavailableError` for what this machine does not have."""
        self._loop = asyncio.get_running_loop()
        file = self._file
        try:
            self._stack.callback(self._ports.close)
            self._ports.change(file)
            self._outer = OuterSenders()
            self._stack.callback(self._outer.close)
            self._datapath = self._make(file, self._ports, self.give)
            self._stack.callback(self._datapath.close)
            await self._start_tcp(file)  # which a second gateway of this address cannot
            run_nft(stranger_filter(file))
            self._stack.callback(_quietly, ["nft", "delete", "table", "inet", TABLE])
            self._shape(file)
        except BaseException:
            self._stack.close()
            raise
        self._watch()
        self._tick()

    async def _start_tcp(self, file: TenantsFile) -> None:
        own = str(file.gateways[file.site])
        others = {site: str(one) for site, one in file.gateways.items() if site != file.site}
        self._tcp = TcpLinks(own, file.port, others, file.dscp.training_congested << 2, self.give)
        try:
            await self._tcp.start()
        except OSError as error:
            raise UnavailableError(
                f"cannot listen at {own}:{file.port}: {error.strerror}",
                hint="one gateway an address; the address of `site` under gateways is one of this machine",
            ) from error

    @property
    def label(self) -> str:
        """What carries flows that have a rule."""
        return self._datapath.label

    async def close(self) -> None:
        """Undo everything that was set."""
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in self._sources:
            self._loop.remove_reader(descriptor)
        await self._tcp.close()
        if self._counting is not None:
            await asyncio.gather(self._counting, return_exceptions=True)
        self._stack.close()

    async def change(self, file: TenantsFile) -> None:
        """Take another file over: rules and flows at once, then bandwidths, while frames go on.

        Raises `InputError` where the gateways themselves change; what is in force then stays.
        """
        for field in ("site", "gateways", "port", "control"):
            if field != "control" and getattr(file, field) != getattr(self._file, field):
                raise InputError(f"`{field}` has changed", hint="restart the gateway; tenants may change while it runs")
        if file.control.vni != self._file.control.vni:
            raise InputError("the VNI of `control` has changed", hint="restart the gateway")
        self._ports.change(file)
        self.give(TenantsChanged(file))
        for gone in {one.vni for one in self._file.tenants} - {one.vni for one in file.tenants}:
            self._outer.forget(gone)
        self._datapath.change(file)
        self._file = file
        self._watch()
        await asyncio.to_thread(self._shape, file)

    async def statistics(self) -> dict[str, Any]:
        """Return the state of the gateway, its links and its ports."""
        num_strangers = await asyncio.to_thread(_strangers)
        ports = self._ports.all()
        return {
            "site": self._file.site,
            "carried_by": self._datapath.label,
            **asdict(self._gateway.statistics(self._loop.time())),
            "strangers_filtered": num_strangers,
            "unsent": self._outer.num_unsent + sum(one.counts.num_unsent for one in ports),
            "too_long": self._outer.num_too_long,
            "merged": sum(one.counts.num_merged for one in ports),
        }

    # Events and instructions

    def give(self, event: TenantEvent) -> None:
        """Let the gateway handle an event."""
        for one in self._gateway.handle(event, self._loop.time()):
            self._carry_out(one)

    def _carry_out(self, one: TenantInstruction) -> None:
        match one:
            case SendToGateway(gateway, vni, packet):
                self._outer.send(vni, gateway, packet)
            case SendToTenant(vlan, frame):
                self._ports.send(vlan, frame)
            case SendByTcp(site, data):
                self._tcp.send(site, data)
            case EndTcp(site):
                self._tcp.end(site)
            case InstallRule(rule):
                if not self._datapath.install(rule):
                    self.give(RuleRefused(rule.key))
            case RemoveRule(rule):
                self._datapath.remove(rule)

    # Reading

    def _watch(self) -> None:
        """Read what the datapath reads from; sources come and go with tenants' devices."""
        sources = dict(self._datapath.sources())
        for descriptor in self._sources:
            self._loop.remove_reader(descriptor)
        for descriptor, read in sources.items():
            self._loop.add_reader(descriptor, self._read, read)
        self._sources = sources

    def _read(self, read: Read) -> None:
        read()
        now_s = self._loop.time()
        if now_s - self._control_s >= CONTROL_S:
            self._control_s = now_s
            self._datapath.read_control()
            if now_s >= self._gateway.next_tick_s():
                self.give(Tick())

    # Time

    def _tick(self) -> None:
        self.give(Tick())
        now_s = self._loop.time()
        if now_s >= self._count_s and (self._counting is None or self._counting.done()):
            self._count_s = now_s + COUNT_S
            self._tcp.count_resends()
            self._counting = self._loop.create_task(self._count())
        self._timer = self._loop.call_at(max(self._gateway.next_tick_s(), now_s + 1e-3), self._tick)

    async def _count(self) -> None:
        """Give what the kernel has counted."""
        if used := await asyncio.to_thread(self._datapath.used):
            self.give(RulesUsed(used))
        counts = self._datapath.counts()
        for site, address in self._file.gateways.items():
            if address.packed in counts:
                self.give(KernelCounts(site, *counts[address.packed]))

    def _shape(self, file: TenantsFile) -> None:
        if self._device is None:
            return
        before, self._shaping = self._shaping, None  # what is half set is set from the start the next time
        shaping = tenant_shaping(file, before)
        run_batch("tc", shaping_commands(self._device, before, shaping))
        if not self._is_shaped:
            self._stack.callback(_quietly, ["tc", "qdisc", "del", "dev", self._device, "root"])
        self._shaping, self._is_shaped = shaping, True


def _quietly(argv: list[str]) -> None:
    with contextlib.suppress(UnavailableError):  # gone already
        run_checked(argv)


def _strangers() -> int:
    """Return the packets that the kernel has dropped, since they came from no gateway."""
    with contextlib.suppress(UnavailableError, ValueError, StopIteration):
        words = run_checked(["nft", "list", "counter", "inet", TABLE, COUNTER]).split()
        return int(words[words.index("packets") + 1])
    return 0
