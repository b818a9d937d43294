"""The worker of `engine: command`: the variables of a rank, its end, and programs that do not behave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from isthmus.control.placement.command_plans import command_plans
from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import LinkKey, RankMap, StepMetrics, WorkerAddress
from isthmus.core.messages.run_lease import RunLease, write_run_lease
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED, WorkerFolder, WorkerKeys, WorkerSpec
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.core.process.boot_clock import boot_id
from isthmus.train.process.command_progress import ProgressReader
from tests.until import until

LIMIT_S = 30.0
POOL = Pool(
    clusters=tuple(
        Cluster(name=name, owner=name, node_groups=(NodeGroup(name="g", chip="H20", nodes=2, chips_per_node=2),))
        for name in ("a", "b")
    )
)


def make_spec(
    folder: Path, *arguments: str, ranks: dict[str, int] | None = None, rank: int = 0, **more: Any
) -> WorkerSpec:
    command = {"arguments": arguments, "ranks": ranks or {"a": 1}, **more.pop("command", {})}
    job = Job.model_validate({"name": "c", "engine": "command", "command": command, "output": str(folder / "out")})
    free = {one.name: {"g": 4} for one in POOL.clusters}
    (plan,) = command_plans(job, POOL, free).plans
    return WorkerSpec(run="c-1", attempt=1, rank=rank, job=job, plan=plan, **more)


WORKER = ("-m", "isthmus.train.process.command_worker")
SHORT_LOG = (
    "-c",
    "import sys, isthmus.train.process.command_worker as it; it.MAX_LOG_BYTES = 100_000; it.main(sys.argv[1:])",
)


@contextmanager
def started(
    folder: Path, spec: WorkerSpec, *, mapped: bool = True, program: tuple[str, ...] = WORKER
) -> Iterator[tuple[subprocess.Popen[bytes], WorkerFolder]]:
    """Run one rank; the others of its plan are addresses only."""
    worker = WorkerFolder(folder / f"rank-{spec.rank}")
    worker.write_spec(spec)
    with worker.log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, str(worker.path)],
            stdout=log, stderr=log, start_new_session=True, env={**os.environ, "ISTHMUS_CARDS": "g/0/0"},
        )  # fmt: skip
    try:
        if mapped:
            own = until(worker.read_checkin)
            others = [
                WorkerAddress(rank=rank, cluster=name, host="127.0.0.9", port=9)
                for rank, name in enumerate(spec.plan.rank_clusters)
                if rank != spec.rank
            ]
            worker.write_rank_map(RankMap(workers=tuple(sorted([own, *others], key=lambda one: one.rank))))
        yield process, worker
    finally:
        for one in descendants(process.pid):
            one.kill()
        process.kill()
        process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def run(folder: Path, spec: WorkerSpec) -> tuple[int, str, WorkerFolder]:
    """Run a rank to its end; return its status and log."""
    with started(folder, spec) as (process, worker):
        status = process.wait(LIMIT_S)
        return status, worker.log_path.read_text(errors="replace"), worker


SHOW = "import json, os; print(json.dumps(dict(os.environ) | {'cwd': os.getcwd(), 'stdin': os.fstat(0).st_rdev}))"


@pytest.mark.slow
def test_a_rank_gets_the_variables_of_torchrun_and_its_own_folder(tmp_path: Path) -> None:
    """Rank 2 of 3 is the only one of its cluster; the master is rank 0; the program runs in the job's output."""
    command = {"environment": {"MODE": "x", "MASTER": "y"}}
    spec = make_spec(tmp_path, sys.executable, "-c", SHOW, ranks={"a": 2, "b": 1}, rank=2, command=command)
    status, log, worker = run(tmp_path, spec)
    found = json.loads(log)
    assert status == 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "MODE")
    assert [found[name] for name in names] == ["2", "3", "0", "1", "1", "127.0.0.9", "9", "x"]
    assert (found["ISTHMUS_JOB"], found["ISTHMUS_ATTEMPT"], found["ISTHMUS_CLUSTER"]) == ("c-1", "1", "b")
    assert found["cwd"] == spec.job.output
    assert found["ISTHMUS_PROGRESS"] == str(worker.progress_path)
    checked_in = worker.read_checkin()
    assert checked_in is not None
    assert checked_in.device == "g/0/0"


