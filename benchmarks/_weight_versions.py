"""Two versions of weights, one step of an optimizer apart, and the entropy of what changed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Halves = NDArray[np.uint16]
Bits = Halves | NDArray[np.uint32]


def to_bf16(values: NDArray[np.float32]) -> Halves:
    """Return the bits [n] of `values` [n] in bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adam_versions(
    num_weights: int, rate: float = 1e-6, seed: int = 0, num_steps: int = 12, *, rounded: bool = True
) -> tuple[Bits, Bits]:
    """Return bits [num_weights] before and after the last of `num_steps` steps of Adam with betas .9 and .999.

    Weights begin as N(0, .02) in float32, gradients are N(0, 1) around a mean of .2 of either sign for each weight, so
    that momentum has something to find. `rounded` weights are sent in bfloat16: a weight changes where it crosses a
    rounding edge. Others are sent in float32.
    """
    numbers = np.random.default_rng(seed)
    weights = numbers.standard_normal(num_weights, np.float32) * np.float32(0.02)
    mean = np.where(numbers.random(num_weights, np.float32) < 0.5, np.float32(-0.2), np.float32(0.2))
    first, second = np.zeros(num_weights, np.float32), np.zeros(num_weights, np.float32)
    before = weights.copy()
    for step in range(1, num_steps + 1):
        gradient = numbers.standard_normal(num_weights, np.float32) + mean
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (gradient * gradient - second)
        before = weights.copy()
        scale = np.float32(rate / (1 - 0.9**step))
        weights -= scale * first / (np.sqrt(second / np.float32(1 - 0.999**step)) + np.float32(1e-8))
    return (to_bf16(before), to_bf16(weights)) if rounded else (before.view(np.uint32), weights.view(np.uint32))


def entropy_bytes(old: Bits, new: Bits) -> float:
    """Return the bytes of an ideal code that knows, of each exponent, the shares of all changes, none included."""
    last = 8 * old.itemsize - 1
    size = old.dtype.type((1 << last) - 1)
    signed = [np.where(bits >> last, -(bits & size).astype(np.int64), bits & size) for bits in (old, new)]
    exponents, steps = (old & size) >> (last - 8), signed[1] - signed[0]
    total = 0.0
    for one in np.unique(exponents):
        _, counts = np.unique(steps[exponents == one], return_counts=True)
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total / 8
