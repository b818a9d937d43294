"""`LayerGathering`: weights that are gathered layer by layer, one layer ahead of its use, and freed after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from isthmus.train.model.layer_weights import LayerWeights
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.update.sharding.weight_gatherer import WeightGatherer


def layer_gathering(gatherer: WeightGatherer | None, chunks: ModelChunks) -> LayerGathering | None:
    """Return what gathers the weights of a stage that has the whole model, for which the model will call it.

    None for other stages, which gather all of theirs once a step, and for weights that are not sharded.
    """
    (first, *others) = chunks.chunks
    if gatherer is None or others or not (first.is_first and first.is_last):
        return None
    first.layer_weights = LayerGathering(gatherer, first.names_by_place())
    return first.layer_weights


class LayerGathering(LayerWeights):
    """The weights of a whole model in one stage; `names` are those of each place, the last one with the head.

    A forward pass gathers and frees place by place, a backward pass in the opposite order. Head and norm stay from the
    forward to the backward pass, which follows; the backward pass of an embedding needs no weights.
    """

    def __init__(self, gatherer: WeightGatherer, names: Sequence[Collection[str]]) -> None:
        self._gatherer, self._names = gatherer, tuple(names)
        self.most_bytes = 0
        """Most bytes of weights that were gathered or under way at a time."""

    @property
    def places(self) -> tuple[Collection[str], ...]:
        """Return the names of the weights of each place; those of a tied head are in the first place and the last."""
        return self._names

    def enter(self, place: int) -> None:
        """Gather the weights of `place`, and start to gather those of the next one."""
        self._gatherer.gather(self._names[place])
        if place + 1 < len(self._names):
            self._gatherer.start(self._names[place + 1])
        self.most_bytes = max(self.most_bytes, self._gatherer.num_bytes)

    def leave(self, place: int, out: torch.Tensor) -> None:
        """Free the weights of `place` until the gradient of its result `out` [samples, tokens, hidden] is known."""
        if place + 1 < len(self._names) or not out.requires_grad:
            self._gatherer.release(self._names[place])
        if out.requires_grad:
            out.register_hook(lambda _: self._enter_backward(place))

    def repeat_forward(self, times: int) -> None:
        """Take part in `times` forward passes of other ranks, without computing."""
        for _ in range(times):
            for place in range(len(self._names)):
                self.enter(place)
                self._gatherer.release(self._names[place])

    def _enter_backward(self, place: int) -> None:
        """Free the place after `place`, whose backward pass is done; gather `place`, and start the one before it."""
        if place + 1 < len(self._names):
            self._gatherer.release(self._names[place + 1])
        if place > 0:
            self._gatherer.gather(self._names[place])
            if place > 1:
                self._gatherer.start(self._names[place - 1])
        self.most_bytes = max(self.most_bytes, self._gatherer.num_bytes)
