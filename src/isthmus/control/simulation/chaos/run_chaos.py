"""`run_chaos`: one seeded run with injected faults, and checks of its invariants.

    1. Three to five owners with one site each; their users submit 70 jobs.
    2. For the first 90 s all kinds of faults are injected (`FAULT_RATES`), nodes fail, owners take devices back
       and change their prices, and users cancel, preempt and delete jobs.
    3. Without further faults, every job must then end.

Invariants are checked after every event, the ledger at the end.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from isthmus.control.accounting.check_ledger import check_ledger
from isthmus.control.coordinator.accounting.check_metering import metering_problems
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.simulation.chaos.safety_monitor import SafetyMonitor
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_injector import FAULT_RATES, FaultInjector
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.simulated_server import DurableLog, MemoryLog, SimulatedServer
from isthmus.control.simulation.traces.job_trace import Trace, TraceJob
from isthmus.control.simulation.traces.trace_pools import OWNER_LEVELS, assign_owners
from isthmus.control.state.events import Event, JobDeleted, PreemptionAgreed, TariffPublished, VictimNamed
from isthmus.control.state.invariants import violations
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord
from isthmus.core.errors import ConflictError, InputError, NotFoundError, UnavailableError
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.owner.tariff import Tariff
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.core.priority import Priority
from isthmus.sim import ProcessGenerator
from isthmus.site import LocalJob

NUM_JOBS = 70
CLOCK_SKEW_GRACE_S = 1e6
ARRIVALS_S, CHAOS_S, END_S = 60.0, 90.0, 900.0
CONFIG = CoordinatorConfig(
    reservation_timeout_s=6,
    start_timeout_s=20,
    lease_s=5,
    agent_timeout_s=3,
    run_lease_s=10,
    run_lease_margin_s=1,
    retry_s=1,
    max_retry_s=8,
    checkpoint_timeout_s=5,
    eviction_timeout_s=8,
    preflight_timeout_s=8,
    max_unknown_preflights=10**6,
)
DELAYS = Delays(
    planning_s=0.05,
    check_in_s=0.5,
    stop_s=0.3,
    peer_timeout_s=2.0,
    checkpoint_interval_s=3.0,
    checkpoint_s=0.5,
    restore_s=0.3,
    heartbeat_interval_s=4.0,
    preflight_s=0.2,
)
POLICY = OwnerPolicy(protect_s=3.0, hold_s=30.0, grace_s=2.0)
PRIORITIES: tuple[Priority, ...] = ("low", "middle", "middle", "high")


@dataclass(kw_only=True)
class ChaosRun:
    """The result of a chaos run; it passed if `problems` is empty."""

    seed: int
    # Number of injected faults by kind.
    fault_counts: Counter[str]
    owners: int
    jobs: int
    # Events appended to the log.
    events: int
    # Submissions that the server acknowledged.
    acknowledged: int
    # Preemptions that users agreed to.
    preemptions: int
    # Tariffs that owners published, and entries in the ledger at the end.
    tariffs: int
    entries: int
    # Ended jobs that users deleted.
    deletions: int
    # Longest time that devices were held for a part no longer wanted.
    longest_leak_s: float
    problems: list[str] = field(default_factory=list)
    # Time and kind of each fault.
    history: list[str] = field(default_factory=list)


def run_chaos(
    seed: int,
    log: DurableLog | None = None,
    rates: Mapping[str, float] = FAULT_RATES,
    config: CoordinatorConfig = CONFIG,
    at_end: Callable[[Coordinator], object] = lambda _: None,
    check_every: int = 1,
) -> ChaosRun:
    """Run the scenario of `seed` on `log` (default: in memory); `rates` may omit kinds of faults.

    `at_end` gets the server's coordinator. Invariants are checked after every `check_every`-th event, which changes
    nothing else of the run.
    """
    rng = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
    pool, jobs = _make_scenario(rng)
    truth, faults, kept = SafetyMonitor(), FaultInjector(seed + 1, rates), log or MemoryLog()
    problems: list[str] = []
    deleted: set[str] = set()

    def check(server: SimulatedServer, now_s: float) -> None:
        if sum(server.event_counts.values()) % check_every:
            return
        fresh = (
            world.kernel.now_s - server.up_since_s < DELAYS.tick_interval_s
        )  # its clock may have jumped before a first tick
        grace_s = CLOCK_SKEW_GRACE_S if fresh else 2 * DELAYS.tick_interval_s
        kept_jobs = world.acknowledged - deleted
        found = violations(server.coordinator.state, now_s, grace_s=grace_s, job_ids=kept_jobs)
        found += metering_problems(server.coordinator.state)
        problems.extend(f"{world.kernel.now_s:.2f} s: {one}" for one in found if len(problems) < 20)

    world = PoolSimulation(
        pool,
        jobs,
        rules=config,
        delays=DELAYS,
        faults=faults,
        policies={one.name: POLICY for one in pool.clusters},
        log=kept,
        on_process=truth.on_process,
        check_invariants=check,
    )
    truth.attach(world)
    cancelled = {job.name for job in jobs if rng.random() < 0.1}
    world.kernel.start(_strike_sites(world, faults, rng))
    world.kernel.start(_cancel_jobs(world, sorted(cancelled), rng))
    world.kernel.start(_agree_to_offers(world, faults, rng))
    world.kernel.start(_change_prices(world, faults, seed + 2))
    world.kernel.start(_delete_jobs(world, faults, deleted, seed + 3))
    broken = _run_simulation(world, faults, deleted)
    problems += [*broken, *truth.problems, *_final_problems(world, cancelled, deleted)]
    accounts = check_ledger(world.server.coordinator.state.meter.ledger)
    if accounts.sum or accounts.unpaired or accounts.differences:
        problems.append(f"the ledger is out of balance: {accounts}")
    if not broken and not faults.rates.get("clock skew") and log is None:
        problems += _replay_problems(world, kept, config)
    at_end(world.server.coordinator)
    return ChaosRun(
        seed=seed,
        fault_counts=faults.counts,
        owners=len(pool.clusters),
        jobs=len(jobs),
        events=sum(world.server.event_counts.values()),
        acknowledged=len(world.acknowledged),
        preemptions=world.server.event_counts["preemption-agreed"],
        tariffs=world.server.event_counts["tariff-published"],
        entries=accounts.entries,
        deletions=world.server.event_counts["job-deleted"],
        longest_leak_s=truth.longest_leak_s,
        problems=problems,
        history=[f"{at:.2f} s: {what}" for at, what in faults.history],
    )


def _make_scenario(rng: random.Random) -> tuple[Pool, tuple[TraceJob, ...]]:
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
    links = tuple(Link(source=a, target=b, bandwidth_gbps=100, delay_ms=5) for a in names for b in names if a != b)
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
    settled, pool = assign_owners(Trace(jobs=tuple(jobs)), Pool(clusters=clusters, links=links))
    return pool, settled


def _strike_sites(simulation: PoolSimulation, faults: FaultInjector, rng: random.Random) -> ProcessGenerator:
    """Fail nodes and submit owners' jobs that evict parts of the pool, while faults are on."""
    number = 0
    while faults.enabled:
        yield simulation.kernel.now_s + rng.expovariate(1 / 1.5)
        agent = rng.choice(list(simulation.agents.values()))
        running = [part.key for part in agent.parts.values() if part.live and not part.local]
        if running and faults.should_inject("node failure"):
            simulation.fail_part(agent.name, rng.choice(running))
        if faults.should_inject("owner's eviction"):
            number += 1
            group = agent.cluster.node_groups[0]
            chips = rng.randint(1, group.num_chips)
            name = f"own-{number}"
            agent.submit_local_job(
                LocalJob(name=name, command=(), node_group=group.name, chips=chips, level=OWNER_LEVELS[0])
            )
            simulation.kernel.start(_withdraw_later(simulation, agent.name, name, rng.uniform(2, 15)))


