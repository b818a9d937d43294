"""`wide_area`: what `isthmus demo --wan` puts between its clusters, and what has crossed it."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from isthmus.cli.demo.demo_sites import DemoSites
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.pool import Pool
from isthmus.wan import Namespaces, effective_capabilities, emulated_namespaces, management_network, unavailable_reason

WanMode = Literal["proxy", "gateway"]
LOSS = 1e-3
"""Packet loss of the demo's links with `--wan`."""

DIRECT_FILE = "pool-direct.yaml"
"""The pool without crossings, for the run beside which the losses are compared."""

JUMBO_BYTES = 9000
GATEWAY_GBPS = 0.1


@dataclass(frozen=True)
class WideArea:
    """The pool with crossings, where its sites are, and what could not be had."""

    folder: Path
    pool: Pool
    mode: WanMode
    sites: DemoSites | None = None
    note: str = ""

    def crossed(self) -> list[dict[str, Any]]:
        """Return what each tunnel and gateway has carried, as their files of the last second say."""
        found: list[dict[str, Any]] = []
        for cluster in self.pool.clusters:
            parts = self.folder / cluster.name / "crossings"
            for tunnel in _read(parts / "proxy" / "proxy.json").get("tunnels", ()):
                if tunnel["direction"] == "dialled":
                    found.append(
                        {"from": cluster.name, "to": tunnel["peer"], "by": "proxy", "streams": tunnel["legs"]}
                        | {name: tunnel[name] for name in ("sent_bytes", "received_bytes", "frames_again")}
                    )
            for file in sorted(parts.glob("gateway-*/gateway.json")):
                found += [
                    {"from": cluster.name, "to": link["site"], "by": file.parent.name}
                    | {name: link[name] for name in ("frames_taken", "frames_handed", "frames_sent_again")}
                    for link in _read(file).get("links", ())
                ]
        return found


@contextmanager
def wide_area(folder: Path, pool: Pool, mode: WanMode) -> Iterator[WideArea]:
    """Emulate the links of `pool` so that its sites reach each other through proxies or gateways only.

    As root the sites are network namespaces, between which packets are really lost. Without root, connections between
    proxies cross modelled links; RoCE gateways, whose datagrams need packets, then give way to proxies, and `note` says
    so. `pool.yaml` in `folder` states the crossings, and `DIRECT_FILE` does not.
    """
    reason = unavailable_reason(effective_capabilities())
    note = ""
    if reason is not None:
        note = f"{reason}; links are modelled"
        if mode == "gateway":
            mode, note = "proxy", f"{note}, which pass no datagrams of RoCE gateways: proxies carry the connections"
    links = [
        link.model_copy(update={"loss": LOSS, "mtu_bytes": JUMBO_BYTES if mode == "gateway" else link.mtu_bytes})
        for link in pool.links
    ]
    pool = pool.model_copy(update={"links": tuple(links)})
    with ExitStack() as stack:
        sites, addresses = None, {cluster.name: "127.0.0.1" for cluster in pool.clusters}
        if reason is None:
            namespaces = stack.enter_context(emulated_namespaces(pool))
            addresses = {name: site.address for name, site in namespaces.sites.items()}
            sites = _sites(namespaces, stack)
        _write_keys(folder, pool)
        document = _with_crossings(pool, mode, addresses, sites.hosts if sites is not None else {})
        write_atomically(folder / "pool.yaml", yaml.safe_dump(document, sort_keys=False))
        direct = {**document, "links": [_without_crossing(link) for link in document["links"]]}
        write_atomically(folder / DIRECT_FILE, yaml.safe_dump(direct, sort_keys=False))
        yield WideArea(folder, Pool.model_validate(document), mode, sites, note)


def _sites(namespaces: Namespaces, stack: ExitStack) -> DemoSites:
    network = stack.enter_context(management_network(namespaces))
    return DemoSites(
        server_host=network.server,
        prefixes={name: ("ip", "netns", "exec", one.namespace) for name, one in namespaces.sites.items()},
        hosts=network.sites,
    )


def _write_keys(folder: Path, pool: Pool) -> None:
    for link in pool.links:
        file = folder / _key_of(link.source, link.target)
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_hex(32) + "\n", encoding="ascii")


def _key_of(source: str, target: str) -> str:
    return "-".join(sorted((source, target))) + ".key"


def _with_crossings(
    pool: Pool, mode: WanMode, addresses: Mapping[str, str], workers: Mapping[str, str]
) -> dict[str, Any]:
    """Return the document of the pool with proxies, or gateways too, at each site."""
    document = pool.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for number, cluster in enumerate(document["clusters"]):
        address = addresses[cluster["name"]]
        is_shared = address == "127.0.0.1"
        access: dict[str, Any] = {"proxy": {"listen": f"{address}:{_free_port() if is_shared else 7400}"}}
        if cluster["name"] in workers:
            access["proxy"]["allow"] = [workers[cluster["name"]]]
        if mode == "gateway":
            gateway = {"name": "g1", "listen": f"{address}:4790", "networks": [f"10.215.{number}.0/24"]}
            access["gateways"] = [gateway | {"roce_gbps": GATEWAY_GBPS}]
        cluster["access"] = access
    for link in document["links"]:
        transport = "roce" if mode == "gateway" else "tcp"
        link["crossing"] = {"key": _key_of(link["from"], link["to"]), "transport": transport}
    return document


def _without_crossing(link: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in link.items() if name != "crossing"}


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
