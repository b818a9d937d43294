"""`predict`: the simulated time and memory of a plan on a pool, with uncertainty band and assumptions.

`estimate_s` is the iteration time in closed form, in about a millisecond, for fits, searches and the band.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.core.chip import NARROW_PRECISIONS
from isthmus.core.model import Model
from isthmus.core.plan import Plan, PlanPart
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan import require_possible
from isthmus.core.stack import DEFAULT_STACK, find_stack
from isthmus.plan.memory.memory_limit import device_bytes, memory_limit_bytes, stage_memory_dict
from isthmus.plan.memory.plan_stage_memory import stage_degrees
from isthmus.plan.memory.stage_memory import StageMemory
from isthmus.plan.profile.chosen_stack import chosen_stack
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import DATA_SHEET, Calibration, ChipRates
from isthmus.plan.time.chip_rates import with_chip_rates
from isthmus.plan.time.model_flops import mfu_fraction
from isthmus.plan.time.model_sizes import model_sizes
from isthmus.plan.time.one_f_one_b_estimate import iteration_estimate_s
from isthmus.plan.time.plan_links import share_key, simulated_links
from isthmus.plan.time.replica_reduction import replicas_all_reduce_s
from isthmus.plan.time.replica_schedules import first_equal_replicas, replica_schedule, with_searched_orders
from isthmus.plan.time.stage_costs import StageCost, stage_costs
from isthmus.plan.time.stage_time import HOST_LINK_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S
from isthmus.sim import (
    Interference,
    Replica,
    ReplicaBounds,
    SimulatedLink,
    SimulatedTraining,
    SimulationResult,
    replica_bounds,
    simulate_training,
)

Z_90_PERCENT = 1.645
"""Standard deviations around the mean that contain 90 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class PlanForecast:
    """The predicted time and memory of a plan."""

    plan: str
    """Id of the plan."""
    result: SimulationResult
    """The simulation."""
    tokens: int
    """Tokens per iteration."""
    samples: int
    """Samples per iteration."""
    num_cards: float
    """Number of cards; a card may have several chips."""
    low_s: float
    """Lower end of the 90 % band of the iteration time."""
    high_s: float
    """Upper end of that band."""
    calibration: str
    """Name of the calibration."""
    stages: tuple[StageCost, ...]
    """Costs of the stages of the first replica."""
    assumptions: tuple[str, ...]
    mfu_fraction: float
    """Model FLOPs utilisation: the share of the chips' peak that the model's own operations use."""
    cost: float
    """Price of one iteration, in the pool's currency."""
    memory: tuple[StageMemory, ...]
    """Peak memory of the stages of the first replica, per chip, with all micro-batches in flight."""

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration."""
        return self.result.iteration_s

    @property
    def tgs_tokens_per_card_s(self) -> float:
        """Tokens per card and second; a card with two chips counts once."""
        return self.tokens / self.iteration_s / self.num_cards

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.samples / self.iteration_s

    @property
    def memory_bands(self) -> tuple[tuple[float, float], ...]:
        """Bytes between which each stage's peak of allocated memory lies at 90 %, (num_stages, 2)."""
        spreads = (
            math.exp(Z_90_PERCENT * cost.memory_uncertainty(memory))
            for memory, cost in zip(self.memory, self.stages, strict=True)
        )
        return tuple(
            (memory.allocated_bytes / spread, memory.allocated_bytes * spread)
            for memory, spread in zip(self.memory, spreads, strict=True)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as `isthmus simulate --json` prints it."""
        return {
            "plan": self.plan,
            "iteration_s": self.iteration_s,
            "iteration_low_s": self.low_s,
            "iteration_high_s": self.high_s,
            "tgs_tokens_per_card_s": self.tgs_tokens_per_card_s,
            "samples_per_s": self.samples_per_s,
            "mfu_fraction": self.mfu_fraction,
            "cost": self.cost,
            "stages": [stage.as_dict() for stage in self.result.stages],
            "memory": [
                {
                    **stage_memory_dict(memory, cost.memory_limit_bytes, cost.device_bytes, cost.stack),
                    "allocated_low": low_bytes,
                    "allocated_high": high_bytes,
                }
                for memory, cost, (low_bytes, high_bytes) in zip(
                    self.memory, self.stages, self.memory_bands, strict=True
                )
            ],
            "links": [link.as_dict() for link in self.result.links if link.num_bytes],
            "calibration": self.calibration,
            "assumptions": list(self.assumptions),
        }


def predict(
    plan: Plan,
    pool: Pool,
    model: Model | ModelProfile,
    calibration: Calibration = DATA_SHEET,
    *,
    iterations: int = 1,
    seed: int = 0,
    interference: Mapping[tuple[str, str], Interference] | None = None,
    details: bool = False,
    synchronisation: str | None = None,
) -> PlanForecast:
    """Return the prediction of `plan` on `pool`; `details` adds spans for a trace or a page.

    `interference` adds cross traffic to directions between clusters. `synchronisation` is a strategy that sums
    gradients instead of the sum that the runtime executes. Raises `InputError` for clusters or node
    groups missing in the pool, `PlanError` for a plan that does not fit the model, or for missing links.
    """
    profile = profile_model(model) if isinstance(model, Model) else model
    require_possible(plan, model_sizes(profile), pool)
    run, first = simulate_plan(
        plan,
        pool,
        profile,
        calibration,
        iterations=iterations,
        seed=seed,
        interference=interference,
        details=details,
        synchronisation=synchronisation,
    )
    spread = Z_90_PERCENT * relative_uncertainty(plan, pool, profile, with_chip_rates(calibration, plan, pool))
    return PlanForecast(
        plan=plan.id,
        result=run,
        tokens=plan.num_samples * plan.sequence_length,
        samples=plan.num_samples,
        num_cards=_num_cards(plan, pool),
        low_s=run.iteration_s * math.exp(-spread),
        high_s=run.iteration_s * math.exp(spread),
        calibration=calibration.name,
        stages=first,
        assumptions=(
            *_assumptions(plan, pool, calibration, run),
            *_traffic_notes(plan, pool, interference or {}),
            *((f"gradients are summed by '{synchronisation}'",) if synchronisation and plan.dp > 1 else ()),
        ),
        mfu_fraction=mfu_fraction(plan, pool, profile, plan.precision or "bf16", run.iteration_s),
        cost=_price_per_s(plan, pool) * run.iteration_s,
        memory=tuple(
            cost.memory.with_in_flight(_num_in_flight(cost, done.peak_memory_bytes))
            for cost, done in zip(first, run.stages, strict=False)
        ),
    )


def simulate_plan(
    plan: Plan,
    pool: Pool,
    profile: ModelProfile,
    calibration: Calibration = DATA_SHEET,
    *,
    iterations: int = 1,
    seed: int = 0,
    interference: Mapping[tuple[str, str], Interference] | None = None,
    details: bool = False,
    synchronisation: str | None = None,
) -> tuple[SimulationResult, tuple[StageCost, ...]]:
    """Return only the simulation and the costs of the first replica's stages; the plan must pass `require_possible`."""
    training, first = simulated_training(
        plan, pool, profile, calibration, iterations=iterations, seed=seed, interference=interference,
        synchronisation=synchronisation,
    )  # fmt: skip
    return simulate_training(training, details=details), first


def simulated_training(
    plan: Plan,
    pool: Pool,
    profile: ModelProfile,
    calibration: Calibration = DATA_SHEET,
    *,
    iterations: int = 1,
    seed: int = 0,
    interference: Mapping[tuple[str, str], Interference] | None = None,
    synchronisation: str | None = None,
) -> tuple[SimulatedTraining, tuple[StageCost, ...]]:
    """Return what the simulator takes of a plan that passes `require_possible`, and the costs of its first replica."""
    calibration = with_chip_rates(calibration, plan, pool)
    wires = simulated_links(plan, pool, calibration, dict(interference or {}))
    replicas, first = _replicas(plan, pool, profile, calibration, wires)
    training = SimulatedTraining(
        replicas=replicas, links=wires, transport=plan.transport, iterations=iterations, seed=seed,
        local_steps=plan.local_steps, synchronisation=synchronisation,
    )  # fmt: skip
    return training, first


def pipeline_bounds(plan: Plan, pool: Pool, model: Model, calibration: Calibration = DATA_SHEET) -> ReplicaBounds:
    """Return the closed-form bounds of the replica with the longest critical path. Raises as `predict`."""
    profile = profile_model(model)
    require_possible(plan, model_sizes(profile), pool)
    calibration = with_chip_rates(calibration, plan, pool)
    wires = simulated_links(plan, pool, calibration)
    replicas, _ = _replicas(plan, pool, profile, calibration, wires)
    distinct = {id(one): one for one in replicas}.values()
    return max(replica_bounds(one, wires) for one in distinct)


def with_searched_schedule(
    plan: Plan, pool: Pool, model: Model | ModelProfile, calibration: Calibration = DATA_SHEET
) -> Plan:
    """Return `plan` with a schedule searched for its stages and links, and its orders. Raises as `predict`."""
    profile = profile_model(model) if isinstance(model, Model) else model
    require_possible(plan, model_sizes(profile), pool)
    calibration = with_chip_rates(calibration, plan, pool)
    wires = simulated_links(plan, pool, calibration)
    return with_searched_orders(plan, lambda replica: stage_costs(plan, pool, profile, calibration, replica), wires)


def _replicas(
    plan: Plan,
    pool: Pool,
    profile: ModelProfile,
    calibration: Calibration,
    wires: dict[tuple[str, str], SimulatedLink],
) -> tuple[tuple[Replica, ...], tuple[StageCost, ...]]:
    """Return the replicas of a plan, equal ones as one object, and the costs of the first one's stages."""
    replica_of: dict[int, Replica] = {}
    first: tuple[StageCost, ...] = ()
    first_equal = first_equal_replicas(plan)
    for replica in dict.fromkeys(first_equal):
        costs = stage_costs(plan, pool, profile, calibration, replica)
        first = first or costs
        schedule = replica_schedule(plan, costs, wires, replica)
        replica_of[replica] = Replica(stages=tuple(cost.load for cost in costs), schedule=schedule)
    return tuple(replica_of[replica] for replica in first_equal), first


def _num_in_flight(cost: StageCost, peak_bytes: float) -> int:
    """Return the micro-batches in flight at a simulated peak."""
    each = cost.load.activation_bytes
    return round((peak_bytes - cost.load.static_bytes) / each) if each else 0


def _price_per_s(plan: Plan, pool: Pool) -> float:
    groups = ((stage.num_chips, pool.node_group(stage.cluster, stage.node_group)) for stage in plan.stages)
    return sum(count * group.price_per_chip_hour for count, group in groups) / 3600


def _num_cards(plan: Plan, pool: Pool) -> float:
    chips = ((stage.num_chips, pool.node_group(stage.cluster, stage.node_group)) for stage in plan.stages)
    return sum(count / pool.chip(group).chips_per_card for count, group in chips)


def _assumptions(plan: Plan, pool: Pool, calibration: Calibration, run: SimulationResult) -> tuple[str, ...]:
    fitted = f"{len(calibration.parameters) or 'no'} parameters fitted"
    notes = [f"calibration '{calibration.name}': {fitted}, from {calibration.source}"]
    notes.append("balanced experts; gradients are reduced after the last backward")
    if plan.local_steps > 1:
        notes.append(local_steps_note(plan))
    if plan.optimizer_on_host:
        notes.append(host_update_note())
    stack = chosen_stack(plan)
    if stack.name != DEFAULT_STACK:
        notes.append(f"stack '{stack.name}': {stack.version}")
    stages = [stage for replica in range(plan.dp) for stage in plan.pipeline(replica)]
    for number, (stage, done) in enumerate(zip(stages, run.stages, strict=True)):
        chip = pool.chip(pool.node_group(stage.cluster, stage.node_group))
        chip_bytes = device_bytes(chip)
        limit_bytes = memory_limit_bytes(chip_bytes, stack, stage_degrees(plan, stage))
        if done.peak_memory_bytes > limit_bytes:
            notes.append(
                f"stage {number} needs {done.peak_memory_bytes / 1e9:.1f} GB, more than the "
                f"{limit_bytes / 1e9:.1f} GB usable of {chip.name}'s {chip_bytes / 1e9:.1f} GB"
            )
    for cluster in dict.fromkeys(stage.cluster for stage in stages):
        for group, taken in PlanPart.from_plan(plan, cluster).chips.items():
            available = pool.cluster(cluster).group(group).num_chips
            if taken > available:
                notes.append(f"the plan uses {taken:,} chips of {cluster}/{group}, which has {available:,}")
    return tuple(notes)


def _traffic_notes(plan: Plan, pool: Pool, interference: Mapping[tuple[str, str], Interference]) -> Iterator[str]:
    """Yield what traffic of others does to the plan's links."""
    for (a, b), other in interference.items():
        link = pool.link(a, b)
        if link is None or not {a, b} <= set(plan.clusters):
            yield f"traffic of others from {a} to {b} crosses no link of this plan"
        elif link.link_class == "reserved":
            yield f"traffic of others from {a} to {b} takes nothing: the link's rate is reserved"
        else:
            share = "always" if not other.off_s else f"{other.on_s:g} of every {other.on_s + other.off_s:g} s"
            yield f"traffic of others from {a} to {b}: {other.bytes_per_s * 8 / 1e9:g} Gbit/s, {share}"


def host_update_note() -> str:
    """Return the assumptions about the time of optimizer steps on the host."""
    return (
        f"updates on the host: {HOST_LINK_BYTES_PER_S / 1e9:.0f} GB/s to and from each chip that states no rate and "
        f"{HOST_MEMORY_BYTES_PER_S / 1e9:.0f} GB/s of host memory per chip (assumed, not measured)"
    )


def local_steps_note(plan: Plan) -> str:
    """Return the assumptions about local steps."""
    return (
        f"{max(plan.replica_groups) + 1} groups of replicas average their parameters every "
        f"{plan.local_steps} steps: times and bytes are means per step, without the outer update; "
        "convergence differs from that of a reduction every step"
    )


def estimate_s(plan: Plan, pool: Pool, model: Model | ModelProfile, calibration: Calibration = DATA_SHEET) -> float:
    """Return an estimate of the iteration time in seconds, without simulation.

    The slowest stage or round trip sets a pipeline's pace; replicas wait for the slowest, then reduce
    gradients. All schedules are estimated as 1F1B, plain or interleaved. The plan must pass `require_possible`.
    """
    profile = profile_model(model) if isinstance(model, Model) else model
    calibration = with_chip_rates(calibration, plan, pool)
    wires = simulated_links(plan, pool, calibration)
    slowest_s = 0.0
    for replica in dict.fromkeys(first_equal_replicas(plan)):
        costs = stage_costs(plan, pool, profile, calibration, replica)
        slowest_s = max(slowest_s, _replica_s(costs, wires, plan.micro_batches_of(replica), plan.num_chunks or 1))
    return slowest_s


def forward_pass_s(plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration = DATA_SHEET) -> float:
    """Return an estimate of the seconds of a forward pass over all samples of a step, without simulation.

    Micro-batches follow each other at the pace of the slowest stage. The plan must pass `require_possible`.
    """
    calibration = with_chip_rates(calibration, plan, pool)
    wires = simulated_links(plan, pool, calibration)
    slowest_s = 0.0
    for replica in dict.fromkeys(first_equal_replicas(plan)):
        costs = stage_costs(plan, pool, profile, calibration, replica)
        each_s = [cost.load.forward_s for cost in costs]
        through_s = sum(each_s) + sum(_hop_s(a, b, wires) for a, b in itertools.pairwise(costs))
        filling_s = (through_s - max(each_s)) / (plan.num_chunks or 1)
        slowest_s = max(slowest_s, plan.micro_batches_of(replica) * max(each_s) + filling_s)
    return slowest_s


def _replica_s(
    costs: Sequence[StageCost],
    links: Mapping[tuple[str, str], SimulatedLink],
    micro_batches: int,
    num_chunks: int,
) -> float:
    hops = [_hop_s(a, b, links) for a, b in itertools.pairwise(costs)]
    pipeline_s = iteration_estimate_s([cost.load for cost in costs], hops, micro_batches, num_chunks)
    last_s = max(cost.load.update_s + _reduce_s(cost) for cost in costs)
    return pipeline_s + last_s


def _hop_s(a: StageCost, b: StageCost, links: Mapping[tuple[str, str], SimulatedLink]) -> float:
    if a.load.cluster == b.load.cluster:
        return a.load.hop_s
    wire = links[a.load.cluster, b.load.cluster]
    return wire.delay_s + a.load.boundary_bytes / wire.bytes_per_s


def _reduce_s(cost: StageCost) -> float:
    if cost.num_reducing < 2:
        return 0.0
    return replicas_all_reduce_s(cost.reducing, cost.load.gradient_bytes)


def relative_uncertainty(plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration) -> float:
    """Return the relative uncertainty of the iteration time, from the parameters and the scatter of runs.

    Each parameter is varied by its standard deviation; those of one fit are correlated, others independent.
    """
    effects = parameter_effects(plan, pool, profile, calibration)
    total = calibration.residual**2
    for place, (key, effect) in enumerate(effects):
        total += effect**2
        total += 2 * sum(effect * other * calibration.correlation(key, name) for name, other in effects[:place])
    return math.sqrt(max(total, calibration.residual**2))


def parameter_effects(
    plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration
) -> list[tuple[str, float]]:
    """Return each uncertain parameter with the relative change of the time by one of its standard deviations."""
    base_s, found = estimate_s(plan, pool, profile, calibration), []
    for key in used_parameter_keys(plan, pool, calibration):
        relative = calibration.key_relative(key)
        if relative:
            varied = calibration.with_values({key: calibration.key_value(key) * math.exp(relative)})
            found.append((key, math.log(estimate_s(plan, pool, profile, varied) / base_s)))
    return found


def used_parameter_keys(plan: Plan, pool: Pool, calibration: Calibration) -> tuple[str, ...]:
    """Return the distinct keys of the parameters that a prediction of `plan` uses."""
    chips = {pool.chip(pool.node_group(s.cluster, s.node_group)).name for s in plan.stages}
    unused = set() if plan.precision in NARROW_PRECISIONS else {"narrow_factor"}
    unused |= set() if any(stage.cp > 1 for stage in plan.stages) else {"context_factor"}
    names = [name for name in ChipRates.__dataclass_fields__ if name not in unused]
    keys = [calibration.scoped_key(name, chip) for chip in sorted(chips) for name in names]
    keys += [calibration.scoped_key("stack_factor", find_stack(plan.stack).name), "shape_time"]
    keys += _shape_keys(plan, chips, calibration)
    for replica in range(plan.dp):
        for a, b in plan.hops(replica):
            for x, y in ((a, b), (b, a)):
                link = pool.link(x, y)
                keys += [share_key(calibration, link)] if link else []
                keys.append(calibration.scoped_key("message_s", f"{x}>{y}"))
    return tuple(dict.fromkeys(keys))


def _shape_keys(plan: Plan, chips: set[str], calibration: Calibration) -> list[str]:
    """Return the keys of parts that were measured on these chips at the plan's number of tokens."""
    tokens = {
        round(plan.micro_batch_size * plan.sequence_length / stage_degrees(plan, stage).sequence_parts)
        for stage in plan.stages
    }
    marks = [f":n{number}:" for number in tokens]
    known = [key for key in calibration.parameters if key.partition(":")[0] in chips]
    return [key for key in known if any(mark in key for mark in marks)]
