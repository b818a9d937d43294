"""Measured values with their models, the prior of parameters, and the posterior that follows (`find_posterior`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Matrix = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class MeasuredValue:
    """A measurement, its shape (an index, None: of no shape), and its model.

    `predict(at, effect)` is the modelled value at the logarithms of the parameters, (num_parameters,), with the
    logarithm of its shape's effect.
    """

    measured: float
    predict: Callable[[Sequence[float], float], float]
    shape: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Means of the parameters' logarithms, (n,), their covariance, (n, n), scatter and deviation of shapes' effects."""

    mean: tuple[float, ...]
    covariance: Matrix
    scatter_std: float
    shape_std: float


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """The most probable logarithms, (n,), with covariance, (n, n), and what was left over."""

    mean: tuple[float, ...]
    covariance: Matrix
    shapes: tuple[float, ...]
    """Effect of each shape, (num_shapes,)."""
    shape_covariance: tuple[tuple[float, ...], ...]
    """Covariance of each shape's effect with the parameters, (num_shapes, n)."""
    shape_variance: tuple[float, ...]
    scatter_std: float
    shape_std: float
    """Deviation of the effects of shapes, seen or not."""
    gradients: Matrix
    """Derivatives of the logarithm of each run's model by the parameters, (num_runs, n)."""
