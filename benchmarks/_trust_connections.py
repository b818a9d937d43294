"""Submissions to a real server, left alone and while strangers flood it with connections and invalid tokens."""

from __future__ import annotations

import functools
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.control_store import submission
from benchmarks.table import Row, compared

CLIENTS = 4
PAUSE_S = 0.02
"""Pause of a client between two submissions: a server with spare time, as most are."""


def measure(quick: bool) -> list[Row]:
    """Return the p99 of submissions alone and under attack, the server's CPU time, and the size of its log."""
    silent, bad_per_s, phase_s, rounds = (1000, 600, 4.0, 1) if quick else (5000, 3000, 12.0, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "isthmus", "serve", "--state", "state", "--port", "0", "--json"],
                cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        try:
            assert server.stdout is not None
            port = int(re.search(r":(\d+)", json.loads(server.stdout.readline())["server"])[1])  # type: ignore[index]
            token = (folder / "state" / "admin.token").read_text().strip()
            return _rows(port, token, server.pid, folder / "log", silent, bad_per_s, phase_s, rounds)
        finally:
            server.terminate()
            server.wait(30)


def _rows(
    port: int, token: str, pid: int, log: Path, silent: int, bad_per_s: int, phase_s: float, rounds: int
) -> list[Row]:
    alone: list[float] = []
    attacked: list[float] = []
    ratios: list[float] = []
    cpu_s = {"alone": 0.0, "attacked": 0.0}
    done: dict[str, int] = {}
    _submit(port, token, 2.0)
    for _ in range(rounds):
        quiet: list[float] = []
        cpu_s["alone"] += _timed_cpu_s(pid, functools.partial(_submit_into, quiet, port, token, phase_s))
        attack = [sys.executable, "-m", "benchmarks._connection_flood", str(port), str(silent), str(bad_per_s)]
        flood = subprocess.Popen(attack, stdout=subprocess.PIPE, text=True)
        time.sleep(3)
        loud: list[float] = []
        cpu_s["attacked"] += _timed_cpu_s(pid, functools.partial(_submit_into, loud, port, token, phase_s))
        alone, attacked, ratios = alone + quiet, attacked + loud, [*ratios, _p99_ms(loud) / _p99_ms(quiet)]
        flood.terminate()
        counts = json.loads(flood.communicate(timeout=30)[0])
        done = {key: done.get(key, 0) + value for key, value in counts.items()}
    before, during = _p99_ms(alone), _p99_ms(attacked)
    total_s = max(1, done["seconds"])
    load = f"{silent:,} silent connections and {done['bad'] / total_s:,.0f} bad tokens/s"
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if b"isthmus.server: job " not in line]
    log_kb = sum(map(len, lines)) / 1e3
    return [
        compared(
            f"submissions of {CLIENTS} clients ({len(attacked)}) with {load}, p99, ratios of {rounds} rounds "
            f"{min(ratios):.2f} to {max(ratios):.2f}; peer: left alone ({len(alone)})",
            during, "ms", "without attack", before, target="at most 2 times", met=during <= 2 * before,
        ),
        compared(
            "the same, median", 1e3 * statistics.median(attacked), "ms",
            "without attack", 1e3 * statistics.median(alone),
        ),
        compared(
            "CPU time of the server per second of wall time", cpu_s["attacked"] / (phase_s * rounds), "s",
            "without attack", cpu_s["alone"] / (phase_s * rounds),
        ),
        Row(
            what="bad tokens refused or the connection closed, of those sent", unit="%", target="100",
            ours=100 * done["refused"] / max(1, done["bad"]), met=None,
        ),
        Row(
            what="log of the attack (without the lines of submitted jobs)", ours=log_kb, unit="KB",
            target="less than 1 MB", met=log_kb < 1000,
        ),
    ]  # fmt: skip


def _timed_cpu_s(pid: int, work: Callable[[], None]) -> float:
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    work()
    return sum(process.cpu_times()[:2]) - before


def _submit_into(found: list[float], port: int, token: str, seconds: float) -> None:
    found += _submit(port, token, seconds)


def _submit(port: int, token: str, seconds: float) -> list[float]:
    """Return the seconds of each submission of `CLIENTS` clients; every second one on a connection of its own."""
    found: list[float] = []
    errors: list[BaseException] = []

    def client(number: int) -> None:
        try:
            found.extend(_submit_one_by_one(port, token, seconds, fresh=number % 2 == 1))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def _submit_one_by_one(port: int, token: str, seconds: float, *, fresh: bool) -> list[float]:
    found = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        body = submission(f"job-{threading.get_ident()}-{time.monotonic_ns()}"[-60:]).model_dump_json(by_alias=True)
        begun_s = time.perf_counter()
        if fresh:
            connection.close()
        connection.request("POST", "/v1/jobs", body=body, headers=headers)
        answer = connection.getresponse()
        answer.read()
        found.append(time.perf_counter() - begun_s)
        if answer.status != 201:
            raise AssertionError(f"a submission was answered {answer.status}")
        time.sleep(PAUSE_S)
    connection.close()
    return found


def _p99_ms(seconds: list[float]) -> float:
    return 1e3 * sorted(seconds)[int(0.99 * len(seconds))]
