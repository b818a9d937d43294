"""`ReferenceModel`: a frozen copy of the first weights of a rank, which takes the place of the trained ones for a pass.

The penalty of GRPO (arXiv 2402.03300, equation 4) keeps the policy near the model that training began with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.update.optimizer import Optimizer
from isthmus.train.update.sharding.weight_gatherer import KeptRows


class ReferenceModel:
    """The weights of `chunks` as they are now: those of the job's model, before any checkpoint is restored.

    They are kept in host memory until the first pass, then where the trained weights are and as wide; of weights that
    are sharded this rank keeps its rows.
    """

    def __init__(self, chunks: ModelChunks) -> None:
        self._parameters = dict(chunks.global_named_parameters())
        self._first = {name: one.detach().to("cpu", copy=True) for name, one in self._parameters.items()}
        self._placed: dict[str, torch.Tensor] = {}
        self._rows: KeptRows | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy, where the weights are."""
        rows = [] if self._rows is None else [kept for of_name in self._rows.values() for _, kept in of_name]
        return sum(one.nbytes for one in (*self._placed.values(), *rows))

    @contextmanager
    def in_place(self, optimizer: Optimizer) -> Iterator[None]:
        """Let passes compute with the first weights; the trained ones are back at the end, the same memory."""
        self._place(optimizer)
        if optimizer.gatherer is not None and self._rows is not None:
            trained = optimizer.gatherer.swap_rows(self._rows)
            try:
                yield
            finally:
                optimizer.gatherer.swap_rows(trained)
            return
        kept = {name: one.data for name, one in self._parameters.items()}
        for name, one in self._parameters.items():
            one.data = self._placed[name]
        try:
            yield
        finally:
            for name, one in self._parameters.items():
                one.data = kept[name]

    def _place(self, optimizer: Optimizer) -> None:
        """Move the copy to where the trained weights are, once."""
        if not self._first:
            return
        if optimizer.gatherer is not None:
            self._rows = optimizer.gatherer.rows_of(self._first)
        else:
            self._placed = {name: self._first[name].to(one.device, one.dtype) for name, one in self._parameters.items()}
        self._first = {}
