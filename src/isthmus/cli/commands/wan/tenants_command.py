"""`run_tenant_gateway`, the command `isthmus wan tenants`: tenants with equal addresses over one network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.commands.process_setup import configure_logging
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError
from isthmus.wan import CarriedIn, TenantsFile, probe_tenancy, read_tenants, run_tenants

EXAMPLES = [
    "isthmus wan tenants tenants.yaml",
    "isthmus wan tenants tenants.yaml --check --json",
    "isthmus wan tenants tenants.yaml --run --trunk eth1 --device eth0 --state tenants",
    "isthmus wan tenants --schema",
]


def run_tenant_gateway(
    env: CliEnvironment,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Tenants and gateways, as YAML or JSON.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run the gateway of `site` until Ctrl-C; needs root.")] = False,
    trunk: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device with tenants' frames under their VLAN tags.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device towards the other sites, to give each tenant its rate.")
    ] = None,
    carried_in: Annotated[
        CarriedIn, typer.Option(metavar="WHERE", help="What carries flows after their first frame, where it can.")
    ] = CarriedIn.AUTO,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="Folder for tenants.json, written every second.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what this machine has of what a gateway needs, and what still works.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of FILE.")] = False,
) -> None:
    """Let tenants with equal addresses share a network: each under its own VNI, VLAN, class and rules of ports.

    Without --run it checks the file and prints what each tenant gets, without root. With --run it carries frames of
    the trunk's VLANs, and of tenants' own devices, to the gateways of other sites in VXLAN, and follows the file: a
    bandwidth changes in place, and rules at once. Frames of other VLANs, VNIs, gateways, addresses and ports are
    dropped and counted. The network between gateways has to be private, or their packets encrypted below (IPsec,
    WireGuard): VXLAN proves nothing.
    """
    if schema:
        env.print_json(TenantsFile.model_json_schema(by_alias=True))
        return
    if file is None:
        raise InputError("no file of tenants", hint="`isthmus wan tenants tenants.yaml`; --schema says what it holds")
    if not run and (trunk is not None or device is not None or state is not None):
        raise InputError("--trunk, --device and --state without --run", hint="add --run to carry frames")
    tenants = read_tenants(file)
    if check:
        found = probe_tenancy()
        env.answer({"features": [one.as_json() for one in found]}, lambda: "\n".join(one.text() for one in found))
        return
    if not run:
        env.answer(_plan(tenants), lambda: _plan_text(tenants))
        return
    configure_logging(env)

    def on_start(started: dict[str, Any]) -> None:
        env.answer(
            started,
            lambda: f"gateway of {started['site']}: {started['num_tenants']} tenants, by {started['carried_by']}",
        )

    final = run_tenants(
        file,
        trunk=trunk,
        device=device,
        carried_in=carried_in,
        state_folder=state,
        on_start=on_start,
    )
    env.answer(final, lambda: _ended(final))


def _plan(file: TenantsFile) -> dict[str, Any]:
    return {
        "site": file.site,
        "gateway": str(file.gateways[file.site]),
        "control_vni": file.control.vni,
        "max_packet_bytes": file.max_tenant_bytes - 14,
        "tenants": [one.model_dump(mode="json", by_alias=True) for one in file.tenants],
    }


def _plan_text(file: TenantsFile) -> str:
    where = f"gateway of {file.site} at {file.gateways[file.site]}:{file.port}"
    control = f"control VNI {file.control.vni}, {file.control.gbps:g} Gbit/s"
    lines = [f"{where}; {control}; packets of tenants up to {file.max_tenant_bytes - 14} bytes"]
    for one in file.tenants:
        most = f", up to {one.max_gbps:g}" if one.max_gbps is not None and one.max_gbps != one.gbps else ""
        networks = "; ".join(f"{site} {', '.join(map(str, nets))}" for site, nets in one.networks.items())
        at = f"device {one.port}" if one.port else f"VLAN {one.vlan}"
        lines.append(f"{one.name}: VNI {one.vni}, {at}, {one.service}, {one.gbps:g} Gbit/s{most}; {networks}")
    return "\n".join(lines)


def _ended(final: dict[str, Any]) -> str:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(final["dropped"].items())) or "none"
    return (
        f"{final['frames_sent']:,} frames sent by the process, {final['frames_handed']:,} handed over, "
        f"{final['frames_by_tcp']:,} by TCP; dropped: {dropped}; strangers filtered: {final['strangers_filtered']:,}"
    )
