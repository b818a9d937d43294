"""The command that compares synchronisation strategies by bytes and simulated seconds: strategies."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.core.errors import InputError
from isthmus.core.units import format_bytes, format_seconds, parse_bytes
from isthmus.sim import SyncCluster, SyncTime, sync_seconds
from isthmus.strategies import STRATEGIES, ElementCounts, check_steps, steps

commands = typer.Typer()
PANEL = "Know before you run"
MAX_WORKERS = 256
"""Most workers that are compared: every step is proved, and those of a ring grow with the square of its members."""


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus strategies",
        "isthmus strategies --hosts 8 --chips 8 --bytes 1GB --network-gbps 100 --ring-gbps 400",
        "isthmus strategies --network-gbps 1 --delay-ms 10 --bytes 64KiB --json | jq '.strategies.ring'",
    ],
)
def strategies(
    env: CliEnvironment,
    hosts: Annotated[int, typer.Option(min=1, metavar="N", help="Hosts with one network card each.")] = 4,
    chips: Annotated[int, typer.Option(min=1, metavar="N", help="Chips of a host, in a ring.")] = 4,
    aggregators: Annotated[int, typer.Option(min=1, metavar="N", help="Parameter servers or switches.")] = 1,
    num_bytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Gradients of each chip, such as 64MiB.")
    ] = "64MiB",
    network_gbps: Annotated[float, typer.Option(metavar="G", help="Rate of a host's card, in Gbit/s.")] = 10.0,
    ring_gbps: Annotated[float, typer.Option(metavar="G", help="Rate of the ring inside a host, in Gbit/s.")] = 128.0,
    delay_ms: Annotated[float, typer.Option(min=0, metavar="MS", help="One message between hosts, in ms.")] = 0.0,
) -> None:
    """Compare synchronisation strategies: bytes of each host and aggregator, rounds, simulated seconds, what binds.

    Every strategy's steps are proved first: each contribution once, the whole sum at every worker.
    """
    if hosts * chips > MAX_WORKERS:
        raise InputError(f"{hosts * chips} workers", hint=f"at most {MAX_WORKERS}")
    if not min(network_gbps, ring_gbps) > 0:
        raise InputError(f"rates {network_gbps} and {ring_gbps} Gbit/s", hint="rates must be above 0")
    size = parse_bytes(num_bytes)
    if not isinstance(size, int):
        raise InputError(f"--bytes '{num_bytes}' is not a size", hint="give one such as 64MiB or 1e9")
    network, ring = network_gbps * 1e9 / 8, ring_gbps * 1e9 / 8
    cluster = SyncCluster(
        num_servers=hosts, chips_per_server=chips, num_aggregators=aggregators, pcie_bytes_per_s=ring,
        upi_bytes_per_s=ring, nic_bytes_per_s=network, link_bytes_per_s=network, network_delay_s=delay_ms / 1e3,
    )  # fmt: skip
    elements = 2 * hosts * chips * aggregators
    found = {
        name: (check_steps(steps(name, hosts, chips, elements, num_aggregators=aggregators)),
               sync_seconds(name, size, cluster))
        for name in STRATEGIES
    }  # fmt: skip
    each = size / elements
    answer = {"bytes": size, "strategies": {name: _as_dict(*one, each) for name, one in found.items()}}

    def show() -> object:
        columns = ("strategy", "a host sends", "an aggregator sends", "rounds", "time", "bound")
        rows = [
            (
                name,
                format_bytes(max(counts.sent_by_host) * each),
                format_bytes(max(counts.sent_by_aggregator) * each) if counts.sent_by_aggregator else "-",
                str(counts.num_rounds),
                format_seconds(time.total_s),
                time.bound,
            )
            for name, (counts, time) in found.items()
        ]
        return table("", columns, rows, "a host sends|an aggregator sends|rounds|time")

    env.answer(answer, show)


def _as_dict(counts: ElementCounts, time: SyncTime, element_bytes: float) -> dict[str, object]:
    return {
        "sent_bytes_by_host": [count * element_bytes for count in counts.sent_by_host],
        "received_bytes_by_host": [count * element_bytes for count in counts.received_by_host],
        "sent_bytes_by_aggregator": [count * element_bytes for count in counts.sent_by_aggregator],
        "received_bytes_by_aggregator": [count * element_bytes for count in counts.received_by_aggregator],
        "rounds": counts.num_rounds,
        "seconds": time.total_s,
        "bound": time.bound,
    }
