"""`find_posterior`: the most probable parameters for measured runs, their covariance, and the scatter of the runs.

The model of a measurement is log(measured) = log(modelled at the parameters) + effect of its shape + scatter. The
logarithms of the parameters have a normal prior, so parameters stay positive; effects of shapes have a common, unknown
standard deviation. Scatter is Student-t, so that single runs which differ much hardly count. The maximum of the
posterior is found by Gauss-Newton with Levenberg-Marquardt damping; the inverse curvature there is the covariance
(Laplace). Scatter and shapes' deviation follow from the evidence: what the effective number of parameters leaves over.
Source: D. MacKay, "Bayesian interpolation", Neural Computation 4 (1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EVIDENCE_ROUNDS = 5
"""Most rounds of: fit, then estimate scatter and shapes' deviation from its residuals."""

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


def find_posterior(runs: Sequence[MeasuredValue], prior: Prior) -> Posterior:
    """Return the posterior of `runs`, with positive measurements, under `prior`."""
    from isthmus.plan.calibrate.posterior_maximum import PosteriorMaximum  # numpy: 0.1 s that only a fit needs

    found = PosteriorMaximum(runs, prior)
    for _ in range(EVIDENCE_ROUNDS):
        before = found.scatter_std, found.shape_std
        found.solve()
        found.update_scales()
        after = found.scatter_std, found.shape_std
        if all(abs(math.log(a / b)) < 0.05 for a, b in zip(before, after, strict=True)):
            break
    return found.posterior()
