"""Storage of a job at the clusters of its stages: data set, checkpoints, model files.

Counts `checkpoints.keep` checkpoints (weights, optimizer) and one being written; the weight files of the
result and, unless it pretrains, of the initial model; the data set at the first and last stage's clusters.
"""

from __future__ import annotations

from isthmus.core.base_model import TrainingPrecision
from isthmus.core.job import Job
from isthmus.core.plan import Plan, Stage
from isthmus.plan import ModelProfile

WEIGHT_BYTES: dict[TrainingPrecision, int] = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4}
OPTIMIZER_BYTES: dict[TrainingPrecision, int] = {"bf16": 12, "fp16": 12, "fp8": 12, "fp32": 8}
"""Bytes per parameter: Adam's two moments in fp32, and with weights of 16 bits the fp32 master copy."""


def checkpoint_bytes(stage: Stage, job: Job, profile: ModelProfile) -> int:
    """Return the bytes of all checkpoints of a stage's layers."""
    each = WEIGHT_BYTES[job.training.precision] + OPTIMIZER_BYTES[job.training.precision]
    return _num_parameters(stage, profile) * each * (job.checkpoints.keep + 1)


def model_bytes(stage: Stage, job: Job, profile: ModelProfile) -> int:
    """Return the bytes of the model files of a stage's layers."""
    copies = 1 if job.task == "pretrain" else 2
    return _num_parameters(stage, profile) * WEIGHT_BYTES[job.training.precision] * copies


def storage_bytes_by_stage(plan: Plan, job: Job, profile: ModelProfile) -> tuple[int, ...]:
    """Return the bytes that each stage adds at its cluster; replicas of a stage share their files."""
    kept: set[tuple[str, tuple[int, int]]] = set()
    read: set[str] = set()
    found = []
    for stage in plan.stages:
        here, num_bytes = (stage.cluster, stage.layers), 0
        if here not in kept:
            num_bytes = checkpoint_bytes(stage, job, profile) + model_bytes(stage, job, profile)
        ends = stage.layers[0] == 0 or stage.layers[1] == plan.num_layers
        if ends and stage.cluster not in read:
            num_bytes += job.data.max_bytes or 0
            read.add(stage.cluster)
        kept.add(here)
        found.append(num_bytes)
    return tuple(found)


def _num_parameters(stage: Stage, profile: ModelProfile) -> int:
    first, last = stage.layers
    total = sum(layer.parameters for layer in profile.layers[first:last])
    if first == 0:
        total += profile.embedding.parameters
    if last == profile.num_layers:
        total += profile.final_norm.parameters + profile.head.parameters
        if profile.tied_embeddings and first > 0:
            total += profile.embedding.parameters
    return total
