"""Attacks of a user's program on its site's agent by what it writes into its worker's folder, which the agent reads."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from isthmus.agent.adapters.file_workers import FileWorkers
from isthmus.agent.service.telemetry_outbox import MAX_LINE_BYTES, TelemetryOutbox
from isthmus.control.queries.quotas import Quotas
from isthmus.control.rest.body_limit import MAX_BODY_BYTES
from isthmus.control.rest.json_route import has_too_many_values
from isthmus.control.service.access.output_quota import OutputQuota
from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import AgentReport, LogChunk, ObservedPart, StepMetrics
from isthmus.core.messages.worker_folder import MAX_WORKER_MESSAGE_BYTES, WorkerFolder
from isthmus.core.process import rank_runner
from tests.control.serving import EAST, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack


def folder_of(runs: Path, job: str, rank: int = 0) -> Path:
    """Make the folder of a rank of a job's first attempt."""
    folder = runs / job / "1" / f"rank-{rank}"
    folder.mkdir(parents=True)
    return folder


def line(job: str = "mine", rank: int = 0, **fields: Any) -> str:
    """A line of metrics as a worker writes it."""
    values = {"job": job, "attempt": 1, "rank": rank, "step": 0, "values": {"loss": 1.0}}
    return json.dumps(values | fields) + "\n"


def body(outbox: TelemetryOutbox) -> bytes:
    """The report with the next batch, as it is sent."""
    batch = outbox.collect()
    return report(metrics=tuple(batch.metrics), logs=tuple(batch.logs)).model_dump_json().encode()


def test_a_worker_speaks_for_its_own_rank_only(tmp_path: Path) -> None:
    """Metrics of another user's job, of another attempt or rank of its own, in its file: none enters a report."""
    folder = folder_of(tmp_path, "mine")
    folder_of(tmp_path, "theirs")
    forged = [line("theirs"), line(rank=1), line(attempt=2)]
    (folder / "metrics.jsonl").write_text("".join(forged) + line(step=3))
    batch = TelemetryOutbox(tmp_path).collect()
    assert [(one.job, one.attempt, one.rank, one.step) for one in batch.metrics] == [("mine", 1, 0, 3)]


@pytest.mark.parametrize("ends", [True, False])
def test_a_line_without_end_takes_no_memory_and_holds_up_no_report(tmp_path: Path, ends: bool) -> None:
    """A line of 300 MB: each report is within the server's limits, and the lines behind it arrive."""
    folder = folder_of(tmp_path, "mine")
    with (folder / "metrics.jsonl").open("wb") as stream:
        stream.truncate(300 << 20)
        stream.seek(0, os.SEEK_END)
        if ends:
            stream.write(b"\n" + line(step=3).encode())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outbox, steps = TelemetryOutbox(tmp_path), list[int]()
    for _ in range(1 + (300 << 20) // MAX_LINE_BYTES):
        batch = outbox.collect()
        steps += [one.step for one in batch.metrics]
        outbox.acknowledge(batch)
    assert steps == ([3] if ends else [])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


@pytest.mark.parametrize("what", ["spans", "values", "text", "names", "lines"])
def test_no_output_makes_a_report_that_the_server_refuses(tmp_path: Path, what: str) -> None:
    """The largest lines and logs that are read: a report with them is parsed, whatever else a site has to say."""
    folder = folder_of(tmp_path, "mine")
    span = {"kind": "f", "micro_batch": 0, "start_s": 0, "end_s": 0}
    written = {
        "spans": line(spans=[span] * 24_000) * 3,
        "values": line(values={str(number): 1 for number in range(99_000)}) * 3,
        "names": line(values={"x" * 1_900_000: 1}) * 3,
        "lines": line(values={}) * 20_000,
        "text": "",
    }[what]
    (folder / "metrics.jsonl").write_text(written)
    (folder / "log").write_bytes(b"\x00" * (1 << 20) if what == "text" else b"x")
    data = body(TelemetryOutbox(tmp_path))
    assert len(data) < MAX_BODY_BYTES // 2
    assert not has_too_many_values(data)
    AgentReport.model_validate_json(data)


def test_a_worker_that_writes_without_end_holds_up_no_other(tmp_path: Path) -> None:
    """One rank fills every report; the output of another user's job arrives all the same."""
    flood, other = folder_of(tmp_path, "a"), folder_of(tmp_path, "b")
    (other / "log").write_text("done\n")
    outbox, found = TelemetryOutbox(tmp_path, max_batch_bytes=1000), ""
    for _ in range(4):
        with (flood / "log").open("ab") as stream:
            stream.write(b"x" * 5000)
        batch = outbox.collect()
        found += "".join(one.text for one in batch.logs if one.job == "b")
        outbox.acknowledge(batch)
    assert found == "done\n"
    assert outbox.is_attempt_drained(other.parent)


@pytest.mark.parametrize("name", ["sent.json", "sent.tmp", ".sent.json.tmp"])
def test_the_agent_writes_through_no_link_of_a_worker(tmp_path: Path, name: str) -> None:
    """A worker foresees the file in which the agent notes what it has sent; the agent may be root."""
    folder, victim = folder_of(tmp_path / "runs", "mine"), tmp_path / "shadow"
    victim.write_text("root:x\n")
    (folder / name).symlink_to(victim)
    (folder / "log").write_text("hello\n")
    outbox = TelemetryOutbox(tmp_path / "runs")
    outbox.acknowledge(outbox.collect())
    assert victim.read_text() == "root:x\n"


def test_a_pipe_in_place_of_what_was_sent_holds_up_no_agent(tmp_path: Path) -> None:
    """The agent does not wait for a writer, and sends the log."""
    folder = folder_of(tmp_path, "mine")
    os.mkfifo(folder / "sent.json")
    (folder / "log").write_text("hello\n")
    assert [one.text for one in TelemetryOutbox(tmp_path).collect().logs] == ["hello\n"]


def test_a_stop_is_written_through_no_link_of_a_worker(tmp_path: Path) -> None:
    """The agent leaves the signal in the worker's folder, and not in a file that the worker points at."""
    victim, folder = tmp_path / "shadow", tmp_path / "f"
    folder.mkdir()
    victim.write_text("root:x\n")
    (folder / "pid").write_text("1\n")
    (folder / f".stop.{os.getpid()}.{threading.get_ident()}").symlink_to(victim)
    cast(Any, FileWorkers).stop(None, folder, force=True)
    assert (victim.read_text(), (folder / "stop").read_text()) == ("root:x\n", "KILL")


def test_problems_of_one_worker_fill_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any number of malformed lines are one line in the agent's log."""
    folder = folder_of(tmp_path, "mine")
    (folder / "metrics.jsonl").write_text("{broken\n" * 2000)
    TelemetryOutbox(tmp_path).collect()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["checkin.json", "wait.json", "protected.json"])
