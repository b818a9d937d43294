"""Joint preemption over five simulated owners: its virtual time, and the jobs that it stops needlessly."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_injector import FaultInjector
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.control.state.events import PreemptionAgreed, VictimNamed
from isthmus.core.errors import ConflictError
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool

OWNERS = 5
CHECKPOINT_S = 8.0


@dataclass(frozen=True)
class Preemption:
    """One preemption: seconds from the user's word until all owners were ready, and from the last verified
    checkpoint until the preempting job ran; victims that were ended, and those of them that were not needed.
    """

    prepare_s: float
    commit_s: float
    victims: int
    needless: int


def preempt_once(seed: int) -> Preemption:
    """Fill five owners' sites with jobs of low priority; a job over all five takes what it needs of them.

    One message takes 5 to 60 ms; workers start in 0.5 s and end in 0.3 s; a checkpoint takes 8 s.
    """
    rng = FaultInjector(seed).rng
    names = [f"owner-{number}" for number in range(OWNERS)]
    group = NodeGroup(name="g", chip="H20", nodes=2, chips_per_node=8)
    pool = Pool(
        clusters=tuple(Cluster(name=name, owner=name, node_groups=(group,)) for name in names),
        links=tuple(Link(source=a, target=b, bandwidth_gbps=100, delay_ms=5) for a in names for b in names if a != b),
    )
    low = [
        TraceJob(
            name=f"low-{number}",
            owner=names[0],
            submit_s=0.1 * number,
            run_s=5000.0,
            chips_per_worker=8,
            priority="low",
        )
        for number in range(2 * OWNERS)
    ]
    high = TraceJob(
        name="high",
        owner=names[0],
        submit_s=300.0,
        run_s=60.0,
        workers=8,
        chips_per_worker=8,
        priority="high",
    )
    delays = Delays(network_s=rng.uniform(0.005, 0.06), check_in_s=0.5, stop_s=0.3, checkpoint_s=CHECKPOINT_S)
    return _Watch(PoolSimulation(pool, [*low, high], delays=delays)).play()


class _Watch:
    """The user of the job of high priority, with a watch."""

    def __init__(self, world: PoolSimulation) -> None:
        self.world = world
        self.agreed_s = self.asked_s = self.executed_s = self.ran_s = 0.0
        self.victims: set[str] = set()

    def play(self) -> Preemption:
        kernel = self.world.kernel
        while kernel.now_s < 400 and not self.ran_s:
            kernel.run(kernel.now_s + 0.005)
            self._look(kernel.now_s)
        needed = -(-self.world.job_outcomes["high"].job.chips // 8)
        stopped = [name for name, fate in self.world.job_outcomes.items() if fate.num_interruptions and name != "high"]
        return Preemption(
            prepare_s=self.asked_s - self.agreed_s,
            commit_s=self.ran_s - self.executed_s,
            victims=len(stopped),
            needless=max(0, len(stopped) - needed) + len(set(stopped) - self.victims),
        )

    def _look(self, now_s: float) -> None:
        job = self.world.server.coordinator.state.jobs.get("high")
        if job is None:
            return
        if not self.agreed_s and job.state in ("waiting", "blocked"):
            self._agree(now_s)
        elif job.state == "preempting" and not self.asked_s:
            victims = [self.world.server.coordinator.state.jobs[name] for name in self.victims]
            if any(part.checkpoint_requested for victim in victims for part in victim.current_parts()):
                self.asked_s = now_s
        elif job.state == "preparing" and not self.executed_s:
            self.executed_s = now_s
        elif job.state == "running" and not self.ran_s:
            self.ran_s = now_s

    def _agree(self, now_s: float) -> None:
        offer = self.world.server.coordinator.job_view("high").offer
        if not offer:
            return
        named = tuple(VictimNamed(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in offer)
        try:
            self.world.server.submit_event(lambda at_s: PreemptionAgreed(now_s=at_s, job_id="high", victims=named))
        except ConflictError:
            return
        self.agreed_s, self.victims = now_s, {one.job for one in offer}
