"""`recompute_arguments`: a plan's recomputation as the `--recompute-...` options of Megatron-LM.

The options apply to all stages: all layers (`uniform`), the first N layers of every stage (`block`), or one
part of every layer (`selective`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.core.plan import Plan, Stage
from isthmus.plan.export.flag import Flag, flag
from isthmus.plan.export.incompatibility import Incompatibility

_MODULES = {"selective": "core_attn", "moe": "moe"}


def recompute_incompatibilities(plan: Plan) -> Iterator[Incompatibility]:
    """Yield the properties of a plan's recomputation that the options cannot express."""
    kinds = {stage.recompute for stage in plan.stages if num_recomputed_layers(stage)}
    if len(kinds) > 1:
        yield Incompatibility(f"stages recompute {' and '.join(sorted(kinds))}: it supports one kind for all")
    elif len({stage.recompute_modules for stage in plan.stages}) > 1:
        yield Incompatibility("stages recompute other modules: it has one list for all")
    elif kinds and kinds != {"full"}:
        part = next((s for s in plan.stages if num_recomputed_layers(s) < s.num_layers), None)
        if part is not None:
            yield Incompatibility(
                f"{next(iter(kinds))} recomputation in {num_recomputed_layers(part)} of {part.num_layers} layers of a "
                "stage: it supports all layers or none",
            )
    elif kinds and plan.schedule == "interleaved" and any(num_recomputed_layers(s) < s.num_layers for s in plan.stages):
        yield Incompatibility("recomputation of some layers, which it counts by chunk of an interleaved stage")
    elif kinds and _common_block_size(plan.stages) is None:
        counts = ", ".join(f"{num_recomputed_layers(s)} of {s.num_layers}" for s in plan.pipeline())
        yield Incompatibility(
            f"recomputed layers differ by stage ({counts}): --recompute-num-layers is one number for all",
        )


def num_recomputed_layers(stage: Stage) -> int:
    """Return the number of recomputed layers of a stage."""
    if stage.recompute == "none":
        return 0
    return stage.num_layers if stage.recompute_layers is None else stage.recompute_layers


def _common_block_size(stages: Sequence[Stage]) -> int | None:
    """Return N if every stage recomputes min(N, its number of layers) layers, else None."""
    most = max(num_recomputed_layers(stage) for stage in stages)
    return most if all(num_recomputed_layers(stage) == min(most, stage.num_layers) for stage in stages) else None


def recompute_arguments(plan: Plan) -> list[Flag]:
    """Return the options for a plan without `recompute_incompatibilities`."""
    kind = next((stage.recompute for stage in plan.stages if num_recomputed_layers(stage)), None)
    if kind is None:
        return []
    if kind != "full":
        modules = plan.stages[0].recompute_modules if kind == "selective" else ()
        return [flag("recompute-granularity", "selective"), flag("recompute-modules", *(modules or (_MODULES[kind],)))]
    whole = all(num_recomputed_layers(stage) == stage.num_layers for stage in plan.stages)
    most = 1 if whole else max(num_recomputed_layers(stage) for stage in plan.stages)
    method = "uniform" if whole else "block"
    return [
        flag("recompute-granularity", "full"),
        flag("recompute-method", method),
        flag("recompute-num-layers", most),
    ]