def test_what_a_worker_says_is_bounded(tmp_path: Path, name: str) -> None:
    """The agent reads these files at each look: at most 64 KiB of them."""
    worker = WorkerFolder(tmp_path)
    (tmp_path / name).write_bytes(b'{"reason": "' + b"x" * 4 * MAX_WORKER_MESSAGE_BYTES)
    read = {"checkin.json": worker.read_checkin, "wait.json": worker.read_wait}.get(
        name, worker.read_verified_checkpoint
    )
    with pytest.raises(InputError):
        read()


@pytest.mark.parametrize("since_s", [1e20, 1e308, -1.0])
def test_a_wait_since_no_time_ends_no_agent(tmp_path: Path, since_s: float) -> None:
    """What the agent reads, it can report."""
    (tmp_path / "wait.json").write_text(json.dumps({"reason": "x", "since_s": since_s}))
    with pytest.raises(InputError):
        WorkerFolder(tmp_path).read_wait()


def test_a_pipe_in_place_of_the_signal_holds_up_no_lease(tmp_path: Path) -> None:
    """A program that puts a pipe where its runner looks for signals is killed with its lease all the same."""
    folder, hold = tmp_path / "f", tmp_path / "h"
    folder.mkdir()
    hold.mkdir()
    (hold / "lease").write_text("1 1.0")
    os.mkfifo(folder / "stop")
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    runner = subprocess.Popen([sys.executable, rank_runner.__file__, folder, hold, "", "s", *program])
    try:
        assert runner.wait(30) == 128 + signal.SIGKILL
    finally:
        runner.kill()
        runner.wait()


def test_a_job_fills_no_disk_of_the_server() -> None:
    """Metrics and logs of a job are kept up to a quota, which a note names; other jobs have their own."""
    server = Server(Quotas(output_bytes_per_job=1 << 20))
    server.shell.start()
    with server.http:
        mine = server.committed(name="flood").id
        part = ObservedPart(job=mine, attempt=1, state="running")
        text = "x" * 300_000
        for number in range(8):
            chunk = LogChunk(job=mine, attempt=1, rank=0, offset=number * len(text), text=text)
            server.sync(report(EAST, part, logs=(chunk,)))
        lines = [StepMetrics(job=mine, attempt=1, rank=0, step=0, values={"x" * 60: 1.0})]
        server.sync(report(EAST, part, metrics=lines))
    server.shell.close()
    page = server.store.logs(mine)
    kept = "".join(one.text for one in page.chunks)
    assert kept.count("x" * 1000) == 900
    assert kept.endswith("the rest is left out]\n")
    assert server.store.metrics(mine).metrics == ()


def test_a_server_that_starts_again_knows_what_it_has_stored() -> None:
    """The quota counts what is in the store."""
    quota = OutputQuota(lambda job: (100, 900_000) if job == "known" else (0, 0), 1 << 20)
    known, new = (LogChunk(job=job, attempt=1, rank=0, offset=0, text="x" * 100_000) for job in ("known", "new"))
    assert [one.text[:2] for one in quota.admit_logs([known, new, known])] == ["\n[", "xx"]


def test_a_page_of_output_is_bounded_in_bytes() -> None:
    """A thousand lines of a megabyte are asked for: an answer has eight, and the next ones follow."""
    server = Server()
    server.shell.start()
    with server.http:
        mine = server.committed(name="wide").id
        for rank in range(20):
            text = chr(ord("a") + rank) * (1 << 20)
            server.store.append_logs([LogChunk(job=mine, attempt=1, rank=rank, offset=0, text=text)])
        sizes, after, letters = list[int](), 0, ""
        while chunks := (page := server.call("GET", f"/v1/jobs/{mine}/logs?limit=10000&after={after}").json())[
            "chunks"
        ]:
            sizes.append(len(chunks))
            letters += "".join(one["text"][0] for one in chunks)
            after = page["next"]
    server.shell.close()
    assert sizes == [8, 8, 4]
    assert letters == "abcdefghijklmnopqrst"
