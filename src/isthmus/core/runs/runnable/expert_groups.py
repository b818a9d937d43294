"""`expert_groups`: the ranks of a plan that share the experts of their layers."""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.core.runs.check_plan import divisor_below


def expert_groups(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the expert group of each rank whose stage has `ep` above 1: `ep` ranks of one cluster, in order.

    A group is inside a stage if `ep` divides its chips. Otherwise it takes, replica by replica, the ranks of stages of
    the same cluster, layers and settings that execute the same schedule, so that all start the same exchanges in the
    same order; micro-batch sizes may differ. Raises `PlanError` if `ep` does not divide their number, or if another
    stage cuts the experts of the same layers by `tp`.
    """
    if plan.compute == "virtual" or all(stage.ep == 1 for stage in plan.stages):
        return {}
    kinds, found = _stages_by_kind(plan), dict[int, tuple[int, ...]]()
    for alike in kinds.values():
        stage = plan.stages[alike[0]]
        if stage.ep == 1:
            continue
        pools = [[one] for one in alike] if stage.num_chips % stage.ep == 0 else [alike]
        for pool in pools:
            ranks = [rank for one in pool for rank in plan.ranks_of(one)]
            if len(ranks) % stage.ep:
                raise _does_not_divide(alike[0], stage.ep, len(ranks), stage.cluster)
            for first in range(0, len(ranks), stage.ep):
                group = tuple(ranks[first : first + stage.ep])
                found |= dict.fromkeys(group, group)
    _check_cuts(plan)
    return found


def _stages_by_kind(plan: Plan) -> dict[tuple[object, ...], list[int]]:
    """Return the stages (indices, replica by replica) that hold the same layers of a cluster and compute alike."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for replica in range(plan.dp):
        numbers = _numbers(plan, replica)
        schedule = len(numbers), plan.micro_batches_of(replica), plan.orders_of(replica)
        for place, (number, chunks) in enumerate(zip(numbers, plan.chunk_layers(replica), strict=True)):
            settings = plan.stages[number].model_dump_json(exclude={"replica", "node_group"})
            kinds.setdefault((settings, chunks, place, schedule), []).append(number)
    return kinds


def _check_cuts(plan: Plan) -> None:
    """Raise `PlanError` if one stage deals out the experts of a layer by `ep` and another slices them by `tp`."""
    dealt: dict[int, int] = {}
    held = [
        (number, layer)
        for replica in range(plan.dp)
        for number, chunks in zip(_numbers(plan, replica), plan.chunk_layers(replica), strict=True)
        for first, end in chunks
        for layer in range(first, end)
    ]
    for number, layer in held:
        if plan.stages[number].ep > 1:
            dealt.setdefault(layer, number)
    for number, layer in held:
        stage = plan.stages[number]
        if layer in dealt and stage.ep == 1 and stage.tp > 1:
            raise PlanError(
                f"stage {number} has tp {stage.tp} and ep 1, and stage {dealt[layer]} deals out the experts of layer "
                f"{layer} by ep {plan.stages[dealt[layer]].ep}",
                hint=f"give stage {number} an ep above 1, or tp 1",
            )


def _numbers(plan: Plan, replica: int) -> list[int]:
    return [number for number, stage in enumerate(plan.stages) if stage.replica == replica]


def _does_not_divide(number: int, ep: int, chips: int, cluster: str) -> PlanError:
    return PlanError(
        f"stage {number} has ep {ep}, which does not divide the {chips} chips of cluster {cluster} that hold its "
        "layers and execute the same schedule",
        hint=f"nearest valid: ep {divisor_below(chips, ep)}; a group of experts stays inside a cluster",
    )
