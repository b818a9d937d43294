"""`plan_stage_memory`: the memory of one stage of a plan, per chip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from isthmus.core.plan import Plan, Stage
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.core.plan_parts.expert_exchange import ExpertExchange
from isthmus.core.plan_parts.shard_group import ShardGroup
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import StageMemory, combine_copies, stage_memory
from isthmus.plan.profile.component import Recompute
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.planned_profile import stage_profile

_NO_FORMATS, _ALL_REPLICAS, _DEFAULT_EXCHANGE = TensorFormats(), ShardGroup(), ExpertExchange()


def plan_stage_memory(plan: Plan, profile: ModelProfile, stages: Sequence[Stage], index: int) -> StageMemory:
    """Return the memory of stage `index` of a replica with one micro-batch in flight.

    `stages`, (num_stages,), are those of the replica. In a bidirectional schedule the chips hold the layers of
    two stages, and the memory is that of both.
    """
    own = _memory_of_layers(plan, profile, stages, index, index)
    if plan.num_model_copies == 1:
        return own
    return combine_copies(own, _memory_of_layers(plan, profile, stages, index, len(stages) - 1 - index))


def max_in_flight(memory: StageMemory, limit_bytes: float) -> int:
    """Return how many micro-batches in flight fit next to static memory and buffers, at least one.

    `memory` is that of one micro-batch in flight, `limit_bytes` what the allocator may reserve (`memory_limit_bytes`).
    """
    reserved = memory.total_bytes / memory.allocated_bytes if memory.allocated_bytes else 1.0
    free_bytes = limit_bytes - reserved * (memory.static_bytes + memory.buffers_bytes)
    each_bytes = reserved * memory.activations_bytes
    return max(1, int(free_bytes / each_bytes)) if each_bytes > 0 else 1 << 20


def stage_degrees(plan: Plan, stage: Stage) -> StageDegrees:
    """Return the degrees of parallelism of a stage of `plan`; `dp` is `num_reducing_replicas`."""
    dp = num_reducing_replicas(plan, stage.replica)
    formats, group = plan.formats or _NO_FORMATS, plan.sharding or _ALL_REPLICAS
    return StageDegrees(
        tp=stage.tp, cp=stage.cp, ep=stage.ep, dp=dp, sp=stage.sp, zero=plan.zero,
        cp_kind=stage.cp_kind, cp_rates=stage.cp_rates,
        experts=plan.experts or _DEFAULT_EXCHANGE, narrow_dispatch=formats.dispatch == "fp8",
        overlap_tp=plan.overlap_tp, shard_replicas=group.replicas, reshard=group.reshard,
    )  # fmt: skip


def num_reducing_replicas(plan: Plan, replica: int) -> int:
    """Return how many replicas reduce gradients with `replica` (included) every step: all, or its group."""
    if plan.local_steps == 1:
        return plan.dp
    return plan.replica_groups.count(plan.replica_groups[replica])


def weight_element_bytes(plan: Plan) -> int:
    """Return the bytes per element of the weights that compute uses."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def _memory_of_layers(
    plan: Plan, profile: ModelProfile, stages: Sequence[Stage], place: int, index: int
) -> StageMemory:
    """Return the memory of the layers of stage `index` on the chips of stage `place`."""
    stage = stages[place]
    return _cached_stage_memory(
        stage_profile(profile, stage),
        stages[index].layers,
        (index == 0, index == len(stages) - 1),
        (plan.micro_batch_size_of(stage.replica), plan.sequence_length),
        stage_degrees(plan, stage),
        "fp32" if (stage.precision or plan.precision) in ("fp32", "tf32") else "bf16",
        (plan.local_steps > 1, plan.optimizer_on_host, plan.reference_model),
        (stage.recompute, stage.recompute_layers, stage.offload),
        _gradient_share(plan, stage.replica, len(stages)),
    )


def _gradient_share(plan: Plan, replica: int, num_stages: int) -> float:
    """Return the share of a stage's layers whose gradients add up over micro-batches at a time.

    Interleaved chunks take turns by groups of as many micro-batches as stages: with one group, a chunk's gradients are
    reduced before those of the next begin.
    """
    one_group = plan.schedule == "interleaved" and plan.micro_batches_of(replica) <= num_stages
    return 1.0 / (plan.num_chunks or 1) if one_group else 1.0


@lru_cache(maxsize=4096)
def _cached_stage_memory(
    profile: ModelProfile,
    layers: tuple[int, int],
    ends: tuple[bool, bool],
    sizes: tuple[int, int],
    degrees: StageDegrees,
    precision: Literal["fp32", "bf16"],
    optimizer: tuple[bool, bool, bool],
    recompute: tuple[Recompute, int | None, ActivationOffload | None],
    gradient_share: float,
) -> StageMemory:
    """Return the memory of a stage; `optimizer` is (has an outer optimizer, is on the host, has a reference beside it).

    `recompute` is (what is recomputed, in how many layers, what is moved to the host).

    It is cached, because it is independent of the calibration and fits request it repeatedly.
    """
    return stage_memory(
        profile, layers, is_first=ends[0], is_last=ends[1],
        micro_batch_size=sizes[0], sequence_length=sizes[1], in_flight=1, precision=precision,
        degrees=degrees, recompute=recompute[0], recompute_layers=recompute[1], offload=recompute[2],
        outer_optimizer=optimizer[0], optimizer_on_host=optimizer[1], reference_model=optimizer[2],
        gradient_share=gradient_share,
    )  # fmt: skip
