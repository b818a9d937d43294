"""`LayerWeights`: called by a stage around each of its parts, so that weights need memory only while used."""

from __future__ import annotations

import torch


class LayerWeights:
    """The weights of a stage, all of which are there.

    The places of a stage are its embedding (0), its layers (from 1), and norm and head.
    """

    def enter(self, place: int) -> None:
        """Provide the weights of `place`, whose forward pass is next."""

    def leave(self, place: int, out: torch.Tensor) -> None:
        """Free the weights of `place`, which returned `out` [samples, tokens, hidden], until its backward."""
