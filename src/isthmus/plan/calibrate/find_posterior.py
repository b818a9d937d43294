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
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.plan.calibrate.posterior import MeasuredValue, Posterior, Prior

EVIDENCE_ROUNDS = 5
"""Most rounds of: fit, then estimate scatter and shapes' deviation from its residuals."""

MAX_SOLVER_STEPS = 12
"""Maximum number of solver steps of a round."""

DEGREES_OF_FREEDOM = 4.0
"""Of the Student-t distribution of the scatter."""

SCATTER_PER_SCALE = 1.3
"""Scatter over the scale of that distribution: as many runs are within 1.645 times the scatter, 90 %, as if normal."""

INFORMATION = 0.6
"""Weight of a run's likelihood: with it, runs of normal scatter inform as much as a normal likelihood says."""

MIN_SCATTER = 0.01
"""Least relative error that is assumed for any measured or modelled time."""

SCATTER_PRIOR_RUNS = 3.0
"""Number of runs that the prior scatter, and the prior deviation of shapes, counts as."""

DERIVATIVE_STEP = 1e-3
"""Change of an unknown from which the derivatives of the models are taken."""

MAX_STEP = 1.0
"""Most that an unknown, a logarithm, moves in one step."""

Vector = NDArray[np.float64]


def find_posterior(runs: Sequence[MeasuredValue], prior: Prior) -> Posterior:
    """Return the posterior of `runs`, with positive measurements, under `prior`."""
    found = _PosteriorMaximum(runs, prior)
    for _ in range(EVIDENCE_ROUNDS):
        before = found.scatter_std, found.shape_std
        found.solve()
        found.update_scales()
        after = found.scatter_std, found.shape_std
        if all(abs(math.log(a / b)) < 0.05 for a, b in zip(before, after, strict=True)):
            break
    return found.posterior()


