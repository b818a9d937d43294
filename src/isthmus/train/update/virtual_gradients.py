"""`VirtualGradients`: dummy gradients that virtual training reduces between clusters, of the real sizes.

If several clusters hold a layer (replicas, or the two copies of a bidirectional schedule), the runtime's
`GradientReducer` sums its fp32 gradient between them; likewise a tied embedding between the ends of a pipeline.
Reductions inside a cluster are part of the predicted compute time. All segments share one buffer of the size
of a bucket. With local steps gradients are summed inside a replica group, and all parameters over the groups every few
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.plan import ModelProfile, profile_model
from isthmus.train.communication.communicator import Communicator
from isthmus.train.update.buckets import BUCKET_ELEMENTS, HeldRows, ParameterSegment, make_buckets
from isthmus.train.update.gradient_options import GradientOptions
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.local_steps.outer_optimizer import is_average_due
from isthmus.train.update.replica_layout import rank_groups

EMBEDDING, HEAD = "embedding", "head"


class VirtualGradients:
    """One rank's part in the reductions between clusters; `count_parameters` counts a name of `virtual_held_rows`.

    `options` are those of `GradientReducer`.
    """

    def __init__(
        self,
        plan: Plan,
        count_parameters: Callable[[str], int],
        tied: bool,
        rank: int,
        communicator: Communicator,
        options: GradientOptions | None = None,
    ) -> None:
        clusters, groups = plan.rank_clusters, rank_groups(plan)
        held = virtual_held_rows(plan, count_parameters, tied, groups)
        buckets = make_buckets(held, clusters, groups=groups)
        self._reducer = GradientReducer(buckets, rank, communicator, options=options)
        self._local_steps = plan.local_steps
        self._outer: GradientReducer | None = None
        if groups:
            held = one_per_group(virtual_held_rows(plan, count_parameters, tied), groups)
            outer = GradientOptions(wire_format=options.wire_format if options else None)
            self._outer = GradientReducer(make_buckets(held, clusters), rank, communicator, options=outer)
        self._memory = torch.zeros(BUCKET_ELEMENTS if held[rank] else 0)

    def reduce(self, step: int, num_steps: int) -> None:
        """Reduce the shared gradients of `step` (from 0), and average if that is due or it is the last of `num_steps`.

        Raises `PeerError` if a peer is lost.
        """
        self._reducer.reduce(self._view, to_all_owners=True)
        if self._outer is not None and is_average_due(step, num_steps, self._local_steps):
            self._outer.reduce(self._view, to_all_owners=True)

    def close(self) -> None:
        """Free what the sums hold."""
        self._reducer.close()
        if self._outer is not None:
            self._outer.close()

    def _view(self, segment: ParameterSegment) -> torch.Tensor:
        return self._memory[: segment.num_elements]


def virtual_held_rows(
    plan: Plan, count_parameters: Callable[[str], int], tied: bool, groups: Sequence[int] = ()
) -> list[list[HeldRows]]:
    """Return, by rank, the held rows of a virtual plan; names are layer numbers, `EMBEDDING` and `HEAD`.

    Only parameters of several clusters count, and one rank per cluster represents all of its cluster. First
    and last stage hold a tied embedding. `count_parameters` is called only for shared names. Ranks of different
    `groups` (default: all are of one) share nothing.
    """
    places: dict[tuple[int, str], dict[tuple[str, bool], int]] = {}
    for replica in range(plan.dp):
        indices = [i for i, stage in enumerate(plan.stages) if stage.replica == replica]
        for index, pieces in zip(indices, plan.chunk_layers(replica), strict=True):
            rank, cluster = plan.ranks_of(index)[0], plan.stages[index].cluster
            for name, at_end in _gradient_names(pieces, plan.num_layers, tied):
                places.setdefault((groups[rank] if groups else 0, name), {}).setdefault((cluster, at_end), rank)
    held: list[list[HeldRows]] = [[] for _ in plan.ranks]
    for (_, name), ranks in places.items():
        if len(owners := sorted(set(ranks.values()))) > 1:
            size = count_parameters(name)
            for rank in owners:
                held[rank].append(HeldRows(name=name, start=0, stop=size, row_elements=1))
    return held


def one_per_group(held: Sequence[Sequence[HeldRows]], groups: Sequence[int]) -> list[list[HeldRows]]:
    """Return the whole parameters `held` by rank, of which the first rank of each group alone adds to the sum."""
    seen: set[tuple[int, str]] = set()
    found: list[list[HeldRows]] = []
    for of_rank, group in zip(held, groups, strict=True):
        found.append([replace(one, adds=(group, one.name) not in seen) for one in of_rank])
        seen |= {(group, one.name) for one in of_rank}
    return found


def _gradient_names(layer_ranges: Sequence[tuple[int, int]], num_layers: int, tied: bool) -> list[tuple[str, bool]]:
    """Return (name, whether it is the tied embedding of the last stage) of a stage's gradients."""
    found = [(str(layer), False) for first, last in layer_ranges for layer in range(first, last)]
    if any(first == 0 for first, _ in layer_ranges):
        found.append((EMBEDDING, False))
    if any(last == num_layers for _, last in layer_ranges):
        found += [(EMBEDDING, True)] if tied else [(HEAD, False)]
    return found


def parameter_counter(model: Model) -> Callable[[str], int]:
    """Return a function that counts the parameters of a name of `virtual_held_rows`; it profiles `model` on first use.

    The function raises `ModelError` for a model family without a profile.
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
