"""`management_network`: join emulated sites to this machine apart from their links, for a server and its agents (root).

A bridge with an address of this machine, and in each site's namespace a device `mgmt` on it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.wan.netns import Namespaces

MAX_SITES = 200
_NETWORKS, _COMMAND_LIMIT_S = 250, 60.0
_DEVICES = Path("/sys/class/net")
_BRIDGE = re.compile(r"isthbr(\d+)")


@dataclass(frozen=True)
class ManagementNetwork:
    """The address of this machine on it, and that of each site."""

    server: str
    sites: dict[str, str]


@contextmanager
def management_network(namespaces: Namespaces) -> Iterator[ManagementNetwork]:
    """Join the namespaces inside the block. Raises `UnavailableError` without root, or for more than 200 sites."""
    if len(namespaces.sites) > MAX_SITES:
        raise UnavailableError(
            f"{len(namespaces.sites)} sites on one machine", hint=f"emulate at most {MAX_SITES} clusters"
        )
    for name in _stale_bridges():
        _ip("link", "delete", name)
    bridge, number = f"isthbr{os.getpid()}", os.getpid() % _NETWORKS
    network = f"10.214.{number}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{network}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        sites = {}
        for place, (name, site) in enumerate(namespaces.sites.items()):
            outside = f"isthv{place}p{os.getpid()}"[:15]
            _ip("link", "add", outside, "type", "veth", "peer", "name", "mgmt", "netns", site.namespace)
            _ip("link", "set", outside, "master", bridge, "up")
            sites[name] = f"{network}.{place + 2}"
            _ip("-n", site.namespace, "address", "add", f"{sites[name]}/24", "dev", "mgmt")
            _ip("-n", site.namespace, "link", "set", "mgmt", "up")
        yield ManagementNetwork(f"{network}.1", sites)


def _stale_bridges() -> list[str]:
    """Return the bridges whose process no longer exists."""
    names = [path.name for path in _DEVICES.iterdir()] if _DEVICES.is_dir() else []
    owners = {name: found.group(1) for name in names if (found := _BRIDGE.fullmatch(name))}
    return [name for name, pid in owners.items() if not Path("/proc", pid).exists()]


def _ip(*arguments: str) -> None:
    done = subprocess.run(  # noqa: S603 - `ip` with names made here; no shell
        ["ip", *arguments],  # noqa: S607 - iproute2 of the PATH
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMMAND_LIMIT_S,
    )
    if done.returncode:
        raise UnavailableError(
            f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}", hint="it needs root and iproute2"
        )
