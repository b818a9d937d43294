"""Training across a link as `pool.yaml` states it: killed gateways, a flood: `python -m benchmarks.wan_crossing`.

Two sites in network namespaces are joined by a link that really loses packets; their proxies, gateways and the kernel's
htb are those that the pool file states. `killed`: two stages train over queue pairs through two pairs of gateways; one
gateway is killed, another one stopped, so that its path falls silent. `reserved`: a datagram flood of twice the line's
rate shares it; the peer is the same run without a reservation at the edge. Needs root. `--json`, `--quick`, `--only`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._crossing_sites import Sites, Trained, document, sites_of, train
from benchmarks.table import Row, compared, print_rows, run_parts
from isthmus.wan.netns import effective_capabilities, unavailable_reason

LINE_GBPS, RESERVED_GBPS = 0.05, 0.025
COMPUTE_S = 0.05
FLOOD = """
import socket, sys, time
host, gbps = sys.argv[1], float(sys.argv[2])
sock, packet = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), bytes(1400)
start_s, sent = time.monotonic(), 0
while True:
    due = (time.monotonic() - start_s) * gbps * 1e9 / 8 / 1428
    while sent < due:
        try:
            sock.sendto(packet, (host, 9))
        except OSError:
            pass
        sent += 1
    time.sleep(0.002)
"""


def killed(quick: bool) -> list[Row]:
    """A gateway is killed and a path falls silent while a job trains."""
    steps = 40 if quick else 150
    events = {
        steps // 3: ("nanjing", "gateway-g0", signal.SIGKILL),
        2 * steps // 3: ("hangzhou", "gateway-g1", signal.SIGSTOP),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link = {"bandwidth_gbps": 0.1, "round_trip_ms": 20, "loss": 0.001, "mtu_bytes": 9000}
        pool = document(link, {"transport": "roce", "streams": 4}, 2, None)
        with sites_of(pool, folder) as sites:
            stopped: list[int] = []

            def at_step(step: int) -> None:
                if step in events:
                    site, part, number = events[step]
                    pid = sites.pids(site)[part]
                    os.kill(pid, number)
                    if number == signal.SIGSTOP:
                        stopped.append(pid)

            found = train(sites, folder / "crossed", steps, at_step)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        direct = train(None, folder / "direct", steps, lambda _: None)
    return _killed_rows(found, direct, sorted(events), steps)


def _killed_rows(found: Trained, direct: Trained, at: Sequence[int], steps: int) -> list[Row]:
    quiet_s = statistics.median(found.steps_s[3 : at[0]])
    rows = []
    for name, step in zip(("gateway killed", "path silent"), at, strict=True):
        pause_s = max(found.steps_s[step : step + 6]) - quiet_s
        what = f"{name} in training: pause (iteration {quiet_s * 1e3:.0f} ms)"
        rows.append(Row(what=what, ours=pause_s, unit="s", target="1", met=pause_s <= 1.0))
    same = sum(a == b for a, b in zip(found.losses, direct.losses, strict=False))
    lost = steps - len(found.losses)
    rows.append(Row(what="the same: steps lost", ours=lost, unit="steps", target="0", met=lost == 0))
    what = "the same: losses with the bits of a direct run"
    rows.append(Row(what=what, ours=same, unit=f"of {steps}", target=str(steps), met=same == steps))
    return rows


def reserved(quick: bool) -> list[Row]:
    """A flood of twice the line's rate beside training, with a reservation and without."""
    steps = 24 if quick else 80
    quiet_s, flooded_s = _flooded(steps, LINE_GBPS)
    alone_s, best_effort_s = _flooded(steps, None)
    share = (flooded_s / quiet_s - 1) * 100
    what = f"iteration under a flood of twice the line, of a quiet one ({quiet_s * 1e3:.0f} ms; reserved)"
    peer = f"without reservation (quiet {alone_s * 1e3:.0f} ms)"
    best_effort = (best_effort_s / alone_s - 1) * 100
    row = compared(what, share, "% longer", peer, best_effort, target="3", met=share <= 3)
    return [row]


def _flooded(steps: int, edge_gbps: float | None) -> tuple[float, float]:
    """Return the median iteration before and during the flood."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link = {"bandwidth_gbps": LINE_GBPS, "round_trip_ms": 20}
        pool = document(link, {"transport": "tcp", "streams": 2, "required_gbps": RESERVED_GBPS}, 0, edge_gbps)
        with sites_of(pool, folder) as sites:
            began: list[int] = []

            def at_step(step: int) -> None:
                if step >= steps // 2 and not began:
                    _flood(sites)
                    began.append(step + 2)

            found = train(sites, folder / "crossed", steps, at_step, COMPUTE_S)
    return statistics.median(found.steps_s[3 : began[0] - 2]), statistics.median(found.steps_s[began[0] :])


def _flood(sites: Sites) -> None:
    address = sites.namespaces.sites["hangzhou"].address
    sites.namespaces.run_in(
        "nanjing", [sys.executable, "-c", FLOOD, address, str(2 * LINE_GBPS)], stderr=subprocess.DEVNULL
    )
    time.sleep(0.1)


PARTS = {"killed": killed, "reserved": reserved}


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="one part")
    options = parser.parse_args()
    if why := unavailable_reason(effective_capabilities()):
        raise SystemExit(f"benchmarks.wan_crossing: {why}")
    parts = {name: lambda part=part: part(options.quick) for name, part in PARTS.items()}
    print_rows(run_parts(parts, options.only or list(PARTS)), options.json)


if __name__ == "__main__":
    main()
