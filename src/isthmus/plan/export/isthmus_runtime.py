"""`to_isthmus_runtime`: exports a plan to the Isthmus runtime."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from isthmus.core.job import Job
from isthmus.core.model import TRAINABLE_ARCHITECTURES, Model
from isthmus.core.plan import Plan
from isthmus.plan.export.incompatibility import Incompatibility, plan_name, require_compatible
from isthmus.plan.export.plan_export import PlanExport, training_config
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility

NAME = "isthmus"


def to_isthmus_runtime(plan: Plan, model: Model, *, job: Job | None = None) -> PlanExport:
    """Return the export of `plan`: its file without the prediction and fields that the runtime ignores.

    Raises `PlanError` if the runtime cannot run it, `InputError` if job and plan differ in their batches.
    """
    require_compatible(NAME, NAME, plan_name(plan.id), _incompatibilities(plan, model))
    training_config(plan, job)
    overrides: dict[str, object] = {"predicted": None, "model": plan.model or model.path}
    if plan.dp == 1 and all(stage.cp == 1 for stage in plan.stages):
        overrides |= {"zero": 0, "overlap_gradients": False}
    if plan.schedule not in ("interleaved", "searched"):
        overrides |= {"chunks": None}
    kept = plan.model_copy(update=overrides)
    document = kept.as_document()
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
    return PlanExport(framework=NAME, plan=plan.id, text=text)


def _incompatibilities(plan: Plan, model: Model) -> Iterator[Incompatibility]:
    reason = runtime_incompatibility(plan)
    if reason:
        yield Incompatibility(reason)
    for tp in sorted({stage.tp for stage in plan.stages if model.num_kv_heads % stage.tp}):
        reason = f"tp {tp} does not divide the {model.num_kv_heads} key and value heads"
        yield Incompatibility(reason)
    if plan.transport != "buffered":
        yield Incompatibility(f"{plan.transport} messages: the runtime buffers messages")
    if model.architecture not in TRAINABLE_ARCHITECTURES:
        yield Incompatibility(
            f"it does not train {model.architecture}", final="supported: " + ", ".join(TRAINABLE_ARCHITECTURES)
        )
