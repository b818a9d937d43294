"""Connections through a pair of proxies beside direct ones and a split relay: `python -m benchmarks.wan_proxy`.

Two network namespaces are joined by a link that really loses packets: 1 Gbit/s, a round trip of 40 ms, a queue of one
bandwidth-delay product. The ends use cubic, the host's default; the peers are the same connection without a proxy, and
haproxy at both sites with BBR between the two, in the clear. The bound is a pair of processes that only read, seal and
write (`benchmarks/_wan_relay.py`): what the kernel and the cipher cost here for the same bytes. A message of 1 MB is
answered with one byte; the first ten, on a connection that starts, do not count. Needs root; haproxy's rows need
haproxy (`apt install haproxy`). `cuts` breaks, stops and refuses the legs by seed, every few seconds for 30 minutes: of
two engines on a virtual clock, and of two `isthmus proxy` on loopback, without root. `--json`, `--quick`,
`--only PART`, such as `0.01` or `cuts`.
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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._proxy_cuts import cut_rows
from benchmarks.table import Row, compared, print_rows, run_parts
from benchmarks.wan_links import cpu_s, pool_of
from isthmus.core.errors import UnavailableError
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason

LOSSES = {"0": 0.0, "0.001": 0.001, "0.01": 0.01}
CUTS = "cuts"
LEG_PORT = 7400
TRAFFIC_LIMIT_S = 300
ROUND_TRIP_MS = 40.0
OURS, DATAGRAMS, CORRECTED = "proxy, encrypted", "datagrams", "datagrams with error correction"
DIRECT = "direct, cubic"
RELAY, BOUND = "haproxy, BBR, in the clear", "read, seal, write: the bound"
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
    return Way(DIRECT, f"{namespaces.sites['b'].address}:{port}", None, [])


def isthmus_proxy(namespaces: Namespaces, server: str, state: Path, name: str = OURS, *legs: str) -> Way:
    """Start `isthmus proxy` at both sites; `legs` are options of the one that dials."""
    key = state / "link.key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    there = f"{namespaces.sites['b'].address}:{LEG_PORT}"
    command = [sys.executable, "-m", "isthmus", "proxy", "--json"]
    far = [*command, "--site", "b", "--key", f"a={key}", "--listen", there, "--state", str(state / "b")]
    near = [*command, "--site", "a", "--key", f"b={key}", "--peer", f"b={there}", "--state", str(state / "a")]
    near += legs
    pids = []
    for site, argv in (("b", far), ("a", near)):
        pids.append(namespaces.run_in(site, argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
        wait_for(state / site / "routes.json")
    route = json.loads((state / "a" / "routes.json").read_text())["a"]["b"]
    time.sleep(1)
    return Way(name, server, route, pids)


def datagram_proxy(namespaces: Namespaces, server: str, state: Path) -> Way:
    """Start `isthmus proxy` at both sites, with legs over datagrams."""
    return isthmus_proxy(namespaces, server, state, DATAGRAMS, "--transport", "datagram")


def corrected_proxy(namespaces: Namespaces, server: str, state: Path) -> Way:
    """Start `isthmus proxy` at both sites, with legs over datagrams and their parity."""
    return isthmus_proxy(namespaces, server, state, CORRECTED, "--transport", "datagram", "--error-correction")


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
    return Way(RELAY, "127.0.0.1:7402", None, pids)


def bound(namespaces: Namespaces, server: str, _state: Path) -> Way:
    """Start a relay at both sites that only reads, seals or opens, and writes."""
    there, near = f"{namespaces.sites['b'].address}:{LEG_PORT + 2}", "127.0.0.1:7403"
    command, pids = [sys.executable, "-m", "benchmarks._wan_relay"], []
    for site, argv in (("b", ["far", there, server]), ("a", ["near", near, there])):
        process = namespaces.run_in(site, [*command, *argv], stdout=subprocess.PIPE, text=True)
        if process.stdout is not None:
            process.stdout.readline()
        pids.append(process.pid)
    return Way(BOUND, near, None, pids)


def traffic(namespaces: Namespaces, path: Way, measure: str, **options: Any) -> list[float]:
    """Run one measurement from site a."""
    options |= {"proxy": path.proxy}
    argv = [sys.executable, "-m", "benchmarks._wan_traffic", measure, path.address, json.dumps(options)]
    process = namespaces.run_in("a", argv, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=TRAFFIC_LIMIT_S)
    found: list[float] = json.loads(output)
    return found


@dataclass(frozen=True)
class Found:
    """What one way does: goodputs in Mbit/s, CPU seconds of its relays per GB, and times of messages in ms, sorted."""

    goodputs: list[float]
    cpu_s: float
    messages_ms: list[float]

    @property
    def mbps(self) -> float:
        """The median goodput."""
        return statistics.median(self.goodputs)

    @property
    def p99_ms(self) -> float:
        """The 99th percentile of the messages; of fewer than a hundred the slowest."""
        return self.messages_ms[int(len(self.messages_ms) * 0.99)]


def measure(loss: float, quick: bool) -> dict[str, Found]:
    """Measure each way."""
    window_s, rounds, most_s = (2.0, 1, 3.0) if quick else (4.0, 3, 8.0)
    ways = (direct, isthmus_proxy, datagram_proxy, corrected_proxy, haproxy, bound)
    found = {}
    for kind in ways:
        control = "bbr" if kind is haproxy else "cubic"
        with ExitStack() as stack:
            state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool = pool_of(bandwidth_gbps=1, delay_ms=ROUND_TRIP_MS / 2, loss=loss, congestion_control=control)
            namespaces = stack.enter_context(emulated_namespaces(pool))
            path = kind(namespaces, start_server(namespaces), state)
            if path is None:
                continue
            before_s = sum(map(cpu_s, path.pids))
            goodputs, total_gb = [], 0.0
            for _ in range(rounds):
                goodputs += traffic(namespaces, path, "send", skip_s=2.0, window_s=window_s)
                total_gb += goodputs[-1] * 1e6 / 8 * (window_s + 2.0) / 1e9
            used_s = sum(map(cpu_s, path.pids)) - before_s
            times_ms = traffic(namespaces, path, "messages", first=5 if quick else 10, most_s=most_s)
            found[path.name] = Found(goodputs, used_s / total_gb, sorted(times_ms))
    return found


def rows(loss: float, quick: bool) -> list[Row]:
    """The rows of a loss."""
    found = measure(loss, quick)
    ours, bound = found.pop(OURS), found.pop(BOUND)
    over_datagrams = {name: found.pop(name) for name in (DATAGRAMS, CORRECTED)}
    best = max(one.mbps for one in found.values())
    result = []
    for name, one in found.items():
        is_best = one.mbps == best
        target, met = ("930, never below the best peer", ours.mbps >= max(930, best)) if is_best else ("", None)
        what = f"goodput, one connection ({min(ours.goodputs):.0f} to {max(ours.goodputs):.0f})"
        result.append(compared(what, ours.mbps, "Mbit/s", name, one.mbps, target=target, met=met))
    result.append(compared("goodput, one connection", ours.mbps, "Mbit/s", BOUND, bound.mbps))
    what, met = "CPU of both proxies per GB", ours.cpu_s <= 1.2
    if relay := found.get(RELAY):
        result.append(compared(what, ours.cpu_s, "s", RELAY, relay.cpu_s))
    result.append(compared(what, ours.cpu_s, "s", BOUND, bound.cpu_s, target="1.2", met=met))
    what, allowed_ms = f"1 MB and its answer, p99 of {len(ours.messages_ms)}", 2.2 * ROUND_TRIP_MS
    result += [compared(what, ours.p99_ms, "ms", name, one.p99_ms) for name, one in found.items()]
    target, met = f"2.2 round trips: {allowed_ms:.0f}", ours.p99_ms <= allowed_ms
    result.append(compared(what, ours.p99_ms, "ms", BOUND, bound.p99_ms, target=target, met=met))
    what = f"1 MB and its answer, median of {len(ours.messages_ms)}"
    result.append(
        compared(what, statistics.median(ours.messages_ms), "ms", BOUND, statistics.median(bound.messages_ms))
    )
    for name, one in over_datagrams.items():
        what = f"goodput, legs over {name} ({min(one.goodputs):.0f} to {max(one.goodputs):.0f})"
        result.append(compared(what, one.mbps, "Mbit/s", "legs over TCP", ours.mbps))
        result.append(compared(f"CPU of both proxies per GB, {name}", one.cpu_s, "s", "legs over TCP", ours.cpu_s))
    plain, corrected = over_datagrams.values()
    what = f"1 MB and its answer, {DATAGRAMS}, p99 of {len(plain.messages_ms)}"
    result.append(compared(what, plain.p99_ms, "ms", "legs over TCP", ours.p99_ms))
    what, allowed_ms = f"1 MB and its answer, {CORRECTED}, p99 of {len(corrected.messages_ms)}", 1.3 * ROUND_TRIP_MS + 8
    target, met = f"1.3 round trips and 8 ms on the line: {allowed_ms:.0f}", corrected.p99_ms <= allowed_ms
    result.append(compared(what, corrected.p99_ms, "ms", DATAGRAMS, plain.p99_ms, target=target, met=met))
    what = f"1 MB and its answer, {CORRECTED}, median of {len(corrected.messages_ms)}"
    median_ms = statistics.median(plain.messages_ms)
    result.append(compared(what, statistics.median(corrected.messages_ms), "ms", DATAGRAMS, median_ms))
    return result


def main() -> None:
    """Print the rows, a part for each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.add_argument(
        "--quick", action="store_true", help="one short round, without loss and at 1 %%; a minute of cuts"
    )
    parser.add_argument("--only", nargs="+", choices=[*LOSSES, CUTS], metavar="PART", help="only these losses, or cuts")
    options = parser.parse_args()
    chosen = options.only or [name for name in (*LOSSES, CUTS) if name != "0.001" or not options.quick]
    if chosen != [CUTS] and (why := unavailable_reason(effective_capabilities())):
        raise SystemExit(f"benchmarks.wan_proxy: {why}")
    parts = {f"loss {LOSSES[one]:.1%}": partial(rows, LOSSES[one], options.quick) for one in chosen if one != CUTS}
    if CUTS in chosen:
        parts[CUTS] = partial(cut_rows, options.quick)
    print_rows(run_parts(parts, parts), options.json)


if __name__ == "__main__":
    main()
