"""How fast the control plane's log is: `python -m benchmarks.control_store [--json] [--quick]`.

SQLite and PostgreSQL side by side, each on this machine's disk, with every answer after its flush. Client
threads of this process send submissions over HTTP to a server process, so both share the cores. CPU seconds
are those of the server, without PostgreSQL's processes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.table import Row, print_rows
from benchmarks.wan_links import cpu_s
from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.server.server_config import open_store
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import Event, JobSubmitted
from isthmus.control.store.snapshot_file import SnapshotFile
from isthmus.control.store.store_interface import Store
from isthmus.core.job import CheckpointConfig, DataConfig, Job, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import Submission
from tests.control.postgres import INSTALL, binaries, running

CLIENTS = 16
BULK = 500
MODEL = Model(
    path="model",
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    vocab_size=32_000,
    config={f"key_{i}": i for i in range(30)},
)


@dataclass(frozen=True)
class Place:
    """A store: its name in the table, and a server's configuration on a fresh one."""

    name: str
    config: ServerConfig


def submission(name: str) -> Submission:
    """A job of ordinary size: about 1.5 KB as JSON."""
    training = TrainingConfig(steps=1000, sequence_length=4096, micro_batch_size=1, global_batch_size=64)
    job = Job(
        name=name,
        model="model",
        data=DataConfig(paths=("text",)),
        training=training,
        checkpoints=CheckpointConfig(folder="checkpoints/{job}"),
        output="out/{job}",
        policy="auto",
    )
    return Submission(job=job, model=MODEL, key=name)


def no_plan(_asked: PlanRequest) -> PlanSet:
    """Find nothing: planning is not what is measured."""
    return PlanSet(plans=())


def _serve(config: ServerConfig) -> None:
    def announce(listening: ServerInfo) -> None:
        (config.state / "url.tmp").write_text(listening.url)
        (config.state / "url.tmp").replace(config.state / "url")

    run_server(config, announce, planner=no_plan)


class Served:
    """A server process and the admin's token."""

    def __init__(self, config: ServerConfig) -> None:
        self.process = multiprocessing.get_context("spawn").Process(target=_serve, args=(config,))
        self.process.start()
        while not (config.state / "url").exists():
            time.sleep(0.02)
        self.address = (config.state / "url").read_text().removeprefix("http://")
        self.token = (config.state / "admin.token").read_text().strip()

    def send_all(self, path: str, bodies: list[bytes]) -> tuple[float, float]:
        """Send requests from `CLIENTS` threads; return wall seconds and the server's CPU seconds."""
        before_s, begun_s = cpu_s(self.process.pid or 0), time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda part: self._send(path, part), [bodies[i::CLIENTS] for i in range(CLIENTS)]))
        return time.monotonic() - begun_s, cpu_s(self.process.pid or 0) - before_s

    def _send(self, path: str, bodies: list[bytes]) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=120)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        for body in bodies:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status not in (200, 201):
                raise RuntimeError(f"{path}: {answer.status} {text[:300]!r}")
        connection.close()


@contextmanager
def served(place: Place) -> Iterator[Served]:
    """Run a server on a place for the time of the block."""
    server = Served(place.config)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.join(20)


def submissions(place: Place, quick: bool) -> Iterator[Row]:
    """Durable submissions over HTTP: one job a request by concurrent clients, and many jobs a request."""
    num_single, num_bulk = (200, 2_000) if quick else (1_500, 10_000)
    rounds = 1 if quick else 3
    single, bulk = [], []
    with served(place) as server:
        for turn in range(rounds):
            one = [submission(f"s{turn}-{i}").model_dump_json().encode() for i in range(num_single)]
            single.append((num_single, *server.send_all("/v1/jobs", one)))
            many = [[submission(f"b{turn}-{i + j}") for j in range(BULK)] for i in range(0, num_bulk, BULK)]
            wishes = [_bulk(jobs) for jobs in many]
            bulk.append((num_bulk, *server.send_all("/v1/jobs:bulk", wishes)))
    yield from _rates(f"durable submissions, one a request, {CLIENTS} clients, {place.name}", single, 1_000)
    yield from _rates(f"durable submissions, {BULK} a request, {place.name}", bulk, 10_000)


def _bulk(jobs: list[Submission]) -> bytes:
    return json.dumps({"submissions": [job.model_dump(mode="json") for job in jobs]}).encode()


