"""Connections through a pair of proxies beside direct ones and a split relay: `python -m benchmarks.wan_proxy`.

Two network namespaces are joined by a link that really loses packets: 1 Gbit/s, a round trip of 40 ms, a queue of one
bandwidth-delay product. The ends use cubic, the host's default; the peers are the same connection without a proxy, and
haproxy at both sites with BBR between the two, in the clear. Needs root; haproxy's rows need haproxy (`apt install
haproxy`). `--json`, `--quick`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.table import Row, compared, print_rows
from benchmarks.wan_links import cpu_s, pool_of
from isthmus.core.errors import UnavailableError
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason

LOSSES = (0.0, 0.001, 0.01)
LEG_PORT = 7400
TRAFFIC_LIMIT_S = 900
"""Of one measurement: 60 echoes of 1 MB take six minutes over one direct connection that loses 1 %."""
HAPROXY = """
global
    nbthread 1
    stats socket {state}/haproxy.sock
    log stdout format raw local0 emerg
defaults
    mode tcp
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen relay
    bind {bind}
    server there {server}
"""


class Way:
    """One way from site a to the traffic server of site b: what to dial, and which processes carry it."""

    def __init__(self, name: str, address: str, proxy: str | None, pids: list[int]) -> None:
        self.name, self.address, self.proxy, self.pids = name, address, proxy, pids


def start_server(namespaces: Namespaces) -> str:
    """Start the traffic server of site b on its loopback; return its address."""
    argv = [sys.executable, "-m", "benchmarks._wan_traffic", "serve", "0.0.0.0"]
    process = namespaces.run_in("b", argv, stdout=subprocess.PIPE, text=True)
    return f"127.0.0.1:{process.stdout.readline().strip()}" if process.stdout else ""


def wait_for(file: Path) -> None:
    """Wait until `file` exists, at most 20 s."""
    deadline_s = time.monotonic() + 20
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{file} has not appeared in 20 s")
        time.sleep(0.05)


def direct(namespaces: Namespaces, server: str, _state: Path) -> Way:
    """Return the connection without a proxy."""
    port = server.rpartition(":")[2]
    return Way("direct, cubic", f"{namespaces.sites['b'].address}:{port}", None, [])


def isthmus_proxy(namespaces: Namespaces, server: str, state: Path, transport: str = "tcp") -> Way:
    """Start `isthmus proxy` at both sites, with legs of `transport`."""
    key = state / "link.key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    there = f"{namespaces.sites['b'].address}:{LEG_PORT}"
    command = [sys.executable, "-m", "isthmus", "proxy", "--json"]
    far = [*command, "--site", "b", "--key", f"a={key}", "--listen", there, "--state", str(state / "b")]
    near = [*command, "--site", "a", "--key", f"b={key}", "--peer", f"b={there}", "--state", str(state / "a")]
    near += ["--transport", transport]
    pids = []
    for site, argv in (("b", far), ("a", near)):
        pids.append(namespaces.run_in(site, argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
        wait_for(state / site / "routes.json")
    route = json.loads((state / "a" / "routes.json").read_text())["a"]["b"]
    time.sleep(1)
    name = "proxy, encrypted" if transport == "tcp" else "proxy, encrypted, datagrams"
    return Way(name, server, route, pids)


def datagram_proxy(namespaces: Namespaces, server: str, state: Path) -> Way:
    """Start `isthmus proxy` at both sites, with legs over datagrams."""
    return isthmus_proxy(namespaces, server, state, "datagram")


def haproxy(namespaces: Namespaces, server: str, state: Path) -> Way | None:
    """Start haproxy at both sites, BBR between them; None without haproxy."""
    program = shutil.which("haproxy")
    if program is None:
        return None
    there, port = namespaces.sites["b"].address, LEG_PORT + 1
    sides = {
        "b": HAPROXY.format(state=state / "b", bind=f"{there}:{port}", server=server),
        "a": HAPROXY.format(state=state / "a", bind="127.0.0.1:7402", server=f"{there}:{port}"),
    }
    pids = []
    for site, text in sides.items():
        folder = state / site
        folder.mkdir(exist_ok=True)
        (folder / "haproxy.cfg").write_text(text)
        argv = [program, "-db", "-f", str(folder / "haproxy.cfg")]
        pids.append(namespaces.run_in(site, argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
    time.sleep(1)
    return Way("haproxy, BBR, in the clear", "127.0.0.1:7402", None, pids)


def traffic(namespaces: Namespaces, path: Way, measure: str, **options: Any) -> list[float]:
    """Run one measurement from site a."""
    options |= {"proxy": path.proxy}
    argv = [sys.executable, "-m", "benchmarks._wan_traffic", measure, path.address, json.dumps(options)]
    process = namespaces.run_in("a", argv, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=TRAFFIC_LIMIT_S)
    found: list[float] = json.loads(output)
    return found


def measure(loss: float, quick: bool) -> Iterator[tuple[str, list[float], float, float]]:
    """Yield for each way its goodputs (Mbit/s), the relays' CPU s per GB, and the p99 of 1 MB echoes (ms)."""
    window_s, rounds = (3.0, 1) if quick else (10.0, 3)
    for kind, control in (
        (direct, "cubic"),
        (isthmus_proxy, "cubic"),
        (datagram_proxy, "cubic"),
        (haproxy, "bbr"),
    ):
        with ExitStack() as stack:
            state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool = pool_of(bandwidth_gbps=1, delay_ms=20, loss=loss, congestion_control=control)
            namespaces = stack.enter_context(emulated_namespaces(pool))
            server = start_server(namespaces)
            path = kind(namespaces, server, state)
            if path is None:
                continue
            before_s = sum(map(cpu_s, path.pids))
            goodputs, total_gb = [], 0.0
            for _ in range(rounds):
                found = traffic(namespaces, path, "send", skip_s=2.0, window_s=window_s)
                goodputs += found
                total_gb += found[0] * 1e6 / 8 * (window_s + 2.0) / 1e9
            used_s = sum(map(cpu_s, path.pids)) - before_s
            echoes = traffic(namespaces, path, "ping", count=10 if quick else 60, num_bytes=10**6)[1:]
            yield path.name, goodputs, used_s / total_gb, sorted(echoes)[int(len(echoes) * 0.99)]


