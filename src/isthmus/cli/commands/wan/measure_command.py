"""`measure_link`, the command `isthmus wan measure`: round trip and rate of a connection to another site."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan import answer_probe, dial, listen_for_probes, parse_address, probe_link, read_route

MAX_TRIES = 100


EXAMPLES = [
    "isthmus wan measure --listen 127.0.0.1:7500",
    "isthmus wan measure 127.0.0.1:7500 --routes proxy/routes.json --from nanjing --to hangzhou",
    "isthmus wan measure 10.0.0.2:7500 --tries 5 --json",
]


def measure_link(
    env: CliEnvironment,
    address: Annotated[str | None, typer.Argument(metavar="HOST:PORT", help="Where `--listen` runs.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Answer measurements here, until Ctrl-C.")
    ] = None,
    routes: Annotated[Path | None, typer.Option(metavar="FILE", help="Go by a route: routes.json of a proxy.")] = None,
    source: Annotated[str | None, typer.Option("--from", metavar="SITE", help="The site of this machine.")] = None,
    target: Annotated[str | None, typer.Option("--to", metavar="SITE", help="The site to measure to.")] = None,
    tries: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_TRIES, help="Connections, one by one.")] = 3,
    limit: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=600, help="Of one connection.")] = 20.0,
) -> None:
    """Measure the round trip and the rate of one TCP connection to another site.

    Start it with --listen at the other site, then here with its address; --routes goes through the proxy or the
    emulated link that workers take. The rate is that of a quarter of a second of data; the best of the tries counts.
    Anyone who reaches the listener may measure, so it listens on loopback unless you name another address.
    """
    if (address is None) == (listen is None):
        raise InputError("name the address to measure to, or --listen", hint="see `isthmus wan measure --help`")
    if listen is not None:
        with listen_for_probes(parse_address(listen)) as listener:
            where = "{}:{}".format(*listener.getsockname()[:2])
            env.answer({"listening": where}, lambda: f"answering measurements at {where}")
            _answer_all(listener, limit)
    route = None
    if routes is not None:
        if source is None or target is None:
            raise InputError("--routes without --from and --to", hint="name both sites, as routes.json does")
        route = read_route(routes, source, target)
    found = [_measured(parse_address(address or ""), route, limit) for _ in range(tries)]
    best: dict[str, Any] = {
        "address": address,
        "route": route,
        "round_trip_ms": min(round_trip_s for round_trip_s, _ in found) * 1e3,
        "gbps": max(gbps for _, gbps in found),
        "tries_gbps": [gbps for _, gbps in found],
    }
    env.answer(best, lambda: f"round trip {best['round_trip_ms']:.2f} ms, {best['gbps']:.3g} Gbit/s")


def _measured(address: tuple[str, int], route: str | None, limit_s: float) -> tuple[float, float]:
    with dial(address, route, limit_s) as connection:
        try:
            return probe_link(connection, limit_s)
        except OSError as error:
            raise UnavailableError(
                f"{address[0]}:{address[1]} does not answer: {error}", hint="start `isthmus wan measure --listen` there"
            ) from error


def _answer_all(listener: socket.socket, limit_s: float) -> None:
    """Answer one caller after the other; each has `limit_s`."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                answer_probe(connection, limit_s)
            except OSError:
                continue