def _rates(what: str, runs: list[tuple[int, float, float]], target: int) -> Iterator[Row]:
    rates = [count / wall_s for count, wall_s, _ in runs]
    median = statistics.median(rates)
    spread = f"{min(rates):.0f} to {max(rates):.0f} in {len(rates)} runs"
    yield Row(what=f"{what} ({spread})", ours=median, unit="1/s", target=f">= {target:,}", met=median >= target)
    per_cpu_s = statistics.median(count / used_s for count, _, used_s in runs)
    yield Row(what=f"{what}, per CPU second of the server", ours=per_cpu_s, unit="1/s")


def recovery(place: Place, quick: bool) -> Iterator[Row]:
    """A start with many jobs queued: folding the whole log, and behind a snapshot."""
    num_jobs = 2_000 if quick else 100_000
    store = open_store(place.config)
    snapshots = SnapshotFile(place.config.state)
    snapshots.path.unlink(missing_ok=True)
    try:
        last = store.append([])
        for first in range(0, num_jobs, 1000):
            store.append([_queued(first + i) for i in range(min(1000, num_jobs - first))])
        what = f"start with {num_jobs:,} jobs queued, {place.name}"
        actor = yield from _timed(f"{what}, the log folded whole", lambda: _start(store, snapshots), None)
        begun_s = time.process_time()
        actor.save_snapshot()
        yield Row(what=f"{what}: writing a snapshot, CPU", ours=time.process_time() - begun_s, unit="s")
        size = snapshots.path.stat().st_size / 2**20
        yield Row(what=f"{what}: size of a snapshot", ours=size, unit="MiB")
        store.append([_queued(num_jobs + i) for i in range(min(num_jobs, 5_000))])
        again = yield from _timed(
            f"{what}, behind a snapshot with {min(num_jobs, 5_000):,} events since",
            lambda: _start(store, snapshots),
            3.0,
        )
        if not again.last_event_number > actor.last_event_number >= last:
            raise RuntimeError("the start behind a snapshot did not reach the end of the log")
    finally:
        store.close()


def _queued(index: int) -> Event:
    name = f"q{index}"
    return JobSubmitted(now_s=1.0, job_id=name, user="ann", submission=submission(name))


def _start(store: Store, snapshots: SnapshotFile) -> CoordinatorActor:
    return CoordinatorActor(store, lambda _: None, snapshot_file=snapshots)


def _timed(
    what: str, act: Callable[[], CoordinatorActor], limit_s: float | None
) -> Generator[Row, None, CoordinatorActor]:
    begun_s, used_s = time.monotonic(), time.process_time()
    done = act()
    wall_s, used_s = time.monotonic() - begun_s, time.process_time() - used_s
    target = "" if limit_s is None else f"<= {limit_s:g}"
    for name, value in ((f"{what}, wall", wall_s), (f"{what}, CPU", used_s)):
        met = None if limit_s is None else value <= limit_s
        yield Row(what=name, ours=value, unit="s", target=target, met=met)
    return done


def flushes(folder: Path, quick: bool) -> Row:
    """What the disk allows one by one: write 4 KiB and flush."""
    count = 50 if quick else 500
    with (folder / "flushed").open("wb", buffering=0) as file:
        begun_s = time.monotonic()
        for _ in range(count):
            file.write(b"x" * 4096)
            os.fdatasync(file.fileno())
    rate = count / (time.monotonic() - begun_s)
    return Row(what="the disk: 4 KiB written and flushed, one after another", ours=rate, unit="1/s")


@contextmanager
def places(folder: Path) -> Iterator[Callable[[str], list[Place]]]:
    """Make fresh stores of both kinds; PostgreSQL only where it is installed."""
    with ExitStack() as stack:
        found = binaries()
        address = stack.enter_context(running(found)) if found else None
        if address is None:
            print(f"PostgreSQL is not installed and left out: {INSTALL}", flush=True)

        def make(name: str) -> list[Place]:
            (folder / name).mkdir()
            made = [Place("SQLite", ServerConfig(state=folder / name / "sqlite", port=0))]
            if address is not None:
                with psycopg.connect(f"{address} dbname=postgres", autocommit=True) as db:
                    db.execute(f"CREATE DATABASE {name}".encode())
                file = folder / name / "address"
                file.write_text(f"{address} dbname={name}")
                state = folder / name / "postgres"
                made.append(Place("PostgreSQL", ServerConfig(state=state, port=0, database=file)))
            for place in made:
                place.config.state.mkdir()
            return made

        yield make


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, places(Path(name)) as make:
        rows.append(flushes(Path(name), options.quick))
        for part, measure in (("submitted", submissions), ("queued", recovery)):
            for place in make(part):
                for row in measure(place, options.quick):
                    print(f"{row.what}: {row.ours:.4g} {row.unit}", file=sys.stderr, flush=True)
                    rows.append(row)
    print_rows(rows, options.json)


if __name__ == "__main__":
    main()
