"""`ActivationOffload`: activations that a stage keeps in host memory between forward and backward."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, PositiveInt


class ActivationOffload(FrozenModel):
    """Activations that a stage moves to host memory after the forward pass and back before the backward pass.

    `layers` are the first layers of the stage whose activations move (default: all). With `overlap` the copies run
    beside the computation of other layers, else after and before it.
    """

    layers: PositiveInt | None = None
    overlap: bool = True

    def num_layers(self, stage_layers: int) -> int:
        """Return the number of layers of a stage of `stage_layers` whose activations move."""
        return stage_layers if self.layers is None else min(self.layers, stage_layers)
