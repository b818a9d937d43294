"""The courier with real processes: a program runs far from the agent, whose folder looks as if it were beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from isthmus.agent.courier.start_file import write_start
from isthmus.core.messages.run_lease import RunLease, write_run_lease
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerKeys, WorkerLimits
from isthmus.core.process.boot_clock import boot_id, boot_time_s
from tests.courier.far_worker import FarWorker, until
from tests.courier.relay import CuttingRelay

pytestmark = pytest.mark.slow

MakeWorker = Callable[..., FarWorker]
WRITER = """
import sys, time
log = open(sys.argv[1], "wb", buffering=0)
for number in range(int(sys.argv[2])):
    log.write((f"{number:07d} " * 1000).encode())
    time.sleep(0.0005)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeWorker]:
    """Return a maker of workers, which end with the test."""
    made: list[FarWorker] = []

    def one(program: Sequence[str], **options: float) -> FarWorker:
        made.append(FarWorker(tmp_path / str(len(made)), program, **options))
        return made[-1]

    yield one
    for worker in made:
        worker.close()


def shell(text: str, folder: str) -> tuple[str, ...]:
    return ("sh", "-c", text, "stand-in", folder)


def test_a_program_far_away_leaves_what_it_would_leave_here(make: MakeWorker) -> None:
    """Output, files, status, environment and limits; keys are consumed, and no ticket is in reach of the program."""
    worker = make(())
    folder = WorkerFolder(worker.folder)
    folder.write_keys(WorkerKeys(keys={}))
    folder.write_limits(WorkerLimits(umask="0027"))
    text = 'echo "$ISTHMUS_CARDS"; umask; cat "$1/keys.json"; echo; rm "$1/keys.json"; echo x >"$1/made"; env; exit 7'
    write_start(worker.folder, shell(text, str(worker.folder)), {"ISTHMUS_CARDS": "g/n/0,g/n/1"})
    ticket = worker.ticket()
    worker.start(ticket, {"SOME_TOKEN": "hidden-word"})
    assert worker.wait() == 0
    words = (worker.folder / "log").read_text().split()
    assert words[:3] == ["g/n/0,g/n/1", "0027", '{"keys":{},"copies":null,"switch":null}']
    assert worker.status == 7
    assert (worker.folder / "made").read_text() == "x\n"
    assert not (worker.folder / "keys.json").exists()
    token = json.loads(ticket.read_text())["token"]
    assert token not in (worker.folder / "log").read_text()
    assert "hidden-word" not in (worker.folder / "log").read_text()


def test_a_file_of_the_agent_arrives_and_a_stop_file_ends_the_program(make: MakeWorker) -> None:
    """Files go in while the program runs; SIGTERM and SIGKILL reach it by the folder alone."""
    text = 'trap "echo term" TERM; while [ ! -e "$1/go" ]; do sleep 0.02; done; echo went; while :; do sleep 0.05; done'
    worker = make(())
    write_start(worker.folder, shell(text, str(worker.folder)), {})
    worker.start(worker.ticket())
    log = worker.folder / "log"
    (worker.folder / "go").touch()
    until("it went", lambda: log.exists() and "went" in log.read_text())
    for word, seen in (("TERM", lambda: "term" in log.read_text()), ("KILL", lambda: worker.status is not None)):
        (worker.folder / "stop").write_text(word)
        until(word, seen)
    assert worker.status == 137


def test_a_worker_ends_with_its_hold_and_with_the_lease_of_an_agent_that_is_gone(make: MakeWorker) -> None:
    """A release is carried; without an agent the lease ends the program, counted where it runs."""
    loop = ("sh", "-c", "while :; do sleep 0.05; done")
    released, lost = make(loop), make(loop, lease_s=2.0)
    for worker in (released, lost):
        worker.start(worker.ticket())
        until("it runs", (worker.folder / "log").exists)
    (released.hold / "released").touch()
    lost.courier.close()
    until("it has ended", lambda: released.status == 137)
    until("it has ended by itself", (lost.work / "folder/exit").exists)
    lost.restart_agent()
    until("its end is known", lambda: lost.status == 137)


