"""Sites in network namespaces (root): packets are really lost, the round trip holds, nothing stays behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import NotFoundError, UnavailableError
from isthmus.core.pool import Pool
from isthmus.wan.netns import (
    Namespaces,
    effective_capabilities,
    emulated_namespaces,
    require_namespaces,
    stale_namespaces,
    unavailable_reason,
)
from tests.wan.lab import pool_of, wait_until

WHY = unavailable_reason(effective_capabilities())
needs_root = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run: sudo .venv/bin/python -m pytest -m root tests/wan"),
]

ECHO = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("0.0.0.0", 5001))
    print("up", flush=True)
    while True:
        s.sendto(*s.recvfrom(2000))
"""
ASK = """
import socket, statistics, sys, time
times = []
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(0.3)
    for number in range(int(sys.argv[2])):
        start = time.monotonic()
        s.sendto(number.to_bytes(4, "big"), (sys.argv[1], 5001))
        try:
            while s.recv(2000) != number.to_bytes(4, "big"):
                pass
            times.append(time.monotonic() - start)
        except TimeoutError:
            pass
print(len(times), statistics.median(times))
"""


SEND_ALL = """
import socket, sys
seen = set()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(2)
    for number in range(int(sys.argv[2])):
        s.sendto(number.to_bytes(4, "big"), (sys.argv[1], 5001))
    try:
        while len(seen) < int(sys.argv[2]):
            seen.add(s.recv(2000))
    except TimeoutError:
        pass
print(len(seen), 0)
"""
"""Waits for what is still under way until nothing has come for 2 s, a thousand round trips."""


def joined(**fields: Any) -> Pool:
    return pool_of({"between": ["a", "b"], "bandwidth_gbps": 0.5, "round_trip_ms": 24} | fields)


def ask(namespaces: Namespaces, count: int, script: str = ASK) -> tuple[int, float]:
    """Return how many of `count` datagrams from a to b were echoed, and the median round trip in seconds."""
    command = [sys.executable, "-c", script, namespaces.sites["b"].address, str(count)]
    with namespaces.run_in("a", command, stdout=subprocess.PIPE, text=True) as asker:
        answered, median_s = asker.communicate(timeout=60)[0].split()
    return int(answered), float(median_s)


