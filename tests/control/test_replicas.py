"""Several servers on one PostgreSQL: one leads, any answers; a kill loses nothing acknowledged."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from isthmus.agent.adapters.check_adapter import is_running
from isthmus.control.service.control_service import ControlService
from isthmus.control.state.events import DeadlinePassed, EpochBegan, Event
from isthmus.control.store.leader_election import SingleServer
from isthmus.control.store.postgres_leader_election import PostgresLeaderElection
from isthmus.control.store.postgres_store import PostgresStore
from tests.control.processes import until
from tests.control.replicas import NAMES, Replicas
from tests.control.serving import POOL, plan_across, submission
from tests.control.test_kill_processes import is_clean

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, postgres: str) -> Iterator[Replicas]:
    pool = Replicas(tmp_path, postgres)
    yield pool
    pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try a sample of the seeds, or all with `--whole`."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(4 if metafunc.config.getoption("--whole") else 2))


def test_whichever_server_is_killed_every_acknowledged_job_ends_once(pool: Replicas, seed: int) -> None:
    """The script: kill the leader, or a server at a point in its store; submit; thrice; all is done once."""
    chance = random.Random(seed)
    acknowledged: dict[str, str] = {}
    for key in ("one", "two", "three"):
        if chance.random() < 0.5:
            victim = chance.choice(NAMES)
            pool.kill(victim)
            where = chance.choice(["before", "between", "after"])
            pool.start(victim, (where, chance.randint(1, 4)))
            time.sleep(chance.uniform(0, 0.5))
        else:
            until(lambda: pool.leader(), "somebody leads", 10)
            victim = pool.leader() or NAMES[0]
        pool.kill(victim)
        until(lambda key=key: acknowledged.update({key: pool.submit(key)}) or acknowledged[key], "taken in", 20)
        pool.start(victim)
    jobs = list(acknowledged.values())
    until(lambda: [pool.state(job) for job in jobs] == ["succeeded"] * 3, "all succeed")
    until(lambda: is_clean(pool), "everything is given back")
    started = Counter(entry[:3] for entry in pool.starts())
    assert set(started.values()) == {1}, f"started twice: {started}"
    assert {job for job, _, _ in started} == set(jobs), "a job nobody was told of"
    assert not any(is_running(int(pid)) for *_, pid in pool.starts())


@pytest.mark.on_the_clock
def test_another_leads_within_seconds_of_the_leaders_death(pool: Replicas) -> None:
    """Killed: the lock goes with its session. Hung: a replica that sees its silence ends its session."""
    until(pool.leader, "somebody leads", 10)
    first = pool.leader()
    pool.kill(first)
    took_s = until(lambda: pool.leader() not in ("", first), "another leads", 10)
    assert took_s < 3
    pool.start(first)
    second = pool.leader()
    hung = pool.processes[second].pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    try:
        took_s = until(lambda: pool.leader() == first, "the other leads again", 20)
        assert took_s < 10
    finally:
        os.kill(hung, signal.SIGCONT)
    until(lambda: pool.submit("after"), "it is taken in")


class Settable(SingleServer):
    """Leadership that a test gives and takes."""

    def __init__(self) -> None:
        self.leads = True

    def try_acquire(self) -> bool:
        return self.leads


def test_a_deposed_leader_appends_nothing_that_only_a_leader_may(postgres: str) -> None:
    """The script: 1. a leads; 2. b begins an epoch, unseen by a; 3. a hands in a deadline: it is not kept."""
    stores = [PostgresStore(postgres), PostgresStore(postgres)]
    a, b = [ControlService(store, POOL, planner=plan_across, leader_election=Settable()) for store in stores]
    a.tick()
    job = a.execute([a.submissions.submit_request("ann", submission())])[0].value()
    b.tick()

    def log() -> list[Event]:
        return [event for _, event in stores[0].events()]

    assert [event.epoch for event in log() if isinstance(event, EpochBegan)] == [1, 2]
    handed_in = (
        DeadlinePassed(now_s=2.0, job_id=job.id, state="waiting", attempt=0),
        EpochBegan(now_s=2.0, epoch=9),
    )
    for event in handed_in:
        a._propose_as_leader(event)
    a.job(job.id)  # settles what waits
    until(lambda: b.job(job.id) == a.job(job.id), "b's plans for the job are known to both")
    assert not [event for event in log() if event in handed_in]
    for shell, store in zip((a, b), stores, strict=True):
        shell.close()
        store.close()


def test_the_lock_has_one_holder_and_is_lost_with_its_session(postgres: str) -> None:
    """The script: 1. a leads, b does not; 2. a's session is ended; 3. b leads, a knows that it does not."""
    PostgresStore(postgres).close()
    a, b = PostgresLeaderElection(postgres), PostgresLeaderElection(postgres)
    assert (a.try_acquire(), b.try_acquire(), a.try_acquire()) == (True, False, True)
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(l.pid) FROM pg_locks l WHERE l.locktype = 'advisory' AND "
            "l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    until(b.try_acquire, "b leads", 5)
    assert (a.try_acquire(), a.try_acquire(), b.try_acquire()) == (False, False, True)
    b.release()
    until(a.try_acquire, "a leads", 5)
    a.release()


def test_what_one_server_hears_the_others_know(postgres: str) -> None:
    """A report to a server that does not lead counts at the one that does."""
    PostgresStore(postgres).close()
    a, b = PostgresLeaderElection(postgres), PostgresLeaderElection(postgres)
    assert a.record_report("east")
    assert 0 <= b.report_ages_s()["east"] < 5
    a.release()
    assert 0 <= b.report_ages_s()["east"] < 5
    b.release()


def test_a_database_that_is_away_is_led_by_nobody() -> None:
    """A replica that cannot reach it neither leads nor fails."""
    away = PostgresLeaderElection("postgresql://u:hunter2@127.0.0.1:1/x")
    assert not away.record_report("east")
    assert (away.try_acquire(), away.report_ages_s()) == (False, {})
