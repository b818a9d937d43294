"""Gateways with a `device`, started from `pool.yaml` in two network namespaces, carry NICs' queue pairs (root)."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from isthmus.wan.netns import effective_capabilities, unavailable_reason
from tests.wan.crossing.crossing_lab import GROUP

WHY = unavailable_reason(effective_capabilities())
SITES = {"hangzhou": ("10.97.0.1", "10.1.0.1"), "nanjing": ("10.97.0.2", "10.2.0.1")}
COUNT = 30


@contextmanager
def two_namespaces() -> Iterator[dict[str, str]]:
    """Yield a namespace for each site, joined by a pair of devices."""
    tag = secrets.token_hex(3)
    names = {site: f"isthmus-tun-{tag}-{number}" for number, site in enumerate(SITES)}
    made: list[str] = []
    try:
        for name in names.values():
            ip("netns", "add", name)
            made.append(name)
        first, second = (f"t{tag}{number}" for number in range(2))
        ip("link", "add", first, "netns", made[0], "type", "veth", "peer", "name", second, "netns", made[1])
        for name, device, (address, _) in zip(made, (first, second), SITES.values(), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for one in ("lo", device):
                ip("-n", name, "link", "set", one, "up")
            for setting in ("ip_forward=1", "conf.all.rp_filter=0", "conf.default.rp_filter=0"):
                ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{setting}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def write_pool(folder: Path) -> None:
    """Write the pool file of both sites, and their key."""
    key = folder / "link.key"
    key.touch(mode=0o600)
    key.write_text("ab" * 32)
    clusters = []
    for site, (address, nic) in SITES.items():
        gateway = {"name": "g0", "listen": f"{address}:4790", "networks": [f"{nic}/32"], "device": "roce0"}
        access: dict[str, Any] = {"proxy": {"listen": f"{address}:7400"}, "gateways": [gateway]}
        clusters.append({"name": site, "owner": site, "node_groups": GROUP, "access": access})
    link = {
        "between": list(SITES), "bandwidth_gbps": 0.2, "round_trip_ms": 40, "loss": 0.01,
        "crossing": {"key": "link.key"},
    }  # fmt: skip
    (folder / "pool.json").write_text(json.dumps({"clusters": clusters, "links": [link]}))


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(WHY is not None, reason=f"needs network namespaces and TUN devices: {WHY}")
def test_queue_pairs_cross_by_the_routes_of_their_hosts(tmp_path: Path) -> None:
    """Messages both ways arrive once, in order, over devices that the gateways bring up themselves."""
    pytest.importorskip("pyroute2", reason="needs pyroute2: pip install 'isthmus[wan]'")
    write_pool(tmp_path)
    with two_namespaces() as names:
        running = []
        for number, (site, other) in enumerate((("hangzhou", "nanjing"), ("nanjing", "hangzhou"))):
            pairs = (17, 18) if number == 0 else (18, 17)
            words = [str(tmp_path), site, SITES[site][1], SITES[other][1], *map(str, pairs), str(COUNT)]
            command = ["ip", "netns", "exec", names[site], sys.executable, "-m", "tests.wan.crossing.tun_site", *words]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        try:
            found = [process.communicate(timeout=90) for process in running]
        finally:
            for process in running:
                process.kill()
    for out, error in found:
        assert out, error[-2000:]
        result = json.loads(out)
        assert result == {"done": COUNT, "arrived": COUNT, "is_good": True, "failed": None}
