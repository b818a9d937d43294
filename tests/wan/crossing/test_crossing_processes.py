"""Proxies and gateways started from `pool.yaml`: bytes cross, killed parts come back, bad keys are refused."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from isthmus.core.errors import FileError, UnavailableError
from isthmus.wan.background_emulator import links_in_background
from isthmus.wan.crossing.crossing_processes import process_ids
from isthmus.wan.emulator import write_json_atomically
from tests.wan.crossing.crossing_lab import connection, echo, exchange, loopback_pool, started_sites

DATA = os.urandom(300_000)


@pytest.mark.slow
def test_connections_go_on_when_a_gateway_is_killed(tmp_path: Path) -> None:
    """A worker's connection crosses queue pairs, outlives the gateway that carries it, and the gateway comes back."""
    pool = loopback_pool(tmp_path, 2, transport="roce", streams=3)
    with ExitStack() as stack:
        sites = stack.enter_context(started_sites(pool, tmp_path))
        sock = stack.enter_context(connection(stack.enter_context(echo()), sites.routes["nanjing"]))
        exchange(sock, DATA)
        near = sites.processes["nanjing"]
        for name in ("gateway-g0", "gateway-g1"):
            before = process_ids(near)[name]
            os.kill(before, signal.SIGKILL)
            for _ in range(8):
                exchange(sock, DATA[:50_000])
            while process_ids(near).get(name, before) == before:
                exchange(sock, DATA[:1000])
    assert process_ids(near) == {}


def test_legs_cross_emulated_links_by_the_given_routes(tmp_path: Path) -> None:
    """With a file of routes the proxies dial through them: what workers send is counted by the emulated link."""
    pool = loopback_pool(tmp_path, transport="tcp", streams=2)
    with links_in_background(pool) as links:
        write_json_atomically(tmp_path / "links.json", links.routes)
        with ExitStack() as stack:
            sites = stack.enter_context(started_sites(pool, tmp_path, tmp_path / "links.json"))
            exchange(stack.enter_context(connection(stack.enter_context(echo()), sites.routes["hangzhou"])), DATA)
        sent = {(one["from"], one["to"]): one["bytes"] for one in links.statistics()}
        assert all(num > len(DATA) for num in sent.values())


def test_a_key_that_others_may_read_is_refused_before_start(tmp_path: Path) -> None:
    """A missing or open key is named, with what to do, and nothing starts."""
    pool = loopback_pool(tmp_path, transport="tcp")
    (tmp_path / "link.key").chmod(0o644)
    with pytest.raises(FileError, match="chmod 600"), started_sites(pool, tmp_path):
        pass
    (tmp_path / "link.key").unlink()
    with pytest.raises(FileError, match="No such file"), started_sites(pool, tmp_path):
        pass


def test_a_part_that_cannot_start_says_why(tmp_path: Path) -> None:
    """An address of another machine is named by the process that could not bind it."""
    pool = loopback_pool(tmp_path, transport="tcp")
    there = pool.clusters[0]
    assert there.access is not None
    proxy = there.access.proxy.model_copy(update={"listen": "192.0.2.1:7400"})
    access = there.access.model_copy(update={"proxy": proxy})
    pool = pool.model_copy(update={"clusters": (there.model_copy(update={"access": access}), pool.clusters[1])})
    with pytest.raises(UnavailableError, match=r"192\.0\.2\.1"), started_sites(pool, tmp_path):
        pass
