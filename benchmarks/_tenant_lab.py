"""Two tenant gateways in network namespaces, each with a trunk, and the sites' tenants behind them (root)."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.wan.netns import delete_namespaces, stale_namespaces
from isthmus.wan.tenants.kernel_commands import run_checked

SITES = ("nanjing", "hangzhou")
ADDRESSES = {"nanjing": "10.0.0.1", "hangzhou": "10.0.0.2"}
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """Let this thread's sockets belong to a network namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if _libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        yield
    finally:
        _libc.setns(home, _CLONE_NEWNET)
        os.close(there)
        os.close(home)


class TenantLab:
    """Gateways in `gateway[site]`; behind the trunk `trunk` of each, the device `tenants` in `behind[site]`."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder, self.document = folder, {"gateways": ADDRESSES, **document}
        number = next(_numbers)
        names = [f"isthmus-{os.getpid()}-{900 + number}-{i}" for i in range(4)]
        self.gateway, self.behind = dict(zip(SITES, names[:2], strict=True)), dict(zip(SITES, names[2:], strict=True))
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._more: list[str] = []

    def __enter__(self) -> TenantLab:
        delete_namespaces(stale_namespaces())
        for name in (*self.gateway.values(), *self.behind.values()):
            run_checked(["ip", "netns", "add", name])
        a, b = self.gateway.values()
        run_checked(["ip", "-n", a, "link", "add", "wan", "type", "veth", "peer", "name", "wan", "netns", b])
        for site, name in self.gateway.items():
            self._ip(name, f"link set lo up;address add {ADDRESSES[site]}/24 dev wan;link set wan up")
            peer = self.behind[site]
            self._ip(name, f"link add trunk type veth peer name tenants netns {peer};link set trunk up")
            self._ip(peer, "link set tenants up")
            for namespace in (name, peer):
                run_checked(["ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"])
        for site in SITES:
            self.write(site)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        delete_namespaces([*self.gateway.values(), *self.behind.values(), *self._more])

    def _ip(self, namespace: str, commands: str) -> None:
        for command in commands.split(";"):
            run_checked(["ip", "-n", namespace, *command.split()])

    def file(self, site: str) -> Path:
        """Return a site's file of tenants."""
        return self.folder / f"{site}.json"

    def write(self, site: str, **changes: Any) -> None:
        """Write a site's file, with changes of the document."""
        self.document = {**self.document, **changes}
        temporary = self.folder / f"{site}.new"
        temporary.write_text(json.dumps({"site": site, **self.document}))
        temporary.replace(self.file(site))

    def start(self, *options: str) -> None:
        """Start both gateways, and wait until they hear each other."""
        for site in SITES:
            argv = ["ip", "netns", "exec", self.gateway[site], sys.executable, "-m", "isthmus", "wan", "tenants"]
            argv += [str(self.file(site)), "--run", "--trunk", "trunk", "--device", "wan", "--json"]
            argv += ["--state", str(self.folder / site), *options]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            self.processes[site] = process
        for process in self.processes.values():
            assert process.stdout is not None
            self.started = json.loads(process.stdout.readline())
        while not all(one["is_up"] and one["has_tcp"] for site in SITES for one in self.state(site)["links"]):
            time.sleep(0.05)

    def state(self, site: str) -> dict[str, Any]:
        """Return a gateway's last state."""
        file = self.folder / site / "tenants.json"
        while not file.exists():
            if self.processes[site].poll() is not None:
                raise RuntimeError(f"the gateway of {site} has ended")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def cpu_s(self) -> float:
        """Return the CPU time of both gateways so far."""
        ticks = 0
        for name in self.gateway.values():
            for pid in run_checked(["ip", "netns", "pids", name]).split():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float:
        """Return how long both gateways have waited for a core so far, ready to run."""
        found = 0.0
        for name in self.gateway.values():
            for pid in run_checked(["ip", "netns", "pids", name]).split():
                found += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        return found

    def stop(self) -> dict[str, dict[str, Any]]:
        """End the gateways; return their final states."""
        final = {}
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for site, process in self.processes.items():
            output, _ = process.communicate(timeout=30)
            if output:
                final[site] = json.loads(output.splitlines()[-1])
        self.processes.clear()
        return final

    def add_machine(self, site: str, port: str, address: str) -> str:
        """Add a machine of a tenant with a device of its own at the gateway; return its namespace."""
        name = f"{self.gateway[site].rpartition('-')[0]}-{10 + len(self._more)}"
        run_checked(["ip", "netns", "add", name])
        self._more.append(name)
        self._ip(self.gateway[site], f"link add {port} type veth peer name eth0 netns {name};link set {port} up")
        self._ip(
            name,
            f"link set lo up;address add {address} dev eth0;link set eth0 mtu 1450 gso_max_segs 1;link set eth0 up",
        )
        return name
