"""The precision that a stage computes in, and that of the messages between stages."""

from __future__ import annotations

import torch

from isthmus.core.base_model import TrainingPrecision
from isthmus.core.plan import Plan, Stage

WORKING_DTYPES: dict[TrainingPrecision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Dtype of the weights that a stage computes with; master weights are fp32, and `fp8` casts for each product."""


def stage_precision(stage: Stage, of_job: TrainingPrecision) -> TrainingPrecision:
    """Return the precision of a stage: its own, or that of the job."""
    return stage.precision or of_job


def plan_precisions(plan: Plan, of_job: TrainingPrecision) -> frozenset[TrainingPrecision]:
    """Return the precisions of all stages."""
    return frozenset(stage_precision(stage, of_job) for stage in plan.stages)


def message_dtype(plan: Plan, of_job: TrainingPrecision) -> torch.dtype:
    """Return the dtype of hidden states and their gradients between stages: fp32 if stages differ."""
    dtypes = {WORKING_DTYPES[one] for one in plan_precisions(plan, of_job)}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
