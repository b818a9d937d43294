"""`StateToLoad`: what a rank reads of a checkpoint whose replica groups have states of their own, and their mean.

A run whose plan has as many groups as the checkpoint gives each group its own state, bit by bit. Any other number of
groups, one included, starts from the mean of the stored states by the groups' samples: what an average without
momentum would give at that step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import torch

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import StoredShard
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.state_shards import allocate_outer_state, allocate_state
from isthmus.train.update.optimizer import GROUP_SHARES
from isthmus.train.update.ownership import Ownership

MAX_GROUPS = 10_000
_MAX_ROUNDING = 1e-9


class StateToLoad:
    """Memory for the state of parameters of `shapes` (by full-model name) of a rank, and the `shards` that fill it.

    `stored` are the shards in the checkpoint by name. Raises `UnavailableError` if its number of groups is no number.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], ownership: Ownership, stored: Mapping[str, Collection[StoredShard]]
    ) -> None:
        num_stored = _num_groups(stored)
        groups = [ownership.group] if num_stored == ownership.num_groups else range(num_stored)
        states = [allocate_state(shapes, ownership, group) for group in groups]
        self.shards = list(chain.from_iterable(shards for _, shards in states))
        self._states = [tensors for tensors, _ in states]
        self._shares = torch.ones(num_stored, dtype=torch.float64)
        if len(states) > 1:
            self.shards.append(TensorShard.full(GROUP_SHARES, self._shares))
        self._outer: dict[str, torch.Tensor] = {}
        if num_stored > 1 and ownership.num_groups > 1:
            self._outer, shards = allocate_outer_state(shapes, ownership)
            self.shards += shards

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state by `KIND/PARAMETER`, of local shapes, once the shards are filled.

        Raises `UnavailableError` if the shares of the groups are none.
        """
        mean, *others = self._states
        if others:
            if not (bool((self._shares > 0).all()) and abs(float(self._shares.sum()) - 1) < _MAX_ROUNDING):
                raise _refused(f"shares {self._shares.tolist()[:4]}")
            for name, tensor in mean.items():
                if tensor.dim():
                    tensor.mul_(float(self._shares[0]))
                    for share, other in zip(self._shares[1:].tolist(), others, strict=True):
                        tensor.add_(other[name], alpha=share)
        return mean | self._outer


def _num_groups(stored: Mapping[str, Collection[StoredShard]]) -> int:
    """Return the number of replica groups whose states a checkpoint has."""
    if GROUP_SHARES not in stored:
        return 1
    shape = next(iter(stored[GROUP_SHARES])).shape
    if len(shape) != 1 or not 1 <= shape[0] <= MAX_GROUPS:
        raise _refused(f"shares of shape {list(shape)}")
    return shape[0]


def _refused(what: str) -> UnavailableError:
    return UnavailableError(
        f"the checkpoint gives its replica groups {what}",
        hint="it is damaged or forged: remove this checkpoint; a restart takes the one before it",
    )
