"""`StagePieces`: the pieces of a model that one rank holds, one per chunk of an interleaved schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from isthmus.train.stage_model import StageModel


class StagePieces:
    """One `StageModel` per chunk, in the order of their layers; most stages have a single one."""

    def __init__(self, models: Sequence[StageModel]) -> None:
        self.models = tuple(models)

    @property
    def first(self) -> StageModel:
        """The piece that comes first in the model."""
        return self.models[0]

    @property
    def is_first(self) -> bool:
        """Whether the model's embedding is here."""
        return self.models[0].is_first

    @property
    def is_last(self) -> bool:
        """Whether the model's last norm and head are here."""
        return bool(self.models[-1].is_last)

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
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return self.first.vocab_size

    def recomputed(self, num_layers: int) -> tuple[int, ...]:
        """Return how many layers of each piece are among the rank's first `num_layers`."""
        counts = []
        for model in self.models:
            counts.append(min(num_layers, model.layers[1] - model.layers[0]))
            num_layers -= counts[-1]
        return tuple(counts)

    def global_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once with its name in the whole model."""
        for model in self.models:
            yield from model.global_named_parameters()
