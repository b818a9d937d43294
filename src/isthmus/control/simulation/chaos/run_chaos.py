"""`run_chaos`: one seeded run with injected faults, and checks of its invariants.

    1. Three to five owners with one site each; their users submit 70 jobs.
    2. For the first 90 s all kinds of faults are injected (`RATES`), nodes fail, owners take devices back,
       and users cancel and preempt jobs.
    3. Without further faults, every job must then end.

Invariants are checked after every event.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from isthmus.control.coordinator.coordinator import Coordinator, Rules
from isthmus.control.simulation.chaos.truth import Truth
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_rates import RATES, Faults
from isthmus.control.simulation.simulated_server import EventLog, ListLog, SimulatedServer
from isthmus.control.simulation.traces.trace import Trace, TraceJob
from isthmus.control.simulation.traces.trace_pools import OWN_LEVELS, settle
from isthmus.control.simulation.world import PoolWorld
from isthmus.control.state.events import Event, PreemptionAgreed, VictimNamed
from isthmus.control.state.invariants import violations
from isthmus.control.state.job_records import ENDED
from isthmus.core.errors import ConflictError, NotFoundError, UnavailableError
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.core.priority import Priority
from isthmus.sim.kernel import Steps
from isthmus.site import LocalJob

NUM_JOBS = 70
SKEW_S = 1e6
ARRIVALS_S, CHAOS_S, END_S = 60.0, 90.0, 900.0
RULES = Rules(
    reservation_s=6,
    start_s=20,
    lease_s=5,
    agent_lost_s=3,
    retry_s=1,
    retry_most_s=8,
    protect_s=5,
    evict_s=8,
)
DELAYS = Delays(
    planning_s=0.05,
    check_in_s=0.5,
    stop_s=0.3,
    peer_s=2.0,
    checkpoint_every_s=3.0,
    checkpoint_s=0.5,
    restore_s=0.3,
    beat_s=4.0,
)
POLICY = OwnerPolicy(protect_s=3.0, hold_s=30.0, grace_s=2.0)
PRIORITIES: tuple[Priority, ...] = ("low", "middle", "middle", "high")


@dataclass(kw_only=True)
class ChaosRun:
    """The result of a chaos run; it passed if `problems` is empty."""

    seed: int
    # Number of injected faults by kind.
    struck: Counter[str]
    owners: int
    jobs: int
    # Events appended to the log.
    events: int
    # Submissions that the server acknowledged.
    acknowledged: int
    # Preemptions that users agreed to.
    preemptions: int
    # Longest time that devices were held for a part no longer wanted.
    longest_leak_s: float
    problems: list[str] = field(default_factory=list)
    # Time and kind of each fault.
    history: list[str] = field(default_factory=list)


def run_chaos(seed: int, log: EventLog | None = None, rates: Mapping[str, float] = RATES) -> ChaosRun:
    """Run the scenario of `seed` on `log` (default: in memory); `rates` may omit kinds of faults."""
    rng = random.Random(seed)
    pool, jobs = _script(rng)
    truth, faults, kept = Truth(), Faults(seed + 1, rates), log or ListLog()
    problems: list[str] = []

    def check(server: SimulatedServer, now_s: float) -> None:
        fresh = (
            world.kernel.now - server.up_s < DELAYS.tick_s
        )  # its clock may have jumped before a first tick
        grace_s = SKEW_S if fresh else 2 * DELAYS.tick_s
        found = violations(server.coordinator.state, now_s, grace_s=grace_s, job_ids=world.acknowledged)
        problems.extend(f"{world.kernel.now:.2f} s: {one}" for one in found if len(problems) < 20)

    world = PoolWorld(
        pool,
        jobs,
        rules=RULES,
        delays=DELAYS,
        faults=faults,
        policies={one.name: POLICY for one in pool.clusters},
        log=kept,
        processes=truth.processes,
        check=check,
    )
    truth.watch(world)
    cancelled = {job.name for job in jobs if rng.random() < 0.1}
    world.kernel.start(_misfortunes(world, faults, rng))
    world.kernel.start(_cancels(world, sorted(cancelled), rng))
    world.kernel.start(_agreements(world, faults, rng))
    broken = _play(world, faults)
    problems += [*broken, *truth.problems, *_end(world, cancelled)]
    if not broken and not faults.rates.get("clock skew") and log is None:
        problems += _fold(world, kept)
    return ChaosRun(
        seed=seed,
        struck=faults.struck,
        owners=len(pool.clusters),
        jobs=len(jobs),
        events=sum(world.server.counts.values()),
        acknowledged=len(world.acknowledged),
        preemptions=world.server.counts["preemption-agreed"],
        longest_leak_s=truth.longest_leak_s,
        problems=problems,
        history=[f"{at:.2f} s: {what}" for at, what in faults.history],
    )


def _script(rng: random.Random) -> tuple[Pool, tuple[TraceJob, ...]]:
    """Return the pool of the owners' sites and the jobs of their users."""
    names = [f"owner-{number}" for number in range(rng.randint(3, 5))]
    clusters = tuple(
        Cluster(
            name=name,
            owner=name,
            node_groups=(NodeGroup(name="g", chip="H20", nodes=rng.randint(1, 3), chips_per_node=4),),
        )
        for name in names
    )
    links = tuple(
        Link(source=a, target=b, bandwidth_gbps=100, delay_ms=5) for a in names for b in names if a != b
    )
    jobs = sorted(
        (
            TraceJob(
                name=f"job-{number}",
                owner=rng.choice(names),
                submit_s=rng.uniform(0, ARRIVALS_S),
                run_s=rng.uniform(1, 8),
                workers=rng.choice((1, 1, 2, 3, 4)),
                chips_per_worker=rng.choice((1, 2)),
                priority=rng.choice(PRIORITIES),
            )
            for number in range(NUM_JOBS)
        ),
        key=lambda job: job.submit_s,
    )
    settled, pool = settle(Trace(jobs=tuple(jobs)), Pool(clusters=clusters, links=links))
    return pool, settled


