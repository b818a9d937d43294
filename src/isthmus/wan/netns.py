"""Emulated links with real packet loss: one network namespace per cluster (Linux, root).

Each namespace has one TUN device; the `wan.packet_relay` process relays IP packets between them. Namespaces
are named `isthmus-PID-...`; the next start removes those whose process is gone.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.core.errors import NotFoundError, UnavailableError
from isthmus.core.pool import Pool
from isthmus.wan.shaper import links_both_ways

_COMMAND_LIMIT_S = 60.0
"""Longest run of an `ip` command."""

TUN_DEVICE = Path("/dev/net/tun")
NAMESPACE_FOLDER = Path("/run/netns")
_TUNSETIFF = 0x400454CA  # TUNSETIFF
_TUNSETOFFLOAD = 0x400454D0  # TUNSETOFFLOAD
_TUN_FLAGS = 0x0001 | 0x1000 | 0x4000  # IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
_TUN_TCP = 0x01 | 0x02  # TUN_F_CSUM | TUN_F_TSO4
_TUN_UDP = 0x20 | 0x40  # TUN_F_USO4 | TUN_F_USO6, which Linux has since 6.2 and takes together
_BURST_S = 0.15e-3
"""Time on the wire of the segments that a device may pass as one packet."""
_MAX_BURST_BYTES = 2**16
_REQUIRED_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN
_NAMESPACE_NAME = re.compile(r"isthmus-(\d+)-\d+-\d+")
_TCP_BUFFERS = "4096 131072 134217728"
_SYSCTLS = {
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv4.tcp_rmem": _TCP_BUFFERS,
    "net.ipv4.tcp_wmem": _TCP_BUFFERS,
    "net.ipv4.tcp_no_metrics_save": "1",
}
"""TCP buffers for several bandwidth-delay products of 10 Gbit/s and 20 ms, as BBR fills them; no cached metrics."""

_counter = itertools.count()


@dataclass(frozen=True)
class SiteNamespace:
    """A cluster's namespace and its IPv4 address there."""

    namespace: str
    address: str


@dataclass
class Namespaces:
    """The emulated sites by cluster; valid inside `emulated_namespaces`."""

    sites: dict[str, SiteNamespace]
    relay: subprocess.Popen[bytes]
    _processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def run_in(self, cluster: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `argv` in the namespace of `cluster` until the end; `options` go to `subprocess.Popen`."""
        if cluster not in self.sites:
            raise NotFoundError(f"no cluster {cluster!r}", hint=f"available: {', '.join(sorted(self.sites))}")
        command = ["ip", "netns", "exec", self.sites[cluster].namespace, *argv]
        process = subprocess.Popen(command, **options)  # noqa: S603 - the caller's own program in a namespace; no shell
        self._processes.append(process)
        return process

    def counters(self) -> list[dict[str, Any]]:
        """Return per direction the packets and bytes delivered and the packets `lost` and `num_dropped`."""
        if self.relay.stdin is None or self.relay.stdout is None or self.relay.poll() is not None:
            raise UnavailableError("the packet relay has exited", hint="see its standard error")
        self.relay.stdin.write(b"counters\n")
        self.relay.stdin.flush()
        found: list[dict[str, Any]] = json.loads(self.relay.stdout.readline())
        return found

    def kill_processes(self) -> None:
        """Kill and reap the processes that `run_in` started."""
        for process in self._processes:
            process.kill()
            process.wait()


def effective_capabilities() -> int:
    """Return this process's effective capabilities as a bit mask; 0 without /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def unavailable_reason(capabilities: int, tun: Path = TUN_DEVICE) -> str | None:
    """Return why a process with these capabilities cannot emulate namespaces here, or None if it can."""
    if capabilities & _REQUIRED_CAPABILITIES != _REQUIRED_CAPABILITIES:
        return "network namespaces need Linux and root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    if not tun.exists():
        return f"{tun} is missing"
    return None if shutil.which("ip") else "the command `ip` (iproute2) is missing"


def require_namespaces(capabilities: int) -> None:
    """Raise `UnavailableError` if a process with these capabilities cannot emulate namespaces here."""
    if why := unavailable_reason(capabilities):
        raise UnavailableError(why, hint="run as root, or use `isthmus links`, which needs no root")


@contextmanager
def emulated_namespaces(pool: Pool, seed: int = 0) -> Iterator[Namespaces]:
    """Emulate `pool` in namespaces inside the block; at its end processes, relay and namespaces are removed.

    If this process dies, the relay deletes the namespaces. TCP across a link uses the link's congestion
    control. Raises `UnavailableError` without root, `/dev/net/tun` or iproute2.
    """
    require_namespaces(effective_capabilities())
    delete_namespaces(stale_namespaces())
    start = next(_counter)
    sites = {
        cluster.name: SiteNamespace(f"isthmus-{os.getpid()}-{start}-{i}", f"10.213.{i // 250}.{i % 250 + 1}")
        for i, cluster in enumerate(pool.clusters)
    }
    with ExitStack() as stack:
        stack.callback(delete_namespaces, [site.namespace for site in sites.values()])
        descriptors = {}
        for name, site in sites.items():
            descriptors[site.namespace] = _add_site(
                site.namespace, site.address, _mtu_bytes(pool, name), _burst_bytes(pool, name)
            )
            stack.callback(os.close, descriptors[site.namespace])
        _add_routes(pool, sites)
        relay = _start_relay(pool, seed, sites, descriptors)
        stack.enter_context(relay)
        stack.callback(_stop_relay, relay)
        namespaces = Namespaces(sites, relay)
        stack.callback(namespaces.kill_processes)
        yield namespaces


def stale_namespaces() -> list[str]:
    """Return the namespaces whose process no longer exists."""
    names = [path.name for path in NAMESPACE_FOLDER.iterdir()] if NAMESPACE_FOLDER.is_dir() else []
    owners = {name: found.group(1) for name in names if (found := _NAMESPACE_NAME.fullmatch(name))}
    return [name for name, pid in owners.items() if not Path("/proc", pid).exists()]


def delete_namespaces(names: Sequence[str]) -> None:
    """Kill all processes in the namespaces `names` and delete those that exist."""
    for name in names:
        if not (NAMESPACE_FOLDER / name).exists():
            continue
        pids = subprocess.run(  # noqa: S603 - `ip` with names made here; no shell
            ["ip", "netns", "pids", name],  # noqa: S607 - iproute2 of the PATH
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_LIMIT_S,
        )
        for pid in pids.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=_COMMAND_LIMIT_S)  # noqa: S603, S607 - `ip` with names made here; no shell


