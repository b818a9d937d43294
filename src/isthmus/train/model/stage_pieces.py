"""`StagePieces`: the pieces of a model that one rank holds, one per chunk of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from isthmus.train.model.recompute import Recomputation
from isthmus.train.model.stage_model import StageModel
from isthmus.train.tensor_parallel.parameter_slices import Slice
from isthmus.train.tensor_parallel.tensor_group import TensorGroup


class StagePieces:
    """One `StageModel` per chunk; most stages have a single one.

    With `num_copies` 2 (a bidirectional schedule) the second half of them are of a second copy of the model.
    An embedding and a tied head on one rank are one parameter.
    """

    def __init__(self, models: Sequence[StageModel], num_copies: int = 1) -> None:
        self.models = tuple(models)
        self.own = self.models[: len(self.models) // num_copies]
        for head in self.models:
            if self.tied and head.is_last and not head.is_first and self.is_first:
                head.lm_head.weight = next(one for one in models if one.is_first).model.embed_tokens.weight

    @property
    def first(self) -> StageModel:
        """The piece of chunk 0."""
        return self.models[0]

    @property
    def is_first(self) -> bool:
        """Whether the model's embedding is here."""
        return any(model.is_first for model in self.models)

    @property
    def is_last(self) -> bool:
        """Whether the model's last norm and head are here."""
        return any(model.is_last for model in self.models)

    @property
    def tells_loss(self) -> bool:
        """Whether the first copy of the model ends here: of two ends one speaks."""
        return any(model.is_last for model in self.own)

    @property
    def tied(self) -> bool:
        """Whether the model's head and embedding are one parameter."""
        return bool(self.models[0].tied)

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return str(self.first.architecture)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.first.device

    @property
    def group(self) -> TensorGroup:
        """The ranks that share the stage's tensors."""
        return self.first.group

    @property
    def slices(self) -> dict[str, Slice]:
        """What this rank holds of each parameter, by its name in the whole model."""
        return {name: held for model in self.models for name, held in model.slices.items()}

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return self.first.vocab_size

    def again(self, again: Recomputation) -> tuple[Recomputation, ...]:
        """Return what is computed again of each piece, given what is of each copy's layers here."""
        if again.num_layers is None:
            return (again,) * len(self.models)
        counts: list[int] = []
        for place, model in enumerate(self.models):
            before = sum(counts[place - place % len(self.own) :])
            counts.append(min(again.num_layers - before, model.layers[1] - model.layers[0]))
        return tuple(Recomputation(again.kind, count) for count in counts)

    def global_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once with its name in the whole model."""
        seen: set[int] = set()
        for model in self.models:
            for name, parameter in model.global_named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
