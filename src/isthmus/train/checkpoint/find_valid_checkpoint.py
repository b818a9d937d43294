"""`find_valid_checkpoint`: the newest checkpoint on disk that all ranks together find valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from isthmus.train.checkpoint.checkpoint_folder import Manifest, files_are_valid, read_manifests

BroadcastFromFirst = Callable[[Sequence[int]], list[int]]
"""Broadcast the integers of rank 0."""

AllGather = Callable[[torch.Tensor], list[torch.Tensor]]
"""All-gather a tensor; the result is in rank order."""


def find_valid_checkpoint(
    folder: Path, rank: int, num_ranks: int, broadcast: BroadcastFromFirst, all_gather: AllGather
) -> Manifest | None:
    """Return the newest checkpoint whose files all match their checksums; None if there is none.

    All ranks call this. Rank 0 proposes checkpoints; each rank verifies its share of the files.
    """
    offered = read_manifests(folder) if rank == 0 else iter(())
    while True:
        manifest = next(offered, None)
        (step,) = broadcast([0 if manifest is None else manifest.step])
        if step == 0:
            return None
        mine = next((one for one in read_manifests(folder) if one.step == step), None)
        whole = mine is not None and files_are_valid(folder, mine, mine.files[rank::num_ranks])
        if all(bool(one.item()) for one in all_gather(torch.tensor([whole], dtype=torch.uint8))):
            return mine
