"""`StagePieces`: the model chunks of one rank, one per virtual stage of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from isthmus.train.model.recompute import Recomputation
from isthmus.train.model.stage_model import StageModel
from isthmus.train.tensor_parallel.parameter_slices import Slice
from isthmus.train.tensor_parallel.tensor_group import TensorGroup


class StagePieces:
    """The chunks of one rank; most schedules have one chunk per rank.

    With `num_copies` 2 (bidirectional schedule) the second half of the chunks belongs to a second model copy.
    An embedding and a tied head on the same rank are one parameter.
    """

    def __init__(self, models: Sequence[StageModel], num_copies: int = 1) -> None:
        self.models = tuple(models)
        self.own = self.models[: len(self.models) // num_copies]
        for head in self.models:
            if self.tied and head.is_last and not head.is_first and self.is_first:
                head.lm_head.weight = next(one for one in models if one.is_first).model.embed_tokens.weight

    @property
    def first(self) -> StageModel:
        """Chunk 0."""
        return self.models[0]

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the embedding."""
        return any(model.is_first for model in self.models)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the final norm and the head."""
        return any(model.is_last for model in self.models)

    @property
    def tells_loss(self) -> bool:
        """Whether this rank reports the loss: it holds the head of the first model copy."""
        return any(model.is_last for model in self.own)

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one parameter."""
        return bool(self.models[0].tied)

    @property
    def architecture(self) -> str:
        """Class name of the model."""
        return str(self.first.architecture)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.first.device

    @property
    def group(self) -> TensorGroup:
        """The tensor-parallel group of the stage."""
        return self.first.group

    @property
    def slices(self) -> dict[str, Slice]:
        """This rank's slice of each parameter, by full-model name."""
        return {name: held for model in self.models for name, held in model.slices.items()}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return self.first.vocab_size

    def again(self, again: Recomputation) -> tuple[Recomputation, ...]:
        """Return the policy of each chunk; `again` covers this rank's layers of each model copy."""
        if again.num_layers is None:
            return (again,) * len(self.models)
        counts: list[int] = []
        for number, model in enumerate(self.models):
            before = sum(counts[number - number % len(self.own) :])  # layers of earlier chunks of this copy
            counts.append(min(again.num_layers - before, model.layers[1] - model.layers[0]))
        return tuple(Recomputation(again.kind, count) for count in counts)

    def global_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once with its full-model name."""
        seen: set[int] = set()
        for model in self.models:
            for name, parameter in model.global_named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
