"""The command `gateway`: RoCEv2 across the wide-area network."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import PANEL, configure_logging, import_extra
from isthmus.cli.commands.wan.wan_options import address_option, site_pairs
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError
from isthmus.wan import FarSite, GatewayConfig, GatewaySettings, parse_network, read_proxy_key, run_gateway

commands = typer.Typer()


@command(
    commands,
    panel=PANEL,
    examples=[
        (
            "isthmus gateway --site a --near 10.1.0.0/16 --key b=link.key --far b=10.2.0.0/16 --listen 192.0.2.1:4790 "
            "--tun roce0 --gbps 10 --acknowledge-near"
        ),
        (
            "isthmus gateway --site b --near 10.2.0.0/16 --key a=link.key --far a=10.1.0.0/16 --peer a=192.0.2.1:4790 "
            "--tun roce0 --gbps 10 --acknowledge-near --state gateway"
        ),
        (
            "isthmus gateway --site a --near 10.1.0.0/16 --key b=link.key --far b=10.2.0.0/16 --listen 127.0.0.1:4790 "
            "--frames 127.0.0.1:4792 --nic 10.1.0.1=127.0.0.1:4793 --gbps 0.1 --json"
        ),
    ],
)
def gateway(
    env: CliEnvironment,
    site: Annotated[str, typer.Option(metavar="NAME", help="The cluster of this gateway, as the pool names it.")],
    near: Annotated[list[str], typer.Option(metavar="NETWORK", help="Network of this site's NICs. Repeatable.")],
    key: Annotated[list[str], typer.Option(metavar="SITE=FILE", help="Key shared with a site; mode 0600. Repeatable.")],
    far: Annotated[
        list[str], typer.Option(metavar="SITE=NETWORK,...", help="Networks of another site's NICs. Repeatable.")
    ],
    gbps: Annotated[float, typer.Option(metavar="RATE", help="Rate reserved on each link, in Gbit/s.")],
    peer: Annotated[
        list[str] | None, typer.Option(metavar="SITE=HOST:PORT", help="Gateway of a site to dial. Repeatable.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="UDP address for gateways of other sites; port 0: any.")
    ] = "127.0.0.1:0",
    tun: Annotated[
        str | None, typer.Option(metavar="NAME", help="TUN device that the site routes to; needs CAP_NET_ADMIN.")
    ] = None,
    frames: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Loopback UDP address where each datagram is one IP packet of a NIC."),
    ] = None,
    nic: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS=HOST:PORT", help="Loopback address of a NIC, for --frames. Repeatable."),
    ] = None,
    acknowledge_near: Annotated[
        bool,
        typer.Option(
            "--acknowledge-near",
            help="Acknowledge SENDs and WRITEs here; if the far side fails afterwards, the queue pair fails.",
        ),
    ] = False,
    nic_gbps: Annotated[float, typer.Option(metavar="RATE", help="Rate of a NIC of this site, in Gbit/s.")] = 100.0,
    round_trip_ms: Annotated[
        float, typer.Option(metavar="MS", help="Round trip of the links until it is measured.")
    ] = 100.0,
    flow_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Most memory of a queue pair, each way; a few round trips' bytes.")
    ] = 32,
    memory_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Most memory of all queue pairs of a link, each way.")
    ] = 1024,
    tries: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most times that a frame is sent before its queue pair fails.")
    ] = 12,
    real_time: Annotated[
        bool,
        typer.Option(
            "--real-time",
            help="Take real-time priority, before all ordinary processes of the machine; needs CAP_SYS_NICE.",
        ),
    ] = False,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="Folder for gateway.json, written every second.")
    ] = None,
) -> None:
    """Carry RoCEv2 between the NICs of two sites, byte for byte, fast in spite of loss and delay.

    Frames reach the gateway through a TUN device that the site routes to, or in datagrams on loopback. Between the
    sites they are encrypted; only what the link lost is sent again, and NICs get frames in order. NICs are slowed down
    where frames queue. Both sites have the same key file, made by `(umask 077; openssl rand -hex 32 > link.key)`; a
    stranger gets no answer. Linux's RoCE uses one UDP source port in both directions of a queue pair; near
    acknowledgements need that.
    """
    import_extra("isthmus.noise", "agent")
    configure_logging(env)
    networks = {name: [parse_network(one) for one in text.split(",")] for name, text in site_pairs("--far", far)}
    peers = {name: address_option(text) for name, text in site_pairs("--peer", peer or ())}
    keys = {name: read_proxy_key(Path(file)) for name, file in site_pairs("--key", key)}
    if unknown := sorted((networks.keys() | peers.keys()) - keys.keys()):
        raise InputError(f"no key for {', '.join(unknown)}", hint=f"--key {unknown[0]}=FILE; both sites have the file")
    config = GatewayConfig(
        site=site,
        near=[parse_network(one) for one in near],
        sites={
            name: FarSite(key=one, networks=networks.get(name, ()), address=peers.get(name))
            for name, one in keys.items()
        },
        settings=GatewaySettings(
            link_gbps=gbps,
            nic_gbps=nic_gbps,
            acknowledge_near=acknowledge_near,
            round_trip_s=round_trip_ms / 1000,
            max_flow_bytes=flow_mib * 2**20,
            max_total_bytes=memory_mib * 2**20,
            max_tries=tries,
        ),
        listen=address_option(listen, any_port=True),
        frames=None if frames is None else address_option(frames, any_port=True),
        nics={_nic_address(name): address_option(text) for name, text in site_pairs("--nic", nic or ())},
        tun=tun,
    )

    def on_start(found: dict[str, object]) -> None:
        env.answer(
            found,
            lambda: f"gateway of {found['site']} at {found['listen']}, frames of NICs at {found['frames']}",
        )

    final = run_gateway(config, state, on_start, real_time=real_time)
    env.answer(final, lambda: _ended(final))


def _ended(final: dict[str, object]) -> str:
    links = final["links"]
    if not isinstance(links, list):
        return ""
    return "\n".join(
        f"{one['site']}: {one['frames_taken']:,} frames taken, {one['frames_handed']:,} handed over, "
        f"{one['frames_sent_again']:,} sent again, {one['queue_pairs_failed']} queue pairs failed"
        for one in links
    )


def _nic_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise InputError(f"--nic {text!r} is no IP address", hint="such as --nic 10.1.0.1=127.0.0.1:4793") from None
