"""Whether emulated links behave as stated: `python -m benchmarks.wan_links [--json] [--quick]`.

Goodput is measured at the receiver. The bandwidth of a link is that of its wire, so goodput reaches at most
96.5 % of it. With root, the modelled loss is compared with the rate that the kernel's TCP reaches on a path that
really loses packets.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._wan_traffic import send
from benchmarks.table import Row, compared, print_rows
from isthmus.core.pool import Pool
from isthmus.wan.emulator import ROUTES_FILE, run_links
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason

MESSAGES = {"count": 30, "num_bytes": 1 << 18}
REAL = "kernel TCP, packets really lost"


def pool_of(**link: Any) -> Pool:
    """Two one-card clusters a and b, joined by `link`; `back` may override fields of the way back."""
    back = link | link.pop("back", {})
    link.pop("back", None), back.pop("back", None)
    group = {"chip": "H20", "nodes": 1, "chips_per_node": 1}
    clusters = [{"name": name, "owner": name, "node_groups": [group]} for name in "ab"]
    links = [{"from": "a", "to": "b", **link}, {"from": "b", "to": "a", **back}]
    return Pool.model_validate({"clusters": clusters, "links": links})


class Links:
    """Emulated links in a process of their own, and a traffic server at either end."""

    def __init__(self, pid: int, routes: dict[str, dict[str, str]], server: str) -> None:
        self.pid, self.routes, self.server = pid, routes, server

    def send(self, source: str = "a", **options: Any) -> list[float]:
        """Goodput of flows from `source` to the other side, Mbit/s."""
        return send(self.server, self._route(source), **options)

    def ping(self, **options: Any) -> list[float]:
        """Dial time and round trips, ms, by a process of its own."""
        return traffic("ping", self.server, proxy=self._route("a"), **options)

    def _route(self, source: str) -> str:
        return self.routes[source]["b" if source == "a" else "a"]


def traffic(measure: str, address: str, **options: Any) -> list[float]:
    """Run `benchmarks._wan_traffic` here and return what it found."""
    argv = [sys.executable, "-m", "benchmarks._wan_traffic", measure, address, json.dumps(options)]
    found: list[float] = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    return found


@contextmanager
def traffic_server() -> Iterator[str]:
    """Start `benchmarks._wan_traffic serve` here; yield its address."""
    argv = [sys.executable, "-m", "benchmarks._wan_traffic", "serve", "127.0.0.1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"127.0.0.1:{server.stdout.readline().strip()}" if server.stdout else ""
        finally:
            server.kill()


@contextmanager
def emulated(**link: Any) -> Iterator[Links]:
    """Emulate one link without root for the time of the block."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(traffic_server())
        process = multiprocessing.get_context("spawn").Process(target=run_links, args=(pool_of(**link), state))
        process.start()
        try:
            while not (state / ROUTES_FILE).exists() and process.is_alive():
                time.sleep(0.02)
            yield Links(process.pid or 0, json.loads((state / ROUTES_FILE).read_text()), server)
        finally:
            process.terminate()
            process.join(10)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate_row(what: str, mbps: float, stated_mbps: float) -> Row:
    """A goodput beside the stated bandwidth: within 5 %."""
    met = abs(mbps / stated_mbps - 1) <= 0.05
    return compared(what, mbps, "Mbit/s", "stated bandwidth", stated_mbps, target="within 5 %", met=met)


def time_row(what: str, found_ms: float, stated_ms: float) -> Row:
    """A time beside the stated one: within 2 ms."""
    met = abs(found_ms - stated_ms) <= 2
    return compared(what, found_ms, "ms", "stated", stated_ms, target="within 2 ms", met=met)


def rates_and_round_trips(quick: bool) -> Iterator[Row]:
    """One flow on links of several rates and delays."""
    settings = [(0.2, 20), (1, 20)] if quick else [(0.05, 5), (0.2, 20), (0.4, 40), (1, 20), (1, 100), (2, 40)]
    for gbps, round_trip_ms in settings:
        with emulated(bandwidth_gbps=gbps, delay_ms=round_trip_ms / 2) as links:
            dialled_ms, *times_ms = links.ping()
            mbps = links.send(window_s=1.0 if quick else 3.0)[0]
        name = f"{gbps:g} Gbit/s, {round_trip_ms} ms"
        yield rate_row(f"goodput, one flow, {name}", mbps, gbps * 1e3)
        yield time_row(f"round trip of 64 bytes, median, {name}", statistics.median(times_ms), round_trip_ms)
        dial_row = time_row(f"dialling, once, {name}", dialled_ms, round_trip_ms)
        yield replace(dial_row, target="none: one sample", met=None)


