"""`recomputation_arguments`: a plan's recomputation as the `--recompute-...` options of Megatron-LM.

The options apply to all stages: all layers (`uniform`), the first N layers of every stage (`block`), or one
part of every layer (`selective`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.core.plan import Plan, Stage
from isthmus.plan.export.flag import Flag, flag
from isthmus.plan.export.obstacle import Obstacle

_MODULES = {"selective": "core_attn", "moe": "moe"}


def recomputation_obstacles(plan: Plan) -> Iterator[Obstacle]:
    """Yield the properties of a plan's recomputation that the options cannot express."""
    kinds = {stage.recompute for stage in plan.stages if again(stage)}
    remedy = "use the same recomputation in every stage, or run the plan with the Isthmus runtime"
    if len(kinds) > 1:
        yield Obstacle(
            f"stages recompute {' and '.join(sorted(kinds))}: it supports one kind for all", remedy
        )
    elif kinds and kinds != {"full"}:
        part = next((s for s in plan.stages if again(s) < s.num_layers), None)
        if part is not None:
            yield Obstacle(
                f"{next(iter(kinds))} recomputation in {again(part)} of {part.num_layers} layers of a "
                "stage: it supports all layers or none",
                remedy,
            )
    elif kinds and plan.schedule == "interleaved" and any(again(s) < s.num_layers for s in plan.stages):
        yield Obstacle(
            "recomputation of some layers, which it counts by chunk of an interleaved stage", remedy
        )
    elif kinds and _block(plan.stages) is None:
        counts = ", ".join(f"{again(s)} of {s.num_layers}" for s in plan.pipeline())
        yield Obstacle(
            f"recomputed layers differ by stage ({counts}): --recompute-num-layers is one number for all",
            remedy,
        )


def again(stage: Stage) -> int:
    """Return the number of recomputed layers of a stage."""
    if stage.recompute == "none":
        return 0
    return stage.num_layers if stage.recompute_layers is None else stage.recompute_layers


def _block(stages: Sequence[Stage]) -> int | None:
    """Return N if every stage recomputes min(N, its number of layers) layers, else None."""
    most = max(again(stage) for stage in stages)
    return most if all(again(stage) == min(most, stage.num_layers) for stage in stages) else None


def recomputation_arguments(plan: Plan) -> list[Flag]:
    """Return the options for a plan without `recomputation_obstacles`."""
    kind = next((stage.recompute for stage in plan.stages if again(stage)), None)
    if kind is None:
        return []
    if kind != "full":
        return [flag("recompute-granularity", "selective"), flag("recompute-modules", _MODULES[kind])]
    whole = all(again(stage) == stage.num_layers for stage in plan.stages)
    most = 1 if whole else max(again(stage) for stage in plan.stages)
    method = "uniform" if whole else "block"
    return [
        flag("recompute-granularity", "full"),
        flag("recompute-method", method),
        flag("recompute-num-layers", most),
    ]