def test_a_renewed_lease_goes_on(make: MakeWorker) -> None:
    """Renewals are seen where the program runs: it outlives its first lease."""
    worker = make(("sh", "-c", "while :; do sleep 0.05; done"), lease_s=1.5)
    other = make(("sh", "-c", "while :; do sleep 0.05; done"), lease_s=1.5)
    for one in (worker, other):
        one.start(one.ticket())

    def other_ended() -> bool:
        worker.renew()
        return other.status is not None

    until("the lease that is not renewed ends", other_ended)
    assert worker.status is None


def test_the_run_lease_travels_as_a_duration(make: MakeWorker) -> None:
    """The copy of the lease names this machine's clock, and ends no later than the agent's."""
    worker = make(())
    lease = worker.root / "state/lease/lease.json"
    lease.parent.mkdir()
    until_s = boot_time_s() + 500
    write_run_lease(lease, RunLease(boot=boot_id(), lease_s=900, until_s=until_s))
    write_start(worker.folder, ("{python}", "-c", "import sys; print(open(sys.argv[1]).read())", str(lease)), {})
    worker.start(worker.ticket())
    assert worker.wait() == 0
    copy = json.loads((worker.folder / "log").read_text())
    assert copy["boot"] == boot_id()
    assert until_s - 30 < copy["until_s"] <= until_s


def test_a_ticket_serves_one_worker(make: MakeWorker, tmp_path: Path) -> None:
    """A second worker with the same ticket is refused and runs nothing, while the first goes on."""
    worker = make(("sh", "-c", "echo started; while :; do sleep 0.05; done"))
    ticket = worker.ticket()
    worker.start(ticket)
    log = worker.folder / "log"
    until("it runs", lambda: log.exists() and log.read_text())
    worker.work = tmp_path / "thief"
    assert worker.start(ticket).wait(timeout=30) == 3
    assert not (worker.work / "folder/pid").exists()
    assert (worker.status, log.read_text()) == (None, "started\n")


@pytest.mark.parametrize("seed", range(3))
def test_cuts_and_restarts_of_both_ends_lose_and_double_no_byte(seed: int, make: MakeWorker) -> None:
    """A relay breaks connections at random, agent and courier restart: the log is the worker's, byte for byte."""
    worker = make(())
    program = ("{python}", "-c", WRITER, str(worker.folder / "metrics.jsonl"), "1500")
    write_start(worker.folder, program, {})
    port = json.loads(worker.courier.ticket(worker.folder, worker.hold))["port"]
    relay = CuttingRelay(port, seed, mean_bytes=300_000)
    try:
        ticket = worker.ticket(relay.port)
        worker.start(ticket)
        metrics = worker.folder / "metrics.jsonl"
        until("it writes", lambda: metrics.exists() and metrics.stat().st_size > 1_000_000)
        worker.restart_agent()
        until("it goes on", lambda: metrics.stat().st_size > 3_000_000)
        worker.processes[-1].send_signal(signal.SIGKILL)
        worker.processes[-1].wait()
        worker.start(ticket)
        assert worker.wait() == 0
        assert relay.num_cuts > 3
        expected = b"".join(f"{number:07d} ".encode() * 1000 for number in range(1500))
        assert metrics.read_bytes() == expected
        assert worker.status == 0
    finally:
        relay.close()


def test_a_part_ends_with_the_process_that_started_it(make: MakeWorker) -> None:
    """With `--while-open` the end of standard input is the loss of the starter; its status reaches the agent."""
    worker = make(("sh", "-c", "while :; do sleep 0.05; done"))
    command = (sys.executable, str(worker.root / "courier.pyz"), "--ticket", str(worker.ticket()), "--while-open")
    process = subprocess.Popen((*command, "--work", str(worker.work)), stdin=subprocess.PIPE, env=dict(os.environ))
    until("it runs", (worker.folder / "log").exists)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert worker.status == 137


def test_no_ticket_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    """The file is named; its content is not repeated."""
    (tmp_path / "ticket").write_text("secret-text")
    command = (sys.executable, "-m", "isthmus.agent.courier.run_part", "--ticket", str(tmp_path / "ticket"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "is no ticket of the courier" in done.stderr
    assert "secret-text" not in done.stderr