def start_echo(namespaces: Namespaces) -> Iterator[None]:
    with namespaces.run_in("b", [sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == b"up\n"
        yield
        echo.kill()


def counted(namespaces: Namespaces, what: str) -> dict[str, int]:
    return {link["to"]: link[what] for link in namespaces.counters()}


class TestAsRoot:
    """What needs real namespaces."""

    pytestmark = needs_root

    def test_a_rank_on_another_node_than_its_agent_listens_at_its_own_node(self) -> None:
        """With the address of another machine it gets the one on its route there; its own address it keeps."""
        script = "import sys; from isthmus.wan import listen, local_address as f; found = f(sys.argv[1]); print(found);"
        script += "listen(found).close()"
        with emulated_namespaces(joined()) as namespaces:
            own, other = (namespaces.sites[name].address for name in "ab")
            for asked in (own, other):
                command = [sys.executable, "-c", script, asked]
                with namespaces.run_in("a", command, stdout=subprocess.PIPE, text=True) as run:
                    assert run.communicate(timeout=60)[0].strip() == own
                assert run.returncode == 0

    @pytest.mark.on_the_clock
    def test_the_round_trip_is_the_stated_one_and_nothing_is_lost_without_loss(self) -> None:
        """Within 2 ms; every datagram is echoed; the counters agree."""
        with emulated_namespaces(joined()) as namespaces:
            for _ in start_echo(namespaces):
                answered, median_s = ask(namespaces, 30)
            assert answered == 30
            assert median_s == pytest.approx(0.024, abs=0.002)
            assert counted(namespaces, "packets") == {"a": 30, "b": 30}
            assert counted(namespaces, "lost") == {"a": 0, "b": 0}

    def test_packets_are_really_lost(self) -> None:
        """What is not echoed is exactly what the relay counted as lost, on the way there or back."""
        with emulated_namespaces(joined(loss=0.1, round_trip_ms=2), seed=3) as namespaces:
            for _ in start_echo(namespaces):
                answered, _ = ask(namespaces, 60, SEND_ALL)
            lost = counted(namespaces, "lost")
            assert answered == 60 - sum(lost.values())
            assert 2 <= sum(lost.values()) <= 25

    @pytest.mark.parametrize("loss", [0.0, 0.001])
    def test_a_stream_crosses_whole_and_counts_its_segments(self, loss: float) -> None:
        """8 MB at 1 Gbit/s: as runs of segments without loss, one by one with it; counted are packets of the MTU."""
        serve = "import socket, sys\nserver = socket.create_server((sys.argv[1], 7000)); print('up', flush=True)\n"
        serve += "near, _ = server.accept(); found = b''\nwhile part := near.recv(2**20): found += part\n"
        serve += "print(len(found), found == bytes(range(250)) * 32_000)"
        send = "import socket, sys\nwith socket.create_connection((sys.argv[1], 7000)) as far:\n"
        send += " far.sendall(bytes(range(250)) * 32_000)"
        with emulated_namespaces(joined(loss=loss, round_trip_ms=2)) as namespaces:
            address = namespaces.sites["b"].address
            serving = [sys.executable, "-c", serve, address]
            with namespaces.run_in("b", serving, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == "up\n"
                assert namespaces.run_in("a", [sys.executable, "-c", send, address]).wait(60) == 0
                assert server.stdout.read().strip() == "8000000 True"
            assert counted(namespaces, "packets")["b"] >= 8_000_000 / 1460
            assert counted(namespaces, "bytes")["b"] >= 8_000_000 + 40 * 8_000_000 / 1460

    def test_nothing_stays_behind_even_after_an_exception(self) -> None:
        """Namespaces, relay and processes started in them are gone when the block is left, however."""
        with pytest.raises(ZeroDivisionError), emulated_namespaces(joined()) as namespaces:  # noqa: PT012
            process = namespaces.run_in("a", ["sleep", "600"])
            assert Path("/run/netns", namespaces.sites["a"].namespace).exists()
            raise ZeroDivisionError
        assert process.returncode is not None
        assert namespaces.relay.returncode == 0
        assert not any(Path("/run/netns", site.namespace).exists() for site in namespaces.sites.values())
        with pytest.raises(UnavailableError, match="relay has exited"):
            namespaces.counters()

    def test_what_a_killed_process_left_is_removed(self) -> None:
        """1. a process is killed: its relay deletes its sites; 2. a dead pid's go at the next start."""
        script = (
            "import os, signal, sys; sys.path.insert(0, '.')\n"
            "from tests.wan.test_netns import joined, emulated_namespaces\n"
            "with emulated_namespaces(joined()) as n:\n"
            "    print(n.sites['a'].namespace, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        root = Path(__file__).parents[2]
        killed = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
        left = Path("/run/netns", killed.stdout.strip())
        wait_until(lambda: not left.exists())
        subprocess.run(["ip", "netns", "add", "isthmus-999999999-0-0"], check=True)
        assert stale_namespaces() == ["isthmus-999999999-0-0"]
        with emulated_namespaces(joined()):
            assert stale_namespaces() == []

    def test_an_unknown_cluster_is_named(self) -> None:
        """The error lists the clusters there are."""
        with (
            emulated_namespaces(joined()) as namespaces,
            pytest.raises(NotFoundError, match="available: a, b"),
        ):
            namespaces.run_in("c", ["true"])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The reason names missing root rights and missing TUN devices."""
    root = 0x1FFFFFFFFFF
    assert "need Linux and root" in (unavailable_reason(0) or "")
    assert "CAP_SYS_ADMIN" in (unavailable_reason(root & ~(1 << 21)) or "")
    assert unavailable_reason(root, tmp_path / "tun") == f"{tmp_path / 'tun'} is missing"


def test_without_root_the_error_names_the_links_that_need_none() -> None:
    """The emulation without root is the way out."""
    with pytest.raises(UnavailableError, match="isthmus links"):
        require_namespaces(0)
