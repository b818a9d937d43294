"""The keeper of a pod: each order is started once, signals reach the workers, and the end of the hold ends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.agent.adapters.kubernetes.pod_keeper import PodKeeper, keep
from isthmus.agent.courier.courier import Courier
from tests.until import until

PROGRAM = 'echo "$2 $4" >> "{log}"; trap "exit 7" TERM; while [ ! -e "{log}.end" ]; do sleep 0.05; done'


@pytest.fixture
def keeper(tmp_path: Path) -> PodKeeper:
    """A keeper whose courier writes its arguments to `log` and ends with SIGTERM or the file `log.end`."""
    (tmp_path / "folder").mkdir()
    return PodKeeper(tmp_path / "folder", ("sh", "-c", PROGRAM.format(log=tmp_path / "log"), "courier"))


@pytest.mark.slow
def test_each_order_is_started_once_and_its_end_is_told(keeper: PodKeeper, tmp_path: Path) -> None:
    """An order that stays there, or is brought again, starts nothing more; the end is a file for the agent."""
    folder, log = tmp_path / "folder", tmp_path / "log"
    (folder / "order-a").write_text("ticket")
    for _ in range(3):
        keeper.start_ordered()
    (folder / "order-b").write_text("ticket")
    keeper.start_ordered()
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    works = sorted(line.split()[1] for line in log.read_text().splitlines())
    assert works == [f"{tmp_path}/work-a", f"{tmp_path}/work-b"]
    (tmp_path / "log.end").touch()
    until(lambda: keeper.reap() or keeper.is_idle)
    assert sorted(one.name for one in folder.glob("ended-*")) == ["ended-a", "ended-b"]
    keeper.start_ordered()
    assert keeper.is_idle


@pytest.mark.slow
def test_the_end_of_the_hold_waits_for_the_workers_and_no_longer(keeper: PodKeeper, tmp_path: Path) -> None:
    """Nothing new is started; SIGTERM of the pod goes to the workers, whose end ends the keeper."""
    (tmp_path / "folder" / "order-a").write_text("ticket")
    ends = iter((False, True))
    pauses: list[float] = []

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        until(lambda: (tmp_path / "log").exists())
        keeper.signal(signal.SIGTERM)
        time.sleep(pause_s)

    keep(keeper, lambda: next(ends), pause)
    assert keeper.is_idle
    assert (tmp_path / "folder" / "ended-a").read_text() == "7\n"


@pytest.mark.slow
def test_a_pod_whose_agent_is_gone_gives_its_cards_back(tmp_path: Path) -> None:
    """The courier that never reaches its agent ends when it was told to."""
    folder = tmp_path / "run"
    folder.mkdir()
    courier = Courier(tmp_path / "state")
    ticket = json.loads(courier.ticket(folder))
    courier.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ticket["port"] = free.getsockname()[1]
        (tmp_path / "ticket").write_text(json.dumps(ticket))
        done = subprocess.run(
            [sys.executable, "-m", "isthmus.agent.courier.run_part", "--ticket", str(tmp_path / "ticket"), "--work",
             str(tmp_path / "work"), "--first-contact-s", "0.2", "--linger-s", "0.2"],
            capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert (done.returncode, "gave up" in done.stderr) == (1, True)