def rows(quick: bool) -> Iterator[Row]:
    """The rows of all losses."""
    for loss in LOSSES:
        found = {name: rest for name, *rest in measure(loss, quick)}
        ours, cpu, p99_ms = found.pop("proxy, encrypted")
        datagrams, datagram_cpu, datagram_p99_ms = found.pop("proxy, encrypted, datagrams")
        mbps, place = statistics.median(ours), f"loss {loss:.1%}, 1 Gbit/s, 40 ms"
        spread = f"{min(ours):.0f} to {max(ours):.0f}"
        best = max(statistics.median(goodputs) for goodputs, _, _ in found.values())
        for name, (goodputs, _, _) in found.items():
            peer = statistics.median(goodputs)
            is_best = peer == best
            target, met = ("930, never below the best peer", mbps >= max(930, best)) if is_best else ("", None)
            what = f"goodput, one connection, {place} ({spread})"
            yield compared(what, mbps, "Mbit/s", name, peer, target=target, met=met)
        relay = found.get("haproxy, BBR, in the clear")
        if relay:
            what = f"CPU of both proxies per GB, {place}"
            yield compared(what, cpu, "s", "haproxy, in the clear", relay[1], target="1.2", met=cpu <= 1.2)
        what = f"goodput, one connection, legs over datagrams, {place} ({min(datagrams):.0f} to {max(datagrams):.0f})"
        yield compared(what, statistics.median(datagrams), "Mbit/s", "legs over TCP", mbps)
        yield compared(f"CPU of both proxies per GB, datagrams, {place}", datagram_cpu, "s", "legs over TCP", cpu)
        what = f"echo of 1 MB, legs over datagrams, p99, {place}"
        yield compared(what, datagram_p99_ms, "ms", "legs over TCP", p99_ms)
        direct_p99_ms = found["direct, cubic"][2]
        yield compared(f"echo of 1 MB, p99, {place}", p99_ms, "ms", "direct, cubic", direct_p99_ms)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    if why := unavailable_reason(effective_capabilities()):
        raise SystemExit(f"benchmarks.wan_proxy: {why}")
    print_rows(list(rows(options.quick)), options.json)


if __name__ == "__main__":
    main()
