"""`word_problems`: what a plan's kinds of exchange, kernels, formats and adapters cannot be, and the nearest value."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.plan import Plan, Stage
from isthmus.core.runs.field_problem import FieldProblem
from isthmus.core.runs.planned_sizes import ModelSizes
from isthmus.core.stack import find_stack


def word_problems(plan: Plan) -> Iterator[FieldProblem]:
    """Yield why no run can do what `plan` says beside its degrees, by the plan alone."""
    yield from _sharding_problems(plan)
    if plan.packed_tokens is not None and plan.packed_tokens > plan.sequence_length:
        message = f"documents of {plan.packed_tokens} tokens in sequences of {plan.sequence_length}"
        yield FieldProblem("packed_tokens", plan.packed_tokens, message, f"nearest valid: {plan.sequence_length}")
    if plan.overlap_tp and all(stage.tp == 1 for stage in plan.stages):
        yield FieldProblem("overlap_tp", True, "no stage has tensor parallelism", "nearest valid: leave it out")
    formats = plan.formats
    if formats is not None and formats.gathers is not None and plan.zero == 0:
        message = "without ZeRO no weights are gathered"
        yield FieldProblem("formats.gathers", formats.gathers, message, "nearest valid: zero 1, or leave it out")
    if formats is not None and formats.scales == "row":
        yield from _row_scale_problems(plan)


def _row_scale_problems(plan: Plan) -> Iterator[FieldProblem]:
    """Yield why products have no scale for each row: their precision, or a stack that states no casts for them."""
    hint = "nearest valid: scales tensor, or leave it out"
    if plan.precision is not None and plan.precision != "fp8":
        yield FieldProblem("formats.scales", "row", f"products of {plan.precision} have no scales of rows", hint)
    stack = find_stack(plan.stack)
    if stack.row_scaled is None:
        message = f"stack '{stack.name}' states nothing for products with a scale for each row"
        yield FieldProblem("formats.scales", "row", message, f"{hint}; or a stack with `row_scaled`")


def _sharding_problems(plan: Plan) -> Iterator[FieldProblem]:
    group = plan.sharding
    if group is None:
        return
    if group.replicas is not None and plan.zero == 0:
        message = "sharding.replicas without ZeRO: nothing is sharded"
        yield FieldProblem("sharding.replicas", group.replicas, message, "nearest valid: zero 1, or leave it out")
    elif group.replicas is not None and plan.dp % group.replicas:
        nearest = next(one for one in range(min(plan.dp, group.replicas), 0, -1) if plan.dp % one == 0)
        message = f"groups of {group.replicas} replicas do not divide dp {plan.dp}"
        yield FieldProblem("sharding.replicas", group.replicas, message, f"nearest valid: {nearest}")
    if not group.reshard and plan.zero != 3:
        message = f"ZeRO {plan.zero} gathers no weights that a pass could keep"
        yield FieldProblem("sharding.reshard", False, message, "nearest valid: reshard true, or zero 3")


def stage_word_problems(plan: Plan, stage: Stage, place: str) -> Iterator[FieldProblem]:
    """Yield why a stage cannot do what it says beside its degrees, by the plan alone."""
    modules, offload = stage.recompute_modules, stage.offload
    if modules and stage.recompute != "selective":
        message = f"recompute_modules with recompute '{stage.recompute}'"
        yield FieldProblem(f"{place}.recompute_modules", modules, message, "nearest valid: recompute selective")
    if len(set(modules)) < len(modules):
        hint = f"nearest valid: {', '.join(dict.fromkeys(modules))}"
        yield FieldProblem(f"{place}.recompute_modules", modules, "a module is named twice", hint)
    for part, whole in (("moe_act", "moe"), ("shared_experts", "moe")):
        if part in modules and whole in modules:
            message = f"{whole} repeats {part} already"
            yield FieldProblem(f"{place}.recompute_modules", modules, message, f"nearest valid: leave out {part}")
    if offload is not None and offload.layers is not None and offload.layers > stage.num_layers:
        message = f"activations of {offload.layers} layers move, of {stage.num_layers}"
        yield FieldProblem(f"{place}.offload.layers", offload.layers, message, f"nearest valid: {stage.num_layers}")
    if stage.cp_kind != "gather" and stage.cp == 1:
        message = f"cp_kind {stage.cp_kind} without context parallelism"
        yield FieldProblem(f"{place}.cp_kind", stage.cp_kind, message, "nearest valid: cp 2, or leave it out")
    if plan.experts is not None and plan.experts.dispatcher != "all_to_all" and stage.ep == 1:
        message = f"dispatcher {plan.experts.dispatcher} without expert parallelism"
        yield FieldProblem("experts.dispatcher", plan.experts.dispatcher, message, "nearest valid: all_to_all, or ep 2")


def model_word_problems(plan: Plan, stage: Stage, place: str, sizes: ModelSizes) -> Iterator[FieldProblem]:
    """Yield why a model has not what a stage and its plan name."""
    if stage.cp_kind == "all_to_all" and stage.cp > 1 and sizes.num_heads:
        yield from _head_exchange_problems(stage, place, sizes)
    needs = {
        "moe": sizes.num_experts > 0,
        "moe_act": sizes.num_experts > 0,
        "shared_experts": sizes.has_shared,
        "mla_up_proj": sizes.has_latent,
    }
    for module in stage.recompute_modules:
        if not needs.get(module, True):
            message = f"the model has no module '{module}'"
            hint = f"nearest valid: {', '.join(one for one in stage.recompute_modules if one != module) or 'core_attn'}"
            yield FieldProblem(f"{place}.recompute_modules", module, message, hint)
    if plan.experts is not None and not sizes.num_experts:
        yield FieldProblem("experts", plan.experts, "the model has no experts", "nearest valid: leave it out")
    if plan.lora is not None and sizes.hidden_size and plan.lora.rank > sizes.hidden_size:
        message = f"rank {plan.lora.rank} is above the hidden size, {sizes.hidden_size}"
        yield FieldProblem("lora.rank", plan.lora.rank, message, f"nearest valid: {sizes.hidden_size}")
    if plan.lora is not None and sizes.has_latent:
        missing = [one for one in plan.lora.targets if one in ("k", "v")]
        if missing:
            message = f"latent attention has no product '{missing[0]}'"
            yield FieldProblem("lora.targets", plan.lora.targets, message, "nearest valid: q, o, gate, up, down")


def _head_exchange_problems(stage: Stage, place: str, sizes: ModelSizes) -> Iterator[FieldProblem]:
    """Yield why heads cannot be dealt to the chips of a sequence: each of `tp` x `cp` chips takes whole heads."""

    def deals(cp: int) -> bool:
        return all(heads % (stage.tp * cp) == 0 for heads in (sizes.num_heads, sizes.num_kv_heads or sizes.num_heads))

    if not deals(stage.cp):
        nearest = next((cp for cp in range(stage.cp, 0, -1) if deals(cp)), 1)
        message = (
            f"cp {stage.cp} x tp {stage.tp} does not divide {sizes.num_heads} heads and {sizes.num_kv_heads} key and "
            "value heads, which all_to_all deals"
        )
        yield FieldProblem(f"{place}.cp", stage.cp, message, f"nearest valid: cp {nearest}, or cp_kind ring")
