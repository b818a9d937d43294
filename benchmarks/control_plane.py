"""The control plane on a virtual clock: decision speed, and what owners, queues and preemptions gain.

The loads have the shapes of public scheduler tests. Those tests wait for API servers and count wall seconds
(Kueue 351 s for 15,000 workloads, KAI 398 s for 4,000 jobs on 500 nodes). Here no message leaves the process,
and the figure is the CPU time of the server's coordinator, its planner and all simulated sites together. The
ratio therefore is the share of such a test that the decisions cost; it does not rank the schedulers by speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

from benchmarks._joint_preemption import preempt_once
from benchmarks._pool_shapes import kai_scale, kueue_baseline
from benchmarks.table import Row, compared, print_rows
from isthmus.control.placement import FreeResources, place_pipelines
from isthmus.control.simulation.compare_scenarios import ScenarioComparison, compare_scenarios
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.pool_outcome import LARGER_THAN_OWNER, PoolOutcome, percentile
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.traces.generate_trace import generate_trace
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.control.simulation.traces.trace_planner import TracePlanner
from isthmus.control.simulation.traces.trace_pools import make_trace_pool
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.job import PlacementConstraints
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.site.site_queue import queue_order

QUICK = 0.05
DELAYS = Delays(planning_s=0.001, check_in_s=0.05, stop_s=0.05)


def own_only(job: TraceJob) -> PlacementConstraints:
    """Let a job run at its owner's clusters only, as a queue borrows within its cohort only."""
    return PlacementConstraints(owners=(job.owner,))


def shape(name: str, peer: str, peer_s: float, limit_s: float, load: tuple[Pool, list[TraceJob]]) -> Iterator[Row]:
    """Play one load to its end; return what it cost and what was decided."""
    pool, jobs = load
    world = PoolSimulation(pool, jobs, delays=DELAYS, placement=own_only)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    world.run()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    done = world.outcome()
    what = f"{name}: {done.pool.done} of {len(jobs)} gangs, in all"
    yield compared(
        what,
        cpu_s,
        "CPU s",
        peer,
        peer_s,
        target=f"at most {limit_s:g} s",
        met=done.whole and cpu_s <= limit_s,
    )
    yield Row(what=what, ours=wall_s, unit="wall s")
    both_s = done.cpu_s + done.planning_cpu_s
    yield Row(what=f"{name}: coordinator and planner alone", ours=both_s, unit="CPU s")
    yield Row(what=f"{name}: gangs started", ours=done.pool.done / both_s, unit="per CPU s of both")
    yield Row(what=f"{name}: events decided", ours=done.events_per_cpu_s, unit="per CPU s of the coordinator")


def gang_placements(part: float) -> Row:
    """Place and take gangs of a generated trace on 10,000 nodes of 20 owners, all released when full."""
    group = NodeGroup(name="g", chip="H20", nodes=500, chips_per_node=8)
    names = [f"owner-{number}" for number in range(20)]
    pool = Pool(clusters=tuple(Cluster(name=name, owner=name, node_groups=(group,)) for name in names))
    trace = generate_trace(dict.fromkeys(names, 640), seed=1, num_jobs=int(15_000 * part), chips_per_worker=8)
    planner = TracePlanner(trace.jobs, pool)
    needs = [planner.requirement(job.workers, job.chips_per_worker, "H20") for job in trace.jobs]
    resources, placed = FreeResources.from_pool(pool), 0
    began_s = time.process_time()
    for need in needs:
        found = place_pipelines(need, resources, PlacementConstraints(), keep=1).candidates
        if found:
            resources.take(need, found[0].ranges)
            placed += 1
        else:
            resources = FreeResources.from_pool(pool)
    rate = placed / (time.process_time() - began_s)
    return Row(
        what=f"gang placements, pure core: {placed} on 10,000 nodes",
        ours=rate,
        unit="per CPU s",
        target="at least 2,000",
        met=rate >= 2000,
    )


def joint_preemptions(part: float) -> Iterator[Row]:
    """Preempt at five owners together, again and again, with messages of 5 to 60 ms."""
    found = [preempt_once(seed) for seed in range(max(10, int(200 * part)))]
    what = f"joint preemption over 5 owners ({len(found)} times, messages of 5 to 60 ms)"
    prepare_s = percentile(sorted(one.prepare_s for one in found), 0.99)
    commit_s = percentile(sorted(one.commit_s for one in found), 0.99)
    needless = sum(one.needless for one in found)
    unit = "ms of virtual time"
    yield Row(
        what=f"{what}: agreed to all ready, p99",
        ours=1e3 * prepare_s,
        unit=unit,
        target="at most 500",
        met=0 < prepare_s <= 0.5,
    )
    yield Row(
        what=f"{what}: checkpoint verified to running, p99",
        ours=1e3 * commit_s,
        unit=unit,
        target="at most 2000",
        met=0 < commit_s <= 2,
    )
    yield Row(what=f"{what}: needless victims", ours=needless, unit="jobs", target="0", met=not needless)


