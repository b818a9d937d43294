"""`isthmus wan domain` and `isthmus wan centre --domain` as processes: bookings outlive kills of either."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.wan import CentreAddress, CentreClient, PathRequest, parse_address
from tests.e2e.site import wait_until
from tests.free_ports import free_ports

pytestmark = pytest.mark.slow
NETWORK = {
    "topology": {
        "pipes": [
            {"name": "ab", "from": "a", "to": "b", "capacity_gbps": 1, "delay_ms": 4, "domain": "north"},
            {"name": "bc", "from": "b", "to": "c", "capacity_gbps": 1, "delay_ms": 4, "domain": "south"},
        ]
    }
}


def start(stack: ExitStack, *words: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a command with `--json`; return it and what it says once it listens."""
    command = [sys.executable, "-m", "isthmus", "wan", *words, "--json"]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def request(name: str, gbps: float) -> PathRequest:
    fields = {"name": name, "from": "a", "to": "c", "bandwidth_gbps": gbps, "end_s": time.time() + 3600}
    return PathRequest.model_validate(fields)


def test_a_killed_domain_keeps_what_it_has_committed(tmp_path: Path) -> None:
    """A booked path is the domain's after a kill; while it is away nothing is promised, and nothing twice after."""
    network, token = tmp_path / "network.yaml", tmp_path / "south.token"
    network.write_text(yaml.safe_dump(NETWORK))
    token.touch(mode=0o600)
    token.write_text("a1" * 32)
    port = f"127.0.0.1:{free_ports(1)[0]}"
    domain = ("domain", str(network), "south", "--state", str(tmp_path / "south"), "--listen", port)
    domain = (*domain, "--token-file", str(token))
    with ExitStack() as stack:
        south, said = start(stack, *domain)
        assert said == {"address": port, "domain": "south", "bookings": 0}
        centre = ("centre", str(network), "--state", str(tmp_path / "centre"), "--listen", "127.0.0.1:0")
        _, found = start(stack, *centre, "--domain", f"south={port}", "--domain-token", f"south={token}")
        client = CentreClient(CentreAddress(address=parse_address(found["address"])))
        stack.callback(client.close)
        assert client.ask(request("one", 0.7)).state == "held"
        assert client.confirm("one").state == "booked"
        south.kill()
        south.wait(20)
        assert client.ask(request("two", 0.2)).state == "preparing"
        assert client.release("two").state == "released"
        _, said = start(stack, *domain)
        assert said["bookings"] == 1
        assert client.ask(request("three", 0.7)).state == "refused"
        assert client.ask(request("four", 0.2)).state == "held"
        assert client.look("one").state == "booked"
        network.write_text(yaml.safe_dump(NETWORK | {"down": ["bc"]}))
        wait_until("the failed pipe has been reported", lambda: client.look("one").state == "broken")
        network.write_text(yaml.safe_dump(NETWORK))
        wait_until("the pipe is back", lambda: client.look("one").state == "booked")