def jitter(quick: bool) -> Iterator[Row]:
    """The spread of the one-way delay, from that of round trips: two independent delays each."""
    with emulated(bandwidth_gbps=1, delay_ms=15, jitter_ms=2) as links:
        times_ms = links.ping(count=60 if quick else 250, gap_s=0.02)[1:]
    found_ms = statistics.stdev(times_ms) / math.sqrt(2)
    met = abs(found_ms / 2 - 1) <= 0.25
    what = "standard deviation of the one-way delay, 30 ms round trip"
    yield compared(what, found_ms, "ms", "stated jitter", 2.0, target="within 25 %", met=met)


def sharing(quick: bool) -> Iterator[Row]:
    """Two flows of one direction share it; the two directions of a link do not disturb each other."""
    window_s = 1.0 if quick else 3.0
    with emulated(bandwidth_gbps=0.4, delay_ms=10) as links:
        both = links.send(flows=2, window_s=window_s)
    yield rate_row("goodput, two flows together, 0.4 Gbit/s, 20 ms", sum(both), 400)
    share = min(both) / sum(both)
    yield Row(what="smaller share of two flows", ours=share, unit="of 1", target=">= 0.45", met=share >= 0.45)
    asymmetric = {"bandwidth_gbps": 0.8, "delay_ms": 10, "back": {"bandwidth_gbps": 0.2}}
    with emulated(**asymmetric) as links, ThreadPoolExecutor() as threads:
        there = threads.submit(links.send, "a", window_s=window_s)
        back = threads.submit(links.send, "b", window_s=window_s)
        yield rate_row("goodput there, 0.8 Gbit/s there and 0.2 back, both at once", there.result()[0], 800)
        yield rate_row("goodput back, 0.8 Gbit/s there and 0.2 back, both at once", back.result()[0], 200)


def limit(quick: bool) -> Iterator[Row]:
    """The largest rate that is still within 5 %, and what the emulator's process uses for it."""
    largest_gbps, used = 0.0, {}
    for gbps in (1.0, 2.0, 4.0) if quick else (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0):
        with emulated(bandwidth_gbps=gbps, delay_ms=10) as links:
            for _ in range(3):  # other work on the machine may disturb one try
                before_s, start_s = cpu_s(links.pid), time.monotonic()
                mbps = links.send(window_s=1.0 if quick else 3.0)[0]
                used[gbps] = (cpu_s(links.pid) - before_s) / (time.monotonic() - start_s)
                if mbps >= gbps * 950:
                    break
        if mbps < gbps * 950:
            break
        largest_gbps = gbps
    what = "largest rate within 5 %, 20 ms, sender, links and receiver on this machine"
    yield Row(what=what, ours=largest_gbps, unit="Gbit/s", target=">= 1", met=largest_gbps >= 1)
    for gbps in sorted({1.0, largest_gbps} & set(used)):
        what = f"CPU seconds of the links per second at {gbps:g} Gbit/s"
        yield Row(what=what, ours=used[gbps], unit="s/s", target="<= 0.2 at 1 Gbit/s", met=used[1.0] <= 0.2)


def _burn(nice: int) -> None:
    os.nice(nice)
    while True:
        pass


