"""`find_whole`: the newest checkpoint on disk that all ranks together find valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from isthmus.train.checkpoint.checkpoint_folder import Manifest, is_whole, manifests

FromFirst = Callable[[Sequence[int]], list[int]]
"""Broadcast the integers of rank 0."""

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""All-gather a tensor; the result is in rank order."""


def find_whole(
    folder: Path, rank: int, num_ranks: int, from_first: FromFirst, gather: Gather
) -> Manifest | None:
    """Return the newest checkpoint whose files all match their checksums; None if there is none.

    All ranks call this. Rank 0 proposes checkpoints; each rank verifies its share of the files.
    """
    offered = manifests(folder) if rank == 0 else iter(())
    while True:
        manifest = next(offered, None)
        (step,) = from_first([0 if manifest is None else manifest.step])
        if step == 0:
            return None
        mine = next((one for one in manifests(folder) if one.step == step), None)
        whole = mine is not None and is_whole(folder, mine, mine.files[rank::num_ranks])
        if all(bool(one.item()) for one in gather(torch.tensor([whole], dtype=torch.uint8))):
            return mine
