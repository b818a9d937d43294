"""`prepare_stage`: builds the model and opens the data set of a rank, before it joins the process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.runs.runnable.expert_groups import expert_groups
from isthmus.core.units import format_seconds
from isthmus.data import Dataset, PromptSet
from isthmus.train.communication.torch_device import choose_device
from isthmus.train.context_parallel.cp_process_group import make_cp_group
from isthmus.train.expert_parallel.ep_process_group import make_ep_group
from isthmus.train.kernels.linear_products import BlockScaledProducts, LinearProducts
from isthmus.train.kernels.scaled_product_kernel import find_scaled_product
from isthmus.train.kernels.working_precision import stage_precision
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.process.run_folders import check_resume, claim_run_folders
from isthmus.train.tensor_parallel.tp_process_group import make_tp_group
from isthmus.train.update.replica_layout import PipelinePosition

JobData = Dataset | PromptSet
"""The data of a job: samples to predict, or prompts to answer."""


@dataclass(frozen=True)
class PreparedStage:
    """The model of a rank, and the data that its method needs there."""

    model_chunks: ModelChunks
    dataset: JobData | None


def worker_device(spec: WorkerSpec) -> torch.device:
    """Return the device of the worker of `spec`; raises `PlanError` if there is none."""
    virtual = spec.stage_time is not None
    return choose_device(spec.device, virtual=virtual, num_cuda=torch.cuda.device_count())


def prepare_stage(spec: WorkerSpec, open_data: Callable[[WorkerSpec, ModelChunks], JobData | None]) -> PreparedStage:
    """Claim the job's folders, build the stage and call `open_data`; raises `InputError` for unusable input."""
    job, training = spec.job, spec.job.training
    claim_run_folders(spec)
    check_resume(spec)
    torch.manual_seed(training.seed)
    products = _stage_products(spec)
    place, group = PipelinePosition.of_rank(spec.plan, spec.rank), make_tp_group(spec.plan, spec.rank)
    context, experts = make_cp_group(spec.plan, spec.rank), make_ep_group(spec.plan, spec.rank)
    pieces = ModelChunks(
        [
            build_stage(
                job.model,
                layers,
                dtype=torch.float32,
                device=worker_device(spec),
                seed=training.seed,
                weights="random" if job.task == "pretrain" else "load",
                group=group,
                attention=training.attention,
                compiled=training.compile,
                context=context,
                experts=experts,
                products=products,
            )
            for layers in spec.plan.chunk_layers(place.replica)[place.stage]
        ],
        spec.plan.num_model_copies,
    )
    return PreparedStage(pieces, open_data(spec, pieces))


def _stage_products(spec: WorkerSpec) -> LinearProducts | None:
    """Return the products of the layers of a stage of precision fp8, and say where no kernel computes them."""
    if stage_precision(spec.stage, spec.job.training.precision) != "fp8":
        return None
    device = worker_device(spec)
    kernel = find_scaled_product(device)
    if kernel is None:
        print(
            f"rank {spec.rank}: fp8: {device} has no kernel for products in blocks; computes them in bf16", flush=True
        )
    return BlockScaledProducts(kernel)


def describe_rank(spec: WorkerSpec, device: str = "") -> str:
    """Return the first line of a worker's log: its layers, cluster, replica and `device` or virtual chip."""
    place = PipelinePosition.of_rank(spec.plan, spec.rank)
    chunks = spec.plan.chunk_layers(place.replica)[place.stage]
    layers = " and ".join(f"{first} to {end - 1}" for first, end in chunks)
    where = f"rank {spec.rank}: layers {layers} in cluster {spec.cluster}"
    where += f", replica {place.replica} of {spec.plan.dp}" if spec.plan.dp > 1 else ""
    rank = spec.plan.ranks[spec.rank]
    stage = spec.plan.stages[rank.stage]
    if len(spec.plan.ranks_of(rank.stage)) > 1:
        where += f", tensor-parallel rank {rank.tp} of {stage.tp}" if stage.tp > 1 else ""
        where += f", context-parallel rank {rank.cp} of {stage.cp}" if stage.cp > 1 else ""
    group = expert_groups(spec.plan).get(spec.rank, ())
    where += f", expert-parallel rank {group.index(spec.rank)} of {len(group)}" if group else ""
    where += f", on {device}" if device else ""
    if spec.stage_time is None:
        return where
    forward, backward = format_seconds(spec.stage_time.forward_s), format_seconds(spec.stage_time.backward_s)
    return f"{where}, on a virtual chip: forward {forward}, backward {backward} per micro-batch"
