"""Hosts in network namespaces around one fabric, each by a link of its own rate (root; veth, bridge, tbf)."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks._wan_run import Bed
from isthmus.wan.netns import delete_namespaces, effective_capabilities, stale_namespaces

_ADMIN = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN
_LIMIT_S = 20.0
_BURST_BYTES, _QUEUE_BYTES = 3 * 2**10, 8 * 2**20
"""A burst of tbf, two frames; and what it queues: more than all slots of a run, so that nothing is lost."""

_counter = itertools.count()


@dataclass(frozen=True)
class Star:
    """The hosts by name: namespace and address; the switch's are in `switch`."""

    sites: dict[str, tuple[str, str]]
    switch: tuple[str, str]

    def bed(self, host_of: dict[str, str]) -> Bed:
        """Return where clusters run: `host_of[cluster]` is the host of a cluster, which others may share."""
        return Bed(sites={cluster: self.sites[host] for cluster, host in host_of.items()})


def unavailable_reason() -> str | None:
    """Return why this process cannot make namespaces with shaped links, or None if it can."""
    if effective_capabilities() & _ADMIN != _ADMIN:
        return "namespaces with shaped links need Linux and root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"the command `{missing[0]}` (iproute2) is missing" if missing else None


@contextmanager
def star_network(hosts: Sequence[str], mbps: float) -> Iterator[Star]:
    """Join `hosts` and a switch by a fabric; each host's link carries `mbps` in each direction, the switch's any rate.

    The rate is that of Ethernet frames. Namespaces are removed at the end, with all processes in them.
    """
    delete_namespaces(stale_namespaces())
    number = next(_counter)
    names = [f"isthmus-{os.getpid()}-{number}-{place}" for place in range(len(hosts) + 2)]
    fabric, switch, *places = names
    with ExitStack() as stack:
        stack.callback(delete_namespaces, names)
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", fabric, "link", "add", "fabric", "type", "bridge")
        _run("ip", "-n", fabric, "link", "set", "fabric", "up")
        _attach(fabric, switch, "10.214.0.1", 0, None)
        for place, name in enumerate(places, 2):
            _attach(fabric, name, f"10.214.0.{place}", place, mbps)
        sites = {
            host: (name, f"10.214.0.{place}") for place, (host, name) in enumerate(zip(hosts, places, strict=True), 2)
        }
        yield Star(sites, (switch, "10.214.0.1"))


def _attach(fabric: str, namespace: str, address: str, place: int, mbps: float | None) -> None:
    """Join a namespace to the fabric by a pair of devices, each of which limits what it sends."""
    port = f"port{place}"
    _run("ip", "-n", fabric, "link", "add", port, "type", "veth", "peer", "name", "wan", "netns", namespace)
    _run("ip", "-n", fabric, "link", "set", port, "master", "fabric", "up")
    _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "wan")
    for device in ("lo", "wan"):
        _run("ip", "-n", namespace, "link", "set", device, "up")
    if mbps is not None:
        for where, device in ((fabric, port), (namespace, "wan")):
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbps}mbit",
                 "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))  # fmt: skip


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        raise OSError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
