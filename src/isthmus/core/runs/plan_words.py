"""`stated_words`: what a plan says beside its degrees, which few frameworks can do."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.plan import Plan

_PLAN_WORDS = ("experts", "sharding", "kernels", "formats", "lora", "overlap_tp", "packed_tokens")
_STAGE_WORDS = ("recompute_modules", "offload", "cp_rates")


def stated_words(plan: Plan) -> Iterator[str]:
    """Yield the fields that `plan` or one of its stages states, in a fixed order; `cp_kind` belongs to a degree."""
    yield from (name for name in _PLAN_WORDS if getattr(plan, name) is not None)
    for name in _STAGE_WORDS:
        if any(getattr(stage, name) for stage in plan.stages):
            yield name
    if any(stage.cp > 1 and stage.cp_kind != "gather" for stage in plan.stages):
        yield "cp_kind"
