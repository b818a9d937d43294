"""`OptimizerState`: exports and imports weights, moments and update counts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from isthmus.core.errors import UnavailableError
from isthmus.train.update.ownership import LocalRows, Ownership
from isthmus.train.update.weight_shard import WeightShard

NamedTensors = dict[str, torch.Tensor]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """The state of `adam`, which updates `shards` of the stage's `working` weights (by full-model name)."""

    def __init__(
        self,
        working: Mapping[str, nn.Parameter],
        shards: Sequence[WeightShard],
        ownership: Ownership,
        adam: torch.optim.AdamW,
    ) -> None:
        self._working, self._shards, self._ownership, self._adam = working, shards, ownership, adam

    def checkpoint_state(self) -> NamedTensors:
        """Return weights, moments and update counts as `KIND/PARAMETER`, for a checkpoint.

        Tensors have the rows that this rank updates, concatenated.
        """
        tensors: NamedTensors = {}
        for name, rows in self._ownership.updated_rows.items():
            shares = [one for one in self._shards if one.name == name]
            states = [self._adam_state(one) for one in shares]
            tensors[f"step/{name}"] = states[0]["step"]
            tensors[f"weight/{name}"] = _concatenate_rows([one.weight.detach() for one in shares], rows)
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = _concatenate_rows([one[moment] for one in states], rows)
        return tensors

    def load_checkpoint_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the state of all parameters of the stage; names as in `checkpoint_state`, tensors with all local rows.

        Raises `UnavailableError` if a tensor has another shape.
        """
        for name, working in self._working.items():
            found = tensors[f"weight/{name}"].shape
            if found != working.shape:
                raise UnavailableError(
                    f"the checkpoint holds '{name}' as {list(found)}, the model as {list(working.shape)}",
                    hint="it belongs to another model; use another checkpoint folder",
                )
            working.detach().copy_(tensors[f"weight/{name}"])
        for one in self._shards:
            one.weight.detach().copy_(one.view_in(tensors[f"weight/{one.name}"]))
            self._adam.state[one.weight] = {
                "step": tensors[f"step/{one.name}"].to(one.weight.device, copy=True),
                **{
                    moment: one.view_in(tensors[f"{moment}/{one.name}"]).to(one.weight.device).clone()
                    for moment in _MOMENTS
                },
            }

    def local_state(self) -> NamedTensors:
        """Return the complete state of this rank: working weights, master weights, moments and counts."""
        tensors = {f"working/{name}": one.detach() for name, one in self._working.items()}
        for number, one in enumerate(self._shards):
            state = self._adam_state(one)
            tensors |= {f"{kind}/{number}": state[kind] for kind in ("step", *_MOMENTS)}
            if not one.is_view_of(self._working[one.name]):
                tensors[f"weight/{number}"] = one.weight.detach()
        return tensors

    def load_local_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore a result of `local_state`, of this or an earlier process; shapes must be equal."""
        for name, working in self._working.items():
            working.detach().copy_(tensors[f"working/{name}"])
        for number, one in enumerate(self._shards):
            if not one.is_view_of(self._working[one.name]):
                one.weight.detach().copy_(tensors[f"weight/{number}"])
            self._adam.state[one.weight] = {
                kind: tensors[f"{kind}/{number}"].to(one.weight.device, copy=True) for kind in ("step", *_MOMENTS)
            }

    def _adam_state(self, shard: WeightShard) -> NamedTensors:
        """Return update count and moments of a weight; zeros before its first update."""
        state: NamedTensors = self._adam.state.get(shard.weight) or {
            "step": torch.zeros((), device=shard.weight.device),
            **{moment: torch.zeros_like(shard.weight) for moment in _MOMENTS},
        }
        return state


def _concatenate_rows(parts: list[torch.Tensor], rows: tuple[LocalRows, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, rows[0].dim)