def _burst_bytes(pool: Pool, cluster: str) -> int:
    """Return how many bytes the device of `cluster` may pass as one packet; 0 for single segments.

    A link that repeats packets or sends them late takes each alone, and so does a slow one.
    """
    links = [link for ends, link in links_both_ways(pool).items() if cluster in ends]
    if not links or any(link.reordering or link.duplication for link in links):
        return 0
    num_bytes = min(int(_BURST_S * min(link.bandwidth_bytes_per_s for link in links)), _MAX_BURST_BYTES)
    return num_bytes if num_bytes >= 2 * max(link.mtu_bytes for link in links) else 0


def _mtu_bytes(pool: Pool, cluster: str) -> int:
    """Return the largest MTU of the links of `cluster`; each route states its own."""
    links = [link for ends, link in links_both_ways(pool).items() if cluster in ends]
    return max((link.mtu_bytes for link in links), default=1500)


def _add_site(namespace: str, address: str, mtu_bytes: int, burst_bytes: int) -> int:
    """Create the namespace with its TUN device `wan` at `address`; return the device's descriptor."""
    _run_ip("netns", "add", namespace)
    descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", b"isthmus%d", _TUN_FLAGS)
        device = fcntl.ioctl(descriptor, _TUNSETIFF, request)[:16].rstrip(b"\0").decode()
        _run_ip("link", "set", device, "netns", namespace, "name", "wan")
        _run_ip("-n", namespace, "link", "set", "lo", "up")
        if burst_bytes:
            try:
                fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_TCP | _TUN_UDP)
            except OSError:
                fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_TCP)
            _run_ip("-n", namespace, "link", "set", "wan", "gso_max_size", str(burst_bytes))
        _run_ip("-n", namespace, "link", "set", "wan", "mtu", str(mtu_bytes), "txqueuelen", "10000", "up")
        _run_ip("-n", namespace, "address", "add", f"{address}/32", "dev", "wan")
        settings = [f"{name}={value}" for name, value in _SYSCTLS.items()]
        _run_checked(["ip", "netns", "exec", namespace, "sysctl", "-qw", *settings])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _add_routes(pool: Pool, sites: dict[str, SiteNamespace]) -> None:
    for (source, target), link in links_both_ways(pool).items():
        route = (f"{sites[target].address}/32", "dev", "wan", "src", sites[source].address)
        options = ("mtu", str(link.mtu_bytes), "congctl", link.congestion_control)
        _run_ip("-n", sites[source].namespace, "route", "add", *route, *options)


def _start_relay(
    pool: Pool, seed: int, sites: dict[str, SiteNamespace], descriptors: dict[str, int]
) -> subprocess.Popen[bytes]:
    devices = {name: (site.address, descriptors[site.namespace]) for name, site in sites.items()}
    config = {"pool": pool.model_dump(mode="json", by_alias=True), "devices": devices, "seed": seed}
    config["namespaces"] = [site.namespace for site in sites.values()]
    relay = subprocess.Popen(
        [sys.executable, "-m", "isthmus.wan.packet_relay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=list(descriptors.values()),
        start_new_session=True,
    )
    if relay.stdin is None or relay.stdout is None:
        raise UnavailableError("the packet relay has no pipes")
    try:
        relay.stdin.write(json.dumps(config).encode() + b"\n")
        relay.stdin.flush()
        ready = relay.stdout.readline() == b"ready\n"
    except BrokenPipeError:
        ready = False
    if not ready:
        _stop_relay(relay)
        raise UnavailableError("the packet relay did not start", hint="see its standard error")
    return relay


def _stop_relay(relay: subprocess.Popen[bytes]) -> None:
    if relay.stdin is not None:
        relay.stdin.close()
    try:
        relay.wait(5)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait()
    if relay.stdout is not None:
        relay.stdout.close()


def _run_ip(*arguments: str) -> None:
    _run_checked(["ip", *arguments])


def _run_checked(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_COMMAND_LIMIT_S)  # noqa: S603 - `ip` with names made here; no shell
    if done.returncode:
        raise UnavailableError(
            f"`{' '.join(argv)}` failed: {done.stderr.strip()}",
            hint="network namespaces need root and iproute2",
        )
