"""Commands of the wide-area network: proxy, gateway, wan admit, shape, measure, tenants."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import PANEL, configure_logging, import_extra
from isthmus.cli.commands.wan.centre_command import DOMAIN_EXAMPLES, serve_centre, serve_domain
from isthmus.cli.commands.wan.centre_command import EXAMPLES as CENTRE_EXAMPLES
from isthmus.cli.commands.wan.crossings_command import EXAMPLES as CROSSING_EXAMPLES
from isthmus.cli.commands.wan.crossings_command import show_crossings
from isthmus.cli.commands.wan.gateway_command import commands as gateway_commands
from isthmus.cli.commands.wan.measure_command import EXAMPLES, measure_link
from isthmus.cli.commands.wan.tenants_command import EXAMPLES as TENANTS_EXAMPLES
from isthmus.cli.commands.wan.tenants_command import run_tenant_gateway
from isthmus.cli.commands.wan.tunnels_command import EXAMPLES as TUNNEL_EXAMPLES
from isthmus.cli.commands.wan.tunnels_command import show_tunnels
from isthmus.cli.commands.wan.wan_options import address_option, site_pairs
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_model_file
from isthmus.wan import (
    LOOPBACK,
    Admission,
    AdmissionFile,
    Booking,
    EdgeSettings,
    LegTransport,
    ProxyConfig,
    TransferBooking,
    admit_all,
    apply_edge_settings,
    edge_settings,
    follow_edge,
    parse_network,
    read_edge_state,
    read_proxy_key,
    run_proxy,
    write_edge_state,
)

commands = typer.Typer()
wan_commands = typer.Typer(help="Admit, shape and share the wide-area network.", no_args_is_help=False)
commands.add_typer(gateway_commands)
commands.add_typer(wan_commands, name="wan", rich_help_panel="Planning")
command(wan_commands, name="centre", panel=PANEL, examples=CENTRE_EXAMPLES)(serve_centre)
command(wan_commands, name="domain", panel=PANEL, examples=DOMAIN_EXAMPLES)(serve_domain)
command(wan_commands, name="crossings", panel="Planning", examples=CROSSING_EXAMPLES)(show_crossings)
command(wan_commands, name="measure", panel="Planning", examples=EXAMPLES)(measure_link)
command(wan_commands, name="tenants", panel="Planning", examples=TENANTS_EXAMPLES)(run_tenant_gateway)
command(wan_commands, name="tunnels", panel="Planning", examples=TUNNEL_EXAMPLES)(show_tunnels)


@command(
    wan_commands,
    name="admit",
    panel="Planning",
    examples=["isthmus wan admit network.yaml", "isthmus wan admit network.yaml --json"],
)
def admit_paths(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Topology, bookings and requests, as YAML or JSON.")],
) -> None:
    """Book paths for the requests and transfers of a file, in their order, or say why one has none.

    A path keeps bandwidth, delay, jitter and loss for the whole time of a request, across layers and domains; a
    transfer gets the rates at which its bytes arrive by its deadline, and gives way to training. Bookings on pipes that
    are `down` are moved first. No pipe is ever booked beyond its capacity. It changes no file and needs no server:
    `booked` and `booked_transfers` of the answer are what the next file may state. The exit status is 1 if a request is
    refused.
    """
    answer = admit_all(load_model_file(file, AdmissionFile))
    env.answer(answer, lambda: _admission_text(answer))
    if answer.refused:
        raise typer.Exit(1)


@command(
    wan_commands,
    name="shape",
    panel="Planning",
    examples=[
        "isthmus wan shape booked.json --node nanjing --gbps 10",
        "isthmus wan shape booked.json --node nanjing --gbps 10 --at 3600 --json",
        "isthmus wan shape booked.json --node nanjing --gbps 10 --apply eth0 --state edge.json",
        "isthmus wan shape promises.json --node nanjing --gbps 10 --apply eth0 --follow",
    ],
)
def shape_edge(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Bookings, as `isthmus wan admit --json` prints.")],
    node: Annotated[str, typer.Option(metavar="NODE", help="The edge node that sends.")],
    gbps: Annotated[float, typer.Option(metavar="GBPS", min=1e-6, max=1e6, help="What its device sends at most.")],
    at: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time, on the clock of the bookings.")] = 0.0,
    apply: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Set them on this network device; needs root.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with what is set; with it only what has changed is set again."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on: apply what changes in FILE, and with the time since the epoch.")
    ] = False,
) -> None:
    """Print, or set, the rates at which an edge sends: each booking's own, and what is left for all other packets.

    A booking that begins at the node has a class of its rate, for the packets that its `flows` match, at the time
    given. They can be given to the kernel (htb classes and u32 filters) with --apply; classes whose rate stays, and
    those whose rate changes, lose no packet. Without root, `isthmus links --promises` enforces the same on emulated
    links.
    """
    if state is not None and apply is None:
        raise InputError("--state without --apply", hint="name the device whose settings the file states")
    if follow and apply is None:
        raise InputError("--follow without --apply", hint="name the device to keep at what is booked")
    admission = load_model_file(file, Admission)
    before = read_edge_state(state, apply) if state is not None and apply is not None else None
    if follow and apply is not None:
        _follow_edge(env, file, node, gbps, apply, state, before)
        return
    settings = edge_settings(admission.all_booked, node, at, gbps, before)
    if apply is not None:
        apply_edge_settings(apply, before, settings)
        if state is not None:
            write_edge_state(state, apply, settings)
    env.answer(dataclasses.asdict(settings), lambda: _settings_text(settings, apply))


def _follow_edge(
    env: CliEnvironment,
    file: Path,
    node: str,
    gbps: float,
    device: str,
    state: Path | None,
    before: EdgeSettings | None,
) -> None:
    """Apply changes until SIGTERM or SIGINT; print each."""
    configure_logging(env)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def read() -> tuple[Booking | TransferBooking, ...]:
        admission = load_model_file(file, Admission)
        return admission.all_booked

    def change(old: EdgeSettings | None, new: EdgeSettings) -> None:
        apply_edge_settings(device, old, new)
        if state is not None:
            write_edge_state(state, device, new)
        env.answer(dataclasses.asdict(new), lambda: _settings_text(new, device))

    follow_edge(read, change, stop.wait, time.time, node, gbps, before)


def _settings_text(settings: EdgeSettings, device: str | None) -> str:
    lines = [f"set on {device}:" if device else "not set (--apply DEVICE sets them):"]
    for one in settings.classes:
        num_filters = sum(found.minor == one.minor for found in settings.filters)
        most = "" if one.rate_kbps == one.ceil_kbps else f", up to {one.ceil_kbps / 1e6:g}"
        lines.append(f"1:{one.minor:x} {one.name}: {one.rate_kbps / 1e6:g} Gbit/s{most}, {num_filters} filters")
    return "\n".join(lines)


def _admission_text(answer: Admission) -> str:
    lines = [
        f"{one.request.name}: {' > '.join(one.pipes)}, {one.request.bandwidth_gbps:g} Gbit/s, {one.delay_ms:g} ms"
        for one in answer.admitted
    ]
    lines += [
        f"{one.request.name}: {' > '.join(one.pipes)}, {len(one.segments)} rates, sent by {one.end_s:g} s"
        for one in answer.transfers
    ]
    lines += [f"{name}: moved to another path" for name in answer.moved]
    lines += [f"{one.name}: refused, {one.reason}" for one in answer.refused]
    return "\n".join(lines) or "the file has no requests"


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus proxy --site hangzhou --key nanjing=link.key --listen 10.0.0.2:7400 --allow 10.2.0.0/16 --state proxy",
        "isthmus proxy --site nanjing --key hangzhou=link.key --peer hangzhou=10.0.0.2:7400 --state proxy --json",
        "isthmus proxy --site b --key a=link.key --peer a=10.0.0.2:7400 --redirect a=10.2.0.0/16 --state proxy",
    ],
)
def proxy(
    env: CliEnvironment,
    site: Annotated[str, typer.Option(metavar="NAME", help="The cluster of this proxy, as the pool names it.")],
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="Folder for routes.json and proxy.json.")],
    key: Annotated[list[str], typer.Option(metavar="SITE=FILE", help="Key shared with a site; mode 0600. Repeatable.")],
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE=HOST:PORT,...",
            help="Proxies of a site to dial; connections are balanced over several. Repeatable.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where proxies of other sites dial this one; port 0: any.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Network that other sites may reach through it (default: loopback)."),
    ] = None,
    workers: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address of the routes for workers of this site.")
    ] = "127.0.0.1",
    clients: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Network whose hosts may use the routes (default: loopback)."),
    ] = None,
    legs: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Legs to each proxy.")] = 2,
    transport: Annotated[
        LegTransport,
        typer.Option(
            metavar="tcp|datagram",
            help="What the legs are: TCP streams, or UDP datagrams, whose rate does not follow loss.",
        ),
    ] = "tcp",
    error_correction: Annotated[
        bool,
        typer.Option(
            "--error-correction",
            help="Send parity with datagrams, so that lost packets are repaired without a round trip.",
        ),
    ] = False,
    redirect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE=NETWORK,...",
            help="Networks of a site whose connections come here without a route (root; Linux). Repeatable.",
        ),
    ] = None,
) -> None:
    """Carry the connections of a site's workers across the wide-area link, fast in spite of loss.

    A worker's connection ends at the proxy of its own site and goes on from the proxy of the other one; between the
    two it is encrypted and striped over several legs: TCP streams with BBR, or datagrams to the same UDP port. If legs
    break, new ones carry on: the workers notice nothing for up to a minute. Both sides have the same key file, made by
    `(umask 077; openssl rand -hex 32 > link.key)`; a stranger gets no byte. Agents read the routes by
    `isthmus agent --routes DIR/routes.json`; with `--redirect` the kernel hands the proxy each connection that a worker
    of this host, or of a host of `--clients` that it routes, opens to the other site's own addresses.
    """
    import_extra("isthmus.noise", "agent")
    configure_logging(env)
    config = ProxyConfig(
        site=site,
        peers={
            name: [address_option(one) for one in text.split(",")] for name, text in site_pairs("--peer", peer or ())
        },
        keys={name: read_proxy_key(Path(file)) for name, file in site_pairs("--key", key)},
        listen=None if listen is None else address_option(listen, any_port=True),
        workers=workers,
        num_legs=legs,
        transport=transport,
        error_correction=error_correction,
        redirect={
            name: [parse_network(one) for one in text.split(",")]
            for name, text in site_pairs("--redirect", redirect or ())
        },
        clients=[parse_network(one) for one in clients] if clients else LOOPBACK,
        allow=[parse_network(one) for one in allow] if allow else LOOPBACK,
    )

    def on_start(found: dict[str, object]) -> None:
        env.answer(found, lambda: _started(found, state))

    final = run_proxy(config, state, on_start)
    env.answer(final, lambda: _ended(final))


def _started(found: dict[str, object], state: Path) -> str:
    lines = [f"proxy of {found['site']}" + (f" listening at {found['listen']}" if found["listen"] else "")]
    routes = found["routes"]
    if isinstance(routes, dict):
        lines += [f"route to {name}: {address}" for name, address in routes.items()]
    if routes:
        lines.append(f"routes for `isthmus agent --routes`: {state / 'routes.json'}")
    return "\n".join(lines)


def _ended(final: dict[str, object]) -> str:
    tunnels = final["tunnels"]
    if not isinstance(tunnels, list) or not tunnels:
        return "no tunnel was open"
    return "\n".join(
        f"{one['peer']} ({one['direction']}): {one['sent_bytes']:,} bytes sent, {one['received_bytes']:,} received, "
        f"{one['legs_lost']} legs lost, {one['frames_again']} frames sent again"
        for one in tunnels
    )