class _PosteriorMaximum:
    """The posterior of `runs` at its present point; the unknowns are the parameters' logarithms, then shapes' effects.

    `solve` moves the point to the maximum, `update_scales` learns from what is left over.
    """

    def __init__(self, runs: Sequence[MeasuredValue], prior: Prior) -> None:
        self._runs, self._prior = runs, prior
        self._num_parameters = len(prior.mean)
        self._num_shapes = 1 + max((run.shape for run in runs if run.shape is not None), default=-1)
        self._prior_mean = np.array([*prior.mean, *[0.0] * self._num_shapes])
        self._prior_precision = np.linalg.inv(np.array(prior.covariance))
        self.scatter_std = max(prior.scatter_std, MIN_SCATTER)
        self.shape_std = max(prior.shape_std, 1e-3)
        self._at = self._prior_mean.copy()
        self._errors = self._log_errors(self._at)
        self._rows: Vector | None = None

    def solve(self) -> None:
        """Move to the maximum of the posterior for the present scatter."""
        damping_factor, cost = 1e-3, self._cost(self._at, self._errors)
        for _ in range(MAX_SOLVER_STEPS):
            # Step 1: linearise at the current point.
            curvature, gradient = self._normal_equations()
            # Step 2: raise the damping until a step lowers the cost.
            for _ in range(8):
                damped = curvature + damping_factor * np.diag(np.diag(curvature))
                trial = self._at - np.clip(np.linalg.solve(damped, gradient), -MAX_STEP, MAX_STEP)
                errors = self._log_errors(trial)
                trial_cost = self._cost(trial, errors)
                if trial_cost <= cost:
                    break
                damping_factor *= 6
            else:
                return
            # Step 3: accept the step, lower the damping, and stop once the cost has converged.
            has_converged = cost - trial_cost < 1e-3 * (1 + cost)
            self._at, self._errors, self._rows = trial, errors, None
            cost, damping_factor = trial_cost, damping_factor / 4
            if has_converged:
                return

    def update_scales(self) -> None:
        """Estimate scatter and deviation of shapes: squares left over, per run that no parameter has used up."""
        covariance, precision = self._covariance(), self._precision()
        num_determined = len(self._at) - float(np.sum(covariance * precision))
        left = float(np.sum(_weights(self._errors / self._scale) * self._errors**2))
        known = SCATTER_PRIOR_RUNS * (max(self._prior.scatter_std, MIN_SCATTER) / SCATTER_PER_SCALE) ** 2
        num_free = max(0.0, len(self._runs) - num_determined) + SCATTER_PRIOR_RUNS
        self.scatter_std = max(MIN_SCATTER, SCATTER_PER_SCALE * math.sqrt((left + known) / num_free))
        if self._num_shapes:
            effects, variances = self._at[self._num_parameters :], np.diag(covariance)[self._num_parameters :]
            squares = float(np.sum(effects**2 + variances)) + SCATTER_PRIOR_RUNS * self._prior.shape_std**2
            self.shape_std = max(1e-3, math.sqrt(squares / (self._num_shapes + SCATTER_PRIOR_RUNS)))

    def posterior(self) -> Posterior:
        """Return the posterior at the present point."""
        covariance, n = self._covariance(), self._num_parameters
        return Posterior(
            mean=tuple(self._at[:n].tolist()),
            covariance=covariance[:n, :n].tolist(),
            shapes=tuple(self._at[n:].tolist()),
            shape_covariance=tuple(map(tuple, covariance[n:, :n].tolist())),
            shape_variance=tuple(np.diag(covariance)[n:].tolist()),
            scatter_std=self.scatter_std,
            shape_std=self.shape_std,
            gradients=self._derivatives()[:, :n].tolist(),
        )

    @property
    def _scale(self) -> float:
        """Scale of the distribution of the scatter."""
        return self.scatter_std / SCATTER_PER_SCALE

    def _precision(self) -> Vector:
        """Return the prior's precision, (num_unknowns, num_unknowns)."""
        n = self._num_parameters
        found = np.eye(len(self._prior_mean)) / self.shape_std**2
        found[:n, :n] = self._prior_precision
        return found

    def _log_errors(self, at: Vector) -> Vector:
        """Return log(modelled / measured) of each run, (num_runs,)."""
        parameters, effects = at[: self._num_parameters].tolist(), at[self._num_parameters :].tolist()
        return np.array(
            [
                math.log(run.predict(parameters, 0.0 if run.shape is None else effects[run.shape]) / run.measured)
                for run in self._runs
            ]
        )

    def _cost(self, at: Vector, errors: Vector) -> float:
        """Return minus twice the logarithm of the posterior: Student's loss of the runs, squares of the prior."""
        away = at - self._prior_mean
        return float(INFORMATION * np.sum(_losses(errors / self._scale)) + away @ self._precision() @ away)

    def _derivatives(self) -> Vector:
        """Return the derivatives of the errors at the present point, (num_runs, num_unknowns)."""
        if self._rows is not None:
            return self._rows
        n, found = self._num_parameters, np.zeros((len(self._runs), len(self._at)))
        for index in range(n):
            moved = self._at.copy()
            moved[index] += DERIVATIVE_STEP
            found[:, index] = (self._log_errors(moved) - self._errors) / DERIVATIVE_STEP
        if self._num_shapes:
            moved = self._at.copy()
            moved[n:] += DERIVATIVE_STEP  # each run has one shape: all of them are moved at once
            by_shape = (self._log_errors(moved) - self._errors) / DERIVATIVE_STEP
            for row, run in enumerate(self._runs):
                if run.shape is not None:
                    found[row, n + run.shape] = by_shape[row]
        self._rows = found
        return found

    def _normal_equations(self) -> tuple[Vector, Vector]:
        """Return curvature and gradient of half the cost at the present point."""
        precision, rows = self._precision(), self._derivatives()
        weights = INFORMATION * _weights(self._errors / self._scale) / self._scale**2
        curvature = precision + rows.T @ (weights[:, None] * rows)
        return curvature, precision @ (self._at - self._prior_mean) + rows.T @ (weights * self._errors)

    def _covariance(self) -> Vector:
        """Return the covariance at the present point (Laplace), (num_unknowns, num_unknowns)."""
        found = np.linalg.inv(self._normal_equations()[0])
        return (found + found.T) / 2


def _losses(errors: Vector) -> Vector:
    """Return minus twice the logarithm of Student's density at errors in scales, (num_runs,)."""
    return (DEGREES_OF_FREEDOM + 1) * np.log1p(errors**2 / DEGREES_OF_FREEDOM)


def _weights(errors: Vector) -> Vector:
    """Return the weight of errors in scales, relative to one without scatter, (num_runs,)."""
    return (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + errors**2)