def _withdraw_later(simulation: PoolSimulation, site: str, name: str, after_s: float) -> ProcessGenerator:
    yield simulation.kernel.now_s + after_s
    simulation.agents[site].withdraw_local_job(name)


def _cancel_jobs(simulation: PoolSimulation, names: list[str], rng: random.Random) -> ProcessGenerator:
    for name in names:
        yield simulation.kernel.now_s + rng.uniform(0, 2 * CHAOS_S / max(1, len(names)))
        if name in simulation.acknowledged:
            simulation.cancel(name)


def _agree_to_offers(simulation: PoolSimulation, faults: FaultInjector, rng: random.Random) -> ProcessGenerator:
    """Agree to preemption offers of waiting jobs, while faults are on."""
    while faults.enabled:
        yield simulation.kernel.now_s + rng.expovariate(1 / 3.0)
        coordinator = simulation.server.coordinator
        waiting = coordinator.list_waiting(limit=8)
        offer = coordinator.job_view(rng.choice(waiting).id) if waiting else None
        if offer is None or not offer.offer:
            continue
        named = tuple(VictimNamed(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in offer.offer)
        with contextlib.suppress(ConflictError, NotFoundError, UnavailableError):
            simulation.server.submit_event(partial(_preemption_agreed, offer.id, named))


def _change_prices(simulation: PoolSimulation, faults: FaultInjector, seed: int) -> ProcessGenerator:
    """Let owners publish other prices, while faults are on."""
    rng = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
    while faults.enabled:
        yield simulation.kernel.now_s + rng.expovariate(1 / 4.0)
        cluster = rng.choice([agent.cluster for agent in simulation.agents.values()])
        price = {"cluster": cluster.name, "node_group": "g", "per_chip_hour": str(rng.randint(0, 10**7) / 10**6)}
        tariff = Tariff.model_validate({"currency": "EUR", "prices": [price]})
        with contextlib.suppress(ConflictError, InputError, UnavailableError):
            simulation.server.submit_event(partial(_tariff_published, cluster.owner, tariff))


def _delete_jobs(simulation: PoolSimulation, faults: FaultInjector, deleted: set[str], seed: int) -> ProcessGenerator:
    """Let users delete jobs that have ended, while faults are on; add them to `deleted` before they are."""
    rng = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
    while faults.enabled:
        yield simulation.kernel.now_s + rng.expovariate(1 / 6.0)
        jobs = simulation.server.coordinator.state.jobs
        names = sorted(name for name in simulation.acknowledged & jobs.keys() if _is_over(jobs[name]))
        if not names:
            continue
        name = rng.choice(names)
        deleted.add(name)
        with contextlib.suppress(ConflictError, NotFoundError, UnavailableError):
            simulation.server.submit_event(partial(_job_deleted, name))


def _is_over(job: JobRecord) -> bool:
    return job.state in TERMINAL_STATES and not job.unreleased_parts()


def _job_deleted(job_id: str, now_s: float) -> Event:
    return JobDeleted(now_s=now_s, job_id=job_id)


def _tariff_published(owner: str, tariff: Tariff, now_s: float) -> Event:
    return TariffPublished(now_s=now_s, by=owner, owner=owner, tariff=tariff)


def _preemption_agreed(job_id: str, victims: tuple[VictimNamed, ...], now_s: float) -> Event:
    return PreemptionAgreed(now_s=now_s, job_id=job_id, victims=victims)


def _run_simulation(simulation: PoolSimulation, faults: FaultInjector, deleted: set[str]) -> list[str]:
    try:
        simulation.kernel.run(CHAOS_S)
        faults.enabled = False
        while simulation.kernel.now_s < END_S and not _is_finished(simulation, deleted):
            simulation.kernel.run(simulation.kernel.now_s + 5.0)
    except Exception as error:
        return [f"{simulation.kernel.now_s:.2f} s: {type(error).__name__}: {error}"]
    return []


def _is_finished(simulation: PoolSimulation, deleted: set[str]) -> bool:
    jobs = simulation.server.coordinator.state.jobs
    ended = len(jobs.keys() | deleted) == NUM_JOBS and all(map(_is_over, jobs.values()))
    return ended and not simulation.server.is_down and not any(agent.parts for agent in simulation.agents.values())


def _final_problems(simulation: PoolSimulation, cancelled: set[str], deleted: set[str]) -> list[str]:
    """Return what is wrong at the end, when all jobs should have ended."""
    jobs = simulation.server.coordinator.state.jobs
    lost = simulation.acknowledged - jobs.keys() - deleted
    found = [f"{name} was acknowledged but is lost" for name in sorted(lost)]
    for name, job in jobs.items():
        if job.state != "succeeded" and not (job.state == "cancelled" and name in cancelled):
            found.append(f"{name} is {job.state} at the end: {job.history}")
    for name, agent in simulation.agents.items():
        installed = {group.name: group.num_chips for group in agent.cluster.node_groups}
        if agent.machine.free_chips() != installed:
            found.append(f"{name} has {agent.machine.free_chips()} of {installed} free at the end")
    found += [f"{name} was never acknowledged" for name in simulation.job_outcomes.keys() - simulation.acknowledged]
    return found


def _replay_problems(simulation: PoolSimulation, log: DurableLog, config: CoordinatorConfig) -> list[str]:
    """Check that replaying the log gives the server's state; return the problem found."""
    again = Coordinator.replay(log.events(), config)
    for state in (again.state, simulation.server.coordinator.state):
        for record in state.clusters.values():
            record.last_report_s = None
        state.changed_jobs.clear()
    same = again.state == simulation.server.coordinator.state
    return [] if same else ["replaying the log gives another state"]
