"""What makes a plan impossible, each problem with its reason and the nearest possible value.

`plan_problems` is the one checker of plans, `require_possible` raises what it finds: plan files, `simulate`, `check`,
exports and comparisons call it, and the search checks the degrees that a job fixes with the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan_words import model_word_problems, stage_word_problems, word_problems
from isthmus.core.runs.field_problem import FieldProblem
from isthmus.core.runs.planned_sizes import ModelSizes


def require_possible(plan: Plan, sizes: ModelSizes | None = None, pool: Pool | None = None) -> None:
    """Raise `PlanError` for the first of `plan_problems`."""
    for problem in plan_problems(plan, sizes, pool):
        raise PlanError(f"plan '{plan.id}', {problem.field}: {problem.message}", hint=problem.hint)


def plan_problems(plan: Plan, sizes: ModelSizes | None = None, pool: Pool | None = None) -> Iterator[FieldProblem]:
    """Yield why no chips can run `plan`: by itself, with its model's sizes, on its pool."""
    yield from _schedule_problems(plan)
    yield from word_problems(plan)
    if sizes is not None and plan.num_layers != sizes.num_layers:
        message = f"the plan has {plan.num_layers} layers, the model {sizes.num_layers}"
        yield FieldProblem("stages", plan.num_layers, message, f"the last stage must end at layer {sizes.num_layers}")
    for index, stage in _distinct_stages(plan):
        place = f"stages.{index}"
        yield from _recompute_problems(stage, place)
        yield from stage_word_problems(plan, stage, place)
        if sizes is not None:
            yield from model_word_problems(plan, stage, place, sizes)
            yield from head_problem(f"{place}.tp", stage.tp, sizes)
            yield from expert_problem(f"{place}.ep", stage.ep, sizes)
        yield from _sharing_problems(plan, stage, place)
        if pool is not None:
            yield from _node_problems(stage, place, sizes, pool)


def head_problem(field: str, tp: int, sizes: ModelSizes) -> Iterator[FieldProblem]:
    """Yield why tensor parallelism of `tp` cannot share a layer's heads: each chip takes whole heads, equally many."""
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    if heads and heads % tp:
        message = f"tp {tp} does not divide the {heads} attention heads"
        yield FieldProblem(field, tp, message, f"nearest valid: tp {_nearest_tp(sizes, tp)}")
    elif not _shares_heads(sizes, tp):
        message = f"tp {tp} neither divides the {kv_heads} key and value heads nor is a multiple of them"
        yield FieldProblem(field, tp, message, f"nearest valid: tp {_nearest_tp(sizes, tp)}")


def _shares_heads(sizes: ModelSizes, tp: int) -> bool:
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads or tp
    return not (heads and heads % tp) and not (kv_heads % tp and tp % kv_heads)


def _nearest_tp(sizes: ModelSizes, most: int) -> int:
    return next(tp for tp in range(most, 0, -1) if _shares_heads(sizes, tp))


def expert_problem(field: str, ep: int, sizes: ModelSizes) -> Iterator[FieldProblem]:
    """Yield why expert parallelism of `ep` cannot share a layer's experts."""
    experts = sizes.num_experts
    if ep > 1 and not experts:
        yield FieldProblem(field, ep, f"ep {ep} for a model without experts", "nearest valid: ep 1")
    elif ep > 1 and experts % ep:
        message = f"ep {ep} does not divide the {experts} experts of a layer"
        yield FieldProblem(field, ep, message, f"nearest valid: ep {divisor_below(experts, ep)}")


