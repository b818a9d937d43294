"""`prepare`: builds the model and opens the data set of a rank, before it joins the process group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.units import format_seconds
from isthmus.data import Dataset, open_dataset
from isthmus.train.checkpoint.write_checkpoint import make_folder
from isthmus.train.messages.device import choose_device
from isthmus.train.model.save_weights import make_output
from isthmus.train.model.stage_model import build_stage
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.tensor_parallel.tp_process_group import sharers_of
from isthmus.train.update.replicas import Place


@dataclass(frozen=True)
class Prepared:
    """The model of a rank, and its data set on the first and last stage."""

    pieces: StagePieces
    dataset: Dataset | None


def device_of(spec: WorkerSpec) -> torch.device:
    """Return the device of the worker of `spec`; raises `PlanError` if there is none."""
    virtual = spec.stage_time is not None
    return choose_device(spec.device, virtual=virtual, num_cuda=torch.cuda.device_count())


def prepare(spec: WorkerSpec) -> Prepared:
    """Build the stage and open the data set; raises `InputError` for unusable input."""
    job, training = spec.job, spec.job.training
    make_folder(Path(job.checkpoints.folder))
    make_output(Path(job.output))
    torch.manual_seed(training.seed)
    place, group = Place.of(spec.plan, spec.rank), sharers_of(spec.plan, spec.rank)
    pieces = StagePieces(
        [
            build_stage(
                job.model,
                layers,
                dtype=torch.float32,
                device=device_of(spec),
                seed=training.seed,
                weights="random" if job.task == "pretrain" else "load",
                group=group,
            )
            for layers in spec.plan.pieces(place.replica)[place.stage]
        ],
        spec.plan.num_copies,
    )
    if not (pieces.is_first or pieces.is_last):
        return Prepared(pieces, None)
    dataset = open_dataset(
        job.data, task=job.task, sequence_length=training.sequence_length, seed=training.seed
    )
    dataset.require(num_samples=training.global_batch_size, vocab_size=pieces.vocab_size)
    if training.evaluate_every:
        dataset.validation_batch(1)
    return Prepared(pieces, dataset)


def describe(spec: WorkerSpec, device: str = "") -> str:
    """Return the first line of a worker's log: its layers, cluster, replica and `device` or virtual chip."""
    place = Place.of(spec.plan, spec.rank)
    chunks = spec.plan.pieces(place.replica)[place.stage]
    layers = " and ".join(f"{first} to {end - 1}" for first, end in chunks)
    where = f"rank {spec.rank}: layers {layers} in cluster {spec.cluster}"
    where += f", replica {place.replica} of {spec.plan.dp}" if spec.plan.dp > 1 else ""
    rank = spec.plan.ranks[spec.rank]
    tp_size = len(spec.plan.ranks_of(rank.stage))
    where += f", tensor-parallel rank {rank.tp} of {tp_size}" if tp_size > 1 else ""
    where += f", on {device}" if device else ""
    if spec.stage_time is None:
        return where
    forward, backward = format_seconds(spec.stage_time.forward_s), format_seconds(spec.stage_time.backward_s)
    return f"{where}, on a virtual chip: forward {forward}, backward {backward} per micro-batch"
