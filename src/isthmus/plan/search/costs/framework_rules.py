"""`FrameworkRules`: what another training framework can run, as data; the search and the exports both obey it.

A framework here starts one program on every rank: replicas are equal, and degrees hold for all stages. The rules
hold what differs between frameworks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from isthmus.core.chip import Chip
from isthmus.core.pool import NodeGroup
from isthmus.plan.memory.stage_degrees import StageDegrees

CUDA_LIBRARIES = frozenset({"nccl", "rccl"})
"""Collective libraries of devices that torch addresses as CUDA devices."""

RecomputeRule = Literal["first_layers", "all_or_none"]


@dataclass(frozen=True, kw_only=True)
class FrameworkRules:
    """What a framework can run."""

    name: str
    key: str
    """Its name in commands: `--for KEY`, `--to KEY`."""
    collective_libraries: Collection[str]
    """Libraries whose devices it runs on; all ranks use one of them."""
    schedules: Mapping[str, str]
    """Schedules of plans by the framework's name for them."""
    recompute: RecomputeRule
    """Layers that a stage may recompute: the first N with one N for all stages, or all layers of all stages."""
    precisions: Collection[str]
    host_optimizer: bool
    """Whether the optimizer may be on the host."""
    experts: bool
    """Whether models with experts are exported."""
    tied_pipeline: bool
    """Whether a pipeline of several stages may have a tied embedding."""
    accumulates_alone: bool
    """Whether replicas of one stage may take several micro-batches in a step."""
    zero_with_cp: bool
    """Whether context parallelism shards the optimizer in any case."""
    splits_by_tp: bool
    """Whether sequence parallelism needs a sequence that tp divides."""

    def runs_on(self, chip: Chip, group: NodeGroup) -> bool:
        """Return whether it can run on a node group: real devices of a library that it supports."""
        return chip.collective_library in self.collective_libraries and group.virtual is None

    def sequence_parts(self, degrees: StageDegrees) -> int:
        """Return the number that must divide the sequence length."""
        return (degrees.tp if self.splits_by_tp and degrees.sp else 1) * (2 * degrees.cp if degrees.cp > 1 else 1)

    def admits_degrees(self, degrees: StageDegrees, sequence_length: int, num_kv_heads: int) -> bool:
        """Return whether a stage may have these degrees."""
        return (
            heads_fit(degrees.tp, num_kv_heads)
            and sequence_length % self.sequence_parts(degrees) == 0
            and (self.experts or degrees.ep == 1)
        )

    def admits_replicas(self, dp: int, num_stages: int, micro_batches: int, degrees: StageDegrees) -> bool:
        """Return whether `dp` replicas of `num_stages` stages may share `micro_batches`."""
        return (
            micro_batches % dp == 0
            and (self.accumulates_alone or num_stages > 1 or dp in (1, micro_batches))
            and (not self.zero_with_cp or degrees.cp == 1 or dp > 1)
            and degrees.ep <= dp * degrees.cp * degrees.tp
        )


def heads_fit(tp: int, num_kv_heads: int) -> bool:
    """Return whether tp ranks can share the key and value heads, each with whole heads or copies of one."""
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0


MEGATRON = FrameworkRules(
    name="Megatron-LM",
    key="megatron",
    collective_libraries=CUDA_LIBRARIES,
    schedules=MappingProxyType({"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}),
    recompute="first_layers",
    precisions=frozenset({"bf16", "fp16", "fp32"}),
    host_optimizer=True,
    experts=True,
    tied_pipeline=True,
    accumulates_alone=True,
    zero_with_cp=False,
    splits_by_tp=False,
)
TORCHTITAN = FrameworkRules(
    name="torchtitan",
    key="torchtitan",
    collective_libraries=CUDA_LIBRARIES,
    schedules=MappingProxyType({"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}),
    recompute="all_or_none",
    precisions=frozenset({"bf16", "fp32"}),
    host_optimizer=False,
    experts=False,
    tied_pipeline=False,
    accumulates_alone=False,
    zero_with_cp=True,
    splits_by_tp=True,
)
FRAMEWORKS: Mapping[str, FrameworkRules] = MappingProxyType({one.key: one for one in (MEGATRON, TORCHTITAN)})
"""The frameworks by key."""
