"""`write_plan`: simulate a finalist and write it down as a `Plan`, with its prediction and its reasons."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from isthmus.core.plan import Plan, Prediction, Stage, StageTime
from isthmus.core.units import format_seconds
from isthmus.plan.candidates import Device
from isthmus.plan.estimate import COMPUTE_EFFICIENCY, Crossing, Workload, wires
from isthmus.schedule import make_schedule
from isthmus.sim import run_pipeline


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A chain of chips with its layers, before it is simulated."""

    devices: tuple[Device, ...]
    split: tuple[tuple[int, int], ...]
    times: tuple[StageTime, ...]
    hops: tuple[Crossing, ...]
    estimate_s: float


def stage_bytes(work: Workload, count: int, stage: int, part: tuple[int, int]) -> int:
    """Return the memory of one stage of `count` under 1F1B, in bytes."""
    in_flight = min(count - stage, work.job.training.num_micro_batches)
    ends = {"is_first": stage == 0, "is_last": stage == count - 1}
    return math.ceil(work.memory(*part, **ends, in_flight=in_flight).total_bytes)


def write_plan(work: Workload, candidate: Candidate) -> Plan:
    """Simulate a finalist and write it down as a plan."""
    training, count = work.job.training, len(candidate.devices)
    micro_batches = training.num_micro_batches
    schedule = make_schedule("1f1b", count, micro_batches)
    run = run_pipeline(schedule, candidate.times, wires(candidate.hops), work.message_bytes)
    samples = micro_batches * training.micro_batch_size
    cards = sum(1 / device.chip.chips_per_card for device in candidate.devices)
    price = sum(device.group.price_per_chip_hour for device in candidate.devices) / 3600
    hop_gbps = micro_batches * work.message_bytes * 8 / 1e9 / run.step_s
    predicted = Prediction(
        iteration_s=run.step_s,
        tgs_tokens_per_card_s=samples * training.sequence_length / run.step_s / cards,
        samples_per_s=samples / run.step_s,
        peak_memory_bytes=tuple(
            stage_bytes(work, count, stage, part) for stage, part in enumerate(candidate.split)
        ),
        wan_gbps=(hop_gbps,) * len(candidate.hops),
        cost_per_iteration=price * run.step_s,
        stage_times=candidate.times,
        assumptions=_assumptions(candidate),
    )
    stages = tuple(
        Stage(cluster=device.cluster, node_group=device.group.name, layers=part)
        for device, part in zip(candidate.devices, candidate.split, strict=True)
    )
    return Plan(
        id=_plan_id(stages),
        stages=stages,
        micro_batches=micro_batches,
        micro_batch_size=training.micro_batch_size,
        sequence_length=training.sequence_length,
        predicted=predicted,
        why=_why(candidate, run.busy_s, run.waiting_s, hop_gbps),
    )


def _plan_id(stages: tuple[Stage, ...]) -> str:
    """Name a plan by what it is: the same stages have the same id, whenever and wherever it is made."""
    text = ";".join(f"{s.cluster}/{s.node_group}/{s.layers}/{s.tp}" for s in stages)
    return "plan-" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _assumptions(candidate: Candidate) -> tuple[str, ...]:
    notes = [f"computation at {COMPUTE_EFFICIENCY:.0%} of the data sheet's peak, uncalibrated"]
    notes += ["one chip per stage, one replica, 1F1B with blocking exchanges", "links otherwise idle"]
    if any(device.group.virtual for device in candidate.devices):
        notes.append("virtual chips: computation is padded to the predicted time")
    return tuple(notes)


def _why(
    candidate: Candidate, busy_s: tuple[float, ...], waiting_s: tuple[float, ...], hop_gbps: float
) -> str:
    """Say in words what bounds the plan."""
    slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
    device, time = candidate.devices[slowest], candidate.times[slowest]
    share = busy_s[slowest] / (busy_s[slowest] + waiting_s[slowest])
    text = (
        f"stage {slowest} on {device.cluster} ({device.group.chip}) is the slowest: "
        f"{format_seconds(time.forward_s + time.backward_s)} a micro-batch, busy {share:.0%} of the step"
    )
    for hop in candidate.hops:
        text += (
            f"; {hop.out.source} to {hop.out.target} carries {hop_gbps:.3g} of {hop.out.bandwidth_gbps:g} "
            f"Gbit/s at {2e3 * (hop.out.delay_s + hop.back.delay_s) / 2:g} ms round trip"
        )
    return text
