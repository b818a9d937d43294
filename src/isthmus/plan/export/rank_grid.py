"""`rank_grid`: a plan as a rank grid, with equal replicas and the same degrees in all stages.

Megatron-LM and torchtitan start the same program on every rank and derive its position from one set of
degrees. A plan fits if all replicas have the same layer split and all stages the same degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isthmus.core.model import Model
from isthmus.core.plan import Plan, Stage
from isthmus.plan.export.incompatibility import Incompatibility
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.search.costs.framework_rules import FrameworkRules, heads_fit

_DEGREES = ("tp", "cp", "cp_kind", "ep", "sp")


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Degrees of parallelism, and `chunk_layers[chunk][stage]`: the number of decoder layers of each model chunk.

    A rank is `((stage * dp + replica) * cp + i) * tp + j`: tensor parallelism varies fastest, stages slowest.
    """

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    sp: bool
    chunk_layers: tuple[tuple[int, ...], ...]

    @property
    def num_chunks(self) -> int:
        """Number of model chunks per stage."""
        return len(self.chunk_layers)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp * self.cp


def rank_grid(plan: Plan) -> RankGrid:
    """Return the rank grid of a plan without `grid_incompatibilities`."""
    stages = plan.pipeline()
    first = stages[0]
    return RankGrid(
        pp=len(stages),
        dp=plan.dp,
        tp=first.tp,
        cp=first.cp,
        ep=first.ep,
        sp=first.sp and first.tp > 1,
        chunk_layers=tuple(zip(*(tuple(b - a for a, b in pieces) for pieces in plan.chunk_layers()), strict=True)),
    )


def grid_incompatibilities(plan: Plan) -> Iterator[Incompatibility]:
    """Yield the properties of a plan that do not fit a rank grid, independent of the framework."""
    splits = [tuple(stage.num_layers for stage in plan.pipeline(replica)) for replica in range(plan.dp)]
    different = next((replica for replica in range(plan.dp) if splits[replica] != splits[0]), None)
    if different is not None:
        a, b = (", ".join(map(str, splits[replica])) for replica in (0, different))
        yield Incompatibility(f"replicas differ: replica 0 has stages of {a} layers, replica {different} of {b}")
    for name in _DEGREES:
        yield from _differing_degrees(plan, name, lambda stage, name=name: getattr(stage, name))  # type: ignore[misc]
    if len(set(plan.replica_micro_batches)) > 1:
        counts = ", ".join(map(str, plan.replica_micro_batches))
        yield Incompatibility(f"replicas process {counts} micro-batches: the numbers must be equal")
    if len(set(plan.replica_micro_batch_sizes)) > 1:
        sizes = ", ".join(map(str, plan.replica_micro_batch_sizes))
        yield Incompatibility(f"replicas have micro-batches of {sizes} samples: the sizes must be equal")
    if plan.warm_up:
        yield Incompatibility(f"a custom warm-up ({', '.join(map(str, plan.warm_up))})")
    small = min(stage.num_layers for stage in plan.stages)
    chunks = plan.num_chunks or 1
    if chunks > small:
        yield Incompatibility(f"a stage of {small} layers cannot be split into {chunks} chunks")


def local_steps_incompatibilities(plan: Plan, reason: str) -> Iterator[Incompatibility]:
    """Yield local steps as an incompatibility, with the reason `reason` of the framework."""
    if plan.local_steps > 1:
        yield Incompatibility(f"replicas average their parameters every {plan.local_steps} steps: {reason}")


def rules_incompatibilities(plan: Plan, model: Model, rules: FrameworkRules) -> Iterator[Incompatibility]:
    """Yield the properties of a plan that violate the rules of a framework, by which the search plans for it."""
    first, num_stages = plan.stages[0], len(plan.pipeline())
    degrees = StageDegrees(tp=first.tp, cp=first.cp, ep=first.ep, sp=first.sp)
    if num_stages > 1 and plan.schedule not in rules.schedules:
        made = ", which lists the order of each stage's computations" if plan.schedule == "searched" else ""
        yield Incompatibility(f"it has no schedule '{plan.schedule}'{made}, only {', '.join(rules.schedules)}")
    if plan.precision not in (None, *rules.precisions):
        yield Incompatibility(f"precision {plan.precision} is not exported", change="set training.precision to bf16")
    if own := {stage.precision for stage in plan.stages} - {None, plan.precision}:
        names = ", ".join(sorted(str(one) for one in own))
        yield Incompatibility(
            f"stages of precision {names}: it has one for all stages", change="remove `precision` of the stages"
        )
    if plan.optimizer_on_host and not rules.host_optimizer:
        yield Incompatibility(
            "the optimizer on the host: it also offloads the weights", change="set training.optimizer_on_host to false"
        )
    if not heads_fit(first.tp, model.num_kv_heads):
        yield Incompatibility(f"tp {first.tp} with {model.num_kv_heads} key and value heads: one must divide the other")
    if model.tied_embeddings and num_stages > 1 and not rules.tied_pipeline:
        yield Incompatibility("tied embedding and head in a pipeline with several stages")
    if plan.sequence_length % rules.sequence_parts(degrees):
        parts = rules.sequence_parts(degrees)
        yield Incompatibility(f"{plan.sequence_length} tokens cannot be split into {parts} equal parts")
    if plan.dp > 1 and num_stages == 1 and plan.micro_batches > 1 and not rules.accumulates_alone:
        yield Incompatibility("replicas without a pipeline: it reduces gradients after each of several micro-batches")
    if plan.zero == 0 and first.cp > 1 and rules.zero_with_cp:
        yield Incompatibility("context parallelism always shards the optimizer")
    if first.ep > plan.dp * first.cp * first.tp:
        yield Incompatibility(f"ep {first.ep} over {plan.dp * first.cp * first.tp} chips of a stage")


def interleaving_incompatibilities(plan: Plan) -> Iterator[Incompatibility]:
    """Yield incomplete micro-batch groups, which the frameworks' interleaved schedules order differently."""
    pp = len(plan.pipeline())
    if (plan.num_chunks or 1) > 1 and plan.micro_batches % pp:
        yield Incompatibility(
            f"{plan.micro_batches} micro-batches do not fill groups of {pp} stages, "
            "and the framework would order the rest differently"
        )


def _differing_degrees(plan: Plan, name: str, value: Callable[[Stage], object]) -> Iterator[Incompatibility]:
    first = plan.stages[0]
    for replica in range(plan.dp):
        for number, stage in enumerate(plan.pipeline(replica)):
            if value(stage) != value(first):
                yield Incompatibility(
                    f"{name} differs by stage: {value(first)} in stage 0 of replica 0, "
                    f"{value(stage)} in stage {number} of replica {replica}"
                )
                return
