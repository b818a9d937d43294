"""`PositionCache`: cache of position-dependent layer inputs: positions, rotary embedding, masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

_MASKS = {False: create_causal_mask, True: create_sliding_window_causal_mask}


@dataclass(frozen=True)
class PositionInputs:
    """Position-dependent inputs of decoder layers."""

    # [1, S]
    positions: torch.Tensor | None = None
    # Cosines and sines, each [1, S, D].
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    # Attention masks; True: sliding window.
    masks: dict[bool, torch.Tensor | None] = field(default_factory=dict)


class PositionCache(nn.Module):
    """Caches `PositionInputs` of the latest shape; `windows` are the kinds of mask needed (True: sliding window).

    With `positions` [S], those of the tokens of this rank, attention spans several ranks and makes no masks.

    It is a module so that `rotary` moves with the model.
    """

    def __init__(
        self, config: PretrainedConfig, rotary: nn.Module, windows: Iterable[bool],
        positions: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._config, self.rotary, self._windows = config, rotary, tuple(windows)
        self._positions = positions
        self._last: tuple[object, PositionInputs] = (None, PositionInputs())

    def get(self, hidden: torch.Tensor) -> PositionInputs:
        """Return the inputs for `hidden` `[B, S, *]`; recomputed if shape or dtype changes."""
        key = hidden.shape[:2], hidden.dtype
        if self._last[0] != key:
            with torch.no_grad():
                own = range(hidden.shape[1]) if self._positions is None else self._positions
                positions = torch.tensor(own, device=hidden.device).unsqueeze(0)
                rotation = self.rotary(hidden, position_ids=positions)
                masks = (
                    dict.fromkeys(self._windows)
                    if self._positions is not None
                    else {
                        window: _MASKS[window](
                            config=self._config, inputs_embeds=hidden, attention_mask=None, past_key_values=None
                        )
                        for window in self._windows
                    }
                )
                self._last = key, PositionInputs(positions, rotation, masks)
        return self._last[1]
