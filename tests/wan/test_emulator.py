"""The process of all links: its files while it runs, its end, and what it says when it cannot start."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.pool import Pool
from isthmus.wan.dial import dial
from isthmus.wan.emulator import ROUTES_FILE, STATISTICS_FILE, run_links
from tests.wan.lab import a_worker, pool_of, round_trips_s, wait_until

LINK = {"between": ["a", "b"], "bandwidth_gbps": 0.5, "round_trip_ms": 8, "loss": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_files_say_what_runs_and_routes_go_with_it(tmp_path: Path, number: signal.Signals) -> None:
    """Routes appear when they can be dialled; statistics follow; a signal ends all with status 0."""
    pool = pool_of(LINK, {**LINK, "between": ["c", "b"]})
    process = multiprocessing.get_context("spawn").Process(target=run_links, args=(pool, tmp_path / "s", 0))
    process.start()
    try:
        wait_until((tmp_path / "s" / ROUTES_FILE).exists)
        routes = json.loads((tmp_path / "s" / ROUTES_FILE).read_text())
        assert {cluster: sorted(others) for cluster, others in routes.items()} == {
            "a": ["b"], "b": ["a", "c"], "c": ["b"],
        }  # fmt: skip
        with a_worker() as worker, dial(worker.address, routes["a"]["b"]) as connection:
            connection.sendall(b"e")
            times_s = round_trips_s(connection, 20)
            assert min(times_s) > 0.0079
            wait_until(lambda: carried(tmp_path / "s" / STATISTICS_FILE).get(("a", "b")) == 20 * 64 + 1)
        found = carried(tmp_path / "s" / STATISTICS_FILE)
        assert found == {("a", "b"): 1281, ("b", "a"): 1280, ("b", "c"): 0, ("c", "b"): 0}
    finally:
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(10)
    assert process.exitcode == 0
    assert not (tmp_path / "s" / ROUTES_FILE).exists()


@pytest.mark.slow
def test_a_signal_ends_flows_that_are_under_way(tmp_path: Path) -> None:
    """SIGTERM with full queues and open connections ends the process within 5 s, and resets what was open.

    That its statistics could not be written (here a folder is in their way) has not ended it before.
    """
    (tmp_path / f"{STATISTICS_FILE}.new").mkdir()
    pool = pool_of({**LINK, "bandwidth_gbps": 0.01})
    process = multiprocessing.get_context("spawn").Process(target=run_links, args=(pool, tmp_path, 0))
    process.start()
    wait_until((tmp_path / ROUTES_FILE).exists)
    routes = json.loads((tmp_path / ROUTES_FILE).read_text())
    with a_worker() as worker:
        flows = [dial(worker.address, routes["a"]["b"]) for _ in range(4)]
        for flow in flows:
            flow.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                while True:
                    flow.sendall(b"s" + bytes(1 << 20))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(5)
        assert process.exitcode == 0
        for flow in flows:
            flow.settimeout(5)
            with pytest.raises(ConnectionResetError):
                flow.recv(1)
            flow.close()


def carried(file: Path) -> dict[tuple[str, str], int]:
    if not file.exists():
        return {}
    return {(link["from"], link["to"]): link["bytes"] for link in json.loads(file.read_text())["links"]}


def test_a_pool_without_links_is_refused(tmp_path: Path) -> None:
    """There is nothing to emulate; the error says where links are given."""
    pool = pool_of(LINK)
    with pytest.raises(InputError, match="no links"):
        run_links(Pool(clusters=pool.clusters), tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error names the folder; nothing is left listening (else the test run warns of open sockets)."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"cannot write the link files in .*file/state"):
        run_links(pool_of(LINK), tmp_path / "file" / "state")
