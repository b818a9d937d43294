"""`export_model`: writes the trained model as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.data import export_tokenizer
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_stores import find_stores
from isthmus.train.communication.communicator import Communicator
from isthmus.train.model.gather_full_parameters import give_experts
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.save_weights import export_shard, finish_export
from isthmus.train.process.collect_export import (
    choose_target,
    collect_export,
    move_tokenizer,
    tokenizer_folder,
)
from isthmus.train.process.prepare_stage import JobData
from isthmus.train.process.run_folders import claim_output
from isthmus.train.update.replica_layout import PipelinePosition


def export_model(
    spec: WorkerSpec,
    position: PipelinePosition,
    model_chunks: ModelChunks,
    dataset: JobData | None,
    communicator: Communicator,
) -> None:
    """Write the first replica's model, one shard per rank; all ranks of the run call this.

    The tokenizer and the chat template are those of `dataset`. Where the sites share no output folder, everything
    streams to the site `output_site` of the job, or that of the first stage, whose folder gets the model.

    Raises `UnavailableError` if the folder cannot be written, `InputError` if it belongs to another job now.
    """
    job, output = spec.job, Path(spec.job.output)
    exported, experts = ModelChunks(model_chunks.first_copy), model_chunks.experts
    if _exports(spec, spec.rank):
        claim_output(spec)
        export_shard(exported, output, position.stage)
    elif experts is not None and any(_exports(spec, one) for one in experts.ranks):
        give_experts(exported)
    communicator.barrier()
    writers, group = PipelinePosition.of_rank(spec.plan, 0).ranks, dist.group.WORLD
    stores = find_stores(output, spec.rank, spec.plan.rank_clusters, communicator)
    target = writers[0]
    write_tokenizer = _tokenizer_writer(output, dataset) if spec.rank == writers[0] else partial(move_tokenizer, output)
    if not stores.is_shared and isinstance(group, IsthmusGroup):
        target = choose_target(job.output_site, writers, stores)
        if spec.rank == writers[0] != target:
            _tokenizer_writer(tokenizer_folder(output), dataset)()
        collect_export(output, spec.rank, writers, target, stores, PeerChannel(group.transport))
        communicator.barrier()
    if spec.rank == target:
        finish_export(output, job.model, len(position.ranks), write_tokenizer=write_tokenizer)
    communicator.barrier()


def _exports(spec: WorkerSpec, rank: int) -> bool:
    """Return whether `rank` takes part in the export of its stage: one share of the tokens of the first replica."""
    return spec.plan.stage_of(rank).replica == 0 and spec.plan.ranks[rank].cp == 0


def _tokenizer_writer(output: Path, dataset: JobData | None) -> Callable[[], None]:
    """Return what writes the tokenizer of the first stage to `output`."""
    if dataset is None:
        raise RuntimeError("the first stage has no data set, whose tokenizer the result needs")
    return partial(export_tokenizer, output, dataset.tokenizer, dataset.template)
