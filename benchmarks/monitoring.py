"""A scrape of the server's metrics: `python -m benchmarks.monitoring [--json] [--quick]`.

A real server, over HTTP, has sites with ten node groups each, so that `/metrics` has 10,000 series; one client scrapes
it again and again, as Prometheus does. The time is that of the whole answer, the CPU that of the server's process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.console import percentile
from benchmarks.table import Row, print_rows
from benchmarks.wan_links import cpu_s
from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.server.server_config import open_store
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import AgentReported
from isthmus.core.messages.agent_messages import AgentReport
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Cluster, NodeGroup, VirtualChip

SITES, GROUPS = 420, 10
SCRAPES, QUICK_SCRAPES = 200, 20
MAX_SCRAPE_S = 0.1


def reported(number: int) -> AgentReported:
    """Return the report of a site with `GROUPS` node groups."""
    one = {"chip": "H20", "nodes": 4, "chips_per_node": 8, "virtual": VirtualChip()}
    groups = tuple(NodeGroup.model_validate(one | {"name": f"group-{i}"}) for i in range(GROUPS))
    site = Cluster(name=f"site-{number}", owner=f"owner-{number % 50}", node_groups=groups)
    fields = {"cluster": site, "incarnation": "i", "free_chips": {group.name: 16 for group in groups}}
    return AgentReported.from_report(AgentReport.model_validate(fields | {"free_storage_bytes": 10**12}), time.time())


def _no_plans(_: PlanRequest) -> PlanSet:
    return PlanSet(plans=())


def _serve(state: str, told: Any) -> None:
    config = ServerConfig(state=Path(state), port=0, rules=CoordinatorConfig(agent_timeout_s=1e6))
    stop = threading.Event()

    def announce(listening: ServerInfo) -> None:
        told.send(listening.url)

    run_server(config, announce, stop=stop, planner=_no_plans)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Run a server with the sites; yield its URL, its admin token and its process id."""
    store = open_store(ServerConfig(state=folder))
    store.append([reported(number) for number in range(SITES)])
    store.close()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(str(folder), there))
    process.start()
    try:
        assert here.poll(60), "the server did not start"
        yield here.recv(), (folder / "admin.token").read_text().strip(), process.pid or 0
    finally:
        process.terminate()
        process.join(20)


def measure(num_scrapes: int) -> list[Row]:
    """Return the rows of a number of scrapes."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, token, pid = stack.enter_context(served(Path(folder)))
        client = stack.enter_context(httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=30))
        text = client.get(f"{url}/metrics").text
        num_series = sum(not line.startswith("#") for line in text.splitlines())
        took, before_s = list[float](), cpu_s(pid)
        for _ in range(num_scrapes):
            begun_s = time.perf_counter()
            client.get(f"{url}/metrics").raise_for_status()
            took.append(time.perf_counter() - begun_s)
        each_s = (cpu_s(pid) - before_s) / num_scrapes
    p99_s, what = percentile(took, 0.99), f"a scrape of {num_series:,} series, {num_scrapes} scrapes"
    return [
        Row(
            what=f"{what}: p99 (median {percentile(took, 0.5) * 1e3:.0f} ms)",
            ours=p99_s * 1e3, unit="ms", target="100", met=p99_s <= MAX_SCRAPE_S,
        ),
        Row(what=f"{what}: CPU of the server, each", ours=each_s * 1e3, unit="ms"),
    ]  # fmt: skip


def main() -> int:
    """Print the rows; the exit status tells whether the target is met."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SCRAPES} scrapes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    rows = measure(QUICK_SCRAPES if options.quick else SCRAPES)
    print_rows(rows, options.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