@pytest.mark.slow
def test_the_masters_port_is_free_when_its_program_starts(tmp_path: Path) -> None:
    """Rank 0's program listens where the others are sent."""
    bind = "import os, socket; socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))"
    status, log, _ = run(tmp_path, make_spec(tmp_path, sys.executable, "-c", bind))
    assert (status, log) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit(1)", 1, "error: the command ended with status 1"),
        ("raise SystemExit(2)", 1, "error: the command ended with status 2"),
        ("raise SystemExit(75)", 1, "error: the command ended with status 75"),
        ("import os; os.kill(os.getpid(), 11)", 128 + 11, "error: the command was ended by SIGSEGV"),
    ],
)
def test_a_programs_status_is_never_taken_for_one_of_isthmus(
    tmp_path: Path, program: str, status: int, words: str
) -> None:
    """Status 2 of a program is no refusal that would end the job, and 75 no end of a lease: it restarts."""
    found, log, _ = run(tmp_path, make_spec(tmp_path, sys.executable, "-c", program))
    assert found == status
    assert log.strip().endswith(words)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["no-such-program-here", "/", "./out", "/etc/passwd"])
def test_a_program_that_cannot_start_is_refused_for_good(tmp_path: Path, program: str) -> None:
    """A restart would fail in the same way; arguments reach no shell."""
    status, log, _ = run(tmp_path, make_spec(tmp_path, program, "; touch pwned", "$(touch pwned)"))
    assert status == InputError.exit_code
    assert f"cannot start '{program}'" in log
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.slow
def test_arguments_are_passed_as_they_are(tmp_path: Path) -> None:
    """No shell splits, expands or runs them."""
    words = ["; exit 9", "$HOME", "`id`", "*", "", "a b", "\n", "ü"]
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    status, log, _ = run(tmp_path, make_spec(tmp_path, sys.executable, "-c", show, *words))
    assert (status, json.loads(log)) == (0, words)


