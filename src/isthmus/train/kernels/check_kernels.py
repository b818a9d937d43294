"""`check_kernels`: rejects, before start, kernels that a device, model or plan does not admit."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import torch

from isthmus.core.base_model import TrainingPrecision
from isthmus.core.errors import PlanError
from isthmus.core.job import TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan, Stage
from isthmus.train.kernels.working_precision import WORKING_DTYPES, plan_precisions, stage_precision

FLASH_MAX_HEAD_DIM = 256
"""Widest head of torch's flash kernel for CUDA."""

FLASH_CAPABILITY = (8, 0)
"""First CUDA capability of that kernel (NVIDIA A100)."""

_LEAST_CAPABILITY: dict[TrainingPrecision, tuple[int, int]] = {
    "fp32": (0, 0),
    "fp16": (5, 3),
    "bf16": (8, 0),
    "fp8": (8, 0),
}
"""First CUDA capability whose arithmetic has a precision (CUDA C++ Programming Guide, table of features), or, of `fp8`,
bf16, which computes the same products."""

_COMPILED_SCHEDULES = frozenset({"1f1b", "gpipe", "interleaved", "overlapped"})
"""Schedules that compiled layers run in: a split backward replaces the forward of linear layers."""


@dataclass(frozen=True, kw_only=True)
class DeviceKernels:
    """What decides which kernels a device has."""

    # `cpu` or `cuda`.
    kind: str
    # CUDA compute capability; (0, 0) on a CPU.
    capability: tuple[int, int] = (0, 0)
    # Whether there is a C++ compiler, which compiled layers need on a CPU.
    has_compiler: bool = True

    @classmethod
    def of(cls, device: torch.device) -> DeviceKernels:
        """Return those of a device of this machine."""
        if device.type == "cpu":
            names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
            return cls(kind="cpu", has_compiler=any(shutil.which(one) for one in names if one))
        return cls(kind=device.type, capability=torch.cuda.get_device_capability(device))


def check_kernels(training: TrainingConfig, plan: Plan, model: Model, stage: Stage, device: DeviceKernels) -> None:
    """Raise `PlanError` unless `device`, of `stage`, has the precision, the attention kernel and compiled layers."""
    precision = stage_precision(stage, training.precision)
    _check_precision(precision, plan, training, device)
    _check_attention(training, precision, model, device)
    if stage.cp > 1 and training.attention in ("eager", "flex"):
        raise PlanError(
            f"training.attention is {training.attention} on a stage of cp {stage.cp}, which needs flash kernels",
            hint="set training.attention to sdpa, or cp to 1",
        )
    if training.compile:
        _check_compile(plan, training, model, device)


def _check_precision(precision: TrainingPrecision, plan: Plan, training: TrainingConfig, device: DeviceKernels) -> None:
    least = _LEAST_CAPABILITY[precision]
    if device.kind == "cuda" and device.capability < least:
        raise PlanError(
            f"precision {precision} on a device of CUDA capability {_version(device.capability)}, "
            f"which has it from {_version(least)} on",
            hint="set training.precision to fp16 or fp32, or give the stage such a precision in the plan",
        )
    found = sorted(plan_precisions(plan, training.precision))
    if plan.zero and len({WORKING_DTYPES[one] for one in found}) > 1:
        raise PlanError(
            f"zero {plan.zero} with stages of precision {' and '.join(found)}: replicas share weights of one precision",
            hint="set zero to 0, or give all stages one precision",
        )


def _check_attention(
    training: TrainingConfig, precision: TrainingPrecision, model: Model, device: DeviceKernels
) -> None:
    kernel = training.attention
    if kernel == "flex" and device.kind == "cpu":
        raise PlanError("training.attention is flex, which has no backward pass on a CPU", hint="set it to sdpa")
    if kernel != "flash":
        return
    if model.config.get("sliding_window") and model.config.get("use_sliding_window", True):
        raise PlanError(
            f"training.attention is flash, and {model.path} has a sliding window of {model.config['sliding_window']}, "
            "a mask that torch's flash kernel does not take",
            hint="set training.attention to sdpa or flex",
        )
    if device.kind == "cpu":
        return
    width = int(model.config.get("head_dim") or model.hidden_size // int(model.config["num_attention_heads"]))
    reasons = [
        (precision == "fp32", "precision fp32, and the flash kernel computes in 16 bits"),
        (device.capability < FLASH_CAPABILITY, f"a device of CUDA capability {_version(device.capability)}, below 8.0"),
        (width > FLASH_MAX_HEAD_DIM, f"heads of {width} elements, above {FLASH_MAX_HEAD_DIM}"),
    ]
    for is_lacking, what in reasons:
        if is_lacking:
            raise PlanError(f"training.attention is flash with {what}", hint="set training.attention to sdpa")


def _check_compile(plan: Plan, training: TrainingConfig, model: Model, device: DeviceKernels) -> None:
    tp, cp = max(stage.tp for stage in plan.stages), max(stage.cp for stage in plan.stages)
    partial = sorted({stage.recompute for stage in plan.stages} & {"selective", "moe"})
    experts = model.config.get("num_experts") or model.config.get("num_local_experts")
    reasons = [
        (tp > 1, f"tp {tp}: sums between ranks interrupt a layer's graph", "set tp to 1"),
        (cp > 1, f"cp {cp}: exchanges between ranks interrupt a layer's graph", "set cp to 1"),
        (plan.zero == 3, "zero 3, which frees and gathers the weights of a layer", "set zero to 2"),
        (
            "fp8" in plan_precisions(plan, training.precision),
            "precision fp8, whose products are computed by functions of their own",
            "set training.precision to bf16",
        ),
        (bool(experts), f"{experts} experts: tokens choose them at run time", "train a model without experts"),
        (
            bool(partial),
            f"recompute {', '.join(partial)}, which keeps parts of a layer",
            "set recompute to none or full",
        ),
        (
            plan.schedule not in _COMPILED_SCHEDULES,
            f"schedule {plan.schedule}, which splits the backward pass of a layer",
            f"choose {', '.join(sorted(_COMPILED_SCHEDULES))}",
        ),
        (not device.has_compiler, "a CPU without a C++ compiler", "install g++ or set CXX"),
    ]
    for is_lacking, what, change in reasons:
        if is_lacking:
            raise PlanError(f"training.compile is true with {what}", hint=f"{change}, or set training.compile to false")


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
