"""`OptimizerState`: exports and imports weights, moments and update counts of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from isthmus.core.errors import UnavailableError
from isthmus.train.update.buckets import ParameterSegment
from isthmus.train.update.local_steps.outer_optimizer import OUTER_KINDS, OuterOptimizer
from isthmus.train.update.ownership import LocalRows, Ownership
from isthmus.train.update.weight_shard import WeightShard, view_rows

NamedTensors = dict[str, torch.Tensor]
_MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KINDS = ("weight", *_MOMENTS)
"""What there is of each row of a parameter: fp32 weight and moments."""


class OptimizerState:
    """The state of `adam`, which updates `shards` of the stage's `working` weights (by full-model name).

    With `gathers` these are gathered for their use, and have no memory otherwise. With local steps `outer` is the
    optimizer of the averages of all replica groups.
    """

    def __init__(
        self,
        working: Mapping[str, nn.Parameter],
        shards: Sequence[WeightShard],
        ownership: Ownership,
        adam: torch.optim.AdamW,
        outer: OuterOptimizer | None = None,
        *,
        gathers: bool = False,
    ) -> None:
        self._gathers = gathers
        self._working, self._shards, self._ownership, self._adam = working, shards, ownership, adam
        self._outer = outer
        self.kinds = STATE_KINDS if outer is None else (*STATE_KINDS, *OUTER_KINDS)
        """What there is of each row."""
        self._shards_of: dict[str, list[WeightShard]] = {}
        for one in shards:
            self._shards_of.setdefault(one.name, []).append(one)

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
            for kind in self.kinds[len(STATE_KINDS) :]:
                tensors[f"{kind}/{name}"] = _concatenate_rows([self._whole(kind, one) for one in shares], rows)
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
            if not self._gathers:
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
        if self._outer is not None:
            self._outer.load(tensors)

    def local_state(self) -> NamedTensors:
        """Return what this rank snapshots: weights and moments of the rows that it leads, and all update counts.

        Working weights follow from them, and rows that others in the cluster lead come from there (`led_view`).
        """
        tensors = {f"step/{number}": self._adam_state(one)["step"] for number, one in enumerate(self._shards)}
        for name, number, rows in self._led_rows():
            for kind in self.kinds:
                tensors[f"{kind}/{name}/{number}"] = self._rows_of(kind, name, rows)
        return tensors

    def load_local_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore a result of `local_state`, of this or an earlier process; shapes must be equal."""
        for number, one in enumerate(self._shards):
            state = self._adam_state(one)
            self._adam.state[one.weight] = state | {"step": tensors[f"step/{number}"].to(one.weight.device, copy=True)}
        for name, number, rows in self._led_rows():
            for kind in self.kinds:
                self._rows_of(kind, name, rows).copy_(tensors[f"{kind}/{name}/{number}"])

    def segment_view(self, kind: str, segment: ParameterSegment) -> torch.Tensor:
        """Return the `kind` (of `kinds`) of a segment that this rank updates, a view [num_elements]."""
        return self._rows_of(kind, segment.name, self._ownership.locate(segment))

    def _led_rows(self) -> Iterator[tuple[str, int, LocalRows]]:
        """Yield (parameter, number, rows) of the rows that this rank leads."""
        for name, all_rows in self._ownership.led_rows.items():
            yield from ((name, number, rows) for number, rows in enumerate(all_rows))

    def _rows_of(self, kind: str, name: str, rows: LocalRows) -> torch.Tensor:
        """Return `rows` of weight or moment of a parameter, as a view of the shard that has them."""
        for one in self._shards_of[name]:
            if one.rows.at <= rows.at and rows.at + rows.num_rows <= one.rows.at + one.rows.num_rows:
                return view_rows(self._whole(kind, one), replace(rows, at=rows.at - one.rows.at))
        raise KeyError(f"this rank does not update {rows} of {name}")

    def _whole(self, kind: str, shard: WeightShard) -> torch.Tensor:
        """Return the `kind` of a shard, by reference."""
        if kind == "weight":
            return shard.weight.detach()
        if self._outer is not None and kind in OUTER_KINDS:
            return self._outer.tensor(kind, shard)
        if shard.weight not in self._adam.state:
            self._adam.state[shard.weight] = self._adam_state(shard)
        moments: NamedTensors = self._adam.state[shard.weight]
        return moments[kind]

    def _adam_state(self, shard: WeightShard) -> NamedTensors:
        """Return update count and moments of a weight; zeros before its first update."""
        state: NamedTensors = self._adam.state.get(shard.weight) or {
            "step": torch.zeros((), device=shard.weight.device),
            **{moment: torch.zeros_like(shard.weight) for moment in _MOMENTS},
        }
        return state


def _concatenate_rows(parts: list[torch.Tensor], rows: tuple[LocalRows, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, rows[0].dim)