def reordering(part: float) -> Iterator[Row]:
    """Have 10,000 jobs wait at one owner's, shuffle them as its people might, and have them put right."""
    count = int(10_000 * part)
    pool = Pool(clusters=(_one_cluster(nodes=64),))
    fills = TraceJob(name="fills", owner="a", submit_s=0.0, run_s=1e6, workers=64, chips_per_worker=8)
    jobs = [
        TraceJob(name=f"job-{n}", owner="a", submit_s=1.0, run_s=100.0, workers=1 + n % 7, chips_per_worker=8)
        for n in range(count)
    ]
    rules = CoordinatorConfig(queue_window=count + 1, num_advertised=count + 1)
    world = PoolSimulation(pool, [fills, *jobs], delays=DELAYS, rules=rules)
    _until(world, lambda: len(_standing(world)) == count)
    server, agent = world.server, world.agents["a"]
    cpu_s, wall_s, at_s = time.process_time(), time.perf_counter(), world.kernel.now_s
    parts = queue_order(agent.machine.site)
    for part, there in zip(parts, Random(0).sample(range(count), count), strict=True):
        part.place = there
    agent.schedule_report(0.0)
    wanted = server.coordinator.site_queue("a")
    _until(world, lambda: _standing(world) == list(server.coordinator.site_queue("a")), at_s + 5)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    place_of = {job: place for place, job in enumerate(wanted)}
    seen = [place_of[job] for job in _standing(world) if job in place_of]
    wrong = sum(a > b for a, b in pairwise(seen)) / max(1, len(seen) - 1)
    what = f"{len(seen)} pending jobs put right at an owner"
    met = len(seen) == count and cpu_s <= 10
    yield Row(what=what, ours=cpu_s, unit="CPU s", target="at most 10 s", met=met)
    yield Row(what=what, ours=wall_s, unit="wall s")
    yield Row(
        what=f"{what}: neighbours in the wrong order after it",
        ours=100 * wrong,
        unit="%",
        target="at most 1",
        met=wrong <= 0.01,
    )


def _one_cluster(nodes: int) -> Cluster:
    group = NodeGroup(name="g", chip="H20", nodes=nodes, chips_per_node=8)
    return Cluster(name="a", owner="a", node_groups=(group,))


def _standing(world: PoolSimulation) -> list[str]:
    """Return the pool's jobs as they stand in the site's queue."""
    return [part.job for part in queue_order(world.agents["a"].machine.site)]


def _until(world: PoolSimulation, holds: Callable[[], bool], at_most_s: float = 600.0) -> None:
    while not holds() and world.kernel.now_s < at_most_s:
        world.kernel.run(world.kernel.now_s + 0.2)


def waits(part: float) -> Iterator[Row]:
    """Play three generated traces alone and pooled at home first; compare what each owner's own jobs wait."""
    for name, seed, load in (("calm", 2, 0.7), ("busy", 0, 0.85), ("uneven", 1, 0.85)):
        chips = {f"owner-{n + 1}": 64 * (n + 1) for n in range(3)}
        trace = generate_trace(chips, seed=seed, num_jobs=max(60, int(400 * part)), load=load)
        asked = ScenarioComparison(trace=trace, pool=make_trace_pool(trace, load, 3), scenarios=("alone", "home"))
        alone, home = compare_scenarios(asked)
        yield _worst(f"trace '{name}', {len(trace.jobs)} jobs, load {load:g}", alone, home)


def _worst(what: str, alone: PoolOutcome, home: PoolOutcome) -> Row:
    """Return the p95 wait of the owner whose own jobs wait longer in the pool than any other's."""
    pairs = [(a, h) for a, h in zip(alone.owners, home.owners, strict=True) if a.owner != LARGER_THAN_OWNER]
    ratio = max(max(60.0, h.p95_s) / max(60.0, a.p95_s) for a, h in pairs)
    mean_s = f"mean wait of all {alone.pool.mean_s:.0f} s alone, {home.pool.mean_s:.0f} s pooled"
    return Row(
        what=f"{what}: own p95 wait (60 s at least) in the pool over alone, worst owner; {mean_s}",
        ours=ratio,
        unit="",
        target="at most 1.05",
        met=ratio <= 1.05,
    )


def rows(part: float) -> Iterator[Row]:
    """Yield every row; `part` of the full size."""
    yield from shape("Kueue's baseline", "Kueue (CI, wall)", 351.0, 80.0, kueue_baseline(part))
    yield from shape("KAI's scale test", "KAI (wall)", 398.0, 10.0, kai_scale(part))
    yield gang_placements(part)
    yield from joint_preemptions(part)
    yield from reordering(part)
    yield from waits(part)


def main() -> int:
    """Run everything and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of every load")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    found = []
    for row in rows(QUICK if options.quick else 1.0):
        print(f"{row.what}: {row.ours:.4g} {row.unit}", file=sys.stderr, flush=True)
        found.append(row)
    print_rows(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