def divisor_below(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(one for one in range(min(number, most), 0, -1) if number % one == 0)


def _distinct_stages(plan: Plan) -> Iterator[tuple[int, Stage]]:
    """Yield the index and stage of every kind of stage: equal replicas are checked once."""
    seen = set()
    for index, stage in enumerate(plan.stages):
        key = tuple(value for name, value in stage if name != "replica")
        if key not in seen:
            seen.add(key)
            yield index, stage


def _schedule_problems(plan: Plan) -> Iterator[FieldProblem]:
    if plan.schedule in ("interleaved", "searched") and plan.chunks is not None:
        least = min(stage.num_layers for stage in plan.stages)
        alone = any(len(plan.pipeline(replica)) == 1 for replica in range(plan.dp))
        if plan.chunks > least and not alone:
            message = f"{plan.chunks} chunks for a stage of {least} layers: a chunk has at least one"
            yield FieldProblem("chunks", plan.chunks, message, f"nearest valid: chunks {least}")
    if plan.schedule == "dualpipe":
        for replica in range(plan.dp):
            yield from _dualpipe_problems(plan, replica)


def _dualpipe_problems(plan: Plan, replica: int) -> Iterator[FieldProblem]:
    stages, count = len(plan.pipeline(replica)), plan.micro_batches_of(replica)
    field = "replica_micro_batches" if plan.replica_micro_batches else "micro_batches"
    if stages % 2:
        message = f"dualpipe of {stages} stages: mirrored stages come in pairs"
        yield FieldProblem("stages", stages, message, f"nearest valid: {max(2, stages - 1)} stages")
    elif count % 2 or count < 2 * stages:
        message = f"dualpipe of {stages} stages and {count} micro-batches: half of them enter at each end"
        yield FieldProblem(field, count, message, f"nearest valid: {max(2 * stages, count - count % 2)}")


def _recompute_problems(stage: Stage, place: str) -> Iterator[FieldProblem]:
    if stage.recompute_layers is not None and stage.recompute_layers > stage.num_layers:
        message = f"{stage.recompute_layers} recomputed layers of {stage.num_layers}"
        yield FieldProblem(
            f"{place}.recompute_layers", stage.recompute_layers, message, f"nearest valid: {stage.num_layers}"
        )


def _sharing_problems(plan: Plan, stage: Stage, place: str) -> Iterator[FieldProblem]:
    """Yield what chips that share a micro-batch cannot: parts of its tokens, experts over fewer chips than parts."""
    parts = (1 if stage.cp_rates else stage.cp) * (stage.tp if stage.sp else 1)
    if plan.sequence_length % parts:
        shares = f"cp {stage.cp}" + (f" x tp {stage.tp} with sp" if stage.sp else "")
        shares = f"tp {stage.tp} with sp" if stage.cp_rates else shares
        nearest = max(1, plan.sequence_length // parts) * parts
        message = f"{shares} does not divide the {plan.sequence_length} tokens of a sequence"
        hint = f"nearest valid: cp {divisor_below(plan.sequence_length, stage.cp)}, or sequence_length {nearest}"
        yield FieldProblem(f"{place}.cp", stage.cp, message, hint)
    chips = sum(count for count, _ in plan.reducing_replicas(stage).values()) * stage.num_chips
    if stage.ep > 1 and chips % stage.ep:
        message = f"ep {stage.ep} does not divide the {chips} chips that hold these layers in {stage.cluster}"
        yield FieldProblem(f"{place}.ep", stage.ep, message, f"nearest valid: ep {divisor_below(chips, stage.ep)}")


def _node_problems(stage: Stage, place: str, sizes: ModelSizes | None, pool: Pool) -> Iterator[FieldProblem]:
    """Yield why a stage's tensor parallelism does not fit the nodes and the chips of its group."""
    group = pool.node_group(stage.cluster, stage.node_group)
    where, node = f"{stage.cluster}/{stage.node_group}", group.num_linked_chips
    kv_heads = sizes.num_kv_heads if sizes else 0
    if stage.tp > node and kv_heads and kv_heads % stage.tp:
        message = (
            f"tp {stage.tp} crosses the nodes of {where}, which have {node} chips, with {kv_heads} key and value "
            "heads: copies of a head would be exchanged over the network"
        )
        nearest = _nearest_tp(sizes, min(node, stage.tp)) if sizes else node
        yield FieldProblem(f"{place}.tp", stage.tp, message, f"nearest valid: tp {nearest}")
    elif stage.tp > node and stage.tp % node:
        message = f"tp {stage.tp} fills the nodes of {where}, which have {node} chips, in part"
        yield FieldProblem(f"{place}.tp", stage.tp, message, f"nearest valid: tp {stage.tp // node * node}")
