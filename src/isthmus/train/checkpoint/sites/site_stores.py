"""`SiteStores`: which ranks see the same checkpoint folder, found by files and not by names of paths.

A store is a set of ranks that share a folder; its number is its lowest rank, its leader. With one store all ranks
coordinate through the folder; with several, each site keeps its own parts, with copies at other sites.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from isthmus.core.runs.run_folder import CLAIM_FOLDER
from isthmus.train.communication.communicator import Communicator


@dataclass(frozen=True)
class SiteStores:
    """The store of each rank, by rank, and the cluster of each rank."""

    of_rank: tuple[int, ...]
    clusters: tuple[str, ...]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(set(self.of_rank)) <= 1

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each store, ascending."""
        return tuple(sorted(set(self.of_rank)))

    def ranks_of(self, store: int) -> list[int]:
        """Return the ranks of a store, ascending."""
        return [rank for rank, one in enumerate(self.of_rank) if one == store]

    def site(self, store: int) -> str:
        """Return the cluster of a store's leader."""
        return self.clusters[store]


def group_by_sight(sees: Sequence[Sequence[bool]], clusters: Sequence[str]) -> SiteStores:
    """Return the stores of ranks where rank `r` sees the file that rank `s` left if `sees[r][s]`.

    Two ranks share a folder if each sees the other's file, directly or through ranks between.
    """
    store = list(range(len(sees)))
    for rank in range(len(sees)):
        for other in range(rank):
            if sees[rank][other] and sees[other][rank]:
                low, high = sorted((store[rank], store[other]))
                store = [low if one == high else one for one in store]
    return SiteStores(tuple(store), tuple(clusters))


def choose_copy_holders(stores: SiteStores, copies: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that keep copies of each rank's part: one in each of up to `copies` other stores.

    Stores of other clusters come first; among equals the rank with the fewest copies, then the next higher, cyclically.
    """
    size = len(stores.of_rank)
    load = [0] * size
    holders = []
    for rank in range(size):
        chosen: list[int] = []
        while len(chosen) < copies:
            used = {stores.of_rank[one] for one in (rank, *chosen)}
            others = [one for one in range(size) if stores.of_rank[one] not in used]
            if not others:
                break
            near = stores.clusters[rank]
            best = min(others, key=lambda one: (stores.clusters[one] == near, load[one], (one - rank) % size))
            load[best] += 1
            chosen.append(best)
        holders.append(tuple(chosen))
    return tuple(holders)


def find_stores(folder: Path, rank: int, clusters: Sequence[str], communicator: Communicator) -> SiteStores:
    """Return which ranks share `folder`; all ranks call this.

    Each rank leaves a file of a random name and looks for those of the others by name, so that a network file system
    asks its server. A rank that cannot write there shares it with no other.
    """
    if len(clusters) == 1:
        return SiteStores((0,), tuple(clusters))
    nonces = communicator.all_gather(torch.tensor([secrets.randbits(62)], dtype=torch.int64))
    files = [folder / CLAIM_FOLDER / f"seen-{number}-{int(one):x}.tmp" for number, one in enumerate(nonces)]
    try:
        with suppress(OSError):
            files[rank].parent.mkdir(parents=True, exist_ok=True)
            files[rank].touch(exist_ok=False)
        communicator.barrier()
        mine = torch.tensor([number == rank or one.exists() for number, one in enumerate(files)], dtype=torch.uint8)
        sees = [[bool(one) for one in row.tolist()] for row in communicator.all_gather(mine)]
    finally:
        with suppress(OSError):
            files[rank].unlink(missing_ok=True)
    return group_by_sight(sees, clusters)
