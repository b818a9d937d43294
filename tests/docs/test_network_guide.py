"""The guide on the network, followed on two machines made of network namespaces (root)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.follow_guide import ROOT, blocks
from tests.docs.machine_guide import commands, needs_root, type_in
from tests.machines import machines

PAGE = ROOT / "docs" / "guide" / "network.md"
LONG_RUNNING = re.compile(r"isthmus (proxy|wan measure --listen|wan centre)")


class TestGuide:
    """The page, typed in the order in which it stands."""

    pytestmark = needs_root

    def test_every_command_works_as_printed_behind_a_firewall(self, tmp_path: Path) -> None:
        """Hangzhou answers at port 7400 alone; nanjing measures through it, and its kernel has the classes."""
        pytest.importorskip("pyroute2")
        folder = tmp_path / "shared"
        folder.mkdir()
        for block in blocks(PAGE):
            if block.language == "yaml":
                (folder / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
        with machines(["nanjing", "hangzhou"], folder) as found:
            found["hangzhou"].close_ports(7401, 7600)
            for number, (name, command, shown) in enumerate(commands(PAGE)):
                type_in(
                    found[name], command, shown, tmp_path / f"log-{number}", goes_on=bool(LONG_RUNNING.match(command))
                )
            direct = found["nanjing"].run("isthmus wan measure 10.0.0.2:7500 --tries 1 --limit 1")
            assert direct.returncode != 0
            classes = found["nanjing"].run("tc class show dev eth0").stdout
            assert "class htb 1:10 parent 1:1 prio 0 rate 600Mbit ceil 600Mbit" in classes


def test_the_page_has_a_command_for_every_step() -> None:
    """Key, two proxies, two ends of a measurement, admission, the edge, the pool and a centre; both take part."""
    assert len(commands(PAGE)) == 13
    assert {machine for machine, _, _ in commands(PAGE)} == {"nanjing", "hangzhou"}


def test_a_stranger_at_a_measurement_costs_it_nothing(tmp_path: Path) -> None:
    """A caller that sends what is no sample is dropped, and the next one is answered."""
    argv = [sys.executable, "-m", "isthmus", "wan", "measure"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with ExitStack() as stack:
        listening = [*argv, "--listen", f"127.0.0.1:{port}"]
        listener = stack.enter_context(subprocess.Popen(listening, stdout=subprocess.PIPE, text=True))
        stack.callback(listener.terminate)
        assert listener.stdout is not None
        assert "answering" in listener.stdout.readline()
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\xff" * 4)
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
        done = subprocess.run([*argv, f"127.0.0.1:{port}", "--tries", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Gbit/s" in done.stdout
