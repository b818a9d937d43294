"""`VirtualGradients`: the gradients that a rehearsal sends at the end of a step, as large as training's.

Replicas, and the two copies of a bidirectional schedule, may hold a layer in several clusters: its gradient
(fp32) is then summed between them, by the runtime's own `Reducer`. So is that of a tied embedding between the
ends of a pipeline. What is reduced inside a cluster between replicas is part of the predicted time. Nobody
keeps gradients: all segments show one piece of memory, as large as a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.plan.profile.model_profile import ModelProfile, profile_model
from isthmus.train.messages.exchange import Exchange
from isthmus.train.update.buckets import BUCKET_ELEMENTS, Held, Segment, deal_buckets
from isthmus.train.update.reduce import Reducer

EMBEDDING, HEAD = "embedding", "head"


class VirtualGradients:
    """One rank's part in the sums that cross clusters; `parameters` counts those of a name in `held_by`."""

    def __init__(
        self, plan: Plan, parameters: Callable[[str], int], tied: bool, rank: int, exchange: Exchange
    ) -> None:
        held = held_by(plan, parameters, tied)
        self._reducer = Reducer(deal_buckets(held, plan.rank_clusters), rank, exchange)
        self._memory = torch.zeros(BUCKET_ELEMENTS if held[rank] else 0)

    def reduce(self) -> None:
        """Sum what is shared; raises `PeerError` where a peer was lost."""
        self._reducer.reduce(self._view, everywhere=True)

    def _view(self, segment: Segment) -> torch.Tensor:
        return self._memory[: segment.num_elements]


def held_by(plan: Plan, parameters: Callable[[str], int], tied: bool) -> list[list[Held]]:
    """Return what each rank of a virtual plan answers for, by name: the layers' numbers, `EMBEDDING`, `HEAD`.

    Of what several clusters hold, one rank per cluster answers for all there. A tied embedding is held by the
    first and by the last stage. `parameters` is asked only for what is shared.
    """
    places: dict[str, dict[tuple[str, bool], int]] = {}
    for replica in range(plan.dp):
        indices = [i for i, stage in enumerate(plan.stages) if stage.replica == replica]
        for index, pieces in zip(indices, plan.pieces(replica), strict=True):
            rank, cluster = plan.ranks_of(index)[0], plan.stages[index].cluster
            for name, at_end in _names(pieces, plan.num_layers, tied):
                places.setdefault(name, {}).setdefault((cluster, at_end), rank)
    held: list[list[Held]] = [[] for _ in plan.ranks]
    for name, ranks in places.items():
        if len(owners := sorted(set(ranks.values()))) > 1:
            size = parameters(name)
            for rank in owners:
                held[rank].append(Held(name=name, start=0, stop=size, row_elements=1))
    return held


def _names(pieces: Sequence[tuple[int, int]], num_layers: int, tied: bool) -> list[tuple[str, bool]]:
    """Return the names of a stage's gradients, each with whether it is a tied embedding at the other end."""
    found = [(str(layer), False) for first, last in pieces for layer in range(first, last)]
    if any(first == 0 for first, _ in pieces):
        found.append((EMBEDDING, False))
    if any(last == num_layers for _, last in pieces):
        found += [(EMBEDDING, True)] if tied else [(HEAD, False)]
    return found


def parameters_of(model: Model) -> Callable[[str], int]:
    """Return how many parameters a name of `held_by` has in `model`, whose profile is made when first asked.

    The call raises `ModelError` for a family that has no profile.
    """

    @cache
    def profile_of() -> ModelProfile:
        return profile_model(model)

    def count(name: str) -> int:
        profile = profile_of()
        if name == EMBEDDING:
            return profile.embedding.parameters
        if name == HEAD:
            return profile.head.parameters + profile.final_norm.parameters
        return profile.layers[int(name)].parameters

    return count
