"""`make_plans`: candidate plans for a job on a pool, fastest first, and why each refused choice was refused.

First version: one chip per pipeline stage, one replica, layers cut exactly for the slowest stage within
memory. Every combination of clusters is tried in every order. What passes is ranked by an estimate, and the
best are run by the simulator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from isthmus.core.job import Job
from isthmus.core.link_physics import effective_bytes_per_s
from isthmus.core.model import Model
from isthmus.core.plan import PlanSet, Refusal, StageTime
from isthmus.core.pool import Cluster, Pool
from isthmus.core.units import format_bytes
from isthmus.plan.candidates import Device, device_chains, eligible_clusters, free_devices, subsets
from isthmus.plan.estimate import (
    MEMORY_FRACTION,
    Crossing,
    Workload,
    crossings,
    iteration_estimate_s,
)
from isthmus.plan.profile import profile_model
from isthmus.plan.split import split_layers
from isthmus.plan.write import Candidate, stage_bytes, write_plan

FINALISTS = 12
"""How many of the best-ranked candidates are simulated."""


def make_plans(
    job: Job,
    model: Model,
    pool: Pool,
    free: Mapping[str, Mapping[str, int]] | None = None,
    *,
    keep: int = 5,
) -> PlanSet:
    """Return up to `keep` plans for `job`, predicted fastest first, and the refused cluster combinations.

    `free` maps cluster and node group to free chips; None plans on an empty pool. A job without any plan gets
    an empty list and the reasons. Raises `ModelError` for a model that cannot be profiled.
    """
    work = Workload(job, profile_model(model))
    devices = {
        cluster.name: free_devices(pool, cluster, job.placement, free)
        for cluster in eligible_clusters(pool, job.placement)
    }
    found: list[Candidate] = []
    refused: list[Refusal] = []
    for subset in subsets(eligible_clusters(pool, job.placement)):
        candidates, reason = _try_subset(work, pool, subset, devices)
        found += candidates
        if not candidates:
            refused.append(Refusal(clusters=tuple(c.name for c in subset), reason=reason))
    found.sort(key=lambda c: (c.estimate_s, len(c.devices)))
    plans = [write_plan(work, candidate) for candidate in _distinct(found)]
    plans.sort(key=lambda plan: (plan.predicted.iteration_s if plan.predicted else 0.0, plan.id))
    return PlanSet(plans=tuple(plans[:keep]), refused=tuple(refused))


def _distinct(found: list[Candidate]) -> list[Candidate]:
    """Return the finalists: the best of each ordered choice of clusters first, then the next best of all."""
    best: dict[tuple[str, ...], Candidate] = {}
    for candidate in found:
        best.setdefault(tuple(dict.fromkeys(d.cluster for d in candidate.devices)), candidate)
    first = list(best.values())[:FINALISTS]
    rest = [candidate for candidate in found if not any(candidate is one for one in first)]
    return first + rest[: FINALISTS - len(first)]


def _try_subset(
    work: Workload, pool: Pool, subset: tuple[Cluster, ...], devices: Mapping[str, tuple[Device, ...]]
) -> tuple[list[Candidate], str]:
    """Return the best candidates of a combination of clusters, or the reason why there is none."""
    placement, names = work.job.placement, tuple(cluster.name for cluster in subset)
    if len({cluster.owner for cluster in subset}) > 1 and not placement.several_owners:
        return [], "the job may not use several owners (placement.several_owners)"
    empty = [name for name in names if not devices[name]]
    if empty:
        return [], f"{', '.join(empty)} has no free chip that the job admits"
    if len(names) > work.profile.num_layers:
        return [], f"the model has {work.profile.num_layers} layers, fewer than {len(names)} clusters"
    reasons: dict[str, None] = {}
    best: list[Candidate] = []
    for order in itertools.permutations(names):
        made, reason = _try_order(work, pool, order, devices)
        best += made
        if reason:
            reasons.setdefault(reason)
    return best, "; ".join(reasons)


def _try_order(
    work: Workload, pool: Pool, order: tuple[str, ...], devices: Mapping[str, tuple[Device, ...]]
) -> tuple[list[Candidate], str]:
    placement = work.job.placement
    max_stages = min(work.profile.num_layers, placement.max_chips or work.profile.num_layers)
    made: list[Candidate] = []
    reason = f"at most {max_stages} chips may be used, fewer than one for each of {len(order)} clusters"
    for number, chain in enumerate(device_chains(devices, order, max_stages)):
        if not placement.mixed_chips and len({device.group.chip for device in chain}) > 1:
            candidate: Candidate | str = "the job may not mix chips (placement.mixed_chips)"
        else:
            candidate = _try_chain(work, pool, chain)
        if isinstance(candidate, Candidate):
            made.append(candidate)
        elif number == 0:
            reason = candidate  # the longest chain: what it lacks, shorter ones lack as well
    made.sort(key=lambda c: (c.estimate_s, len(c.devices)))
    return made[:3], "" if made else reason


def _try_chain(work: Workload, pool: Pool, chain: tuple[Device, ...]) -> Candidate | str:
    hops = crossings(pool, chain)
    if hops and isinstance(hops[0], str):
        return f"no link from {hops[0]} to {hops[1]}"
    hops = tuple(hop for hop in hops if isinstance(hop, Crossing))
    split = _split(work, chain)
    if split is None:
        return _memory_reason(work, chain)
    times = tuple(
        work.stage_time(device, *part, is_last=stage == len(chain) - 1)
        for stage, (device, part) in enumerate(zip(chain, split, strict=True))
    )
    if (narrow := _narrow_link(work, times, hops)) is not None:
        return narrow
    hop_s = [0.0] * (len(chain) - 1)
    for hop in hops:
        seconds = work.message_bytes / effective_bytes_per_s(hop.out, hop.back)
        hop_s[hop.stage] = (hop.out.delay_s + hop.back.delay_s) / 2 + seconds
    estimate_s = iteration_estimate_s(times, hop_s, work.job.training.num_micro_batches)
    return Candidate(devices=chain, split=split, times=times, hops=hops, estimate_s=estimate_s)


def _split(work: Workload, chain: tuple[Device, ...]) -> tuple[tuple[int, int], ...] | None:
    count, layers = len(chain), work.profile.num_layers

    def time_s(stage: int, first: int, last: int) -> float:
        limit = chain[stage].chip.memory_bytes * MEMORY_FRACTION
        if last <= first or stage_bytes(work, count, stage, (first, last)) > limit:
            return math.inf
        time = work.stage_time(chain[stage], first, last, is_last=stage == count - 1)
        return time.forward_s + time.backward_s

    tables = [
        [[time_s(stage, first, last) for last in range(layers + 1)] for first in range(layers)]
        for stage in range(count)
    ]
    found = split_layers(layers, tables, work.job.training.num_micro_batches)
    return None if found is None else found.layers


def _memory_reason(work: Workload, chain: tuple[Device, ...]) -> str:
    count, layers = len(chain), work.profile.num_layers
    even = [(layers * i // count, layers * (i + 1) // count) for i in range(count)]
    needed = sum(stage_bytes(work, count, stage, part) for stage, part in enumerate(even))
    offered = sum(device.chip.memory_bytes for device in chain)
    return (
        f"too little memory: the model needs about {format_bytes(needed)} on {count} chips, "
        f"which have {format_bytes(offered)}, {MEMORY_FRACTION:.0%} of it usable"
    )


def _narrow_link(work: Workload, times: tuple[StageTime, ...], hops: tuple[Crossing, ...]) -> str | None:
    """Return why a link cannot keep up with the pace of the slowest stage, or None if all can."""
    pace_s = max(time.forward_s + time.backward_s for time in times)
    demand_gbps = work.message_bytes * 8 / 1e9 / pace_s
    for hop in hops:
        for link, other in ((hop.out, hop.back), (hop.back, hop.out)):
            offered_gbps = effective_bytes_per_s(link, other) * 8 / 1e9
            if demand_gbps > offered_gbps:
                return (
                    f"the link {link.source} to {link.target} carries {offered_gbps:.3g} Gbit/s; "
                    f"the pipeline needs {demand_gbps:.3g} Gbit/s to keep its pace"
                )
    return None