@contextmanager
def every_core_busy(nice: int) -> Iterator[None]:
    """Compute with as many processes as cores, at this niceness."""
    spawn = multiprocessing.get_context("spawn")
    burners = [spawn.Process(target=_burn, args=(nice,)) for _ in range(os.cpu_count() or 1)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def busy_machine(quick: bool) -> Iterator[Row]:
    """The link while every core computes: by itself, and as an end that must wait for a core sees it."""
    count, window_s = (40, 1.0) if quick else (150, 3.0)
    with emulated(bandwidth_gbps=0.4, delay_ms=10) as links, every_core_busy(0):
        own_ms = links.ping(count=count, soon=True)[1:]
        seen_ms = links.ping(count=count)[1:]
        mbps = links.send(window_s=window_s)[0]
    load = "every core busy, 0.4 Gbit/s, 20 ms"
    yield rate_row(f"goodput, {load}", mbps, 400)
    yield time_row(f"round trip, median, {load}", statistics.median(own_ms), 20)
    yield time_row(f"round trip, 95th percentile, {load}", statistics.quantiles(own_ms, n=20)[-1], 20)
    row = time_row(f"round trip, median, {load}, for an end that waits for a core", statistics.median(seen_ms), 20)
    yield replace(row, target="none: that wait is the machine's", met=None)


def in_namespaces(namespaces: Namespaces, measure: str, **options: Any) -> list[float]:
    """Run traffic from site a to site b, directly: their TCP sees the link itself."""
    module = [sys.executable, "-m", "benchmarks._wan_traffic"]
    with namespaces.run_in("b", [*module, "serve", "0.0.0.0"], stdout=subprocess.PIPE, text=True) as server:
        port = server.stdout.readline().strip() if server.stdout else ""
        address = f"{namespaces.sites['b'].address}:{port}"
        argv = [*module, measure, address, json.dumps(options)]
        with namespaces.run_in("a", argv, stdout=subprocess.PIPE, text=True) as client:
            found: list[float] = json.loads(client.communicate(timeout=120)[0])
        server.kill()
    return found


def messages_row(what: str, modelled_ms: list[float], real_ms: list[float]) -> Row:
    """The mean echo of 256 KiB, the first five left out: TCP has found its rate by then."""
    modelled, real = statistics.mean(modelled_ms[6:]), statistics.mean(real_ms[6:])
    met = 0.5 <= modelled / real <= 2
    what = f"echo of 256 KiB, mean, {what}"
    return compared(what, modelled, "ms", REAL, real, target="within a factor 2", met=met)


def loss(quick: bool) -> Iterator[Row]:
    """Modelled loss beside packets really lost, at 0.2 Gbit/s and 40 ms."""
    why = unavailable_reason(effective_capabilities())
    settings = [("bbr", 0.01), ("cubic", 0.01)] if quick else [
        ("bbr", 0.0), ("bbr", 0.001), ("bbr", 0.01), ("cubic", 0.0), ("cubic", 0.001), ("cubic", 0.01),
    ]  # fmt: skip
    skip_s, window_s = (1.0, 3.0) if quick else (2.0, 15.0)
    for control, share in settings:
        link = {"bandwidth_gbps": 0.2, "delay_ms": 20, "loss": share, "congestion_control": control}
        what = f"goodput, loss {share:.1%} modelled, {control}, 0.2 Gbit/s, 40 ms"
        with emulated(**link) as links:
            modelled = links.send(skip_s=1.0, window_s=min(window_s, 5.0))[0]
            modelled_ms = links.ping(**MESSAGES)
        if why is not None:
            yield Row(what=what, ours=modelled, unit="Mbit/s", peer=REAL, target=f"not compared: {why}")
            continue
        with emulated_namespaces(pool_of(**link)) as namespaces:
            real = in_namespaces(namespaces, "send", skip_s=skip_s, window_s=window_s)[0]
            times_ms = in_namespaces(namespaces, "ping")[1:] if share == 0 else []
            real_ms = in_namespaces(namespaces, "ping", **MESSAGES)
        factor = 1.6 if control == "cubic" and share else 1.1
        met = 1 / factor <= modelled / real <= factor
        yield compared(what, modelled, "Mbit/s", REAL, real, target=f"within a factor {factor}", met=met)
        yield messages_row(f"loss {share:.1%} modelled, {control}, 0.2 Gbit/s, 40 ms", modelled_ms, real_ms)
        if times_ms:
            what = f"round trip in namespaces, median, {control}, 40 ms"
            yield time_row(what, statistics.median(times_ms), 40)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="fewer settings, shorter windows")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parts = (rates_and_round_trips, jitter, sharing, limit, busy_machine, loss)
    print_rows([row for part in parts for row in part(options.quick)], options.json)


if __name__ == "__main__":
    main()
