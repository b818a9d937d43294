"""Connections that the kernel hands to the proxy: the rules, what contradicts itself, and a real redirection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core.errors import InputError
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason
from isthmus.wan.proxy.proxy_config import ProxyConfig, parse_network
from isthmus.wan.proxy.redirect_rules import RedirectRules
from tests.wan.lab import pool_of, wait_until

WHY = unavailable_reason(effective_capabilities())
KEY = bytes(range(32))


def rules(**changes: object) -> RedirectRules:
    """Rules of nanjing for hangzhou's network."""
    given = {
        "site": "nanjing",
        "sites": {"hangzhou": [parse_network("10.2.0.0/16")], "wuhan": [parse_network("fd00:3::/32")]},
        "port": 7001,
        "exempt": [("10.2.0.9", 7400)],
        "clients": [parse_network("127.0.0.0/8"), parse_network("10.1.0.0/16")],
    }
    return RedirectRules(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.attack
def test_rules_take_this_hosts_connections_and_those_of_clients() -> None:
    """Those to the proxies themselves stay; a network of other hosts is taken only where clients name it."""
    lines = [line.strip() for line in rules().script().splitlines()]
    match = "ip daddr 10.2.0.0/16 meta l4proto tcp ip daddr . tcp dport != { 10.2.0.9 . 7400 }"
    taken = f"tproxy ip to :7001 meta mark set {rules().mark:#x} accept"
    assert f'iifname "lo" {match} {taken}' in lines
    assert f"ip saddr {{ 10.1.0.0/16 }} {match} {taken}" in lines
    assert f"{match} meta mark set {rules().mark:#x}" in lines
    assert [line for line in lines if "ip6 saddr" in line] == [], "no client has an IPv6 network"
    assert lines[1] == f"delete table inet {rules().table}", "an earlier proxy's table goes in the same step"


def test_routes_are_taken_back_one_by_one() -> None:
    """Each family has a rule and a route in a table of this site's own."""
    assert [one[:2] for one in rules().routes()] == [["-4", "rule"], ["-4", "route"], ["-6", "rule"], ["-6", "route"]]
    assert [one[:2] + one[3:] for one in rules().undo()] == [one[:2] + one[3:] for one in rules().routes()]
    assert rules().mark != rules(site="wuhan").mark


@pytest.mark.attack
@pytest.mark.parametrize(
    ("address", "site"), [("10.2.255.1", "hangzhou"), ("fd00:3::1", "wuhan"), ("10.3.0.1", None), ("::1", None)]
)
def test_an_address_belongs_to_the_site_whose_network_has_it(address: str, site: str | None) -> None:
    """And to none otherwise: such a connection is closed."""
    assert rules().site_of(address) == site


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ({"a": [parse_network("10.0.0.0/8")], "b": [parse_network("10.2.0.0/16")]}, "10.0.0.0/8 of a and 10.2.0.0/16"),
        ({"a": [parse_network("127.0.0.0/16")]}, "holds this host itself"),
        ({"a": [parse_network("0.0.0.0/0")]}, "holds this host itself"),
    ],
)
def test_networks_that_contradict_each_other_are_refused(sites: dict[str, list[object]], words: str) -> None:
    """The error names both."""
    with pytest.raises(InputError, match=words):
        rules(sites=sites)


def test_a_site_without_a_proxy_cannot_be_redirected() -> None:
    """Nothing would carry its connections."""
    with pytest.raises(InputError, match="connections to b are redirected"):
        ProxyConfig("a", {}, {"b": KEY}, listen=("127.0.0.1", 0), redirect={"b": [parse_network("10.2.0.0/16")]})


SERVE = """
import socket
with socket.create_server(("0.0.0.0", 5001)) as listener:
    print("up", flush=True)
    while True:
        connection, address = listener.accept()
        with connection:
            connection.sendall((address[0] + " " + connection.recv(100).decode()).encode())
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    connection.sendall(b"hello")
    print(connection.getpeername()[0], connection.recv(100).decode())
"""


def started(namespaces: Namespaces, site: str, state: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the proxy of a site; return once it listens."""
    argv = [sys.executable, "-m", "isthmus", "proxy", "--site", site, "--state", str(state / site), *options]
    process = namespaces.run_in(site, argv, stdout=subprocess.DEVNULL)
    wait_until((state / site / "routes.json").exists)
    return process


def tunnels(state: Path) -> list[dict[str, int]]:
    """Return the tunnels that a proxy writes down every second."""
    found: list[dict[str, int]] = json.loads(state.read_text())["tunnels"] if state.exists() else []
    return found


def asked(namespaces: Namespaces, address: str, port: int) -> str:
    """Dial from site a; return what the program prints."""
    process = namespaces.run_in("a", [sys.executable, "-c", ASK, address, str(port)], stdout=subprocess.PIPE, text=True)
    return str(process.communicate(timeout=60)[0]).strip()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run: sudo .venv/bin/python -m pytest -m root tests/wan")
def test_the_kernel_hands_connections_to_the_proxy(tmp_path: Path) -> None:
    """1. A program dials the other site's address and knows no proxy. 2. Its bytes go through the tunnel. 3. The proxy
    ends: its rules are gone, and the same program reaches the other site by itself.
    """
    key = tmp_path / "link.key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    with emulated_namespaces(pool_of({"between": ["a", "b"], "bandwidth_gbps": 1, "delay_ms": 5})) as namespaces:
        far, near = namespaces.sites["b"].address, namespaces.sites["a"].address
        server = namespaces.run_in("b", [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        server.stdout.close()
        there = f"{far}:7400"
        started(namespaces, "b", tmp_path, "--key", f"a={key}", "--listen", there, "--allow", f"{far}/32")
        options = ["--key", f"b={key}", "--peer", f"b={there}", "--redirect", f"b={far}/32"]
        proxy = started(namespaces, "a", tmp_path, *options)
        assert asked(namespaces, far, 5001) == f"{far} {far} hello", (
            "the far proxy, at the far site, dialled the server"
        )
        wait_until(lambda: any(one["received_bytes"] for one in tunnels(tmp_path / "b" / "proxy.json")))
        proxy.terminate()
        assert proxy.wait(20) == 0
        assert asked(namespaces, far, 5001) == f"{far} {near} hello", "its rules are gone: the connection is direct"
