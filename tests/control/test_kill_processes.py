"""kill -9 of real processes over the real store: nothing acknowledged is lost, nothing is doubled or left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.check_adapter import is_running
from tests.control.processes import RealPool, until

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = RealPool(tmp_path)
    yield pool
    pool.close()


def is_clean(pool: RealPool) -> bool:
    """Every device is free, at the server and at the sites, and no run folder is left."""
    try:
        folders = [path for site in ("east", "west") for path in (pool.folder / site / "runs").glob("*/*")]
    except FileNotFoundError:  # a site is taking a folder away just now
        return False
    return pool.free() == {"east": 2, "west": 2} and not folders


def kill_somebody(pool: RealPool, chance: random.Random) -> None:
    """Kill the server or an agent at a random time; the server half of the time at a point in its store."""
    victim = chance.choice(["server", "server", "east", "west"])
    if victim == "server" and chance.random() < 0.5:
        pool.kill("server")
        pool.start("server", (chance.choice(["before", "between", "after"]), chance.randint(1, 6)))
        deadline = time.monotonic() + 0.8
        while pool.alive("server") and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        time.sleep(chance.uniform(0, 0.4))
    pool.kill(victim)
    time.sleep(chance.uniform(0, 0.2))
    pool.start(victim)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try a sample of the seeds, or all with `--whole`."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(20 if metafunc.config.getoption("--whole") else 6))


def test_whoever_is_killed_every_acknowledged_job_ends_once(pool: RealPool, seed: int) -> None:
    """The script: submit two jobs; kill three times, anywhere; then all is done, once, and all is free."""
    chance = random.Random(seed)
    acknowledged: dict[str, str] = {}
    kills_left = 3
    while kills_left or len(acknowledged) < 2:
        for key in ("one", "two"):
            job_id = None if key in acknowledged else pool.submit(key)
            if job_id is not None:
                acknowledged[key] = job_id
        if kills_left:
            kill_somebody(pool, chance)
            kills_left -= 1
    jobs = list(acknowledged.values())
    until(lambda: [pool.state(job) for job in jobs] == ["succeeded"] * 2, "both succeed")
    until(lambda: is_clean(pool), "everything is given back")
    started = Counter(entry[:3] for entry in pool.starts())
    assert set(started.values()) == {1}, f"started twice: {started}"
    assert {job for job, _, _ in started} == set(acknowledged.values()), "a job nobody was told of"
    for job_id in acknowledged.values():
        found = pool.job(job_id)
        assert found is not None
        last = [(found.attempt, rank, step) for rank in (0, 1) for step in (0, 1)]
        assert [line for line in pool.metrics(job_id) if line[0] == found.attempt] == last, "lines lost"
    assert not any(is_running(int(pid)) for *_, pid in pool.starts())


def kill_a_worker(pool: RealPool, attempt: int) -> float:
    """kill -9 the first worker of an attempt; return the seconds until none of the attempt is left."""
    until(lambda: len(pool.workers(attempt)) == 2, f"attempt {attempt} starts")
    workers = pool.workers(attempt)
    os.kill(workers[0], signal.SIGKILL)
    return until(lambda: not any(is_running(pid) for pid in workers), "all workers end", 10)


def test_a_killed_worker_stops_the_job_everywhere_and_starts_it_again_so_often(pool: RealPool) -> None:
    """Within 10 s no site runs a worker of the attempt; after `max_restarts` the job fails, saying why."""
    job_id = None
    while job_id is None:
        job_id = pool.submit("k", training={"steps": 10_000}, max_restarts=1)
    times_s = [kill_a_worker(pool, 1), kill_a_worker(pool, 2)]
    until(lambda: pool.state(job_id) == "failed", "the job gives up", 10)
    found = pool.job(job_id)
    assert found is not None
    assert "signal 9" in found.reason
    assert found.restarts == 1
    until(lambda: is_clean(pool), "everything is given back")
    assert len(pool.starts()) == 4
    assert max(times_s) < 10


def test_cancel_and_ctrl_c_leave_nothing_behind(pool: RealPool) -> None:
    """A cancelled job frees its devices; an agent that is asked to end ends its workers too."""
    first = pool.submit("a", training={"steps": 10_000})
    until(lambda: len(pool.workers(1)) == 2, "it starts")
    assert first is not None
    pool.call("POST", f"/v1/jobs/{first}/cancel")
    until(lambda: pool.state(first) == "cancelled" and is_clean(pool), "it is cancelled", 10)
    pool.submit("b", training={"steps": 10_000})
    until(lambda: len(pool.workers(1)) == 4, "the next one starts")
    assert [pool.end(name) for name in ("east", "west", "server")] == [0, 0, 0]
    assert not any(is_running(pid) for pid in pool.workers(1))