def _misfortunes(world: PoolWorld, faults: Faults, rng: random.Random) -> Steps:
    """Fail nodes and submit owners' jobs that evict parts of the pool, while faults are on."""
    number = 0
    while faults.on:
        yield world.kernel.now + rng.expovariate(1 / 1.5)
        agent = rng.choice(list(world.agents.values()))
        running = [part.key for part in agent.parts.values() if part.live and not part.local]
        if running and faults.strikes("node failure"):
            world.fail(agent.name, rng.choice(running))
        if faults.strikes("owner's eviction"):
            number += 1
            group = agent.cluster.node_groups[0]
            chips = rng.randint(1, group.chips)
            name = f"own-{number}"
            agent.submit(
                LocalJob(name=name, command=(), node_group=group.name, chips=chips, level=OWN_LEVELS[0])
            )
            world.kernel.start(_leave(world, agent.name, name, rng.uniform(2, 15)))


def _leave(world: PoolWorld, site: str, name: str, after_s: float) -> Steps:
    yield world.kernel.now + after_s
    world.agents[site].withdraw(name)


def _cancels(world: PoolWorld, names: list[str], rng: random.Random) -> Steps:
    for name in names:
        yield world.kernel.now + rng.uniform(0, 2 * CHAOS_S / max(1, len(names)))
        if name in world.acknowledged:
            world.cancel(name)


def _agreements(world: PoolWorld, faults: Faults, rng: random.Random) -> Steps:
    """Agree to preemption offers of waiting jobs, while faults are on."""
    while faults.on:
        yield world.kernel.now + rng.expovariate(1 / 3.0)
        coordinator = world.server.coordinator
        waiting = coordinator.waiting(limit=8)
        offer = coordinator.job(rng.choice(waiting).id) if waiting else None
        if offer is None or not offer.offer:
            continue
        named = tuple(
            VictimNamed(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in offer.offer
        )
        with contextlib.suppress(ConflictError, NotFoundError, UnavailableError):
            world.server.tell(partial(_agreed, offer.id, named))


def _agreed(job_id: str, victims: tuple[VictimNamed, ...], now_s: float) -> Event:
    return PreemptionAgreed(now_s=now_s, job_id=job_id, victims=victims)


def _play(world: PoolWorld, faults: Faults) -> list[str]:
    try:
        world.kernel.run(CHAOS_S)
        faults.on = False
        while world.kernel.now < END_S and not _over(world):
            world.kernel.run(world.kernel.now + 5.0)
    except Exception as error:
        return [f"{world.kernel.now:.2f} s: {type(error).__name__}: {error}"]
    return []


def _over(world: PoolWorld) -> bool:
    jobs = world.server.coordinator.state.jobs.values()
    ended = len(jobs) == NUM_JOBS and all(job.state in ENDED and not job.unreleased() for job in jobs)
    return ended and not world.server.down and not any(agent.parts for agent in world.agents.values())


def _end(world: PoolWorld, cancelled: set[str]) -> list[str]:
    """Return what is wrong at the end, when all jobs should have ended."""
    jobs = world.server.coordinator.state.jobs
    found = [f"{name} was acknowledged but is lost" for name in sorted(world.acknowledged - jobs.keys())]
    for name, job in jobs.items():
        if job.state != "succeeded" and not (job.state == "cancelled" and name in cancelled):
            found.append(f"{name} is {job.state} at the end: {list(job.story or ())[-6:]}")
    for name, agent in world.agents.items():
        installed = {group.name: group.chips for group in agent.cluster.node_groups}
        if agent.machine.free_chips() != installed:
            found.append(f"{name} has {agent.machine.free_chips()} of {installed} free at the end")
    found += [f"{name} was never acknowledged" for name in world.fates.keys() - world.acknowledged]
    return found


def _fold(world: PoolWorld, log: EventLog) -> list[str]:
    """Check that replaying the log gives the server's state; return the problem found."""
    again = Coordinator.replay(log.events(), RULES)
    for state in (again.state, world.server.coordinator.state):
        for record in state.clusters.values():
            record.heard_s = None
        state.touched.clear()
    same = again.state == world.server.coordinator.state
    return [] if same else ["replaying the log gives another state"]
