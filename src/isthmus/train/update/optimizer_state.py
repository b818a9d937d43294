"""`OptimizerState`: exports and imports weights, moments and update counts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from isthmus.core.errors import UnavailableError
from isthmus.train.update.ownership import Ownership, Rows
from isthmus.train.update.weight_share import WeightShare

Tensors = dict[str, torch.Tensor]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """The state of `adam`, which updates `shares` of the stage's `working` weights (by full-model name)."""

    def __init__(
        self,
        working: Mapping[str, nn.Parameter],
        shares: Sequence[WeightShare],
        ownership: Ownership,
        adam: torch.optim.AdamW,
    ) -> None:
        self._working, self._shares, self._ownership, self._adam = working, shares, ownership, adam

    def told(self) -> Tensors:
        """Return weights, moments and update counts as `KIND/PARAMETER`, for a checkpoint.

        Tensors have the rows that this rank updates, concatenated.
        """
        tensors: Tensors = {}
        for name, rows in self._ownership.updated.items():
            shares = [one for one in self._shares if one.name == name]
            states = [self._of(one) for one in shares]
            tensors[f"step/{name}"] = states[0]["step"]
            tensors[f"weight/{name}"] = _behind_each_other([one.weight.detach() for one in shares], rows)
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = _behind_each_other([one[moment] for one in states], rows)
        return tensors

    def take_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the state of all parameters of the stage; names as in `told`, tensors with all local rows.

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
        for one in self._shares:
            one.weight.detach().copy_(one.of(tensors[f"weight/{one.name}"]))
            self._adam.state[one.weight] = {
                "step": tensors[f"step/{one.name}"].to(one.weight.device, copy=True),
                **{
                    moment: one.of(tensors[f"{moment}/{one.name}"]).to(one.weight.device).clone()
                    for moment in _MOMENTS
                },
            }

    def own(self) -> Tensors:
        """Return the complete state of this rank: working weights, master weights, moments and counts."""
        tensors = {f"working/{name}": one.detach() for name, one in self._working.items()}
        for number, one in enumerate(self._shares):
            state = self._of(one)
            tensors |= {f"{kind}/{number}": state[kind] for kind in ("step", *_MOMENTS)}
            if not one.is_in(self._working[one.name]):
                tensors[f"weight/{number}"] = one.weight.detach()
        return tensors

    def go_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore a result of `own`, of this or an earlier process."""
        for name, working in self._working.items():
            working.detach().copy_(tensors[f"working/{name}"])
        for number, one in enumerate(self._shares):
            if not one.is_in(self._working[one.name]):
                one.weight.detach().copy_(tensors[f"weight/{number}"])
            self._adam.state[one.weight] = {
                kind: tensors[f"{kind}/{number}"].to(one.weight.device, copy=True)
                for kind in ("step", *_MOMENTS)
            }

    def _of(self, share: WeightShare) -> Tensors:
        """Return update count and moments of a weight; zeros before its first update."""
        state: Tensors = self._adam.state.get(share.weight) or {
            "step": torch.zeros((), device=share.weight.device),
            **{moment: torch.zeros_like(share.weight) for moment in _MOMENTS},
        }
        return state


def _behind_each_other(parts: list[torch.Tensor], rows: tuple[Rows, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, rows[0].dim)
