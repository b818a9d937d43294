"""Initialise the weights of a model that trains from scratch, each tensor independently of its location.

Values depend only on (seed, full name, shape), so every pipeline split on every chip starts from the same
model. The generator is numpy's PCG64, because torch's gives different values on different processors.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch

_SLICE_ELEMENTS = 1 << 24
"""Elements drawn at a time (64 MiB in fp32), which bounds temporary memory."""


def initialise_parameter(
    name: str, parameter: torch.Tensor, *, seed: int, std: float, zero_row: int | None = None
) -> None:
    """Fill `parameter`, named `name` in the full model and of its full shape, in place.

    Norm weights are 1 and biases 0; all others are normal with mean 0 and standard deviation `std` (the
    configuration's `initializer_range`). `zero_row`, the embedding row of the padding token, is set to 0.
    """
    values = parameter.detach()
    if name.endswith(".bias"):
        values.zero_()
    elif values.dim() == 1:
        values.fill_(1.0)
    else:
        _fill_normal(values.view(-1), _generator(name, seed), std)
    if zero_row is not None:
        values[zero_row].zero_()


def _generator(name: str, seed: int) -> np.random.Generator:
    key = blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))


def _fill_normal(flat: torch.Tensor, generator: np.random.Generator, std: float) -> None:
    for start in range(0, flat.numel(), _SLICE_ELEMENTS):
        part = flat[start : start + _SLICE_ELEMENTS]
        drawn = torch.from_numpy(generator.standard_normal(part.numel(), dtype=np.float32))
        part.copy_(drawn.mul_(std))
