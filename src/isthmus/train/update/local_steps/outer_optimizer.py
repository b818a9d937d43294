"""`OuterOptimizer`: SGD with Nesterov momentum on the mean change of the weights of all replica groups.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1.
Groups weigh in the mean by their samples, which is our addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from isthmus.core.job import TrainingConfig
from isthmus.train.update.buckets import ParameterSegment
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.weight_shard import WeightShard

OUTER_KINDS = ("outer_weight", "outer_momentum")
"""What there is of each row beside `STATE_KINDS`: the last average and its momentum, fp32; alike in all groups."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """How a rank takes part in local SGD: `group` is its replica group."""

    # Steps of a group between two averages.
    every: int
    group: int
    # By group its share of the samples of a step; they add up to 1.
    shares: tuple[float, ...]
    # Sums over the buckets of `make_outer_buckets`.
    reducer: GradientReducer


def is_average_due(step: int, num_steps: int, every: int) -> bool:
    """Return whether groups that average `every` few steps do so after `step` (from 0), as after the last."""
    return (step + 1) % every == 0 or step + 1 == num_steps


class OuterOptimizer:
    """The outer optimizer of the weights of `shards`: 8 bytes per parameter that this rank updates."""

    def __init__(self, shards: Sequence[WeightShard], training: TrainingConfig, local: LocalSteps) -> None:
        self.local, self._training, self._shards = local, training, tuple(shards)
        self._tensors: list[dict[str, torch.Tensor]] = [
            {"outer_weight": one.weight.detach().clone(), "outer_momentum": torch.zeros_like(one.weight.detach())}
            for one in shards
        ]
        self._by_weight = {id(one.weight): own for one, own in zip(shards, self._tensors, strict=True)}

    def tensor(self, kind: str, shard: WeightShard) -> torch.Tensor:
        """Return the `kind` (of `OUTER_KINDS`) of a shard, of its shape, by reference."""
        return self._by_weight[id(shard.weight)][kind]

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `KIND/PARAMETER` of local shape; without them the outer optimizer starts from the current weights."""
        for one, tensors in zip(self._shards, self._tensors, strict=True):
            weight, momentum = (state.get(f"{kind}/{one.name}") for kind in OUTER_KINDS)
            tensors["outer_weight"].copy_(one.weight.detach() if weight is None else one.view_in(weight))
            if momentum is None:
                tensors["outer_momentum"].zero_()
            else:
                tensors["outer_momentum"].copy_(one.view_in(momentum))

    def is_due(self, step: int) -> bool:
        """Return whether the groups average after `step`, from 0."""
        return is_average_due(step, self._training.steps, self.local.every)

    def step(self, weight_view: Callable[[ParameterSegment], torch.Tensor]) -> None:
        """Move the last average along the mean change of all groups; the weights of every group become the result.

        `weight_view` returns the weights [num_elements] of a segment of `shards`, as memory. All ranks call this at the
        same step; the weights have the same bits on all of them afterwards.
        """
        share = self.local.shares[self.local.group]
        for one, tensors in zip(self._shards, self._tensors, strict=True):
            one.weight.detach().sub_(tensors["outer_weight"]).mul_(-share)
        self.local.reducer.reduce(weight_view, to_all_owners=True)
        rate, decay = self._training.outer_learning_rate, self._training.outer_momentum
        for one, tensors in zip(self._shards, self._tensors, strict=True):
            change, (average, momentum) = one.weight.detach(), (tensors[kind] for kind in OUTER_KINDS)
            momentum.mul_(decay).add_(change)
            average.add_(change, alpha=-rate).add_(momentum, alpha=-rate * decay)
            change.copy_(average)
