"""`export`: writes the trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.job import Job
from isthmus.data.tokenizer import tokenizer_file
from isthmus.train.messages.exchange import Exchange
from isthmus.train.model.save_weights import export_shard, finish_export
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.update.replicas import Place


def export(job: Job, place: Place, pieces: StagePieces, exchange: Exchange) -> None:
    """Write the first replica's model, one shard per rank; all ranks of the run call this.

    Raises `UnavailableError` if the folder cannot be written.
    """
    output = Path(job.output)
    if place.replica == 0:
        export_shard(StagePieces(pieces.own), output, place.stage)
    exchange.meet()
    if place.replica == 0 and place.stage == 0 and pieces.group.index == 0:
        folder = None if job.data.tokenizer == "bytes" else tokenizer_file(job.data.tokenizer).parent
        finish_export(output, job.model, len(place.ranks), tokenizer_folder=folder)
    exchange.meet()
