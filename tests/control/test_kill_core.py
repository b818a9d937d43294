"""kill -9 of any process at any point: no acknowledged job lost, none doubled, all devices free. Virtual time.

The script of every run: (1) a few users submit jobs to a pool of three sites; (2) for the first 60 s messages
are lost, repeated and late, workers fail, and kill points kill processes that reach them;
(3) then no more faults occur, and every job must end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.simulation.faults.torn_write_log import SqliteEventLog
from isthmus.control.simulation.simulated_server import DurableLog, MemoryLog
from isthmus.control.state.job_records import TERMINAL_STATES, PoolState
from tests.control.samples import submission
from tests.control.simulated import RULES, STEP_S, Server, Site, User
from tests.control.world import KILL_POINTS, Chaos, World

pytestmark = pytest.mark.integration

CHAOS_S, END_S = 60.0, 600.0


def run(seed: int, disk: DurableLog) -> Counter[str]:
    """Run the script; assert its end; return how often each kill point killed."""
    rng = random.Random(seed)
    chaos = Chaos(rng=rng)
    world = World(chaos)
    users, needs = _users(rng)
    server = Server(disk, chaos, needs)
    sites = [Site(name, chips, world) for name, chips in (("north", 3), ("east", 4), ("west", 2))]
    now_s = 0.0
    while now_s < END_S:
        now_s += STEP_S
        chaos.on = now_s < CHAOS_S
        world.pass_time(now_s)
        server.step(now_s)
        for site in rng.sample(sites, len(sites)):
            site.step(server, now_s)
        for user in users:
            user.step(server, now_s, rng)
        if not chaos.on and _quiet(server, sites, users):
            break
    _check_end(server, sites, users, world)
    return chaos.kills


def _users(rng: random.Random) -> tuple[list[User], dict[str, int]]:
    users, needs = [], {}
    for index in range(rng.randint(2, 5)):
        key = f"k{index}"
        needs[key] = rng.randint(1, 9)
        wish = submission(policy=rng.choice(("auto", "manual")), key=key, restarts=rng.randint(0, 4))
        cancel_at_s = rng.uniform(0, CHAOS_S) if rng.random() < 0.3 else None
        at_s = rng.uniform(0, CHAOS_S / 2)
        users.append(User(wish=wish, at_s=at_s, cancel_at_s=cancel_at_s, deletes=rng.random() < 0.3))
    return users, needs


def _quiet(server: Server, sites: Sequence[Site], users: Sequence[User]) -> bool:
    jobs = server.coordinator.state.jobs
    ended = all(job.state in TERMINAL_STATES and not job.unreleased_parts() for job in jobs.values())
    awake = not server.down_until_s and all(user.job_id for user in users)
    return ended and awake and not any(site.machine.parts for site in sites)


def _check_end(server: Server, sites: Sequence[Site], users: Sequence[User], world: World) -> None:
    jobs = server.coordinator.state.jobs
    for user in users:
        assert user.job_id is not None, "the pool never took the job in"
        mine = [job for job in jobs.values() if job.packed.key == user.wish.key]
        if user.deletes and not mine:
            continue
        assert [job.id for job in mine] == [user.job_id], "lost or doubled"
        job = mine[0]
        assert job.state in TERMINAL_STATES, f"{job.id} is still {job.state}: {job.history}"
        assert job.state != "cancelled" or user.asked_to_cancel
        assert job.state != "failed" or job.restarts == job.max_restarts
    for site in sites:
        assert site.machine.free_chips() == {"g": site.chips}, "a card was not given back"
        assert not site.machine.parts
        assert world.running(site.cluster.name) == 0
    assert all(not record.parts for record in server.coordinator.state.clusters.values())
    again = Coordinator.replay(server.disk.events(), RULES)
    assert _durable(again.state) == _durable(server.coordinator.state), "the state is not the fold of the log"


def _durable(state: PoolState) -> PoolState:
    for record in state.clusters.values():
        record.last_report_s = None
    state.changed_jobs.clear()
    return state


@pytest.mark.parametrize("seed", range(5))
def test_kills_lose_and_double_nothing(seed: int) -> None:
    """Whichever process dies at whichever point, every acknowledged job ends once, and all devices are free."""
    assert sum(run(seed, MemoryLog()).values()) > 0


@pytest.mark.parametrize("seed", [1000])
def test_kills_with_the_real_store_lose_nothing(seed: int, tmp_path: Path) -> None:
    """The same with SQLite on a disk, its log torn where the server dies between write and flush."""
    disk = SqliteEventLog(tmp_path)
    run(seed, disk)
    disk.close()


@pytest.mark.slow
def test_many_seeds_reach_every_kill_point(whole: bool, tmp_path: Path) -> None:
    """50 seeded runs, or 200, one in ten on the real store: each kind of kill point kills once a run."""
    kills: Counter[str] = Counter()
    seeds = range(2000, 2200 if whole else 2050)
    for seed in seeds:
        if seed % 10:
            kills += run(seed, MemoryLog())
            continue
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk = SqliteEventLog(folder)
        kills += run(seed, disk)
        disk.close()
    assert kills.keys() == KILL_POINTS.keys()
    assert min(kills.values()) >= len(seeds), kills
