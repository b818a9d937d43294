"""`probe_tenancy`: what this machine has of what a tenant gateway needs, tried in a network namespace of its own."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.core.errors import UnavailableError
from isthmus.wan.netns import effective_capabilities
from isthmus.wan.tenants.kernel_commands import run_checked

_PROBE = 999_999
"""Apart from the numbers of `wan.netns`, which removes what processes that have ended leave behind."""
_numbers = itertools.count()
_NET_ADMIN, _NET_RAW, _SYS_ADMIN = 1 << 12, 1 << 13, 1 << 21
_DEVICES = ("ip", "-n", "{name}", "link", "add", "p0", "type", "veth", "peer", "name", "p1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFeature:
    """A feature, whether it is there, and what a gateway does without it."""

    name: str
    works: bool
    why: str
    """Why it is not there; else empty."""
    without: str

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def text(self) -> str:
        """Return it as a line."""
        return f"{self.name}: yes" if self.works else f"{self.name}: no ({self.why}); without it {self.without}"


FLOWER = "tc-flower with tunnel keys"
_HTB = "tc qdisc add dev p0 root handle 1: htb"
_U32 = "tc filter add dev p0 parent 1: protocol ip prio 1 handle 2: u32 divisor 256"
_CLSACT = "tc qdisc add dev p1 clsact"
_TUNNELS = "ip link add p3 type vxlan external dstport 4788"
_FLOWER = (
    "tc filter add dev p1 ingress protocol ip flower ip_proto udp src_ip 10.0.0.1 "
    "action tunnel_key set id 1 src_ip 10.0.0.1 dst_ip 10.0.0.2 dst_port 4788 action mirred egress redirect dev p3"
)
_NO_GATEWAY = "no gateway runs here; `isthmus wan tenants FILE` still checks the file"
_FEATURES = (
    ("nftables", _NO_GATEWAY, ("nft add table inet probe",)),
    ("htb and u32", "run without --device: tenants have no rates of their own", (_HTB, _U32)),
    ("VXLAN devices", "every frame passes the gateway's process", ("ip link add p2 type vxlan external dstport 4789",)),
    (FLOWER, "flows pass the gateway's process, and no NIC takes rules", (_CLSACT, _TUNNELS, _FLOWER)),
)
"""Name, what follows if it is not there, and the commands that try it."""


def missing_rights(capabilities: int) -> str | None:
    """Return what a process with these capabilities lacks to run a gateway, or None."""
    if capabilities & (_NET_ADMIN | _NET_RAW) != _NET_ADMIN | _NET_RAW:
        return "a gateway needs Linux and root (CAP_NET_ADMIN and CAP_NET_RAW)"
    missing = [one for one in ("ip", "tc", "nft") if shutil.which(one) is None]
    return f"the command `{missing[0]}` is missing (iproute2, nftables)" if missing else None


def require_rights() -> None:
    """Raise `UnavailableError` if no gateway can run here, and say what still works."""
    if why := missing_rights(effective_capabilities()):
        raise UnavailableError(why, hint="without --run the file is checked, and --check says what this machine has")


def probe_tenancy(run: Callable[..., str] = run_checked) -> list[KernelFeature]:
    """Return the features in order. They are tried in a namespace that is removed; nothing else changes."""
    capabilities = effective_capabilities()
    why = missing_rights(capabilities)
    found = [KernelFeature(name="root and commands", works=why is None, why=why or "", without=_NO_GATEWAY)]
    if why is None and not capabilities & _SYS_ADMIN:
        why = "not tried: that takes a network namespace, and so CAP_SYS_ADMIN"
    if why is not None:
        return found + [KernelFeature(name=name, works=False, why=why, without=then) for name, then, _ in _FEATURES]
    name = f"isthmus-{os.getpid()}-{_PROBE}-{next(_numbers)}"
    run(["ip", "netns", "add", name])
    try:
        run([one.format(name=name) for one in _DEVICES])
        for feature, then, commands in _FEATURES:
            found.append(_try(run, name, feature, then, commands))
    finally:
        run(["ip", "netns", "delete", name])
    return found


def _try(run: Callable[..., str], name: str, feature: str, then: str, commands: Sequence[str]) -> KernelFeature:
    try:
        for command in commands:
            run(["ip", "netns", "exec", name, *command.split()])
    except UnavailableError as error:
        why = error.message.rpartition("failed: ")[2]
        return KernelFeature(name=feature, works=False, why=why, without=then)
    return KernelFeature(name=feature, works=True, why="", without=then)