STUBBORN = """
import os, signal, subprocess, sys, time
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(one, signal.SIG_IGN)
for _ in range(3):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_program_that_ignores_sigterm_ends_with_all_its_daemons(tmp_path: Path) -> None:
    """After the grace time: it, its children, and those that left its session."""
    with started(tmp_path, make_spec(tmp_path, sys.executable, "-c", STUBBORN)) as (process, worker):
        until(lambda: "ready" in worker.log_path.read_text())
        left = until(lambda: len(descendants(process.pid)) >= 5 and descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_daemons_end_with_their_program(tmp_path: Path) -> None:
    """A program that exits at once leaves nothing behind, though its children hold its output open."""
    leave = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    status, log, _ = run(tmp_path, make_spec(tmp_path, sys.executable, "-c", leave))
    assert status == 0
    assert not psutil.pid_exists(int(log)) or psutil.Process(int(log)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_an_endless_log_ends_at_the_limit_and_the_program_runs_on(tmp_path: Path) -> None:
    """What is beyond the limit is read and dropped, so that the program is not blocked; it then ends well."""
    endless = "import sys\nfor _ in range(2000): sys.stdout.write('x' * 1000)\nopen('done', 'w')"
    with started(tmp_path, make_spec(tmp_path, sys.executable, "-c", endless), program=SHORT_LOG) as (process, worker):
        assert process.wait(LIMIT_S) == 0
        written = worker.log_path.read_bytes()
    assert written == b"x" * 100_000 + b"\nthe log has 100000 bytes; further output is dropped\n"
    assert (tmp_path / "out" / "done").exists()


@pytest.mark.slow
def test_the_program_ends_with_the_sites_lease(tmp_path: Path) -> None:
    """A site without contact to the server runs nothing that the server has given up."""
    lease = tmp_path / "lease.json"
    write_run_lease(lease, RunLease(boot=boot_id(), lease_s=900, until_s=1e9))
    spec = make_spec(tmp_path, "sleep", "1000", run_lease=str(lease))
    with started(tmp_path, spec) as (process, _):
        until(lambda: descendants(process.pid))
        write_run_lease(lease, RunLease(boot=boot_id(), lease_s=900, until_s=0))
        assert process.wait(LIMIT_S) == RUN_LEASE_ENDED


@pytest.mark.slow
def test_a_stop_before_the_start_starts_nothing(tmp_path: Path) -> None:
    """While other ranks have not checked in, a stop ends the worker at once."""
    spec = make_spec(tmp_path, "touch", str(tmp_path / "ran"), ranks={"a": 2})
    with started(tmp_path, spec, mapped=False) as (process, worker):
        until(worker.read_checkin)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_keys_of_isthmus_links_are_gone_before_the_program_starts(tmp_path: Path) -> None:
    """A program has its own way between ranks; the keys of the run would let it take part in another's."""
    spec = make_spec(tmp_path, "ls", str(tmp_path / "rank-0"))
    key: LinkKey = "0" * 64
    WorkerFolder(tmp_path / "rank-0").write_keys(WorkerKeys(keys={"a": key}))
    status, log, _ = run(tmp_path, spec)
    assert status == 0
    assert "spec.json" in log
    assert "keys.json" not in log


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ('{"step": 3, "loss": 2.5, "name": "x", "flag": true, "big": 1e999, "none": null}', {"loss": 2.5}),
        ('{"step": 0}', {}),
        ('{"step": -1}', None),
        ('{"step": 1.5}', None),
        ('{"step": true}', None),
        ('{"step": 10000000000}', None),
        ('{"loss": 1}', None),
        ("[1]", None),
        ("step 3", None),
        ('{"step": 1, "x": ' + "9" * 5000 + "}", None),
        ("[" * 4000, None),
        ("\x00\xff", None),
        ('{"step": 1, ' + ", ".join(f'"v{n}": 1' for n in range(33)) + "}", None),
    ],
)
def test_only_steps_with_numbers_become_metrics(tmp_path: Path, line: str, values: dict[str, float] | None) -> None:
    """A program's file is data of a stranger: everything else in it is passed over."""
    folder = WorkerFolder(tmp_path)
    folder.progress_path.write_text(line + '\n{"step": 7, "loss": 1}\n{"step": 8', encoding="latin-1")
    reader = ProgressReader(folder, make_spec(tmp_path, "x"))
    assert reader.read() == (1 if values is None else 2)
    found = [StepMetrics.model_validate_json(one) for one in folder.metrics_path.read_text().splitlines()]
    assert found[-1].step == 7
    if values is not None:
        assert found[0].values == values
    with folder.progress_path.open("a") as stream:
        stream.write("}\n")
    assert (reader.read(), reader.read()) == (1, 0)


def test_all_that_a_program_wrote_is_read_at_its_end(tmp_path: Path) -> None:
    """However much it wrote since the last look."""
    folder = WorkerFolder(tmp_path)
    folder.progress_path.write_text("".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(20_000)))
    reader = ProgressReader(folder, make_spec(tmp_path, "x"))
    assert reader.read() < 20_000
    reader.read_rest()
    assert len(folder.metrics_path.read_text().splitlines()) == 20_000


def test_progress_through_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    """A program cannot make its worker read another file, or wait for ever."""
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1}\n')
    folder = WorkerFolder(tmp_path / "rank-0")
    folder.path.mkdir()
    reader = ProgressReader(folder, make_spec(tmp_path, "x"))
    folder.progress_path.symlink_to(secret)
    assert reader.read() == 0
    folder.progress_path.unlink()
    os.mkfifo(folder.progress_path)
    assert reader.read() == 0
