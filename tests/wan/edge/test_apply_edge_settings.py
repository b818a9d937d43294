"""The kernel's queueing (root): a booked flow has its rate beside one that takes all it gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core.errors import IsthmusError
from isthmus.wan.edge.apply_edge_settings import apply_edge_settings
from isthmus.wan.edge.edge_settings import edge_settings
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason
from tests.wan.edge.test_edge_settings import booking
from tests.wan.lab import pool_of

WHY = unavailable_reason(effective_capabilities())
needs_root = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run: sudo .venv/bin/python -m pytest -m root tests/wan"),
]

SINK = """
import socket, sys, threading, time
def serve(port):
    with socket.create_server(("0.0.0.0", port)) as listener:
        print("up\\n", end="", flush=True)
        connection, _ = listener.accept()
        start, num_bytes = None, 0
        while data := connection.recv(1 << 16):
            now = time.monotonic()
            start = start or now
            if now - start > 1:
                num_bytes += len(data)
            if now - start > 3:
                break
        print(port, num_bytes * 8 / 2e6, flush=True)
threads = [threading.Thread(target=serve, args=(port,)) for port in (5001, 5002)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
SOURCE = """
import socket, sys, time
end = time.monotonic() + 4
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while time.monotonic() < end:
        try:
            connection.sendall(bytes(1 << 16))
        except OSError:
            break
"""


def rates_mbps(namespaces: Namespaces) -> dict[str, float]:
    """Return what arrives of two connections that both send all they can, by port."""
    sink = namespaces.run_in("b", [sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    assert sink.stdout is not None
    assert [sink.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    for port in ("5001", "5002"):
        namespaces.run_in("a", [sys.executable, "-c", SOURCE, namespaces.sites["b"].address, port])
    output, _ = sink.communicate(timeout=30)
    return {port: float(mbps) for port, mbps in (line.split() for line in output.splitlines())}


def promised(folder: Path, gbps: float) -> Path:
    """Return a file with one booking of the flow to port 5001."""
    one = booking("r", gbps, {"protocol": "tcp", "to_port": 5001})
    answer = {"admitted": [], "refused": [], "booked": [one.model_dump(by_alias=True, mode="json")]}
    file = folder / "booked.json"
    file.write_text(json.dumps(answer))
    return file


class TestInNamespaces:
    pytestmark = needs_root

    def test_a_booked_flow_has_its_rate_and_a_change_takes_effect_in_place(self, tmp_path: Path) -> None:
        """40 of 50 Mbit/s beside a flow that sends all it can, then 10: what is not booked is shared by others."""
        pytest.importorskip("pyroute2")
        pool = pool_of({"between": ["a", "b"], "bandwidth_gbps": 0.1, "round_trip_ms": 4})
        with emulated_namespaces(pool) as namespaces:
            listing = ["ip", "-o", "-4", "addr", "show", "up"]
            shown = namespaces.run_in("a", listing, stdout=subprocess.PIPE, text=True).communicate()[0]
            device = next(line.split()[1] for line in shown.splitlines() if namespaces.sites["a"].address in line)
            found = []
            for gbps in (0.04, 0.01):
                argv = [sys.executable, "-m", "isthmus", "wan", "shape", str(promised(tmp_path, gbps)), "--node", "a"]
                argv += ["--gbps", "0.05", "--apply", device, "--state", str(tmp_path / "edge.json")]
                assert namespaces.run_in("a", argv).wait() == 0
                found.append(rates_mbps(namespaces))
        goodput = 1448 / 1514
        for rates, booked, other in zip(found, (40, 10), (10, 40), strict=True):
            assert rates["5001"] == pytest.approx(booked * goodput, rel=0.15)
            assert rates["5002"] == pytest.approx(other * goodput, rel=0.2)


def test_an_unknown_device_is_said() -> None:
    """Before anything is set, with the way to find the right one; or that pyroute2 is missing."""
    settings = edge_settings([], "a", 0.0, 1.0)
    with pytest.raises(IsthmusError, match=r"nodevice0|pyroute2"):
        apply_edge_settings("nodevice0", None, settings)
