"""`choose_datapath`: what carries flows on this machine, the best of what its kernel has."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable

from isthmus.core.errors import UnavailableError
from isthmus.wan.tenancy.tenant_events import TenantEvent
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.kernel_datapath import KernelDatapath
from isthmus.wan.tenants.probe_tenancy import FLOWER, probe_tenancy
from isthmus.wan.tenants.tenant_datapath import ProcessDatapath, TenantDatapath
from isthmus.wan.tenants.tenant_ports import TenantPorts
from isthmus.wan.tenants.tenant_service import MakeDatapath

_log = logging.getLogger(__name__)


class CarriedIn(enum.StrEnum):
    """What carries flows after their first frame."""

    AUTO = "auto"
    """tc-flower where this machine has it, else the process."""
    FLOWER = "flower"
    """tc-flower: in the NIC where it takes a rule, else in the kernel."""
    PROCESS = "process"
    """The gateway's process: packet and UDP sockets only."""


def choose_datapath(carried_in: CarriedIn) -> MakeDatapath:
    """Return what makes the datapath; with `AUTO` what is missing is logged, with `FLOWER` it is an error."""

    def make(file: TenantsFile, ports: TenantPorts, give: Callable[[TenantEvent], None]) -> TenantDatapath:
        why = None if carried_in is CarriedIn.PROCESS else _why_no_flower()
        if why is not None and carried_in is CarriedIn.FLOWER:
            raise UnavailableError(
                f"this kernel does not carry flows by tc-flower: {why}", hint="--carried-in process needs none"
            )
        if carried_in is CarriedIn.PROCESS or why is not None:
            if why is not None:
                _log.warning("flows pass the process, since this kernel has no tc-flower: %s", why)
            return ProcessDatapath(file, ports, give)
        return KernelDatapath(file, ports.trunk, give)

    return make


def _why_no_flower() -> str | None:
    found = next(one for one in probe_tenancy() if one.name == FLOWER)
    return None if found.works else found.why
